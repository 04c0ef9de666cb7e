"""One run of a reference op on one rank: operands, result, its check, its times.

Usage: `spawn(run_rank, num_ranks, Job("all_reduce", (512, 512, 512), torch.float16))`, a `Result` a rank.
A and B are random; rank r's shards are cut from them by `shard_range` (K for sums, N for all_gather).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pyrocshmem import target
from reference import ops
from reference.accuracy import Accuracy, check, make_operand
from reference.timing import time_in_turn

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Job:
    """What to run: a name from COLLECTIVES, the global (M, N, K), the dtype, and how many calls to time."""

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


def check_job(job: Job, num_ranks: int) -> None:
    """Raise ValueError for a job that `num_ranks` ranks can't run, before any is started."""
    if job.collective not in COLLECTIVES:
        raise ValueError(f"collective is {job.collective!r}, allowed {', '.join(COLLECTIVES)}")
    if min(job.shape) < 0:
        raise ValueError(f"shape is {job.shape}, allowed sizes of 0 or more")
    if job.iters < 1:
        raise ValueError(f"iters is {job.iters}, allowed 1 or more")
    if job.collective == "reduce_scatter" and job.shape[0] % num_ranks != 0:
        raise ValueError(f"reduce_scatter needs M divisible by the {num_ranks} ranks, got M = {job.shape[0]}")


def describe_share(job: Job, num_ranks: int) -> str:
    """What rank 0 multiplies and what it holds at the end, in words."""
    M, N, K = job.shape
    if job.collective == "all_gather":
        width = ops.shard_range(N, 0, num_ranks)[1]
        return f"A {M} x {K}, B {K} x {width}; result {M} x {N}, the column blocks of all ranks"
    depth = ops.shard_range(K, 0, num_ranks)[1]
    rows = M if job.collective == "all_reduce" else M // num_ranks
    return f"A {M} x {depth}, B {depth} x {N}; result {rows} x {N}, of the sum over ranks"


def describe_bound(job: Job, num_ranks: int) -> str:
    """What the error is held to, in words."""
    text = "error of one plain product + sqrt(K) 2^-23 |A| @ |B| + one rounding"
    if job.collective == "all_gather":
        return text
    return f"{text} + {num_ranks} roundings of each partial product"


def run_rank(rank: int, world_size: int, job: Job) -> Result:
    """Run `job` on this rank of the default process group: check the timed buffer, after timing it."""
    M, N, K = job.shape
    device = target.device(rank)
    # The whole of A and B on every rank: the check needs them, and the shards are views of them.
    a = make_operand((M, K), job.dtype, job.seed, 0, tag="a", device=device)
    b = make_operand((K, N), job.dtype, job.seed, 0, tag="b", device=device)
    call, out = _prepare(job, a, b, rank, world_size)
    seconds = time_in_turn({"reference": (call, out)}, job.iters, device)["reference"]

    # One product of the whole operands on this device: independent of the shards and of the collective.
    baseline = torch.matmul(a, b)
    if job.collective == "all_gather":
        return Result(check(out, a, b, baseline), seconds)
    begin, end = ops.shard_range(M, rank, world_size) if job.collective == "reduce_scatter" else (0, M)
    # The library rounds the partial products to the dtype, and again after each addition.
    found = check(
        out, a[begin:end], b, baseline[begin:end], num_partials=world_size, partial_roundings=world_size
    )
    return Result(found, seconds)


def _prepare(
    job: Job, a: torch.Tensor, b: torch.Tensor, rank: int, world_size: int
) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """The call to time, which allocates nothing, and the buffer that it writes."""
    M, N, K = job.shape
    if job.collective == "all_gather":
        begin, end = ops.shard_range(N, rank, world_size)
        padded = -(-N // world_size)
        out, block, gathered = a.new_empty(M, N), a.new_empty(M, padded), a.new_empty(world_size, M, padded)
        mine = b[:, begin:end].contiguous()
        return lambda: ops.gemm_all_gather(
            a, mine, num_columns=N, out=out, block=block, gathered=gathered
        ), out
    begin, end = ops.shard_range(K, rank, world_size)
    a_shard, b_shard = a[:, begin:end].contiguous(), b[begin:end].contiguous()
    if job.collective == "all_reduce":
        out = a.new_empty(M, N)
        return lambda: ops.gemm_all_reduce(a_shard, b_shard, out=out), out
    out, partial = a.new_empty(M // world_size, N), a.new_empty(M, N)
    return lambda: ops.gemm_reduce_scatter(a_shard, b_shard, out=out, partial=partial), out
