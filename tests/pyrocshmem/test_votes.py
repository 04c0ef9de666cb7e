"""Votes of processes that abort, come late and recover in each other's way, at their own pace.

What must hold in every interleaving is asserted in tests/model; the races themselves, one at a time, in
test_bootstrap.py.
"""

import random
import time
from collections import Counter

import pytest

from pyrocshmem import Heap, PeerAborted, PeerTimeout, ShmemError
from tests.ranks import run_ranks, values

TIER = 2
pytestmark = [pytest.mark.cpu, pytest.mark.alone]

LOOK_S = 0.05  # after which a rank that waits looks for an abort, and for one again


def _aborts_at_once(rank, world_size, calls):
    """Rank 0 comes when the others look for an abort, and aborts as soon as it has the result."""
    ends = []
    draws = random.Random(calls)
    with Heap(1 << 20, timeout=20.0) as heap:
        for _ in range(calls):
            heap.barrier()
            delay = LOOK_S + draws.uniform(-0.005, 0.005)
            if rank == 0:
                time.sleep(delay)
            try:
                x = heap.zeros(100)
                ends.append("result")
            except ShmemError as error:
                ends.append(type(error).__name__)
            if rank == 0:
                heap.abort("planted")
            held = heap.usage().num_allocations
            heap.recover()
            assert heap.usage().num_allocations == held, "a rank held what another one had given back"
            heap.free(x)
    return ends


def test_all_have_the_result_or_none_when_a_rank_aborts_at_once():
    ends = values(run_ranks(_aborts_at_once, 3, 40))
    assert ends == [["result"] * 40] * 3


def _comes_as_time_runs_out(rank, world_size, calls, budget_s):
    ends = []
    draws = random.Random(calls)
    with Heap(1 << 20, timeout=20.0) as heap:
        for _ in range(calls):
            heap.timeout = 20.0
            heap.barrier()
            start = time.monotonic()
            heap.timeout = budget_s
            delay = budget_s + draws.uniform(-0.004, 0.006)
            if rank == 0:
                while time.monotonic() - start < delay:
                    time.sleep(0.0002)
            try:
                heap.barrier()
                ends.append("result")
            except (PeerTimeout, PeerAborted) as error:
                ends.append(type(error).__name__)
            heap.timeout = 20.0
            heap.recover()
    return ends


def test_all_have_the_result_or_none_when_the_last_comes_as_time_runs_out():
    first, second = values(run_ranks(_comes_as_time_runs_out, 2, 60, 0.06))
    pairs = Counter(zip(first, second, strict=True))
    assert set(pairs) <= {("result", "result"), ("PeerAborted", "PeerTimeout")}, pairs


def _recovers(rank, world_size, calls):
    with Heap(1 << 20, timeout=20.0) as heap:
        for _ in range(calls):
            heap.recover()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_recoveries_back_to_back(num_ranks):
    """A rank aborts its old channel as it begins the next one, on which its peers may not have heard of the end yet."""
    values(run_ranks(_recovers, num_ranks, 60))
