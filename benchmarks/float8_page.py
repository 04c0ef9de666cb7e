"""The table and the picture of docs/float8.md, of the tables that `pyrocshmem.benchmarks.float8` printed.

    python -m pyrocshmem.benchmarks.float8_page

Reads benchmarks/results/*-float8-*.txt. A new record takes the place of an older one of the same name behind its date.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import matplotlib as mpl
import typer
from matplotlib.figure import Figure

from pyrocshmem.benchmarks.documents import between
from pyrocshmem.benchmarks.float8 import ERROR, SIZES, WRONG, ours_like
from pyrocshmem.benchmarks.plots import COLOURS, STYLE
from pyrocshmem.benchmarks.sources import ROOT

PICTURE = "float8.svg"
BEGIN, END = "<!-- made by benchmarks.float8_page -->", "<!-- end of what is made -->"
_DATE = re.compile(r"^\d{4}-\d{2}-\d{2}-")
# Sets of shapes, in words.
_SETS = {"models": "drawn", "llama3": "Llama 3"}


class Row(NamedTuple):
    """A case: microseconds of each provider, and those whose result was wrong."""

    op: str
    M: int
    times: dict[str, float]
    wrong: frozenset[str]


class Printed(NamedTuple):
    """A record. machine: in words."""

    name: str
    recipe: str
    machine: str
    shapes: str
    commit: str
    rows: tuple[Row, ...]

    @property
    def set(self) -> str:
        """The set of shapes, without a seed and without how many of it there are, in words."""
        name = re.split("[:,]", self.shapes)[0]
        return _SETS.get(name, name)

    def ratios(self, op: str, provider: str, ours: str) -> list[tuple[int, float]]:
        """(M, a provider's time over ours) of the cases that both have right."""
        return [
            (row.M, row.times[provider] / row.times[ours])
            for row in self.rows
            if row.op == op and {provider, ours} <= row.times.keys() and not {provider, ours} & row.wrong
        ]


def read(path: Path) -> Printed:
    """ValueError for a file that is no such record."""
    heads: list[str] = []
    rows, facts, recipe = [], {}, ""
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| op |"):
            heads = cells
        elif line.startswith("| ") and heads:
            rows.append(_row(dict(zip(heads, cells, strict=True))))
        elif line.startswith("8-bit operands, "):
            recipe = line.removeprefix("8-bit operands, ")
        elif ": " in line:
            key, _, value = line.partition(": ")
            facts[key] = value
    if not (rows and recipe and "target" in facts):
        raise ValueError(f"{path} is not what benchmarks.float8 prints")
    machine = facts["target"].partition(" (")[0]
    return Printed(path.name, recipe, machine, facts.get("shapes", ""), facts.get("commit", ""), tuple(rows))


def _row(cells: dict[str, str]) -> Row:
    op, sizes = cells.pop("op"), cells.pop(SIZES)
    cells.pop(ERROR)
    wrong = frozenset(name for name, cell in cells.items() if cell.endswith(WRONG))
    times = {name: float(cell.removesuffix(WRONG)) for name, cell in cells.items() if cell}
    return Row(op, int(sizes.split()[0]), times, wrong)


def records(folder: Path) -> list[Printed]:
    """The newest of each name."""
    newest = {_DATE.sub("", path.name): path for path in sorted(folder.glob("*-float8-*.txt"))}
    return [read(path) for _, path in sorted(newest.items())]


def table(found: Sequence[Printed]) -> str:
    """A row for each recipe, op and provider, geometric mean and worst of its time over ours; and the records."""
    lines = [
        "| recipe | op, on | shapes | provider | cases | its time over ours | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for printed in found:
        for op in dict.fromkeys(row.op for row in printed.rows):
            for name in dict.fromkeys(name for row in printed.rows for name in row.times):
                if name.startswith("ours") and name != "ours, no BLAS":
                    continue
                if each := [ratio for _, ratio in printed.ratios(op, name, ours_like(name))]:
                    numbers = f"{len(each)} | {geometric_mean(each):.2f} | {min(each):.2f}"
                    where = f"{op}, {printed.machine} | {printed.set}"
                    lines.append(f"| {printed.recipe} | {where} | {name} | {numbers} |")
    made = (f"`{each.name}` (`{each.shapes}`, commit `{each.commit[:10]}`)" for each in found)
    return "\n".join([*lines, "", f"Records, in `benchmarks/results`: {', '.join(made)}.", ""])


def picture(found: Sequence[Printed]) -> Figure:
    """GEMMs alone, of drawn shapes: times of `torch._scaled_mm` over ours against rows, a panel a recipe."""
    drawn = [printed for printed in found if printed.set == _SETS["models"]]
    alone = [printed for printed in drawn if any(row.op == "gemm" for row in printed.rows)]
    shown = (("ours, no BLAS", "our own GEMM", COLOURS[5]), ("ours", "by default", COLOURS[0]))
    panels = max(len(alone), 1)
    figure = Figure(figsize=(4.0 * panels, 3.2), layout="constrained")
    axes: Any = figure.subplots(1, panels, squeeze=False, sharey=True)
    for axis, printed in zip(axes.flat, alone, strict=False):
        for ours, label, colour in shown:
            points = printed.ratios("gemm", "scaled_mm", ours)
            axis.plot(*zip(*points, strict=True), "o", ms=4, color=colour, label=label)
        axis.axhline(1.0, color="black", lw=1, ls="--")
        axis.set_xscale("log", base=4)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set_xlabel("rows")
        axis.set_title(f"{printed.recipe}, {printed.machine}", loc="left")
    axes[0, 0].set_ylabel("torch._scaled_mm over ours")
    axes[0, 0].legend()
    return figure


def write(found: Sequence[Printed], root: Path) -> None:
    """Both into docs/. ValueError where the page has no place for the table."""
    page = root / "docs" / "float8.md"
    page.write_text(between(page, BEGIN, table(found), END))
    with mpl.rc_context(STYLE):
        picture(found).savefig(root / "docs" / "img" / PICTURE, metadata={"Date": None})


def main() -> None:
    """Write the table of docs/float8.md and docs/img/float8.svg."""
    found = records(ROOT / "benchmarks" / "results")
    write(found, ROOT)
    typer.echo(f"wrote the table and the picture of docs/float8.md, of {len(found)} records")


if __name__ == "__main__":
    typer.run(main)
