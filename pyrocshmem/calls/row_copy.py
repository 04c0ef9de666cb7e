"""Rows that a copy engine moves into a tensor whose place changes from call to call.

    way = RowsWay(peers, out)                       # once, with any tensor laid out like `out`
    copy = way.copy((0, 0), (8, 16), (4, 32))
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


class RowsWay:
    """From the matrix `source` to those that lie like `whole`, of its dtype and device; `takes_rows` holds for both.

    source_pitch, pitch: bytes from row to row. size: of an element.
    """

    __slots__ = ("pitch", "size", "source", "source_pitch")

    def __init__(self, source: torch.Tensor, whole: torch.Tensor) -> None:
        assert source.dtype == whole.dtype
        self.source, self.size = source, source.element_size()
        self.source_pitch, self.pitch = _pitch(source), _pitch(whole)

    def copy(self, begin: tuple[int, int], to: tuple[int, int], shape: tuple[int, int]) -> RowCopy:
        """Of the block of so many rows and columns that begins at (row, column) `begin` of `source`, to where `to` is
        in `whole`. A plan makes dozens, so no tensor is asked or sliced for one."""
        size = self.size
        offsets = begin[0] * self.source_pitch + begin[1] * size, to[0] * self.pitch + to[1] * size
        return RowCopy(self, *offsets, shape[1] * size, shape[0])


def _pitch(x: torch.Tensor) -> int:
    """Bytes from row to row. Of a single row torch may give any stride."""
    return x.element_size() * (x.stride(0) if x.shape[0] > 1 else x.shape[1])


@dataclass(slots=True)
class RowCopy:
    """A copy of a block of a matrix into a block of another one.

    source_offset, offset: bytes from a matrix' first element to the block's. width: bytes of a row. height: rows.
    """

    way: RowsWay
    source_offset: int
    offset: int
    width: int
    height: int

    def __call__(self, whole: torch.Tensor) -> None:
        """Copy into `whole`, which lies like the one that this was made for, on the current stream."""
        if not self.height:
            return
        way, source = self.way, self.way.source
        backend, device, stream = "host", 0, 0
        if source.is_cuda:
            backend, device = target.backend(), source.device.index
            stream = torch._C._cuda_getCurrentRawStream(device)
        finegrained_alloc.copy_rows(
            backend, device, whole.data_ptr() + self.offset, way.pitch, source.data_ptr() + self.source_offset,
            way.source_pitch, self.width, self.height, stream,
        )  # fmt: skip
