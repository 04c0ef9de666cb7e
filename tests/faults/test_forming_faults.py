"""Faults while heaps form and end, and of several at once: cases 17, 23, 24, 26 and 28.

Each test asserts every rank's error, how long it took, and that the next job works.
"""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from pyrocshmem import (
    Heap,
    InitTimeout,
    PeerAborted,
    ShmemError,
    ThreadGroup,
    close_all,
    finegrained_alloc,
    target,
)
from pyrocshmem.forming import SYSTEM_BYTES
from pyrocshmem.groups import Group
from pyrocshmem.lifecycle import Ledger
from pyrocshmem.run_command import app
from tests.faults.heap_support import (
    MIB,
    assert_next_job_works,
    healthy,
    mapped_files,
    raised_by,
    warm_up,
)
from tests.ranks import run_ranks, values

TIER = 2

DEAD_OWNER = """
import finegrained_alloc, os, sys
memory = finegrained_alloc.alloc(int(sys.argv[1]), "host")
sys.stdout.buffer.write(memory.export())
sys.stdout.flush()
os.kill(os.getpid(), 9)
"""


def _handle_of_a_dead_process(nbytes):
    command = [sys.executable, "-c", DEAD_OWNER, str(nbytes)]
    run = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert run.returncode == -signal.SIGKILL
    return run.stdout


def _bad_handle(rank, world_size, kind):
    real, others, files = finegrained_alloc.Allocation.export, [], []

    def export(memory):
        handle = real(memory)
        files.extend(mapped_files())  # one, which has no name already
        if rank != 1:
            return handle
        if kind == "truncated":
            return handle[:-1]
        if kind == "damaged":
            return handle[:20] + bytes([handle[20] ^ 1]) + handle[21:]
        if kind == "sub-allocation":
            return finegrained_alloc.export_pointer(memory.ptr + 4096)
        if kind == "dead process":
            return _handle_of_a_dead_process(memory.nbytes)
        others.append(finegrained_alloc.alloc(memory.nbytes, memory.backend, memory.device))
        return real(others[0])  # sound, of the right size, but not the heap

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finegrained_alloc.Allocation, "export", export)
        error, seconds = raised_by(lambda: Heap(MIB))
    for other in others:
        other.free()
    assert len(files) == 1
    return type(error), str(error), seconds, healthy(rank, world_size)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("truncated", ShmemError, ("rank 0 could not map the heap of rank 1", "bytes")),
        ("damaged", ShmemError, ("rank 0 could not map the heap of rank 1", "checksum")),
        ("sub-allocation", InitTimeout, ("rank 1 of 2 could not take part", "base")),
        ("dead process", ShmemError, ("rank 0 could not map the heap of rank 1", "owner")),
        ("another memory", ShmemError, ("rank 0 could not map the heap of rank 1", "isn't its heap")),
    ],
)
@pytest.mark.alone
def test_case_17_bad_handles_are_errors_that_name_the_cause(kind, error, words):
    ends = values(run_ranks(_bad_handle, 2, kind))
    for raised, text, seconds, total in ends:
        assert raised is error, text
        assert all(word in text for word in words), text
        assert seconds < (10 if kind == "dead process" else 2)
        assert total == 8.0


def _heap_descriptors():
    """Modes of the nameless files that this process has open."""
    modes = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(descriptor).startswith("/dev/shm/#"):
                modes.append(stat.S_IMODE(descriptor.stat().st_mode))
    return modes


def _open_while_it_forms(rank, world_size):
    seal, seen = finegrained_alloc.Allocation.seal, []

    def look(memory):
        seen.extend(_heap_descriptors())
        seal(memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finegrained_alloc.Allocation, "seal", look)
        heap = Heap(3 * MIB)
    heap.barrier()
    return seen, _heap_descriptors()


