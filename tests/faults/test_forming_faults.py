"""Faults while heaps form and end, and of several at once: cases 17, 23, 24, 26 and 28.

Each test asserts every rank's error, how long it took, and that the next job works.
"""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import finegrained_alloc
from pyrocshmem import (
    Heap,
    InitTimeout,
    PeerAborted,
    ShmemError,
    close_all,
    target,
)
from tests.faults.heap_support import (
    FILE,
    MIB,
    assert_next_job_works,
    existing,
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
sys.stderr.write(open("/proc/self/maps").read())
sys.stderr.flush()
os.kill(os.getpid(), 9)
"""


def _handle_of_a_dead_process(nbytes):
    command = [sys.executable, "-c", DEAD_OWNER, str(nbytes)]
    run = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert run.returncode == -signal.SIGKILL
    os.unlink(FILE.search(run.stderr.decode())[0])  # killed before anyone could take the name off its file
    return run.stdout


def _bad_handle(rank, world_size, kind):
    real, others, files = finegrained_alloc.Allocation.export, [], []

    def export(memory):
        handle = real(memory)
        files.extend(mapped_files())
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
    return type(error), str(error), seconds, existing(files), healthy(rank, world_size)


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
    for raised, text, seconds, left, total in ends:
        assert raised is error, text
        assert all(word in text for word in words), text
        assert seconds < (10 if kind == "dead process" else 2)
        assert left == []
        assert total == 8.0


def _mode_of_the_file(rank, world_size):
    seal, seen = finegrained_alloc.Allocation.seal, []

    def look(memory):
        seen.extend(mapped_files())
        for path in existing(seen):
            # The peer may seal its own between the two looks.
            with contextlib.suppress(FileNotFoundError):
                modes.append(stat.S_IMODE(os.stat(path).st_mode))
        seal(memory)

    modes: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finegrained_alloc.Allocation, "seal", look)
        heap = Heap(3 * MIB)
    heap.barrier()
    return modes, existing(seen)


@pytest.mark.cpu
def test_case_17_only_the_user_may_open_a_heap_and_only_while_it_forms():
    for modes, left in values(run_ranks(_mode_of_the_file, 2)):
        assert set(modes) == {0o600}  # the own file, and the peer's unless that has been sealed already
        assert left == []


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
