"""The work of `pyrocshmem run`, whose options `pyrocshmem.run_command` has checked as far as that goes without torch.

Prints where it runs and why, the problem, each rank's share, the schedule, the error beside its bound, our time and the
reference's, and last whether all ranks are right. Each step is a line on stderr as it begins.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from rich.console import Console

from pyrocshmem import launching, target
from pyrocshmem.calls import timeline_files
from pyrocshmem.calls.invariance import wanted
from pyrocshmem.options import MAX_RANKS, check_gpus, program_name
from pyrocshmem.reference import report
from pyrocshmem.reference.problems import find_problem
from pyrocshmem.results import RanksFailed
from pyrocshmem.stream_k.choice.explain import explain
from pyrocshmem.stream_k.choice.table import dtype_name
from pyrocshmem.stream_k.run import job as fused

_CPU_RANKS = 4
# An interpreted step takes about so long, whatever its size; ranks that don't end within the time limit are killed.
_STEP_S, _CPU_LIMIT_S = 0.4e-3, 600.0


def run(
    *,
    num_ranks: int | None,
    hosts: int,
    collective: str,
    sizes: tuple[int, ...] | None,
    dtype: str | None,
    block: tuple[int, ...] | None,
    placement: str,
    partial_dtype: str | None,
    seed: int,
    iters: int | None,
    json_path: Path | None,
    trace_path: Path | None,
    batch_invariant: bool,
    tp_invariant: bool,
) -> bool:
    """Run the job and print everything; whether every rank's result is right. ValueError for what makes no sense."""
    on_gpu = target.backend() != "host"
    here = min(MAX_RANKS, target.num_devices()) if on_gpu else _CPU_RANKS
    ranks = num_ranks if num_ranks is not None else here
    check_gpus(ranks)
    kind = getattr(torch, dtype or ("bfloat16" if on_gpu else "float16"))
    calls = iters if iters is not None else 20 if on_gpu else 3
    if trace_path is not None:
        timeline_files.check_path(trace_path)
    wire = None if partial_dtype is None else getattr(torch, partial_dtype)
    problem = find_problem(collective, len(sizes) if sizes else None)
    job = fused.Job(
        collective,
        sizes or problem.default_shape(ranks, on_gpu),
        kind,
        placement,
        seed,
        calls,
        wire,
        trace=trace_path is not None,
        block=block,
        invariance=wanted(batch_invariant, tp_invariant),
        hosts=hosts,
    )
    fused.check_job(job, ranks)
    return _run_job(Console(), job, ranks, json_path, trace_path)


def _run_job(
    console: Console, job: fused.Job, num_ranks: int, json_path: Path | None, trace_path: Path | None
) -> bool:
    """Run an op and print what came of it; whether every rank's result is right."""
    problem, sizes = job.problem, job.shape
    facts = _facts(job, num_ranks)
    if problem.configured and target.interpreted():
        _check_time(job, num_ranks)
    report.print_where(console)
    report.print_facts(console, f"{problem.package}.{problem.op}", facts)
    report.print_step(f"starting {num_ranks} ranks")
    try:
        results = launching.spawn(fused.run_rank, num_ranks, job)
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
        title = f"{problem.op}, {' '.join(problem.letters)} = {' '.join(map(str, sizes))}"
        timeline_files.report(console, timeline, trace_path, title)
    if json_path is not None:
        report.write_json(json_path, {**facts, "shape": sizes, "num_ranks": num_ranks}, accuracy, timings)
    return report.print_verdict(console, accuracy)


def _check_time(job: fused.Job, num_ranks: int) -> None:
    """ValueError, with a command that works, for a product that takes too long in Triton's interpreter."""
    schedule = fused.make_schedule(job, num_ranks, target.device())
    steps = schedule.num_tiles * schedule.iters_per_tile
    seconds = _STEP_S * steps * num_ranks / min(num_ranks, os.cpu_count() or 1)
    if seconds * (job.iters + 1) > _CPU_LIMIT_S:
        small = ",".join(map(str, job.problem.default_shape(num_ranks, on_gpu=False)))
        raise ValueError(
            f"a call of M N K = {' '.join(map(str, job.shape))} takes about {seconds / 60:.0f} minutes in Triton's "
            f"interpreter; this works: {program_name('run')} -n {num_ranks} -c {job.collective} --shape {small}"
        )


def _facts(job: fused.Job, num_ranks: int) -> dict[str, object]:
    """What is printed before the run."""
    problem = job.problem
    library = "NCCL/RCCL" if target.backend() != "host" else "gloo"
    sizes = f"{' '.join(problem.letters)} = {' '.join(map(str, job.shape))}, {dtype_name(job.dtype)}"
    rounded = job.rounds_to(num_ranks)
    partials = f"a rounding of each rank's partial to {dtype_name(rounded)}" if rounded else ""
    if job.hosts > 1 and problem.sums:
        partials += f"{' and' if partials else 'a rounding'} of each host's sum"
    made_up = f"{job.hosts}, made up, of {num_ranks // job.hosts} ranks each; between them {library}"
    return {
        "runs on": target.describe(),
        **({"hosts": made_up} if job.hosts > 1 else {}),
        "reference": f"{problem.steps} ({library})",
        "C = A x B" if problem.gemm else "sizes": f"{sizes}, {num_ranks} ranks, seed {job.seed}",
        "per rank": problem.describe_share(job.shape, num_ranks),
        **(_chosen(job, num_ranks) if problem.configured and job.hosts == 1 else {}),
        "bound": problem.describe_bound(job.dtype, partials),
    }


def _chosen(job: fused.Job, num_ranks: int) -> dict[str, object]:
    """Facts of the configuration."""
    problem, device = job.problem, target.device(0)
    config = fused.make_config(job, num_ranks, device)
    schedule = fused.make_schedule(job, num_ranks, device)
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
        "blas_blocks": "by copy engines, beside products of the BLAS where it can, one for each block of rows",
    }
    where = ways.get(config.placement, f"{config.placement} the GEMM")
    tiles = f"{schedule.whole_tiles} whole tiles, {schedule.num_split_tiles} split tiles"
    steps = f"{config.block_m} x {config.block_n} x {config.block_k}"
    rounded = job.rounds_to(num_ranks)
    wire = "fp32" if rounded is None else dtype_name(rounded)
    facts: dict[str, object] = {
        "schedule": f"{schedule.kind}: {tiles}, {schedule.num_programs} programs{beside}",
        "tile": f"{steps}, {config.num_warps} warps, {config.num_stages} stages",
        "communication": f"{algorithm}{where}" + (f", partials in {wire}" if problem.sums else ""),
    }
    if job.block is None:
        M, N, K = problem.local_shape(job.shape, num_ranks)
        placement = None if job.placement == "auto" else job.placement
        asked = (problem.op, M, N, K, job.dtype, num_ranks, device, job.partial_dtype, placement)
        why = explain(*asked, invariance=job.invariance)
        facts["why"] = why.line()
    return facts
