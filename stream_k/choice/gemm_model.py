"""With which tile a GEMM of 16-bit operands takes the least time, alone on an sm_90: a model, fitted to measurements.

Usage::

    tile, schedule = fastest_tile(M, N, K, num_sms=132)
    us, tile, programs = gathering_times(M, N, K, ranks=4, rows=1024, num_sms=128)[0]    # behind an all-gather of A

The time of a GEMM is that of its busiest program, or of the memory that is read and written, whichever is longer:

    start + iterations x (time of one) + tiles x (time of an end), and for a tile in parts: a fix-up, and each partial,
        or another kernel; of cohorts longer iterations, and what each program contributes
    start + unique bytes over one rate + bytes that tiles load over another

Times of iterations are fitted to 2000 measurements of 220 GEMMs on one H200 (2026-11-22; half of them M N K log-uniform
in 128 to 8192, the others of 96 to 8192 rows and a Llama's columns), all else to 147 layers of public models with drawn
rows, each in 28 ways, whose operands came from memory (2026-11-25). Of these the chosen way takes 1.02 times as long as
the fastest of the 28 on average, 1.08 at the 95th percentile, 1.18 at worst.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from pyrocshmem.stream_k.local_gemm.schedule import OUT_OF_STEP, Schedule, make_schedule


@dataclass(frozen=True)
class Tile:
    """A tile and how it is run: fields of a `stream_k.Config`.

    iteration_us: of a program alone on its SM. resident: programs that an SM holds;
    together_us: an iteration of all of them, when they are there. split: as of a `Config`.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    subtiles: int
    iteration_us: float
    resident: int = 1
    together_us: float = 0.0
    split: str = "auto"

    @property
    def area(self) -> float:
        """Elements, in units of the largest tile's."""
        return self.block_m * self.block_n / 32768

    def __str__(self) -> str:
        shared = f", {self.resident} an SM" if self.resident > 1 else ""
        steps = f"{self.block_m} x {self.block_n} x {self.block_k}"
        return f"{steps}, {self.num_warps} warps, {self.num_stages} stages{shared}"


TILES = (
    Tile(128, 256, 64, 8, 4, 2, 0.613),
    Tile(64, 256, 64, 4, 5, 2, 0.362, split="none"),
    Tile(128, 128, 64, 8, 5, 1, 0.356),
    Tile(128, 128, 64, 4, 3, 2, 0.32, 2, 0.96),
    Tile(128, 64, 128, 4, 4, 1, 0.51),
    Tile(128, 64, 64, 4, 4, 1, 0.21, 2, 0.56),
    Tile(64, 128, 128, 4, 4, 1, 0.50),
    Tile(64, 128, 64, 4, 4, 1, 0.21, 2, 0.55),
    Tile(64, 64, 128, 4, 6, 1, 0.324, split="separate"),
    Tile(64, 64, 128, 4, 3, 1, 0.394, 2, 0.62),
    Tile(64, 32, 256, 4, 4, 1, 0.543),
)
# Faster than eight warps where TMA stores the result, by up to 13%; slower by pointers.
FOUR_WARPS = Tile(128, 128, 64, 4, 6, 1, 0.345, split="none")
# Programs in step, where waves are part full; measured where TMA stores the result.
COHORTS = Tile(128, 256, 64, 8, 4, 2, 0.613, split="stream_k")
# Of 65 to 128 rows, which are read as fast as memory answers: B comes in small steps, many of them on their way.
DEEP = Tile(64, 128, 64, 4, 8, 1, 0.25, split="none")
# Microseconds: until the first iteration; what a tile of 128 x 256 takes besides its iterations, of which its end, from
# the registers to memory, is 2.9 for a program's last tile and 1.3 for others (docs/log.md); of a tile in parts, its
# fix-up, and of each partial what doesn't and what does grow with the tile.
_START, _END, _FIX_UP, _PARTIAL, _PARTIAL_AREA = 2.64, 5.33, 7.15, 0.54, 4.14
# What a program of a cohort contributes, a tile of 128 x 256; whole tiles take a quarter longer behind cohorts (H100).
_CONTRIBUTION, _BEHIND_COHORTS = 3.71, 4
# What parts take that a second kernel adds.
_SEPARATE = 3.79
# Of memory: microseconds, and megabytes a microsecond from memory and from caches.
_MEMORY_START, _MEMORY, _CACHES = 1.56, 9.09, 33.2


