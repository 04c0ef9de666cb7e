"""Faults while a heap grows: a rank has no memory, can't map its peers', is killed, is interrupted, or the store lies.

Whatever happens, no rank keeps a piece that not all have, and what was on the heap before is as it was.
"""

import gc
import json
import os
import random
import shutil
import signal

import pytest
import torch

from pyrocshmem import (
    Heap,
    HeapOutOfMemory,
    PeerAborted,
    PeerTimeout,
    ShmemError,
    ThreadGroup,
    finegrained_alloc,
    target,
)
from pyrocshmem.finegrained_alloc import PIECE
from pyrocshmem.forming import SharedMemory
from pyrocshmem.groups import Group
from tests.faults.heap_support import MIB, assert_next_job_works, mapped_files, raised_by, raised_within
from tests.faults.test_forming_faults import _of_all
from tests.ranks import run_ranks, values

TIER = 2
BIG = 40 * MIB  # in pieces of more than one kind
WAIT_S = 2.0


def _state(heap):
    """What a failed growth must leave as it was."""
    return (
        heap.usage(),
        heap._memory.pieces,
        finegrained_alloc.live().bytes,
        finegrained_alloc.live().mappings,
    )


def _big(heap):
    return heap.full((BIG,), 7, dtype=torch.uint8)


def _works(heap, x):
    """It grows now, and what was there is there."""
    big = _big(heap)
    heap.barrier()
    at_peer = heap.peer_view(big, (heap.rank + 1) % heap.world_size)
    return bool((at_peer == 7).all()) and bool((x == 5).all()) and heap.usage().total >= BIG


def _has_none(rank, world_size, fails_at):
    heap = Heap()
    x = heap.full((1000,), 5)
    before, real, calls = _state(heap), finegrained_alloc.alloc, []

    def alloc(nbytes, backend, device=0, at=None):
        calls.append(nbytes)
        if rank == 1 and len(calls) > fails_at:
            raise MemoryError(f"{backend}: {nbytes} bytes: planted")
        return real(nbytes, backend, device, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finegrained_alloc, "alloc", alloc)
        error = raised_within(5, lambda: _big(heap))
    kept = _state(heap) == before
    return type(error), str(error), error.rank, type(error.__cause__), kept, _works(heap, x)


@pytest.mark.num_ranks(3)
@pytest.mark.parametrize("fails_at", [0, 1], ids=["the first piece", "a later one"])
def test_case_14_one_rank_has_no_memory_to_grow(fails_at):
    for rank, end in enumerate(values(run_ranks(_has_none, 3, fails_at))):
        kind, text, which, cause, kept, works = end
        assert (kind, which) == (HeapOutOfMemory, 1)
        assert f"{BIG} bytes requested" in text
        assert "MemoryError" in text
        assert "planted" in text
        assert "no rank allocated anything" in text
        assert cause is (MemoryError if rank == 1 else type(None))
        assert kept, "a piece was kept"
        assert works


def _no_room(rank, world_size, nbytes):
    heap = Heap()
    x = heap.full((1000,), 5)
    before = _state(heap)
    error = raised_within(20, lambda: heap.empty(nbytes, dtype=torch.uint8))
    return type(error), str(error), _state(heap) == before, _works(heap, x)


@pytest.mark.cpu
def test_case_14_a_full_dev_shm_is_an_error_and_never_a_sigbus(monkeypatch):
    # One piece of it alone is more than fits, which is refused before anything is taken.
    nbytes = shutil.disk_usage("/dev/shm").total + 64 * MIB
    monkeypatch.setenv("PYROCSHMEM_HEAP_BYTES", str(2 * nbytes))
    for kind, text, kept, works in values(run_ranks(_no_room, 2, nbytes)):
        assert kind is HeapOutOfMemory
        assert "bytes in /dev/shm: No space left on device" in text
        assert "--shm-size" in text
        assert kept
        assert works


def _can_not_map(rank, world_size):
    heap = Heap()
    x = heap.full((1000,), 5)
    before, real = _state(heap), finegrained_alloc.open_handle

    def open_handle(handle, device=0, at=None):
        if rank == 2:
            raise RuntimeError("planted: no descriptor")
        return real(handle, device, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finegrained_alloc, "open_handle", open_handle)
        error = raised_within(5, lambda: _big(heap))
    return type(error), str(error), _state(heap) == before, _works(heap, x)


