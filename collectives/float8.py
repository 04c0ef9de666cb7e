# ruff: noqa: PLR0124, SIM300 - NaN is what differs from itself; dtypes of kernels are constants
"""8-bit floating point in kernels: scales of groups of elements, and conversions to nearest, ties to even, and beyond
the largest number that."""

import triton
import triton.language as tl

from pyrocshmem import target

# Elements of a row that have one scale block by block, as in DeepSeek-V3 (arXiv 2412.19437).
BLOCK = 128
# NVIDIA's BLAS takes scales of blocks in multiples of these, 16 bytes, along M and along K.
UNIT = 4
_INTERPRETED = tl.constexpr(target.interpreted())
# fp32 has no fractions beyond.
_WHOLE = tl.constexpr(float(1 << 23))
# Of scales and of quotients, see `over`.
_FAR, _MOST = tl.constexpr(2.0**64), tl.constexpr(2.0**20)


@triton.jit
def largest(DTYPE: tl.constexpr):
    """The largest number of DTYPE."""
    MOST: tl.constexpr = 448.0 if DTYPE == tl.float8e4nv else 240.0 if DTYPE == tl.float8e4b8 else 57344.0
    return MOST


@triton.jit
def magnitude(x):
    """Of fp32 `x`; a NaN, which `tl.max` passes over, is found like an infinity."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def scale_for(most, DTYPE: tl.constexpr):
    """The scales of groups whose largest magnitudes are `most`; a group of zeros stays one."""
    return tl.where(most == 0, 1.0, tl.math.div_rn(most, tl.zeros(most.shape, tl.float32) + largest(DTYPE)))


@triton.jit
def over(x, scale):
    """fp32 `x` over `scale`, of one shape, as IEEE division rounds it. Quotients below 2^-20, which become zero, and
    beyond 2^20, which become the largest number of 8 bits, need not be exact.

    A GPU divides one element after another, since each may take a slow path. Here the elements of a group share one
    inverse, and after two corrections a quotient is the nearest number (Markstein, IBM J. Res. Dev. 34, 1990): the
    first brings it within a unit in the last place, and then the second is exact. The power of two keeps the inverse
    and the remainders of the smallest and largest scales normal.
    """
    if _INTERPRETED:
        # Which has no fused multiply-add.
        found = tl.math.div_rn(x, scale)
    else:
        power = tl.where(scale < 1 / _FAR, _FAR, tl.where(scale > _FAR, 1 / _FAR, 1.0))
        x, scale = x * power, scale * power
        inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        about = x * inverse
        found = tl.fma(tl.fma(-about, scale, x), inverse, about)
        found = tl.fma(tl.fma(-found, scale, x), inverse, found)
        # The sign of a zero, infinities and what is no number would be lost.
        found = tl.where((tl.abs(about) > 1 / _MOST) & (tl.abs(about) < _MOST), found, about)
    return found


@triton.jit
def to_float8(x, DTYPE: tl.constexpr):
    """fp32 `x` as DTYPE. NaN stays NaN; infinities become the largest number, as all that is beyond it."""
    x = tl.clamp(x, -largest(DTYPE), largest(DTYPE), propagate_nan=tl.PropagateNan.ALL)
    if _INTERPRETED:
        # Which truncates, and knows no NaN.
        bits = _representable(x, DTYPE).to(DTYPE).to(tl.uint8, bitcast=True)
        found = tl.where(x != x, 0x7F, bits).to(tl.uint8).to(DTYPE, bitcast=True)
    else:
        found = x.to(DTYPE)
    return found


@triton.jit
def _representable(x, DTYPE: tl.constexpr):
    """The number of DTYPE that is nearest to each of `x`, in fp32."""
    E5: tl.constexpr = DTYPE == tl.float8e5 or DTYPE == tl.float8e5b16
    MANTISSA: tl.constexpr = 2 if E5 else 3
    LEAST: tl.constexpr = -14 if E5 else -6
    bits = x.to(tl.int32, bitcast=True)
    step = ((tl.maximum(((bits >> 23) & 255) - 127, LEAST) - MANTISSA + 127) << 23).to(
        tl.float32, bitcast=True
    )
    nearest = ((tl.abs(x) / step + _WHOLE) - _WHOLE) * step
    signed = nearest.to(tl.int32, bitcast=True) | (bits & ~0x7FFFFFFF)
    return tl.where(x != x, x, signed.to(tl.float32, bitcast=True))
