"""Tensors that nobody has freed: their blocks are given back once they are gone on all ranks, and no sooner."""

import gc
import random
from unittest import mock

import pytest
import torch

from pyrocshmem import CallMismatch, Heap, HeapOutOfMemory, PeerAborted, spawn_threads
from tests.ranks import run_ranks, values

TIER = 1
MIB = 1 << 20
KIB = 1 << 10
HOLDERS = ("tensor", "view", "peer's view", "array", "saved for a gradient")


def _many(rank, world_size):
    with Heap(MIB) as heap:
        most = 0
        for number in range(60):
            x = heap.full((25 * KIB,), float(number))
            most = max(most, heap.usage().used)
            assert float(x.sum()) == 25 * KIB * number
        # More than there is room for beside it: the vote that finds no room gives it back, the next one allocates.
        del x
        whole = heap.empty(heap.usage().total // 4)
        with pytest.raises(HeapOutOfMemory, match=r"Let go of tensors, on all ranks \(del, or heap\.free\)"):
            heap.zeros(3)
        del whole
        heap.barrier()
        return most, heap.usage().used


@pytest.mark.num_ranks(2)
def test_tensors_that_are_dropped_leave_room():
    for most, left in values(run_ranks(_many, 2)):
        assert most <= 200 * KIB
        assert left == 0


def _held(heap, how):
    """(what keeps a block, its offset)."""
    x = heap.full((1000,), 3.0)
    offset = heap.offset(x)
    if how == "view":
        return x[10:20].view(2, 5), offset
    if how == "peer's view":
        return heap.peer_view(x, 1 - heap.rank), offset
    if how == "array":
        return (x if heap.device.type == "cuda" else x.numpy()), offset
    if how == "saved for a gradient":
        weight = torch.ones(1000, device=heap.device, requires_grad=True)
        return (x * weight).sum(), offset
    return x, offset


def _one_keeps_it(rank, world_size):
    found = []
    with Heap(MIB, debug=True) as heap:
        for how in HOLDERS:
            kept, offset = _held(heap, how)
            if rank == 0:
                del kept
            gc.collect()
            used = []
            for _ in range(2):
                heap.barrier()
                other = heap.empty(1000)  # somewhere else, while rank 1 can reach the first one
                used.append((heap.usage().num_allocations, heap.offset(other) == offset))
                heap.free(other)
            if rank == 1:
                if how == "saved for a gradient":
                    kept.backward()
                del kept
            gc.collect()
            heap.barrier()
            left = heap.usage().num_allocations
            again = heap.zeros(1000)
            found.append((how, used, left, heap.offset(again) == offset))
            heap.free(again)
    return found


@pytest.mark.num_ranks(2)
def test_what_one_rank_can_reach_stays_on_all():
    expected = [(how, [(2, False)] * 2, 0, True) for how in HOLDERS]
    assert values(run_ranks(_one_keeps_it, 2)) == [expected] * 2


def _offered_in_vain(rank, world_size):
    with Heap(MIB, timeout=20) as heap:
        heap.zeros(100)
        with pytest.raises(CallMismatch):  # a vote that comes to nothing gives nothing back
            heap.zeros(100 + rank)
        after_mismatch = heap.usage().num_allocations
        heap.vote("call")
        after_vote = heap.usage().num_allocations
        kept = heap.full((100,), 5.0)
        heap.zeros(100)
        if rank == 0:
            heap.vote("said by one")
            heap.abort("planted")
        else:
            y = heap.peer_view(kept, 0)  # noqa: F841  and nothing dropped, until the fault
            heap.vote("said by one")
            with pytest.raises(PeerAborted):
                heap.vote("another")
        heap.recover()
        again = heap.ones(100)
        heap.barrier()
        return after_mismatch, after_vote, heap.usage().num_allocations, float(kept.sum() + again.sum())


@pytest.mark.num_ranks(2)
def test_what_was_said_in_a_vote_that_failed_is_said_again():
    assert values(run_ranks(_offered_in_vain, 2)) == [(1, 0, 2, 600.0)] * 2


def _at_random(group, seed):
    """Tensors made alike on all ranks, dropped when each likes: the most of them at once, of what was wrong."""
    together, own = random.Random(seed), random.Random(f"{seed} {group.rank}")
    wrong, most = [], 0
    with Heap(64 * KIB, group) as heap:
        tensors = {}
        for number in range(120):
            size = together.choice((0, 10, 100, 1000))
            try:
                tensors[number] = heap.full((size,), number, dtype=torch.int32)
            except HeapOutOfMemory:
                tensors.clear()  # all let go of all: there is room for the next one
                continue
            third = number - 3
            if together.random() < 0.1 and b"0" not in heap.vote(
                "has it?", str(int(third in tensors)).encode()
            ):
                heap.free(tensors.pop(third))
            for kept in list(tensors):
                if own.random() < 0.15:
                    del tensors[kept]
            for kept, x in tensors.items():
                at_peer = heap.peer_view(x, own.randrange(heap.world_size))
                wrong += [str(kept)] if bool((at_peer != kept).any()) else []
            most = max(most, len(tensors))
            before = heap.usage()
            heap.barrier()  # all have looked
            place = heap.empty(10)
            said = heap.vote("usage", f"{before} {heap.offset(place)}".encode())
            wrong += ["usage differs"] if len(set(said)) > 1 else []
            heap.free(place)
    return most, wrong


def _once_any_has_dropped_it(self):
    for offset in sorted(self._dropped_by):
        if self._live.pop(offset, None):
            self._free_list.free(offset)
    self._dropped_by.clear()
    self._collected = 0


@pytest.mark.cpu
def test_dropped_at_random():
    for most, wrong in spawn_threads(_at_random, 3, random.randrange(1 << 30), timeout=100):
        assert most > 2
        assert wrong == []
    with mock.patch.object(Heap, "_collect", _once_any_has_dropped_it):
        ends = spawn_threads(_at_random, 3, 7, timeout=100)
    assert any(wrong for _, wrong in ends), "the check above can't fail"
