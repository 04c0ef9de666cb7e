"""What `python -m pyrocshmem tune` measures around the configuration of a placement: `Placement.variants`.

Every function takes that configuration and the facts. Numbers of SMs are shares of 132, an H200's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from pyrocshmem.stream_k.choice.completed import in_steps
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.choice.placement import Facts, Variant, num_tiles
from pyrocshmem.stream_k.choice.tilings import small_tile, with_tile
from pyrocshmem.stream_k.local_gemm.product import tiles_of_block

Variants = Callable[[Config, Facts], Iterable[Variant]]


def nothing(config: Config, facts: Facts) -> Iterator[Variant]:
    """A placement that is measured only where the rules choose it."""
    yield from ()


def of_several_waves(variants: Variants) -> Variants:
    """Those variants where there is at least one full wave of tiles to travel beside; nothing elsewhere."""
    return lambda config, facts: variants(config, facts) if _has_waves(config, facts) else ()


def itself(config: Config, facts: Facts) -> Iterator[Variant]:
    """The configuration alone."""
    yield Variant(config)


def both_algorithms(config: Config, facts: Facts) -> Iterator[Variant]:
    """Each algorithm of an all-reduce, where there is less than a wave of tiles."""
    if not _has_waves(config, facts):
        yield Variant(replace(config, algorithm="one_shot"))
        yield Variant(replace(config, algorithm="two_shot"))


def itself_or_both_algorithms(config: Config, facts: Facts) -> Iterator[Variant]:
    """Each algorithm of an all-reduce, where there is less than a wave of tiles; else the configuration alone."""
    yield from itself(config, facts) if _has_waves(config, facts) else both_algorithms(config, facts)


def of_one_wave(config: Config, facts: Facts) -> Iterator[Variant]:
    """The configuration alone, where there is less than a wave of tiles."""
    if not _has_waves(config, facts):
        yield Variant(config)


def half_tiles(config: Config, facts: Facts) -> Iterator[Variant]:
    """Two waves instead of one: what the first one sends travels while the second is multiplied."""
    if _has_waves(config, facts) or not facts.in_16_bits:
        return
    for block_m, block_n in (
        (config.block_m // 2, config.block_n),
        (config.block_m, config.block_n // 2),
        (64, 64),
    ):
        if block_m >= 64 and block_n >= 32:
            yield Variant(with_tile(replace(config, split="none"), small_tile(block_m, block_n)))


def alone(config: Config, facts: Facts) -> Iterator[Variant]:
    """A GEMM alone: itself, other splits, fewer programs, other orders of tiles; narrow tiles."""
    yield Variant(config)
    yield from _other_schedules(config, facts)
    if facts.in_16_bits:
        narrow = replace(config, block_n=128, num_warps=4, num_stages=4, subtiles=1, num_programs=0)
        yield Variant(replace(narrow, block_m=128, block_k=64))
        if not _has_waves(config, facts):
            yield Variant(replace(narrow, block_m=64, block_k=128))


def _other_schedules(config: Config, facts: Facts) -> Iterator[Variant]:
    # Programs that share SMs stay as many.
    free = config if config.num_programs > facts.num_sms else replace(config, num_programs=0)
    if not _has_waves(config, facts):
        for split in ("none", "stream_k", "split_k", "separate"):
            yield Variant(replace(free, split=split))
        return
    whole = replace(free, split="none")
    yield Variant(whole, facts.num_sms)
    yield Variant(whole, _share(facts, 128))
    for split in ("split_k", "stream_k"):
        yield Variant(replace(free, split=split))
    for group_m in (4, 16):
        yield Variant(replace(config, group_m=group_m))


def gathered(config: Config, facts: Facts) -> Iterator[Variant]:
    """Orders of tiles behind copies that arrive piece by piece; more SMs left free."""
    for group_m in (4, 8, 16):
        yield Variant(replace(config, group_m=group_m), config.num_programs and _share(facts, 128))
    yield from _with_more_free(config, facts)


def scattered_blocks(config: Config, facts: Facts) -> Iterator[Variant]:
    """Steps of copies from all ranks' blocks of rows."""
    tiles = tiles_of_block(facts.M, facts.world_size, config.block_m)
    for chunk in (2, 4, 8, tiles):
        yield Variant(in_steps(config, min(chunk, tiles)))


def _with_more_free(config: Config, facts: Facts) -> Iterator[Variant]:
    for most in (124, 116) if config.num_programs else ():
        yield Variant(config, _share(facts, most))


def summed_beside(config: Config, facts: Facts) -> Iterator[Variant]:
    """Consumers that have SMs for themselves, or share them with the GEMM."""
    yield _with_own_sms(config, facts, most=116, rows=16)
    shared: tuple[dict[str, Any], ...] = (
        {"num_comm_programs": facts.num_sms, "comm_warps": _warps(config, facts, 4), "comm_rows": _rows(config, 16)},
        {"num_comm_programs": 2 * facts.num_sms, "comm_warps": _warps(config, facts, 4), "comm_rows": _rows(config, 8)},
    )  # fmt: skip
    for fields in shared:
        yield Variant(replace(config, **fields), config.num_programs and _share(facts, 128))


def pushed_beside(config: Config, facts: Facts) -> Iterator[Variant]:
    """Consumers that have SMs for themselves: what pushes tiles slows a GEMM that it shares SMs with by 20 to 40%."""
    for most in (124, 112):
        yield _with_own_sms(config, facts, most=most, rows=32)


def _with_own_sms(config: Config, facts: Facts, most: int, rows: int) -> Variant:
    other = replace(config, comm_warps=_warps(config, facts, 8), comm_rows=_rows(config, rows))
    return Variant(other, _share(facts, most), comm_each=3)


def pulled(config: Config, facts: Facts) -> Iterator[Variant]:
    """More SMs for the programs that pull."""
    for most in (124, 116) if config.num_programs else ():
        yield Variant(config, _share(facts, most), comm_each=1)
    yield Variant(config)


def summed_blocks(config: Config, facts: Facts) -> Iterator[Variant]:
    """Blocks of rows in as few steps as the rules say, and in one or two."""
    tiles = tiles_of_block(facts.M, facts.world_size, config.block_m)
    yield from _in_steps(config, tiles if config.chunk < tiles else max(1, tiles // 2))


def longer_steps(config: Config, facts: Facts) -> Iterator[Variant]:
    """The rules' steps, and such as move twice as many rows."""
    yield from _in_steps(config, 2 * config.chunk)


def _in_steps(config: Config, chunk: int) -> Iterator[Variant]:
    yield Variant(config)
    yield Variant(in_steps(config, chunk))


def _has_waves(config: Config, facts: Facts) -> bool:
    return num_tiles(config, facts.M, facts.N) >= facts.num_sms


def _share(facts: Facts, of_132: int) -> int:
    return max(1, facts.num_sms * of_132 // 132)


def _warps(config: Config, facts: Facts, warps: int) -> int:
    """Warps mean nothing where kernels are interpreted."""
    return config.comm_warps if facts.target == "cpu" else warps


def _rows(config: Config, rows: int) -> int:
    return min(rows, config.block_m)
