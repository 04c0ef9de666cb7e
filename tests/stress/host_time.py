"""What an eager call costs the host.

    python -m tests.stress.host_time --ranks 2 --json host_time.json

Products in three ways (`pyrocshmem.calls.graphs`): enqueued, the first calls with a place; captured, the second call
with one; and repeated, later ones. Of other ops, whose results PyTorch's allocator places, only the last. A sample
is a few calls in a row, of which the host waits for none, after the device has come to rest, on the slowest rank.
What counts is the median. Exits with 1 where that of a repeated call is beyond the limit; not on the CPU target,
where the figures mean nothing: it has no graphs.
"""

import functools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pyrocshmem import Heap, spawn, target  # isort: skip  # before Triton
import torch
import typer

from pyrocshmem import collectives, stream_k
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.reference.problems import PROBLEMS
from pyrocshmem.stream_k.ops.planned import FusedPlan
from tests.stress import figures

# Of a repeated call.
LIMIT_US = 40.0
WAYS = ("enqueued", "captured", "repeated")
# Calls of a sample, few enough for the device's queues: one that is enqueued is dozens of commands.
CALLS = {"enqueued": 3, "captured": 1, "repeated": 3 if target.interpreted() else 20}
PRODUCTS = {problem.op: problem for problem in PROBLEMS.values()}
_PLACES = CALLS["enqueued"]
_WARM_UP = 2
_EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """op: of stream_k or collectives. shape: global M N K of those in PRODUCTS; M N K of each rank's product before a
    norm; else of each rank's tensor."""

    op: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.op} {' x '.join(map(str, self.shape))}".rstrip()


def cases_for(ranks: int, on_gpu: bool) -> list[Case]:
    """Products as large on each rank whatever `ranks`; what else there is, as in a decoding step."""
    if not on_gpu:
        products = [Case("gemm_all_reduce", (96, 32, 32)), Case("gemm_all_scatter", (96, 32 * ranks, 32))]
        rows, hidden, inner = 1, 64, 32
    else:
        products = [Case("gemm_all_reduce", (16, 8192, 2048 * ranks))]
        for M, N, K in ((4096, 1792, 4096), (8192, 3584, 8192)):
            products += [Case(op, (M, N * ranks, K)) for op in ("all_gather_gemm", "gemm_all_scatter")]
            products += [Case(op, (M, K, N * ranks)) for op in ("gemm_reduce_scatter", "gemm_all_reduce")]
        rows, hidden, inner = 16, 8192, 2048
    columns = hidden // ranks
    return [
        *products,
        Case("gemm_all_reduce_rms_norm", (rows, hidden, inner)),
        Case("gemm_rms_norm_all_scatter", (rows, columns, inner)),
        *(
            Case(op, (rows, hidden))
            for op in ("all_reduce", "reduce_scatter", "broadcast", "all_reduce_rms_norm")
        ),
        *(Case(op, (rows, columns)) for op in ("all_gather", "all_scatter", "rms_norm")),
        Case("barrier", ()),
    ]


class Calls:
    """Calls of a product on this rank, planned, and what comes before a sample of each way."""

    ways: tuple[str, ...] = WAYS

    def __init__(self, case: Case, heap: Heap) -> None:
        self.heap, self.workspace = heap, Workspace(heap)
        problem, ranks, device = PRODUCTS[case.op], heap.world_size, heap.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        shape: Any = case.shape
        M, N, K = shape
        whole = torch.randn(M, K, dtype=dtype, device=device), torch.randn(K, N, dtype=dtype, device=device)
        self.a, self.b = (x.contiguous() for x in problem.shares(*whole, heap.rank, ranks))
        local = problem.local_shape(shape, ranks)
        self.placement = stream_k.choose(problem.op, *local, dtype, ranks, device).placement
        self.op, self.sizes = getattr(stream_k, problem.op), problem.op_arguments(shape)
        sizes = tuple(cut.stop - cut.start for cut in problem.part(shape, heap.rank, ranks))
        self.places = [torch.empty(sizes, dtype=dtype, device=device) for _ in range(_PLACES)]
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
        if way != "repeated":
            self.plan.make_graphs()
        if way == "captured":
            self.into(0)

    def call(self, way: str, number: int) -> None:
        self.into(number if way == "enqueued" else 0)


class Repeated:
    """Calls of any other op on this rank, each when the result of the one before is gone: into the same place."""

    ways: tuple[str, ...] = ("repeated",)
    placement = ""

    def __init__(self, case: Case, heap: Heap) -> None:
        self.heap = heap
        dtype = torch.bfloat16 if heap.device.type == "cuda" else torch.float16

        def make(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, dtype=dtype, device=heap.device)

        M, N, K = (*case.shape, 0, 0, 0)[:3]
        operands: tuple[Any, ...] = (make(M, K), make(K, N)) if K else (make(M, N),) if N else ()
        if "all_reduce_rms_norm" in case.op:
            operands += (make(M, N),)
        if "rms_norm" in case.op:
            operands += (make(N), _EPS)
        op = getattr(stream_k if K else collectives, case.op)
        self.op = functools.partial(op, *operands, group=heap, workspace=Workspace(heap))
        self.result: Any = None

    @property
    def places(self) -> list[torch.Tensor]:
        found = self.result if isinstance(self.result, tuple) else (self.result,)
        return [each for each in found if each is not None]

    def prepare(self, way: str) -> None:
        """Nothing: all calls are made the same way."""

    def call(self, way: str, number: int) -> None:
        self.result = None
        self.result = self.op()


def measure(rank: int, world_size: int, cases: list[Case], samples: int) -> list[dict[str, Any]]:
    """A rank: seconds of the host's in a call, case by case, by the ways; and the steps of a call."""
    found = []
    for case in cases:
        with Heap(2 << 30 if not target.interpreted() else 16 << 20) as heap:
            calls = Calls(case, heap) if case.op in PRODUCTS else Repeated(case, heap)
            spent = {way: list(_spent(calls, way, samples)) for way in calls.ways}
            heap.synchronize()
            assert not any(place.isnan().any() for place in calls.places)
            found.append({"placement": calls.placement, **spent})
            heap.barrier()
    return found


def _spent(calls: Calls | Repeated, way: str, samples: int) -> Iterator[float]:
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
    """Of all ranks' samples: microseconds, and whether a repeated call is within the limit."""
    found: dict[str, Any] = {"case": str(case), "placement": ends[0]["placement"], "limit_us": LIMIT_US}
    for way in WAYS:
        slowest = [1e6 * max(each) for each in zip(*(end.get(way, ()) for end in ends), strict=True)]
        found[f"{way}_us"] = round(statistics.median(slowest), 1) if slowest else None
    return {**found, "within": found["repeated_us"] < LIMIT_US}


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
    raise typer.Exit(exit_status(rows, not target.interpreted()))


def exit_status(rows: list[dict[str, Any]], on_gpu: bool) -> int:
    """1 where a case is beyond the limit."""
    return int(on_gpu and not all(row["within"] for row in rows))


if __name__ == "__main__":
    typer.run(main)