@pytest.mark.cpu
def test_case_17_only_the_user_may_open_a_heap_and_only_while_it_forms():
    for seen, left in values(run_ranks(_open_while_it_forms, 2)):
        assert seen == [0o600]
        assert left == []


# ---- 33: what somebody else has put into the store


class Store:
    """Between the ranks, which are threads, and what they read of one another: rank 0 reads `forge(offers)` for the
    offer of rank 1. offers: those of the heap that formed last."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.offers: list[bytes] = []
        self.forge: Callable[[list[bytes]], bytes] | None = None
        honest = Group.exchange

        def exchange(group, payload, what, timeout=None):
            replies = honest(group, payload, what, timeout)
            if what.startswith("Heap(") and what.endswith(" on host"):
                self.offers = list(replies)
                if self.forge is not None and group.rank == 0:
                    replies[1] = self.forge(self.offers)
            return replies

        patch.setattr(Group, "exchange", exchange)


def _of_all(groups, call):
    """What `call` gives each rank, in rank order."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(call, groups))


def _form_and_vote(group):
    error, seconds = raised_by(lambda: Heap(MIB, group).barrier())
    return type(error), str(error), seconds


UNREADABLE = "its record can't be read: it is damaged, or somebody else wrote to the store"
FORGED = {
    "another rank": (lambda old, new: new[2], "its handle led to memory that says it is rank 2's"),
    "another heap": (lambda old, new: old[1], "its handle led to memory that isn't its heap"),
    "no record": (lambda old, new: b"{not json", f"{UNREADABLE} (JSONDecodeError"),
    "half a record": (lambda old, new: b"{}", f"{UNREADABLE} (KeyError"),
    "endless": (lambda old, new: b"[" * 100_000, f"{UNREADABLE} (RecursionError"),
}


@pytest.mark.cpu
@pytest.mark.parametrize("kind", FORGED)
@pytest.mark.alone
def test_case_33_a_forged_offer_is_an_error_on_all_ranks(monkeypatch, kind):
    store, groups = Store(monkeypatch), ThreadGroup.create(3)
    heaps = _of_all(groups, lambda group: Heap(MIB, group))
    old = store.offers
    forge, words = FORGED[kind]
    store.forge = lambda new: forge(old, new)
    for raised, text, seconds in _of_all(groups, _form_and_vote):
        assert raised is ShmemError, text
        assert f"rank 0 could not map the heap of rank 1: {words}" in text
        assert seconds < 5
    store.forge = None
    heaps += _of_all(groups, lambda group: Heap(MIB, group))  # the control, and the next heap works
    for heap in heaps:
        heap.close()


@pytest.mark.cpu
@pytest.mark.alone
def test_case_33_an_offer_of_another_job_is_an_error_on_all_ranks(monkeypatch):
    """Groups there have the same names, their heap the same number, and its rank 1 the nonce that it says."""
    store = Store(monkeypatch)
    heaps = _of_all(ThreadGroup.create(3), lambda group: Heap(MIB, group))
    theirs = store.offers
    store.forge = lambda ours: theirs[1]
    ends = _of_all(ThreadGroup.create(3), _form_and_vote)
    assert [kind for kind, *_ in ends] == [ShmemError, ShmemError, PeerAborted]
    for _, text, seconds in ends:
        assert "did not meet in each other's memory" in text
        assert seconds < 5
    for heap in heaps:
        heap.close()


# ---- texts of what has no room


@pytest.mark.cpu
def test_memory_to_compare_calls_is_called_so(monkeypatch):
    """And not a heap of 0 bytes."""

    def refuse(*arguments):
        raise MemoryError("planted")

    monkeypatch.setattr(finegrained_alloc, "alloc", refuse)
    for error, _ in _of_all(ThreadGroup.create(2), lambda group: raised_by(lambda: Ledger(group, 5.0))):
        assert str(error).startswith("memory to compare calls on host: ranks 0, 1 of 2 could not take part")


