"""How much the nodes of a graph of calls wait for, by what a call forks and joins: on a CPU, where all of it runs at
once, it is counted."""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from pyrocshmem import Heap, stream_k, trace
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.stream_k.choice.placement import placements_of
from tests.ranks import run_ranks, values
from tests.stream_k.products import random, small_config

TIER = 1
pytestmark = pytest.mark.cpu

OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "gemm_all_scatter")
HEAP_BYTES = 16 << 20
M, N, K = 192, 64, 32
CALLS = 4
CALLER = -1


class Graph:
    """What a capture makes of launches and copies. edges: pairs of a node and one that it waits for, so far."""

    def __init__(self) -> None:
        self.nodes = self.edges = 0
        self.stream = CALLER
        # By stream: the nodes that its next one waits for.
        self.awaited: defaultdict[int, set[int]] = defaultdict(set)

    def add(self) -> None:
        """A node on the current stream."""
        self.edges += len(self.awaited[self.stream])
        self.awaited[self.stream] = {self.nodes}
        self.nodes += 1

    def fork(self, side: int) -> None:
        self.awaited[side] |= self.awaited[self.stream]

    def join(self, side: int) -> None:
        self.awaited[self.stream] |= self.awaited[side]

    @contextlib.contextmanager
    def beside(self, side: int) -> Iterator[None]:
        before, self.stream = self.stream, side
        yield
        self.stream = before


def noted(graph: Graph, enqueue: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        graph.add()
        return enqueue(*args)

    return run


@contextlib.contextmanager
def captured() -> Iterator[Graph]:
    graph = Graph()
    with contextlib.ExitStack() as patches:
        for where, name in ((Launch, "__call__"), (trace, "copy"), (trace, "product")):
            # A function, not a mock, so that a method has its object.
            patches.enter_context(mock.patch.object(where, name, noted(graph, getattr(where, name))))
        for name in ("fork", "join", "beside"):
            patches.enter_context(mock.patch.object(Workspace, name, getattr(graph, name)))
        yield graph


def edges_of_calls(rank: int, world_size: int, op: str) -> dict[str, list[int]]:
    """By placement, how many edges each of CALLS calls adds to a graph."""
    rows = M // world_size if op == "all_gather_gemm" else M
    a, b = random(rows, K, torch.float16), random(K, N, torch.float16)
    found: dict[str, list[int]] = {}
    with Heap(HEAP_BYTES) as heap:
        for placement in (each.name for each in placements_of(op)):
            config = small_config(placement=placement, split="none", num_programs=3, chunk=1)
            edges = [0]
            with captured() as graph:
                for _ in range(CALLS):
                    getattr(stream_k, op)(a, b, group=heap, config=config)
                    edges.append(graph.edges)
            found[placement] = [after - before for before, after in itertools.pairwise(edges)]
    return found


@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=pytest.mark.num_ranks(ranks)) for ranks in (2, 3)]
)
@pytest.mark.parametrize("op", OPS)
def test_a_call_waits_for_as_much_however_many_came_before(op: str, ranks: int) -> None:
    for found in values(run_ranks(edges_of_calls, ranks, op)):
        assert len(found) > 2
        for placement, (_, *later) in found.items():
            assert later[0] > 0, placement
            assert later == [later[0]] * (CALLS - 1), placement


def test_a_stream_that_only_waits_is_seen() -> None:
    """One without a node of its own hands on all that it ever waited for."""
    graph, found = Graph(), []
    for _ in range(CALLS):
        before = graph.edges
        graph.add()
        graph.fork(0)
        with graph.beside(0):
            graph.fork(1)
            with graph.beside(1):
                graph.add()
            graph.join(1)
        graph.add()
        graph.join(0)
        found.append(graph.edges - before)
    assert found == sorted(set(found))
