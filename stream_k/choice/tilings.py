"""Tilings: the tile that a configuration begins with, and why, by measurements on H200 (docs/log.md).

`first_tile` is every op's; a placement may have a tiling of its own (`Placement.tile`): `alone`, of a GEMM with no
communication, and `gathered`, behind rows that copy engines bring. The last two ask the model (`gemm_model`).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from pyrocshmem.calls.invariance import NONE, Invariance
from pyrocshmem.stream_k.choice.config import SPARE, Config, changed
from pyrocshmem.stream_k.choice.gemm_model import (
    DEEP,
    MANY_WAVES,
    TILES,
    Tile,
    balanced_programs,
    gathering_times,
    hides_gathering,
    tile_times,
)
from pyrocshmem.stream_k.choice.placement import Facts, Tiling
from pyrocshmem.stream_k.local_gemm.schedule import even_group, make_schedule

# GEMMs of so many rows are as fast as B is read.
FEW_ROWS = 64


def first_tile(
    M: int,
    N: int,
    dtype: torch.dtype,
    num_sms: int,
    where: str,
    wire: torch.dtype | None = None,
    invariance: Invariance = NONE,
) -> Tiling:
    """The tile beside communication: it must not depend on K, of which ranks may have different shares. wire: as in
    `Facts`."""
    if where == "cpu":
        return _for_cpu(0 if invariance else M, N)
    if where == "hip":
        return _for_amd(dtype)
    return _for_nvidia(M, N, dtype, num_sms, wire == torch.float32)


def _for_cpu(M: int, N: int) -> Tiling:
    # An interpreted step costs about 0.3 ms whatever its size: fewer, larger blocks are faster, as long as
    # there are tiles to split.
    large = max(M, N) > 64
    block = 64 if large else 32
    config = Config(
        block_m=block,
        block_n=block,
        block_k=64,
        num_warps=1,
        num_stages=1,
        group_m=2,
        subtiles=2,
        flatten=False,
        num_comm_programs=1,
        comm_rows=block,
    )
    return Tiling(
        config,
        f"interpreted, with M or N more than 64: {M}, {N}" if large else "interpreted, M and N at most 64",
    )


def _for_amd(dtype: torch.dtype) -> Tiling:
    # comm_rows: as many as give every thread of a consumer 16 bytes to store.
    config = Config(block_n=64, num_stages=2, subtiles=1, flatten=False, comm_rows=64)
    if dtype == torch.float32:
        return Tiling(
            changed(config, block_m=64, block_k=32, num_warps=4), "float32 on AMD has this one tile"
        )
    # 128 x 128 spills where tiles are split: 44 to 99 vector registers with Triton 3.6; 128 x 64 nowhere.
    return Tiling(
        config, "16-bit operands on AMD have this one tile: a larger one spills registers where it is split"
    )


@lru_cache(maxsize=1)
def _largest() -> Config:
    return Config()


def _for_nvidia(M: int, N: int, dtype: torch.dtype, num_sms: int, leaves_in_fp32: bool) -> Tiling:
    if dtype == torch.float32:
        config = Config(block_m=64, block_n=128, block_k=32, num_stages=3, subtiles=1, flatten=False)
        return Tiling(config, "float32 has this one tile")
    if M <= FEW_ROWS:
        why = f"M = {M} is at most {FEW_ROWS} rows: as fast as B is read, by narrow tiles"
        return Tiling(_of_few_rows(M, N, num_sms), why)
    if N <= 64:
        config = Config(block_m=64, block_n=64, block_k=128, num_warps=4, subtiles=1)
        return Tiling(config, f"N = {N} is at most 64 columns")
    for block_m, block_n in _TILES_128 if M <= 128 else _TILES:
        tiles = -(-M // block_m) * -(-N // block_n)
        if tiles <= num_sms:
            why = f"the first tile, from small to large, of which there is one wave or less: {tiles} on {num_sms} SMs"
            return Tiling(small_tile(block_m, block_n, leaves_in_fp32), why)
    return Tiling(
        _largest(), f"of each smaller tile that was tried there is more than a wave on {num_sms} SMs"
    )


@lru_cache(maxsize=1024)
def _of_few_rows(M: int, N: int, num_sms: int) -> Config:
    """From measurements on H200 (docs/log.md): narrow tiles, with as much of B on its way as memory takes to answer."""
    block_m, block_n = (16 if M <= 16 else 32 if M <= 32 else 64), 64
    tiles = -(-N // block_n)
    if block_m == 64 and 32 * num_sms >= N:
        block_n, block_k, stages = 32, 256, 4
    elif block_m == 64 and tiles > 2 * num_sms:
        block_n, block_k, stages = 128, 128, 4
    elif block_m == 64 or (block_m == 16 and 2 * tiles > num_sms):
        block_k, stages = 128, 5
    else:
        block_k, stages = 256, 5 if block_m == 16 else 4
    # Parts of tiles cost more than they save but where most SMs have nothing to do, at all or at the end.
    cut = 4 * tiles <= num_sms
    if block_m > 16 and block_n == 64 and 2 * tiles > num_sms:
        # Less than a wave gains nothing by parts, and loses a tenth or more: whole tiles have B fetched ahead.
        cut = num_sms < tiles and 0 < tiles % num_sms < 2 * num_sms // 3
    return Config(
        block_m=block_m, block_n=block_n, block_k=block_k, num_warps=4, num_stages=stages, subtiles=1,
        split="stream_k" if cut else "none",
    )  # fmt: skip


# Of other GEMMs of less than a wave, the smallest tile that is still one wave, since programs on all SMs read memory
# faster. In the order in which they are tried, from measurements on H200 at M = 128 and 256.
_TILES_128 = ((64, 64), (128, 64), (128, 128))
_TILES = ((64, 32), (64, 64), (128, 64), (64, 128), (128, 128), (64, 256))

# What a program has of shared memory on sm_90, but for a few words of its own.
SHARED_BYTES = 229_000


@lru_cache(maxsize=64)
def small_tile(block_m: int, block_n: int, leaves_in_fp32: bool = False) -> Config:
    """As many bytes in flight as fit beside the part of a tile that is on its way out, in fp32."""
    large = block_m * block_n >= 128 * 128
    block_k = 256 if block_m + block_n <= 96 else 64 if large else 128
    subtiles = 2 if block_m * block_n >= 128 * 64 else 1
    leaving = block_m * block_n * 4 // subtiles
    if leaves_in_fp32 and block_n == 256:
        # Its columns are spread over two warps: all of it is laid out anew before a quarter leaves.
        leaving = block_m * block_n * (4 + 1)
    stages = (SHARED_BYTES - leaving) // ((block_m + block_n) * block_k * 2)
    return Config(
        block_m=block_m, block_n=block_n, block_k=block_k, num_warps=8 if large else 4, num_stages=min(6, stages),
        subtiles=subtiles,
    )  # fmt: skip


def with_tile(config: Config, tile: Tile | Config) -> Config:
    """`config` with another's tile, and how that is run."""
    return changed(
        config, block_m=tile.block_m, block_n=tile.block_n, block_k=tile.block_k, num_warps=tile.num_warps,
        num_stages=tile.num_stages, subtiles=tile.subtiles, split=tile.split,
    )  # fmt: skip


