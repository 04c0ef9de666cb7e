"""Placements: the places where an op's finished tiles can be consumed, each with the rule that says when it is best.

    _PLACEMENTS = (
        Placement("messages", verdicts.few_tiles),                                  # asked first
        Placement("copy_engine", verdicts.otherwise, completed.own_row_blocks),     # whatever the sizes
    )

An op has its placements as data (`GemmOp.placements`). `rules.decide` asks them in order, and the first that suits
decides; one that is asked for by name is configured without asking. A placement says what it does with a
configuration, and what `python -m pyrocshmem tune` tries around that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from pyrocshmem.calls.invariance import NONE, Invariance
from pyrocshmem.calls.op import find, lookup, registered
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.stream_k.choice.config import Config, changed, known_placements
from pyrocshmem.stream_k.choice.gemm_model import Tile, balanced_programs


class Facts(NamedTuple):
    """What rules decide by.

    M, N, K: of a rank's GEMM [M, K] x [K, N]: M rows of all ranks, its own share of N or K. dtype: of the operands.
    world_size: ranks of the group. wire: what partial sums travel in; None: the op sums nothing over ranks. target:
    "sm_90", "hip", "cpu" (interpreted), or "host": compiled on a machine without a GPU, for reading. num_sms: of the
    device. block_m, tiles: height of a tile of the configuration that the op begins with, and how many of them the
    result has. allow_tf32, invariance: as of the call.
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype
    world_size: int
    device: torch.device
    wire: torch.dtype | None
    target: str
    num_sms: int
    block_m: int
    tiles: int
    allow_tf32: bool = False
    invariance: Invariance = NONE

    @property
    def in_tf32(self) -> bool:
        """Whether products may go through tf32."""
        return self.allow_tf32 and ELEMENTS[self.dtype].tf32

    @property
    def is_narrow(self) -> bool:
        """Whether partial sums travel in 16 bits."""
        return self.wire is not None and self.wire.itemsize == 2

    @property
    def in_16_bits(self) -> bool:
        """Whether the matrix units of sm_90 multiply in 16 bits: what nearly all measurements are of."""
        return self.target == "sm_90" and self.dtype != torch.float32


class Verdict(NamedTuple):
    """Whether a placement suits, and why, or why not: a clause that names the values compared and the thresholds."""

    suits: bool
    why: str


class Estimate(Protocol):
    """The time that a model gives a tile, in microseconds."""

    @property
    def us(self) -> float: ...
    @property
    def tile(self) -> Tile: ...


class Tiling(NamedTuple):
    """A configuration whose tile has been chosen, and why in words. estimates: the model's times, where a model chose;
    the chosen tile's is the first, then from fast to slow."""

    config: Config
    why: str
    estimates: tuple[Estimate, ...] = ()


@dataclass(frozen=True)
class Variant:
    """A configuration whose numbers of programs follow the number of tiles.

    most_programs: what the GEMM's programs are balanced for; 0: they are the config's. comm_each: programs that
    consume, for every SM that the GEMM leaves free; 0: they are the config's.
    """

    config: Config
    most_programs: int = 0
    comm_each: int = 0

    def fitted(self, M: int, N: int, num_sms: int) -> Config:
        """The configuration for a result [M, N], neither of them 0. ValueError where there is none."""
        config = self.config
        if not self.most_programs:
            return config
        programs = balanced_programs(num_tiles(config, M, N), self.most_programs)
        comm = self.comm_each * (num_sms - programs) or config.num_comm_programs
        return changed(config, num_programs=programs, num_comm_programs=comm)


def num_tiles(config: Config, M: int, N: int) -> int:
    """Tiles of a result [M, N]."""
    return -(-M // config.block_m) * -(-N // config.block_n)


def _unchanged(config: Config, _: Facts) -> Config:
    return config


@dataclass(frozen=True)
class Placement:
    """A place where the finished tiles of an op are consumed.

    name: as in `Config.placement`. suits: whether it is the fastest one known here. configure: completes a
    configuration that has this placement and a tile. tile: changes the tile that the op begins with, before that, where
    the placement has a rule of its own; None: it keeps that one. variants: what tuning measures around the
    configuration; None: it alone. blocks: rows are cut in a block a rank, each of whole tiles. whole_tiles:
    Config.split must be "none". alone: nothing is consumed: programs may share an SM, and whether the last wave is
    split, and on how many programs, is for the rules to say where an entry of the table is of another shape.
    """

    name: str
    suits: Callable[[Facts], Verdict]
    configure: Callable[[Config, Facts], Config] = _unchanged
    tile: Callable[[Tiling, Facts], Tiling] | None = None
    variants: Callable[[Config, Facts], Iterable[Variant]] | None = None
    blocks: bool = False
    whole_tiles: bool = False
    alone: bool = False


def placements_by_op() -> dict[str, tuple[Placement, ...]]:
    """The placements of all registered ops that begin with a GEMM, by the op's name."""
    found = {op.name: getattr(op, "placements", ()) for op in registered()}
    return {name: placements for name, placements in found.items() if placements}


def placements_of(op: str) -> tuple[Placement, ...]:
    """The placements of an op, in the order in which they are asked. ValueError for an op that has none."""
    placements: tuple[Placement, ...] = getattr(lookup(op), "placements", ())
    if not placements:
        raise ValueError(f"op is {op!r}, allowed are {', '.join(placements_by_op())}")
    return placements


def find_placement(op: str, name: str) -> Placement:
    """The placement of that name. ValueError for one that the op doesn't have."""
    placements = placements_of(op)
    for placement in placements:
        if placement.name == name:
            return placement
    names = ", ".join(each.name for each in placements)
    raise ValueError(f"Config.placement is {name!r}, {op} has {names}")


def wire_of(op: str, dtype: torch.dtype, partial_dtype: torch.dtype | None) -> torch.dtype | None:
    """`Facts.wire` of an op of operands of `dtype`. partial_dtype: as in `Config`. ValueError for an unknown op."""
    return ELEMENTS[dtype].wire_dtype(partial_dtype) if getattr(find(op), "sums", False) else None


def placement_names(op: str | None = None) -> tuple[str, ...]:
    """Names of an op's placements; None: of all registered ops'."""
    if op is not None:
        return tuple(each.name for each in placements_of(op))
    return known_placements()
