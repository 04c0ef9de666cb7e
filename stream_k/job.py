"""One run of a fused op on one rank: operands, result, its check, its times beside the reference's.

Usage: `spawn(run_rank, num_ranks, Job("all_reduce", (512, 512, 512), torch.float16, ...))`, a `Result` a
rank. A and B are random; rank r's shares are cut from them, K for all_reduce, columns for all_scatter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

import stream_k
from pyrocshmem import target
from pyrocshmem.heap import Heap
from reference import ops
from reference.accuracy import Accuracy, check, make_operand
from reference.timing import time_in_turn
from stream_k.config import PLACEMENTS, Config, choose
from stream_k.product import schedule_of
from stream_k.schedule import Schedule

COLLECTIVES = ("all_reduce", "all_scatter")


@dataclass(frozen=True)
class Job:
    """What to run: a name from COLLECTIVES, the global (M, N, K), the dtype, how many calls to time.

    placement: a name of stream_k.config.PLACEMENTS, or "auto". partial_dtype: what partial sums travel in;
    None: fp32.
    """

    collective: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    placement: str = "auto"
    seed: int = 0
    iters: int = 10
    partial_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Result:
    """What a rank found: its output against the bound; seconds of each timed call on this rank, by provider;
    bytes of workspace."""

    accuracy: Accuracy
    seconds: dict[str, tuple[float, ...]]
    workspace_bytes: int


def check_job(job: Job, num_ranks: int) -> None:
    """Raise ValueError for a job that `num_ranks` ranks can't run, before any is started."""
    if job.collective not in COLLECTIVES:
        raise ValueError(f"collective is {job.collective!r}, allowed {', '.join(COLLECTIVES)}")
    if job.placement not in (*PLACEMENTS, "auto"):
        raise ValueError(f"placement is {job.placement!r}, allowed {', '.join(PLACEMENTS)}, auto")
    if min(job.shape) < 1:
        raise ValueError(f"shape is {job.shape}, allowed sizes of 1 or more")
    if job.iters < 1:
        raise ValueError(f"iters is {job.iters}, allowed 1 or more")


def local_shape(job: Job, num_ranks: int) -> tuple[int, int, int]:
    """(M, N, K) of the largest product of a rank. Columns are padded to equal widths, K is cut as evenly as
    it goes."""
    M, N, K = job.shape
    if job.collective == "all_scatter":
        return M, -(-N // num_ranks), K
    return M, N, -(-K // num_ranks)


def make_config(job: Job, num_ranks: int, device: torch.device) -> Config:
    """The configuration that the run uses."""
    op, shape = f"gemm_{job.collective}", local_shape(job, num_ranks)
    config = choose(op, *shape, job.dtype, num_ranks, device, job.partial_dtype)
    return config if job.placement == "auto" else dataclasses.replace(config, placement=job.placement)


def make_schedule(job: Job, num_ranks: int, device: torch.device) -> Schedule:
    """The schedule that the run follows, for printing."""
    config = make_config(job, num_ranks, device)
    comm = config.num_comm_programs if config.placement == "beside" and num_ranks > 1 else 0
    return schedule_of(config, *local_shape(job, num_ranks), device, comm)


def describe_share(job: Job, num_ranks: int) -> str:
    """What rank 0 multiplies and what it holds at the end, in words."""
    M, N, K = job.shape
    _, columns, depth = local_shape(job, num_ranks)
    if job.collective == "all_scatter":
        return f"A {M} x {K}, B {K} x {columns}; result {M} x {N}, the columns of all ranks"
    return f"A {M} x {depth}, B {depth} x {N}; result {M} x {N}, the sum over ranks"


def run_rank(rank: int, world_size: int, job: Job) -> Result:
    """Run `job` on this rank of the default process group: check the timed buffer, after timing it."""
    device = target.device(rank)
    M, N, K = job.shape
    # The whole of A and B on every rank: the check needs them, and the shares are cut from them.
    a = make_operand((M, K), job.dtype, job.seed, 0, tag="a", device=device)
    b = make_operand((K, N), job.dtype, job.seed, 0, tag="b", device=device)
    with Heap(group=None, nbytes=_heap_bytes(job, world_size)) as heap:
        ours, reference, mine, expected = _prepare(job, a, b, heap)
        seconds = time_in_turn({"ours": (ours, mine), "reference": (reference, expected)}, job.iters, device)
        heap.synchronize()
        roundings = (
            {"num_partials": world_size, "partial_roundings": 1} if job.partial_dtype is not None else {}
        )
        accuracy = check(mine[:, :N], a, b, expected[:, :N], **roundings)
        assert heap.workspace is not None or world_size == 1
        used = heap.workspace.nbytes_in_use() if heap.workspace is not None else 0
        return Result(accuracy, seconds, used)


def _heap_bytes(job: Job, world_size: int) -> int:
    """Enough for the slots of both ops: two of fp32 partials, padded to tiles, in every placement; a result;
    flags."""
    M, N, _ = job.shape
    padded = (M + 256) * (N + 256 * world_size)
    return 2 * padded * 4 + 3 * padded * job.dtype.itemsize + (16 << 20)


def _prepare(
    job: Job, a: torch.Tensor, b: torch.Tensor, heap: Heap
) -> tuple[Callable[[], object], Callable[[], object], torch.Tensor, torch.Tensor]:
    """(our call, the reference's, our output, the reference's); neither call allocates."""
    rank, world_size = heap.rank, heap.world_size
    M, N, K = job.shape
    config = make_config(job, world_size, heap.device)
    if job.collective == "all_reduce":
        begin, end = ops.shard_range(K, rank, world_size)
        a_share, b_share = a[:, begin:end].contiguous(), b[begin:end].contiguous()
        mine, expected = a.new_empty(M, N), a.new_empty(M, N)
        return (
            lambda: stream_k.gemm_all_reduce(a_share, b_share, group=heap, out=mine, config=config),
            lambda: ops.gemm_all_reduce(a_share, b_share, out=expected),
            mine,
            expected,
        )
    width = local_shape(job, world_size)[1]
    columns = b.new_zeros(K, width)
    share = b[:, rank * width : (rank + 1) * width]
    columns[:, : share.shape[1]] = share
    mine, expected = a.new_empty(M, width * world_size), a.new_empty(M, width * world_size)
    block, gathered = a.new_empty(M, width), a.new_empty(world_size, M, width)
    return (
        lambda: stream_k.gemm_all_scatter(a, columns, group=heap, out=mine, config=config),
        lambda: ops.gemm_all_gather(
            a, columns, num_columns=width * world_size, out=expected, block=block, gathered=gathered
        ),
        mine,
        expected,
    )
