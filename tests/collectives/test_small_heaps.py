"""A heap that is too small for a call says which size has room for it."""

import pytest
import torch

from pyrocshmem import Heap, HeapOutOfMemory, Workspace, collectives
from tests.collectives.test_tensors import device
from tests.ranks import run_ranks, values

TIER = 1
NBYTES = 1 << 16


def small(rank: int, world_size: int) -> list[int]:
    """Sizes that errors named, of a call's messages and of a workspace's control words: each was enough."""
    named = []
    x = torch.ones(300, 1000, device=device())
    with Heap(NBYTES) as heap:
        with pytest.raises(HeapOutOfMemory, match=r"form the heap with \d+ bytes") as raised:
            collectives.all_reduce(x, group=heap)
        named.append(raised.value.enough)
        filled = heap.empty(NBYTES - (1 << 14), dtype=torch.uint8)
        with pytest.raises(HeapOutOfMemory) as raised:
            _ = [Workspace(heap) for _ in range(100)]
        named.append(raised.value.enough)
        del filled
    with Heap(named[0]) as heap:
        total = collectives.all_reduce(x, group=heap)
        heap.synchronize()
        assert (total == world_size).all()
        assert heap.nbytes < NBYTES + (16 << 20)
    return named


@pytest.mark.num_ranks(2)
def test_a_small_heap_says_which_size_would_do() -> None:
    first, second = values(run_ranks(small, 2))
    assert first == second
    assert all(size % (1 << 20) == 0 and size > NBYTES for size in first), first
