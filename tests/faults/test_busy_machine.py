"""Fault 31: a loaded machine, ranks that are descheduled for seconds: ops pass, and only what is missing times out.

The control has the budget that such a pause exceeds.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from pyrocshmem import Heap, PeerTimeout, collectives, stream_k
from pyrocshmem.calls.workspace import Workspace
from tests.ranks import run_ranks, values
from tests.stopwatch import Stopwatch, until, within
from tests.stream_k.products import integers, small_config

TIER = 3
pytestmark = pytest.mark.cpu
STOPPED_S, BUDGET_S, SHORT_S = 3.0, 10.0, 1.0
VICTIM = 1
M, N, K = 16, 16, 24


@contextlib.contextmanager
def busy_loops() -> Iterator[None]:
    """Inside, a process on each core that this one may use, two at most, never gives it up by itself."""
    code = "import os, sys\nos.sched_setaffinity(0, [int(sys.argv[1])])\nwhile os.getppid() == int(sys.argv[2]): pass"
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))[:2]]
    # Of a process group of their own: their time in queues is not that of a test's processes.
    loops = [
        subprocess.Popen([sys.executable, "-c", code, core, str(os.getpid())], start_new_session=True)
        for core in cores
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


CONTINUE = """
import os, signal, sys, time
victim = int(sys.argv[1])
while open(f"/proc/{victim}/stat").read().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
os.kill(victim, signal.SIGCONT)
"""


def stop_for_a_while() -> None:
    """This process is stopped a few milliseconds from now, wherever it is then, for `STOPPED_S` seconds."""
    subprocess.Popen([sys.executable, "-c", CONTINUE, str(os.getpid()), str(STOPPED_S)])
    threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGSTOP)).start()


def calls(rank: int, world_size: int, count: int, budget_s: float, stops: bool) -> tuple[int, float]:
    """(calls whose result is not exact, seconds of the longest) of sums and products in turn, with data of their own.
    stops: rank 1 is stopped among them."""
    ways = [small_config(placement=placement, algorithm="one_shot") for placement in ("inside", "messages")]
    wrong, longest = 0, 0.0
    with Heap(16 << 20) as heap:
        workspace = Workspace(heap, wait_seconds=budget_s)
        for number in range(count):
            if stops and rank == VICTIM and number == 8:  # all are planned: hosts meet no more
                stop_for_a_while()
            shares = [
                (integers(M, K, torch.float32, 99 * number + peer), integers(K, N, torch.float32, peer))
                for peer in range(world_size)
            ]
            start = time.monotonic()
            if number % 4 == 0:
                options = {"group": heap, "config": ways[number // 4 % 2], "workspace": workspace}
                out = stream_k.gemm_all_reduce(*shares[rank], **options)
                expected = torch.stack([a @ b for a, b in shares]).sum(0)
            else:
                out = collectives.all_reduce(shares[rank][0], group=heap, workspace=workspace)
                expected = torch.stack([a for a, _ in shares]).sum(0)
            longest = max(longest, time.monotonic() - start)
            wrong += not torch.equal(out, expected)
        heap.vote("done")
    return wrong, longest


@pytest.mark.num_ranks(3)
def test_case_31_a_rank_that_is_descheduled_for_seconds() -> None:
    """Its peers wait for it, in their kernels, for less than their budget: nothing raises, all results are exact."""
    found = values(run_ranks(calls, 3, 30, BUDGET_S, True))
    assert [wrong for wrong, _ in found] == [0, 0, 0]
    assert all(longest > STOPPED_S / 2 for rank, (_, longest) in enumerate(found) if rank != VICTIM), found


@pytest.mark.num_ranks(3)
def test_a_budget_that_the_pause_exceeds_runs_out() -> None:
    """The control."""
    ends = run_ranks(calls, 3, 30, SHORT_S, True)
    assert not any(end.ok for end in ends)
    assert any(isinstance(end.exception, PeerTimeout) for end in ends)


@pytest.mark.num_ranks(3)
@pytest.mark.alone
def test_case_31_beside_two_busy_loops() -> None:
    """With the budget that users have."""
    with busy_loops():
        found = values(run_ranks(calls, 3, 100, BUDGET_S, False))
    assert [wrong for wrong, _ in found] == [0, 0, 0]


# -- what other tests measure time with --


@pytest.mark.alone
def test_a_wait_that_lasts_too_long_fails_beside_busy_loops_too() -> None:
    """Sleeping is nothing that the machine took, even where a test beside this one stood in queues most of the time."""
    with busy_loops(), pytest.raises(AssertionError, match=r"limit 0\.2 s"), within(0.2):
        time.sleep(3.0)


@pytest.mark.alone
def test_time_in_queues_is_allowed_for() -> None:
    """A thread that has to share its core is late by what the other one had of it."""
    pinned = sorted(os.sched_getaffinity(0))[:1]
    found = []

    def work() -> None:
        os.sched_setaffinity(0, pinned)  # of this thread
        watch, used = Stopwatch(), time.thread_time()
        while time.thread_time() - used < 0.3:
            pass
        found.append((watch.seconds(), watch.late()))

    with busy_loops():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    ((seconds, late),) = found
    assert late > 0.05, "no accounts of the kernel's"
    assert seconds < 0.3 + 0.2 + late


def test_until_gives_up() -> None:
    with pytest.raises(AssertionError, match="in vain"):
        until(lambda: False, patience_s=0.05)
    until(lambda: True, patience_s=0.0)
