"""One kernel that exchanges messages (`pyrocshmem.message`), for all collectives on whole tensors.

R ranks. A rank sends each peer a part of its tensor, or all of it to everyone; what arrives is summed over ranks, or
stored side by side:

    one-shot all-reduce   all of x to everyone, sum
    reduce-scatter        part j of x to rank j, sum
    two-shot all-reduce   part j of x to rank j, sum, the sum to everyone, store
    all-gather            all of x to everyone, store; all-scatter: the same, as columns
    broadcast             the root's x to everyone; of the others, as the protocol wants, the first unit

Sums are fp32, over ranks in an order that depends on R alone, rounded once: the same bits on every rank. On its way
to the result a sum can meet a bias, an activation, a residual and the norm of its row.

A part is rows of `width` elements, a row units of 16 bytes of the result; flat tensors are one row. Each program does
the same STEP units of every part, on all ranks, so it waits for programs with its own number only. Blocks are
[units, ranks]: the ranks of a unit lie in neighbouring lanes of a warp, so that sums need no shared memory, and a warp
still moves 128 contiguous bytes to or from each of 4 ranks. Neither x nor out need be on the heap. A slot is region
A, [R sources][quads of a unit][units of a part of x], and for a two-shot region B, [R sources][units] of sums. Of a
broadcast region A is the root's units, then one of each rank.

What a product makes can be sent by its tiles (`collectives.message_tiles`), by a GEMM before: then nothing is loaded
here, and nothing but sums is sent. The two kernels may run at once, since messages bring their own flags.

Rows that are normalized are cut for PARTS programs each. Who has summed its units of a row notes the sum of their
squares with those who will store the row, in the two-shot beside the units themselves: everyone; else the own rank.
They add the PARTS sums in the same order everywhere. Here a program waits for others than its own number, see
`_row_squares`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from collectives import words as units
from pyrocshmem import chain, message, note, signal, trace
from pyrocshmem.device import remote
from pyrocshmem.trace import now_ns
from stream_k.epilogue import activate


@triton.jit
def _finished(values, added, place, mask, last, finish, ACTIVATION: tl.constexpr):
    """Sums on their way to the result, of elements from `place` to `last`: plus bias, activated, plus `added`."""
    bias, columns, residual, total, weight, eps = finish
    done = ()
    for e in tl.static_range(len(values)):
        value = values[e]
        if bias is not None:
            here = mask & (place + e < last)
            value += tl.load(bias + (place + e) % columns, mask=here, other=0.0).to(tl.float32)
        value = activate(value, ACTIVATION)
        if residual is not None:
            value += added[e]
        done = done + (value,)  # type: ignore[assignment]
    return done


@triton.jit
def _weights(weight, column, width, mask, UNIT: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """fp32 weights of the units' columns."""
    WEIGHT: tl.constexpr = weight.dtype.element_ty
    values = ()
    if WEIGHT.primitive_bitwidth < DTYPE.primitive_bitwidth:
        # Half a quad.
        for e in tl.static_range(UNIT):
            value = tl.load(weight + column + e, mask=mask & (column + e < width), other=0.0).to(tl.float32)
            values = values + (value,)  # type: ignore[assignment]
    else:
        words = units.load_unit(weight, column, column, width, mask, UNIT, ALIGNED)
        values = units.unpack(words, UNIT, WEIGHT)
    return values


@triton.jit
def _of_rank(each, rank, RANKS: tl.constexpr):
    """Element `rank` of [ranks], as one number: no layout of it has to be converted, see `units.spread`."""
    return tl.sum(tl.where(tl.arange(0, RANKS) == rank, each, 0.0), axis=0)


