"""A model of the fused ops over several hosts: what crosses between hosts, and about how long a call takes.

    traffic("gemm_all_reduce", M, N, K, hosts=4, local=8, itemsize=2)     # bytes, blocks and trips of a rank
    ours_us, flat_us = predicted(case, hosts=4, network=Network())

M, N, K are those of a rank's own GEMM, as in the records, and stay what they are while hosts are added: each holds more
of the weights. Times on one host are measured, of a record; what more hosts add is computed:

- A rank's network interface has a latency for each trip and a bandwidth. Both ways of an interface work at once.
- Ours (`stream_k.ops.over_hosts`): as long as on one host, where the network is faster than the GEMM; else what can't
  overlap with it comes first (the first piece of a sum, the own host's rows of a gather), then the network. Each call
  more that a host makes costs its launches, and one of a GEMM reads B once more; what an all-scatter of the other
  hosts' columns adds inside a host is the link's time.
- Flat, the same GEMM and then one collective of the engine over all ranks: as long as measured on one host, and as much
  longer as the collective takes longer over all ranks than over those of a host. It is a ring, or in an all-reduce a
  tree where that is faster. As many rings as a host has interfaces share the bytes, so that each interface carries
  1 / L of them. A step has the latency of the link or, between hosts, of the network: of a ring one for each rank, of a
  tree those of the way up and down.

Tests compare `traffic` with what made-up hosts give to torch.distributed. Times were never compared with a network's:
there are only those of one machine's sockets (`benchmarks.between_hosts`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from pyrocshmem.benchmarks.records import File, median
from pyrocshmem.benchmarks.shapes import LINK_BYTES_PER_S
from pyrocshmem.benchmarks.stats import dropped
from pyrocshmem.stream_k.ops.over_hosts import in_one_call, num_pieces

OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "gemm_all_scatter")
# Of 16-bit operands, as in the records that this reads.
_ITEMSIZE = 2
# A step of a ring inside a host, the launches of one more call of an op there, and a GPU's memory: reading B again.
_LINK_LATENCY_US, _CALL_US, _MEMORY_BYTES_PER_S = 2.0, 8.0, 4.0e12


class Network(NamedTuple):
    """Of a rank's interface: microseconds of a trip, bytes a second each way. By default 400 Gb/s."""

    latency_us: float = 10.0
    bytes_per_s: float = 400e9 / 8

    def time_us(self, nbytes: float, trips: float) -> float:
        """Of so many bytes, in trips one after the other."""
        return trips * self.latency_us + 1e6 * nbytes / self.bytes_per_s


class Traffic(NamedTuple):
    """What a rank sends to other hosts in a call, on average: bytes, in how many blocks; trips: one after the other."""

    nbytes: float
    blocks: int
    trips: int


def traffic(
    op: str, M: int, N: int, K: int, hosts: int, local: int, itemsize: int, pieces: int = 1
) -> Traffic:
    """Of an op of OPS of `hosts` times `local` ranks. pieces: of rows, in which sums and scatters go."""
    others = hosts - 1
    if op == "all_gather_gemm":
        return Traffic(others * M * K * itemsize / (hosts * local), others, min(others, 1))
    if op == "gemm_reduce_scatter":
        return Traffic(others * M * N * itemsize / (hosts * local), others, min(others, 1))
    if op == "gemm_all_scatter":
        return Traffic(others * M * N * itemsize, others * pieces, min(others, 1))
    trips = min(others, 2)  # of two hosts one is enough
    return Traffic(2 * others / hosts * M * N * itemsize / local, others * trips * pieces, trips)


