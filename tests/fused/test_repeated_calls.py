"""Calls with tensors at the same places, again and again: their graphs (`pyrocshmem.calls.graphs`) bring exactly
what enqueued calls would, whatever comes between.

tests/stream_k/test_graphs.py has the logic, with a stand-in for graphs.
"""

import threading
from typing import Any, NamedTuple

import pytest
import torch

from pyrocshmem import Heap, stream_k
from pyrocshmem.calls.graphs import Graphs, Places
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.reference.problems import PROBLEMS
from tests.fused.bodies import Shape, integer_problem
from tests.ranks import run_ranks, values
from tests.stream_k.products import small_config

TIER = 3
TIMEOUT_S = 100.0
HEAP_BYTES = 256 << 20
WAIT_S = 20.0
# Places of results, as many other data to come to each, and places that a plan of these tests remembers.
PLACES, CALLS, KEPT = 3, 20, 4
# Results of more than 10 MiB, of which PyTorch's allocator gives each a block of its own and can give it back. Many
# steps, the last one not full.
SHAPE: Shape = (2085, 1408, 64)
LARGER: Shape = (2400, 1536, 64)
SLEEP_CYCLES = 1_500_000_000  # about a second

WAYS = [
    ("all_reduce", "copy_engine"),
    ("all_scatter", "copy_engine"),
    ("reduce_scatter", "copy_engine"),
    ("all_gather", "copy_engine"),
    ("all_scatter", "pull"),
    ("all_reduce", "own_stream"),
    ("all_reduce", "messages"),
    ("all_reduce", "unfused"),
    ("all_reduce", "blas_blocks"),
    ("reduce_scatter", "blas_blocks"),
    ("all_gather", "blas_blocks"),
]


