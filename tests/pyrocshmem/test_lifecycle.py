"""How heaps end: closed, broken by a fault, left behind at exit, forked; and how fast the peers hear of it."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pyrocshmem import (
    Heap,
    PeerAborted,
    PeerTimeout,
    ShmemError,
    ThreadGroup,
    close_all,
    finegrained_alloc,
    heap_for,
    launching,
    status,
    target,
)
from tests.ranks import run_ranks, values
from tests.stopwatch import Stopwatch, until, within

TIER = 1
MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


def live():
    gc.collect()
    return finegrained_alloc.live()


def test_close_gives_the_memory_back_once_no_tensor_uses_it():
    before = live()
    heap = Heap(MIB)
    x = heap.ones(100)
    view = heap.peer_view(x, 0)[3:]
    heap.close()
    heap.close()
    assert heap.closed
    assert float(x.sum() + view.sum()) == 197, "memory of a live tensor is gone"
    assert live().allocations == before.allocations + 1
    del x
    assert live().allocations == before.allocations + 1
    del view
    assert (live().allocations, live().mappings) == (before.allocations, before.mappings)


def test_a_dropped_heap_is_closed():
    before = live().allocations
    Heap(MIB).ones(3)
    assert live().allocations == before


def test_after_close_everything_is_refused():
    heap = Heap(MIB)
    x = heap.ones(3)
    heap.close()
    for call in (
        lambda: heap.zeros(3), lambda: heap.free(x), heap.barrier, heap.check, lambda: heap.vote("call"),
        lambda: heap.peer_view(x, 0), lambda: heap.system,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="the heap is closed"):
            call()
    assert not heap.is_symmetric(x)


def test_close_all_and_a_new_heap():
    first, second = heap_for(None, MIB), Heap(MIB)
    close_all()
    assert first.closed
    assert second.closed
    again = heap_for(None, MIB)
    assert not again.closed
    close_all()


def test_record_of_a_kernel_breaks_the_heap():
    with Heap(MIB) as heap:
        x = heap.ones(3)
        heap.check()
        record = [1, status.Op.GEMM_ALL_REDUCE, 0, 3, 17, 42, 41, 2_000_000]
        heap.status[: len(record)] = torch.tensor(record)
        for call in (heap.check, lambda: heap.zeros(3), lambda: heap.free(x), heap.barrier, heap.synchronize):
            with pytest.raises(
                PeerTimeout, match=r"gemm_all_reduce: rank 0 waited 2\.00 s in vain for rank 3"
            ) as raised:
                call()
            assert (raised.value.tile, raised.value.expected, raised.value.seen) == (17, 42, 41)
        assert heap.broken
        assert float(x.sum()) == 3


def _one_stays_away(rank, world_size):
    with Heap(MIB) as heap:
        told = heap.zeros(world_size)
        tell = heap.peer_view(told, 1)[rank]
        heap.vote("first")
        number = heap._channel.rounds
        heap.timeout = 2.0
        if rank == 1:
            until(lambda: told.sum() == 2)
            return None
        with pytest.raises((PeerTimeout, PeerAborted)) as raised:
            heap.vote("second")
        tell.fill_(1)
        # The second one to give up may hear of the first one's timeout before its own.
        return str(raised.value), number


@pytest.mark.num_ranks(3)
def test_a_vote_in_vain_says_which_vote_and_who_came():
    found = values(run_ranks(_one_stays_away, 3))
    assert found[0][1] == found[2][1]
    for text, number in (found[0], found[2]):
        assert f"in vain for rank 1 (call {number + 1}, expected all 3 ranks, seen ranks 0, 2)" in text


def _fault_of_one(rank, world_size, fault):
    """Rank 1 fails after half a second, the others wait in a vote: (what they heard, when, how late a thread was, when
    it failed)."""
    heap = Heap(MIB)
    watch = Stopwatch()
    start = torch.zeros(1, dtype=torch.float64)
    if rank == 1:
        time.sleep(0.5)
        start[0] = time.time()
    try:
        if rank == 1 and fault == "record":
            heap.status[:8] = torch.tensor([1, status.Op.BARRIER, 1, 0, -1, 5, 4, 100])
            heap.check()
        elif rank == 1 and fault == "raise":
            with heap:
                raise KeyError("weights")
        elif rank == 1 and fault == "close":
            heap.close()
        elif rank == 1 and fault == "abort":
            heap.abort("told to")
            heap.barrier()
        else:
            heap.zeros(3)
    except (ShmemError, KeyError) as error:
        said = type(error).__name__, str(error), getattr(error, "peer", None)
    else:
        said = "none", "", None
    return *said, time.time(), watch.late(), float(start)


@pytest.mark.num_ranks(3)
@pytest.mark.parametrize(
    ("fault", "own", "words"),
    [
        ("record", "PeerTimeout", "PeerTimeout: barrier: rank 1 waited 0.00 s in vain for rank 0"),
        ("raise", "KeyError", "KeyError: 'weights'"),
        ("close", "none", "rank 1 has closed the heap"),
        ("abort", "PeerAborted", "told to"),
    ],
)
def test_peers_in_a_vote_hear_of_a_fault_in_under_a_second(fault, own, words):
    ends = values(run_ranks(_fault_of_one, 3, fault))
    assert ends[1][0] == own
    for rank in (0, 2):
        kind, text, peer, when, late, _ = ends[rank]
        assert (kind, peer) == ("PeerAborted", 1)
        assert words in text
        assert when - ends[1][-1] < 1 + late


def _abort_word(rank, world_size):
    heap = Heap(MIB)
    heap.barrier()
    if rank == 0:
        heap.abort("out of ideas")
        with pytest.raises(PeerAborted, match="out of ideas"):
            heap.zeros(3)
        return int(heap.system[0])
    until(lambda: int(heap.system[0]))  # as a kernel would
    word = int(heap.system[0])
    if heap.device.type != "cpu":  # there the kernel that saw the word leaves the record
        heap.status[:4] = torch.tensor([2, 0, rank, word - 1])
    with pytest.raises(PeerAborted, match="rank 0 gave up: out of ideas"):
        heap.check()
    assert heap.broken
    return word


@pytest.mark.num_ranks(2)
@pytest.mark.alone
def test_abort_reaches_kernels_of_every_rank():
    assert values(run_ranks(_abort_word, 2)) == [1, 1]


def _nobody_comes(rank, world_size):
    heap = Heap(MIB)
    told = heap.zeros(1)
    tell = heap.peer_view(told, 1)
    heap.barrier()
    heap.timeout = 0.6
    if rank == 1:
        until(told.item)
        with pytest.raises(PeerAborted, match="PeerTimeout: zeros"):
            heap.zeros(3)
        return None
    with within(2), pytest.raises(PeerTimeout) as raised:
        heap.zeros(3)
    with pytest.raises(PeerTimeout):
        heap.barrier()
    tell.fill_(1)
    return raised.value.op, raised.value.peer, raised.value.waited_s


@pytest.mark.num_ranks(2)
@pytest.mark.alone
def test_a_vote_that_nobody_joins_ends():
    op, peer, seconds = values(run_ranks(_nobody_comes, 2))[0]
    assert (op, peer) == ("zeros([3], torch.float32)", 1)
    assert seconds >= 0.6


@pytest.mark.cpu
def test_threads_have_heaps_that_are_independent_of_another_groups():
    def body(group, number):
        with Heap(MIB, group) as heap:
            x = heap.zeros(50)
            for peer in range(heap.world_size):
                heap.peer_view(x, peer)[heap.rank] = number + heap.rank
            heap.barrier()
            return x[: heap.world_size].tolist()

    before = live()
    for number in (10, 20):
        expected = [float(number + rank) for rank in range(3)]
        assert launching.spawn_threads(body, 3, number) == [expected] * 3
    assert (live().allocations, live().mappings) == (before.allocations, before.mappings)
    assert heap_for(ThreadGroup.create(1)[0], MIB).nbytes == MIB


def _fork(rank, world_size):
    heap = Heap(MIB)
    x = heap.zeros(4)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: heap.zeros(3), lambda: heap.free(x), heap.barrier, heap.check):
            try:
                call()
            except ShmemError as error:
                refused += "used in its fork" in str(error)
        heap.abort("must not reach the peers")
        heap.close()
        close_all()
        x[0] = refused  # the memory itself is still shared
        os._exit(0)
    os.waitpid(child, 0)
    heap.barrier()
    heap.free(heap.ones(3))
    return x.tolist()


@pytest.mark.cpu
def test_a_fork_can_not_use_the_heap_nor_harm_it():
    assert values(run_ranks(_fork, 2)) == [[4.0, 0, 0, 0]] * 2


SCRIPT = """
import sys, time
import pyrocshmem
from tests.stopwatch import Stopwatch
rank, world_size = pyrocshmem.from_torchrun()
heap = pyrocshmem.Heap(1 << 20, timeout=20)
x = heap.ones(3)
heap.barrier()
watch = Stopwatch()
if rank == 1:
    print(time.time())
    {end}
