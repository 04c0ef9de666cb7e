"""The norm of rows that lie in registers as units (`collectives.words`), for whatever kernel has them.

A row is cut into programs of U units, blocks [U, ranks]. What a program adds up, and then what it adds of the programs'
sums, is a block of that shape, whose order of additions depends on the shape alone: its layout is Triton's default one
(tests/compile/test_invariant_norms.py). So two kernels whose blocks have one shape give a row the same bits.
"""

import triton
import triton.language as tl

from pyrocshmem.collectives import words as units


@triton.jit
def sum_of_units(xs, ys, column, width, valid):
    """The sum of xs times ys over a program's units of a row, fp32, as one number. xs, ys: values, blocks [U, ranks],
    the same in each column. column: of a unit's first element. width: of the row. valid [U]: which units exist."""
    total = tl.zeros(xs[0].shape, tl.float32)
    for e in tl.static_range(len(xs)):
        total += tl.where((valid & (column + e < width))[:, None], xs[e] * ys[e], 0.0)
    return of_rank(tl.sum(total, axis=0), 0)


@triton.jit
def of_rank(each, rank):
    """Element `rank` of [ranks], as one number, which has no layout to convert (`units.spread` says why)."""
    return tl.sum(tl.where(tl.arange(0, each.shape[0]) == rank, each, 0.0), axis=0)


@triton.jit
def scale_of(squares, width, eps):
    """1 / the root mean square of rows, whose squares have these sums."""
    return tl.math.rsqrt(squares / width + eps)


@triton.jit
def normalized(words, squares, weights, width, eps, UNIT: tl.constexpr, DTYPE: tl.constexpr):
    """RMSNorm of units, given the sums of squares of their rows."""
    values = units.unpack(words, UNIT, DTYPE)
    scale = scale_of(squares, width, eps)
    scaled = ()
    for e in tl.static_range(UNIT):
        scaled = scaled + (values[e] * scale * weights[e],)  # type: ignore[assignment]
    return units.pack(scaled, DTYPE)


@triton.jit
def weights_of(weight, column, width, mask, UNIT: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """fp32 weights of the units' columns. DTYPE: what the units are of."""
    WEIGHT: tl.constexpr = weight.dtype.element_ty
    values = ()
    if WEIGHT.primitive_bitwidth < DTYPE.primitive_bitwidth:
        # A unit of weights is half a quad.
        for e in tl.static_range(UNIT):
            value = tl.load(weight + column + e, mask=mask & (column + e < width), other=0.0).to(tl.float32)
            values = values + (value,)  # type: ignore[assignment]
    else:
        words = units.load_unit(weight, column, column, width, mask, UNIT, ALIGNED)
        values = units.unpack(words, UNIT, WEIGHT)
    return values
