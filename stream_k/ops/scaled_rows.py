"""Rows of an 8-bit A with their scales behind them, as a matrix of 32-bit words: what an all-gather by messages, or
between hosts, moves, so that the scales of a row arrive with it.

Rows, and the scales in them, begin at multiples of 16 bytes. Where all of A has one scale, each row has it.
"""

from __future__ import annotations

import torch

from pyrocshmem.stream_k.local_gemm.scales import Scaled, scales_a_row

WORD = torch.int32
# Words of 16 bytes.
_UNIT = 4


class ScaledRows:
    """Of an A of K columns of `dtype`, whose rows have so many scales. width: words of a row."""

    def __init__(self, K: int, dtype: torch.dtype, num_scales: int) -> None:
        self.K, self.dtype, self.num_scales = K, dtype, num_scales
        self.first_scale = _UNIT * -(-K // (4 * _UNIT))
        self.width = self.first_scale + _UNIT * -(-num_scales // _UNIT)

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
        self.put(a, words)
        return words

    def put(self, a: Scaled, words: torch.Tensor) -> None:
        """Enqueue: rows of `a`, and their scales, into `words`."""
        to = self.operand(words)
        to.data.view(torch.uint8).copy_(a.data.view(torch.uint8))
        to.scale.copy_(a.scale if a.scale.ndim == 2 else a.scale.view(1, 1))
