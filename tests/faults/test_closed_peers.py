"""A peer closes its heap: calls that it has made end well, however late; those that it never makes fail at once."""

import contextlib
import random
import time
from typing import Any
from unittest import mock

import pytest
import torch

from pyrocshmem import Heap, collectives, status
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.lifecycle import Ledger
from tests.faults.heap_support import MIB, raised_by
from tests.ranks import run_ranks, values

TIER = 2
pytestmark = pytest.mark.num_ranks(3)

CLOSER, WAIT_S, LATER_S, PROMPT_S = 1, 20.0, 0.5, 2.0
CLOSED = f"rank {CLOSER} has closed the heap, which can't recover: form a new one"


def _reduce(heap: Heap, workspace: Workspace) -> torch.Tensor:
    total = collectives.all_reduce(torch.ones(40, device=heap.device), group=heap, workspace=workspace)
    heap.synchronize()
    return total


def _one_call_more(rank: int, world_size: int, when: str) -> list[tuple[str, str, float]]:
    """(type, text, seconds) of what a rank hears that makes a call which its peer never makes, and of what follows."""
    heap = Heap(8 * MIB, timeout=WAIT_S)
    workspace = Workspace(heap, wait_seconds=WAIT_S)
    _reduce(heap, workspace)
    heap.barrier()
    if rank == CLOSER:
        with contextlib.suppress(KeyError), heap:
            time.sleep(LATER_S if when == "before" else 0.0)
            if when == "raises":
                raise KeyError("weights")
        return []
    # Ranks 0 and 2 do not come together: what one has not begun must not hide what another will never begin.
    time.sleep(0.0 if when == "before" else LATER_S * (1 + world_size - rank))
    said = []
    for call in (lambda: _reduce(heap, workspace), heap.recover, heap.barrier, lambda: heap.zeros(3)):
        error, seconds = raised_by(call)
        said.append((type(error).__name__, str(error), seconds))
    heap.close()
    return said


@pytest.mark.alone
@pytest.mark.parametrize("when", ["before", "after", "raises"])
def test_a_call_that_a_peer_never_makes_ends_at_once(when: str) -> None:
    ends = values(run_ranks(_one_call_more, 3, when))
    for rank in (0, 2):
        for number, (kind, text, seconds) in enumerate(ends[rank]):
            assert kind == "PeerAborted", text
            # Who raised and then closed is named for what it raised; that it has closed is why recovery fails.
            expected = "rank 1 gave up: KeyError: 'weights'" if when == "raises" and number == 0 else CLOSED
            assert expected in text
            assert seconds < PROMPT_S + LATER_S * (when == "before")


def _ends_apart(rank: int, world_size: int, seed: int) -> list[str]:
    """Calls of a heap whose ranks close it each when it is done: what was wrong."""
    wrong, own = [], random.Random(f"{seed} {rank}")
    for number in range(4):
        heap = Heap(8 * MIB, timeout=WAIT_S)
        workspace = Workspace(heap, wait_seconds=WAIT_S)
        x = torch.full((40,), float(rank + number), device=heap.device)
        given: dict[str, Any] = {"root": CLOSER, "group": heap, "workspace": workspace}
        collectives.broadcast(x, **given)
        heap.barrier()
        if rank != CLOSER:  # it has sent, and closed, before the others even begin
            time.sleep(LATER_S / 2 + own.random() * 0.05)
        try:
            found = collectives.broadcast(2 * x, **given)
            if rank == CLOSER:
                heap.close()
            else:
                heap.synchronize()
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}")
        else:
            if not bool((found == 2.0 * (CLOSER + number)).all()):
                wrong.append("another value")
        heap.close()
    return wrong


def _tells_everybody(self: Ledger) -> list[int]:
    return [rank for rank in range(3) if rank != self._rank]


def _tells_everybody_always(rank: int, world_size: int, seed: int) -> list[str]:
    with mock.patch.object(Ledger, "close", _tells_everybody):
        return _ends_apart(rank, world_size, seed)


def test_calls_that_a_peer_has_made_end_well_after_it_has_closed() -> None:
    assert values(run_ranks(_ends_apart, 3, random.randrange(1 << 30))) == [[], [], []]


def test_a_peer_that_closes_must_not_tell_those_that_wait_for_nothing_of_it() -> None:
    """The control of the test above."""
    assert any(values(run_ranks(_tells_everybody_always, 3, 7)))


def _replayed(rank: int, world_size: int) -> str:
    """What a wait of a replayed graph, which no rank counts, comes to when it runs out."""
    heap = Heap(MIB, timeout=WAIT_S)
    heap.barrier()
    if rank == CLOSER:
        heap.close()
        return ""
    time.sleep(LATER_S)
    heap.status[:8] = torch.tensor([1, status.Op.ALL_REDUCE, rank, CLOSER, 0, 5, 4, 100])
    return str(raised_by(heap.check)[0])


def test_a_wait_that_ran_out_says_that_the_peer_has_closed() -> None:
    said = values(run_ranks(_replayed, 3))
    assert all(CLOSED in text for text in (said[0], said[2]))
