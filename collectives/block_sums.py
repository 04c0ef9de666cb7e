"""Sums of row blocks whose partials are all in memory: this rank's by a product of its own, the peers' by copy engines.

    1. a product of the rows of each peer, then copies of it and of a flag to that peer
                                      --partial flags-->  2. at the owner
    2. `sum_blocks_kernel`, behind the product of this rank's own rows: waits for the peers' partials, sums all in fp32
       (`pair_sums`), adds the bias, activates, adds the residual; into the result and, in an all-reduce, into what
       peers pull                     --sum flags-->      3. at every rank
    3. all-reduce: the same programs pull the sums of the peers' rows while they make their own

The own rows of an all-reduce may be multiplied in two parts. Behind the first one 2. makes sums of its rows alone, and
copy engines bring these and a flag to the peers while the last rows are multiplied. In 3. each rank has them at hand.

Shape letters as in `row_blocks`. Nothing runs beside a product but copies: while the BLAS has every multiprocessor no
kernel finds room.

Nothing deadlocks: a rank sends all its partials before it waits for those of the peers, and the sums of its first rows
before it waits for theirs; and a program announces its sums before it waits for those of the programs with its own
number, however few of a grid's are resident at a time.
"""

import triton
import triton.language as tl

from pyrocshmem import signal, trace
from pyrocshmem.calls.tensors import POINTER
from pyrocshmem.collectives.epilogue import add_residual, finished, store_block
from pyrocshmem.collectives.order import block_start
from pyrocshmem.collectives.row_blocks import over_ranks
from pyrocshmem.device import remote

_POINTER = tl.constexpr(POINTER)
# Words of flags: of the sums of first rows, which copies bring, and from where on those of sums that are pulled.
FIRST, SUMS = tl.constexpr(1), tl.constexpr(2)
# So often a program announces the sums that it has made since it last did.
ROUNDS = tl.constexpr(4)


@triton.jit
def _came(flags, number, context, epoch, OP: tl.constexpr, WORLD: tl.constexpr):
    """Wait for what the peers send: of word 0 partials, of FIRST sums. False: gave up, or a peer has."""
    lanes = tl.arange(0, signal.MAX_WORLD)
    peers = (lanes < WORLD) & (lanes != tl.load(context.control + signal.RANK))
    came = signal.wait(signal.word(flags, number, lanes), peers, epoch, number, lanes, context, OP, WORLD)
    # After the flags: a peer that gives up still sends what it has, but sets the abort word first.
    return came & (signal.load_now(context.abort) == 0)


