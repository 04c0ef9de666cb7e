"""All-scatter of GEMM tiles: every rank pushes its block of columns to all ranks, tile by tile.

Shape letters: M rows; N columns of one rank's block; R ranks; the result is [M, R x N] on every rank; T tiles
of [BLOCK_M, BLOCK_N] in a block.

    rank r --tile, flag arrived[r][tile]--> the result of every rank, columns [r x N, (r + 1) x N)

Placements of the tiles' consumer:
  after, beside, own_stream   the GEMM writes into this rank's result and raises local[tile] (`publish_output`);
                              `push_tiles` copies to the peers
  inside                      the GEMM's epilogue stores each tile R times (`push_output`): no copy, no second read

The result may belong to the caller: before the first push a rank waits until its peers have entered the call
(LAG = 0 in the kernel, or `signal.wait_entered`), hence are done with what the result held before. The op would wait
for them at its end anyway.

Flags: arrived[r][t] is flag number t of rank r (`signal.word`); local[t] is in a buffer of its own, since this rank
alone writes it.

No wait can deadlock: a consumer waits for local tiles of programs with lower ids, and for `arrived` only after all its
own pushes, for the same tiles that it pushed itself.

`extra` is `Columns`, OPTIONS are `Options`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pyrocshmem import signal, status, trace
from pyrocshmem.collectives.epilogue import finished, row_squares, store_block
from pyrocshmem.collectives.order import finished_tile, num_finished_tiles, tile_coords
from pyrocshmem.device import others

_OP = tl.constexpr(int(status.Op.GEMM_ALL_SCATTER))


class Columns(NamedTuple):
    """Pointers, but for stride_n, the elements from one column of the result to the next. squares, when asked for: fp32
    [R x tiles_n, M], per tile the sum over its columns of the squares of each row, before rounding."""

    results: Any
    flags: Any
    local: Any
    squares: Any
    finish: Any
    stride_n: Any


class Options(NamedTuple):
    """Constants. c_how: how the GEMM writes, ROW (a descriptor) or POINTER. rows: of a tile that a consumer copies at a
    time. beside: it runs on programs of the GEMM's launch. activation: its number."""

    c_how: int
    activation: int
    squares: bool
    rows: int
    beside: bool


@triton.jit
def _peers(pointer, context, WORLD: tl.constexpr):
    return others(pointer, tl.load(context.control + signal.RANK), context.heap_bases, WORLD)


@triton.jit
def _raise_arrived(tile, told, epoch, flags, context, WORLD: tl.constexpr):
    lanes = tl.arange(0, signal.MAX_WORLD)
    flag = signal.word(flags, tile, tl.load(context.control + signal.RANK))
    signal.publish(flag, epoch, lanes, context.heap_bases, lanes < WORLD * told)


@triton.jit
def _wait_arrived(tile, epoch, flags, context, WORLD: tl.constexpr):
    lanes = tl.arange(0, signal.MAX_WORLD)
    arrived = signal.word(flags, tile, lanes)
    signal.wait(arrived, lanes < WORLD, epoch, tile, lanes, context, _OP, WORLD)


