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
from pyrocshmem.stream_k.local_gemm.aligned_copies import copy_block
from pyrocshmem.stream_k.local_gemm.scales import Scaled, scales_a_row
from pyrocshmem.torch_contexts import on_device

WORD = torch.int32
# Words of 16 bytes, and of a row's multiple.
_UNIT, _LINE = 4, 32
# Of a block that a program moves: columns, in bytes, and rows, of which there are many where a program costs much.
_COLUMNS, _ROWS, _INTERPRETED_ROWS, _WARPS = 1024, 4, 64, 4


@triton.jit(do_not_specialize=["M"])
def put_kernel(
    x, y, scales, places, M, K, count, x_pitch, x_step, y_pitch, scale_m, scale_k, place_m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """A block [ROWS, COLUMNS] of the bytes x [M, K] to y; the first one of its rows takes the `count` scales of each to
    `places`. x_pitch, x_step: from a row, and a column, to the next."""
    block, across = tl.program_id(0), tl.cdiv(K, COLUMNS)
    copy_block(x, y, block, M, K, x_pitch, x_step, y_pitch, K, ROWS, COLUMNS)
    if block % across == 0:
        copy_block(scales, places, block // across, M, count, scale_m, scale_k, place_m, count, ROWS, SCALES)


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
            to = self.operand(words)
            with on_device(words.device):
                self.launch(a, to)(self.arguments(a, to))
        return words

    def launch(self, a: Scaled, to: Scaled) -> Launch:
        """What puts as many rows as `a` has, and their scales, into an `operand` like `to`, with `arguments`;
        compiled."""
        rows = _INTERPRETED_ROWS if target.interpreted() else _ROWS
        constants = {"ROWS": rows, "COLUMNS": _COLUMNS, "SCALES": triton.next_power_of_2(self.num_scales)}
        programs = -(-len(a.data) // rows) * -(-self.K // _COLUMNS)
        found = Launch(put_kernel, programs, constants, _WARPS, 1)
        found.compile(self.arguments(a, to))
        return found

    def arguments(self, a: Scaled, to: Scaled) -> tuple[Any, ...]:
        """Of a launch."""
        of_one = a.scale.numel() == 1
        return (
            a.data.view(torch.uint8), to.data.view(torch.uint8), a.scale, to.scale, len(a.data), self.K,
            self.num_scales, *a.data.stride(), to.data.stride(0), *((0, 0) if of_one else a.scale.stride()),
            to.scale.stride(0),
        )  # fmt: skip
