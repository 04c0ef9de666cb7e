"""`./run.sh -n 4 -c all_reduce`, or `python -m pyrocshmem run ...`: run a fused op on this machine, check it, time
it beside the reference.

Prints where it runs and why, the problem, each rank's share, the schedule, the error beside its bound, our
time and the reference's. Exits with 0 when every rank's result is right, 1 when one is wrong or fails, 2 for
options that make no sense here. `python -m pyrocshmem tune` is another command: `benchmarks.tune`.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pyrocshmem.reference.__main__ import Backend, Dtype, check_file, parse_sizes, refuse

MAX_RANKS = 8
_CPU_RANKS = 4
_USAGE = Path(__file__).with_name("usage.txt")


def main(
    context: typer.Context,
    num_gpus: Annotated[int | None, typer.Option("-n", "--num-gpus")] = None,
    collective: Annotated[str, typer.Option("-c", "--collective")] = "all_scatter",
    shape: Annotated[str | None, typer.Option("--shape")] = None,
    dtype: Annotated[Dtype | None, typer.Option("--dtype")] = None,
    backend: Annotated[Backend, typer.Option("--backend")] = Backend.auto,
    block: Annotated[str | None, typer.Option("--block")] = None,
    placement: Annotated[str, typer.Option("--placement")] = "auto",
    partial_dtype: Annotated[Dtype | None, typer.Option("--partial-dtype")] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    iters: Annotated[int | None, typer.Option("--iters")] = None,
    json: Annotated[Path | None, typer.Option("--json")] = None,
    trace: Annotated[Path | None, typer.Option("--trace")] = None,
    help_: Annotated[bool, typer.Option("-h", "--help")] = False,
) -> None:
    """Run a fused op; `usage.txt` has the options."""
    if help_:
        sys.stdout.write(_USAGE.read_text())
        return
    console = Console()
    try:
        tile = parse_sizes(block, "MNK", "--block") if block else None
        options = {"placement": placement, "seed": seed, "block": tile}
        for path in (json, trace):
            check_file(path)
        if backend is not Backend.auto:
            _on_backend(backend)
        ok = _run(console, num_gpus, collective, shape, dtype, partial_dtype, iters, json, trace, options)
    except (ValueError, OSError) as error:
        refuse(console, error)
    except RuntimeError as failed:
        from pyrocshmem import InitTimeout

        if not isinstance(failed.__cause__, InitTimeout):
            raise
        refuse(console, failed.__cause__, 1)  # why there is no heap: the ranks' tracebacks add nothing to it
    raise typer.Exit(0 if ok else 1)


def _on_backend(backend: Backend) -> None:
    """Which target this is was settled when `stream_k` was imported: where another one is asked for, start again."""
    import torch

    from pyrocshmem import target

    if backend is Backend.gpu and not torch.cuda.device_count():
        raise ValueError(f"--backend gpu, but torch {torch.__version__} sees no GPU here")
    os.environ["PYROCSHMEM_BACKEND"] = backend.value  # of the ranks
    if (backend is Backend.cpu) == (target.backend() == "host"):
        return
    if backend is Backend.gpu:
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        try:
            target.check_interpreter()
        except RuntimeError as error:
            raise ValueError(str(error)) from None
    os.execv(sys.executable, [sys.executable, "-m", "pyrocshmem", "run", *sys.argv[1:]])


def _run(
    console: Console,
    num_gpus: int | None,
    collective: str,
    shape: str | None,
    dtype: Dtype | None,
    partial_dtype: Dtype | None,
    iters: int | None,
    json_path: Path | None,
    trace_path: Path | None,
    options: dict[str, Any],
) -> bool:
    """Run the job and print everything; whether every rank's result is right."""
    import torch

    from pyrocshmem import target
    from pyrocshmem.calls import timeline_files
    from pyrocshmem.reference.problems import find_problem
    from pyrocshmem.stream_k.run.job import Job, check_job

    on_gpu = target.backend() != "host"
    present = target.num_devices()
    num_ranks = num_gpus if num_gpus is not None else min(MAX_RANKS, present) if on_gpu else _CPU_RANKS
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"{num_ranks} ranks asked for, allowed are 1 to {MAX_RANKS}")
    if on_gpu and num_ranks > present:
        raise ValueError(f"{num_ranks} GPUs asked for, this machine has {present}")
    name = dtype.value if dtype else ("bfloat16" if on_gpu else "float16")
    calls = iters if iters is not None else 20 if on_gpu else 3
    if trace_path is not None:
        timeline_files.check_path(trace_path)
    problem = find_problem(collective, len(shape.split(",")) if shape else None)
    sizes = _parse(shape, problem.letters) if shape else problem.default_shape(num_ranks, on_gpu)
    wire = (
        getattr(torch, partial_dtype.value) if partial_dtype and partial_dtype is not Dtype.float32 else None
    )
    traced = trace_path is not None
    job = Job(
        collective, sizes, getattr(torch, name), iters=calls, partial_dtype=wire, trace=traced, **options
    )
    check_job(job, num_ranks)
    return _run_job(console, job, num_ranks, json_path, trace_path)


