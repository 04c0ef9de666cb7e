"""One run of a reference op on one rank: operands, result, its check, its times.

Usage: `spawn(run_rank, num_ranks, Job("all_reduce", (512, 512, 512), torch.float16))`, a `Result` a rank.
A and B are random; rank r's shares are cut from them as `reference.problems` says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyrocshmem import target
from reference.accuracy import Accuracy, check, make_operand
from reference.problems import find_problem
from reference.timing import time_in_turn


@dataclass(frozen=True)
class Job:
    """What to run: a name from PROBLEMS, the global (M, N, K), the dtype, and how many calls to time."""

    collective: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    seed: int = 0
    iters: int = 10


@dataclass(frozen=True)
class Result:
    """What a rank found: its output against the bound, and the seconds of each timed call on this rank."""

    accuracy: Accuracy
    seconds: tuple[float, ...]


def check_job(job: Job) -> None:
    """Raise ValueError for a job that can't run, before any rank is started."""
    find_problem(job.collective)
    if min(job.shape) < 0:
        raise ValueError(f"shape is {job.shape}, allowed sizes of 0 or more")
    if job.iters < 1:
        raise ValueError(f"iters is {job.iters}, allowed 1 or more")


def describe_bound(job: Job, num_ranks: int) -> str:
    """What the error is held to, in words."""
    text = "error of one plain product + sqrt(K) 2^-23 |A| @ |B| + one rounding"
    if not find_problem(job.collective).sums:
        return text
    return f"{text} + {num_ranks} roundings of each partial product"


def run_rank(rank: int, world_size: int, job: Job) -> Result:
    """Run `job` on this rank of the default process group: check the timed buffer, after timing it."""
    problem, device = find_problem(job.collective), target.device(rank)
    M, N, K = job.shape
    # The whole of A and B on every rank: the check needs them, and the shares are cut from them.
    a = make_operand((M, K), job.dtype, job.seed, 0, tag="a", device=device)
    b = make_operand((K, N), job.dtype, job.seed, 0, tag="b", device=device)
    a_share, b_share = (x.contiguous() for x in problem.shares(a, b, rank, world_size))
    call, out = problem.prepare(a_share, b_share, job.shape, rank, world_size)
    seconds = time_in_turn({"reference": (call, out)}, job.iters, device)["reference"]

    # One product of the whole operands on this device: independent of the shares and of the collective.
    rows, columns = problem.part(job.shape, rank, world_size)
    baseline = torch.matmul(a, b)[rows, columns]
    # The library rounds the partial products to the dtype, and again after each addition.
    roundings = {"num_partials": world_size, "partial_roundings": world_size} if problem.sums else {}
    return Result(check(out, a[rows], b[:, columns], baseline, **roundings), seconds)
