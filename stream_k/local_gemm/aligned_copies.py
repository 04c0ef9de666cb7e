"""Copies of operands that TMA can't address, or not fast, made before the GEMM reads them.

TMA wants lines (rows, or the columns of a transposed view) that start at multiples of 16 bytes. Other operands can be
read by pointers, but 16-bit elements then come 2 bytes at a time and, since an asynchronous copy moves 4 at least,
with nothing in flight. Copying such an operand into lines of whole 128 bytes and reading that by TMA took less time in
all but one of 124 products measured (H200, 1 launch for both operands, 3.3 TB/s of reading and writing; M N K
log-uniform in 128 to 8192): 2.6 times less, geometric mean.

Where A's last rows don't fill a tile, TMA puts zeros for the others, slowly: as if all programs fetched these rows from
one place, some 20 a nanosecond. A product of few rows takes up to twice as long for it. A copy with memory for whole
tiles takes 1 to 3 us; none is needed where A is the top of a larger tensor (`pyrocshmem.calls.tensors.rows_held`).

Copies live from their launch to the GEMM's, in memory of PyTorch's allocator: calls on several streams don't share
them, and a captured graph keeps its own. One that is made for the rows behind it alone, on a workspace whose calls
follow one another, has memory there, so that graphs of the plan's own may use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from pyrocshmem import dependent_launch, target, trace
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.tensors import POINTER
from pyrocshmem.elements import ELEMENTS

# Elements of a line of a copy are a multiple of this: 128 bytes, what memory is read in.
_LINE = 64
# (lines, elements, warps) that a program copies: of less than _FEW elements small parts, to have enough programs.
_FEW = 4_000_000
_SMALL, _LARGE = (4, 512, 4), (16, 512, 8)
# An interpreted step costs the same whatever its size.
_INTERPRETED = (64, 512, 1)


@triton.jit
def copy_block(
    x, copy, block, lines, length, stride, step, pitch, width, LINES: tl.constexpr, ELEMENTS: tl.constexpr
):
    """Block number `block` of `lines` lines of `x`, and zeros behind each up to `width`, to lines `pitch` apart."""
    wide = tl.cdiv(length, ELEMENTS)
    i = block // wide * LINES + tl.arange(0, LINES)
    j = block % wide * ELEMENTS + tl.arange(0, ELEMENTS)
    i, inside = tl.cast(i, tl.int64)[:, None], (i < lines)[:, None]
    value = tl.load(
        x + i * stride + (tl.cast(j, tl.int64) * step)[None, :],
        mask=inside & (j < length)[None, :],
        other=0.0,
    )
    tl.store(copy + i * pitch + j[None, :], value, mask=inside & (j < width)[None, :])


@triton.jit(
    do_not_specialize=["x_lines", "x_length", "x_stride", "y_lines", "y_length", "y_stride", "x_blocks"]
)
def copy_kernel(
    x, x_copy, x_lines, x_length, x_stride, x_step, x_pitch,
    y, y_copy, y_lines, y_length, y_stride, y_step, y_pitch,
    x_blocks, events, LINES: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """One block of `x`, or from program `x_blocks` on of `y`. stride, step: elements from one line to the next, and
    from one element of a line to the next; pitch: from one line of the copy to the next.

    Example: three rows of 5, in blocks of 2 x 4, are four programs: rows 0 and 1, columns 0 to 3, then 4; row 2.
    """
    dependent_launch.wait_for_previous()
    dependent_launch.allow_next()
    block = tl.program_id(0)
    trace.mark(events, trace.STORE, -1)
    # Up to the pitch, so that no store is less than 16 bytes.
    if block < x_blocks:
        copy_block(x, x_copy, block, x_lines, x_length, x_stride, x_step, x_pitch, x_pitch, LINES, ELEMENTS)
    else:
        block -= x_blocks
        copy_block(y, y_copy, block, y_lines, y_length, y_stride, y_step, y_pitch, y_pitch, LINES, ELEMENTS)
    trace.mark(events, trace.END, -1)


class _Copied:
    """How an operand is copied: as its rows, or, where its columns are contiguous and not `by_rows`, as these.
    room: for how many rows, or columns, a copy as such has memory, which nothing writes behind the last."""

    def __init__(self, x: torch.Tensor, by_rows: bool, room: tuple[int, int]) -> None:
        self.by_columns = x.stride(1) != 1 and x.stride(0) == 1 and not by_rows
        lines = x.t() if self.by_columns else x
        pitch = -(-lines.shape[1] // _LINE) * _LINE
        self.lines, self.length = lines.shape
        self.shape = (max(self.lines, room[self.by_columns]), pitch)
        self.sizes = (*lines.shape, *lines.stride(), pitch)

    def blocks(self, lines: int, elements: int) -> int:
        return -(-self.lines // lines) * -(-self.length // elements)


def worth_a_copy(x: torch.Tensor, how: int) -> bool:
    """Whether `x`, which would be read in the way `how`, is better copied."""
    return how == POINTER and not ELEMENTS[x.dtype].wide and target.backend() != "hip"


# From readings of 360 products of 1 to 256 rows on H200 (docs/log.md): rows outside, a microsecond; bytes of B, in a
# quarter of whose time they come beside; a copy, in microseconds, and bytes of A a microsecond. Decides within 1%, on
# average, of the better way; never to copy costs 13%.
_OUTSIDE, _READ, _COPY, _COPIED = 18e3, 4e6, 2.0, 0.8e6
# What TMA fetches at a time: so much of a row.
_FETCH_BYTES = 128


def rows_cost_more(a: torch.Tensor, b: torch.Tensor, rows: int, tiles_n: int) -> bool:
    """Whether the rows outside of `a` that its tiles read, as `rows` in `tiles_n` columns, cost more than a copy of `a`
    that has memory for them."""
    if target.backend() != "cuda":
        return False
    fetched = (rows - a.shape[0]) * tiles_n * -(-a.shape[1] * a.element_size() // _FETCH_BYTES)
    beside = b.numel() * b.element_size() / _READ / 4
    return fetched / _OUTSIDE > _COPY + beside + a.numel() * a.element_size() / _COPIED


class Copies:
    """The copies of the operands of one kind of call: of `a`, `b` or both; None is read where it is.

    a_by_rows: A's copy has contiguous rows, whatever A has. room: a copy of A as rows, of B as columns, has memory for
    so many. keep: gives so many elements for A's copy, of all calls. Compiled when it is made; nothing runs before
    `run`.
    """

    def __init__(
        self,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        a_by_rows: bool = False,
        room: tuple[int, int] = (0, 0),
        keep: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self._a = None if a is None else _Copied(a, a_by_rows, (room[0], 0))
        self._b = None if b is None else _Copied(b, False, (0, room[1]))
        self._copied = [x for x in (self._a, self._b) if x is not None]
        self._kept: torch.Tensor | None = None
        if keep is not None and self._a is not None:
            size = math.prod(self._a.shape)
            self._kept = keep(size)[:size].view(self._a.shape)
        given = [x for x in (a, b) if x is not None]
        few = sum(x.numel() for x in given) < _FEW
        lines, elements, warps = _INTERPRETED if target.interpreted() else _SMALL if few else _LARGE
        blocks = [x.blocks(lines, elements) for x in self._copied]
        self._first = blocks[0]
        constants = {"LINES": lines, "ELEMENTS": elements}
        self._launch = Launch(copy_kernel, sum(blocks), constants, warps, 1, chained=True)
        self._launch.compile(
            self._arguments(given, [x.new_empty(c.shape) for x, c in zip(given, self._copied, strict=True)])
        )

    @property
    def kept(self) -> bool:
        """Whether all copies lie where those of the call before did."""
        return self._kept is not None and self._b is None

    @property
    def of_b(self) -> bool:
        """Whether B is copied."""
        return self._b is not None

    def _arguments(self, given: list[torch.Tensor], made: list[torch.Tensor]) -> tuple[Any, ...]:
        each = [(x, y, *c.sizes) for x, y, c in zip(given, made, self._copied, strict=True)]
        # A single one stands for both: all blocks are the first's.
        return *each[0], *each[-1], self._first

    def examples(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Matrices as the copies will be, of any content; an operand that is not copied is its own."""
        found = []
        for x, copied in ((a, self._a), (b, self._b)):
            if copied is not None:
                lines = x.new_empty(copied.shape)[:, : copied.length]
                x = lines.t() if copied.by_columns else lines
            found.append(x)
        return found[0], found[1]

    def run(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueue the copies. Of each operand, the copy's memory, [lines, elements from line to line], or itself."""
        given, made = [], []
        if self._a is not None:
            given.append(a)
            a = a.new_empty(self._a.shape) if self._kept is None else self._kept
            made.append(a)
        if self._b is not None:
            given.append(b)
            b = b.new_empty(self._b.shape)
            made.append(b)
        self._launch(self._arguments(given, made))
        return a, b