# Rows up to here are read as fast as memory answers: the model is of GEMMs of more.
_DEEP_ROWS = 128
# Inner size from which 17 to 64 rows gain by tiles that Stream-K cuts: 23% at 13824, while 2240 lost 20%, 7168 7%.
_CUT_K = 8192
# Those of fewer than half a wave of tiles of 17 to 32 rows, where K is this long: a second kernel that adds parts gains
# 1 to 18%, at 8192 nothing or up to 6%. Of fewer rows parts lose up to 4% (16 GEMMs on one H200, docs/log.md).
_APART_K = 10240
# Others of 17 to 64 rows gain by such parts of tiles of 128 columns: from this K on where there are three or more, 1.11
# times the speed on average, 0.98 to 1.3; from the second one on where there are two, and tiles of 64 columns would
# leave a fifth of the SMs idle, 1.05, 0.94 to 1.16 (40 GEMMs on one H200).
_THIRDS_K, _HALVES_K = 8192, 16384


def alone(first: Tiling, facts: Facts) -> Tiling:
    """A GEMM alone, whose tile and programs may depend on K. `first`: the choice beside communication."""
    if facts.target != "sm_90":
        return first
    whole = bool(facts.invariance)
    if whole:
        first = first._replace(config=changed(first.config, split="none"))
    config, num_sms = first.config, facts.num_sms
    M, N, K = max(facts.M, 1), max(facts.N, 1), max(facts.K, 1)
    tiles = -(-M // config.block_m) * -(-N // config.block_n)
    if facts.in_16_bits and M <= FEW_ROWS and not whole:
        first = _of_few_rows_alone(first, M, N, K, num_sms)
        config = first.config
    if not facts.in_16_bits or M <= FEW_ROWS:
        blocks = (config.block_m, config.block_n, config.block_k)
        schedule, programs = make_schedule(M, N, K, *blocks, num_sms, split=config.split), num_sms
    elif M <= _DEEP_ROWS and num_sms < 2 * tiles <= 2 * num_sms:
        if (config.block_m, config.block_n) != (128, 64):
            return first
        why = f"M = {M} is at most {_DEEP_ROWS} rows: as fast as memory is read, in small steps along K"
        return Tiling(with_tile(config, DEEP), why)
    else:
        times = tile_times(M, N, K, num_sms, whole)
        tile, schedule = times[0].tile, times[0].schedule
        programs = tile.resident * num_sms
        cut = ", none of which is cut" if whole else ""
        why = f"it takes the least time of {len(times)} tiles{cut}, by the model of 16-bit GEMMs on an H200"
        first = Tiling(with_tile(config, tile), why, times)
    # Of programs that share an SM, both must be there.
    if schedule.kind == "data_parallel" and programs == num_sms:
        programs = balanced_programs(schedule.num_tiles, num_sms)
    # Where columns are few, about as many tile rows as a wave has.
    about = max(first.config.group_m, num_sms // schedule.tiles_n)
    group = even_group(schedule.tiles_m, about)
    return first._replace(config=changed(first.config, num_programs=programs, group_m=group))


def _of_few_rows_alone(first: Tiling, M: int, N: int, K: int, num_sms: int) -> Tiling:
    """A GEMM of few rows, with tiles that are cut only where K is long enough for that to gain; where it has few
    columns, too, their parts are added by a second kernel."""
    tiles, wide, height = -(-N // 64), -(-N // 128), first.config.block_m
    if 2 * tiles <= num_sms < 3 * tiles and height == 32:
        if K >= _APART_K:
            why = f"{first.why}; {tiles} of them leave half of {num_sms} SMs idle, and K = {K} pays for a second kernel"
            return Tiling(changed(first.config, split="separate"), why)
    elif 3 * tiles > num_sms and 5 * wide <= 2 * num_sms and height > 16:
        least, stages = _THIRDS_K if 3 * wide <= num_sms else _HALVES_K, 4 if height == 32 else 3
        if least <= K:
            cut = changed(first.config, block_n=128, block_k=128, num_stages=stages, split="separate")
            why = f"{first.why}; K = {K} is long enough for {wide} tiles of 128 columns with parts"
            return Tiling(cut, f"{why} that a second kernel adds")
    if 3 * tiles > num_sms:
        if first.config.split == "none" or K >= _CUT_K:
            return first
        why = f"{first.why}, and K = {K} is too short to cut them"
        return Tiling(changed(first.config, split="none"), why)
    block_m, stages = (16, 5) if M <= 16 else (32, 6) if M <= 32 else (64, 6)
    cut = changed(
        first.config, block_m=block_m, block_n=64, block_k=128, num_warps=4, num_stages=stages, subtiles=1,
        split="separate",
    )  # fmt: skip
    few = f"{first.why}; {tiles} tiles of 64 columns are at most a third of {num_sms} SMs"
    schedule = make_schedule(M, N, K, block_m, 64, 128, num_sms, split="separate")
    if schedule.has_shared_tiles:
        return Tiling(cut, f"{few}, and K = {K} is long enough for a second kernel that adds parts")
    return Tiling(changed(first.config, split="none"), f"{few}, and K = {K} is too short to split")


# A block of more bytes is gathered in two pieces, of twelve times as many in pieces of four times as many or more:
# where a rank has few columns its own rows are soon multiplied, and the peers' come late. A piece costs 4 us.
_GATHERED_PIECE = 16 << 20


def piece_rows(facts: Facts) -> int:
    """How many gathered rows a piece has. All ranks must agree, which may have different columns: a multiple of any
    tile's, by the size of a block."""
    rows, multiple = -(-facts.M // facts.world_size), 64 if facts.target == "cpu" else 256
    size = rows * facts.K * facts.dtype.itemsize
    pieces = 1 if size <= _GATHERED_PIECE else max(2, size // (4 * _GATHERED_PIECE))
    return -(-max(rows, 1) // (pieces * multiple)) * multiple


def sent(first: Tiling, facts: Facts) -> Tiling:
    """Whole tiles of few rows that leave as messages: equally many for each program."""
    config = first.config
    tiles = -(-facts.M // config.block_m) * -(-facts.N // config.block_n)
    if not facts.in_16_bits or facts.M > FEW_ROWS or config.split != "none" or tiles <= facts.num_sms:
        return first
    programs = balanced_programs(tiles, facts.num_sms)
    why = f"{first.why}; as many for each of {programs} programs"
    return Tiling(changed(config, num_programs=programs), why, first.estimates)


def gathered(first: Tiling, facts: Facts) -> Tiling:
    """The tile with which the GEMM of an all-gather by copy engines ends first, and its programs."""
    if not facts.in_16_bits:
        return first
    M, N, most = max(facts.M, 1), max(facts.N, 1), facts.num_sms - SPARE
    hidden, tiles = hides_gathering(M, N, facts.world_size, most)
    if hidden:
        why = f"{tiles} of the largest tiles are more than {MANY_WAVES} waves, so that waits for rows hardly count"
        config = changed(with_tile(first.config, TILES[0]), num_programs=balanced_programs(tiles, most))
        return Tiling(config, why)
    times = gathering_times(M, N, facts.K, facts.world_size, piece_rows(facts), most)
    best = times[0]
    why = f"behind rows that arrive in pieces of {piece_rows(facts)} it ends first of {len(times)}, by the model"
    config = changed(with_tile(first.config, best.tile), num_programs=best.programs)
    return Tiling(config, why, times)
