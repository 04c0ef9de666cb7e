"""Faults of the heap: cases 1, 4, 5, 6 (what the host does in them), 14 to 17, 23, 24, 26 and 28.

Each test asserts every rank's error, how long it took, that contents around are unchanged, and that the next call, or
the next job, works. `canary` surrounds what a fault might touch.
"""

import contextlib
import os
import re
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
    CallMismatch,
    Heap,
    HeapOutOfMemory,
    InitTimeout,
    PeerAborted,
    PeerTimeout,
    ShmemError,
    close_all,
    target,
)
from pyrocshmem.forming import SYSTEM_BYTES
from tests.ranks import run_ranks, values

TIER = 2
MIB = 1 << 20
FILE = re.compile(r"/dev/shm/pyrocshmem-\w+")


def mapped_files():
    """Paths of the heaps that this process maps, its own and its peers', unlinked or not. Other jobs' are not ours."""
    return set(FILE.findall(Path("/proc/self/maps").read_text()))


def existing(paths):
    return [path for path in paths if os.path.exists(path)]


@contextlib.contextmanager
def canary(heap):
    """Words before and after what is allocated inside, which must keep their bits; and a heap that works afterwards."""
    rank = heap.rank
    before, after = (
        heap.full((64,), 7 + rank, dtype=torch.int64),
        heap.full((64,), 9 + rank, dtype=torch.int64),
    )
    usage = heap.usage()
    yield
    assert heap.usage() == usage, "a piece was kept"
    assert bool((before == 7 + rank).all())
    assert bool((after == 9 + rank).all())
    x = heap.full((100,), rank)
    heap.barrier()
    assert all(float(heap.peer_view(x, peer)[99]) == peer for peer in range(heap.world_size))
    for tensor in (x, before, after):
        heap.free(tensor)


