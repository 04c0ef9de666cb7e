"""Rounds: a few calls of a few kinds that ranks make without meeting in between, with what disturbs them.

    rounds = draw_rounds(Random(seed), 4, ["gemm_all_reduce"], on_gpu=False)
    for smaller in shrunk(rounds[0]): ...         # simpler ones, the most telling first

Everything about a round is in it, as plain data: it can be printed, kept as JSON, and run again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.stress.ops import OPS, Facts

GRAPH = -1  # in the place of a kind: a replay of the graph of all kinds

_DELAY_CHANCE, _MOST_DELAY_MS = 0.3, 40


@dataclass(frozen=True)
class Round:
    """group: which of `groups_of` makes the calls. kinds: (op, facts). order: (kind, set of data) of each call; the
    first calls are one of each kind, which are planned with a vote.

    delays_ms: before each call, on each rank. stalled: the rank that dawdles between seeing a flag and using what it
    announces, None for none (CPU). num_streams: calls take them in turn (GPU). cancelled: (call, rank): from that call
    on the rank makes none; the others must raise, and all recover, with a new heap or by heap.recover().
    """

    group: int
    kinds: tuple[tuple[str, Facts], ...]
    order: tuple[tuple[int, int], ...]
    delays_ms: tuple[tuple[int, ...], ...]
    stalled: int | None = None
    num_streams: int = 1
    cancelled: tuple[int, int] | None = None
    new_heap: bool = False

    def __str__(self) -> str:
        names = ("group", "stalled", "num_streams", "cancelled", "new_heap")
        plain = {field.name: field.default for field in dataclasses.fields(self)}
        more = [
            f"{name} {getattr(self, name)}"
            for name in names
            if getattr(self, name) != plain[name] or name == "group"
        ]
        lines = [f"  kind {number}: {op} {facts}" for number, (op, facts) in enumerate(self.kinds)]
        calls = ", ".join("graph" if kind == GRAPH else str(kind) for kind, _ in self.order)
        late = [f"call {i}: {ms}" for i, ms in enumerate(self.delays_ms) if any(ms)]
        return "\n".join(
            [", ".join(more), *lines, f"  calls {calls}", *(f"  delays in ms, {each}" for each in late)]
        )

    def num_ranks(self, world_size: int) -> int:
        return len(groups_of(world_size)[self.group])


def groups_of(world_size: int) -> list[list[int]]:
    """Members of the groups: all ranks, all once more, then overlapping pairs."""
    everyone = list(range(world_size))
    pairs = [[0, world_size - 1], [0, 1], [1, 2]] if world_size > 2 else []
    return [everyone, everyone, *pairs]


def draw_rounds(rng: Random, count: int, world_size: int, names: Sequence[str], on_gpu: bool) -> list[Round]:
    return [_draw_round(rng, world_size, names, on_gpu) for _ in range(count)]


def _draw_round(rng: Random, world_size: int, names: Sequence[str], on_gpu: bool) -> Round:
    group = rng.randrange(len(groups_of(world_size))) if rng.random() < 0.5 else 0
    members = len(groups_of(world_size)[group])
    ops = [rng.choice(names) for _ in range(rng.randint(1, 3))]
    kinds = tuple((name, OPS[name].draw(rng, members)) for name in ops)
    others: list[int] = [rng.randrange(len(kinds)) for _ in range(rng.randint(2, 6 if not on_gpu else 30))]
    if on_gpu and rng.random() < 0.5:
        others = [rng.choice((kind, GRAPH)) for kind in others]
    order = tuple((kind, rng.randrange(1000)) for kind in [*range(len(kinds)), *others])
    delays = tuple(
        tuple(rng.randint(1, _MOST_DELAY_MS) if rng.random() < _DELAY_CHANCE else 0 for _ in range(members))
        for _ in order
    )
    stalled = rng.randrange(members) if not on_gpu and rng.random() < 0.3 else None
    num_streams = rng.choice((1, 2)) if on_gpu and all(kind != GRAPH for kind in others) else 1
    cancelled = None
    meets = [i for i in range(len(kinds), len(order)) if order[i][0] >= 0 and OPS[ops[order[i][0]]].meets]
    if members > 1 and meets and rng.random() < 0.15:
        cancelled = rng.choice(meets), rng.randrange(members)
    return Round(group, kinds, order, delays, stalled, num_streams, cancelled, rng.random() < 0.5)


def shrunk(found: Round, world_size: int) -> Iterator[Round]:
    """Rounds with one thing less, or smaller, than `found`."""
    change = dataclasses.replace
    yield from _fewer_calls(found)
    if found.cancelled is not None:
        yield change(found, cancelled=None)
    if found.stalled is not None:
        yield change(found, stalled=None)
    if found.num_streams > 1:
        yield change(found, num_streams=1)
    if found.group and found.num_ranks(world_size) == world_size:
        yield change(found, group=0)
    if any(map(any, found.delays_ms)):
        yield change(found, delays_ms=tuple((0,) * len(each) for each in found.delays_ms))
    for number, (op, facts) in enumerate(found.kinds):
        for smaller in _smaller_facts(facts):
            kinds = (*found.kinds[:number], (op, smaller), *found.kinds[number + 1 :])
            yield change(found, kinds=kinds)


def _fewer_calls(found: Round) -> Iterator[Round]:
    change, planned = dataclasses.replace, len(found.kinds)
    for gone in range(planned if planned > 1 else 0):
        kept = [i for i, (kind, _) in enumerate(found.order) if kind != gone]
        kinds = (*found.kinds[:gone], *found.kinds[gone + 1 :])
        yield _with_calls(change(found, kinds=kinds), kept, gone)
    calls = list(range(len(found.order)))
    later = calls[planned:]
    if len(later) > 1:
        yield _with_calls(found, calls[: planned + len(later) // 2], None)
    for gone in later:
        yield _with_calls(found, [i for i in calls if i != gone], None)


def _with_calls(found: Round, kept: list[int], gone: int | None) -> Round:
    """`found` with the calls `kept` alone; kinds behind `gone` have moved up."""
    order = tuple(
        (kind - 1 if gone is not None and kind > gone else kind, data)
        for kind, data in (found.order[i] for i in kept)
    )
    cancelled = found.cancelled
    if cancelled is not None:
        cancelled = (kept.index(cancelled[0]), cancelled[1]) if cancelled[0] in kept else None
    delays = tuple(found.delays_ms[i] for i in kept)
    return dataclasses.replace(found, order=order, delays_ms=delays, cancelled=cancelled)


_PLAIN = {"bias": None, "activation": "none", "out": "new", "layout": "view", "dtype": "float32"}


def _smaller_facts(facts: Facts) -> Iterator[Facts]:
    for name, plain in _PLAIN.items():
        if name in facts and facts[name] != plain:
            yield {**facts, name: plain}
    config: dict[str, Any] = facts.get("config", {})
    for name in config:
        if name != "placement":
            yield {**facts, "config": {key: value for key, value in config.items() if key != name}}
    for name in "MNK":
        size = facts.get(name, 1)
        for smaller in {max(1, size // 4), max(1, size // 2), size - 1} - {0, size}:
            yield {**facts, name: smaller}
