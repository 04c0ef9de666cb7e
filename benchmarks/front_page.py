"""docs/results.md: one page of figures to begin with, which leads to all others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean

from pyrocshmem.benchmarks import models, stats
from pyrocshmem.benchmarks.escape import markdown
from pyrocshmem.benchmarks.headline import Headline, headline
from pyrocshmem.benchmarks.notes import Notes
from pyrocshmem.benchmarks.records import File
from pyrocshmem.benchmarks.shapes import TIMED, baseline
from pyrocshmem.benchmarks.tables import shape, table, versions, why_behind

# Rows of the table, at most, and reasons that are given for an op: those of most cases.
_ROWS, _REASONS = 12, 3
# Sets of shapes, in words.
_DRAWN = f"{models.NUM_CASES} layers of public models, drawn by the hash of the commit measured"
_WORDS_OF_SETS = {
    "llama3": "nine layers of Llama 3",
    "decode": "1 to 256 rows",
    "batches": "3 to 200 rows",
    "sizes": "1 KiB to 512 MiB",
    "norm-rows": "1 to 128 rows",
}

_EVERY_CASE = """## Every case

- [How to read the tables](reading-results.md): what is timed, columns, providers
- [All sets](results/sets.md): every set of shapes on every machine, over each peer
- [8-bit operands](float8.md), [reproducible modes](reproducibility.md), [several hosts](several-hosts.md)
"""
_AGAIN = """## Measure it yourself

    benchmarks/records.sh out/records                        # all sets, on all GPUs here; goes on where it ended
    python -m pyrocshmem bench report out/records/*.jsonl    # these pages, and README's table and picture, made of them

These pages are made by that second command from the records in benchmarks/results; don't edit them.
"""


def text(files: Sequence[File], notes: Notes, pages: Mapping[str, str]) -> str:
    """The page. pages: titles of those in docs/results that have every case, by their names."""
    shown = headline(stats.groups(files))
    parts = ["# Results\n"]
    if shown is None:
        parts.append("Nothing was measured on GPUs yet.\n")
    else:
        groups = _groups(files, shown)
        parts += [_first_words(shown, groups), _table(groups, shown), _losses(groups, notes)]
    links = "".join(f"- [{title}](results/{name}.md)\n" for name, title in pages.items())
    return "\n".join(part for part in (*parts, _EVERY_CASE + links, _AGAIN) if part)


def _first_words(shown: Headline, groups: Sequence[stats.Group]) -> str:
    return (
        "Each fused op beside what one would use instead: the vendor's BLAS and then NCCL, and the fastest other\n"
        "library. Numbers above 1 mean that ours is the faster one. NVLink multicast is off for all.\n"
        f"{where_and_when(shown, groups)}. Each op's page names its records and the commits that they are of.\n\n"
        "![Speed of the fused ops over cuBLAS + NCCL](img/speedup.svg)\n"
    )


def _groups(files: Sequence[File], shown: Headline) -> list[stats.Group]:
    """The groups of the table: the headline's, and the newest of each other op on the same machine."""
    found = {group.op: group for group in [*shown.fused, *([shown.gemm] if shown.gemm else [])]}
    for group in sorted(stats.groups(files), key=_started):
        on_it = group.device == shown.fused[0].device and group.ranks == shown.fused[0].ranks
        fits = on_it and TIMED[group.op].kind == "collective" and stats.speedups(group, baseline(group.op))
        if fits and group.op not in [each.op for each in shown.fused]:
            found[group.op] = group
    return list(found.values())[:_ROWS]


def _started(group: stats.Group) -> str:
    return max(str(case["run"]["started"]) for case in group.cases)


def _table(groups: Sequence[stats.Group], shown: Headline) -> str:
    rows = []
    for group in groups:
        speeds = [stats.speedups(group, baseline(group.op)), stats.speedups_over_best(group)]
        cells = [cell for each in speeds for cell in _in_cells(each)]
        name = shown.set_of(group) if group is not shown.gemm else group.shapes
        rows.append([f"`{group.op}`", markdown(name), str(len(speeds[0])), *cells])
    over_each = ("over BLAS and NCCL", "over the fastest")
    header = ["op", "shapes", "cases", *(name for over in over_each for name in (over, "worst", "slower"))]
    words = words_of_sets(groups)
    return (
        f"## At a glance\n\n{table(header, rows)}\n"
        "Means are geometric. `slower`: in so many cases ours is the slower one. The fastest: of each case, of all\n"
        f"other libraries.{f' {words}.' if words else ''}\n"
    )


def _in_cells(speeds: Sequence[float]) -> tuple[str, str, str]:
    if not speeds:
        return "", "", ""
    return f"{geometric_mean(speeds):.2f}", f"{min(speeds):.2f}", str(sum(speed < 1 for speed in speeds))


def _losses(groups: Sequence[stats.Group], notes: Notes) -> str:
    """Where ours is behind the fastest peer of a case, by reason."""
    lines = []
    for group in groups:
        lost: dict[str, list[tuple[float, str]]] = {}
        for speed, peer, case in stats.over_best(group):
            if speed < 1:
                reason = why_behind(case, peer, speed, notes)
                lost.setdefault(reason, []).append((speed, shape(case)))
        by_number = sorted(lost.items(), key=lambda item: -len(item[1]))
        texts = [
            f"{len(cases)} ({min(cases)[0]:.2f} at {min(cases)[1]}): {reason}" for reason, cases in by_number
        ]
        if texts:
            left = len(texts) - _REASONS
            reasons = "reason is" if left == 1 else "reasons are"
            more = f" {left} more {reasons} on its page." if left > 0 else ""
            lines.append(f"- `{group.op}`: {'; '.join(texts[:_REASONS])}.{more}\n")
    if not lines:
        return ""
    words = "Cases in which the fastest other library is ahead, and the worst of them:"
    return f"## What loses, and why\n\n{words}\n\n{''.join(lines)}"


def words_of_sets(groups: Iterable[stats.Group]) -> str:
    """What the sets of shapes are: "`decode`: 1 to 256 rows; ..."; "" where nobody wrote it down."""
    names: dict[str, dict[str, None]] = {}
    for group in groups:
        drawn = models.seed_of_set(group.shapes)
        if text := _DRAWN if drawn else _WORDS_OF_SETS.get(group.shapes, ""):
            names.setdefault(text, {})[f"`{group.shapes}`"] = None
    return "; ".join(f"{', '.join(each)}: {text}" for text, each in names.items())


def where_and_when(shown: Headline, groups: Sequence[stats.Group]) -> str:
    """Machine, dates and versions of what is shown."""
    runs = [case["run"] for group in groups for case in group.cases]
    dates = sorted(run["started"][:10] for run in runs)
    facts = [markdown(shown.machine), " to ".join(sorted({dates[0], dates[-1]}))]
    return "; ".join([*facts, *sorted({versions(run, ("torch", "triton", "nccl")) for run in runs})])
