"""`python -m pyrocshmem reference -n 2 -c all_gather`: run a reference op on this machine, check it, time it.

Prints where it runs and why, the problem, each rank's share, the error beside its bound, and the time. Exits
with 0 when every rank's result is right, 1 when one is wrong or fails, 2 for options that make no sense here.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from pyrocshmem import options
from pyrocshmem.options import Backend

USAGE = Path(__file__).with_name("usage.txt")


def main(
    context: typer.Context,
    num_gpus: Annotated[int, typer.Option("-n", "--num-gpus")] = 2,
    collective: Annotated[str | None, typer.Option("-c", "--collective")] = None,
    shape: Annotated[str | None, typer.Option("--shape")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype")] = None,
    backend: Annotated[Backend, typer.Option("--backend")] = Backend.auto,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    iters: Annotated[int, typer.Option("--iters")] = 10,
    json: Annotated[Path | None, typer.Option("--json")] = None,
    help_: Annotated[bool, typer.Option("-h", "--help")] = False,
) -> None:
    """Run torch.matmul and a torch.distributed collective; `usage.txt` has the options."""
    usage = USAGE.read_text()
    if help_:
        sys.stdout.write(usage)
        return
    names = options.collectives(usage)
    try:
        options.refuse_words(context, names, given=collective is not None)
        collective = collective or "all_gather"
        options.check_name(collective, names)
        options.check_ranks(num_gpus)
        sizes = options.parse_sizes(shape, *names[collective]) if shape else None
        dtype = options.check_dtype(dtype, integers=True)
        options.check_count("iters", iters)
        options.check_file(json)
        options.settle_target(backend)
        ok = _run(num_gpus, collective, sizes, dtype, seed, iters, json)
    except (ValueError, OSError) as error:
        options.refuse(error)
    raise typer.Exit(0 if ok else 1)


def _run(
    num_ranks: int,
    collective: str,
    shape: tuple[int, ...] | None,
    dtype_name: str | None,
    seed: int,
    iters: int,
    json_path: Path | None,
) -> bool:
    """Run the job on `num_ranks` ranks and print everything; whether every rank's result is right."""
    import torch
    from rich.console import Console

    from pyrocshmem import target
    from pyrocshmem.launching import spawn
    from pyrocshmem.reference import report
    from pyrocshmem.reference.job import Job, check_job, describe_bound, run_rank

    on_gpu = target.backend() != "host"
    options.check_gpus(num_ranks)
    sizes, steps, share = _problem(collective, shape, num_ranks, on_gpu)
    name = dtype_name or ("bfloat16" if on_gpu else "float16")
    job = Job(collective, sizes, getattr(torch, name), seed, iters)
    check_job(job, num_ranks)

    facts = {
        "runs on": target.describe(),
        "op": f"{steps} ({'NCCL/RCCL' if on_gpu else 'gloo'}), {num_ranks} ranks",
        "C = A x B" if len(sizes) == 3 else "sizes": (
            f"{' '.join('MNK'[: len(sizes)])} = {' '.join(map(str, sizes))}, {name}, seed {seed}"
        ),
        "per rank": share,
        "bound": describe_bound(job, num_ranks),
    }
    console = Console()
    report.print_where(console)
    report.print_facts(console, "reference", facts)
    report.print_step(f"starting {num_ranks} ranks")
    results = spawn(run_rank, num_ranks, job)
    accuracy = [result.accuracy for result in results]
    timings = [report.Timing("reference", report.slowest([result.seconds for result in results]))]
    report.print_errors(console, accuracy)
    if len(sizes) == 3:
        report.print_times(console, timings, 2.0 * math.prod(sizes))
    else:
        size = math.prod(sizes) * job.dtype.itemsize
        report.print_times(console, timings, size, "GB/s of the tensor")
    if json_path is not None:
        report.write_json(json_path, {**facts, "shape": sizes, "num_ranks": num_ranks}, accuracy, timings)
    return report.print_verdict(console, accuracy)


def _problem(
    collective: str, shape: tuple[int, ...] | None, num_ranks: int, on_gpu: bool
) -> tuple[tuple[int, ...], str, str]:
    """(its sizes, M N K or M N, as asked for or the default ones; its steps; what each rank has), in words."""
    from pyrocshmem.reference.problems import find_problem

    problem = find_problem(collective, len(shape) if shape else None)
    sizes = shape or problem.default_shape(num_ranks, on_gpu)
    return sizes, problem.steps, problem.describe_share(sizes, num_ranks)


app = options.app()
app.command(**options.COMMAND, add_help_option=False)(main)

if __name__ == "__main__":
    app(prog_name=options.program_name("reference"))
