"""One run of a reference op on one rank: operands, result, its check, its times.

Usage: `spawn(run_rank, num_ranks, Job("all_reduce", (512, 512, 512), torch.float16))`, a `Result` a rank.
Operands are random; rank r's shares are cut from them as `reference.problems` and `reference.norm_problems` say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyrocshmem import target
from pyrocshmem.reference import report
from pyrocshmem.reference.accuracy import Accuracy, check, make_operand
from pyrocshmem.reference.norm_problems import NORMS, Setting
from pyrocshmem.reference.problems import PROBLEMS, find_problem
from pyrocshmem.reference.timing import time_in_turn


@dataclass(frozen=True)
class Job:
    """What to run: a name from PROBLEMS or NORMS, its global sizes, the dtype, and how many calls to time."""

    collective: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int = 0
    iters: int = 10


@dataclass(frozen=True)
class Result:
    """What a rank found: its output against the bound, and the seconds of each timed call on this rank."""

    accuracy: Accuracy
    seconds: tuple[float, ...]


def check_job(job: Job, num_ranks: int) -> None:
    """Raise ValueError for a job that can't run, before any rank is started."""
    check_name(job.collective)
    least = int(job.collective in NORMS)
    if min(job.shape) < least:
        raise ValueError(f"shape is {job.shape}, allowed sizes of {least} or more")
    if job.collective in NORMS and NORMS[job.collective].even and job.shape[1] % num_ranks != 0:
        raise ValueError(f"N is {job.shape[1]}, a multiple of the {num_ranks} ranks is needed")
    if job.iters < 1:
        raise ValueError(f"iters is {job.iters}, allowed 1 or more")


def check_name(collective: str) -> None:
    """ValueError, with the names that there are, for any other."""
    names = (*PROBLEMS, *NORMS)
    if collective not in names:
        raise ValueError(f"collective is {collective!r}, allowed {', '.join(names)}")


def describe_bound(job: Job, num_ranks: int) -> str:
    """What the error is held to, in words."""
    if job.collective in NORMS:
        sums = NORMS[job.collective].sums
        text = NORMS[job.collective].bound.replace("the reference", "one plain computation")
    else:
        sums = find_problem(job.collective).sums
        text = "error of one plain product + sqrt(K) 2^-23 |A| @ |B| + one rounding"
    return f"{text} + {num_ranks} roundings of each rank's part" if sums else text


def run_rank(rank: int, world_size: int, job: Job) -> Result:
    """Run `job` on this rank of the default process group: check the timed buffer, after timing it."""
    device = target.device(rank)
    if job.collective in NORMS:
        return _run_norm(Setting(rank, world_size, device, job.shape, job.dtype, job.seed), job)
    say = report.step_of(rank)
    problem = find_problem(job.collective)
    M, N, K = job.shape
    # The whole of A and B on every rank: the check needs them, and the shares are cut from them.
    a = make_operand((M, K), job.dtype, job.seed, 0, tag="a", device=device)
    b = make_operand((K, N), job.dtype, job.seed, 0, tag="b", device=device)
    a_share, b_share = (x.contiguous() for x in problem.shares(a, b, rank, world_size))
    call, out = problem.prepare(a_share, b_share, (M, N, K), rank, world_size)
    seconds = time_in_turn({"reference": (call, out)}, job.iters, device, say)["reference"]

    say("checking against float64")
    # One product of the whole operands on this device: independent of the shares and of the collective.
    rows, columns = problem.part((M, N, K), rank, world_size)
    baseline = torch.matmul(a, b)[rows, columns]
    # The library rounds the partial products to the dtype, and again after each addition.
    roundings = {"num_partials": world_size, "partial_roundings": world_size} if problem.sums else {}
    return Result(check(out, a[rows], b[:, columns], baseline, **roundings), seconds)


def _run_norm(setting: Setting, job: Job) -> Result:
    """The same for an op that makes its result, which `out` becomes, without a copy."""
    problem = NORMS[job.collective]
    op = problem.make(setting)
    out = torch.empty(0, dtype=job.dtype, device=setting.device)
    calls = {"reference": (lambda: out.set_(op.reference()), out)}
    say = report.step_of(setting.rank)
    seconds = time_in_turn(calls, job.iters, setting.device, say)["reference"]
    say("checking against float64")
    return Result(op.check(out, op.plain(), setting.num_ranks if problem.sums else 0), seconds)
