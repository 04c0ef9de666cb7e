"""One run of a fused op on one rank: operands, result, its check, its times beside the reference's.

Usage: `spawn(run_rank, num_ranks, Job("all_reduce", (512, 512, 512), torch.float16, ...))`, a `Result` a
rank. A and B are random; rank r's shares are cut from them as `reference.problems` says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pyrocshmem import stream_k, target
from pyrocshmem.calls.timeline import Timeline, record_call
from pyrocshmem.heap import Heap
from pyrocshmem.reference.accuracy import Accuracy, check, make_operand
from pyrocshmem.reference.problems import Problem, Shape, find_problem
from pyrocshmem.reference.timing import time_in_turn
from pyrocshmem.stream_k.choice.config import BY_MESSAGE, Config
from pyrocshmem.stream_k.choice.placement import placement_names
from pyrocshmem.stream_k.choice.table import choose
from pyrocshmem.stream_k.local_gemm.product import schedule_of
from pyrocshmem.stream_k.local_gemm.schedule import Schedule

# Sizes of a tile and of its step along K. Descriptors take boxes of at most 256, products on all targets at least 16.
BLOCKS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Job:
    """What to run: a name from reference.problems, the global (M, N, K), the dtype, how many calls to time.

    placement: one of the op's, or "auto". partial_dtype: what partial sums
    travel in; None: fp32. trace: record a timeline of one more call. block: the tile, (M, N, K); None: the
    configuration's.
    """

    collective: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    placement: str = "auto"
    seed: int = 0
    iters: int = 10
    partial_dtype: torch.dtype | None = None
    trace: bool = False
    block: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Result:
    """What a rank found: its output against the bound; seconds of each timed call on this rank, by provider;
    bytes of workspace; the timeline of all ranks, where asked for, on rank 0."""

    accuracy: Accuracy
    seconds: dict[str, tuple[float, ...]]
    workspace_bytes: int
    timeline: Timeline | None = None


def check_job(job: Job) -> None:
    """Raise ValueError for a job that can't run, before any rank is started."""
    problem = find_problem(job.collective)
    placements = placement_names(problem.op)
    if job.placement not in (*placements, "auto"):
        raise ValueError(
            f"placement of {job.collective} is {job.placement!r}, allowed {', '.join(placements)}, auto"
        )
    if job.partial_dtype is not None and not problem.sums:
        raise ValueError(f"{job.collective} has no partial sums to travel in {job.partial_dtype}")
    if job.block is not None and not set(job.block) <= set(BLOCKS):
        raise ValueError(
            f"block is {job.block}, allowed are {', '.join(map(str, BLOCKS))} for each of M, N, K"
        )
    if job.block is not None and job.placement == "unfused":
        raise ValueError("placement is 'unfused', whose product is the BLAS's: it takes no block")
    if min(job.shape) < 1:
        raise ValueError(f"shape is {job.shape}, allowed sizes of 1 or more")
    if job.iters < 1:
        raise ValueError(f"iters is {job.iters}, allowed 1 or more")


