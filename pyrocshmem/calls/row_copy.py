"""Rows that a copy engine moves into a tensor whose place changes from call to call.

    copy = RowCopy.of(out[:8, 16:32], out, rows_of_a_peer)   # once, with any tensor laid out like `out`
    copy(out)                                                # a command of the current stream

Torch's `copy_` takes a kernel where rows don't lie together, which would need multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyrocshmem import finegrained_alloc, target

_MAX_PITCH = 2**31 - 1


def takes_rows(x: torch.Tensor) -> bool:
    """Whether a copy engine can write blocks of the matrix `x`: its rows are contiguous, less than 2 GiB apart."""
    pitch = x.stride(0) * x.element_size()
    return (x.shape[1] == 1 or x.stride(1) == 1) and (x.shape[0] == 1 or pitch <= _MAX_PITCH)


@dataclass(frozen=True)
class RowCopy:
    """A copy of `source`, a matrix with contiguous rows, into a block of another matrix of its dtype and device.

    offset: bytes from that matrix' first element to the block's. pitch, source_pitch: bytes from row to row. width:
    bytes of a row.
    """

    source: torch.Tensor
    offset: int
    pitch: int
    source_pitch: int
    width: int

    @staticmethod
    def of(block: torch.Tensor, whole: torch.Tensor, source: torch.Tensor) -> RowCopy:
        """The copy of `source` into `block`, a part of `whole` of the same shape, for which `takes_rows` holds."""
        assert block.shape == source.shape
        assert block.dtype == source.dtype
        size = source.element_size()
        width = size * source.shape[1]
        # Of a single row torch may give any stride.
        pitch, source_pitch = (size * x.stride(0) if source.shape[0] > 1 else width for x in (block, source))
        return RowCopy(source, block.data_ptr() - whole.data_ptr(), pitch, source_pitch, width)

    def __call__(self, whole: torch.Tensor) -> None:
        """Copy into `whole`, which lies like the one that this was made for, on the current stream."""
        source = self.source
        if not source.numel():
            return
        backend, device, stream = "host", 0, 0
        if source.is_cuda:
            backend, device = target.backend(), source.device.index
            stream = torch._C._cuda_getCurrentRawStream(device)
        finegrained_alloc.copy_rows(
            backend, device, whole.data_ptr() + self.offset, self.pitch, source.data_ptr(), self.source_pitch,
            self.width, source.shape[0], stream,
        )  # fmt: skip
