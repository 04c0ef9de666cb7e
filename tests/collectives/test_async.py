"""`async_op=True`: a handle to wait by, calls in the ranks' order whatever their streams, faults at the latest when
waited for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyrocshmem import Heap, PeerAborted, PeerTimeout, Workspace, collectives, target  # before Triton
from tests.collectives.test_tensors import HEAP_BYTES, TIMEOUT_S, device
from tests.ranks import run_ranks, values

TIER = 2
WAIT_S = 1.0


def results(heap: Heap) -> list[str]:
    """Of every collective: new, given and in place."""
    wrong, rank, world = [], heap.rank, heap.world_size
    x = torch.arange(48.0, device=heap.device).view(6, 8) + rank
    parts = [x - rank + r for r in range(world)]
    total, last = torch.stack(parts).sum(0), parts[-1]
    calls: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
        "all_reduce": (collectives.all_reduce, total),
        "all_gather": (collectives.all_gather, torch.cat(parts)),
        "reduce_scatter": (collectives.reduce_scatter, total.tensor_split(world)[rank]),
        "all_scatter": (collectives.all_scatter, torch.cat(parts, 1)),
        "broadcast": (lambda x, **k: collectives.broadcast(x, world - 1, **k), last),
    }
    for name, (call, right) in calls.items():
        out = torch.full_like(right, torch.nan)
        for given in (None, out):
            work = call(x, group=heap, out=given, async_op=True)
            waited = work.wait()
            (found,) = work.result()
            if (
                waited is not True
                or not torch.equal(found, right)
                or (given is not None and found is not out)
            ):
                wrong.append(f"{name}, given: {given is not None}")
            heap.synchronize()
            if not work.is_completed() or not torch.equal(work.get_future().wait()[0], right):
                wrong.append(f"{name}: not completed")
    for name, in_place, right in (
        ("all_reduce_", collectives.all_reduce_, total),
        ("broadcast_", lambda x, **k: collectives.broadcast_(x, world - 1, **k), last),
    ):
        mine = x.clone()
        in_place(mine, group=heap, async_op=True).wait()
        wrong += [] if torch.equal(mine, right) else [name]
    doubled = (
        collectives.all_reduce(x, group=heap, async_op=True).get_future().then(lambda f: f.wait()[0] * 2)
    )
    return wrong if torch.equal(doubled.wait(), 2 * total) else [*wrong, "then"]


def in_order(heap: Heap) -> list[str]:
    """A chain of calls in which each reads what the one before wrote, asynchronous or not, and nobody waits."""
    x = torch.ones(512, device=heap.device)
    for number in range(12):
        work = collectives.all_reduce_(x, group=heap, async_op=number % 3 != 2)
    y = collectives.all_reduce(x, group=heap, op="max")
    heap.synchronize()
    return [] if (y == float(heap.world_size**12)).all() and work is x else [f"{y[0]} after 12 calls"]


def memory_is_kept(heap: Heap) -> list[str]:
    """Operands that are dropped, and results that come from the other stream, while calls wait for this stream."""
    wrong = []
    rounds, size = (2, 64) if target.interpreted() else (50, 1 << 16)
    for number in range(rounds):
        if not target.interpreted():
            torch.cuda._sleep(2_000_000)
        x = torch.full((size,), float(number), device=heap.device)
        work = collectives.all_reduce(x, group=heap, async_op=True)
        del x
        overwritten = torch.full((size,), -1.0, device=heap.device)
        work.wait()
        (total,) = work.result()
        copied = total * 1
        del work, total
        again = collectives.all_reduce(overwritten, group=heap, async_op=True)
        again.wait()
        if not (copied == number * heap.world_size).all():
            wrong.append(f"call {number}: {copied[0]}")
    return wrong


def runs_beside(heap: Heap) -> list[str]:
    """On a GPU a call does not wait for what the caller's stream gets after it."""
    if target.interpreted():
        return []
    x = torch.ones(64, device=heap.device)
    collectives.all_reduce(x, group=heap, async_op=True).wait()
    heap.barrier()
    work = collectives.all_reduce(x, group=heap, async_op=True)
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    done.record()
    while not work.is_completed() and not done.query():
        pass
    early = not done.query()
    heap.synchronize()
    return [] if early else ["the call waited for what came after it"]


def asynchronous(rank: int, world_size: int) -> list[str]:
    with Heap(HEAP_BYTES) as heap:
        x = torch.ones(3, device=device(), requires_grad=True)
        with pytest.raises(ValueError, match="all_reduce takes no async_op where a gradient is needed"):
            collectives.all_reduce(x, group=heap, async_op=True)
        with pytest.raises(TypeError, match=r"x is torch\.complex64"):
            collectives.all_gather(x.detach().to(torch.complex64), group=heap, async_op=True)
        found = results(heap) + in_order(heap) + memory_is_kept(heap) + runs_beside(heap)
        heap.synchronize()
        return found


def waited_for(x: torch.Tensor, workspace: Workspace) -> None:
    work = collectives.all_reduce(x, group=workspace.heap, workspace=workspace, async_op=True)
    while not work.is_completed():
        pass
    work.wait()


def late_peer(rank: int, world_size: int) -> None:
    """The last rank recovers instead of calling; the others raise that by the time they have waited."""
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=WAIT_S)
        x = torch.ones(8, device=device())
        waited_for(x, workspace)
        heap.barrier()
        if rank != world_size - 1:
            with pytest.raises((PeerTimeout, PeerAborted)):
                waited_for(x, workspace)
        heap.recover()
        y = collectives.all_reduce(x, group=heap, workspace=workspace)
        heap.synchronize()
        assert (y == world_size).all()


@pytest.mark.num_ranks(2)
def test_async_op() -> None:
    assert values(run_ranks(asynchronous, 2, timeout=TIMEOUT_S)) == [[], []]


@pytest.mark.num_ranks(2)
def test_a_late_peer_shows_when_waited_for() -> None:
    values(run_ranks(late_peer, 2, timeout=TIMEOUT_S))
