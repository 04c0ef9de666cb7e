"""What runs beside a GEMM whose tiles or operands the copy engine moves: blocks of rows, or of columns.

Shape letters: M N of the whole result; R ranks. The M rows are cut into R blocks (`stream_k.order`), block q
belongs to rank q. Copies are commands of a stream; what they wait for and what they announce is done by
`step_kernel`, one small program between them, so waits have a budget and watch the abort word here too. It and
the programs of `reduce_rows_kernel` are small enough to run on multiprocessors that a GEMM's programs fill.

    GEMM        --tile flags-->            step_kernel, copies of partial rows, step_kernel
                                           --partial flags--> the owner of the rows
    the owner:  step_kernel, reduce_rows_kernel: sums the R partials of its rows in rank order in fp32,
                adds the bias, activates, writes them into its own result and, in an all-reduce, into `sums`
                --sum flags--> every rank
    all-reduce: step_kernel, copies of the owner's `sums` into the own result

    all-scatter, which has no row blocks: N columns a rank, in steps of rows
    GEMM        --tile flags-->            step_kernel --flags--> every rank
    every rank: the same step_kernel, copies of all ranks' columns into the own result

Nothing deadlocks: what a stream waits for was started before it, here by the GEMM and at the peers by their
GEMM and their copies, none of which waits for a sum; sums wait for no pull. A step of an all-scatter waits for
the same one of the peers, and tells them before.

Sums start only after they found their GEMM's tiles, so that the GEMM's programs are resident by then: a sum
that came first could take the registers that they need.
"""

import triton
import triton.language as tl

from pyrocshmem import signal, trace
from stream_k.epilogue import activate, add_bias, store_block, store_output
from stream_k.order import block_start, block_tiles

_LANES = tl.constexpr(256)


@triton.jit
def store_rows(
    parts, tile, row, row_end, tile_n, epoch, c, extra, context, problem,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Epilogue: the partial tile into this rank's rows for its owner. `extra` is (tile_flags,)."""
    M, N, K, iterations, num_split_tiles, num_split_programs, num_gemm_programs = problem
    PART_N: tl.constexpr = BLOCK_N // len(parts)
    for i in tl.static_range(len(parts)):
        store_block(
            c, row, tile_n * BLOCK_N + i * PART_N, parts[i], row_end, N, N, 1, OPTIONS[2], BLOCK_M, PART_N
        )


@triton.jit
def store_columns(
    parts, tile, row, row_end, tile_n, epoch, c, extra, context, problem,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Epilogue: the finished tile into this rank's columns. `extra` is (tile_flags, bias)."""
    output = (extra[1], problem[1], 1)
    store_output(
        parts, tile, row, row_end, tile_n, epoch, c, output, context, problem, WORLD, BLOCK_M, BLOCK_N, OPTIONS
    )  # fmt: skip


@triton.jit
def announce_rows(
    tile, told, epoch, extra, context, problem, WORLD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """The flag of a tile, for this rank's own streams."""
    control, abort, record, heap_bases = context
    one = tl.arange(0, 1)
    rank = tl.load(control + signal.RANK)
    signal.publish(extra[0] + tile + one, epoch, rank, heap_bases, one < told, "gpu")


@triton.jit
def _raise_word(flags, raised, receivers, epoch, context, events):
    """Raise word number `raised` at the ranks whose bits are set in `receivers`."""
    control, abort, record, heap_bases = context
    if receivers != 0:
        lanes = tl.arange(0, signal.MAX_WORLD)
        rank = tl.load(control + signal.RANK)
        trace.mark(events, trace.ANNOUNCE, raised)
        signal.publish(
            signal.word(flags, raised, rank), epoch, lanes, heap_bases, ((receivers >> lanes) & 1) == 1
        )


@triton.jit(do_not_specialize=["raised", "receivers", "first", "last", "awaited", "senders"])
def step_kernel(
    flags, tile_flags, raised, receivers, first, last, awaited, senders, context, events,
    OP: tl.constexpr, WORLD: tl.constexpr, ENTERS: tl.constexpr, ENDS: tl.constexpr, BETWEEN: tl.constexpr,
):  # fmt: skip
    """One program between two commands of a stream: announces what came before, waits for what comes next.

    Raises word number `raised` of `flags` at the ranks whose bits are set in `receivers`; then waits for the
    own tiles [first, last), and for word number `awaited` of the ranks in `senders`. ENTERS: also waits until
    every peer has entered this call. ENDS: closes the call. BETWEEN: raises the word when it has found the tiles.
    """
    control, abort, record, heap_bases = context
    rank = tl.load(control + signal.RANK)
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


@triton.jit
def _source(partials, source, rank, tiles, N, WORLD: tl.constexpr, BLOCK_M: tl.constexpr):
    """Where the partial of the own row block from rank `source` starts: the first R blocks of `partials` are
    this rank's, one an owner; the next R - 1 came from the peers, the neighbour's first."""
    block = tl.where(source == rank, rank, WORLD + (source - rank - 1 + WORLD) % WORLD)
    return partials + tl.cast(block * tiles * BLOCK_M, tl.int64) * N


@triton.jit(do_not_specialize=["first", "last"])
def reduce_rows_kernel(
    partials, sums, results, where, stride_m, stride_n, bias, first, last, M, N, context, events,
    OPTIONS: tl.constexpr, EVERYWHERE: tl.constexpr, ALIGNED: tl.constexpr, WORLD: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows [first, last) of the own block: the sum of the R partials, the bias, the activation.

    They go into the own result, which lies where the word `where` says, at a multiple of 16 bytes if ALIGNED;
    `results` has its type only. It is the block alone, or, EVERYWHERE, [M, N], and the block goes into `sums`, from
    where peers pull it, as well. Writes nothing once a wait has given up.
    """
    control, abort, record, heap_bases = context
    rank = tl.load(control + signal.RANK)
    tiles = block_tiles(M, WORLD, BLOCK_M)
    columns = tl.cdiv(N, COLUMNS)
    rows = tl.cdiv(last - first, ROWS)
    if tl.load(abort, volatile=True) != 0:
        rows = rows - rows
    top = first - first
    if EVERYWHERE:
        top = block_start(rank, M, WORLD)
    results = tl.cast(tl.load(where), results.dtype)
    if ALIGNED:
        results = tl.multiple_of(results, 16)
    trace.mark(events, trace.REDUCE, first)
    for step in range(tl.program_id(0), rows * columns, tl.num_programs(0)):
        row = first + step // columns * ROWS
        col = step % columns * COLUMNS
        i = row + tl.arange(0, ROWS)
        j = col + tl.arange(0, COLUMNS)
        offsets = i.to(tl.int64)[:, None] * N + j[None, :]
        mask = (i < last)[:, None] & (j < N)[None, :]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for source in tl.static_range(WORLD):
            place = _source(partials, source, rank, tiles, N, WORLD, BLOCK_M)
            total += tl.load(place + offsets, mask=mask, other=0.0).to(tl.float32)
        if OPTIONS[1]:
            total = add_bias(total, bias, col, N, COLUMNS)
        total = activate(total, OPTIONS[0])
        if EVERYWHERE:
            store_block(sums, row, col, total, last, N, N, 1, 2, ROWS, COLUMNS)
        store_block(results, top + row, col, total, top + last, N, stride_m, stride_n, 2, ROWS, COLUMNS)
    trace.mark(events, trace.END, -1)