@pytest.mark.num_ranks(3)
def test_case_17_one_rank_can_not_map_what_a_peer_has_grown_by():
    for kind, text, kept, works in values(run_ranks(_can_not_map, 3)):
        assert kind is ShmemError
        assert (
            "the heap could not grow: rank 2 could not map the heap of rank 0: planted: no descriptor" in text
        )
        assert kept
        assert works


INSTANTS = ("allocates", "maps", "has mapped")


def _at(instant, action):
    """Patch `SharedMemory` so that `action` comes while it grows: the patches to undo."""
    patch = pytest.MonkeyPatch()
    real_allocate, real_map, real_absent = SharedMemory._allocate, SharedMemory._map, SharedMemory._absent
    if instant == "allocates":

        def allocate(memory, pieces, nonce):
            offer = real_allocate(memory, pieces, nonce)
            action()
            return offer

        patch.setattr(SharedMemory, "_allocate", allocate)
    elif instant == "maps":

        def map_peer(memory, peer, *arguments):
            base = real_map(memory, peer, *arguments)
            if peer != memory.rank:
                action()
            return base

        patch.setattr(SharedMemory, "_map", map_peer)
    else:

        def absent(memory, *arguments):
            action()
            return real_absent(memory, *arguments)

        patch.setattr(SharedMemory, "_absent", absent)
    return patch


def _killed(rank, world_size, instant):
    heap = Heap(timeout=20.0)
    x = heap.full((1000,), 5)
    before = _state(heap)
    heap.timeout = WAIT_S
    if rank == 1:
        _at(instant, lambda: os.kill(os.getpid(), signal.SIGKILL))
        _big(heap)
    # Where it had voted that it mapped all, the others have the piece, and miss it in the vote on the allocation.
    error = raised_within(WAIT_S + 2, lambda heap=heap: _big(heap))
    kind, peer = type(error), error.peer
    kept = _state(heap)[1:] == before[1:]
    with Heap(None, heap.group.subgroup([0, 2])) as again:
        works = _works(again, again.full((1000,), 5))
    files = len(mapped_files())
    heap.close()
    del x, heap, error
    gc.collect()  # the heap holds its fault, whose traceback holds the heap
    return kind, peer, kept, works, files, len(mapped_files())


@pytest.mark.num_ranks(3)
@pytest.mark.alone
@pytest.mark.parametrize("instant", INSTANTS)
def test_case_1_a_rank_killed_while_the_heap_grows(instant):
    ends = run_ranks(_killed, 3, instant)
    assert ends[1].exitcode == -signal.SIGKILL
    heard = [ends[rank].value for rank in (0, 2)]
    assert PeerTimeout in [kind for kind, *_ in heard]
    for kind, peer, kept, works, files, left in heard:
        assert (kind, peer) == (PeerTimeout, 1) if kind is PeerTimeout else kind is PeerAborted
        assert kept == (instant != "has mapped")
        assert works
        assert left == 0 or target.backend() != "host"
        assert files > 0 or target.backend() != "host"
    assert_next_job_works()


class Interrupted(BaseException):
    """As `KeyboardInterrupt`, which pytest would take for its own."""


def _interrupted(rank, world_size, instant):
    heap = Heap(timeout=20.0)
    x = heap.full((1000,), 5)
    before = _state(heap)
    heap.timeout = WAIT_S

    def interrupt():
        raise Interrupted

    if rank == 1:
        patch = _at(instant, interrupt)
        with pytest.raises(Interrupted):
            _big(heap)
        patch.undo()
        heap.abort("it was interrupted")
        error = None
    else:
        error = raised_by(lambda: _big(heap))[0]
    heap.timeout = 20.0
    heap.recover()
    after = _state(heap)
    pieces = heap.vote("pieces", str(after[1]).encode())
    return (
        type(error).__name__,
        len(set(pieces)) == 1,
        after == before or instant == "has mapped",
        _works(heap, x),
    )