def _padded(problem: Problem, shape: Shape, num_ranks: int) -> Shape:
    """`shape` with as many columns as make the shares of ranks equal, where columns are shared out: the ops want
    that. The columns that are added to B are zeros."""
    M, N, K = shape
    return (M, -(-N // num_ranks) * num_ranks, K) if problem.b_cut == "N" else shape


def make_config(job: Job, num_ranks: int, device: torch.device) -> Config:
    """The configuration that the run uses. ValueError where these ranks can't run the job with it."""
    problem = find_problem(job.collective)
    if job.placement in BY_MESSAGE and problem.a_cut == "M" and job.shape[0] % num_ranks != 0:
        raise ValueError(
            f"placement is {job.placement!r}, for as many rows on each rank: M is {job.shape[0]} on {num_ranks} ranks"
        )
    local = problem.local_shape(job.shape, num_ranks)
    placement = None if job.placement == "auto" else job.placement
    kind = (problem.op, *local, job.dtype, num_ranks, device, job.partial_dtype)
    config = choose(*kind, placement)
    if job.block is None:
        return config
    # A product of the BLAS has no tile of ours.
    return with_block(choose(*kind, "messages") if config.placement == "unfused" else config, job.block)


def with_block(config: Config, block: tuple[int, ...]) -> Config:
    """`config` with another tile, (M, N, K) of `BLOCKS`, which needs no more shared memory where that can be had."""
    block_m, block_n, block_k = block
    loads = config.num_stages * (config.block_m + config.block_n) * config.block_k
    part = config.block_m * config.block_n // config.subtiles
    parts = [n for n in (1, 2, 4) if block_n // n >= 16]
    return replace(
        config,
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        num_warps=8 if block_m * block_n >= 128 * 128 else 4,
        num_stages=min(6, max(1, loads // ((block_m + block_n) * block_k))),
        subtiles=next((n for n in parts if block_m * block_n // n <= part), parts[-1]),
        # Balanced for other tiles.
        num_programs=0,
        comm_rows=min(config.comm_rows, block_m),
    )


def make_schedule(job: Job, num_ranks: int, device: torch.device) -> Schedule:
    """The schedule that the run follows, for printing."""
    config = make_config(job, num_ranks, device)
    comm = config.num_comm_programs if config.placement == "beside" and num_ranks > 1 else 0
    local = find_problem(job.collective).local_shape(job.shape, num_ranks)
    return schedule_of(config, *local, device, comm)


def run_rank(rank: int, world_size: int, job: Job) -> Result:
    """Run `job` on this rank of the default process group: check the timed buffer, after timing it."""
    problem, device = find_problem(job.collective), target.device(rank)
    M, N, K = job.shape
    shape = _padded(problem, job.shape, world_size)
    # The whole of A and B on every rank: the check needs them, and the shares are cut from them.
    a = make_operand((M, K), job.dtype, job.seed, 0, tag="a", device=device)
    b = make_operand((K, N), job.dtype, job.seed, 0, tag="b", device=device)
    b = torch.nn.functional.pad(b, (0, shape[1] - N))
    a_share, b_share = (x.contiguous() for x in problem.shares(a, b, rank, world_size))
    reference, expected = problem.prepare(a_share, b_share, shape, rank, world_size)
    mine, sizes = torch.empty_like(expected), problem.op_arguments(shape)
    op = getattr(stream_k, problem.op)
    config = make_config(job, world_size, device)
    with Heap(group=None, nbytes=_heap_bytes(job, world_size)) as heap:

        def ours() -> torch.Tensor:
            return op(a_share, b_share, group=heap, out=mine, config=config, **sizes)

        seconds = time_in_turn({"ours": (ours, mine), "reference": (reference, expected)}, job.iters, device)
        timeline = record_call(ours, heap) if job.trace else None
        heap.synchronize()
        wire = config.wire_dtype(job.dtype)
        roundings = {"num_partials": world_size, "partial_roundings": int(wire != torch.float32)}
        rows, columns = problem.part(shape, rank, world_size)
        accuracy = check(mine, a[rows], b[:, columns], expected, **roundings, partial_dtype=wire)
        assert heap.workspace is not None or world_size == 1
        used = heap.workspace.nbytes_in_use() if heap.workspace is not None else 0
        return Result(accuracy, seconds, used, timeline if rank == 0 else None)


def _heap_bytes(job: Job, world_size: int) -> int:
    """Enough for any of the ops: two slots of fp32 partials, padded to tiles, in every placement; a result; two
    of A gathered; flags."""
    M, N, K = job.shape
    padded = (M + 256 * world_size) * (N + 256 * world_size)
    gathered = 2 * (M + 256 * world_size) * K if find_problem(job.collective).a_cut == "M" else 0
    return 2 * padded * 4 + (3 * padded + gathered) * job.dtype.itemsize + (16 << 20)
