"""The persistent Stream-K GEMM kernel.

Shape letters: A [M, K], B [K, N]; P programs; T tiles [BLOCK_M, BLOCK_N], of which the first T_s are split.
Algorithm: Stream-K (Osama et al., PPoPP 2023), docs/schedule.md.

A program first does its share of the split tiles (`stream_k.local_gemm.schedule` has the closed form and its tests), in
step with the other programs of its cohort: at most one segment that contributes, whose fp32 partial goes to the
program's own workspace tile, then the segments that finish a tile, to which it adds the partials of lower-numbered
programs in ascending order, so that the bits are the same on every run. Then it does whole tiles, P apart. Split tiles
come first so that contributors are busy with whole ones while a finisher waits (3 to 5 us). With SEPARATE every segment
is left in the workspace, for `stream_k.local_gemm.sum_of_parts` to add.

A finished tile goes to EPILOGUE, which stores it, and then to ANNOUNCE, which raises the flag that somebody waits for;
when a program has done all its tiles, it runs CONSUMER. All three are jit functions handed over as constexprs;
ANNOUNCE may be None:

    EPILOGUE(parts, tile, row, row_end, tile_n, epoch, c, extra, context, problem,
             WORLD, BLOCK_M, BLOCK_N, OPTIONS)
    ANNOUNCE(tile, told, epoch, extra, context, problem, WORLD, BLOCK_M, BLOCK_N, OPTIONS)
    CONSUMER(epoch, extra, context, problem, events, WORLD, BLOCK_M, BLOCK_N, OPTIONS)

  parts     SUBTILES fp32 blocks [BLOCK_M, BLOCK_N / SUBTILES] of the tile, left to right
  row       row of `c` where the tile starts; rows from `row_end` on are not this tile's
  epoch     the number of the call, to which flags are raised
  c         the output, a descriptor or a pointer
  extra     pointers and integers that the three functions understand: a NamedTuple of theirs
  context   a `pyrocshmem.signal.Context`
  problem   a `collectives.order.Problem`
  events    what `pyrocshmem.trace` marks, or None
  told      1; 0 where there is no tile to announce yet
  OPTIONS   constants: a NamedTuple of theirs

A whole tile is announced one tile late: by then its stores have long been done and waiting for them costs nothing.
Programs from `num_gemm_programs` up have no tiles: that is where a consumer beside the GEMM runs.

Tiles are done from the first row to the last, or in one of three other orders (`collectives.order` has the row blocks):
  PEERS      the peers' row blocks, the neighbour's first; `c` has R - 1 blocks of whole tiles
  GATHERS    this rank's row block, from `a`, then the peers', from `gathered`, in pieces of some tile rows, each as
             soon as its flag is up. `arrived` is an `Arrived`; word p of a peer's flags is for its piece p. The result
             has the rows of all ranks
  SUMS       this rank's row block, whose epilogue waits for the peers' partials and adds them. The launch follows the
             PEERS launch, continues its tile numbers, and begins before that one ends

Measured (sm_90, Triton 3.6, 2026-11-21): 128 x 256 x 64, 8 warps, 4 stages, two sub-tiles, FLATTEN: 165
registers, 229,408 B of shared memory, 625 us against cuBLAS' 630 at 8192 x 8192 x 3584. With SPLIT the fp32
fix-up needs four sub-tiles to fit beside the stages.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pyrocshmem import counts, dependent_launch, signal, status, trace
from pyrocshmem.collectives.order import (
    block_size,
    block_start,
    block_tiles,
    cohort_of,
    first_whole,
    peer_row,
    program_range,
    tile_coords,
    unpacked,
)
from pyrocshmem.stream_k.local_gemm.mainloop import Strides, multiply, split_columns

_FIX_UP = tl.constexpr(int(status.Op.FIX_UP))


class Arrived(NamedTuple):
    """What tells that gathered rows are there: `flags`, a word for each piece, of `height` tile rows, packed. The
    others: as in `Strides`, of rows that have scales."""

    flags: Any
    height: Any
    scale_a: Any = None
    scale_am: Any = None
    scale_ak: Any = None


@triton.jit
def _add_partials(
    parts, first, last, step, epoch, tile, workspace, fix_up_flags, context, events,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """`parts` plus the workspace tiles of programs first, first + step, .. below `last`, in that order, once each has
    raised its flag."""
    PART_N: tl.constexpr = BLOCK_N // SUBTILES
    lanes = tl.arange(0, 32)
    trace.mark(events, trace.WAIT, tile)
    for begin in tl.range(first, last, 32 * step, num_stages=1):
        programs = begin + lanes * step
        signal.wait(
            fix_up_flags + programs, programs < last, epoch, tile, programs, context, _FIX_UP, WORLD, "gpu"
        )
    trace.mark(events, trace.FIX_UP, tile)
    sums = ()
    for part in tl.static_range(SUBTILES):
        total = parts[part]
        # Several loads on their way: there is room for them where the stages of the main loop were.
        for program in tl.range(first, last, step, num_stages=3):
            total += workspace.load([program * BLOCK_M, part * PART_N])
        sums = sums + (total,)  # type: ignore[assignment]
    return sums


@triton.jit
def nothing(
    epoch, extra, context, problem, events, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """The CONSUMER of a GEMM without one."""


@triton.jit
def _rows_of(tile_m, rank, M, PEERS: tl.constexpr, WORLD: tl.constexpr, BLOCK_M: tl.constexpr):
    """(row of A, row of C) where tile row `tile_m` starts."""
    row = tile_m * BLOCK_M
    row_c = row
    if PEERS:
        row = peer_row(tile_m, rank, M, WORLD, BLOCK_M)
    return row, row_c


@triton.jit
def _leave_partial(parts, workspace, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile's `parts` to this program's workspace tile."""
    PART_N: tl.constexpr = BLOCK_N // len(parts)
    for part in tl.static_range(len(parts)):
        workspace.store([tl.program_id(0) * BLOCK_M, part * PART_N], parts[part])


