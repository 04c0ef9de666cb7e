"""The configuration of an op without a measured table: what measurements on H200 say (docs/log.md), by sizes alone.

`decide` begins with a tile (`choice.tilings`), asks the op's placements in order whether they suit (`choice.verdicts`),
and lets the first that does complete the configuration (`choice.completed`).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from pyrocshmem import interpreter, target
from pyrocshmem.calls.invariance import NONE, TP, Invariance
from pyrocshmem.calls.op import find
from pyrocshmem.stream_k.choice.config import BY_BLAS, Config, changed
from pyrocshmem.stream_k.choice.invariant import fixed
from pyrocshmem.stream_k.choice.placement import (
    Facts,
    Placement,
    Tiling,
    Verdict,
    find_placement,
    placements_of,
    wire_of,
)
from pyrocshmem.stream_k.choice.tilings import first_tile


class Decision(NamedTuple):
    """What the rules say of a call, and why.

    config: the configuration. facts: what they decided by. placement: the one that decided, or that was asked for.
    asked: the placements that were asked, with what they said, in order: the last one suits; none where the caller
    asked for a placement by name. behind: those behind it, which were not asked. tiling: the tile, and why.
    """

    config: Config
    facts: Facts
    placement: Placement
    asked: tuple[tuple[Placement, Verdict], ...]
    behind: tuple[Placement, ...]
    tiling: Tiling


def decide(
    op: str,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device,
    partial_dtype: torch.dtype | None = None,
    placement: str | None = None,
    allow_tf32: bool = False,
    invariance: Invariance = NONE,
) -> Decision:
    """What `cost_model` gives, and why. The arguments are `stream_k.choose`'s. ValueError for an op without placements,
    and for a placement that the op doesn't have."""
    num_sms = target.num_sms(device)
    where = _target()
    if invariance and where == "cpu":
        interpreter.check_rows()
    if invariance == TP and getattr(find(op), "sums", False):
        if partial_dtype not in (None, torch.float32):
            raise ValueError(
                f"partial_dtype of {op} is {partial_dtype}, but the call is {invariance}: partial sums travel in fp32"
            )
        partial_dtype = torch.float32
    wire = wire_of(op, dtype, partial_dtype)
    first = first_tile(M, N, dtype, num_sms, where, wire, invariance)
    config = dataclasses.replace(first.config, partial_dtype=partial_dtype) if partial_dtype else first.config
    tiles = -(-M // config.block_m) * -(-N // config.block_n)
    sizes = (M, N, K, dtype, world_size, device, wire, where, num_sms, config.block_m, tiles)
    facts = Facts(*sizes, allow_tf32, invariance)
    asked: list[tuple[Placement, Verdict]] = []
    behind: tuple[Placement, ...] = ()
    if placement is not None:
        chosen = find_placement(op, placement)
    else:
        placements = placements_of(op)
        if invariance:
            placements = tuple(each for each in placements if each.name not in BY_BLAS)
        for chosen in placements:
            asked.append((chosen, chosen.suits(facts)))
            if asked[-1][1].suits:
                break
        else:
            raise ValueError(f"no placement of {op} suits {facts}: one of them must, whatever the sizes")
        behind = placements[len(asked) :]
    tiling = first._replace(config=changed(config, placement=chosen.name))
    if chosen.tile is not None:
        tiling = chosen.tile(tiling, facts)
    config = fixed(chosen.configure(tiling.config, facts), facts)
    return Decision(config, facts, chosen, tuple(asked), behind, tiling)


def cost_model(
    op: str,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device,
    partial_dtype: torch.dtype | None = None,
    placement: str | None = None,
    allow_tf32: bool = False,
    invariance: Invariance = NONE,
) -> Config:
    """What `stream_k.choose`, which has the arguments, gives without a table."""
    return decide(
        op, M, N, K, dtype, world_size, device, partial_dtype, placement, allow_tf32, invariance
    ).config


def _target() -> str:
    """`Facts.target`."""
    if target.interpreted():
        return "cpu"
    return {"cuda": "sm_90", "hip": "hip"}.get(target.backend(), "host")