def _parse(text: str, letters: str) -> tuple[int, ...]:
    sizes = parse_sizes(text, letters)
    if min(sizes) < 1:
        raise ValueError(f"--shape is {text!r}, allowed sizes of 1 or more")
    return sizes


def _run_job(
    console: Console, job: Any, num_ranks: int, json_path: Path | None, trace_path: Path | None
) -> bool:
    """Run a `stream_k.run.job.Job` and print what came of it; whether every rank's result is right."""
    from pyrocshmem import RanksFailed
    from pyrocshmem.calls import timeline_files
    from pyrocshmem.launching import spawn
    from pyrocshmem.reference import report
    from pyrocshmem.stream_k.run.job import run_rank

    problem, sizes = job.problem, job.shape
    facts = _facts(job, num_ranks)
    report.print_facts(console, f"{problem.package}.{problem.op}", facts)
    try:
        results = spawn(run_rank, num_ranks, job)
    except RanksFailed as failed:
        # What a tile needs of the device is known once its kernel is compiled.
        if job.block is not None and isinstance(failed.__cause__, ValueError):
            raise failed.__cause__ from None
        raise
    accuracy = [result.accuracy for result in results]
    timings = [
        report.Timing(who, report.slowest([result.seconds[who] for result in results]))
        for who in results[0].seconds
    ]
    report.print_errors(console, accuracy)
    if problem.gemm:
        report.print_times(console, timings, 2.0 * math.prod(sizes))
    else:
        report.print_times(console, timings, math.prod(sizes) * job.dtype.itemsize, "GB/s of the tensor")
    console.print(f"workspace: {results[0].workspace_bytes / 2**20:.1f} MiB a rank")
    timeline = results[0].timeline
    if timeline is not None and trace_path is not None:
        timeline_files.report(console, timeline, trace_path, f"{problem.op}, {sizes}")
    if json_path is not None:
        report.write_json(json_path, {**facts, "shape": sizes, "num_ranks": num_ranks}, accuracy, timings)
    return all(found.ok for found in accuracy)


def _facts(job: Any, num_ranks: int) -> dict[str, object]:
    """What is printed before the run."""
    from pyrocshmem import target

    problem = job.problem
    library = "NCCL/RCCL" if target.backend() != "host" else "gloo"
    dtype = str(job.dtype).removeprefix("torch.")
    sizes = f"{' '.join(problem.letters)} = {' '.join(map(str, job.shape))}"
    chosen, wire = _chosen(job, num_ranks) if problem.configured else ({}, "")
    return {
        "runs on": target.describe(),
        "reference": f"{problem.steps} ({library})",
        "C = A x B" if problem.gemm else "sizes": f"{sizes}, {dtype}, {num_ranks} ranks, seed {job.seed}",
        "per rank": problem.describe_share(job.shape, num_ranks),
        **chosen,
        "bound": problem.describe_bound(wire),
    }


def _chosen(job: Any, num_ranks: int) -> tuple[dict[str, object], str]:
    """(facts of the configuration, what partial sums are rounded to, "" for fp32)."""
    from pyrocshmem import target
    from pyrocshmem.stream_k.run.job import make_config, make_schedule

    problem, device = job.problem, target.device(0)
    config = make_config(job, num_ranks, device)
    schedule = make_schedule(job, num_ranks, device)
    beside = (
        f", {config.num_comm_programs} beside it" if config.placement == "beside" and num_ranks > 1 else ""
    )
    algorithm = f"{config.algorithm}, " if problem.op == "gemm_all_reduce" else ""
    ways = {
        "copy_engine": "by copy engines",
        "pull": f"{config.num_comm_programs} programs pull beside it",
        "own_stream": "a kernel on a stream of its own, beside the GEMM",
        "messages": "by messages, before or after the GEMM",
        "unfused": "by messages, before or after a product of the BLAS where it can",
    }
    where = ways.get(config.placement, f"{config.placement} the GEMM")
    tiles = f"{schedule.whole_tiles} whole tiles, {schedule.num_split_tiles} split tiles"
    steps = f"{config.block_m} x {config.block_n} x {config.block_k}"
    wire = str(config.wire_dtype(job.dtype)).removeprefix("torch.").replace("float32", "fp32")
    facts: dict[str, object] = {
        "schedule": f"{schedule.kind}: {tiles}, {schedule.num_programs} programs{beside}",
        "tile": f"{steps}, {config.num_warps} warps, {config.num_stages} stages",
        "communication": f"{algorithm}{where}" + (f", partials in {wire}" if problem.sums else ""),
    }
    return facts, "" if wire == "fp32" else wire


app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.callback(invoke_without_command=True, add_help_option=False)(main)

if __name__ == "__main__":
    app(prog_name="python -m pyrocshmem run")