@pytest.mark.num_ranks(3)
@pytest.mark.alone
@pytest.mark.parametrize("instant", INSTANTS)
def test_a_rank_interrupted_while_the_heap_grows_and_all_recover(instant):
    for rank, (kind, same, kept, works) in enumerate(values(run_ranks(_interrupted, 3, instant))):
        assert kind == ("NoneType" if rank == 1 else "PeerAborted")
        assert same, "ranks hold different pieces"
        assert kept
        assert works


class Store:
    """Between ranks that are threads: rank 0 reads `forge(offers)` for rank 1's offer of more memory."""

    def __init__(self, patch):
        self.offers = []
        self.forge = None
        honest = Group.exchange

        def exchange(group, payload, what, timeout=None):
            replies = honest(group, payload, what, timeout)
            if what.endswith("bytes more"):
                self.offers = list(replies)
                if self.forge is not None and group.rank == 0:
                    replies[1] = self.forge(self.offers)
            return replies

        patch.setattr(Group, "exchange", exchange)


@pytest.mark.cpu
@pytest.mark.alone
@pytest.mark.parametrize(
    ("forge", "words"),
    [
        (lambda old, new: new[2], "its handle led to memory that says it is rank 2's"),
        (lambda old, new: old[1], "its handle led to memory that isn't its heap"),
        (lambda old, new: b"{}", "its record can't be read"),
    ],
    ids=["another rank", "another heap", "no record"],
)
def test_case_33_a_forged_offer_of_more_memory(monkeypatch, forge, words):
    store = Store(monkeypatch)
    others = _of_all(ThreadGroup.create(3), lambda group: Heap(None, group))
    _of_all(others, _big)
    old = store.offers
    heaps = _of_all(ThreadGroup.create(3), lambda group: Heap(None, group))
    tensors = _of_all(heaps, lambda heap: heap.full((1000,), 5))
    store.forge = lambda new: forge(old, new)
    for error, seconds in _of_all(heaps, lambda heap: raised_by(lambda: _big(heap))):
        assert type(error) is ShmemError
        assert f"the heap could not grow: rank 0 could not map the heap of rank 1: {words}" in str(error)
        assert seconds < 5
    store.forge = None
    assert all(_of_all(range(3), lambda rank: _works(heaps[rank], tensors[rank])))
    for heap in (*others, *heaps):
        heap.close()


@pytest.mark.cpu
def test_case_33_pieces_of_one_offer_are_not_mapped_in_each_other_s_place():
    """Of one size, of the same heap and rank: each says where it belongs."""
    heaps = _of_all(ThreadGroup.create(2), lambda group: Heap(None, group))

    def grow(heap):
        def exchange(payload, what):
            replies = heap.vote(what, payload)
            if heap.rank == 0 and what == "more":
                theirs = json.loads(replies[1])
                theirs["handles"].reverse()
                replies[1] = json.dumps(theirs).encode()
            return replies

        return heap._memory.add(exchange, "more", [(4 * PIECE, PIECE), (6 * PIECE, PIECE)])

    for failure in _of_all(heaps, grow):
        assert "isn't its heap" in failure.text
    assert all(len(heap._memory.pieces) == 1 for heap in heaps)
    for heap in heaps:
        heap.close()


def _signal_safe(rank, world_size, seed):
    """Growth and give-back over and over, and a fault now and then, from which all recover."""
    chance = random.Random(seed)
    heap = Heap(timeout=20.0)
    x = heap.full((1000,), 5)
    for _ in range(6):
        big = heap.full((chance.randrange(90 * MIB),), 3, dtype=torch.uint8)
        who = chance.randrange(world_size)
        if chance.random() < 0.5:
            if rank == who:
                heap.abort("planted")
            else:
                raised_by(heap.barrier)
            heap.recover()
        assert bool((big == 3).all())
        if chance.random() < 0.5:
            heap.free(big)
        del big
        heap.barrier()
        usage = heap.usage()
        assert usage.total <= usage.used + 64 * MIB
    return _works(heap, x)


@pytest.mark.num_ranks(2)
def test_growth_between_faults_and_recoveries():
    assert values(run_ranks(_signal_safe, 2, random.randrange(1 << 30))) == [True, True]
