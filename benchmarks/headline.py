"""What README.md shows: of each fused op the cases of one set, which the records alone decide.

A published drawn set comes first, the newest of several; where an op has none, the Llama shapes, then decoding. Sets of
tuning seeds are never shown. All are of one machine, of two GPUs if there is one, but for ops of which that has no such
records, or none with other peers than the libraries' pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pyrocshmem.benchmarks import models, seeds, stats
from pyrocshmem.benchmarks.shapes import TIMED, baseline
from pyrocshmem.benchmarks.stats import Group

# Behind published sets, the first of these that there is.
_SETS = ("llama3", "decode")
_RANKS = 2
# Fused ops of README's table and picture, at most: all stand in docs/results.md.
README_OPS = 5


@dataclass(frozen=True)
class Headline:
    """machine: that most is of, in words. fused: a group an op. gemm: on one of its GPUs; None: there is none."""

    machine: str
    fused: tuple[Group, ...]
    gemm: Group | None

    def set_of(self, group: Group) -> str:
        """The set of a fused op's group, and its machine where that is another one."""
        return group.shapes + (f", {group.machine}" if group.machine != self.machine else "")


def headline(groups: Iterable[Group]) -> Headline | None:
    """Of all that was measured on GPUs; None where no fused op was measured beside the libraries' pair."""
    timed = [group for group in groups if stats.speedups(group, baseline(group.op)) and _may_be_shown(group)]
    fused = [group for group in timed if TIMED[group.op].kind in ("row", "column") and group.ranks > 1]
    if not fused:
        return None
    machines = [group.machine for group in fused]
    published = [group.machine for group in fused if seeds.is_published(group)]

    def weight(group: Group) -> tuple[bool, int, int]:
        return group.ranks == _RANKS, published.count(group.machine), machines.count(group.machine)

    main = max(fused, key=weight)

    def place(group: Group) -> tuple[int, bool, bool, bool, bool]:
        alone = not set(stats.peers(group)) - {baseline(group.op)}
        elsewhere = group.machine != main.machine
        return _place(group), alone, elsewhere, group.ranks != main.ranks, group.dtype == "float32"

    ops = dict.fromkeys(group.op for group in fused)
    gemms = [group for group in timed if (group.op, group.device) == ("gemm", main.device)]
    return Headline(
        main.machine,
        tuple(_first([group for group in fused if group.op == op], place) for op in ops),
        _first(gemms, place) if gemms else None,
    )


def _may_be_shown(group: Group) -> bool:
    return not models.seed_of_set(group.shapes) or seeds.is_published(group)


def _place(group: Group) -> int:
    if models.seed_of_set(group.shapes):
        return 0
    return 1 + (_SETS.index(group.shapes) if group.shapes in _SETS else len(_SETS))


def _first(groups: Iterable[Group], place: Callable[[Group], tuple[int, bool, bool, bool, bool]]) -> Group:
    """The one in front; of equal ones the newest."""
    newest = sorted(
        groups, key=lambda group: max(str(case["run"]["started"]) for case in group.cases), reverse=True
    )
    return min(newest, key=place)
