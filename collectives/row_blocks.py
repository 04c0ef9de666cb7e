"""What runs beside a GEMM whose tiles or operands copy engines move: blocks of rows, or of columns.

Shape letters: M N of the whole result; R ranks. The M rows are cut into R blocks (`collectives.order`), block q
belongs to rank q. A step is some tile rows of a block, which are copied at a time.

Copies are commands of a stream. What they wait for and what they announce is done by `step_kernel`, one small program
between them, so that waits have a budget and watch the abort word here too. It needs no multiprocessor of its own:
either a GEMM's program leaves room for it, or a multiprocessor is free.

    reduce-scatter, all-reduce
    1. GEMM of the peers' rows        --tile flags-->     2.
    2. step_kernel, then copies of a step's partial rows to their owner
                                      --partial flags-->  3. at the owner
    3. GEMM of this rank's rows, with epilogue `sum_rows`: when the partials of a tile have come, rounds its own as
       they are, sums all in fp32 (`pair_sums`), adds the bias, activates, adds the residual; into the result or, in an
       all-reduce, into `sums`
                                      --tile flags-->     4.
    4. all-reduce: step_kernel        --sum flags-->      4. at every rank
       then copies of the step's sums of all ranks into this rank's result

    all-scatter, which has no row blocks: N columns a rank, in steps of tile rows
    1. GEMM                           --tile flags-->     2.
    2. step_kernel                    --flags-->          2. at every rank
       then copies of the step's columns of all ranks into this rank's result

Instead of copies, `pull_kernel` can fetch columns, by programs on multiprocessors of their own.

Nothing deadlocks, even on streams that share a hardware queue: what a stream waits for was enqueued before it, and at
the peers likewise. The first GEMM waits for nobody; copies wait for it, the second GEMM for the peers' copies. A step
of sums or columns waits for the same step of the peers, and announces its own before.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pyrocshmem import signal, trace
from pyrocshmem.calls.tensors import POINTER
from pyrocshmem.collectives import pair_sums
from pyrocshmem.collectives.epilogue import (
    Output,
    add_residual,
    finished,
    partial_sum,
    store_block,
    store_output,
)
from pyrocshmem.collectives.order import block_start, block_tiles
from pyrocshmem.counts import unpacked
from pyrocshmem.device import remote

_LANES = tl.constexpr(256)
_POINTER = tl.constexpr(POINTER)


class PeersRows(NamedTuple):
    """`extra` of `store_rows`. tile_flags: a flag for each tile, for this rank's own streams. finish: of partial tiles,
    hence without a bias, a residual and an activation."""

    tile_flags: Any
    finish: Any


class OwnRows(NamedTuple):
    """`extra` of `sum_rows`. flags: a word for every `step_tiles` tiles packed, raised by each peer. partials: a block
    of rows for each peer, that of the rank before this one first. The residual of `finish` has the rows of all ranks.
    stride_m, stride_n: of the result."""

    tile_flags: Any
    flags: Any
    step_tiles: Any
    partials: Any
    finish: Any
    stride_m: Any
    stride_n: Any


class OwnColumns(NamedTuple):
    """`extra` of `store_columns`."""

    tile_flags: Any
    finish: Any


class SumOptions(NamedTuple):
    """OPTIONS of `sum_rows`. c_how: how the result is written. activation: its number. op: a `status.Op`."""

    c_how: int
    activation: int
    op: int


@triton.jit
def store_rows(
    parts, tile, row, row_end, tile_n, epoch, c, extra, context, problem,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Epilogue: the partial tile into this rank's rows for a peer. `extra` is `PeersRows`, OPTIONS are
    `epilogue.Options`."""
    N = problem.N
    PART_N: tl.constexpr = BLOCK_N // len(parts)
    DTYPE: tl.constexpr = c.dtype.element_ty if OPTIONS.c_how == _POINTER else c.dtype
    for i in tl.static_range(len(parts)):
        col, value = tile_n * BLOCK_N + i * PART_N, partial_sum(parts[i], DTYPE)
        store_block(c, row, col, value, row_end, N, N, 1, OPTIONS.c_how, BLOCK_M, PART_N)