class Place(NamedTuple):
    """Tensors of a call, whose data change from call to call."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor


class Calls:
    """Calls of an op on a workspace, with other data than the call before. kept: (what, result, expected) of each."""

    def __init__(self, heap: Heap, op: str, placement: str) -> None:
        self.heap, self.op = heap, op
        self.workspace = Workspace(heap, wait_seconds=WAIT_S)
        # One more than there are places: each place gets other data every time.
        self.problems = [integer_problem(heap, seed, SHAPE, op) for seed in range(PLACES + 1)]
        self.config = small_config(placement=placement, chunk=1)
        self.number = 0
        self.results = torch.empty(CALLS, *self.problems[0][1].shape, device=heap.device)
        self.kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    @property
    def graphs(self) -> Graphs:
        """Of the plan that was made last."""
        return list(self.workspace.plans.values())[-1].graphs  # type: ignore[no-any-return]

    def place(self) -> Place:
        (a, b, _), _ = self.problems[0]
        return Place(torch.empty_like(a), torch.empty_like(b), torch.empty_like(self.results[0]))

    def run(self, place: Place, sizes: dict[str, int]) -> None:
        options: dict[str, Any] = {"group": self.heap, "config": self.config, "workspace": self.workspace}
        getattr(stream_k, PROBLEMS[self.op].op)(place.a, place.b, out=place.out, **options, **sizes)

    def fill(self, place: Place, number: int) -> tuple[dict[str, int], torch.Tensor]:
        """With the data of a problem, its result poisoned. Returns (sizes, expected)."""
        (a, b, sizes), expected = self.problems[number % len(self.problems)]
        place.a.copy_(a)
        place.b.copy_(b)
        place.out.fill_(torch.nan)
        return sizes, expected

    def into(self, place: Place, what: str) -> int:
        """A call of which the host waits for nothing. Returns the captures so far."""
        sizes, expected = self.fill(place, self.number)
        self.run(place, sizes)
        self.graphs.kept = KEPT
        self.keep(place.out, expected, f"{what}, call {self.number}")
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


def in_rounds(calls: Calls, places: list[Place]) -> tuple[list[str], bool]:
    """(wrong calls, whether the host waited for the device) of CALLS calls with `places` in turn. Rank 1's device is
    late in the round that is captured."""
    first = len(places)
    for number in range(first):
        calls.into(places[number], "first")
    calls.heap.synchronize()
    calls.heap.barrier()
    if calls.heap.rank == 1:
        torch.cuda._sleep(SLEEP_CYCLES)
    for number in range(first, 2 * first):
        calls.into(places[number % first], "captured")
    waited = torch.cuda.current_stream().query()
    for number in range(2 * first, CALLS):
        calls.into(places[number % first], "replayed")
    return calls.wrong(), waited


def repeated(rank: int, world_size: int, way: tuple[str, str], keyed: bool) -> tuple[list[str], bool, int]:
    """`in_rounds`, and the captures. keyed: whether a graph is looked up by its places."""
    if not keyed:
        honest = Graphs._find
        Graphs._find = lambda self, tensors, enqueue: honest(self, (), enqueue)  # type: ignore[method-assign]
    with Heap(HEAP_BYTES) as heap:
        calls = Calls(heap, *way)
        found = in_rounds(calls, [calls.place() for _ in range(PLACES)])
        return *found, calls.graphs.captures


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.num_ranks(2)
def test_three_places_in_turn(way: tuple[str, str]) -> None:
    """A rank captures while its streams still hold the calls before, which wait for a peer: the host waits for none."""
    assert values(run_ranks(repeated, 2, way, True, timeout=TIMEOUT_S)) == [([], False, PLACES)] * 2


@pytest.mark.parametrize("way", WAYS[:1] + WAYS[-1:])
@pytest.mark.gpu
@pytest.mark.num_ranks(2)
def test_a_graph_for_another_place_is_noticed(way: tuple[str, str]) -> None:
    """The control."""
    for wrong, _, captures in values(run_ranks(repeated, 2, way, False, timeout=TIMEOUT_S)):
        assert (len(wrong) > CALLS // 2, captures) == (True, 1)


def under_capture(calls: Calls, place: Place) -> list[str]:
    """A graph of the caller's of a call, replayed with other data, eager calls with the same tensors between."""
    sizes, _ = calls.fill(place, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.run(place, sizes)
    for number in range(len(calls.problems)):
        _, expected = calls.fill(place, number)
        graph.replay()
        calls.keep(place.out, expected, f"the caller's graph, replay {number}")
        calls.into(place, "between replays")
    return calls.wrong()


def beyond_four(calls: Calls, places: list[Place]) -> list[int]:
    """Captures after KEPT other places, and after two calls more with one that was captured before."""
    for place in places[PLACES:]:
        calls.into(place, "other places")
    expected: list[Places] = [
        (a.data_ptr(), b.data_ptr(), 0, out.data_ptr()) for a, b, out in places[PLACES:]
    ]
    # Of the BLAS it also counts what a switch says.
    assert [each[:4] for each in calls.graphs.by_places] == expected
    return [calls.graphs.captures, *(calls.into(places[0], "evicted") for _ in range(2))]


def grown(calls: Calls, place: Place) -> list[int]:
    """Captures of the plan that follows one that went when the workspace grew."""
    plans = len(calls.workspace.plans)
    (a, b, sizes), expected = integer_problem(calls.heap, 9, LARGER, calls.op)
    calls.run(Place(a, b, torch.empty_like(expected, dtype=torch.float32)), sizes)
    assert (plans, len(calls.workspace.plans)) == (1, 1)
    return [calls.into(place, "grown") for _ in range(3)]


def from_another_thread(calls: Calls, places: list[Place]) -> list[int]:
    """Captures of calls on a stream of another thread: replays what this one has captured, and captures itself."""
    device, found = calls.heap.device, []
    torch.cuda.synchronize()

    def work() -> None:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            found.extend(calls.into(place, "another thread") for place in [*places[:2], *places[1::-1]])
            torch.cuda.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(TIMEOUT_S)
    return found


def disturbed(rank: int, world_size: int, way: tuple[str, str]) -> tuple[list[str], dict[str, list[int]]]:
    """(what was wrong, captures by what came between)."""
    found = {}
    with Heap(HEAP_BYTES) as heap:
        calls = Calls(heap, *way)
        places = [calls.place() for _ in range(PLACES + KEPT)]
        wrong, _ = in_rounds(calls, places[:PLACES])
        wrong += under_capture(calls, places[0])
        found["under capture"] = [calls.graphs.captures]
        found["beyond four"] = beyond_four(calls, places)
        wrong += calls.wrong()
        found["grown"] = grown(calls, places[0])
        found["another thread"] = from_another_thread(calls, places)
        wrong += calls.wrong()
        heap.recover()
        found["recovered"] = [calls.into(places[0], "recovered") for _ in range(3)]
        wrong += calls.wrong()
        # What lies there next is other memory, at the same address or not.
        places.clear()
        torch.cuda.empty_cache()
        again = calls.place()
        for _ in range(3):
            calls.into(again, "memory that was given back")
        wrong += calls.wrong()
    return wrong, found


@pytest.mark.parametrize("way", WAYS[:4] + WAYS[-2:])
@pytest.mark.gpu
@pytest.mark.num_ranks(2)
def test_what_may_come_between(way: tuple[str, str]) -> None:
    expected = {
        "under capture": [PLACES],
        "beyond four": [PLACES, PLACES, PLACES + 1],
        "grown": [0, 1, 1],
        "another thread": [1, 1, 2, 2],
        "recovered": [0, 1, 1],
    }
    assert values(run_ranks(disturbed, 2, way, timeout=TIMEOUT_S)) == [([], expected)] * 2
