"""Threads of one rank that make calls on its heaps beside one another."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyrocshmem import CallMismatch, Heap, stream_k
from pyrocshmem.calls.workspace import Workspace
from tests.fused.bodies import HEAP_BYTES
from tests.ranks import run_ranks, values

TIER = 2
pytestmark = [pytest.mark.num_ranks(2), pytest.mark.cpu]
THREADS, CALLS = range(2), 3


def beside(body: Callable[[int], Any]) -> list[Any]:
    """What body(thread) returns, or raises, in a thread each."""
    found: list[Any] = [None for _ in THREADS]

    def run(thread: int) -> None:
        try:
            found[thread] = body(thread)
        except Exception as error:
            found[thread] = error

    threads = [threading.Thread(target=run, args=(thread,)) for thread in THREADS]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


def right(heap: Heap, workspace: Workspace, thread: int, rows: int) -> bool:
    """One call, of a shape of its own in each thread: whether its result is right."""
    b = torch.full((16, 16 * (1 + thread)), float(1 + heap.rank))
    y = stream_k.gemm_all_reduce(torch.ones(rows, 16), b, group=heap, workspace=workspace)
    return bool((y == 16.0 * sum(range(1, 1 + heap.world_size))).all())


def planned_before(rank: int, world_size: int) -> list[Any]:
    with Heap(HEAP_BYTES) as heap:
        spaces = [Workspace(heap, wait_seconds=30.0) for _ in THREADS]
        assert all(right(heap, space, thread, 8) for thread, space in enumerate(spaces))

        def calls(thread: int) -> bool:
            time.sleep(0.05 * random.random())
            return all(right(heap, spaces[thread], thread, 8) for _ in range(CALLS))

        found = beside(calls)
        heap.barrier()
        return found


def test_calls_that_one_thread_has_planned() -> None:
    assert values(run_ranks(planned_before, 2)) == [[True, True]] * 2


def heaps_of_their_own(rank: int, world_size: int) -> list[Any]:
    heaps = [Heap(HEAP_BYTES) for _ in THREADS]

    def calls(thread: int) -> bool:
        time.sleep(0.2 * abs(thread - rank))  # the ranks' threads don't come in the same order
        with heaps[thread] as heap:
            workspace = Workspace(heap, wait_seconds=30.0)
            found = all(right(heap, workspace, thread, 8 * (1 + call)) for call in range(CALLS))
            heap.barrier()
            return found

    return beside(calls)


def test_new_calls_on_heaps_of_their_own() -> None:
    assert values(run_ranks(heaps_of_their_own, 2)) == [[True, True]] * 2


def left_to_chance(rank: int, world_size: int) -> tuple[list[str], bool]:
    """What is said of new calls that come in another order on each rank, and whether the heap works afterwards."""
    with Heap(HEAP_BYTES, timeout=20.0) as heap:
        spaces = [Workspace(heap, wait_seconds=20.0) for _ in THREADS]

        def calls(thread: int) -> bool:
            time.sleep(0.5 * abs(thread - rank))
            return right(heap, spaces[thread], thread, 8)

        said = []
        for error in beside(calls):
            assert isinstance(error, CallMismatch), error
            assert error.in_threads
            said.append(str(error))
        heap.barrier()
        return said, all(right(heap, space, thread, 8) for thread, space in enumerate(spaces))


@pytest.mark.alone
def test_new_calls_in_an_order_left_to_chance() -> None:
    for said, works in values(run_ranks(left_to_chance, 2)):
        for text in said:
            assert (
                "Several threads of this rank make new calls on the heap, in an order that is left to" in text
            )
            assert "a heap of its own" in text
        assert works
