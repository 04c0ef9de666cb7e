"""One run of a collective on whole tensors, or of a product with RMSNorm, from the command line:
`./run.sh -c rms_norm --shape 64,4096`.

`run` starts the ranks, prints what `python -m pyrocshmem run` prints for a fused op, and says whether all were right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from pyrocshmem import target
from pyrocshmem.calls import timeline_files
from pyrocshmem.calls.timeline import Timeline, record_call
from pyrocshmem.collectives.exchange import PIECE_BYTES
from pyrocshmem.heap import Heap
from pyrocshmem.launching import spawn
from pyrocshmem.reference import report
from pyrocshmem.reference.accuracy import Accuracy
from pyrocshmem.reference.timing import time_in_turn
from pyrocshmem.stream_k.run.collective_problems import Setting, Standalone

# Beside the tensors and the messages.
_HEAP_BYTES = 64 << 20
# Slots of messages that rotate, one behind another in a two-shot, rounded up by a quarter at most: so many times what a
# piece takes, at most.
_SLOTS = 8


@dataclass(frozen=True)
class Job:
    """What to run, its sizes, as many as its defaults have, how many calls to time, and whether to record one more."""

    problem: Standalone
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int = 0
    iters: int = 10
    trace: bool = False


@dataclass(frozen=True)
class Result:
    """What a rank found: its output against the bound, the seconds of each timed call, by provider, and on rank 0 the
    timeline of all ranks, where asked for."""

    accuracy: Accuracy
    seconds: dict[str, tuple[float, ...]]
    timeline: Timeline | None


def run_rank(rank: int, world_size: int, job: Job) -> Result:
    """Run `job` on this rank of the default process group: check the timed buffer, after timing it."""
    size = job.shape[0] * job.shape[1] * job.dtype.itemsize
    messages = _SLOTS * min(world_size * size, PIECE_BYTES)
    with Heap(_HEAP_BYTES + 8 * size + messages) as heap:
        calls = job.problem.prepare(Setting(heap, job.shape, job.dtype, job.seed))
        providers = {"ours": (calls.ours, calls.result), "reference": (calls.reference, calls.expected)}
        say = report.step_of(rank)
        seconds = time_in_turn(providers, job.iters, heap.device, say)
        timeline = record_call(calls.ours, heap) if job.trace else None
        heap.synchronize()
        say("checking against float64")
        return Result(calls.check(), seconds, timeline if rank == 0 else None)


def run(
    console: Console,
    problem: Standalone,
    num_ranks: int,
    shape: tuple[int, ...] | None,
    dtype: torch.dtype,
    seed: int,
    iters: int,
    json_path: Path | None,
    trace_path: Path | None,
) -> bool:
    """Run a collective and print everything; whether every rank's result is right. ValueError for sizes that make no
    sense."""
    on_gpu = target.backend() != "host"
    sizes = shape or (problem.gpu_shape if on_gpu else problem.cpu_shape)
    letters = "MNK"[: len(sizes)]
    if problem.even and sizes[1] % num_ranks != 0:
        raise ValueError(f"N is {sizes[1]}, a multiple of the {num_ranks} ranks is needed")
    name = str(dtype).removeprefix("torch.")
    facts = {
        "runs on": target.describe(),
        "reference": f"{problem.steps} ({'NCCL/RCCL' if on_gpu else 'gloo'})",
        "sizes": f"{' '.join(letters)} = {' '.join(map(str, sizes))}, {name}, {num_ranks} ranks, seed {seed}",
        "per rank": problem.holds,
        "bound": problem.bound,
    }
    report.print_where(console)
    report.print_facts(console, problem.function or f"collectives.{problem.collective}", facts)
    job = Job(problem, sizes, dtype, seed, iters, trace_path is not None)
    report.print_step(f"starting {num_ranks} ranks")
    results = spawn(run_rank, num_ranks, job)
    accuracy = [result.accuracy for result in results]
    timings = [
        report.Timing(who, report.slowest([result.seconds[who] for result in results]))
        for who in results[0].seconds
    ]
    report.print_errors(console, accuracy)
    if len(sizes) == 3:
        report.print_times(console, timings, 2.0 * math.prod(sizes))
    else:
        size = math.prod(sizes) * dtype.itemsize
        report.print_times(console, timings, size, "GB/s of the tensor")
    timeline = results[0].timeline
    if timeline is not None and trace_path is not None:
        timeline_files.report(console, timeline, trace_path, f"{problem.collective}, {facts['sizes']}")
    if json_path is not None:
        report.write_json(json_path, {**facts, "shape": sizes, "num_ranks": num_ranks}, accuracy, timings)
    return report.print_verdict(console, accuracy)
