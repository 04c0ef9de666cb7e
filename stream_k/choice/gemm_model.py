"""Which tile a product of 16-bit operands takes the least time with, alone on an sm_90: a model, fitted to readings.

Usage::

    tile, schedule = fastest_tile(M, N, K, processors=132)
    tile, programs = fastest_gathering(M, N, K, ranks=4, rows=1024, processors=128)    # behind an all-gather of A

The time of a product is that of its busiest program, or of the memory that is read and written, whichever is longer:

    start + iterations x (time of one) + tiles x (time of an end), and for a tile in parts: a fix-up, and each partial,
        or another kernel
    start + unique bytes over one rate + bytes that tiles load over another

Fitted to 2000 readings of 220 products on one H200 (2026-11-22; half of them M N K log-uniform in 128 to 8192, the
others of 96 to 8192 rows and a Llama's columns), which it misses by a sixth as a rule; what it chooses takes 1.02 times
as long as the fastest one read, what a fit to half of the products chose for the others 1.03.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyrocshmem.stream_k.local_gemm.schedule import OUT_OF_STEP, Schedule, make_schedule


@dataclass(frozen=True)
class Tile:
    """A tile and how it is run: fields of a `stream_k.Config`.

    iteration_us: of a program alone on its multiprocessor. resident: programs that a multiprocessor holds;
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


TILES = (
    Tile(128, 256, 64, 8, 4, 2, 0.613),
    Tile(64, 256, 64, 4, 5, 2, 0.362, split="none"),
    Tile(128, 128, 64, 8, 5, 1, 0.356),
    Tile(128, 128, 64, 4, 3, 2, 0.32, 2, 0.96),
    Tile(128, 64, 128, 4, 4, 1, 0.51),
    Tile(128, 64, 64, 4, 4, 1, 0.21, 2, 0.56),
    Tile(64, 128, 128, 4, 4, 1, 0.50),
    Tile(64, 128, 64, 4, 4, 1, 0.21, 2, 0.55),
    Tile(64, 64, 128, 4, 6, 1, 0.324, split="apart"),
    Tile(64, 64, 128, 4, 3, 1, 0.394, 2, 0.62),
    Tile(64, 32, 256, 4, 4, 1, 0.543),
)
# Faster than eight warps where TMA stores the result, by up to 13%; slower by pointers.
FOUR_WARPS = Tile(128, 128, 64, 4, 6, 1, 0.345, split="none")
# Of 65 to 128 rows, which are read as fast as memory answers: B comes in small steps, many of them on their way.
DEEP = Tile(64, 128, 64, 4, 8, 1, 0.25, split="none")
# Microseconds: until the first iteration; the end of a tile of 128 x 256, from the registers to memory; of a tile in
# parts, its fix-up, and of each partial what doesn't and what does grow with the tile.
_START, _END, _FIX_UP, _PARTIAL, _PARTIAL_AREA = 3.28, 4.48, 3.59, 0.5, 3.19
# What parts take that a second kernel adds.
_APART = 2.7
# Of memory: microseconds, and megabytes a microsecond from memory and from caches.
_MEMORY_START, _MEMORY, _CACHES = 1.77, 8.64, 35.67


def fastest_tile(M: int, N: int, K: int, processors: int) -> tuple[Tile, Schedule]:
    """The tile of a product [M, K] x [K, N] on so many multiprocessors, and its schedule."""
    tiles = (*TILES, FOUR_WARPS) if N % 8 == 0 else TILES
    found = [(tile, _schedule(tile, M, N, K, processors)) for tile in tiles]
    return min(found, key=lambda each: _time(each[0], each[1], M, N, K, processors))


