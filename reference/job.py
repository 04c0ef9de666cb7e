"""One run of a reference op on one rank: operands, result, its check, its times.

Usage: `spawn(run_rank, num_ranks, Job("all_reduce", (512, 512, 512), torch.float16))`, a `Result` a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyrocshmem import target
from pyrocshmem.reference import report
from pyrocshmem.reference.accuracy import Accuracy
from pyrocshmem.reference.operands import Operands
from pyrocshmem.reference.problems import ALL, Problem, find_problem
from pyrocshmem.reference.timing import Meter


@dataclass(frozen=True)
class Job:
    """What to run: a problem's name on the command lines, its global sizes, the dtype, and how many calls to time."""

    collective: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int = 0
    iters: int = 10

    @property
    def problem(self) -> Problem:
        """Of that name, with as many sizes."""
        return find_problem(self.collective, len(self.shape))


@dataclass(frozen=True)
class Result:
    """What a rank found: its output against the bound, and the seconds of each timed call on this rank."""

    accuracy: Accuracy
    seconds: tuple[float, ...]


def check_job(job: Job, num_ranks: int) -> None:
    """Raise ValueError for a job that can't run, before any rank is started."""
    check_name(job.collective)
    job.problem.check_dtype(job.dtype)
    job.problem.check_sizes(job.shape, num_ranks, 0 if job.problem.configured else 1)
    if job.iters < 1:
        raise ValueError(f"iters is {job.iters}, allowed 1 or more")


def check_name(collective: str) -> None:
    """ValueError, with the names that there are, for any other. A barrier has nothing to look at without a heap."""
    names = dict.fromkeys(problem.command for problem in ALL if problem.command and problem.joins != "meet")
    if collective not in names:
        raise ValueError(f"collective is {collective!r}, allowed {', '.join(names)}")


def describe_bound(job: Job, num_ranks: int) -> str:
    """What the error is held to, in words."""
    rounded = f"{num_ranks} roundings of each rank's part" if job.problem.sums else ""
    text = job.problem.describe_bound(job.dtype, rounded)
    exact = job.problem.moves or not job.dtype.is_floating_point
    return text if exact else f"{text} + what a library rounds while it adds"


def run_rank(rank: int, world_size: int, job: Job) -> Result:
    """Run `job` on this rank of the default process group: check the timed buffer, after timing it."""
    device = target.device(rank)
    operands = Operands(job.problem, job.shape, job.dtype, job.seed, rank, world_size, device)
    run, say = operands.reference(), report.step_of(rank)
    say("warming up")
    run.call()
    say(f"timing {job.iters} calls of reference")
    samples = Meter(device, lined_up=world_size > 1).in_turn({"reference": run}, job.iters)
    say("checking against float64")
    return Result(operands.check(run.result(), **operands.of_library()), tuple(samples.seconds["reference"]))