@triton.jit
def _split_tiles(
    a, b, c, workspace, fix_up_flags, epoch, rank, tiles_m, c_end, extra, context, problem, strides, events,
    EPILOGUE: tl.constexpr, ANNOUNCE: tl.constexpr, OPTIONS: tl.constexpr, PEERS: tl.constexpr,
    WORLD: tl.constexpr,
    A_HOW: tl.constexpr, B_HOW: tl.constexpr, ALONG: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SUBTILES: tl.constexpr, SEPARATE: tl.constexpr,
):  # fmt: skip
    """This program's share of the split tiles, last tile first."""
    iterations = problem.iterations
    program = tl.program_id(0)
    tiles_n = tl.cdiv(problem.N, BLOCK_N)
    lo, hi = program_range(program, problem)
    last = (hi - 1) // iterations
    for i in tl.range(0, last - lo // iterations + 1, num_stages=1):
        column = last - i
        tile = column * problem.cohort + program % problem.cohort
        k_begin = max(lo - column * iterations, 0)
        k_end = min(hi - column * iterations, iterations)
        tile_m, tile_n = tile_coords(tile, tiles_m, tiles_n, problem.group)
        row, row_c = _rows_of(tile_m, rank, problem.M, PEERS, WORLD, BLOCK_M)
        trace.mark(events, trace.MMA, tile)
        acc = multiply(
            a, b, row, problem.M, tile_n, k_begin, k_end, problem, strides, A_HOW, B_HOW, ALONG,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        parts = split_columns(acc, BLOCK_M, BLOCK_N, SUBTILES)
        if SEPARATE:
            trace.mark(events, trace.STORE, tile)
            _leave_partial(parts, workspace, BLOCK_M, BLOCK_N)
        elif k_end < iterations:
            trace.mark(events, trace.FIX_UP, tile)
            _leave_partial(parts, workspace, BLOCK_M, BLOCK_N)
            signal.settle()
            signal.raise_flag(fix_up_flags + program, epoch, scope="gpu")
        else:
            first = cohort_of(column * iterations, problem) * problem.cohort + program % problem.cohort
            parts = _add_partials(
                parts, first, program, problem.cohort, epoch, tile, workspace, fix_up_flags, context, events,
                WORLD, BLOCK_M, BLOCK_N, SUBTILES,
            )  # fmt: skip
            trace.mark(events, trace.STORE, tile)
            EPILOGUE(
                parts, tile, row_c, c_end, tile_n, epoch, c, extra, context, problem, WORLD, BLOCK_M, BLOCK_N,
                OPTIONS,
            )  # fmt: skip
            if ANNOUNCE is not None:
                trace.mark(events, trace.ANNOUNCE, tile)
                ANNOUNCE(tile, 1, epoch, extra, context, problem, WORLD, BLOCK_M, BLOCK_N, OPTIONS)


@triton.jit
def _whole_tiles(
    a, b, c, begin, first, end, tiles_m, a_row, a_rows, c_row, c_end, rank, epoch, extra, context, problem,
    strides, events,
    EPILOGUE: tl.constexpr, ANNOUNCE: tl.constexpr, OPTIONS: tl.constexpr, PEERS: tl.constexpr,
    WORLD: tl.constexpr,
    A_HOW: tl.constexpr, B_HOW: tl.constexpr, ALONG: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SUBTILES: tl.constexpr,
):  # fmt: skip
    """Whole tiles `first`, `first` + P, .. below `end`, of a block of rows whose first tile is number `begin`.

    The block has `tiles_m` tile rows. It starts at row `a_row` of `a`, which has `a_rows` rows, and covers rows
    [`c_row`, `c_end`) of C.
    """
    num_gemm_programs = problem.num_gemm_programs
    tiles_n = tl.cdiv(problem.N, BLOCK_N)
    # A program announces its last two tiles at once, and all of them where it has eight or fewer.
    prompt = tl.where(end - begin <= 8 * num_gemm_programs, 8, 2) * num_gemm_programs
    trace.mark(events, trace.MMA, first, first < end)
    for tile in tl.range(first, end, num_gemm_programs, flatten=FLATTEN):
        tile_m, tile_n = tile_coords(tile - begin, tiles_m, tiles_n, problem.group)
        row, row_c = _rows_of(tile_m, rank, problem.M, PEERS, WORLD, BLOCK_M)
        acc = multiply(
            a, b, a_row + row, a_rows, tile_n, 0, problem.iterations, problem, strides, A_HOW, B_HOW, ALONG,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        parts = split_columns(acc, BLOCK_M, BLOCK_N, SUBTILES)
        if ANNOUNCE is not None:
            before = tile - num_gemm_programs
            late = (before >= first) & (before + prompt < end)
            trace.mark(events, trace.ANNOUNCE, before, late)
            ANNOUNCE(before, late, epoch, extra, context, problem, WORLD, BLOCK_M, BLOCK_N, OPTIONS)
        trace.mark(events, trace.STORE, tile)
        EPILOGUE(
            parts, tile, c_row + row_c, c_end, tile_n, epoch, c, extra, context, problem, WORLD, BLOCK_M, BLOCK_N,
            OPTIONS,
        )  # fmt: skip
        if ANNOUNCE is not None:
            if tile + prompt >= end:
                trace.mark(events, trace.ANNOUNCE, tile)
                ANNOUNCE(tile, 1, epoch, extra, context, problem, WORLD, BLOCK_M, BLOCK_N, OPTIONS)
        # Here, not at the top, where it would move ahead of the tile before with the loads.
        following = tile + num_gemm_programs
        trace.mark(events, trace.MMA, following, following < end)


@triton.jit
def run_program(
    a, gathered, b, c, workspace, fix_up_flags, arrived, extra, context, problem, strides, events,
    EPILOGUE: tl.constexpr, ANNOUNCE: tl.constexpr, CONSUMER: tl.constexpr, OPTIONS: tl.constexpr,
    OP: tl.constexpr, WORLD: tl.constexpr,
    LAG: tl.constexpr, ENDS: tl.constexpr, PEERS: tl.constexpr, GATHERS: tl.constexpr, SUMS: tl.constexpr,
    SPLIT: tl.constexpr, SEPARATE: tl.constexpr, A_HOW: tl.constexpr, B_HOW: tl.constexpr, ALONG: tl.constexpr,
    FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SUBTILES: tl.constexpr,
):  # fmt: skip
    """One program of the schedule; the module's docstring has the arguments.

    LAG: how many calls a peer may be behind when this launch starts to write: it waits until every peer has entered
    call `epoch` - LAG. 1 where what it writes alternates between two slots, 0 where there is one; negative: no wait.
    ENDS: this launch closes the call. OP: a `status.Op`, for the record of a wait that gave up. a, b, A_HOW, B_HOW,
    strides: see `stream_k.local_gemm.mainloop`. workspace, fix_up_flags: a tile and a flag for each program's
    partial. SEPARATE: all tiles are split, and nobody finishes them here (`stream_k.local_gemm.sum_of_parts`).

    Example, P = 2, four tiles of 3 iterations, the first two split among two cohorts of one, 3 iterations each:
    program 0 does tile 0, then tile 2; program 1 does tile 1, then tile 3. With three split tiles (9
    iterations: 5 and 4) program 0 first leaves the first two iterations of tile 1 in its workspace, then does
    tile 0; program 1 does tile 2, then the last iteration of tile 1 and adds program 0's.
    """
    if not SUMS:
        # Before `begin` lets the next kernel start, which may count on what came before this one: see `chain`.
        dependent_launch.wait_for_previous()
    M, num_gemm_programs = problem.M, problem.num_gemm_programs
    program = tl.program_id(0)
    rank = tl.load(context.control + signal.RANK)
    tiles_n = tl.cdiv(problem.N, BLOCK_N)
    tiles_m = tl.cdiv(M, BLOCK_M)
    c_end = M
    if PEERS or SUMS:
        tiles_m = (WORLD - 1) * block_tiles(M, WORLD, BLOCK_M)
        c_end = tiles_m * BLOCK_M
    # Programs of a single rank are counted, too, where a gate waits for them; those of a product alone (LAG < 0) never.
    epoch = signal.begin(context, (WORLD > 1 and not SUMS) or (LAG >= 0 and not ENDS), WORLD)
    may_write = program >= 0
    if LAG >= 0:
        trace.mark(events, trace.WAIT, -1)
        may_write = signal.wait_entered(epoch - LAG, context, OP, WORLD)

    if SPLIT:
        if may_write & (program < problem.num_split_programs):
            _split_tiles(
                a, b, c, workspace, fix_up_flags, epoch, rank, tiles_m, c_end, extra, context, problem, strides, events,
                EPILOGUE, ANNOUNCE, OPTIONS, PEERS, WORLD, A_HOW, B_HOW, ALONG,
                BLOCK_M, BLOCK_N, BLOCK_K, SUBTILES, SEPARATE,
            )  # fmt: skip

    first = program
    if SPLIT:
        first = first_whole(program, problem)
    if GATHERS:
        tiles_m = block_tiles(M, WORLD, BLOCK_M)
        end = tiles_m * tiles_n
        start = block_start(rank, M, WORLD)
        size = block_size(rank, M, WORLD)
        if may_write & (program < num_gemm_programs):
            _whole_tiles(
                a, b, c, 0, first, end, tiles_m, 0, size, start, start + size, rank, epoch, extra, context,
                problem, strides, events, EPILOGUE, ANNOUNCE, OPTIONS, 0, WORLD, A_HOW, B_HOW, ALONG, FLATTEN,
                BLOCK_M, BLOCK_N, BLOCK_K, SUBTILES,
            )  # fmt: skip
            theirs = strides
            if arrived.scale_a is not None:
                theirs = Strides(
                    strides.am, strides.ak, strides.bk, strides.bn, arrived.scale_a, strides.scale_b, arrived.scale_am,
                    arrived.scale_ak, strides.scale_bk, strides.scale_bn,
                )  # fmt: skip
            one = tl.arange(0, 1)
            height = counts.unpacked(arrived.height)  # no constant: it changes with M
            pieces = tl.cdiv(tiles_m, height)
            for step in range(pieces, WORLD * pieces):
                block = (rank + step // pieces) % WORLD
                piece = step % pieces
                begin = step // pieces * end + piece * height * tiles_n
                flag = signal.word(arrived.flags, piece, block + one)
                trace.mark(events, trace.WAIT, begin)
                if signal.wait(flag, one == 0, epoch, begin, block, context, OP, WORLD):
                    start = block_start(block, M, WORLD)
                    row_end = start + block_size(block, M, WORLD)
                    start += piece * height * BLOCK_M
                    piece_m = min(tiles_m - piece * height, height)
                    turn = program + tl.cdiv(max(begin - program, 0), num_gemm_programs) * num_gemm_programs
                    _whole_tiles(
                        gathered, b, c, begin, turn, begin + piece_m * tiles_n, piece_m, start, M, start, row_end, rank,
                        epoch, extra, context, problem, theirs, events, EPILOGUE, ANNOUNCE, OPTIONS, 0, WORLD, A_HOW,
                        B_HOW, ALONG, FLATTEN, BLOCK_M, BLOCK_N, BLOCK_K, SUBTILES,
                    )  # fmt: skip
    elif SUMS:
        begin = tiles_m * tiles_n
        own_tiles_m = block_tiles(M, WORLD, BLOCK_M)
        _whole_tiles(
            a, b, c, begin, begin + program, begin + own_tiles_m * tiles_n, own_tiles_m, block_start(rank, M, WORLD),
            M, 0, block_size(rank, M, WORLD), rank, epoch, extra, context, problem, strides, events, EPILOGUE,
            ANNOUNCE, OPTIONS, 0, WORLD, A_HOW, B_HOW, ALONG, FLATTEN, BLOCK_M, BLOCK_N, BLOCK_K, SUBTILES,
        )  # fmt: skip
    elif may_write & (program < num_gemm_programs):
        _whole_tiles(
            a, b, c, 0, first, tiles_m * tiles_n, tiles_m, 0, M, 0, c_end, rank, epoch, extra, context,
            problem, strides, events, EPILOGUE, ANNOUNCE, OPTIONS, PEERS, WORLD, A_HOW, B_HOW, ALONG, FLATTEN,
            BLOCK_M, BLOCK_N, BLOCK_K, SUBTILES,
        )  # fmt: skip

    CONSUMER(epoch, extra, context, problem, events, WORLD, BLOCK_M, BLOCK_N, OPTIONS)
    if SUMS:
        # What follows on the stream counts on both launches.
        dependent_launch.wait_for_previous()
    if ENDS:
        signal.end(context, epoch)
    trace.mark(events, trace.END, -1)


@triton.jit
def stream_k_kernel(
    a, gathered, b, c, workspace, fix_up_flags, arrived, extra, context, problem, strides, events,
    EPILOGUE: tl.constexpr, ANNOUNCE: tl.constexpr, CONSUMER: tl.constexpr, OPTIONS: tl.constexpr,
    OP: tl.constexpr, WORLD: tl.constexpr,
    LAG: tl.constexpr, ENDS: tl.constexpr, PEERS: tl.constexpr, GATHERS: tl.constexpr, SUMS: tl.constexpr,
    SPLIT: tl.constexpr, SEPARATE: tl.constexpr, A_HOW: tl.constexpr, B_HOW: tl.constexpr, ALONG: tl.constexpr,
    FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SUBTILES: tl.constexpr,
):  # fmt: skip
    """`run_program`, of a problem that comes packed."""
    run_program(
        a, gathered, b, c, workspace, fix_up_flags, arrived, extra, context, unpacked(problem), strides, events,
        EPILOGUE, ANNOUNCE, CONSUMER, OPTIONS, OP, WORLD, LAG, ENDS, PEERS, GATHERS, SUMS, SPLIT, SEPARATE, A_HOW,
        B_HOW, ALONG, FLATTEN, BLOCK_M, BLOCK_N, BLOCK_K, SUBTILES,
    )  # fmt: skip
