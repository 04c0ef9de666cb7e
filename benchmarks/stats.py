"""Numbers made from records: groups of cases, ratios, means, and the summary."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyrocshmem.benchmarks.records import File, Record, median
from pyrocshmem.benchmarks.schema import timed_as
from pyrocshmem.benchmarks.shapes import LINK_BYTES_PER_S, MEMORY_BOUND_ROWS, TIMED

# Parts of an op, results in another layout, or a library held to one way of its own: beside ours for orientation, not
# peers of it.
NOT_PEERS = ("ours_gemm", "unfused_stacked", "unfused_pinned")
# The modes of `pyrocshmem.batch_invariant`.
INVARIANT = ("ours_batch_invariant", "ours_tp_invariant")
# A peer whose better half is ours, which is not asked for where ours is compared with the best of others.
OURS_IN_PART = ("blas_ours",)
# A floor is clear where it is so long, and the longer one of GEMM and link takes so many times the other's time: there
# an efficiency says how well they overlap, not what a launch costs, nor which of the two was read a few per cent off.
CLEAR_FLOOR_US, CLEAR_FLOOR_RATIO = 300.0, 1.25


@dataclass(frozen=True)
class Group:
    """The cases of one op and one set of shapes, on one kind of device."""

    op: str
    device: str
    ranks: int
    dtype: str
    shapes: str
    cases: tuple[Record, ...]

    @property
    def providers(self) -> tuple[str, ...]:
        """Those that were timed in any case, ours first, the others in the order of their first one."""
        found = dict.fromkeys(name for case in self.cases for name in case["us"])
        return tuple(sorted(found, key=lambda name: name != "ours"))

    @property
    def machine(self) -> str:
        """In words, "2 x H200"."""
        return machine(self.ranks, self.device)

    @property
    def title(self) -> str:
        """In words."""
        on = f"{self.ranks} x {self.device}" if self.ranks > 1 else self.device
        return f"{self.op}, {self.shapes}, {self.dtype}, {on}"


def groups(files: Iterable[File]) -> list[Group]:
    """Every file's cases by op and shapes, each with its run; of a case that several files have, the last one's
    record."""
    found: dict[tuple[str, str, int, str, str], dict[tuple[int, ...], Record]] = {}
    for file in files:
        for case in file.cases:
            key = (case["op"], case["device"], case["ranks"], case["dtype"], case["shapes"])
            found.setdefault(key, {})[(case["M"], case["N"], case["K"])] = {"run": file.environment} | case
    order = list(TIMED)
    made = [Group(*key, tuple(cases.values())) for key, cases in found.items()]
    return sorted(made, key=lambda group: (order.index(group.op), group.device, group.shapes, group.ranks))


def geometric_mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return statistics.geometric_mean(values) if values else None


def machine(ranks: int, device: str) -> str:
    """So many GPUs of this name, in words: "2 x H200"."""
    return f"{ranks} x {device.removeprefix('NVIDIA ')}"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the sorted values lie, interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def dropped(case: Record) -> str:
    """Why a case doesn't count; "" for one that does, as all records did once."""
    return str(case.get("dropped", ""))


def speedup(case: Record, provider: str, ours: str = "ours") -> float | None:
    """How many times as fast ours is, by medians; None where either was not timed, ours is wrong, the case is
    dropped, or a CPU took the times, which mean nothing."""
    ours = timed_as(case, ours)
    mine, theirs = median(case, ours), median(case, provider)
    if mine is None or theirs is None or ours in case["wrong"] or dropped(case) or case["device"] == "cpu":
        return None
    return theirs / mine


def speedups(group: Group, provider: str, ours: str = "ours") -> list[float]:
    """Of all cases that have both."""
    return [ratio for case in group.cases if (ratio := speedup(case, provider, ours)) is not None]


def prices(group: Group, mode: str) -> list[float]:
    """The times of ours in a mode over the default's, of all cases that have both."""
    return [1 / ratio for ratio in speedups(group, "ours", mode)]


