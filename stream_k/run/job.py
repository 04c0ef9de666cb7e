"""One run of an op on one rank: operands, result, its check, its times beside the reference's.

Usage: `spawn(run_rank, num_ranks, Job("all_reduce", (512, 512, 512), torch.float16, ...))`, a `Result` a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from pyrocshmem import target
from pyrocshmem.calls.invariance import NONE, TP, Invariance, at_least
from pyrocshmem.calls.timeline import Timeline, record_call
from pyrocshmem.collectives.exchange import PIECE_BYTES
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.heap import Heap
from pyrocshmem.hosts import Hosts, hosts_for
from pyrocshmem.places import make_up
from pyrocshmem.reference import report
from pyrocshmem.reference.accuracy import Accuracy
from pyrocshmem.reference.operands import Operands
from pyrocshmem.reference.problems import Problem, find_problem
from pyrocshmem.reference.timing import Meter, Run
from pyrocshmem.stream_k.choice.config import BY_BLAS, Config
from pyrocshmem.stream_k.choice.placement import placement_names
from pyrocshmem.stream_k.choice.table import check_invariant, choose
from pyrocshmem.stream_k.local_gemm.product import schedule_of
from pyrocshmem.stream_k.local_gemm.schedule import Schedule
from pyrocshmem.stream_k.run.calls import meeting, our_run

# Sizes of a tile and of its step along K. Descriptors take boxes of at most 256, products on all targets at least 16.
BLOCKS = (16, 32, 64, 128, 256)
# Slots of messages that rotate, one behind another in a two-shot, rounded up by a quarter at most: so many times what a
# piece takes, at most.
_SLOTS = 8


@dataclass(frozen=True)
class Job:
    """What to run: a problem's name on the command lines, its global sizes (M, N, and K where there is a GEMM), the
    dtype, how many calls to time.

    trace: record a timeline of one more call. Of a problem that is `configured`: placement: one of the op's, or "auto".
    partial_dtype: what partial sums travel in, as in `Config`. block: the tile, (M, N, K); None: the configuration's.
    invariance: the mode of its calls (`pyrocshmem.batch_invariant`). hosts: among which the ranks are divided, made up.
    """

    collective: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: str = "auto"
    seed: int = 0
    iters: int = 10
    partial_dtype: torch.dtype | None = None
    trace: bool = False
    block: tuple[int, ...] | None = None
    invariance: Invariance = NONE
    hosts: int = 1

    @property
    def problem(self) -> Problem:
        """Of that name, with as many sizes."""
        return find_problem(self.collective, len(self.shape))

    def roundings(self, num_ranks: int) -> int:
        """Of each rank's term of a sum, where it is rounded: its own after a GEMM and, over hosts, that of its host's
        sum, if it has other terms."""
        return int(self.problem.gemm) + int(1 < self.hosts < num_ranks)

    def rounds_to(self, num_ranks: int) -> torch.dtype | None:
        """What each rank's partial sum is rounded to; None: there are none, or they are not rounded."""
        if self.hosts > 1 and self.problem.sums:
            return self.dtype if self.dtype.is_floating_point else None
        if num_ranks == 1 or not (self.problem.gemm and self.problem.sums) or self.invariance == TP:
            return None
        wire = ELEMENTS[self.dtype].wire_dtype(self.partial_dtype)
        return None if wire == torch.float32 else wire


@dataclass(frozen=True)
class Result:
    """What a rank found: its output against the bound; seconds of each timed call on this rank, by provider;
    bytes of workspace; the timeline of all ranks, where asked for, on rank 0."""

    accuracy: Accuracy
    seconds: dict[str, tuple[float, ...]]
    workspace_bytes: int
    timeline: Timeline | None = None


def check_job(job: Job, num_ranks: int) -> None:
    """Raise ValueError for a job that can't run, before any rank is started."""
    problem = job.problem
    problem.check_dtype(job.dtype)
    if problem.configured:
        _check_options(job, problem)
    elif job.placement != "auto" or job.block is not None or job.partial_dtype is not None:
        why = "chooses its GEMM itself" if problem.gemm else "has no GEMM"
        raise ValueError(f"{job.collective} {why}: leave --block, --placement and --partial-dtype out")
    problem.check_sizes(job.shape, num_ranks)
    if job.hosts > 1:
        _check_hosts(job, num_ranks)
    if job.invariance and problem.configured:
        M, N, K = problem.local_shape(job.shape, num_ranks)
        config = make_config(job, num_ranks, target.device(0))
        check_invariant(problem.op, config, M, N, K, job.dtype, num_ranks, target.device(0), job.invariance)
    if job.iters < 1:
        raise ValueError(f"iters is {job.iters}, allowed 1 or more")


