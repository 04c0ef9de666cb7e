"""A run: ranks started, cases measured op by op, records written as they come."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pyrocshmem import RanksFailed, spawn, target
from pyrocshmem.benchmarks import ahead, layers, models, providers, records
from pyrocshmem.benchmarks.derive import broken
from pyrocshmem.benchmarks.measure import LIMIT_S, measure_cases
from pyrocshmem.benchmarks.shapes import CORPORA, LAYERS, TIMED, Case, cases_of
from pyrocshmem.heap import Heap
from pyrocshmem.options import program_name

# Cases that may break the ranks (a wait that ran out, a crash) before a run gives up; the others are measured by new
# ranks.
_MAX_BREAKS = 3
# Samples a provider, and of the hundreds of products of the Stream-K corpus, whose distribution is what counts.
_ITERS, _ITERS_OF_MANY, _MANY_CASES = 30, 8, 300
# For M = N = 16384: two slots of fp32 partials, a result, and what captured graphs keep.
_GPU_HEAP_BYTES, _CPU_HEAP_BYTES = 24 << 30, 64 << 20
_TINY_GPU_HEAP_BYTES = 1 << 30  # tests run beside others
# Of a GEMM that Triton's interpreter does in a second or two.
_MOST_CPU_MULTIPLICATIONS = 1 << 30


def plan(
    ops: list[str],
    shapes: str | None,
    dtype: str | None,
    ranks: int,
    names: tuple[str, ...] | None,
    commit: str = "",
) -> list[Case]:
    """The cases of a run of what is at `commit`, "" where that is not known. Raises ValueError for what doesn't
    exist."""
    on_gpu = target.backend() != "host"
    if names is not None:
        known = {name for op in ops for name in _providers_of(op)}
        if unknown := sorted(set(names) - known):
            raise ValueError(f"no such providers: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    if shapes is not None and models.is_drawn(shapes):
        shapes = models.with_seed(shapes, commit)  # one seed for all ops
    found = []
    for op in ops:
        sets = (shapes,) if shapes is not None else TIMED[op].sets if on_gpu else ("tiny",)
        if len(ops) > 1:  # a set asked for is measured for the ops that have it
            sets = tuple(name for name in sets if _has_set(op, name))
        for name in sets:
            # The corpus is the Stream-K paper's, in fp16; Triton's interpreter has no bf16.
            default = "float16" if name in CORPORA or not on_gpu else "bfloat16"
            found += cases_of(op, name, ranks, dtype or default, on_gpu)
    return found


def _has_set(op: str, name: str) -> bool:
    drawn = models.is_drawn(name) and TIMED[op].kind not in ("collective", "layer")
    return drawn or name == "tiny" or name in TIMED[op].sets


def refuse_large(cases: list[Case]) -> None:
    """ValueError, with a command that works, for a case that takes too long in Triton's interpreter."""
    for case in cases:
        if target.backend() == "host" and case.M * case.N * case.K > _MOST_CPU_MULTIPLICATIONS:
            raise ValueError(
                f"{case.M} x {case.N} x {case.K} takes minutes in Triton's interpreter, many times over; this works: "
                f"{program_name('bench')} {case.op} --shapes tiny"
            )


def _providers_of(op: str) -> tuple[str, ...]:
    return layers.ALL_PROVIDERS if op in LAYERS else providers.providers_of(op)


def run(
    cases: list[Case],
    names: tuple[str, ...] | None,
    iters: int | None,
    ranks: int,
    path: Path,
    commit: str,
    before: records.File | None = None,
) -> records.File:
    """Measure `cases` on `ranks` ranks of this machine; what is in `path` afterwards. iters: samples a provider; None:
    30, of hundreds of cases 8. before: what is in `path` already, of a run that this one goes on with."""
    if iters is None:
        iters = _ITERS if len(cases) <= _MANY_CASES else _ITERS_OF_MANY
    header = records.environment(ranks, commit)
    if before is None:
        records.start(path, header)
    else:
        records.append(path, header)
    todo = cases if before is None else _without(cases, before)
    ahead.compile_ahead(todo, names)
    for attempt in range(_MAX_BREAKS + 1 if todo else 0):
        try:
            spawn(_rank_main, ranks, todo, names, iters, path, timeout=LIMIT_S)
            break
        except RanksFailed as error:
            todo = _after_break(path, todo, header, error)
            if attempt == _MAX_BREAKS or not todo:
                break
    records.append(path, {"gpus_after": records.gpus_now()})
    found = records.read(path)
    assert found is not None
    return found