@triton.jit
def announce_output(
    tile, told, epoch, extra, context, problem, WORLD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Announcement: raise the local flag of a tile that `publish_output` has stored."""
    one = tl.arange(0, 1)
    rank = tl.load(context.control + signal.RANK)
    signal.publish(extra.local + tile + one, epoch, rank, context.heap_bases, one < told, "gpu")


@triton.jit
def publish_output(
    parts, tile, row, row_end, tile_n, epoch, c, extra, context, problem,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Epilogue: the tile into this rank's result. `c` is its own block of columns."""
    M, N = problem.M, problem.N
    PART_N: tl.constexpr = BLOCK_N // len(parts)
    sums = tl.zeros((BLOCK_M,), tl.float32)
    for i in tl.static_range(len(parts)):
        col = tile_n * BLOCK_N + i * PART_N
        value = finished(parts[i], extra.finish, col, N, PART_N, OPTIONS.activation)
        store_block(c, row, col, value, row_end, N, N * WORLD, extra.stride_n, OPTIONS.c_how, BLOCK_M, PART_N)
        if OPTIONS.squares:
            sums += row_squares(value, col, N, PART_N)
    if OPTIONS.squares:
        rows = row + tl.arange(0, BLOCK_M)
        tl.store(extra.squares + _squares_row(tile_n, N, context, BLOCK_N) * M + rows, sums, mask=rows < M)


@triton.jit
def push_output(
    parts, tile, row, row_end, tile_n, epoch, c, extra, context, problem,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Epilogue: the tile into every rank's result, then its flags. `c` points to the own block of columns."""
    M, N = problem.M, problem.N
    PART_N: tl.constexpr = BLOCK_N // len(parts)
    places = _peers(c, context, WORLD) + (c,)
    sums = tl.zeros((BLOCK_M,), tl.float32)
    for i in tl.static_range(len(parts)):
        col = tile_n * BLOCK_N + i * PART_N
        value = finished(parts[i], extra.finish, col, N, PART_N, OPTIONS.activation)
        for k in tl.static_range(WORLD):
            store_block(
                places[k], row, col, value, row_end, N, N * WORLD, extra.stride_n, OPTIONS.c_how, BLOCK_M, PART_N
            )  # fmt: skip
        if OPTIONS.squares:
            sums += row_squares(value, col, N, PART_N)
    if OPTIONS.squares:
        rows = row + tl.arange(0, BLOCK_M)
        square_places = _peers(extra.squares, context, WORLD) + (extra.squares,)
        for k in tl.static_range(WORLD):
            tl.store(
                square_places[k] + _squares_row(tile_n, N, context, BLOCK_N) * M + rows, sums, mask=rows < M
            )
    _raise_arrived(tile, 1, epoch, extra.flags, context, WORLD)


@triton.jit
def _squares_row(tile_n, N, context, BLOCK_N: tl.constexpr):
    return tl.cast(tl.load(context.control + signal.RANK) * tl.cdiv(N, BLOCK_N) + tile_n, tl.int64)


@triton.jit
def _push_tile(
    tile, epoch, extra, context, problem, events, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Wait for a tile of this rank's result, copy it to the peers, raise their flags."""
    M, N = problem.M, problem.N
    ROWS: tl.constexpr = OPTIONS.rows
    rank = tl.load(context.control + signal.RANK)
    one = tl.arange(0, 1)
    trace.mark(events, trace.WAIT, tile)
    if signal.wait(extra.local + tile + one, one == 0, epoch, tile, rank, context, _OP, WORLD, "gpu"):
        trace.mark(events, trace.PUSH, tile)
        tile_m, tile_n = tile_coords(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), problem.group)
        block = extra.results + rank * N
        places = _peers(block, context, WORLD)
        j = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        for step in range(0, BLOCK_M // ROWS):
            i = tile_m * BLOCK_M + step * ROWS + tl.arange(0, ROWS)
            offsets = i.to(tl.int64)[:, None] * (N * WORLD) + j[None, :]
            mask = (i < M)[:, None] & (j < N)[None, :]
            value = tl.load(block + offsets, mask=mask)
            for k in tl.static_range(WORLD - 1):
                tl.store(places[k] + offsets, value, mask=mask)
        if OPTIONS.squares:
            rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            sums = extra.squares + _squares_row(tile_n, N, context, BLOCK_N) * M + rows
            value = tl.load(sums, mask=rows < M)
            square_places = _peers(sums, context, WORLD)
            for k in tl.static_range(WORLD - 1):
                tl.store(square_places[k], value, mask=rows < M)
        trace.mark(events, trace.ANNOUNCE, tile)
        _raise_arrived(tile, 1, epoch, extra.flags, context, WORLD)


@triton.jit
def push_tiles(
    epoch, extra, context, problem, events, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Consumer beside the GEMM (programs from num_gemm_programs up) or after it (all programs of its own
    launch)."""
    tiles = tl.cdiv(problem.M, BLOCK_M) * tl.cdiv(problem.N, BLOCK_N)
    first = tl.program_id(0)
    step = tl.num_programs(0)
    if OPTIONS.beside:
        first -= problem.num_gemm_programs
        step -= problem.num_gemm_programs
    if first >= 0:
        trace.mark(events, trace.WAIT, -1)
        if signal.wait_entered(epoch, context, _OP, WORLD):
            for tile in range(first, tiles, step):
                _push_tile(tile, epoch, extra, context, problem, events, WORLD, BLOCK_M, BLOCK_N, OPTIONS)
        trace.mark(events, trace.WAIT, -1)
        for tile in range(first, tiles, step):
            _wait_arrived(tile, epoch, extra.flags, context, WORLD)


@triton.jit
def await_own_tiles(
    epoch, extra, context, problem, events, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Consumer inside the GEMM's programs: wait for the peers' tiles of the same numbers as those that this program
    pushed."""
    tiles = tl.cdiv(problem.M, BLOCK_M) * tl.cdiv(problem.N, BLOCK_N)
    program = tl.program_id(0)
    split, count = num_finished_tiles(program, problem, tiles)
    trace.mark(events, trace.WAIT, -1)
    for i in range(0, count):
        _wait_arrived(finished_tile(i, split, program, problem), epoch, extra.flags, context, WORLD)