def balanced_programs(tiles: int, processors: int) -> int:
    """The fewest programs that take as many waves as `processors` would: the others' power and bandwidth speed them
    up."""
    return -(-tiles // -(-tiles // processors))


# Of rows that copy engines bring: microseconds until the first ones move and between two copies, kilobytes in one.
_COPIES_START, _COPY_GAP, _LINK = 15.0, 4.0, 375.0
# What the end of a largest tile takes longer whose rows are not all its rank's, so that it is stored by pointers.
_POINTERS = 15.0
# Waves of the largest tile beyond which waits for rows hardly count.
_MANY_WAVES = 64
# Programs that are looked at, of all.
_SAMPLED = 16


def fastest_gathering(M: int, N: int, K: int, ranks: int, rows: int, processors: int) -> tuple[Tile, int]:
    """(the tile, the programs) with which [M, K] x [K, N] ends first where each rank has its block of the M rows, and
    the others come `rows` at a time, a block behind another.

    Every program does its tiles in turn, each when its rows are there. Of 162 readings of 24 products on 2 x H200
    (2026-11-23) the median is 5% off, and what it chooses takes 1.01 times as long as the fastest, 1.06 at worst.
    """
    found = []
    most = -(-M // ranks)
    for tile in TILES:
        tiles = ranks * -(-most // tile.block_m) * -(-N // tile.block_n)
        programs = balanced_programs(tiles, processors)
        if tile is TILES[0] and tiles > _MANY_WAVES * processors:
            return tile, programs
        if tile.resident == 1:
            found.append((_gathering_time(tile, M, N, K, ranks, rows, programs), tile, programs))
    _, tile, programs = min(found, key=lambda each: each[0])
    return tile, programs


def _gathering_time(tile: Tile, M: int, N: int, K: int, ranks: int, rows: int, programs: int) -> float:
    """Microseconds."""
    tiles_n, most = -(-N // tile.block_n), -(-M // ranks)
    block, pieces, piece = (
        -(-most // tile.block_m) * tiles_n,
        -(-most // rows),
        rows // tile.block_m * tiles_n,
    )
    copy = min(rows, most) * K * 2e-3 / _LINK + _COPY_GAP
    each = -(-K // tile.block_k) * tile.iteration_us + _END * tile.area
    if tile is TILES[0] and M % (ranks * tile.block_m) != 0:
        each += _POINTERS
    last = 0.0
    for program in {
        *range(0, programs, -(-programs // _SAMPLED)),
        programs - 1,
        (ranks * block - 1) % programs,
    }:
        now = _START
        for number in range(program, ranks * block, programs):
            turn, within = divmod(number, block)
            if turn > 0:
                now = max(now, _COPIES_START + ((turn - 1) * pieces + within // piece + 1) * copy)
            now += each
        last = max(last, now)
    return last


def _schedule(tile: Tile, M: int, N: int, K: int, processors: int) -> Schedule:
    blocks = (tile.block_m, tile.block_n, tile.block_k)
    return make_schedule(M, N, K, *blocks, tile.resident * processors, split=tile.split)


def _time(tile: Tile, schedule: Schedule, M: int, N: int, K: int, processors: int) -> float:
    """Microseconds."""
    iters = schedule.iters_per_tile
    whole = -(-schedule.whole_tiles // max(1, schedule.num_programs))
    lo, hi = schedule.program_range(0)
    iterations, ends = whole * iters + hi - lo, whole + (hi > lo)
    busy = _START + ends * _END * tile.area
    if schedule.has_shared_tiles and tile.split == "apart":
        busy += _APART
    elif schedule.has_shared_tiles:
        iterations += whole * iters // OUT_OF_STEP
        partials = schedule.num_split_programs // schedule.num_split_tiles - 1
        busy += _FIX_UP + partials * (_PARTIAL + _PARTIAL_AREA * tile.area)
    together = -(-schedule.num_programs // processors)
    busy += iterations * max(tile.iteration_us, together * tile.together_us / tile.resident)
    unique = 2e-6 * (M * K + K * N + M * N)
    loaded = 2e-6 * K * (M * schedule.tiles_n + N * schedule.tiles_m)
    memory = _MEMORY_START + unique / _MEMORY + loaded / _CACHES
    # Nearly the longer one; a little more where they are equal.
    return (busy**4 + memory**4) ** 0.25
