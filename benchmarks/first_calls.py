"""How long the first call of an op takes, cold, with a warm cache of Triton and after `warm_up`; and what a call with
another number of rows costs the host.

    python -m pyrocshmem.benchmarks.first_calls -n 2 --shape 8192,8192,3584      # most rows, N and K of a rank's GEMM

Prints a table in Markdown: seconds of a first call, to the end of what it launched, of ranks that were started for it
and have formed their heap; then microseconds of the host, medians over 100 calls, none of which replays a graph: of
calls with rows that were not seen before, and of the same calls once more. All are of the slowest rank. "gemm" is each
rank's own. Last comes what `torch.mm` takes of the host: cuBLAS looks for a kernel for each new number of rows.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

import torch
import typer

import pyrocshmem
import pyrocshmem.stream_k  # registers its ops
from pyrocshmem import Heap, options, target
from pyrocshmem.benchmarks.records import NO_MULTICAST
from pyrocshmem.calls.op import Sizes, find
from pyrocshmem.calls.workspace import local_workspace, workspace_for
from pyrocshmem.launching import RankResult, run_ranks
from pyrocshmem.warming import WarmedUp

OPS = (
    "gemm",
    "all_gather_gemm",
    "gemm_reduce_scatter",
    "gemm_all_reduce",
    "gemm_all_scatter",
    "gemm_all_reduce_rms_norm",
    "gemm_rms_norm_all_scatter",
)
_NEW_ROWS = 100
# Between calls whose host time counts: the device must not fall behind.
_CALLS_BETWEEN = 10
_LIMIT_S = 900.0


class Case(NamedTuple):
    """rows: at most, of all ranks. warms_up: before the first call, whose time the second figure is then."""

    op: str
    rows: int
    N: int
    K: int
    dtype: str
    warms_up: bool
    cache: str


class Took(NamedTuple):
    """Of a rank. warm_up_s: 0 without. first_s: of the first call. kernels: that `warm_up` had compiled. new_us,
    again_us: of the host, a call with new rows and the same once more; 0 where not asked for."""

    warm_up_s: float
    first_s: float
    kernels: int
    new_us: float = 0.0
    again_us: float = 0.0


def measure(rank: int, world_size: int, case: Case) -> Took:
    """In a rank that was started for it."""
    # A graph would take the place of what the second figure of the host is about.
    os.environ.update(TRITON_CACHE_DIR=case.cache, PYROCSHMEM_GRAPHS="0")
    dtype = getattr(torch, case.dtype)
    with Heap() as heap, torch.no_grad():
        space = local_workspace(heap.device) if case.op == "gemm" else workspace_for(heap)
        call = find(case.op).sized
        assert call is not None
        make = call(Sizes(case.N, case.K, case.rows, dtype, space))
        heap.barrier()
        done = WarmedUp(0, 0.0)
        if case.warms_up:
            named = (case.op, case.N, case.K)
            group = {"workspace": space} if case.op == "gemm" else {"group": heap}
            done = pyrocshmem.warm_up(named, rows=case.rows, dtype=dtype, **group)
            heap.barrier()
        begin = time.perf_counter()
        make(case.rows)
        heap.synchronize()
        first = time.perf_counter() - begin
        new = again = 0.0
        if case.warms_up:
            new, again = _new_and_again(make, case, heap)
        return Took(done.seconds, first, done.kernels, new, again)


def measure_blas(rank: int, world_size: int, case: Case) -> tuple[float, float]:
    """us of the host that `torch.mm` takes in the place of the op: with new rows, and with the same once more."""
    dtype = getattr(torch, case.dtype)
    with Heap() as heap, torch.no_grad():
        a = torch.zeros(case.rows, case.K, dtype=dtype, device=heap.device)
        b = torch.zeros(case.N, case.K, dtype=dtype, device=heap.device).t()
        torch.mm(a, b)
        return _new_and_again(lambda rows: torch.mm(a[:rows], b), case, heap)


def _new_and_again(make: Callable[[int], object], case: Case, heap: Heap) -> tuple[float, float]:
    draw = random.Random(case.op)
    numbers = draw.sample(range(1, case.rows), min(_NEW_ROWS, case.rows - 1))
    spent: tuple[list[float], list[float]] = ([], [])
    # A few new ones, then the same: a host's speed changes within seconds.
    for first in range(0, len(numbers), _CALLS_BETWEEN):
        for times in spent:
            times += [_host_us(make, rows) for rows in numbers[first : first + _CALLS_BETWEEN]]
            heap.synchronize()
    heap.barrier()
    new, again = map(statistics.median, spent)
    return new, again


def _host_us(make: Callable[[int], object], rows: int) -> float:
    begin = time.perf_counter()
    make(rows)
    return 1e6 * (time.perf_counter() - begin)


def table(ops: list[str], rows: int, N: int, K: int, dtype: str, num_ranks: int) -> Iterator[str]:
    """The lines of the table, each as soon as it is measured."""
    heads = (
        "op",
        "cold, s",
        "warm cache, s",
        "after warm_up, s",
        "warm_up cold, s",
        "with a warm cache, s",
        "kernels",
        "new rows, us of the host",
        "the same once more, us",
    )
    yield from (f"| {' | '.join(heads)} |", "|---" * len(heads) + "|")
    for op in ops:
        took = []
        for warms_up in (False, True):
            with tempfile.TemporaryDirectory() as cache:
                case = Case(op, rows, N, K, dtype, warms_up, cache)
                took += [_of_fresh_ranks(case, num_ranks) for _ in range(2)]
        cold, cached, warmed, warmed_cached = took
        cells = (
            op, f"{cold.first_s:.2f}", f"{cached.first_s:.2f}", f"{warmed_cached.first_s:.3f}",
            f"{warmed.warm_up_s:.2f}", f"{warmed_cached.warm_up_s:.2f}", str(warmed.kernels),
            f"{warmed_cached.new_us:.0f}", f"{warmed_cached.again_us:.0f}",
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"
    new, again = _slowest(run_ranks(measure_blas, num_ranks, case, timeout=_LIMIT_S), "torch.mm")
    yield ""
    yield f"`torch.mm` in their place: {new:.0f} us of the host with new rows, {again:.0f} with the same once more."


def _of_fresh_ranks(case: Case, num_ranks: int) -> Took:
    """Of the slowest rank, in each figure."""
    warm_up, first, kernels, new, again = _slowest(
        run_ranks(measure, num_ranks, case, timeout=_LIMIT_S), case.op
    )
    return Took(warm_up, first, int(kernels), new, again)


def _slowest(ends: Sequence[RankResult], what: str) -> list[float]:
    for end in ends:
        if not end.ok:
            raise RuntimeError(f"{what} failed: {end.exception!r}")
    return [max(figures) for figures in zip(*(end.value for end in ends), strict=True)]


def main(
    num_ranks: Annotated[int, typer.Option("-n", "--num-gpus")] = 2,
    shape: Annotated[str, typer.Option(help="Most rows, N and K of a rank's GEMM.")] = "8192,8192,3584",
    ops: Annotated[str, typer.Option(help="Names with commas between them.")] = ",".join(OPS),
    dtype: Annotated[str | None, typer.Option(help="Default: bfloat16, on a CPU float16.")] = None,
) -> None:
    """Print how long first calls take, and what new numbers of rows cost the host."""
    options.check_ranks(num_ranks)
    os.environ.update(NO_MULTICAST)
    rows, N, K = map(int, shape.split(","))
    name = options.check_dtype(dtype) or ("bfloat16" if target.num_devices() else "float16")
    for line in table(ops.split(","), rows, N, K, name, num_ranks):
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
