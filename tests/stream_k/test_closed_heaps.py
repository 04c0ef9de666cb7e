"""Heaps that end give their memory back at once, whatever was called on them: nothing waits for Python's collector.

tests/pyrocshmem/test_lifecycle.py has their own tensors."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from pyrocshmem import Heap, ThreadGroup, collectives, finegrained_alloc, heap_for, stream_k
from pyrocshmem.calls.workspace import Workspace, workspace_for
from tests.ranks import run_ranks, values
from tests.stream_k.products import device

TIER = 1
HEAP_BYTES = 8 << 20


def held() -> tuple[int, int]:
    """(allocations, mappings) of this process, but for what Triton's interpreter leaves to the collector."""
    gc.collect()
    now = finegrained_alloc.live()
    return now.allocations, now.mappings


def closed(rank: int, world_size: int) -> tuple[list[str], bool, list[str]]:
    """(what is left of a workspace, whether memory is back, what calls on one that the caller still holds raise)."""
    before = held()
    gc.disable()
    a, b = torch.ones(4, 8, device=device()), torch.ones(8, 4, device=device())
    heap = Heap(HEAP_BYTES)
    mine, shared = Workspace(heap), workspace_for(heap)
    for space in (mine, shared):
        stream_k.gemm_all_reduce(a, b, group=heap, workspace=space)
        stream_k.gemm(a, b, workspace=space)
        collectives.all_reduce(a[:0], group=heap, workspace=space)
    heap.barrier()
    ends = [weakref.ref(each) for each in (shared, shared.own, *shared.plans.values(), *mine.plans.values())]
    mine.note_capture()
    for size in (8, 16):  # what a graph may read still is kept
        mine.buffer("place", size, torch.float32)
    del space, shared
    heap.close()
    left = [type(found).__name__ for end in ends if (found := end()) is not None]
    returned = held() == before
    said = []
    for call in (
        lambda: stream_k.gemm_all_reduce(a, b, group=heap, workspace=mine),
        lambda: stream_k.gemm(a, b, workspace=mine),
        lambda: stream_k.gemm(a, b[:, :3], workspace=mine),
        lambda: collectives.barrier(group=heap, workspace=mine),
        lambda: collectives.all_reduce(a[:0], group=heap, workspace=mine),
        lambda: mine.buffer("more", 1, torch.int32),
        lambda: mine.restart(mine.epoch()),
        lambda: workspace_for(heap),
    ):
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    if mine.own is not None:
        left.append("a workspace of a heap that is closed made another one")
    return left, returned, said


@pytest.mark.num_ranks(2)
def test_close_gives_back_what_workspaces_hold() -> None:
    for left, returned, said in values(run_ranks(closed, 2)):
        assert left == []
        assert returned
        assert said == ["the heap is closed"] * 8


def destroyed(rank: int, world_size: int) -> tuple[bool, bool, bool]:
    """Whether the heap of a process group is open when that is destroyed, closed when nobody holds it either, and gives
    its memory back."""
    before = held()
    group = dist.new_group(list(range(world_size)))
    collectives.all_reduce(torch.ones(4, device=device()), group=group)
    heap = heap_for(group)
    heap.barrier()
    gc.disable()
    dist.destroy_process_group(group)
    still_open = not heap.closed
    del group
    return still_open, heap.closed, held() == before


@pytest.mark.num_ranks(2)
def test_the_heap_of_a_process_group_ends_with_it() -> None:
    assert values(run_ranks(destroyed, 2)) == [(True, True, True)] * 2


@pytest.mark.num_ranks(1)
def test_the_heap_of_threads_ends_with_their_group() -> None:
    before = held()
    group = ThreadGroup.create(1)[0]
    assert heap_for(group, HEAP_BYTES) is heap_for(group)
    assert held() != before
    del group
    assert held() == before