def _check_hosts(job: Job, num_ranks: int) -> None:
    if num_ranks % job.hosts != 0:
        raise ValueError(f"--hosts is {job.hosts}, and must divide the {num_ranks} ranks")
    by_hand = job.placement != "auto" or job.block is not None or job.partial_dtype is not None
    if by_hand or job.trace or job.invariance == TP:
        raise ValueError(
            "--hosts goes without --block, --placement, --partial-dtype, --trace and --tp-invariant"
        )
    if job.problem.joins == "meet":
        raise ValueError("a barrier shows what it does in a heap, and hosts have one each: leave --hosts out")


def _check_options(job: Job, problem: Problem) -> None:
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
    if job.block is not None and job.placement in BY_BLAS:
        raise ValueError(f"placement is {job.placement!r}, whose product is the BLAS's: it takes no block")


def make_config(job: Job, num_ranks: int, device: torch.device) -> Config:
    """The configuration that a configured op runs with. ValueError where these ranks can't run the job with it."""
    problem = job.problem
    M, N, K = problem.local_shape(job.shape, num_ranks)
    placement = None if job.placement == "auto" else job.placement
    kind = (problem.op, M, N, K, job.dtype, num_ranks, device, job.partial_dtype)
    config = choose(*kind, placement, invariance=job.invariance)
    if job.block is None:
        return config
    # A product of the BLAS has no tile of ours.
    return with_block(choose(*kind, "messages") if config.placement in BY_BLAS else config, job.block)


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
    M, N, K = job.problem.local_shape(job.shape, num_ranks)
    return schedule_of(config, M, N, K, device, comm)


def run_rank(rank: int, world_size: int, job: Job) -> Result:
    """Run `job` on this rank of the default process group: check the timed buffer, after timing it."""
    problem, device = job.problem, target.device(rank)
    shape = problem.even_shape(job.shape, world_size)
    operands = Operands(problem, shape, job.dtype, job.seed, rank, world_size, device)
    options: dict[str, Any] = {}
    if problem.configured and job.hosts == 1:
        options = {"config": make_config(job, world_size, device)}
    with at_least(job.invariance), _formed(job, rank, world_size) as formed:
        heap = formed if isinstance(formed, Heap) else None
        ours, reference = our_run(operands, heap, **options), _reference(operands, formed)
        runs = {"ours": ours, "reference": reference}
        say = report.step_of(rank)
        say("warming up")
        for run in runs.values():
            run.reset()
            run.call()
        say(f"timing {job.iters} calls of ours and reference")
        samples = Meter(device, lined_up=world_size > 1).in_turn(runs, job.iters)
        timeline = record_call(ours.call, heap) if job.trace else None
        formed.synchronize()
        say("checking against float64")
        rounded = job.rounds_to(world_size)
        roundings = 0 if rounded is None else job.roundings(world_size)
        accuracy = operands.check(ours.result(), roundings=roundings, partial_dtype=rounded)
        space = (formed if isinstance(formed, Heap) else formed.heap).workspace
        used = space.nbytes_in_use() if space is not None else 0
        seconds = {name: tuple(each) for name, each in samples.seconds.items()}
        return Result(accuracy, seconds, used, timeline if rank == 0 else None)


@contextmanager
def _formed(job: Job, rank: int, world_size: int) -> Iterator[Heap | Hosts]:
    """Where the calls of the default process group are made: a heap, or the hosts among which its ranks are divided."""
    if job.hosts == 1:
        with Heap(group=None, nbytes=_heap_bytes(job, world_size)) as heap:
            yield heap
        return
    make_up(rank * job.hosts // world_size)
    hosts = hosts_for(None)
    yield hosts
    hosts.close()


def _reference(operands: Operands, heap: Heap | Hosts) -> Run:
    if operands.problem.joins != "meet":
        return operands.reference()
    assert isinstance(heap, Heap)
    token = torch.zeros(1, device=heap.device)
    return meeting(heap, lambda: dist.all_reduce(token))  # not dist.barrier, for which the host waits


def _heap_bytes(job: Job, world_size: int) -> int:
    """Enough for any of the ops. With a GEMM that is configured: two slots of fp32 partials, padded to tiles, in every
    placement; a result; two of A gathered; flags. Without: tensors, messages."""
    M, N, *_ = job.shape
    if not job.problem.configured:
        size = M * N * job.dtype.itemsize
        return (64 << 20) + 8 * size + _SLOTS * min(world_size * size, PIECE_BYTES)
    padded = (M + 256 * world_size) * (N + 256 * world_size)
    gathered = 2 * (M + 256 * world_size) * job.shape[2] if job.problem.a_cut == "M" else 0
    return 2 * padded * 4 + (3 * padded + gathered) * job.dtype.itemsize + (16 << 20)
