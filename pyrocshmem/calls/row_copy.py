"""Rows that a copy engine moves into a tensor whose place changes from call to call.

    copy = RowCopy.of(peers, (0, 0), out, (8, 16), (4, 32))   # once, with any tensor laid out like `out`
    copy(out)                            # out[8:12, 16:48] = peers[:4, :32], a command of the current stream

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


@dataclass(slots=True)
class RowCopy:
    """A copy of a block of `source` into a block of another matrix of its dtype and device.

    source_offset, offset: bytes from a matrix' first element to the block's. source_pitch, pitch: bytes from row to
    row. width: bytes of a row. height: rows.
    """

    source: torch.Tensor
    source_offset: int
    source_pitch: int
    offset: int
    pitch: int
    width: int
    height: int

    @staticmethod
    def of(
        source: torch.Tensor,
        begin: tuple[int, int],
        whole: torch.Tensor,
        to: tuple[int, int],
        shape: tuple[int, int],
    ) -> RowCopy:
        """The copy of the block of so many rows and columns that begins at (row, column) `begin` of `source`, to where
        `to` is in `whole`. `takes_rows` holds for both. A plan makes dozens, so no tensor is sliced for one."""
        assert source.dtype == whole.dtype
        size, height = source.element_size(), shape[0]
        width = size * shape[1]
        # Of a single row torch may give any stride.
        source_pitch = size * source.stride(0) if source.shape[0] > 1 else width
        pitch = size * whole.stride(0) if whole.shape[0] > 1 else width
        source_offset = begin[0] * source_pitch + begin[1] * size
        return RowCopy(
            source, source_offset, source_pitch, to[0] * pitch + to[1] * size, pitch, width, height
        )

    def __call__(self, whole: torch.Tensor) -> None:
        """Copy into `whole`, which lies like the one that this was made for, on the current stream."""
        if not self.height:
            return
        source = self.source
        backend, device, stream = "host", 0, 0
        if source.is_cuda:
            backend, device = target.backend(), source.device.index
            stream = torch._C._cuda_getCurrentRawStream(device)
        finegrained_alloc.copy_rows(
            backend, device, whole.data_ptr() + self.offset, self.pitch, source.data_ptr() + self.source_offset,
            self.source_pitch, self.width, self.height, stream,
        )  # fmt: skip
