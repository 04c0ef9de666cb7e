"""What `python -m pyrocshmem tune` tries: the cost model's choice and a handful of others around it.

Shape letters: M N K of a rank's product. Numbers of multiprocessors are shares of 132, an H200's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pyrocshmem import target
from pyrocshmem.stream_k.choice.config import PLACEMENTS_OF, Config
from pyrocshmem.stream_k.choice.rules import cost_model, small_tile, with_tile
from pyrocshmem.stream_k.choice.table import Shape, Variant, check, num_tiles
from pyrocshmem.stream_k.local_gemm.product import tiles_of_block
from pyrocshmem.target import num_multiprocessors

Model = Callable[..., Config]


def candidates(
    op: str,
    shape: Shape,
    dtype: torch.dtype,
    ranks: int,
    device: torch.device,
    partial_dtype: torch.dtype | None = None,
) -> dict[Config, Variant]:
    """Configurations to try for a local product of `shape`, (M, N, K), the cost model's first; each with the variant
    that it comes from."""
    M, N, K = shape
    processors = num_multiprocessors(device)
    model = partial(cost_model, op, M, N, K, dtype, ranks, device, partial_dtype)
    base = model()
    found = {base: Variant(base)}
    several = num_tiles(base, M, N) >= processors
    for variant in _variants(op, shape, dtype, ranks, processors, model, several):
        try:
            config = variant.fitted(M, N, processors)
            check(op, config, device)
        except ValueError:
            continue  # not on a device as small as this one
        found.setdefault(config, variant)
    return found


def _variants(
    op: str, shape: Shape, dtype: torch.dtype, ranks: int, processors: int, model: Model, several: bool
) -> Iterator[Variant]:
    """several: whether there is more than one wave of tiles."""
    if op == "gemm":
        yield from _for_gemm(model(), processors, several)
        if target.backend() == "cuda" and dtype != torch.float32:
            yield from _narrow_tiles(model(), several)
        return
    yield Variant(model(placement="unfused"))
    if "after" not in PLACEMENTS_OF[op]:
        yield from _by_copy_engine(op, shape, ranks, processors, model(placement="copy_engine"))
    elif several:
        yield from _beside(op, shape, ranks, processors, model)
    else:
        if target.backend() == "cuda" and dtype != torch.float32:
            yield from _half_tiles(model())
        for placement in ("after", "inside"):
            for algorithm in ("one_shot", "two_shot") if op == "gemm_all_reduce" else ("two_shot",):
                yield Variant(replace(model(placement=placement), algorithm=algorithm))


def _share(processors: int, of_132: int) -> int:
    return max(1, processors * of_132 // 132)


def _for_gemm(base: Config, processors: int, several: bool) -> Iterator[Variant]:
    # Programs that share multiprocessors stay as many.
    free = base if base.num_programs > processors else replace(base, num_programs=0)
    if not several:
        for split in ("none", "stream_k", "split_k", "apart"):
            yield Variant(replace(free, split=split))
        return
    whole = replace(free, split="none")
    yield Variant(whole, processors)
    yield Variant(whole, _share(processors, 128))
    for split in ("split_k", "stream_k"):
        yield Variant(replace(free, split=split))
    for group_m in (4, 16):
        yield Variant(replace(base, group_m=group_m))


def _narrow_tiles(base: Config, several: bool) -> Iterator[Variant]:
    narrow = replace(base, block_n=128, num_warps=4, num_stages=4, subtiles=1, num_programs=0)
    yield Variant(replace(narrow, block_m=128, block_k=64))
    if not several:
        yield Variant(replace(narrow, block_m=64, block_k=128))


def _half_tiles(base: Config) -> Iterator[Variant]:
    """Two waves instead of one: what the first one sends travels while the second is multiplied."""
    for block_m, block_n in (
        (base.block_m // 2, base.block_n),
        (base.block_m, base.block_n // 2),
        (64, 64),
    ):
        if block_m >= 64 and block_n >= 32:
            yield Variant(with_tile(replace(base, split="none"), small_tile(block_m, block_n)))


def _by_copy_engine(op: str, shape: Shape, ranks: int, processors: int, base: Config) -> Iterator[Variant]:
    """Chunks and the order of tiles inside them; more multiprocessors left free."""
    if op == "all_gather_gemm":
        for group_m in (4, 8, 16):
            yield Variant(replace(base, group_m=group_m), base.num_programs and _share(processors, 128))
    else:
        tiles = tiles_of_block(shape[0], ranks, base.block_m)
        for chunk in (2, 4, 8, tiles):
            config = replace(base, chunk=min(chunk, tiles), group_m=min(8, chunk, tiles))
            yield Variant(config, base.num_programs and _share(processors, 128))
    for most in (124, 116) if base.num_programs else ():
        yield Variant(base, _share(processors, most))


def _beside(op: str, shape: Shape, ranks: int, processors: int, model: Model) -> Iterator[Variant]:
    """All placements: consumers that share multiprocessors with the GEMM, that have some to themselves, ..."""
    own = model(placement="own_stream")
    scatters = op == "gemm_all_scatter"
    for most in (124, 112) if scatters else (116,):
        config = replace(own, comm_warps=_warps(own, 8), comm_rows=_rows(own, 32 if scatters else 16))
        yield Variant(config, _share(processors, most), comm_each=3)
    shared: tuple[dict[str, Any], ...] = (
        {"num_comm_programs": processors, "comm_warps": _warps(own, 4), "comm_rows": _rows(own, 16)},
        {"num_comm_programs": 2 * processors, "comm_warps": _warps(own, 4), "comm_rows": _rows(own, 8)},
    )
    # What pushes tiles slows a GEMM that it shares multiprocessors with by 20 to 40%.
    for fields in () if scatters else shared:
        yield Variant(replace(own, **fields), own.num_programs and _share(processors, 128))
    yield Variant(model(placement="beside"))
    if scatters:
        pulled = model(placement="pull")
        for most in (124, 116) if pulled.num_programs else ():
            yield Variant(pulled, _share(processors, most), comm_each=1)
        yield Variant(pulled)
    blocks = model(placement="copy_engine")
    yield Variant(blocks, blocks.num_programs and _share(processors, 128))
    if scatters:
        chunk = 2 * blocks.chunk
    else:
        tiles = tiles_of_block(shape[0], ranks, blocks.block_m)
        chunk = tiles if blocks.chunk < tiles else max(1, tiles // 2)
    other = replace(blocks, chunk=chunk, group_m=min(8, chunk))
    yield Variant(other, blocks.num_programs and _share(processors, 128))
    yield Variant(model(placement="inside"))


def _warps(config: Config, warps: int) -> int:
    """Warps mean nothing where kernels are interpreted."""
    return warps if not target.interpreted() else config.comm_warps


def _rows(config: Config, rows: int) -> int:
    return min(rows, config.block_m)
