"""The order in which terms are added: neighbours first, ((0 + 1) + (2 + 3)) + ((4 + 5) + ..).

It depends on the number of terms alone: not on how a block lies in registers, nor on which kernel adds. A tree of as
many terms, a power of two, is a branch of the tree of twice as many. What a term that isn't there counts as must change
no sum: -0.0, or 0.0 where no term is negative.
"""

import triton
import triton.language as tl


@triton.jit
def along(x, AXIS: tl.constexpr):
    """`x`, of two dimensions, fp32, added along one of them, whose length is a power of two.

    Each step adds to every element its neighbour's, so both have the same sum: `x + y` is `y + x`. Of two there is but
    one order, which needs no steps.
    """
    LENGTH: tl.constexpr = x.shape[AXIS]
    if LENGTH > 2:
        x = tl.where(_lanes(x, AXIS) == 0, _steps(x, AXIS, 1), -0.0)
    return tl.sum(x, axis=AXIS)


@triton.jit
def _lanes(x, AXIS: tl.constexpr):
    """Numbers of the elements along an axis, in the shape of `x`."""
    lanes = tl.arange(0, x.shape[AXIS])
    if AXIS == 0:
        lanes = lanes[:, None]
    else:
        lanes = lanes[None, :]
    return tl.broadcast_to(lanes, x.shape)


@triton.jit
def _steps(x, AXIS: tl.constexpr, APART: tl.constexpr):
    """The sums of branches of APART elements, which `x` has, up to that of all."""
    if x.shape[AXIS] > APART:
        x += tl.gather(x, _lanes(x, AXIS) ^ APART, AXIS)
        x = _steps(x, AXIS, 2 * APART)
    return x


@triton.jit
def in_fp32(term):
    """A term, exactly. Where the sum of two is rounded to fp16, LLVM would round terms of bfloat16 to it first, for
    which they may be too large; through a shift of bits it doesn't see that they are."""
    if term.dtype == tl.bfloat16:
        value = (term.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        value = term.to(tl.float32)
    return value


@triton.jit
def of_terms(terms, FIRST: tl.constexpr = 0, COUNT: tl.constexpr = 0):
    """The sum in fp32 of COUNT blocks of the tuple `terms`, all of them if 0, from number FIRST on."""
    NUM: tl.constexpr = COUNT if COUNT > 0 else len(terms)
    if NUM == 1:
        total = in_fp32(terms[FIRST])
    else:
        LEFT: tl.constexpr = triton.next_power_of_2(NUM) // 2
        total = of_terms(terms, FIRST, LEFT) + of_terms(terms, FIRST + LEFT, NUM - LEFT)
    return total
