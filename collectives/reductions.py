"""What becomes of the values that ranks bring: their sum, average, largest or smallest, over blocks [U, ranks].

Floating-point values are fp32 blocks. Integers are int32 blocks, of int64 int64 ones, and wrap around as theirs do.
Largest and smallest are found among integers, for floating point too: of its bits, ordered as the values are, -0.0
before 0.0. So they don't depend on the order of ranks, nor on how a GPU's `max` takes NaN: a NaN counts as missing, as
in NCCL, and is the result where no rank has another value.
"""

import triton
import triton.language as tl

from pyrocshmem.collectives import words as units

REDUCTIONS = ("sum", "avg", "max", "min")
# Of bits, all but the sign.
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def floats(values, valid, REDUCTION: tl.constexpr, WORLD: tl.constexpr):
    """fp32 blocks [U], of those [U, ranks] where `valid`."""
    found = ()
    if REDUCTION == "sum":
        found = units.sum_ranks(values, valid)
    elif REDUCTION == "avg":
        sums = units.sum_ranks(values, valid)
        for e in tl.static_range(len(sums)):
            count = tl.full(sums[e].shape, WORLD, tl.float32)
            found = found + (tl.math.div_rn(sums[e], count),)  # type: ignore[assignment]
    else:
        for e in tl.static_range(len(values)):
            bits = values[e].to(tl.int32, bitcast=True)
            numbers = valid & (values[e] == values[e])
            best = _extreme(bits ^ ((bits >> 31) & _MAGNITUDE), numbers, REDUCTION)
            # What `_extreme` has for nothing becomes a NaN.
            best ^= (best >> 31) & _MAGNITUDE
            found = found + (best.to(tl.float32, bitcast=True),)  # type: ignore[assignment]
    return found


@triton.jit
def integers(values, valid, REDUCTION: tl.constexpr):
    """int32 or int64 blocks [U], of those [U, ranks] where `valid`."""
    found = ()
    for e in tl.static_range(len(values)):
        if REDUCTION == "sum":
            total = tl.sum(tl.where(valid, values[e], 0), axis=1)
        else:
            total = _extreme(values[e], valid, REDUCTION)
        found = found + (total,)  # type: ignore[assignment]
    return found


@triton.jit
def _extreme(values, valid, REDUCTION: tl.constexpr):
    """Of integers; where none is valid, the last that any other would replace."""
    BITS: tl.constexpr = values.dtype.primitive_bitwidth
    if REDUCTION == "max":
        found = tl.max(
            tl.where(valid, values, tl.full(values.shape, -(2 ** (BITS - 1)), values.dtype)), axis=1
        )
    else:
        found = tl.min(
            tl.where(valid, values, tl.full(values.shape, 2 ** (BITS - 1) - 1, values.dtype)), axis=1
        )
    return found