@triton.jit
def _pull(
    sums, c, owner, turn, begin, first, last, M, N, stride_m, stride_n, flags, epoch, context,
    OP: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Copy blocks [first, last) of this program, of the rows from `begin` on, from `owner`, when it has announced that
    turn."""
    programs = tl.num_programs(0)
    one = tl.arange(0, 1)
    word = signal.word(flags, SUMS + turn * programs + tl.program_id(0), owner)
    # Only sums that are made are announced, whatever happens to their rank then.
    if signal.wait(word + one, one == 0, epoch, turn, owner, context, OP, WORLD):
        top = block_start(owner, M, WORLD)
        rows = block_start(owner + 1, M, WORLD) - top
        there = remote(sums, owner, context.heap_bases)
        _copy(there, c, top, begin, rows, first, last, N, stride_m, stride_n, ROWS, COLS)


@triton.jit
def _copy(
    source, c, top, begin, end, first, last, N, stride_m, stride_n, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Copy blocks [first, last) of this program, of rows [begin, end) of `source`, [.., N], to those behind row `top`
    of `c`."""
    cols = tl.cdiv(N, COLS)
    for number in range(first, last):
        block = number * tl.num_programs(0) + tl.program_id(0)
        row = begin + block // cols * ROWS + tl.arange(0, ROWS)
        col = block % cols * COLS + tl.arange(0, COLS)
        mask = (row < end)[:, None] & (col < N)[None, :]
        value = tl.load(source + row.to(tl.int64)[:, None] * N + col[None, :], mask=mask)
        place = c + (top + row).to(tl.int64)[:, None] * stride_m + col.to(tl.int64)[None, :] * stride_n
        tl.store(place, value, mask=mask)


@triton.jit(do_not_specialize=["height", "begin", "end", "M"])
def sum_blocks_kernel(
    own, partials, height, begin, end, sums, brought, c, stride_m, stride_n, finish, M, N, flags, context, events,
    OP: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ACTIVATION: tl.constexpr,
    ENDS: tl.constexpr,
):  # fmt: skip
    """Sum rows [begin, end) of this rank's, ROWS x COLS at a time, when all peers have raised word 0 of `flags`. Writes
    nothing where that wait, or one before it, has given up. ENDS: these are the last rows, and the call ends.

    own: [height, N], this rank's partials; partials: the peers', of `height` rows each, as in `row_blocks.OwnRows`.
    c: [rows, N], where sums go. Of an all-reduce it is [M, N], and sums, [rows, N] on the heap, is where peers pull
    them from; else None. brought: [R - 1, begin, N], the sums of the peers' first rows, the previous rank's first, each
    there when it has raised word 1; None where `begin` is 0. finish: its residual has the rows of all ranks.
    """
    rank = tl.load(context.control + signal.RANK)
    epoch = signal.begin(context, False, WORLD)
    trace.mark(events, trace.WAIT, 0)
    came = _came(flags, 0, context, epoch, OP, WORLD)
    trace.mark(events, trace.REDUCE, 0)
    if came:
        lanes = tl.arange(0, signal.MAX_WORLD)
        peers = (lanes < WORLD) & (lanes != rank)
        pid, programs, cols = tl.program_id(0), tl.num_programs(0), tl.cdiv(N, COLS)
        # As many blocks a program on every rank, though one may have a row less.
        most = tl.minimum(tl.cdiv(M, WORLD), end)
        each = tl.cdiv(tl.cdiv(most - begin, ROWS) * cols, programs)
        length = tl.cdiv(each, ROUNDS)
        top = block_start(rank, M, WORLD)
        rows = tl.minimum(block_start(rank + 1, M, WORLD) - top, end)
        i = tl.arange(0, ROWS)
        j = tl.arange(0, COLS)
        residual = finish.residual
        if residual is not None:
            residual += tl.cast(top, tl.int64) * N
        of_own = c
        if sums is not None:
            of_own += tl.cast(top, tl.int64) * stride_m
        for turn in range(ROUNDS + 1):
            first, last = tl.minimum(turn * length, each), tl.minimum((turn + 1) * length, each)
            for number in range(first, last):
                block = number * programs + pid
                row, col = begin + block // cols * ROWS, block % cols * COLS
                mask = (row + i < rows)[:, None] & (col + j < N)[None, :]
                place = own + tl.cast(row, tl.int64) * N + col
                term = tl.load(place + i[:, None] * N + j[None, :], mask=mask, other=0.0)
                if row < rows:
                    total = over_ranks(term, partials, rank, row, col, N, height, WORLD, ROWS, COLS)
                    total = finished(total, finish, col, N, COLS, ACTIVATION)
                    total = add_residual(total, residual, row, rows, col, N, ROWS, COLS)
                    store_block(of_own, row, col, total, rows, N, stride_m, stride_n, _POINTER, ROWS, COLS)
                    if sums is not None:
                        store_block(sums, row, col, total, rows, N, N, 1, _POINTER, ROWS, COLS)
            if sums is not None and ENDS:
                if first < last:
                    word = signal.word(flags, SUMS + turn * programs + pid, rank)
                    signal.publish(word, epoch, lanes, context.heap_bases, peers)
                if (turn > 0) & ((turn - 1) * length < each):
                    trace.mark(events, trace.PULL, turn - 1)
                    for other in range(1, WORLD):
                        _pull(
                            sums, c, (rank + other) % WORLD, turn - 1, begin, (turn - 1) * length, first, M, N,
                            stride_m, stride_n, flags, epoch, context, OP, WORLD, ROWS, COLS,
                        )  # fmt: skip
                    trace.mark(events, trace.REDUCE, turn)
        if brought is not None:
            if _came(flags, FIRST, context, epoch, OP, WORLD):
                share = tl.cdiv(tl.cdiv(begin, ROWS) * cols, programs)
                for other in range(1, WORLD):
                    owner = (rank + WORLD - other) % WORLD
                    first_rows = brought + tl.cast(other - 1, tl.int64) * begin * N
                    _copy(
                        first_rows, c, block_start(owner, M, WORLD), 0, begin, 0, share, N, stride_m, stride_n,
                        ROWS, COLS,
                    )  # fmt: skip
    if ENDS:
        signal.end(context, epoch)
    trace.mark(events, trace.END, -1)
