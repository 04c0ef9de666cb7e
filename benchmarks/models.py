"""The set `models`: layers of public models (`models.toml`), divided over R ranks, with drawn numbers of rows.

    drawn("column", ranks=2, seed="1f00ba12")          # 64 of (M, N, K), one rank's GEMM

Nobody tunes to a set that is drawn anew: who measures takes a fresh seed, and tables name it. What is published is
drawn by the hash of the commit measured, "models:commit", so that nobody chose it (`benchmarks.seeds`). A case is a
model and a projection, each as likely as any other; rows are drawn log-uniformly from 1 to 16384, every second time
rounded to a multiple of 256. A GEMM alone may be that of a layer on any number of ranks.
"""

from __future__ import annotations

import functools
import random
import re
import secrets
import tomllib
from pathlib import Path
from typing import NamedTuple

NAME = "models"
NUM_CASES = 64
MOST_ROWS = 16384
_MULTIPLE = 256
_SEED = re.compile(r"[A-Za-z0-9]{1,16}")
_OF_COMMIT = "commit"
_DIGITS = 8
_HASH = re.compile(r"[0-9a-f]{8,64}")
_KINDS = {"column": ("qkv", "gate_up"), "row": ("o", "down"), "gemm": ("qkv", "gate_up", "o", "down")}


class Model(NamedTuple):
    """A model's sizes; intermediate: of its dense feed-forward, None where it has none."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int | None = None

    def gemm(self, projection: str, ranks: int) -> tuple[int, int] | None:
        """(N, K) of one rank's GEMM; None where the model has none, or the ranks can't divide it. Key and value heads
        that are fewer than the ranks are held by several."""
        queries = self.heads * self.head_dim
        if projection in ("gate_up", "down"):
            if self.intermediate is None or self.intermediate % ranks:
                return None
            share = self.intermediate // ranks
            return (2 * share, self.hidden) if projection == "gate_up" else (self.hidden, share)
        if self.heads % ranks or (self.kv_heads % ranks and ranks % self.kv_heads):
            return None
        if projection == "o":
            return self.hidden, queries // ranks
        keys = max(self.kv_heads // ranks, 1) * self.head_dim
        return queries // ranks + 2 * keys, self.hidden


@functools.cache
def models() -> dict[str, Model]:
    """By name."""
    table = tomllib.loads((Path(__file__).parent / "models.toml").read_text())
    return {name: Model(**sizes) for name, sizes in table.items()}


def is_drawn(shapes: str) -> bool:
    """Whether `shapes` asks for this set, with a seed or without."""
    return shapes.partition(":")[0] == NAME


def takes_commit(shapes: str) -> bool:
    """Whether `shapes` asks for the set that the commit measured gives."""
    return shapes == f"{NAME}:{_OF_COMMIT}"


def with_seed(shapes: str, commit: str = "") -> str:
    """ "models:SEED" as it is, "models" with a fresh seed, "models:commit" with that of `commit`. ValueError for a seed
    that could not stand in a table, and for a commit that gives none."""
    _, colon, seed = shapes.partition(":")
    if not colon:
        return f"{NAME}:{secrets.token_hex(_DIGITS // 2)}"
    if takes_commit(shapes):
        if not (seed := seed_of_commit(commit)):
            got = f"got {commit!r}" if commit else "which git can't tell here"
            raise ValueError(
                f"{shapes} is drawn by the commit measured, {got}: give --commit, {_DIGITS} digits of its hash or more"
            )
        return f"{NAME}:{seed}"
    if not _SEED.fullmatch(seed):
        raise ValueError(f"the seed of {shapes!r} is no 1 to 16 letters and digits")
    return shapes


def seed_of_commit(commit: str) -> str:
    """The first eight hexadecimal digits of a commit's hash; "" of what has fewer, or is none."""
    return commit[:_DIGITS] if _HASH.fullmatch(commit) else ""


def set_name(seed: str) -> str:
    """Of the set in records and tables."""
    return f"{NAME}-{seed}"


def seed_of_set(name: str) -> str:
    """The seed of a set's name; "" for any other set."""
    return name.removeprefix(f"{NAME}-") if name.startswith(f"{NAME}-") else ""


def drawn(kind: str, ranks: int, seed: str) -> list[tuple[int, int, int]]:
    """NUM_CASES of (M, N, K), one rank's GEMM; the same for the same arguments, everywhere.

    kind: "column" (the projections into heads and features), "row" (those out of them), or "gemm" (all of both, divided
    over any of 1, 2, 4, 8). ValueError for any other, and where no model can be divided over so many ranks.
    """
    if kind not in _KINDS:
        raise ValueError(f"nothing is drawn of kind {kind!r}, allowed are {', '.join(_KINDS)}")
    if kind != "gemm" and not any(m.gemm(name, ranks) for m in models().values() for name in _KINDS[kind]):
        raise ValueError(f"no model can be divided over {ranks} ranks")
    draw = random.Random(f"{seed} {kind}" if kind == "gemm" else f"{seed} {kind} {ranks}")
    sizes = list(models().values())
    found: list[tuple[int, int, int]] = []
    while len(found) < NUM_CASES:
        share = draw.choice((1, 2, 4, 8)) if kind == "gemm" else ranks
        pair = draw.choice(sizes).gemm(draw.choice(_KINDS[kind]), share)
        rows = MOST_ROWS ** draw.random()
        if pair is None:
            continue
        if len(found) % 2:
            M = max(round(rows / _MULTIPLE), 1) * _MULTIPLE
        else:
            M = max(round(rows), 1)
        found.append((M, *pair))
    return found
