"""How far what the rules choose is from the fastest that a search finds: by the tables of `pyrocshmem tune`.

found = searches.read(RESULTS)      # those of drawn shapes, a `Search` for each op and run
found[0].ratios.mean, found[0].ratios.percentile_95, found[0].ratios.worst
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyrocshmem.benchmarks import models
from pyrocshmem.benchmarks.shapes import TIMED
from pyrocshmem.benchmarks.stats import machine, percentile
from pyrocshmem.benchmarks.tables import table

_PATTERN = "*-tune-*.json"
_DRAWN = re.compile(r"--shapes[ =]models:(\w+)")


class Ratios(tuple[float, ...]):
    """Of some cases, the time of the cost model's choice over that of the fastest configuration found, in order."""

    def __new__(cls, ratios: Iterable[float]) -> Ratios:
        return super().__new__(cls, sorted(ratios))

    @property
    def mean(self) -> float:
        return statistics.mean(self)

    @property
    def percentile_95(self) -> float:
        return percentile(self, 0.95)

    @property
    def worst(self) -> float:
        return self[-1]

    def __str__(self) -> str:
        return (
            f"{len(self)} cases, cost model over fastest {self.mean:.3f} on average, "
            f"{self.percentile_95:.3f} at the 95th percentile, {self.worst:.3f} at worst"
        )


@dataclass(frozen=True)
class Search:
    """A run of `pyrocshmem tune` over drawn shapes, of one op. machine: its GPUs. ratios: of the cases that it came
    to."""

    op: str
    seed: str
    ranks: int
    machine: str
    commit: str
    ratios: Ratios

    @property
    def num_drawn(self) -> int:
        """The cases that the seed draws."""
        return len(set(models.drawn(TIMED[self.op].kind, self.ranks, self.seed)))


def read(folder: Path) -> list[Search]:
    """Those in the tables of a folder, by op, machine and seed. ValueError for a file that is no such table."""
    found = [search for path in sorted(folder.glob(_PATTERN)) for search in _of_file(path)]
    ops = list(TIMED)
    return sorted(found, key=lambda each: (ops.index(each.op), each.machine, each.seed))


def _of_file(path: Path) -> list[Search]:
    """Of the runs in one table, those whose shapes were drawn."""
    found: dict[tuple[str, int], list[float]] = {}
    try:
        made = json.loads(path.read_text())
        for entry in made["entries"]:
            found.setdefault((entry["op"], entry["run"]), []).append(entry["cost_model_us"] / entry["us"])
        searches = []
        for (op, number), ratios in found.items():
            run = made["runs"][number]
            if drawn := _DRAWN.search(run["command"]):
                ranks = int(run["ranks"]) if TIMED[op].kind != "gemm" else 1
                device = re.sub(r"^\d+ x | \(.*", "", run["target"])
                where = machine(ranks, device)
                searches.append(Search(op, drawn[1], ranks, where, run["commit"], Ratios(ratios)))
        return searches
    except (ValueError, KeyError, IndexError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{path} is no table of configurations: {type(error).__name__}: {error}") from None


def choices_table(searched: Sequence[Search]) -> str:
    """A row for each search; "" where there is none."""
    rows = [
        [
            f"`{each.op}`",
            each.seed,
            each.machine,
            each.commit[:7],
            f"{len(each.ratios)} of {each.num_drawn}",
            *(f"{ratio:.3f}" for ratio in (each.ratios.mean, each.ratios.percentile_95, each.ratios.worst)),
        ]
        for each in searched
    ]
    header = ["op", "seed", "on", "at", "cases", "mean", "95%", "worst"]
    return table(header, rows) if rows else ""
