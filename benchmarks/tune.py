"""`python -m pyrocshmem tune -n 4`: measure configurations and put the fastest ones into a table.

    python -m pyrocshmem tune -n 4                      # into the user's cache, which `stream_k.choose` looks up
    python -m pyrocshmem tune -n 2 --ops gemm --shapes 512,512,512 --out mine.json
    PYROCSHMEM_TUNED=mine.json ./run.sh ...

`benchmarks.tune_command` has the options, `stream_k.choice.cache` what the cache is.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pyrocshmem import target
from pyrocshmem.benchmarks import models
from pyrocshmem.benchmarks.searches import Ratios
from pyrocshmem.benchmarks.shapes import cases_of
from pyrocshmem.benchmarks.trial import Case, Outcome, tune_case
from pyrocshmem.heap import Heap
from pyrocshmem.launching import spawn
from pyrocshmem.options import check_gpus, parse_sizes
from pyrocshmem.reference import report
from pyrocshmem.reference.problems import PROBLEMS
from pyrocshmem.stream_k.choice import table as tuned
from pyrocshmem.stream_k.choice.cache import default_path, made_here, say_once

OPS = ("gemm", *(problem.op for problem in PROBLEMS.values()))
_SUMS = tuple(problem.op for problem in PROBLEMS.values() if problem.sums)

# Llama 3 layers on 4 to 8 GPUs: (N, K) of a rank's column-parallel product. Row-parallel ones are N and K swapped.
_LLAMA = ((1792, 4096), (3584, 8192), (6656, 16384))
_LLAMA_ROWS = (4096, 8192, 16384)
_CPU_SHAPE = (128, 96, 160)

_GPU_HEAP_BYTES, _CPU_HEAP_BYTES = 24 << 30, 64 << 20
_LIMIT_S = 3600.0


def run(
    out: Path | None,
    num_ranks: int | None,
    ops: str | None,
    shapes: list[str],
    dtype: str | None,
    partial_dtype: str | None,
    iters: int,
    commit: str,
) -> list[str]:
    """Measure, write and print; what gave wrong results. out: None: the user's cache. ValueError for options that make
    no sense here."""
    on_gpu = target.backend() != "host"
    ranks = num_ranks if num_ranks is not None else target.num_devices() or 2
    check_gpus(ranks)
    chosen = dtype or ("bfloat16" if on_gpu else "float16")
    drawn = [models.with_seed(text, commit) if models.is_drawn(text) else text for text in shapes]
    cases = plan(
        tuple(ops.split(",")) if ops else OPS,
        drawn or ["llama3" if on_gpu else ""],
        chosen,
        partial_dtype,
        ranks,
    )
    console = Console()
    report.print_where(console)
    path, table = _table(out)
    console.print(f"table: {path}", soft_wrap=True, markup=False)
    table.runs.append(_run_facts(ranks, commit))
    table.write(path)
    # As in all measurements here; some machines must not use multicast.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    found = spawn(_rank_main, ranks, cases, iters, path, table, timeout=_LIMIT_S)[0]
    rows = Table(title="medians of the slowest rank", title_justify="left")
    for name in ("case", "timing", "cost model", "fastest", "gain", "what differs"):
        rows.add_column(name, justify="left" if name in ("case", "timing", "what differs") else "right")
    for case, outcome in zip(cases, found, strict=True):
        usual, best = outcome.entry.cost_model_us, outcome.entry.us
        differs = ", ".join(f"{name}={value}" for name, value in outcome.differs.items())
        times = f"{usual:.1f} us", f"{best:.1f} us", f"{usual / best:.3f}"
        rows.add_row(str(case), outcome.entry.timing, *times, differs)
    console.print(rows)
    for op in dict.fromkeys(case.op for case in cases):
        ratios = Ratios(
            outcome.entry.cost_model_us / outcome.entry.us
            for case, outcome in zip(cases, found, strict=True)
            if case.op == op
        )
        console.print(f"{op}: {ratios}", soft_wrap=True, markup=False)
    return [text for outcome in found for text in outcome.wrong]


def _table(out: Path | None) -> tuple[Path, tuned.Table]:
    """(where the entries go, the table that they go into). ValueError for a file that was named and is no table, or
    one that was measured otherwise; such a file in the user's cache gives way to a new one."""
    device = target.device()
    here = made_here(device)
    path = out or default_path(device)
    if path is None:
        raise ValueError("this user has no home folder, so there is no cache: give --out")
    if out is None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.path.lexists(path):
        return path, tuned.Table(here, [], [])
    try:
        return path, tuned.Table.read(path, here)
    except ValueError as error:
        if out is not None:
            raise ValueError(f"{error}; give another --out") from None
        say_once(f"{error}; a new one takes its place")
        return path, tuned.Table(here, [], [])


