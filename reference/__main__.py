"""`python -m pyrocshmem reference -n 2 -c all_gather`: run a reference op on this machine, check it, time it.

Prints where it runs and why, the problem, each rank's share, the error beside its bound, and the time. Exits
with 0 when every rank's result is right, 1 when one is wrong or fails, 2 for options that make no sense here.
"""

from __future__ import annotations

import math
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape


class Dtype(StrEnum):
    """Of operands and result."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


class Backend(StrEnum):
    """Where ranks run."""

    auto = "auto"
    gpu = "gpu"
    cpu = "cpu"


def main(
    num_gpus: Annotated[
        int, typer.Option("-n", "--num-gpus", help="Ranks: GPUs, or processes on a CPU.")
    ] = 2,
    collective: Annotated[
        str, typer.Option("-c", "--collective", help="Collective operation.")
    ] = "all_gather",
    shape: Annotated[str | None, typer.Option("--shape", help="Global sizes as M,N,K, or M,N.")] = None,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="Default: bfloat16, on a CPU float16.")
    ] = None,
    backend: Annotated[Backend, typer.Option("--backend", help="Where to run.")] = Backend.auto,
    seed: Annotated[int, typer.Option("--seed", help="Of the random operands.")] = 0,
    iters: Annotated[int, typer.Option("--iters", help="Timed calls.")] = 10,
    json: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Run torch.matmul and a torch.distributed collective (NCCL, RCCL or gloo), check it and time it."""
    console = Console()
    if backend is not Backend.auto:
        # Read when pyrocshmem is imported, here and in the ranks: hence before the imports below.
        os.environ["PYROCSHMEM_BACKEND"] = backend.value
    try:
        ok = _run(console, num_gpus, collective, shape, dtype and dtype.value, seed, iters, json)
    except (ValueError, OSError) as error:
        refuse(console, error)
    raise typer.Exit(0 if ok else 1)


def _run(
    console: Console,
    num_ranks: int,
    collective: str,
    shape: str | None,
    dtype_name: str | None,
    seed: int,
    iters: int,
    json_path: Path | None,
) -> bool:
    """Run the job on `num_ranks` ranks and print everything; whether every rank's result is right."""
    import torch

    from pyrocshmem import target
    from pyrocshmem.launching import spawn
    from pyrocshmem.reference import report
    from pyrocshmem.reference.job import Job, check_job, check_name, describe_bound, run_rank

    on_gpu = target.backend() != "host"
    if num_ranks < 1:
        raise ValueError(f"{num_ranks} ranks asked for, allowed 1 or more")
    if on_gpu and num_ranks > target.num_devices():
        raise ValueError(f"{num_ranks} GPUs asked for, this machine has {target.num_devices()}")
    check_file(json_path)
    check_name(collective)
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
    report.print_facts(console, "reference", facts)
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
    return all(found.ok for found in accuracy)


def _problem(
    collective: str, shape: str | None, num_ranks: int, on_gpu: bool
) -> tuple[tuple[int, ...], str, str]:
    """(its sizes, M N K or M N, as asked for or the default ones; its steps; what each rank has), in words."""
    from pyrocshmem.reference.problems import find_problem

    problem = find_problem(collective, len(shape.split(",")) if shape else None)
    sizes = parse_sizes(shape, problem.letters) if shape else problem.default_shape(num_ranks, on_gpu)
    return sizes, problem.steps, problem.describe_share(sizes, num_ranks)


def refuse(console: Console, error: BaseException, status: int = 2) -> NoReturn:
    """End a command, as a rule one that was asked for what can't be done: a text in which brackets are no markup."""
    console.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
    raise typer.Exit(status) from None


def check_file(path: Path | None) -> None:
    """ValueError or OSError, before anything is measured, for a file that can't be written. What it holds stays."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path} can't be written: there is no folder {path.parent}")
    new = not os.path.lexists(path)
    if new or path.is_file() or path.is_dir():  # a pipe takes one writer
        path.open("a").close()
    if new:
        path.unlink()


def parse_shape(text: str) -> tuple[int, int, int]:
    """(M, N, K) from "M,N,K"; ValueError with what was got for anything else."""
    M, N, K = parse_sizes(text, "MNK")
    return M, N, K


def parse_sizes(text: str, letters: str, option: str = "--shape") -> tuple[int, ...]:
    """As many sizes as letters; ValueError with what was got for anything else."""
    parts = text.split(",")
    if len(parts) != len(letters) or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(
            f"{option} must be {','.join(letters)}, {len(letters)} sizes of 0 or more, got {text!r}"
        )
    return tuple(map(int, parts))


# Plain help and errors: rich's panels are hard to read in a log.
app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command(context_settings={"help_option_names": ["-h", "--help"]})(main)

if __name__ == "__main__":
    app(prog_name="python -m pyrocshmem reference")
