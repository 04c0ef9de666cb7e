"""Rows of an 8-bit A with their scales behind them, as a matrix of 32-bit words: what an all-gather by messages, or
between hosts, moves, so that the scales of a row arrive with it.

Rows begin at multiples of 128 bytes, and the scales in them at multiples of 16. Where all of A has one scale, each row
has it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pyrocshmem import target
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.stream_k.local_gemm.scales import Scaled, scales_a_row
from pyrocshmem.torch_contexts import on_device

WORD = torch.int32
# Words of 16 bytes, and of a row's multiple.
_UNIT, _LINE = 4, 32
# Of a block that a program moves: columns, in bytes, and rows, of which there are many where a program costs much.
_COLUMNS, _ROWS, _INTERPRETED_ROWS, _WARPS = 1024, 4, 64, 4


@triton.jit(do_not_specialize=["M", "across"])
def put_kernel(
    x, y, scales, places, M, K, across, count, x_pitch, x_step, y_pitch, scale_m, scale_k, place_m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """A block [ROWS, COLUMNS] of the bytes x [M, K], `across` of which lie side by side, to y; the first one of its
    rows takes the `count` scales of each to `places`. x_pitch, x_step: from a row, and a column, to the next."""
    block = tl.program_id(0) % across
    i = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    row, there = i.to(tl.int64)[:, None], (i < M)[:, None]
    j = (block * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = there & (j < K)
    moved = tl.load(x + row * x_pitch + j.to(tl.int64) * x_step, mask=inside)
    tl.store(y + row * y_pitch + j, moved, mask=inside)
    if block == 0:
        k = tl.arange(0, SCALES)[None, :]
        held = there & (k < count)
        tl.store(
            places + row * place_m + k, tl.load(scales + row * scale_m + k * scale_k, mask=held), mask=held
        )


class ScaledRows:
    """Of an A of K columns of `dtype`, whose rows have so many scales. width: words of a row."""

    def __init__(self, K: int, dtype: torch.dtype, num_scales: int) -> None:
        self.K, self.dtype, self.num_scales = K, dtype, num_scales
        self.first_scale = _UNIT * -(-K // (4 * _UNIT))
        self.width = _LINE * -(-(self.first_scale + num_scales) // _LINE)

    @classmethod
    def of(cls, a: torch.Tensor, scale: torch.Tensor) -> ScaledRows:
        """Of operands like these."""
        return cls(a.shape[1], a.dtype, scales_a_row(scale))

    def operand(self, words: torch.Tensor) -> Scaled:
        """What lies in `words` [rows, width], contiguous, as an operand of a product."""
        data = words.view(torch.uint8)[:, : self.K].view(self.dtype)
        return Scaled(data, words[:, self.first_scale :][:, : self.num_scales].view(torch.float32))

    def words(self, a: Scaled) -> torch.Tensor:
        """Rows of `a` and their scales, as a new tensor."""
        words = torch.empty(len(a.data), self.width, dtype=WORD, device=a.data.device)
        if len(words) > 0:
            with on_device(words.device):
                self.launch(len(words), a, words)(self.arguments(a, words))
        return words

    def launch(self, M: int, a: Scaled, words: torch.Tensor) -> Launch:
        """What puts M rows like `a`, and their scales, into tensors like `words`, with `arguments`; compiled."""
        rows = _INTERPRETED_ROWS if target.interpreted() else _ROWS
        constants = {"ROWS": rows, "COLUMNS": _COLUMNS, "SCALES": triton.next_power_of_2(self.num_scales)}
        found = Launch(put_kernel, -(-M // rows) * self._across, constants, _WARPS, 1)
        found.compile(self.arguments(a, words))
        return found

    @property
    def _across(self) -> int:
        return -(-self.K // _COLUMNS)

    def arguments(self, a: Scaled, words: torch.Tensor) -> tuple[Any, ...]:
        """Of a launch."""
        to = self.operand(words)
        of_one = a.scale.numel() == 1
        return (
            a.data.view(torch.uint8), to.data.view(torch.uint8), a.scale, to.scale, len(a.data), self.K, self._across,
            self.num_scales, *a.data.stride(), to.data.stride(0), *((0, 0) if of_one else a.scale.stride()),
            to.scale.stride(0),
        )  # fmt: skip