@triton.jit
def store_columns(
    parts, tile, row, row_end, tile_n, epoch, c, extra, context, problem,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Epilogue: the finished tile into this rank's columns. `extra` is `OwnColumns`, OPTIONS are
    `epilogue.Options`."""
    output = Output(extra.finish, problem.N, 1)
    store_output(
        parts, tile, row, row_end, tile_n, epoch, c, output, context, problem, WORLD, BLOCK_M, BLOCK_N, OPTIONS
    )  # fmt: skip


@triton.jit
def _came(
    tile, epoch, flags, step_tiles, context, problem, OP: tl.constexpr, WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Wait for the peers' partials of the rows of tile number `tile`, one of this rank's. False: gave up, or a peer
    has."""
    number = tile - (WORLD - 1) * block_tiles(problem.M, WORLD, BLOCK_M) * tl.cdiv(problem.N, BLOCK_N)
    before = number - problem.num_gemm_programs
    step = number // step_tiles
    came = number >= 0
    if (before < 0) | (before // step_tiles != step):
        # The first tile of the step that this program does: what it acquires holds for the others.
        lanes = tl.arange(0, signal.MAX_WORLD)
        peers = (lanes < WORLD) & (lanes != tl.load(context.control + signal.RANK))
        came = signal.wait(signal.word(flags, step, lanes), peers, epoch, tile, lanes, context, OP, WORLD)
    # After the flags: a peer that gives up still sends what it has, but sets the abort word first.
    return came & (signal.load_now(context.abort) == 0)


@triton.jit
def _sent(
    partials, peer, rank, row, col, N, height, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr
):
    """Block [BLOCK_M, WIDTH] at (row, col) of this rank's rows, of the partials that peer number `peer` sent, the peers
    being counted in rank order."""
    source = peer + tl.where(peer < rank, 0, 1)
    turn = (rank - source + WORLD - 1) % WORLD
    # Only the last term differs from peer to peer, so that the others take registers once.
    place = partials + (tl.cast(row, tl.int64) * N + col) + turn * (tl.cast(height, tl.int64) * N)
    j = tl.arange(0, WIDTH)
    return tl.load(
        place + tl.arange(0, BLOCK_M)[:, None] * N + j[None, :], mask=(col + j < N)[None, :], other=0.0
    )


@triton.jit
def _in_rank_order(own, blocks, rank, WORLD: tl.constexpr):
    """Terms of all ranks: this rank's `own`, and the `blocks` of the others."""
    terms = ()
    for source in tl.static_range(WORLD):
        term = own
        if source < WORLD - 1:
            term = tl.where(rank > source, blocks[source], term)
        if source > 0:
            term = tl.where(rank < source, blocks[source - 1], term)
        terms = terms + (term,)  # type: ignore[assignment]
    return terms


@triton.jit
def over_ranks(
    own, partials, rank, row, col, N, height, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr
):
    """The sum in fp32 of `own`, a block [BLOCK_M, WIDTH] at (row, col) of this rank's rows, and of what the peers have
    there. partials, of `height` rows a peer: as in `OwnRows`."""
    blocks = ()
    for peer in tl.static_range(WORLD - 1):
        block = _sent(partials, peer, rank, row, col, N, height, WORLD, BLOCK_M, WIDTH)
        blocks = blocks + (block,)  # type: ignore[assignment]
    return pair_sums.of_terms(_in_rank_order(own, blocks, rank, WORLD))


@triton.jit
def sum_rows(
    parts, tile, row, row_end, tile_n, epoch, c, extra, context, problem,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Epilogue: wait for the peers' partials of the tile's rows, and sum them and the tile, rounded as they are, in
    fp32 (`pair_sums`), into this rank's rows. Writes nothing once a wait has given up. `extra` is `OwnRows`, OPTIONS
    are `SumOptions`."""
    M, N, partials = problem.M, problem.N, extra.partials
    PART_N: tl.constexpr = BLOCK_N // len(parts)
    rank = tl.load(context.control + signal.RANK)
    residual = extra.finish.residual
    if residual is not None:
        residual += tl.cast(block_start(rank, M, WORLD), tl.int64) * N
    came = _came(
        tile, epoch, extra.flags, unpacked(extra.step_tiles), context, problem, OPTIONS.op, WORLD, BLOCK_M, BLOCK_N
    )  # fmt: skip
    row_end = tl.where(came, row_end, 0)
    height = block_tiles(M, WORLD, BLOCK_M) * BLOCK_M
    for part in tl.static_range(len(parts)):
        col = tile_n * BLOCK_N + part * PART_N
        own = partial_sum(parts[part], partials.dtype.element_ty)
        total = over_ranks(own, partials, rank, row, col, N, height, WORLD, BLOCK_M, PART_N)
        total = finished(total, extra.finish, col, N, PART_N, OPTIONS.activation)
        total = add_residual(total, residual, row, row_end, col, N, BLOCK_M, PART_N)
        store_block(
            c, row, col, total, row_end, N, extra.stride_m, extra.stride_n, OPTIONS.c_how, BLOCK_M, PART_N
        )  # fmt: skip


@triton.jit
def announce_rows(
    tile, told, epoch, extra, context, problem, WORLD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Announcement: raise the flag of a tile, for this rank's own streams."""
    one = tl.arange(0, 1)
    rank = tl.load(context.control + signal.RANK)
    signal.publish(extra.tile_flags + tile + one, epoch, rank, context.heap_bases, one < told, "gpu")


@triton.jit
def _raise_word(flags, raised, receivers, epoch, context, events):
    """Raise word number `raised` at the ranks whose bits are set in `receivers`."""
    if receivers != 0:
        lanes = tl.arange(0, signal.MAX_WORLD)
        rank = tl.load(context.control + signal.RANK)
        trace.mark(events, trace.ANNOUNCE, raised)
        signal.publish(
            signal.word(flags, raised, rank), epoch, lanes, context.heap_bases, ((receivers >> lanes) & 1) == 1
        )  # fmt: skip


@triton.jit(do_not_specialize=["raised", "receivers", "first", "last", "awaited", "senders"])
def step_kernel(
    flags, tile_flags, raised, receivers, first, last, awaited, senders, context, events,
    OP: tl.constexpr, WORLD: tl.constexpr, ENTERS: tl.constexpr, ENDS: tl.constexpr, BETWEEN: tl.constexpr,
):  # fmt: skip
    """One program between two commands of a stream: announces what came before it, waits for what the next one needs.

    In this order: raises word number `raised` of `flags` at the ranks whose bits are set in `receivers`; waits for this
    rank's tiles [first, last); waits for word number `awaited` of the ranks whose bits are set in `senders`. ENTERS:
    enters the call, and waits until every peer has, before it waits for tiles. BETWEEN: raises the word only after the
    tiles have come. ENDS: closes the call.
    """
    rank = tl.load(context.control + signal.RANK)
    epoch = signal.begin(context, ENTERS, WORLD)
    lanes = tl.arange(0, signal.MAX_WORLD)
    if not BETWEEN:
        _raise_word(flags, raised, receivers, epoch, context, events)
    trace.mark(events, trace.WAIT, first)
    if ENTERS:
        signal.wait_entered(epoch, context, OP, WORLD)
    for tile in range(first, last, _LANES):
        tiles = tile + tl.arange(0, _LANES)
        signal.wait(tile_flags + tiles, tiles < last, epoch, tiles, rank, context, OP, WORLD, "gpu")
    if BETWEEN:
        _raise_word(flags, raised, receivers, epoch, context, events)
        trace.mark(events, trace.WAIT, first)
    if senders != 0:
        words = signal.word(flags, awaited, lanes)
        signal.wait(words, ((senders >> lanes) & 1) == 1, epoch, first, lanes, context, OP, WORLD)
    if ENDS:
        signal.end(context, epoch)
    trace.mark(events, trace.END, -1)


@triton.jit(do_not_specialize=["M", "step_rows"])
def pull_kernel(
    columns, out, stride_m, M, N, step_rows, flags, context, events,
    OP: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Copy all ranks' `columns`, [M, N] each, side by side into `out`, as they announce them.

    Word number s of `flags`, of every rank, says that its rows [s step_rows, (s + 1) step_rows) are there. Work is cut
    into blocks of [ROWS, COLS]; those of all ranks at one position follow one another, so that programs pull from all
    ranks at once, each program always from the same one where R divides the number of programs.
    """
    rank = tl.load(context.control + signal.RANK)
    epoch = signal.begin(context, False, WORLD)
    one = tl.arange(0, 1)
    cols = tl.cdiv(N, COLS)
    blocks = step_rows // ROWS * cols
    came = rank < 0
    step = rank * 0 - 1
    owner = rank
    for item in range(tl.program_id(0), tl.cdiv(M, step_rows) * blocks * WORLD, tl.num_programs(0)):
        place = item // WORLD
        from_rank = (rank + 1 + item % WORLD) % WORLD
        if (place // blocks != step) | (from_rank != owner):
            step = place // blocks
            owner = from_rank
            trace.mark(events, trace.WAIT, step)
            word = signal.word(flags, step, owner)
            came = signal.wait(word + one, one == 0, epoch, step, owner, context, OP, WORLD)
            # After the flag: a peer that gives up still raises its flags, but sets the abort word first.
            came = came & (signal.load_now(context.abort) == 0)
            trace.mark(events, trace.PULL, step)
        if came:
            i = place // cols * ROWS + tl.arange(0, ROWS)
            j = place % cols * COLS + tl.arange(0, COLS)
            mask = (i < M)[:, None] & (j < N)[None, :]
            row = i.to(tl.int64)[:, None]
            value = tl.load(remote(columns, owner, context.heap_bases) + row * N + j[None, :], mask=mask)
            tl.store(out + row * stride_m + (owner * N + j)[None, :], value, mask=mask)
    trace.mark(events, trace.END, -1)
