"""Calls that pull into the caller's tensor, again and again at the same places: their graphs (`stream_k.pulls`) bring
exactly what enqueued pulls would, whatever comes between.

tests/stream_k/test_pulls.py has the logic, with a stand-in for graphs.
"""

import threading
from typing import Any

import pytest
import torch

import stream_k
from pyrocshmem import Heap
from reference.problems import PROBLEMS
from stream_k.pulls import KEPT, Graphs
from stream_k.workspace import Workspace
from tests.fused.bodies import Shape, integer_problem
from tests.ranks import run_ranks, values
from tests.stream_k.products import small_config

TIER = 3
TIMEOUT_S = 100.0
HEAP_BYTES = 256 << 20
WAIT_S = 20.0
PLACES, CALLS = 3, 20
# Results of more than 10 MiB, of which PyTorch's allocator gives each a block of its own and can give it back. Many
# steps, the last one not full.
SHAPE: Shape = (2085, 1408, 64)
LARGER: Shape = (2400, 1536, 64)
SLEEP_CYCLES = 1_500_000_000  # about a second

every_op = pytest.mark.parametrize("op", ["all_reduce", "all_scatter"])


class Calls:
    """Calls of an op on a workspace, with other data than the call before. kept: (what, result, expected) of each."""

    def __init__(self, heap: Heap, op: str) -> None:
        self.heap, self.op = heap, op
        self.workspace = Workspace(heap, wait_seconds=WAIT_S)
        # One more than there are places: each place gets other data every time.
        self.problems = [integer_problem(heap, seed, SHAPE, op) for seed in range(PLACES + 1)]
        self.number = 0
        self.results = torch.empty(CALLS, *self.problems[0][1].shape, device=heap.device)
        self.kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    @property
    def graphs(self) -> Graphs:
        """Of the plan that was made last."""
        return list(self.workspace.plans.values())[-1].pulls.graphs  # type: ignore[no-any-return]

    def place(self) -> torch.Tensor:
        return torch.empty_like(self.results[0])

    def run(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        config = small_config(placement="copy_engine", chunk=1)
        options: dict[str, Any] = {"group": self.heap, "config": config, "workspace": self.workspace}
        getattr(stream_k, PROBLEMS[self.op].op)(a, b, out=out, **options)

    def into(self, out: torch.Tensor, what: str) -> int:
        """A call into `out`, poisoned, of which the host waits for nothing. Returns the captures so far."""
        (a, b, _), expected = self.problems[self.number % len(self.problems)]
        out.fill_(torch.nan)
        self.run(a, b, out)
        self.keep(out, expected, f"{what}, call {self.number}")
        self.number += 1
        return self.graphs.captures

    def keep(self, out: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        if len(self.kept) == CALLS:
            raise ValueError(f"{CALLS} results are kept already: ask for `wrong` before {what}")
        result = self.results[len(self.kept)]
        self.kept.append((what, result.copy_(out), expected))

    def wrong(self) -> list[str]:
        """The calls since the last question whose results are not exact."""
        self.heap.synchronize()
        found = [what for what, result, expected in self.kept if not torch.equal(result.double(), expected)]
        self.kept.clear()
        self.heap.barrier()
        return found


def in_rounds(calls: Calls, outs: list[torch.Tensor]) -> tuple[list[str], bool]:
    """(wrong calls, whether the host waited for the device) of CALLS calls into `outs` in turn. Rank 1's device is late
    in the round that is captured."""
    first = len(outs)
    for number in range(first):
        calls.into(outs[number], "first")
    calls.heap.synchronize()
    calls.heap.barrier()
    if calls.heap.rank == 1:
        torch.cuda._sleep(SLEEP_CYCLES)
    for number in range(first, 2 * first):
        calls.into(outs[number % first], "captured")
    waited = torch.cuda.current_stream().query()
    for number in range(2 * first, CALLS):
        calls.into(outs[number % first], "replayed")
    return calls.wrong(), waited


def repeated(rank: int, world_size: int, op: str, keyed: bool) -> tuple[list[str], bool, int]:
    """`in_rounds`, and the captures. keyed: whether a graph is looked up by its place."""
    if not keyed:
        honest = Graphs.find
        Graphs.find = lambda self, address, capture: honest(self, 0, capture)  # type: ignore[method-assign]
    with Heap(HEAP_BYTES) as heap:
        calls = Calls(heap, op)
        found = in_rounds(calls, [calls.place() for _ in range(PLACES)])
        return *found, calls.graphs.captures


@every_op
@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.num_ranks(2)
def test_three_places_in_turn(op: str) -> None:
    """A rank captures while its streams still hold the calls before, which wait for a peer: the host waits for none."""
    assert values(run_ranks(repeated, 2, op, True, timeout=TIMEOUT_S)) == [([], False, PLACES)] * 2


@every_op
@pytest.mark.gpu
@pytest.mark.num_ranks(2)
def test_a_graph_for_another_place_is_noticed(op: str) -> None:
    """The control."""
    for wrong, _, captures in values(run_ranks(repeated, 2, op, False, timeout=TIMEOUT_S)):
        assert (len(wrong) > CALLS // 2, captures) == (True, 1)


def under_capture(calls: Calls, out: torch.Tensor) -> list[str]:
    """A graph of the caller's of a call into `out`, replayed with other data, eager calls into it between."""
    (a, b, _), _ = calls.problems[0]
    a, b = a.clone(), b.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.run(a, b, out)
    for number, ((x, y, _), expected) in enumerate(calls.problems):
        a.copy_(x)
        b.copy_(y)
        out.fill_(torch.nan)
        graph.replay()
        calls.keep(out, expected, f"the caller's graph, replay {number}")
        calls.into(out, "between replays")
    return calls.wrong()


def beyond_four(calls: Calls, outs: list[torch.Tensor]) -> list[int]:
    """Captures after KEPT other places, and after two calls more with one that was captured before."""
    for out in outs[PLACES:]:
        calls.into(out, "other places")
    assert list(calls.graphs.by_address) == [out.data_ptr() for out in outs[PLACES:]]
    return [calls.graphs.captures, *(calls.into(outs[0], "evicted") for _ in range(2))]


def grown(calls: Calls, out: torch.Tensor) -> list[int]:
    """Captures of the plan that follows one that went when the workspace grew."""
    plans = len(calls.workspace.plans)
    (a, b, _), expected = integer_problem(calls.heap, 9, LARGER, calls.op)
    calls.run(a, b, torch.empty_like(expected, dtype=torch.float32))
    assert (plans, len(calls.workspace.plans)) == (1, 1)
    return [calls.into(out, "grown") for _ in range(3)]


def from_another_thread(calls: Calls, outs: list[torch.Tensor]) -> list[int]:
    """Captures of calls on a stream of another thread: replays what this one has captured, and captures itself."""
    device, found = calls.heap.device, []
    torch.cuda.synchronize()

    def work() -> None:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            found.extend(calls.into(out, "another thread") for out in (outs[0], outs[1], outs[1], outs[0]))
            torch.cuda.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(TIMEOUT_S)
    return found


def disturbed(rank: int, world_size: int, op: str) -> tuple[list[str], dict[str, list[int]]]:
    """(what was wrong, captures by what came between)."""
    found = {}
    with Heap(HEAP_BYTES) as heap:
        calls = Calls(heap, op)
        outs = [calls.place() for _ in range(PLACES + KEPT)]
        wrong, _ = in_rounds(calls, outs[:PLACES])
        wrong += under_capture(calls, outs[0])
        found["under capture"] = [calls.graphs.captures]
        found["beyond four"] = beyond_four(calls, outs)
        wrong += calls.wrong()
        found["grown"] = grown(calls, outs[0])
        found["another thread"] = from_another_thread(calls, outs)
        wrong += calls.wrong()
        heap.recover()
        found["recovered"] = [calls.into(outs[0], "recovered") for _ in range(3)]
        wrong += calls.wrong()
        # What lies there next is other memory, at the same address or not.
        outs.clear()
        torch.cuda.empty_cache()
        again = calls.place()
        for _ in range(3):
            calls.into(again, "memory that was given back")
        wrong += calls.wrong()
    return wrong, found


@every_op
@pytest.mark.gpu
@pytest.mark.num_ranks(2)
def test_what_may_come_between(op: str) -> None:
    expected = {
        "under capture": [PLACES],
        "beyond four": [PLACES, PLACES, PLACES + 1],
        "grown": [0, 1, 1],
        "another thread": [1, 1, 2, 2],
        "recovered": [0, 1, 1],
    }
    assert values(run_ranks(disturbed, 2, op, timeout=TIMEOUT_S)) == [([], expected)] * 2
