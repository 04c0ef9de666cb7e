"""What a configuration chose: the vendor's BLAS, or our kernel with whole or split tiles.

    chosen.schedule(config, case.op, M, N, K, dtype, ranks, device)     # while measuring: "stream_k"
    chosen.of_case(record)                                              # of a record: the same, "" where it doesn't say

The names are `schema.SCHEDULES`: "whole" tiles; equal parts ("split_k"), which the programs of a tile add, or a second
kernel ("separate"); "stream_k"; and "blas", whose tiles are its own affair.
"""

from __future__ import annotations

import dataclasses

import torch

from pyrocshmem import stream_k
from pyrocshmem.benchmarks.records import Record
from pyrocshmem.benchmarks.schema import timed_as
from pyrocshmem.stream_k.choice.config import BY_BLAS, Config
from pyrocshmem.stream_k.choice.placement import placement_names, placements_by_op
from pyrocshmem.stream_k.local_gemm.plan import is_by_blas
from pyrocshmem.stream_k.local_gemm.product import schedule_of


def takes_blas(op: str, placement: object) -> bool:
    """Whether the BLAS multiplies in this placement of `op`; False for what is none of its placements."""
    return placement in BY_BLAS and placement in _placements(op)


def own_placement(op: str) -> str:
    """The first placement of `op` in which our kernel multiplies."""
    return next(name for name in placement_names(op) if not takes_blas(op, name))


def own_gemm(M: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> Config:
    """The configuration of `gemm` without the BLAS: the default where that is our kernel, else our kernel's."""
    default = stream_k.choose("gemm", M, N, K, dtype, 1, device)
    if not takes_blas("gemm", default.placement):
        return default
    return stream_k.choose("gemm", M, N, K, dtype, 1, device, None, own_placement("gemm"))


def default_gemm(a: torch.Tensor, b: torch.Tensor, device: torch.device) -> Config:
    """What `gemm(a, b)` on `device` does when it is given no configuration: the default or, where that is the BLAS and
    these operands aren't for it, our kernel with the default's tile. a, b: may be on "meta", without memory."""
    (M, K), N = a.shape, b.shape[1]
    default = stream_k.choose("gemm", M, N, K, a.dtype, 1, device)
    out = torch.empty(M, N, dtype=a.dtype, device="meta")
    if not takes_blas("gemm", default.placement) or is_by_blas(a, b, default, False, None, "none", out):
        return default
    return dataclasses.replace(default, placement=own_placement("gemm"))


def schedule(
    config: Config,
    op: str,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device,
    partial_dtype: torch.dtype | None = None,
    placement: str | None = None,
) -> str:
    """The name of what `config` does: what `stream_k.choose` gives for the other arguments, or that with another
    algorithm or no tile split."""
    if takes_blas(op, config.placement):
        return "blas"
    if config.split == "none":
        return "whole"
    if op != "gemm":
        found = stream_k.explain(op, M, N, K, dtype, world_size, device, partial_dtype, placement).schedule
    else:  # its configuration may be another one than these arguments give: `default_gemm`
        found = schedule_of(config, M, N, K, device)
    if found is None or not found.has_shared_tiles:
        return "whole"
    return "separate" if config.split == "separate" else found.kind


def of_case(case: Record, provider: str = "ours") -> str:
    """What a provider of ours chose in a record: as that says or, where it doesn't, what follows from the configuration
    alone, whatever the rules were then; "" otherwise."""
    name = timed_as(case, provider)
    if known := case.get("schedule", {}).get(name):
        return str(known)
    config = case["config"].get(name, {})
    if takes_blas(case["op"], config.get("placement")):
        return "blas"
    return "whole" if config.get("split") == "none" else ""


def text(case: Record) -> str:
    """The default's choice in a few words, "copy_engine, whole"; of a GEMM that the BLAS took also our kernel's, in
    brackets."""
    op, found = case["op"], of_case(case)
    if found == "blas":
        own = of_case(case, "ours_no_blas") if "ours_no_blas" in case["us"] else ""
        return f"blas ({own})" if own else "blas"
    placement = case["config"].get(timed_as(case, "ours"), {}).get("placement")
    own_placements = [name for name in _placements(op) if not takes_blas(op, name)]
    shown = placement if placement in own_placements and len(own_placements) > 1 else ""
    return ", ".join(filter(None, (shown, found)))


def _placements(op: str) -> tuple[str, ...]:
    return tuple(each.name for each in placements_by_op().get(op, ()))
