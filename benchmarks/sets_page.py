"""docs/results/sets.md: every set of shapes on every machine, over each peer; choices over what a search finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import geometric_mean

from pyrocshmem.benchmarks import models, seeds, stats
from pyrocshmem.benchmarks.escape import markdown
from pyrocshmem.benchmarks.records import File
from pyrocshmem.benchmarks.searches import Search, choices_table
from pyrocshmem.benchmarks.tables import CHOICES, number, table

# And PyTorch's own operators, served by ours.
_SHOWN = (*CHOICES, "ours_symm_mem")

_OF_SETS = f"""The best peer is the fastest one of each case, but for `blas_ours`, which is half ours. A floor is clear
where it is {stats.CLEAR_FLOOR_US:.0f} us or more and, of the GEMM and the link, one takes {stats.CLEAR_FLOOR_RATIO:g}
times the other's time or more. Means are geometric. Left out are cases dropped for their clocks, wrong, failed, or
without a peer; the op's tables say which.
"""


_OF_CHOICES = """The time of what the rules choose over that of the fastest configuration that `pyrocshmem tune` finds,
of drawn shapes: what wins has to win once more, timed in turn with the choice alone. Where fewer cases are here than
the seed draws, the run had no more time.
"""


def sections(files: Sequence[File], searched: Sequence[Search]) -> list[str]:
    """Those of the page."""
    drawn, choices = drawn_table(files), choices_table(searched)
    parts = [f"## Drawn shapes\n\n{_OF_SETS}\n{drawn}"] if drawn else []
    if choices:
        parts.append(f"## Choices over a search\n\n{_OF_CHOICES}\n{choices}")
    return [*parts, f"## Over each peer\n\n{all_variants(files)}"]


def all_variants(files: Sequence[File]) -> str:
    """For each op on GPUs and each set of shapes: ours, and its faster variant, over each of its peers."""
    rows = []
    for group, name, over in _measured(files):
        texts = [f"{peer} {mean_and_worst(found)}" for peer, found in over.items()]
        efficiency = number(stats.geometric_mean(stats.efficiencies(group, name)), 2)
        count = max(len(found) for found in over.values())
        rows.append([*what(group), name, str(count), efficiency, "; ".join(texts)])
    speed = "speed over: geometric mean (worst case)"
    return table(["op", "shapes", "on", "variant", "cases", "overlap efficiency", speed], rows)


def drawn_table(files: Sequence[File]) -> str:
    """For each op and drawn set: ours and its variants over the best peer, and their efficiencies; "" where no set is
    drawn."""
    rows = []
    for group in [group for group in stats.groups(files) if models.seed_of_set(group.shapes)]:
        for name in [name for name in CHOICES if name in group.providers]:
            speeds = stats.speedups_over_best(group, name)
            clear, others = (stats.efficiencies(group, name, clear=each) for each in (True, False))
            row = [*what(group), name, str(len(group.cases)), str(len(group.cases) - len(speeds) or "")]
            row += [_mean(speeds), f"{stats.percentile(speeds, 0.05):.2f}" if speeds else "", _worst(speeds)]
            rows.append([*row, str(len(clear) or ""), _mean(clear), _worst(clear), _worst(others)])
    over, efficiency = "over the best peer", "efficiency, clear floors"
    header = ["op", "shapes", "on", "variant", "cases", "left out", f"{over}: mean", "5%", "worst"]
    header += [f"{efficiency}: cases", "mean", "worst", "other floors: worst"]
    return table(header, rows) if rows else ""


def _mean(values: Sequence[float]) -> str:
    return f"{geometric_mean(values):.2f}" if values else ""


def _worst(values: Sequence[float]) -> str:
    return f"{min(values):.2f}" if values else ""


def mean_and_worst(found: Sequence[float]) -> str:
    """ "1.20 (0.97)"; nothing of nothing."""
    return f"{geometric_mean(found):.2f} ({min(found):.2f})" if found else ""


def _measured(files: Sequence[File]) -> Iterator[tuple[stats.Group, str, dict[str, list[float]]]]:
    """(cases, variant of ours, its speeds over each peer) of all that was measured on GPUs."""
    for group in stats.groups(files):
        for name in [name for name in _SHOWN if name in group.providers]:
            over = {peer: stats.speedups(group, peer, name) for peer in stats.peers(group)}
            if over := {peer: found for peer, found in over.items() if found}:
                yield group, name, over


def what(group: stats.Group) -> tuple[str, str, str]:
    """Op, shapes and machine, as cells of a table."""
    drawn = models.seed_of_set(group.shapes)
    kind = "" if not drawn else " (tuning seed)" if seeds.objection(group) else " (published)"
    dtype = "" if group.dtype == "bfloat16" else f", {group.dtype}"
    return f"`{group.op}`", f"{group.shapes}{kind}{dtype}", markdown(group.machine)
