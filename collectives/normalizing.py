"""The norm of rows that lie in registers as units (`collectives.words`), for whatever kernel has them; and that norm in
8-bit floating point.

A row is cut into programs of U units, blocks [U, ranks]. What a program adds up, and then what it adds of the programs'
sums, is a block of that shape, whose order of additions depends on the shape alone: its layout is Triton's default one
(tests/compile/test_invariant_norms.py). So two kernels whose blocks have one shape give a row the same bits.

An element of the norm is its value times its weight, times the factor of its row, which is not negative. Neither the
last product nor the rounding changes which of two magnitudes is the larger, so the largest of a row is known, to the
bit, from the largest product of value and weight: nobody has to wait for the factor first and for the largest then.
"""

import triton
import triton.language as tl

from pyrocshmem.collectives import words as units
from pyrocshmem.collectives.epilogue import rounded
from pyrocshmem.collectives.float8 import magnitude, over, scale_for, to_float8

# In what scales of a norm in 8 bits there are: one that is given, one a row, one for each GROUP elements of a row.
GIVEN, ROWS, GROUPS = 1, 2, 3
_GIVEN, _ROWS = tl.constexpr(GIVEN), tl.constexpr(ROWS)


@triton.jit
def sum_of_units(xs, ys, column, width, valid):
    """The sum of xs times ys over a program's units of a row, fp32, as one number. xs, ys: values, blocks [U, ranks],
    the same in each column. column: of a unit's first element. width: of the row. valid [U]: which units exist."""
    total = tl.zeros(xs[0].shape, tl.float32)
    for e in tl.static_range(len(xs)):
        total += tl.where((valid & (column + e < width))[:, None], xs[e] * ys[e], 0.0)
    return of_rank(tl.sum(total, axis=0), 0)


@triton.jit
def largest_of_units(values, weights, column, width, valid):
    """The largest magnitude of values times weights over a program's units of a row, as one number: as in
    `sum_of_units`."""
    most = tl.zeros(values[0].shape, tl.float32)
    for e in tl.static_range(len(values)):
        here = (valid & (column + e < width))[:, None]
        most = tl.maximum(most, tl.where(here, magnitude(values[e] * weights[e]), 0.0))
    return of_rank(tl.max(most, axis=0), 0)


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
        scaled = scaled + (values[e] * weights[e] * scale,)  # type: ignore[assignment]
    return units.pack(scaled, DTYPE)


@triton.jit
def scales_of(
    words, most, squares, given, column, width, valid, eps, UNIT: tl.constexpr, DTYPE: tl.constexpr,
    TO: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The scales, blocks [U, ranks], with which units of the norm become numbers of TO. words: the units, of DTYPE.
    KIND: GIVEN, and then `given` is where it is; ROWS: of the rows whose largest products of value and weight are
    `most`, and whose sums of squares `squares`; GROUPS: of GROUP units."""
    if KIND == _GIVEN:
        scales = tl.zeros(words[0].shape, tl.float32) + tl.load(given)
    elif KIND == _ROWS:
        largest = rounded(most * scale_of(squares, width, eps), DTYPE).to(tl.float32)
        scales = scale_for(magnitude(largest), TO)
    else:
        values = units.unpack(words, UNIT, DTYPE)
        largest = tl.zeros(words[0].shape, tl.float32)
        for e in tl.static_range(UNIT):
            here = (valid & (column + e < width))[:, None]
            largest = tl.maximum(largest, tl.where(here, magnitude(values[e]), 0.0))
        U: tl.constexpr = words[0].shape[0]
        RANKS: tl.constexpr = words[0].shape[1]
        of_groups = tl.max(largest.reshape((U // GROUP, GROUP, RANKS)), axis=1)
        wide = tl.broadcast_to(of_groups[:, None, :], (U // GROUP, GROUP, RANKS))
        scales = scale_for(wide.reshape((U, RANKS)), TO)
    return scales


@triton.jit
def in_float8(words, scales, UNIT: tl.constexpr, DTYPE: tl.constexpr, TO: tl.constexpr):
    """Units of DTYPE over their scales, as numbers of TO: the bytes of a unit in one integer."""
    values = units.unpack(words, UNIT, DTYPE)
    WORD: tl.constexpr = tl.int64 if UNIT == 8 else tl.int32
    found = tl.zeros(words[0].shape, WORD)
    for e in tl.static_range(UNIT):
        byte = to_float8(over(values[e], scales), TO).to(tl.uint8, bitcast=True)
        found |= byte.to(WORD) << (8 * e)
    return found


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