try:
    heap.barrier()
except pyrocshmem.PeerAborted as error:
    print(time.time() - watch.late(), error)
"""


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "heard"),
    [
        ("raise KeyError('weights')", 1, "KeyError: 'weights'"),
        ("sys.exit(3)", 3, "rank 1 has closed the heap"),
    ],
)
def test_a_program_that_ends_without_closing_tells_its_peers(end, code, heard):
    store, port = launching._listen()  # as torchrun's agent does
    shared = dict(os.environ, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(end=end)],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, code], outputs
    when, _, text = outputs[0][0].partition(" ")
    assert heard in text
    # The process must end before its exit handler speaks: Python's own end is part of this time.
    assert float(when) - float(outputs[1][0]) < 2
    assert dist.is_available()
    del store


LATE_READERS = """
import atexit
kept = {}
atexit.register(lambda: print([float(x.sum()) for x in kept.values()], flush=True))  # runs after all others
import pyrocshmem
def read(heap):
    kept["own"] = heap.ones(1000)
    kept["peer's"] = heap.peer_view(kept["own"], heap.world_size - 1)[10:]
    heap.barrier()
"""


@pytest.mark.parametrize("closed", [False, True])
def test_tensors_can_be_read_until_the_process_ends(closed):
    code = LATE_READERS + "heap = pyrocshmem.Heap(1 << 20)\nread(heap)\n" + "heap.close()\n" * closed
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1000.0, 990.0]\n", "")


def test_exit_with_live_tensors_leaves_nothing():
    code = (
        "import pyrocshmem, re; heap = pyrocshmem.Heap(1 << 20); x = heap.ones(5); print(float(x.sum()));"
        "print(*re.findall(r'/dev/shm/(\\S+) \\(deleted\\)', open('/proc/self/maps').read()))"
    )
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    total, *files = done.stdout.split()
    assert (done.returncode, total, done.stderr) == (0, "5.0", "")
    assert len(files) == (1 if target.backend() == "host" else 0)
    assert all(name.startswith("#") for name in files)  # none, that is: an inode
