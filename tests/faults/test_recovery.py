"""`Heap.recover`: ranks out of step come together again; what only some hold is given back; nobody waits in vain.

That ops work again after ranks were late, raised or were killed is asserted in test_faults_in_turn.py.
"""

import time
from typing import Any

import pytest

from pyrocshmem import Heap, PeerAborted, PeerTimeout, ShmemError, signal
from pyrocshmem.calls.workspace import Workspace
from tests.faults.heap_support import MIB, canary, raised_by, raised_within
from tests.fused.bodies import integer_call
from tests.ranks import run_ranks, values
from tests.stopwatch import until
from tests.stream_k.products import small_config

TIER = 2
pytestmark = [pytest.mark.num_ranks(2), pytest.mark.alone]

SHORT_S, PROMPT_S, WAIT_S = 0.5, 2.0, 20.0
SHAPE = (20, 16, 24)


def _out_of_step(heap: Heap) -> dict[str, Any]:
    """A block that rank 0 alone has given back, and one that rank 1 alone has; both hold a third."""
    common, first, second = (heap.full((100,), 5.0 + heap.rank) for _ in range(3))
    heap._give_back(heap._block_of(first if heap.rank == 0 else second))
    heap.abort("planted")
    refused = raised_by(lambda: heap.zeros(3))[0]
    heap.recover()
    lost = [raised_by(lambda x=x: heap.offset(x))[0] for x in (first, second)]
    kept = float(heap.peer_view(common, 1 - heap.rank).sum())
    usage = heap.usage()
    with canary(heap):
        pass
    heap.free(common)
    return {
        "refused": str(refused),
        "lost": [f"{type(error).__name__}: {error}" for error in lost],
        "kept": kept,
        "blocks": usage.num_allocations,
    }


def _one_comes_later(heap: Heap) -> tuple[str, float]:
    """Rank 1 calls `recover` after rank 0 has given up on it; both call it once more. What this one was told the first
    time, and how long it waited for that."""
    told = heap.zeros(1)
    tell = heap.peer_view(told, 1)
    heap.barrier()
    heap.timeout = SHORT_S
    if heap.rank == 1:
        until(told.item)
    error = raised_within(PROMPT_S + (SHORT_S if heap.rank == 0 else 0), heap.recover)
    tell.fill_(1)
    assert heap.broken
    heap.timeout = WAIT_S
    heap.recover()
    with canary(heap):
        return f"{type(error).__name__}: {error}", getattr(error, "waited_s", 0.0)


def _recovered_while_it_votes(heap: Heap) -> str:
    """Rank 0 recovers a heap that is well, rank 1 waits for it in a vote: it is told at once."""
    if heap.rank == 0:
        time.sleep(SHORT_S)
        heap.recover()
        return ""
    error = raised_within(SHORT_S + PROMPT_S, heap.barrier)
    heap.recover()
    return f"{type(error).__name__}: {error}"


def _without_new_counts(heap: Heap) -> list[str]:
    """Rank 1 skips a call: with the calls counted anew the next one is right; without, it isn't, or never ends."""
    said = []
    config = small_config(algorithm="one_shot")
    workspace = Workspace(heap, wait_seconds=WAIT_S)
    for anew in (True, False):
        assert integer_call(heap, 1, SHAPE, config, workspace)
        heap.barrier()
        workspace.control[int(signal.BUDGET_US.value)] = int(1e6 * SHORT_S)
        if heap.rank == 0:
            error, _ = raised_by(
                lambda: (integer_call(heap, 2, SHAPE, config, workspace), heap.synchronize())
            )
            assert isinstance(error, PeerTimeout), error
        else:
            until(lambda: int(heap.system[0]))
        if not anew:
            workspace.start_anew = lambda: None  # type: ignore[method-assign]
        heap.recover()
        if anew:
            workspace.control[int(signal.BUDGET_US.value)] = int(1e6 * WAIT_S)
        try:
            right = integer_call(heap, 3, SHAPE, config, workspace)
            heap.synchronize()
            heap.barrier()
            said.append("right" if right else "wrong")
        except ShmemError as error:
            said.append(type(error).__name__)
    return said


def _peer_has_closed(heap: Heap) -> tuple[str, str]:
    """What `recover` says when rank 1 has closed the heap, and when this rank has."""
    told, error = heap.zeros(1), None
    tell = heap.peer_view(told, 0)
    heap.barrier()
    if heap.rank == 0:
        until(told.item)
        error = raised_within(PROMPT_S, heap.recover)
    heap.close()
    tell.fill_(1)
    return f"{type(error).__name__}: {error}", str(raised_by(heap.recover)[0])


def _recoveries(rank: int, world_size: int) -> dict[str, Any]:
    with Heap(8 * MIB, timeout=WAIT_S) as heap:
        found: dict[str, Any] = {
            "out of step": _out_of_step(heap),
            "later": _one_comes_later(heap),
            "voting": _recovered_while_it_votes(heap),
            "counts": _without_new_counts(heap),
        }
    closed = Heap(MIB, timeout=WAIT_S)
    found["closed"] = _peer_has_closed(closed)
    return found


@pytest.fixture(scope="module")
def ends() -> list[dict[str, Any]]:
    return values(run_ranks(_recoveries, 2, timeout=90.0))


def test_allocations_that_only_some_ranks_hold_are_given_back(ends: list[dict[str, Any]]) -> None:
    for rank, end in enumerate(ends):
        found = end["out of step"]
        assert "planted" in found["refused"]
        assert found["lost"] == ["ValueError: the tensor was freed"] * 2
        assert found["kept"] == 100 * (5.0 + 1 - rank)
        assert found["blocks"] == 1


def test_a_rank_that_comes_later_is_told_and_may_try_again(ends: list[dict[str, Any]]) -> None:
    (first, waited), (second, _) = ends[0]["later"], ends[1]["later"]
    assert first.startswith(f"{PeerTimeout.__name__}: recover: rank 0 waited ")
    assert waited >= SHORT_S
    assert second.startswith(f"{PeerAborted.__name__}: ")


def test_a_peer_that_votes_hears_of_a_recovery(ends: list[dict[str, Any]]) -> None:
    told = "PeerAborted: rank 1 stopped because rank 0 gave up: it has begun to recover"
    assert ends[1]["voting"].startswith(told)


def test_calls_must_be_counted_anew(ends: list[dict[str, Any]]) -> None:
    """The control: with the old counts, ranks that are a call apart don't find together."""
    for end in ends:
        assert end["counts"][0] == "right"
    assert any(end["counts"][1] != "right" for end in ends)


def test_a_heap_that_a_peer_has_closed_does_not_recover(ends: list[dict[str, Any]]) -> None:
    text, _ = ends[0]["closed"]
    assert text.startswith("PeerAborted: rank 0 stopped because rank 1 gave up: rank 1 has closed the heap")
    assert [end["closed"][1] for end in ends] == ["the heap is closed"] * 2