@triton.jit
def _note_squares(
    notes, words, column, width, valid, keeps, rank, number, UNIT: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """The fp32 sum of squares of this program's units of a row, the same in each column of the blocks [U, ranks], as
    one note of `rank` to the ranks where `keeps`."""
    values = units.unpack(words, UNIT, DTYPE)
    squares = tl.zeros(values[0].shape, tl.float32)
    for e in tl.static_range(UNIT):
        squares += tl.where((valid & (column + e < width))[:, None], values[e] * values[e], 0.0)
    sum_here = _of_rank(tl.sum(squares, axis=0), 0, squares.shape[1])
    first = (tl.arange(0, column.shape[0]) == 0)[:, None] & keeps
    place = tl.zeros(squares.shape, tl.int64) + rank * tl.num_programs(0) + tl.program_id(0)
    word = tl.zeros(squares.shape, tl.int32) + sum_here.to(tl.int32, bitcast=True)
    note.push(notes + 2 * place, word, number, first)


@triton.jit
def _row_squares(
    notes, here, number, deadline, context, PARTS: tl.constexpr, STEP: tl.constexpr, WORLD: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """(the sum of squares of the row that each rank has sent units of, in its column of a block [U, ranks], late), of
    ranks where `here`.

    The PARTS programs of a row wait for one another, so some for higher numbers. A GPU starts programs in the order of
    their numbers and can run PARTS, 128 at most, at a time: on every rank those of the first row that is
    not done are running or done, and they end. Where they can't all run, the wait gives up as all do.
    """
    lane, ranks = tl.arange(0, STEP)[:, None], tl.arange(0, RANKS)[None, :]
    place = ranks * tl.num_programs(0) + tl.program_id(0) // PARTS * PARTS + lane
    word, late = note.poll(notes, place, number, (lane < PARTS) & here, deadline, context)
    each = tl.sum(word.to(tl.float32, bitcast=True), axis=0)
    squares = tl.zeros(word.shape, tl.float32)
    for k in tl.static_range(WORLD):
        squares = tl.where(ranks == k, _of_rank(each, k, RANKS), squares)
    return squares, late


@triton.jit
def _normalized(words, squares, weights, width, eps, UNIT: tl.constexpr, DTYPE: tl.constexpr):
    """RMSNorm of units of rows, whose sums of squares these are."""
    values = units.unpack(words, UNIT, DTYPE)
    scale = tl.math.rsqrt(squares / width + eps)
    scaled = ()
    for e in tl.static_range(UNIT):
        scaled = scaled + (values[e] * scale * weights[e],)  # type: ignore[assignment]
    return units.pack(scaled, DTYPE)


@triton.jit
def _part(rank, row_end, n, x_part, longer, extra, limit):
    """(where the part of `rank` begins in x, the number at which a unit's elements end: with their row, their part, or
    with x). Example, 7 elements for 3 ranks, x_part 2, longer 1, extra 1, limit 3: parts begin at 0, 3 and 5."""
    start = tl.cast(rank, tl.int64) * x_part + tl.minimum(rank, longer) * extra
    end = tl.minimum(row_end, tl.minimum(n - start, limit - tl.where(rank < longer, 0, extra)))
    return start, end


@triton.jit
def _units_here(rows, row_units, PARTS: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr):
    """This program's units of each part: (the first, all, where they are of the part, their rows, their columns)."""
    program, lane = tl.program_id(0), tl.arange(0, STEP)
    if PARTS:
        # Programs have units of one row alone: the last of a row may have fewer than STEP.
        of_row = program % PARTS * STEP + lane
        first = program // PARTS * row_units + program % PARTS * STEP
        row = tl.zeros((STEP,), tl.int64) + program // PARTS
        valid = of_row < row_units
        column = of_row * UNIT
    else:
        first = program * STEP
        valid = first + lane < rows * row_units
        row = tl.cast((first + lane) // row_units, tl.int64)
        column = (first + lane) % row_units * UNIT
    return first, first + lane, valid, row, column


@triton.jit
def _report(absent, deadline, number, context, OP: tl.constexpr, WORLD: tl.constexpr):
    """Record that this program missed messages, if it did. absent [ranks]: the larger, the more it says of a rank."""
    if tl.max(absent, axis=0) != 0:
        waited = (now_ns() - deadline) // 1000 + tl.load(context[0] + signal.BUDGET_US)
        who = tl.argmax(absent, axis=0)
        signal.report(who, tl.program_id(0), number, number - 1, waited, number, context, OP, WORLD)


@triton.jit
def exchange_kernel(
    x, out, finish, messages, slot_quads, context, n, rows, width, x_part, longer, extra, limit,
    out_part, out_width, root, events,
    SUMS: tl.constexpr, GATHERS: tl.constexpr, BROADCASTS: tl.constexpr, TILES: tl.constexpr,
    ACTIVATION: tl.constexpr, PARTS: tl.constexpr, ALIGNED: tl.constexpr, OP: tl.constexpr, WORLD: tl.constexpr,
    RANKS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """x [n] to out by way of messages. A part has `rows` rows of `width` elements; the next begins `x_part` elements
    later in x (0: all of x is everyone's), and `extra` more after the first `longer` parts, which have all `limit`
    elements, the others `extra` less. Parts of out are `out_part` apart, its rows `out_width`. TILES: the tiles of a
    GEMM send x. RANKS: WORLD, or the next power of two. finish: (bias, columns, residual, total, weight, eps), see
    `collectives.exchange.Finish`. PARTS: the programs of a row that is normalized, STEP at most; 0: no norm.

    Example, two-shot all-reduce, R = 2, n = 1000, parts of one row of 504: rank 0 sums elements 0 to 503 of both
    ranks, rank 1 elements 504 to 999, and each sends its sums to both.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    UNIT: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    QUADS: tl.constexpr = UNIT * x.dtype.element_ty.primitive_bitwidth // 128
    LAST_QUADS: tl.constexpr = 1 if SUMS and GATHERS else QUADS
    control, abort, record, heap_bases = context
    if not TILES:
        chain.wait_for_previous()
    # All loads that the first push needs are under way before any of them is waited for.
    rank = tl.load(control + signal.RANK)
    home = remote(messages, tl.minimum(tl.arange(0, RANKS), WORLD - 1), heap_bases)[None, :]
    program = tl.program_id(0)
    trace.mark(events, trace.PUSH, program)

    row_units = tl.cdiv(width, UNIT)
    part_units = rows * row_units
    first, unit, valid, row, column = _units_here(rows, row_units, PARTS, STEP, UNIT)
    element = row * width + column
    row_end = (row + 1) * width

    ranks = tl.arange(0, RANKS)[None, :]
    units_of, elements = unit[:, None], element[:, None]
    there = valid[:, None] & (ranks < WORLD)
    sent, heard = there, there
    if BROADCASTS:
        sent = there & (units_of < tl.where(rank == root, part_units, 1))
        heard = there & (units_of < tl.where(ranks == root, part_units, 1))
    start, end = _part(ranks, row_end[:, None], n, x_part, longer, extra, limit)
    own, mine = _part(rank, row_end, n, x_part, longer, extra, limit)
    # Elements of the own part: nobody sends what is beyond them.
    _, in_own = _part(rank, n, n, x_part, longer, extra, limit)
    if TILES:
        heard = there & (unit * UNIT < in_own)[:, None]
    else:
        words = units.load_unit(x, start + elements, elements, end, there, UNIT, ALIGNED)
    number = message.number(messages, not TILES)
    slot, peers = message.slot_of(messages, slot_quads, number), message.slot_of(home, slot_quads, number)
    # Numbers of quads in a slot; the regions' sources are as far apart as they are long.
    a_quads, b_quads = tl.cast(part_units, tl.int64) * QUADS, tl.cast(part_units, tl.int64)
    own_a, of_a, region_b = rank * a_quads, ranks * a_quads, WORLD * a_quads
    if BROADCASTS:
        own_a = tl.where(rank == root, 0, a_quads + rank)
        of_a = tl.where(ranks == root, 0, a_quads + ranks)
    if not TILES:
        # All first quads, then all second ones: a warp sends what lies together, or half sectors would cross the links.
        units.send(peers, own_a + units_of, part_units, units.clean(words), sent)
    deadline = message.deadline_ns(context)
    last = signal.is_last(context, False)
    # What the sums will meet is loaded while they travel.
    bias, columns, residual, total, weight, eps = finish
    added, weights = (), ()
    if residual is not None:
        more = units.load_unit(residual, own + element, element, mine, valid, UNIT, ALIGNED)
        added = units.unpack(more, UNIT, DTYPE)
    if PARTS:
        weights = _weights(
            weight, tl.broadcast_to(column[:, None], [STEP, RANKS]), width, there, UNIT, DTYPE, ALIGNED
        )

    trace.mark(events, trace.WAIT, -1)
    if TILES:
        # First the own rank's message for the first unit, which comes when the GEMM does: programs that asked for all
        # of theirs meanwhile would slow it, by a tenth where it takes long (2 x H200).
        at = first + tl.arange(0, 1)
        message.poll(slot + (own_a + at) * 4, at * UNIT < in_own, deadline, context)
        # Not before: programs of the next GEMM would begin where this one's are not, in worse places than they leave.
        chain.allow_next()
    taken = slot + (of_a + units_of) * 4
    words, late = message.poll(taken, heard, deadline, context, part_units * 4, QUADS)
    if not TILES:
        # Nor here: a GEMM behind the gather of 16 rows took 42 us instead of 34 (2 x H200).
        chain.allow_next()
    if SUMS:
        trace.mark(events, trace.REDUCE, program)
        values = units.sum_ranks(units.unpack(words, UNIT, x.dtype.element_ty), ranks < WORLD)
        values = _finished(values, added, own + element, valid, own + mine, finish, ACTIVATION)
        words = units.pack(values, DTYPE)
        if GATHERS:
            # A sum that lacks something is no message: a peer so late that all it waits for has come would take it for
            # whole. Blocks [U], or the polls would be repeated. Who was missing counts for more than who waits.
            words = units.unless(tl.max(late, axis=1), words)
            missing = tl.max(late, axis=0) * 2
        words = units.spread(words, RANKS)
        # The ranks whose rows this one stores, and with whom it notes its squares.
        keeps = ranks < WORLD
        if GATHERS:
            trace.mark(events, trace.PUSH, program)
            units.send(peers, region_b + rank * b_quads + units_of, 0, words, there)
        else:
            keeps = ranks == rank
            there, end = valid[:, None] & keeps, mine[:, None]
            ranks = tl.zeros_like(ranks)
        if PARTS:
            theirs = note.first(home, slot_quads, number)
            _note_squares(theirs, words, column, width, valid, keeps, rank, number, UNIT, DTYPE)
        if GATHERS:
            message.restore(taken, heard, part_units * 4, QUADS)
            trace.mark(events, trace.WAIT, -1)
            taken, heard = slot + (region_b + ranks * b_quads + units_of) * 4, there
            words, late = message.poll(taken, heard, deadline, context)
    if TILES:
        # After the messages: where this rank's host was late between the two kernels, its peers may have finished the
        # call without it, given up on a later one, and sent what they have of the call that has this slot again.
        late = tl.maximum(late, tl.where(signal.load_now(abort) != 0, 1, 0))
    trace.mark(events, trace.STORE, program)
    if BROADCASTS:
        there &= ranks == root
        ranks = tl.zeros_like(ranks)
    place = tl.cast(ranks, tl.int64) * out_part + (row * out_width + column)[:, None]
    if PARTS:
        if total is not None:
            units.store_unit(total, place, elements, end, words, there, UNIT, ALIGNED)
        trace.mark(events, trace.WAIT, -1)
        notes = note.first(messages, slot_quads, number)
        squares, later = _row_squares(notes, keeps, number, deadline, context, PARTS, STEP, WORLD, RANKS)
        late |= later
        trace.mark(events, trace.STORE, program)
        words = _normalized(words, squares, weights, width, eps, UNIT, DTYPE)
    units.store_unit(out, place, elements, end, words, there, UNIT, ALIGNED)
    absent = tl.max(late, axis=0)
    if SUMS and GATHERS:
        absent = tl.maximum(absent, missing)
    _report(absent, deadline, number, context, OP, WORLD)
    message.restore(taken, heard, part_units * 4, LAST_QUADS)
    if TILES:
        # Who sends for this call has read its number then, and what follows on the stream counts on both kernels.
        chain.wait_for_previous()
    if last:
        message.advance(messages, number)
    trace.mark(events, trace.END, -1)