def _default_heap(rank, world_size):
    def refuse(nbytes, backend, device=0):
        raise finegrained_alloc.Unavailable("planted: heaps don't grow here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finegrained_alloc, "reserve", refuse)
        error, _ = raised_by(Heap)
    return type(error), str(error)


@pytest.mark.cpu
def test_a_default_size_that_does_not_fit(monkeypatch):
    """Where a heap can't grow: what was asked for, what is free, and what to do."""
    nbytes = shutil.disk_usage("/dev/shm").total + MIB
    monkeypatch.setenv("PYROCSHMEM_HEAP_BYTES", str(nbytes))
    for kind, text in values(run_ranks(_default_heap, 2)):
        assert kind is InitTimeout
        assert text.startswith(
            f"Heap({nbytes} bytes) on host: ranks 0, 1 of 2 could not take part: MemoryError: "
        )
        for words in (
            f"{nbytes + SYSTEM_BYTES} bytes in /dev/shm",
            "bytes free there",
            "--shm-size",
            "HEAP_BYTES",
        ):
            assert words in text


def _no_room(rank, world_size, job):
    Heap(1 << 52)


@pytest.mark.cpu
def test_a_run_without_room_for_its_heap_ends_in_a_line(monkeypatch):
    """And not with the tracebacks of all ranks and of what started them."""
    monkeypatch.setattr("pyrocshmem.stream_k.run.job.run_rank", _no_room)
    ended = CliRunner().invoke(app, ["-n", "2", "-c", "all_reduce", "--shape", "16,16,16"])
    assert ended.exit_code == 1
    assert isinstance(ended.exception, SystemExit), "it is no uncaught error"
    assert ended.stdout.endswith("┘\n"), "the table says what is asked for, and nothing follows"
    before, *after = ended.stderr.splitlines()
    assert before == "starting 2 ranks ..."
    assert len(after) == 1, ended.output
    assert after[0].startswith(
        f"error: Heap({1 << 52} bytes) on host: ranks 0, 1 of 2 could not take part: MemoryError"
    )
    assert "--shm-size" in after[0]


# ---- 23: forming


def _missing(rank, world_size):
    warm_up(rank)
    if rank == 2:
        time.sleep(3)
        return None
    error, seconds = raised_by(lambda: Heap(MIB))
    return type(error), error.missing, seconds, finegrained_alloc.live().allocations


@pytest.mark.num_ranks(3)
@pytest.mark.alone
def test_case_23_a_missing_rank_is_named(monkeypatch):
    monkeypatch.setenv("PYROCSHMEM_INIT_SECONDS", "1.5")
    ends = values(run_ranks(_missing, 3))[:2]
    assert [(kind, missing, allocations) for kind, missing, _, allocations in ends] == [
        (InitTimeout, [2], 0)
    ] * 2
    # Who came first gives up when the time is over, the other, which has waited for less, with it.
    assert 1.5 <= max(seconds for _, _, seconds, _ in ends) < 2.5
    assert_next_job_works()


def _no_memory(rank, world_size, on_all):
    alloc = finegrained_alloc.alloc

    def refuse(nbytes, backend, device=0):
        if rank == 1:
            raise MemoryError(f"{backend}: {nbytes} bytes: planted")
        return alloc(nbytes, backend, device)

    with pytest.MonkeyPatch.context() as patch:
        if not on_all:
            patch.setattr(finegrained_alloc, "alloc", refuse)
        error, seconds = raised_by(lambda: Heap(1 << 52 if on_all else MIB))
    live = finegrained_alloc.live()
    cause = type(error.__cause__)
    return (
        type(error),
        error.missing,
        error.reason,
        cause,
        seconds,
        live.allocations,
        healthy(rank, world_size),
    )


@pytest.mark.num_ranks(3)
@pytest.mark.parametrize("on_all", [False, True], ids=["on one", "on all"])
@pytest.mark.alone
def test_case_23_out_of_memory(on_all):
    for rank, end in enumerate(values(run_ranks(_no_memory, 3, on_all))):
        kind, missing, reason, cause, seconds, allocations, total = end
        assert (kind, missing) == (InitTimeout, [0, 1, 2] if on_all else [1])
        assert "MemoryError" in reason
        assert cause is (MemoryError if on_all or rank == 1 else type(None))
        assert (allocations, total) == (0, 8.0)
        assert seconds < 5


# ---- 24: ends (more in tests/pyrocshmem/test_lifecycle.py)


def _closes_early(rank, world_size):
    heap = Heap(MIB)
    x = heap.full((1000,), rank)
    heap.barrier()
    if rank == 0:
        heap.close()
        heap.close()
        del x
        time.sleep(1)
        return None
    time.sleep(0.3)
    theirs = heap.peer_view(x, 0)
    theirs.fill_(5)  # mapped still, though its owner has left
    error, seconds = raised_by(heap.barrier)
    heap.close()
    close_all()
    return type(error), str(error), seconds, float(theirs.sum())


@pytest.mark.cpu
@pytest.mark.alone
def test_case_24_close_while_peers_wait():
    kind, text, seconds, total = values(run_ranks(_closes_early, 2))[1]
    assert kind is PeerAborted
    assert "rank 0 gave up: rank 0 has closed the heap" in text
    assert seconds < 1
    assert total == 5000
    assert_next_job_works()


# ---- 26, 28: independence


def _overlapping(rank, world_size):
    groups = [dist.new_group(members) for members in ([0, 1], [1, 2], [0, 1, 2])]
    chance = torch.Generator().manual_seed(5)
    heaps = [
        Heap(MIB, group)
        for group, members in zip(groups, ([0, 1], [1, 2], [0, 1, 2]), strict=True)
        if rank in members
    ]
    twin = Heap(MIB, groups[2])  # two heaps of one group
    heaps.append(twin)
    tensors: dict[int, torch.Tensor] = {}
    for round_number in range(30):
        # The same random order on every rank, of the heaps that it has.
        order = torch.randperm(4, generator=chance).tolist()
        present = {0: [0, 2, 3], 1: [0, 1, 2, 3], 2: [1, 2, 3]}[rank]
        for which in order:
            if which not in present:
                continue
            heap = heaps[present.index(which)]
            if which in tensors:
                expected = float(100 * which + round_number - 1)
                assert float(tensors[which].max()) == float(tensors[which].min()) == expected
                heap.barrier()
                heap.free(tensors[which])
            tensors[which] = heap.zeros(64 * (which + 1))
            right = (heap.rank + 1) % heap.world_size
            heap.peer_view(tensors[which], right).fill_(100 * which + round_number)
            heap.barrier()
    return len({heap.base for heap in heaps})


@pytest.mark.num_ranks(3)
def test_case_26_overlapping_groups_and_two_heaps_of_one_group():
    assert values(run_ranks(_overlapping, 3)) == [3, 4, 3]


def _job(rank, world_size, number, folder):
    with Heap(MIB) as heap:
        x = heap.full((5000,), float(number))
        Path(folder, f"{number}-{rank}").touch()
        deadline = time.monotonic() + 40
        while len(list(Path(folder).iterdir())) < 4:  # both jobs have their heaps now
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for step in range(20):
            heap.peer_view(x, 1 - rank).add_(1)
            heap.barrier()
            assert float(x[step]) == number + step + 1
            heap.barrier()
        return float(x.min()), float(x.max())


@pytest.mark.cpu
@pytest.mark.alone
def test_case_28_two_jobs_at_the_same_time(tmp_path):
    ends: dict[int, list] = {}
    jobs = [
        threading.Thread(target=lambda n=n: ends.update({n: run_ranks(_job, 2, n, str(tmp_path))}))
        for n in (100, 200)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    for number in (100, 200):
        assert values(ends[number]) == [(number + 20.0, number + 20.0)] * 2
    assert target.backend() == "host"