def predicted(case: dict[str, Any], hosts: int, network: Network) -> tuple[float, float]:
    """(microseconds of ours, of the flat way) of a case of a record, whose ranks are those of a host."""
    op, local = case["op"], case["ranks"]
    M, N, K = case["M"], case["N"], case["K"]
    measured, flat = median(case, "ours"), median(case, "unfused")
    assert measured is not None
    assert flat is not None
    if hosts == 1:
        return measured, flat
    sent = traffic(op, M, N, K, hosts, local, _ITEMSIZE)
    between = network.time_us(sent.nbytes, sent.trips)
    pieces = launches = 1 if in_one_call(M, hosts) else hosts
    added = 0.0
    if op == "gemm_all_reduce":
        pieces = num_pieces(M * N * _ITEMSIZE // local)
        launches = 3 * pieces  # a reduce-scatter, the sum, an all-gather
    elif op == "gemm_all_scatter":
        pieces = num_pieces(M * N * _ITEMSIZE)
        launches = pieces * hosts
        added = 1e6 * (hosts - 1) * (local - 1) * M * N * _ITEMSIZE / LINK_BYTES_PER_S
    again = 1e6 * (pieces - 1) * K * N * _ITEMSIZE / _MEMORY_BYTES_PER_S
    ours = max(measured, measured / pieces + between) + (launches - 1) * _CALL_US + again + added
    return ours, flat + max(0.0, _engine_us(case, hosts, network) - _engine_us(case, 1, network))


def _engine_us(case: dict[str, Any], hosts: int, network: Network) -> float:
    """Of the engine's collective over all ranks."""
    op, local = case["op"], case["ranks"]
    ranks = hosts * local
    size = case["M"] * case["N"] * _ITEMSIZE
    size = {"all_gather_gemm": case["M"] * case["K"] * _ITEMSIZE, "gemm_all_scatter": ranks * size}.get(
        op, size
    )
    rounds = 2 if op == "gemm_all_reduce" else 1
    nbytes = rounds * size * (ranks - 1) / ranks
    moved = 1e6 * nbytes / LINK_BYTES_PER_S
    if hosts > 1:
        moved = max(moved, 1e6 * nbytes / local / network.bytes_per_s)
    crossing = hosts if hosts > 1 else 0
    latency = (ranks - 1 - crossing) * _LINK_LATENCY_US + crossing * network.latency_us
    if op == "gemm_all_reduce":
        tree = (local - 1) * _LINK_LATENCY_US + math.ceil(math.log2(hosts)) * network.latency_us
        latency = min(latency, tree)
    return moved + rounds * latency


class Prediction(NamedTuple):
    """Of an op on so many hosts: of ours over flat, the geometric mean of all cases and the least."""

    op: str
    hosts: int
    mean: float
    worst: float


def predictions(files: Iterable[File], most: int, network: Network) -> list[Prediction]:
    """On 1, 2, 4, .. hosts up to `most`, of the cases in which ours and the unfused pair were timed and right.
    ValueError where there is none."""
    cases: dict[str, list[dict[str, Any]]] = {op: [] for op in OPS}
    for file in files:
        for case in file.cases:
            timed = (
                "ours" in case["us"] and "unfused" in case["us"] and not case["wrong"] and not dropped(case)
            )
            if case["op"] in cases and timed:
                cases[case["op"]].append(case)
    numbers = [1 << power for power in range(most.bit_length())]
    found = []
    for op, of_op in cases.items():
        for hosts in numbers if of_op else ():
            times = (predicted(case, hosts, network) for case in of_op)
            ratios = [flat / ours for ours, flat in times]
            found.append(Prediction(op, hosts, geometric_mean(ratios), min(ratios)))
    if not found:
        raise ValueError(f"the records have no case of {', '.join(OPS)} with ours and unfused")
    return found


def show(console: Console, found: list[Prediction]) -> None:
    """Print a row for each op."""
    numbers = sorted({each.hosts for each in found})
    title = "how many times as fast as the flat way: geometric mean (worst case), by hosts"
    table = Table("op", *map(str, numbers), title=title)
    by_place = {(each.op, each.hosts): f"{each.mean:.2f} ({each.worst:.2f})" for each in found}
    for op in dict.fromkeys(each.op for each in found):
        table.add_row(op, *(by_place[op, hosts] for hosts in numbers))
    console.print(table)


def draw(found: list[Prediction], network: Network, path: Path) -> None:
    """A picture of the means, against hosts."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from pyrocshmem.benchmarks.plots import COLOURS, STYLE

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 3.6), layout="constrained")
        axes = figure.subplots()
        for op, colour in zip(dict.fromkeys(each.op for each in found), COLOURS, strict=False):
            points = [(each.hosts, each.mean) for each in found if each.op == op]
            axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=op)
        numbers = sorted({each.hosts for each in found})
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, map(str, numbers))
        axes.axhline(1, color="#b0b0b0", linewidth=1)
        axes.set_xlabel("hosts")
        axes.set_ylabel("times as fast as the flat way")
        gigabits = 8 * network.bytes_per_s / 1e9
        axes.set_title(f"Predicted, {gigabits:g} Gb/s and {network.latency_us:g} us a trip for each GPU")
        axes.legend()
        figure.savefig(path, metadata={"Date": None})