def plan(
    ops: tuple[str, ...], shapes: list[str], dtype: str, partial_dtype: str | None, ranks: int
) -> list[Case]:
    """The cases of a run. ValueError for what doesn't exist."""
    if unknown := set(ops) - set(OPS):
        raise ValueError(f"no such op: {', '.join(sorted(unknown))}; there are {', '.join(OPS)}")
    if ranks == 1 and ops != ("gemm",):
        raise ValueError("on one rank the fused ops are gemm: give --ops gemm")
    wires = (
        ["float32", *([dtype] if dtype != "float32" else [])] if partial_dtype is None else [partial_dtype]
    )
    cases = []
    for op in ops:
        for wire in wires if op in _SUMS else [None]:
            sent = None if wire is None else getattr(torch, wire)
            for text in shapes:
                for shape in _shapes_of(op, text, ranks, dtype):
                    cases.append(Case(op, *shape, getattr(torch, dtype), ranks if op != "gemm" else 1, sent))
    return cases


def _shapes_of(op: str, text: str, ranks: int, dtype: str) -> list[tuned.Shape]:
    if not text:
        return [_CPU_SHAPE]
    if models.is_drawn(text):
        drawn = cases_of(op, text, ranks, dtype, True)
        return list(dict.fromkeys((case.M, case.N, case.K) for case in drawn))
    if text != "llama3":
        M, N, K = parse_sizes(text, "MNK", option="--shapes", least=1)
        return [(M, N, K)]
    columns = [(m, n, k) for n, k in _LLAMA for m in _LLAMA_ROWS]
    rows = [(m, k, n) for m, n, k in columns]
    return columns + rows if op == "gemm" else rows if op in _SUMS else columns


def _run_facts(ranks: int, commit: str) -> dict[str, Any]:
    asked = ["git", "rev-parse", "HEAD"]
    folder = Path(__file__).parent
    found = subprocess.run(asked, capture_output=True, text=True, check=False, cwd=folder).stdout.strip()
    return {
        "command": " ".join(["python -m pyrocshmem", *sys.argv[1:]]),
        "commit": commit or found,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "target": target.describe(),
        "ranks": ranks,
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
    }


def _rank_main(
    rank: int, world_size: int, cases: list[Case], iters: int, out: Path, table: tuned.Table
) -> list[Outcome]:
    device = target.device(rank)
    found = []
    with _progress(len(cases)) if rank == 0 else contextlib.nullcontext(lambda case: None) as advance:
        for op in dict.fromkeys(case.op for case in cases):
            # A heap an op: what its workspace keeps is given back with it.
            size = _CPU_HEAP_BYTES if device.type == "cpu" else _GPU_HEAP_BYTES
            with contextlib.nullcontext() if op == "gemm" else Heap(size) as heap:
                for case in (case for case in cases if case.op == op):
                    advance(case)
                    found.append(tune_case(case, heap, device, iters, len(table.runs) - 1))
                    table.add(found[-1].entry)
                    if rank == 0:
                        # At once: a run that breaks off keeps what it had.
                        table.write(out)
    return found


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Case], None]]:
    """A bar where somebody looks on, otherwise a line a case; call what it gives before each case."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("tuning", total=total, completed=-1)

        def advance(case: Case) -> None:
            progress.update(task, advance=1, description=str(case))
            if not console.is_terminal:
                print(f"tuning {case}", file=sys.stderr, flush=True)

        yield advance
