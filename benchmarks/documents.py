"""The pages that are made of records, and the tables of others, among them README's."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from pyrocshmem.benchmarks import models, stats
from pyrocshmem.benchmarks.escape import markdown
from pyrocshmem.benchmarks.front_page import where_and_when, words_of_sets
from pyrocshmem.benchmarks.headline import README_OPS, headline
from pyrocshmem.benchmarks.notes import Notes
from pyrocshmem.benchmarks.pages import pages_of
from pyrocshmem.benchmarks.records import File
from pyrocshmem.benchmarks.searches import Search
from pyrocshmem.benchmarks.sets_page import mean_and_worst, what
from pyrocshmem.benchmarks.shapes import baseline
from pyrocshmem.benchmarks.tables import MODES, table

BEGIN, END = "<!-- readings: made by benchmarks.report -->", "<!-- end of readings -->"


def readme_table(files: Sequence[File]) -> str:
    """A row for each fused op, five at most, of the cases that `headline` names: the default and the strict mode, over
    cuBLAS + NCCL and over the strongest of the others."""
    shown = headline(stats.groups(files))
    if shown is None:
        return "Nothing was measured on GPUs yet.\n"
    groups, rows = shown.fused[:README_OPS], []
    peers: dict[str, list[str]] = {}
    for group in groups:
        base = [stats.speedups(group, baseline(group.op), name) for name in MODES]
        best, speeds = _over_the_best(group)
        if best:
            peers.setdefault(best, []).append(f"`{group.op}`")
        speeds_as_text = map(mean_and_worst, [*base, *speeds])
        rows.append([f"`{group.op}`", markdown(shown.set_of(group)), *speeds_as_text, in_8_bits(group.op)])
    over_each = ("over cuBLAS + NCCL", "over the best peer")
    header = ["op", "shapes", *(name for over in over_each for name in (over, "fp32 sums")), "in 8 bits"]
    of = "; ".join(f"{peer} for {', '.join(ops)}" for peer, ops in peers.items())
    return (
        f"{where_and_when(shown, groups)}. Multicast is off for all.\n\n"
        f"{table(header, rows)}\nBest peers: {of or 'none'}.\n"
        f"Shapes: {words_of_sets(groups) or 'see docs/results.md'}.\n"
    )


def _over_the_best(group: stats.Group) -> tuple[str, list[list[float]]]:
    """The best peer other than the baseline, in words, and the speeds of both modes over it; ("", nothing) where there
    is none."""
    over = {peer: found for peer in stats.peers(group) if (found := stats.speedups(group, peer))}
    over.pop(baseline(group.op), None)
    if models.seed_of_set(group.shapes):
        # Few peers take all drawn shapes: their means would be of other cases each.
        if over.keys() - set(stats.OURS_IN_PART):
            return "the fastest of each case", [stats.speedups_over_best(group, name) for name in MODES]
    elif over:
        best = min(over, key=lambda peer: geometric_mean(over[peer]))
        return f"`{best}`", [stats.speedups(group, best, name) for name in MODES]
    return "", [[] for _ in MODES]


PRICES_BEGIN, PRICES_END = "<!-- prices: made by benchmarks.report -->", "<!-- end of prices -->"


def price_table(files: Sequence[File]) -> str:
    """A row for each op and set on GPUs that was timed in the modes of `pyrocshmem.batch_invariant`: their times over
    the default's, and how many times as fast the first one is as the BLAS and NCCL pinned to one channel and protocol.
    docs/reproducibility.md has it between PRICES_BEGIN and PRICES_END."""
    rows = []
    for group in stats.groups(files):
        prices = [stats.prices(group, name) for name in stats.INVARIANT]
        if any(prices):
            texts = [f"{geometric_mean(each):.2f} ({max(each):.2f})" if each else "" for each in prices]
            pinned = stats.speedups(group, "unfused_pinned", stats.INVARIANT[0])
            rows.append([*what(group), str(len(group.cases)), *texts, mean_and_worst(pinned)])
    header = ["op", "shapes", "on", "cases", "batch-invariant / default", "tp-invariant / default"]
    return table([*header, "batch-invariant over pinned NCCL"], rows)


OPS_BEGIN, OPS_END = "<!-- ops: made by benchmarks.report -->", "<!-- end of ops -->"


def op_table() -> str:
    """A row for each op of the registry, in its words: docs/guide.md has it between OPS_BEGIN and OPS_END."""
    from pyrocshmem import collectives, stream_k
    from pyrocshmem.calls.op import registered

    packages = (stream_k.__name__, collectives.__name__)
    rows = ["| op | a rank gives | a rank gets | in 8 bits |", "|---|---|---|---|"]
    for package in (name.rpartition(".")[2] for name in packages):
        ours = (op for op in registered() if op.package == package)
        rows += [
            f"| `{package}.{op.name}` | {op.holds} | {op.result} | {in_8_bits(op.name)} |" for op in ours
        ]
    return "\n".join(rows) + "\n"


def in_8_bits(op: str) -> str:
    """What of an op may have 8 bits, by the arguments of its public function: "operands", "norm"; "" nothing."""
    from pyrocshmem import collectives, stream_k

    taken = inspect.signature(getattr(stream_k, op, None) or getattr(collectives, op)).parameters
    words = {"scale_a": "operands", "quantize": "norm"}
    return ", ".join(word for name, word in words.items() if name in taken)


def between(page: Path, begin: str, made: str, end: str) -> str:
    """The text of `page` with what is `made` between two marks. ValueError where they are missing."""
    before, first, rest = page.read_text().partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last):
        raise ValueError(f"{page} has no table to put in place, allowed is one between {begin} and {end}")
    return f"{before}{begin}\n{made}{end}{after}"


def write(
    files: Sequence[File],
    plots: Sequence[Path],
    root: Path,
    notes: Notes,
    front: str,
    searched: Sequence[Search],
) -> None:
    """docs/results.md and the pages behind it, with the `notes`, what was `searched` and the `plots`, which are copied
    to docs/results (that named `front` to docs/img), where nothing else stays; and the tables between their marks in
    README.md and other pages. ValueError, before anything is written, where the marks are missing."""
    pages = pages_of(files, notes, [path.name for path in plots if path.name != front], searched)
    docs = root / "docs"
    made = {root / "README.md": (BEGIN, readme_table(files), END)}
    for page, table_of_page in (
        (docs / "guide.md", (OPS_BEGIN, op_table(), OPS_END)),
        (docs / "reproducibility.md", (PRICES_BEGIN, price_table(files), PRICES_END)),
    ):
        if page.exists():
            made[page] = table_of_page
    texts = {page: between(page, *marked) for page, marked in made.items()}
    folders = {name: root / "docs" / name for name in ("results", "img")}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    for path in [*folders["results"].glob("*.svg"), *folders["results"].glob("*.md")]:
        path.unlink()
    for page, whole in {**texts, **{docs / name: text for name, text in pages.items()}}.items():
        page.write_text(whole)
    for path in plots:
        shutil.copyfile(path, folders["img" if path.name == front else "results"] / path.name)