def raised_by(call):
    """(the exception of `call`, seconds)."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return error, time.monotonic() - start
    raise AssertionError("nothing was raised")


def healthy(rank, world_size):
    with Heap(MIB) as heap:
        return float(heap.ones(8).sum())


def assert_next_job_works(num_ranks=2):
    assert values(run_ranks(healthy, num_ranks)) == [8.0] * num_ranks


# ---- 1, 4: a peer is killed, or raises


def _killed(rank, world_size):
    heap = Heap(MIB, timeout=2)
    x = heap.ones(4)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error, seconds = raised_by(lambda: heap.free(x))
    op = getattr(error, "op", None)
    return type(error), error.peer, op, seconds, float(x.sum()), mapped_files()


@pytest.mark.num_ranks(3)
def test_case_1_a_killed_peer_is_named_in_time_and_leaves_nothing():
    ends = run_ranks(_killed, 3)
    assert ends[1].exitcode == -signal.SIGKILL
    heard = [ends[rank].value for rank in (0, 2)]
    assert PeerTimeout in [kind for kind, *_ in heard]
    for kind, peer, op, seconds, total, files in heard:
        # The second survivor may hear of the first one's timeout before its own.
        assert (kind, peer, op) == (PeerTimeout, 1, "free") if kind is PeerTimeout else kind is PeerAborted
        assert seconds < 4
        assert total == 4
        assert len(files) == (3 if target.backend() == "host" else 0)
        assert existing(files) == []
    assert_next_job_works()


def _raises_first(rank, world_size):
    if rank == 1:
        time.sleep(0.3)
        raise KeyError(f"weights, at {time.time()}")
    error, _ = raised_by(lambda: Heap(MIB))
    return type(error), error.peer, str(error), time.time()


@pytest.mark.num_ranks(3)
def test_case_4_a_rank_that_raises_before_its_call():
    ends = run_ranks(_raises_first, 3)
    raised_at = float(str(ends[1].exception).rpartition(" ")[2].strip("'\""))
    for rank in (0, 2):
        kind, peer, text, when = ends[rank].value
        assert (kind, peer) == (PeerAborted, 1)
        assert "KeyError: 'weights" in text
        assert when - raised_at < 1


# ---- 5, 6: different calls


def _different_calls(rank, world_size):
    found = []
    with Heap(MIB) as heap:
        kept = heap.ones(32)
        for call in (
            lambda: heap.zeros(8 + (rank == 1)),
            lambda: heap.zeros(8, dtype=torch.float16 if rank == 2 else torch.float32),
            lambda: heap.zeros(8) if rank else heap.ones(8),
            lambda: heap.zeros(8) if rank else heap.free(kept),
            lambda: heap.barrier() if rank else heap.empty(3),
            lambda: heap.zeros(8) if rank else heap.zeros(-8),
        ):
            with canary(heap):
                error, seconds = raised_by(call)
            found.append((type(error).__name__, getattr(error, "calls", [str(error)]), seconds))
        assert float(kept.sum()) == 32
    return found


@pytest.mark.num_ranks(3)
def test_cases_5_and_6_different_calls_are_listed_on_all_ranks():
    ends = values(run_ranks(_different_calls, 3))
    for rank in range(3):
        assert all(seconds < 1 for *_, seconds in ends[rank])
        kinds = [kind for kind, *_ in ends[rank]]
        # In the last, rank 0's own mistake matters more than the mismatch it makes.
        assert kinds == ["CallMismatch"] * 5 + (["RuntimeError"] if rank == 0 else ["CallMismatch"])
    calls = [call for _, call, _ in ends[1]]
    assert calls[0] == [f"zeros([{n}], torch.float32)" for n in (8, 9, 8)]
    assert calls[1][2] == "zeros([8], torch.float16)"
    assert calls[2][0].startswith("ones")
    assert calls[3] == ["free", *["zeros([8], torch.float32)"] * 2]
    assert calls[4] == ["empty([3], torch.float32)", "barrier", "barrier"]
    assert "RuntimeError" in calls[5][0]


def _different_sizes(rank, world_size):
    error, seconds = raised_by(lambda: Heap(MIB * (1 + rank)))
    assert finegrained_alloc.live().allocations == 0
    return type(error), str(error), seconds, healthy(rank, world_size)


@pytest.mark.num_ranks(2)
def test_heaps_of_different_sizes():
    for kind, text, seconds, total in values(run_ranks(_different_sizes, 2)):
        assert (kind, total) == (CallMismatch, 8.0)
        assert str(MIB) in text
        assert str(2 * MIB) in text
        assert seconds < 5


# ---- 14: out of memory


def _exhausted_on_one(rank, world_size):
    with Heap(MIB) as heap, canary(heap):
        # Ranks stay symmetric by themselves; so take the memory of one behind the heap's back.
        hidden = heap._free_list.alloc(MIB // 2 + 256) if rank == 1 else None
        error, seconds = raised_by(lambda: heap.zeros(MIB // 2, dtype=torch.uint8))
        if hidden is not None:
            heap._free_list.free(hidden)
        return type(error), error.requested, error.free, error.largest, error.rank, seconds


@pytest.mark.num_ranks(3)
def test_case_14_exhausted_on_one_rank():
    ends = values(run_ranks(_exhausted_on_one, 3))
    for kind, requested, free, largest, rank, seconds in ends:
        assert (kind, requested, rank) == (HeapOutOfMemory, MIB // 2, 1)
        assert free == largest == MIB - 1024 - MIB // 2 - 256
        assert seconds < 1


def test_case_14_exhausted_by_fragments():
    with Heap(16 * 256) as heap:
        tensors = [heap.empty(256, dtype=torch.uint8) for _ in range(16)]
        for tensor in tensors[::2]:
            heap.free(tensor)
        with pytest.raises(
            HeapOutOfMemory, match="512 bytes requested, 2048 free, 256 the largest free block"
        ):
            heap.empty(512, dtype=torch.uint8)
        assert heap.usage().num_allocations == 8
        assert heap.offset(heap.empty(256, dtype=torch.uint8)) == SYSTEM_BYTES


# ---- 15: bad frees


def _bad_frees(rank, world_size):
    found = []
    with Heap(MIB, debug=True) as heap, canary(heap):
        x, y = heap.full((100,), 3.0), heap.full((100,), 4.0)
        gone = heap.ones(10)
        heap.free(gone)
        elsewhere = torch.ones(100, device=heap.device)
        reused = heap.ones(10)  # the bytes of `gone`
        mistakes = {
            "freed": gone, "interior": x[10:], "foreign": elsewhere, "not a tensor": 3, "another device": x.to("meta"),
        }  # fmt: skip
        for tensor in mistakes.values():
            for who in (0, 1):  # the mistake of one rank, then of all
                wrong = who == 0 or rank == 1
                error, seconds = raised_by(
                    lambda wrong=wrong, tensor=tensor: heap.free(tensor if wrong else y)
                )
                assert seconds < 1
                found.append((type(error).__name__, str(error)))
        assert heap.usage().num_allocations == 5
        assert float(x.sum() + y.sum() + reused.sum()) == 710
        heap.free(x.view(10, 10)[:2])  # the start of its block
        assert bool(x.isnan().all()), "use after free must read NaN in debug mode"
        heap.free(y)
        heap.free(reused)
    return found


@pytest.mark.num_ranks(2)
def test_case_15_bad_frees():
    ends = values(run_ranks(_bad_frees, 2))
    words = ["was freed"] * 2 + ["starts inside its block"] * 2 + ["not on this heap"] * 2
    words += ["got a int"] * 2 + ["the tensor is on meta"] * 2
    for rank in range(2):
        for (kind, text), word, who in zip(ends[rank], words, (0, 1) * 5, strict=True):
            assert word in text
            own = who == 0 or rank == 1
            assert kind == ("TypeError" if word == "got a int" and own else "ValueError")
            assert own or "nothing was freed, because rank 1 raised" in text


# ---- 16: what a peer can't be asked for


def _bad_views(rank, world_size):
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    with Heap(MIB, pairs[rank // 2]) as heap, Heap(MIB) as other, canary(heap):
        x = heap.ones(3)
        assert (heap.rank, heap.world_size) == (rank % 2, 2)
        errors = [
            raised_by(call)[0]
            for call in (
                lambda: heap.peer_view(torch.ones(3, device=heap.device), 0),
                lambda: heap.peer_view(other.ones(3), 0),
                lambda: heap.peer_view(torch.ones(3, device="meta"), 0),
                lambda: heap.peer_view(x, 2),
                lambda: heap.peer_view(x, -1),
            )
        ]
        heap.free(x)
        return [(type(error), str(error)) for error in errors]


@pytest.mark.num_ranks(4)
def test_case_16_views_that_can_not_be():
    for rank, errors in enumerate(values(run_ranks(_bad_views, 4))):
        assert [kind for kind, _ in errors] == [ValueError] * 5
        members = [0, 1] if rank < 2 else [2, 3]
        texts = [text for _, text in errors]
        assert "not on this heap" in texts[0]
        assert "not on this heap" in texts[1]
        assert "the tensor is on meta, the heap on" in texts[2]
        for text, asked in ((texts[3], 2), (texts[4], -1)):
            assert f"rank {asked}, allowed are 0..1: ranks count within the heap's group" in text
            assert str(members) in text


# ---- 17: bad handles

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
        modes.extend(stat.S_IMODE(os.stat(path).st_mode) for path in existing(seen))
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
    if rank == 2:
        time.sleep(3)
        return None
    error, seconds = raised_by(lambda: Heap(MIB))
    return type(error), error.missing, seconds, finegrained_alloc.live().allocations


@pytest.mark.num_ranks(3)
def test_case_23_a_missing_rank_is_named(monkeypatch):
    monkeypatch.setenv("PYROCSHMEM_INIT_SECONDS", "1.5")
    for end in values(run_ranks(_missing, 3))[:2]:
        kind, missing, seconds, allocations = end
        assert (kind, missing, allocations) == (InitTimeout, [2], 0)
        assert 1.5 <= seconds < 2.5
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
def test_case_24_close_while_peers_wait():
    kind, text, seconds, total = values(run_ranks(_closes_early, 2))[1]
    assert kind is PeerAborted
    assert "rank 0 gave up: it closed the heap" in text
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