class TileTime(NamedTuple):
    """us: what the model says of a GEMM with this tile, cut by this schedule."""

    us: float
    tile: Tile
    schedule: Schedule


# What is chosen is looked up by the tile row, of any tile, in which the last row lies.
_ROWS = 64


def tile_times(M: int, N: int, K: int, num_sms: int, whole: bool = False) -> tuple[TileTime, ...]:
    """All tiles for [M, K] x [K, N] on so many SMs, the fastest first; M rounded up to whole tile rows of any tile.
    whole: none is cut."""
    return _tile_times(-(-M // _ROWS) * _ROWS, N, K, num_sms, whole)


@lru_cache(maxsize=4096)
def _tile_times(M: int, N: int, K: int, num_sms: int, whole: bool) -> tuple[TileTime, ...]:
    tiles: tuple[Tile, ...] = (*TILES, COHORTS, FOUR_WARPS) if N % 8 == 0 else TILES
    if whole:
        tiles = tuple(dict.fromkeys(replace(tile, split="none") for tile in tiles))
    found = []
    for tile in tiles:
        schedule = _schedule(tile, M, N, K, num_sms)
        found.append(TileTime(_time(tile, schedule, M, N, K, num_sms), tile, schedule))
    return tuple(sorted(found, key=lambda each: each.us))


def fastest_tile(M: int, N: int, K: int, num_sms: int) -> tuple[Tile, Schedule]:
    """The tile for [M, K] x [K, N] on so many SMs, and its schedule."""
    return tile_times(M, N, K, num_sms)[0][1:]


def balanced_programs(tiles: int, num_sms: int) -> int:
    """The fewest programs that take as many waves as `num_sms` would: the others' power and bandwidth speed them
    up."""
    return -(-tiles // -(-tiles // num_sms))


# Of rows that copy engines bring: microseconds until the first ones move and between two copies, kilobytes in one; and
# of the GEMM behind them, what _START and _END are of one alone.
_COPIES_START, _COPY_GAP, _LINK = 15.0, 4.0, 375.0
_GATHERS_START, _GATHERS_END = 3.28, 4.48
# What the end of a largest tile takes longer that is stored by pointers, where ranks have unequal rows.
_POINTERS = 15.0
# Waves of the largest tile beyond which waits for rows hardly count.
MANY_WAVES = 64
# Programs that are looked at, of all.
_SAMPLED = 16


class GatheringTime(NamedTuple):
    """us: what the model says of a GEMM behind an all-gather with this tile and so many programs."""

    us: float
    tile: Tile
    programs: int


def hides_gathering(M: int, N: int, ranks: int, num_sms: int) -> tuple[bool, int]:
    """(whether the GEMM has so many waves of the largest tile that waits for rows hardly count, those tiles)."""
    tiles = _blocks_tiles(TILES[0], M, N, ranks)
    return tiles > MANY_WAVES * num_sms, tiles


def gathering_times(M: int, N: int, K: int, ranks: int, rows: int, num_sms: int) -> tuple[GatheringTime, ...]:
    """Tiles and programs for [M, K] x [K, N], the one that ends first at the front, where each rank has its block of
    the M rows, and the others come `rows` at a time, a block behind another.

    Every program does its tiles in turn, each when its rows are there. Of 162 measurements of 24 GEMMs on 2 x H200
    (2026-11-23) the median is 5% off, and what it chooses takes 1.01 times as long as the fastest, 1.06 at worst. A
    rank's rows are rounded up to whole tile rows of any tile.
    """
    most = -(-M // (ranks * _ROWS)) * _ROWS
    return _gathering_times(ranks * most, N, K, ranks, rows, num_sms, M % ranks == 0)


@lru_cache(maxsize=4096)
def _gathering_times(
    M: int, N: int, K: int, ranks: int, rows: int, num_sms: int, equal: bool
) -> tuple[GatheringTime, ...]:
    found = []
    for tile in TILES:
        if tile.resident == 1:
            programs = balanced_programs(_blocks_tiles(tile, M, N, ranks), num_sms)
            us = _gathering_time(tile, M, N, K, ranks, rows, programs, equal)
            found.append(GatheringTime(us, tile, programs))
    return tuple(sorted(found, key=lambda each: each.us))


def _blocks_tiles(tile: Tile, M: int, N: int, ranks: int) -> int:
    """Tiles of a block of rows a rank, where each block begins with a tile of its own."""
    largest = -(-M // ranks)
    return ranks * -(-largest // tile.block_m) * -(-N // tile.block_n)


def _gathering_time(
    tile: Tile, M: int, N: int, K: int, ranks: int, rows: int, programs: int, equal: bool
) -> float:
    """Microseconds. equal: whether ranks have equally many rows."""
    tiles_n, most = -(-N // tile.block_n), -(-M // ranks)
    block, pieces, piece = (
        -(-most // tile.block_m) * tiles_n,
        -(-most // rows),
        rows // tile.block_m * tiles_n,
    )
    copy = min(rows, most) * K * 2e-3 / _LINK + _COPY_GAP
    each = -(-K // tile.block_k) * tile.iteration_us + _GATHERS_END * tile.area
    if tile is TILES[0] and not equal:
        each += _POINTERS
    last = 0.0
    for program in {
        *range(0, programs, -(-programs // _SAMPLED)),
        programs - 1,
        (ranks * block - 1) % programs,
    }:
        now = _GATHERS_START
        for number in range(program, ranks * block, programs):
            turn, within = divmod(number, block)
            if turn > 0:
                now = max(now, _COPIES_START + ((turn - 1) * pieces + within // piece + 1) * copy)
            now += each
        last = max(last, now)
    return last


def _schedule(tile: Tile, M: int, N: int, K: int, num_sms: int) -> Schedule:
    blocks = (tile.block_m, tile.block_n, tile.block_k)
    return make_schedule(M, N, K, *blocks, tile.resident * num_sms, split=tile.split)


def _time(tile: Tile, schedule: Schedule, M: int, N: int, K: int, num_sms: int) -> float:
    """Microseconds."""
    iters = schedule.iters_per_tile
    whole = -(-schedule.whole_tiles // max(1, schedule.num_programs))
    lo, hi = schedule.program_range(0)
    iterations, ends = float(whole * iters + hi - lo), whole + (hi > lo)
    busy = _START + ends * _END * tile.area
    if schedule.has_shared_tiles and tile.split == "separate":
        busy += _SEPARATE
    elif schedule.has_shared_tiles:
        partials = -(-schedule.num_cohorts // schedule.num_columns) - 1
        if schedule.kind == "stream_k":
            iterations += whole * iters // _BEHIND_COHORTS + (hi - lo) * schedule.slower_in_step
            partials = max(partials, 1)
            busy += _CONTRIBUTION * tile.area
        else:
            iterations += whole * iters // OUT_OF_STEP
        busy += _FIX_UP + partials * (_PARTIAL + _PARTIAL_AREA * tile.area)
    together = -(-schedule.num_programs // num_sms)
    busy += iterations * max(tile.iteration_us, together * tile.together_us / tile.resident)
    unique = 2e-6 * (M * K + K * N + M * N)
    loaded = 2e-6 * K * (M * schedule.tiles_n + N * schedule.tiles_m)
    memory = _MEMORY_START + unique / _MEMORY + loaded / _CACHES
    # Nearly the longer one; a little more where they are equal.
    return (busy**4 + memory**4) ** 0.25