def _after_break(path: Path, todo: list[Case], header: dict[str, Any], error: RanksFailed) -> list[Case]:
    """Record that the first case without a record broke the ranks; the cases after it. `error` says how."""
    print(error, file=sys.stderr, flush=True)
    records.drop_cut_line(path)
    file = records.read(path)
    assert file is not None
    if left := _without(todo, file):
        device = header["gpus"][0].split(",")[0] if header["gpus"] else "cpu"
        reason = repr(error.__cause__) if error.__cause__ is not None else str(error)
        records.append(path, broken(left[0], device, reason))
    return left[1:]


def _without(cases: list[Case], file: records.File) -> list[Case]:
    """Those that have no record in `file`."""
    fields = ("op", "shapes", "M", "N", "K", "dtype")
    measured = {tuple(record[name] for name in fields) for record in file.cases}
    return [case for case in cases if tuple(getattr(case, name) for name in fields) not in measured]


def _rank_main(
    rank: int,
    world_size: int,
    cases: list[Case],
    names: tuple[str, ...] | None,
    iters: int,
    path: Path,
) -> None:
    device = target.device(rank)
    # What several sets of shapes have in common is measured once, and recorded under each.
    sets: dict[Case, list[str]] = {}
    for case in cases:
        sets.setdefault(dataclasses.replace(case, shapes=""), []).append(case.shapes)
    with contextlib.ExitStack() as stack:
        if rank == 0:
            advance = stack.enter_context(_progress(len(sets)))
        for op in dict.fromkeys(case.op for case in cases):
            todo = [case for case in sets if case.op == op]
            # One heap an op: what its graphs and workspaces keep is given back with it.
            alone = TIMED[op].kind == "gemm"
            tiny = all(sets[case] == ["tiny"] for case in todo)
            size = _TINY_GPU_HEAP_BYTES if tiny else _GPU_HEAP_BYTES
            size = _CPU_HEAP_BYTES if device.type == "cpu" else size
            with contextlib.nullcontext() if alone else Heap(size) as heap:
                measure = layers.measure_cases if op in LAYERS else measure_cases
                for case, record in measure(todo, names, iters, heap, device):
                    if rank == 0:
                        for name in sets[case]:
                            records.append(path, record | {"shapes": name})
                        advance(case)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Case], None]]:
    """A bar where somebody looks on, otherwise a line an op; call what it gives after each case."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=total)
        seen: list[str] = []

        def advance(case: Case) -> None:
            progress.update(task, advance=1, description=f"{case.op} {case.M} x {case.N} x {case.K}")
            if case.op not in seen:
                seen.append(case.op)
                if not console.is_terminal:
                    print(f"measuring {case.op}", file=sys.stderr, flush=True)

        yield advance


def problems(found: list[dict[str, Any]]) -> list[str]:
    """What must fail the run: wrong results, and our own providers that broke."""
    texts = []
    for record in found:
        shape = f"{record['op']} {record['M']} x {record['N']} x {record['K']} {record['dtype']}"
        for name in record["wrong"]:
            error, bits = record["error"][name], record.get("bits", {}).get(name, {"distinct": 1})
            if error["num_bad"] or bits["distinct"] == 1:
                texts.append(f"{shape}: WRONG result of {name}: {error}")
            else:
                texts.append(f"{shape}: WRONG: {bits['distinct']} results of {name} in {bits['runs']} runs")
        texts += [f"{shape}: {name} failed: {reason}" for name, reason in record["failed"].items()]
    return texts
