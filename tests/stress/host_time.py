"""What an eager call costs the host.

    python -m tests.stress.host_time --ranks 2 --json host_time.json

In three ways (`stream_k.graphs`): enqueued, the first calls with a place; captured, the second call with one; and
replayed, later ones. A sample is a few calls in a row, of which the host waits for none, after the device has come to
rest, on the slowest rank. What counts is the median. On the CPU target, which has no graphs, the figures mean nothing.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pyrocshmem import Heap, spawn, target  # isort: skip  # before Triton
import torch
import typer

import stream_k
from reference.problems import PROBLEMS
from stream_k.graphs import Graphs
from stream_k.plan import FusedPlan
from stream_k.workspace import Workspace
from tests.stress import figures

# Of a replayed call.
LIMIT_US = 40.0
WAYS = ("enqueued", "captured", "replayed")
# Calls of a sample, few enough for the device's queues: one that is enqueued is dozens of commands.
CALLS = {"enqueued": 3, "captured": 1, "replayed": 3 if target.interpreted() else 20}
_PLACES = CALLS["enqueued"]
_WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """op: of stream_k, by its name in reference.problems, with global M N K."""

    op: str
    shape: tuple[int, int, int]

    def __str__(self) -> str:
        return f"{PROBLEMS[self.op].op} {' x '.join(map(str, self.shape))}"


def cases_for(ranks: int, on_gpu: bool) -> list[Case]:
    """Products as large on each rank whatever `ranks`."""
    if not on_gpu:
        return [Case("all_reduce", (96, 32, 32)), Case("all_scatter", (96, 32 * ranks, 32))]
    cases = []
    for M, N, K in ((4096, 1792, 4096), (8192, 3584, 8192)):
        cases += [Case(op, (M, N * ranks, K)) for op in ("all_gather", "all_scatter")]
        cases += [Case(op, (M, K, N * ranks)) for op in ("reduce_scatter", "all_reduce")]
    return [*cases, Case("all_reduce", (16, 8192, 2048 * ranks))]


class Calls:
    """Calls of a case on this rank, planned, and what comes before a sample of each way."""

    def __init__(self, case: Case, heap: Heap) -> None:
        self.heap, self.workspace = heap, Workspace(heap)
        problem, ranks, device = PROBLEMS[case.op], heap.world_size, heap.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        M, N, K = case.shape
        whole = torch.randn(M, K, dtype=dtype, device=device), torch.randn(K, N, dtype=dtype, device=device)
        self.a, self.b = (x.contiguous() for x in problem.shares(*whole, heap.rank, ranks))
        local = problem.local_shape(case.shape, ranks)
        self.placement = stream_k.choose(problem.op, *local, dtype, ranks, device).placement
        self.op, self.sizes = getattr(stream_k, problem.op), problem.op_arguments(case.shape)
        shape = tuple(cut.stop - cut.start for cut in problem.part(case.shape, heap.rank, ranks))
        self.places = [torch.empty(shape, dtype=dtype, device=device) for _ in range(_PLACES)]
        self.into(0)
        heap.synchronize()

    def into(self, place: int) -> None:
        out = self.places[place]
        self.op(self.a, self.b, group=self.heap, out=out, workspace=self.workspace, **self.sizes)

    @property
    def plan(self) -> FusedPlan:
        (plan,) = self.workspace.plans.values()
        return plan  # type: ignore[no-any-return]

    def prepare(self, way: str) -> None:
        """The next calls, as many as a sample has, are made this way."""
        if way != "replayed":
            self.plan.graphs = Graphs(self.workspace, self.plan.product)
        if way == "captured":
            self.into(0)

    def call(self, way: str, number: int) -> None:
        self.into(number if way == "enqueued" else 0)


def measure(rank: int, world_size: int, cases: list[Case], samples: int) -> list[dict[str, Any]]:
    """A rank: seconds of the host's in a call, case by case, by the ways; and the steps of a call."""
    found = []
    for case in cases:
        with Heap(2 << 30 if not target.interpreted() else 16 << 20) as heap:
            calls = Calls(case, heap)
            spent = {way: list(_spent(calls, way, samples)) for way in WAYS}
            heap.synchronize()
            assert not any(place.isnan().any() for place in calls.places)
            found.append({"placement": calls.placement, **spent})
            heap.barrier()
    return found


def _spent(calls: Calls, way: str, samples: int) -> Iterator[float]:
    for sample in range(-_WARM_UP, samples):
        calls.prepare(way)
        calls.heap.synchronize()
        calls.heap.barrier()
        begin = time.perf_counter()
        for number in range(CALLS[way]):
            calls.call(way, number)
        seconds = (time.perf_counter() - begin) / CALLS[way]
        calls.heap.synchronize()
        if sample >= 0:
            yield seconds


def summary(case: Case, ends: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks' samples: microseconds, and whether a replayed call is within the limit."""
    found: dict[str, Any] = {"case": str(case), "placement": ends[0]["placement"], "limit_us": LIMIT_US}
    for way in WAYS:
        slowest = [1e6 * max(each) for each in zip(*(end[way] for end in ends), strict=True)]
        found[f"{way}_us"] = round(statistics.median(slowest), 1)
    return {**found, "within": found["replayed_us"] < LIMIT_US}


def main(
    ranks: Annotated[int, typer.Option(help="one a GPU")] = 2,
    samples: Annotated[int, typer.Option(help="of each way")] = 20,
    json: Annotated[Path | None, typer.Option(help="write the figures here")] = None,
) -> None:
    cases = cases_for(ranks, not target.interpreted())
    ends = spawn(measure, ranks, cases, samples)
    rows = [summary(case, [end[number] for end in ends]) for number, case in enumerate(cases)]
    columns = {"case": "op", "placement": "placement"} | {f"{way}_us": f"{way}, us" for way in WAYS}
    columns |= {"limit_us": "limit, us", "within": "within"}
    figures.report(columns, rows, json, ranks=ranks, samples=samples)


if __name__ == "__main__":
    typer.run(main)
