"""What budgets and abort words cost: each op with and without them, in turn, in one process a rank.

    python -m tests.stress.overhead --ranks 2 --json overhead.json

Without them a wait polls its flag, or its message, for ever. Both variants of an op are compiled in the same process,
each with a workspace of its own, and timed A B A B as CUDA graphs of many calls. A call takes as long as on its
slowest rank; what counts is the median of the differences. On the CPU target the figures mean nothing.
"""

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

from pyrocshmem import Heap, message, note, signal, spawn, target  # isort: skip  # before Triton
import torch
import triton
import triton.language as tl
import typer
from triton.runtime.jit import JITFunction

from pyrocshmem import collectives, stream_k
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.polls import pause
from pyrocshmem.reference.problems import PROBLEMS
from pyrocshmem.reference.timing import time_in_turn
from tests.stress import figures

# What the checks may cost: of a large op, and of a small one.
LIMIT_SHARE, LIMIT_US = 0.01, 0.3
_GRAPH_CALLS = 20
_SYSTEM = tl.constexpr("sys")


@triton.jit
def bare_wait(
    flags, mask, epoch, tiles, peers, context, OP: tl.constexpr, WORLD: tl.constexpr, scope: tl.constexpr = _SYSTEM,
    call=None, FIRST: tl.constexpr = False,
):  # fmt: skip
    """`signal.wait` that never gives up, whatever comes FIRST."""
    control, abort, record, heap_bases = context
    up = tl.min(signal._is_up(flags, mask, epoch, abort), axis=0)
    while up == 0:
        pause()
        up = tl.min(signal._is_up(flags, mask, epoch, abort), axis=0)
    signal._acquire(flags, mask, abort, scope)
    return up == 1


def _bare_poll(text: str) -> str:
    """The PTX of `message.poll` or `note.poll` (NVIDIA) without its look at the clock and the abort word."""
    before, counting, rest = text.partition("add.u32 n, n, 1;")
    _, giving_up, after = rest.partition("mov.u32 gone, 1;")
    if not (counting and giving_up):
        raise ValueError(f"polls.poll_text has changed, its checks are not where they were:\n{text}")
    return before + "bra AGAIN;" + after


@triton.jit
def no_deadline(context):
    """`message.deadline_ns` for a poll that has none."""
    return tl.full((), 0, tl.int64)