def speedups_over_best(group: Group, ours: str = "ours") -> list[float]:
    """The same over the fastest peer of each case, of those that are nobody's but others'."""
    return [speed for speed, _, _ in over_best(group, ours)]


def over_best(group: Group, ours: str = "ours") -> Iterator[tuple[float, str, Record]]:
    """(speed, the peer, the case) of these."""
    names = [name for name in peers(group) if name not in OURS_IN_PART]
    for case in group.cases:
        found = [(speed, name) for name in names if (speed := speedup(case, name, ours)) is not None]
        if found:
            yield (*min(found), case)


def spread(case: Record, provider: str) -> tuple[float, float] | None:
    """10th and 90th percentile of the ratio of samples that were taken one after the other."""
    if speedup(case, provider) is None:
        return None
    ratios = [t / o for t, o in zip(case["us"][provider], case["us"]["ours"], strict=True)]
    return percentile(ratios, 0.1), percentile(ratios, 0.9)


def memory_gb_per_s(case: Record) -> float | None:
    """What ours reads and writes at least, of a product of so few rows that this is what takes the time; None of
    others."""
    us = median(case, "ours")
    if case["op"] != "gemm" or case["M"] > MEMORY_BOUND_ROWS or us is None or case["device"] == "cpu":
        return None
    M, N, K = case["M"], case["N"], case["K"]
    return float((M * K + K * N + M * N) * (4 if case["dtype"] == "float32" else 2) / us / 1e3)


def peers(group: Group) -> list[str]:
    """Providers that compute the same result as ours, by other means."""
    alone = () if group.op == "gemm" else ("blas",)
    return [p for p in group.providers if not p.startswith("ours") and p not in (*NOT_PEERS, *alone)]


def efficiencies(group: Group, provider: str = "ours", clear: bool | None = None) -> list[float]:
    """Overlap efficiencies: floor / time. None are known for a GEMM alone, which has nothing to overlap. clear: of the
    cases whose floors are, or aren't (`has_clear_floor`); None: of all."""
    if group.op == "gemm":
        return []
    cases = (case for case in group.cases if clear is None or has_clear_floor(case) == clear)
    return [case["efficiency"][provider] for case in cases if provider in case["efficiency"]]


def has_clear_floor(case: Record) -> bool:
    """Whether an op's floor is `CLEAR_FLOOR_US` or more, and its GEMM and its link differ by `CLEAR_FLOOR_RATIO`."""
    alone = [us for name in ("blas", "ours_gemm") if (us := median(case, name)) is not None]
    if not alone or not case["floor_us"] or case["floor_us"] < CLEAR_FLOOR_US:
        return False
    shorter, longer = sorted((min(alone), 1e6 * (case["link_bytes"] or 0) / LINK_BYTES_PER_S))
    return longer >= CLEAR_FLOOR_RATIO * shorter


def summary(files: Iterable[File]) -> list[dict[str, Any]]:
    """An object for each op and set of shapes in which ours was timed: op, device, ranks, dtype, shapes, cases,
    overlap_efficiency (geometric mean, None where there is no floor), speedup and worst_speedup (of ours over each
    provider: geometric mean, minimum). Cases that are dropped, or where ours is wrong, don't count."""
    found = []
    for group in groups(files):
        timed = [c for c in group.cases if "ours" in c["us"] and "ours" not in c["wrong"] and not dropped(c)]
        if not timed:
            continue
        ratios = {name: speedups(group, name) for name in group.providers if name != "ours"}
        ratios = {name: values for name, values in ratios.items() if values}
        right = Group(group.op, group.device, group.ranks, group.dtype, group.shapes, tuple(timed))
        found.append(
            {
                "op": group.op,
                "device": group.device,
                "ranks": group.ranks,
                "dtype": group.dtype,
                "shapes": group.shapes,
                "cases": len(timed),
                "overlap_efficiency": geometric_mean(efficiencies(right)),
                "speedup": {name: geometric_mean(values) for name, values in ratios.items()},
                "worst_speedup": {name: min(values) for name, values in ratios.items()},
            }
        )
    return found
