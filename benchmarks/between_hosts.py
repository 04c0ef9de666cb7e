"""The fused ops over made-up hosts of this machine's GPUs, beside the flat way: `torch.matmul` and a collective of NCCL
over all ranks, by the same transport.

    python -m pyrocshmem.benchmarks.between_hosts -n 2 --shapes llama3

NCCL may use neither peer access nor shared memory, so that it goes through sockets, as it does between hosts. Prints a
table in Markdown of milliseconds of the slowest rank, medians, and below it geometric means and the versions. Every
result is compared with float64 first. A time of one machine's sockets says nothing of a network: the ratio is that of
two ways to send the same bytes, and of what is hidden behind the GEMM.
"""

from __future__ import annotations

import os
import statistics
from typing import Annotated, NamedTuple

import typer

from pyrocshmem import launching, options, target
from pyrocshmem.benchmarks import check, provider, providers, records
from pyrocshmem.benchmarks.operands import Operands
from pyrocshmem.benchmarks.scale import OPS
from pyrocshmem.benchmarks.shapes import Case, cases_of
from pyrocshmem.hosts import hosts_for
from pyrocshmem.places import make_up
from pyrocshmem.reference.timing import Meter
from pyrocshmem.stream_k.run.calls import our_run

SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
_LIMIT_S = 1800.0


class Took(NamedTuple):
    """Of a rank: median seconds of a call of ours and of the flat way, and the error over its bound of each."""

    ours: float
    flat: float
    ours_error: float
    flat_error: float


def measure(rank: int, world_size: int, num_hosts: int, cases: list[Case], iters: int) -> list[Took]:
    """In a rank."""
    make_up(rank * num_hosts // world_size)
    hosts = hosts_for(None)
    found = []
    for case in cases:
        x = Operands(case, hosts, hosts.device)
        # A rank's own term is rounded, and its host's.
        terms = 0 if not x.problem.sums else 1 + int(hosts.local_size > 1)
        runs = {
            "ours": provider.provided(our_run(x, None), roundings=terms),
            "flat": providers.prepare("unfused", x),
        }
        spent = Meter(hosts.device, world_size > 1).in_turn(runs, iters).seconds
        hosts.synchronize()
        truth = x.sampled("result")
        errors = [check.error_of(run, truth, world_size)["worst_ratio"] for run in runs.values()]
        found.append(Took(*(statistics.median(spent[name]) for name in runs), *errors))
        hosts.barrier()
    hosts.close()
    return found


def main(
    num_ranks: Annotated[int, typer.Option("-n", "--num-gpus")] = 2,
    hosts: Annotated[int, typer.Option(help="Among which the ranks are divided.")] = 2,
    shapes: Annotated[str, typer.Option(help="As those of `python -m pyrocshmem bench`.")] = "llama3",
    ops: Annotated[str, typer.Option(help="Names with commas between them.")] = ",".join(OPS),
    iters: Annotated[int, typer.Option(help="Samples of each.")] = 10,
    dtype: Annotated[str | None, typer.Option(help="Default: bfloat16, on a CPU float16.")] = None,
    commit: Annotated[str, typer.Option(help="The commit's hash, where git can't tell it.")] = "",
) -> None:
    """Print how long the fused ops take over made-up hosts, beside a collective over all ranks."""
    try:
        options.check_ranks(num_ranks)
        if hosts < 2 or num_ranks % hosts != 0:
            raise ValueError(f"--hosts is {hosts}, allowed are 2 or more that divide the {num_ranks} ranks")
        on_gpu = target.num_devices() > 0
        name = options.check_dtype(dtype) or ("bfloat16" if on_gpu else "float16")
        cases = [case for op in ops.split(",") for case in cases_of(op, shapes, num_ranks, name, on_gpu)]
    except ValueError as error:
        options.refuse(error)
    os.environ.update(records.NO_MULTICAST | SOCKETS)
    of_ranks = launching.spawn(measure, num_ranks, hosts, cases, iters, timeout=_LIMIT_S)
    # Of the slowest rank, and of the one that is farthest off.
    took = [Took(*map(max, zip(*of_case, strict=True))) for of_case in zip(*of_ranks, strict=True)]
    for line in (*table(cases, took), *about(num_ranks, hosts, commit)):
        print(line)
    raise typer.Exit(int(any(each.ours_error > 1 for each in took)))


def table(cases: list[Case], took: list[Took]) -> list[str]:
    """The lines of the table, and of each op's geometric mean."""
    heads = ("op", "M N K of a rank's GEMM", "ours, ms", "flat, ms", "times as fast", "error / bound")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    ratios: dict[str, list[float]] = {}
    for case, each in zip(cases, took, strict=True):
        ratio = each.flat / each.ours
        ratios.setdefault(case.op, []).append(ratio)
        cells = (
            case.op, f"{case.M} {case.N} {case.K}", f"{1e3 * each.ours:.3f}", f"{1e3 * each.flat:.3f}",
            f"{ratio:.3f}", f"{each.ours_error:.2f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    ratios["all"] = [ratio for of_op in ratios.values() for ratio in of_op]
    for op, found in ratios.items():
        lines.append(f"{op}: geometric mean {statistics.geometric_mean(found):.3f}, worst {min(found):.3f}")
    return lines


def about(num_ranks: int, hosts: int, commit: str) -> list[str]:
    """What was measured where, and with what."""
    transport = ", ".join(f"{name}={value}" for name, value in SOCKETS.items())
    made_up = f"{hosts} made-up hosts of {num_ranks // hosts} ranks; {transport}"
    return ["", made_up, *records.in_words("between_hosts", num_ranks, commit)]


if __name__ == "__main__":
    typer.run(main)
