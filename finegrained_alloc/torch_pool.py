"""Any PyTorch tensor on memory from this library: a ``torch.cuda.MemPool`` over ``CUDAPluggableAllocator``.

    with finegrained_alloc.pool():
        x = torch.empty(4096, 4096, device="cuda")   # fine-grained on AMD, exportable on both

It holds for the calling thread, for one device, and for the duration of the ``with``; tensors live on afterwards and
give their memory back as usual (``torch.cuda.empty_cache()`` returns it to the driver). The process-wide allocator is
not touched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .library import BACKENDS, LIBRARY_PATH, check, load

if TYPE_CHECKING:
    import torch


@functools.cache
def _pluggable_allocator(backend: str) -> torch.cuda.memory.CUDAPluggableAllocator:
    """Kept for the life of the process: PyTorch calls its free function when the last tensor dies, however late."""
    from torch.cuda.memory import CUDAPluggableAllocator

    check(load().fga_set_torch_backend(BACKENDS.index(backend)))
    return CUDAPluggableAllocator(str(LIBRARY_PATH), "fga_torch_malloc", "fga_torch_free")


@contextlib.contextmanager
def pool(device: int | torch.device | None = None) -> Iterator[torch.cuda.MemPool]:
    """Puts the CUDA (or ROCm) tensors that this thread makes on ``device`` (default: the current one) on our memory.

    Yields the pool, which ``torch.cuda.use_mem_pool`` accepts again as long as it is referenced.
    Raises ``RuntimeError`` where PyTorch sees no GPU, and ``NotBuilt``; when memory runs out, what makes the tensor
    raises ``torch.OutOfMemoryError``.
    """
    import torch

    load()
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"finegrained_alloc.pool() needs a GPU, and PyTorch {torch.__version__} sees none; "
            'on a CPU allocate with finegrained_alloc.alloc(nbytes, "host")'
        )
    allocator = _pluggable_allocator("hip" if torch.version.hip else "cuda")
    # A pool belongs to the device that is current when it is made, whatever device it is used for.
    with torch.cuda.device(device):
        mem_pool = torch.cuda.MemPool(allocator.allocator())
    with torch.cuda.use_mem_pool(mem_pool, device):
        yield mem_pool