def _forget_compiled() -> None:
    """Kernels are compiled anew when they are next prepared. Those that were prepared keep what they have."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in {"pyrocshmem", "stream_k", "collectives"}:
            for value in list(vars(module).values()):
                if isinstance(value, JITFunction):
                    value.hash, value.used_global_vals = None, {}
                    value.device_caches.clear()


@contextlib.contextmanager
def without_checks() -> Iterator[None]:
    """What is prepared inside waits for ever."""
    polls = (message, "_POLL_ONE"), (message, "_POLL_TWO"), (note, "_POLL_ONE"), (note, "_POLL_TWO")
    with contextlib.ExitStack() as planted:
        # The interpreter's poll is another one.
        if not target.interpreted():
            planted.callback(_forget_compiled)  # last of all, when all is as it was
            planted.enter_context(mock.patch.object(message, "deadline_ns", no_deadline))
            for module, name in polls:
                bare = tl.constexpr(_bare_poll(getattr(module, name).value))
                planted.enter_context(mock.patch.object(module, name, bare))
        planted.enter_context(mock.patch.object(signal, "wait", bare_wait))
        if not target.interpreted():
            _forget_compiled()
        yield


@dataclass(frozen=True)
class Case:
    """op: of stream_k, by its name in reference.problems, with global M N K, or "tensor": an all-reduce of M words."""

    op: str
    shape: tuple[int, int, int]
    large: bool

    def __str__(self) -> str:
        name = "all_reduce" if self.op == "tensor" else PROBLEMS[self.op].op
        return f"{name} {' x '.join(str(size) for size in self.shape if size > 1)}"


_GPU_CASES = (
    *(Case(op, (8192, 8192, 7168), True) for op in PROBLEMS),
    *(Case(op, (16, 8192, 8192), False) for op in ("all_reduce", "all_scatter")),
    *(Case("tensor", (words, 1, 1), False) for words in (256, 16384)),
)
_CPU_CASES = (Case("all_reduce", (32, 32, 32), True), Case("tensor", (64, 1, 1), False))


def measure(rank: int, world_size: int, cases: list[Case], iters: int) -> list[dict[str, tuple[float, ...]]]:
    """A rank: seconds of a call, case by case, "with" and "without" checks."""
    on_gpu = not target.interpreted()
    device = target.device(rank)
    found = []
    for case in cases:
        with Heap(4 << 30 if on_gpu else 16 << 20) as heap:
            calls = {}
            for name, change in (("with", contextlib.nullcontext), ("without", without_checks)):
                # Prepared in here; a graph, or the next call, has no more of Python's look-ups to make.
                with change():
                    call, out = _prepare(case, heap, device)
                    calls[name] = (_repeated(call, heap) if on_gpu else call, out)
            samples = time_in_turn(calls, iters, device)
            repeats = _GRAPH_CALLS if on_gpu else 1
            found.append({name: tuple(s / repeats for s in seconds) for name, seconds in samples.items()})
            heap.synchronize()
            assert not any(out.isnan().any() for _, out in calls.values())
            heap.barrier()
    return found


def _prepare(case: Case, heap: Heap, device: torch.device) -> tuple[Callable[[], Any], torch.Tensor]:
    """(a call on a workspace of its own, what it writes), called once."""
    workspace, dtype = Workspace(heap), torch.bfloat16 if device.type == "cuda" else torch.float16
    M, N, K = case.shape
    if case.op == "tensor":
        x = torch.ones(M, dtype=torch.float32, device=device)
        out = torch.empty_like(x)

        def call() -> Any:
            return collectives.all_reduce(x, group=heap, out=out, workspace=workspace)
    else:
        problem = PROBLEMS[case.op]
        a, b = torch.randn(M, K, dtype=dtype, device=device), torch.randn(K, N, dtype=dtype, device=device)
        a, b = (x.contiguous() for x in problem.shares(a, b, heap.rank, heap.world_size))
        rows, columns = problem.part(case.shape, heap.rank, heap.world_size)
        out = torch.empty(rows.stop - rows.start, columns.stop - columns.start, dtype=dtype, device=device)
        op, sizes = getattr(stream_k, problem.op), problem.op_arguments(case.shape)

        def call() -> Any:
            return op(a, b, group=heap, out=out, workspace=workspace, **sizes)

    call()
    heap.synchronize()
    return call, out


def _repeated(call: Callable[[], Any], heap: Heap) -> Callable[[], None]:
    """A CUDA graph of `_GRAPH_CALLS` calls."""
    graph = torch.cuda.CUDAGraph()
    heap.barrier()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_GRAPH_CALLS):
            call()
    heap.barrier()
    return graph.replay


def summary(case: Case, ends: list[dict[str, tuple[float, ...]]]) -> dict[str, Any]:
    """Of all ranks' samples: microseconds, and whether the checks cost less than the limit."""
    slowest = {
        name: [1e6 * max(each) for each in zip(*(end[name] for end in ends), strict=True)] for name in ends[0]
    }
    differences = [a - b for a, b in zip(slowest["with"], slowest["without"], strict=True)]
    low, _, high = statistics.quantiles(differences, n=4)
    plain, cost = statistics.median(slowest["without"]), statistics.median(differences)
    limit = LIMIT_SHARE * plain if case.large else LIMIT_US
    return {
        "case": str(case),
        "with_us": round(statistics.median(slowest["with"]), 3),
        "without_us": round(plain, 3),
        "difference_us": round(cost, 3),
        "quartiles_us": [round(low, 3), round(high, 3)],
        "limit_us": round(limit, 3),
        "within": cost < limit,
    }


def main(
    ranks: Annotated[int, typer.Option(help="one a GPU")] = 2,
    iters: Annotated[int, typer.Option(help="samples of each variant")] = 40,
    json: Annotated[Path | None, typer.Option(help="write the figures here")] = None,
) -> None:
    cases = list(_CPU_CASES if target.interpreted() else _GPU_CASES)
    ends = spawn(measure, ranks, cases, iters)
    rows = [summary(case, [end[number] for end in ends]) for number, case in enumerate(cases)]
    columns = {"case": "op", "with_us": "with, us", "without_us": "without, us"}
    columns |= {"difference_us": "checks cost, us", "limit_us": "limit, us", "within": "within"}
    figures.report(columns, rows, json, ranks=ranks, iters=iters)


if __name__ == "__main__":
    typer.run(main)
