"""Counts: integers whose values change nothing in a kernel's code.

Triton compiles a kernel anew for an integer that is 1 or a multiple of 16, which for rows, tiles and programs would be
dozens of variants of each kernel. `do_not_specialize` says so of a parameter, but not of what is in a tuple. There a
count travels as an odd number from 3 on.
"""

import triton
import triton.language as tl

_FIRST = tl.constexpr(3)


def packed(count: int) -> int:
    """`count`, 0 or more, as an argument in a tuple; below 2^30, a kernel gets it as an int32."""
    return 2 * count + int(_FIRST.value)


@triton.jit
def unpacked(count):
    """The count that came as `count`."""
    return (count - _FIRST) >> 1
