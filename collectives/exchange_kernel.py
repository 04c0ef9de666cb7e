"""One kernel that exchanges messages (`pyrocshmem.message`), for all collectives on whole tensors.

R ranks. A rank sends each rank a part of its tensor, or all of it to everyone, itself included unless STAYS; what
arrives is summed over ranks, or stored side by side:

    one-shot all-reduce   all of x to everyone; sum
    reduce-scatter        part j of x to rank j; sum
    two-shot all-reduce   part j of x to rank j; sum; the sum to everyone; store
    all-gather            all of x to everyone; store. All-scatter: the same, as columns
    broadcast             the root's x to everyone; the others send their first unit, since every rank must hear from
                          every rank

Sums are fp32, over ranks in an order that depends on R alone, rounded once: the same bits on every rank. On its way
to the result a sum can get a bias, an activation, a residual and the norm of its row. Other reductions take a sum's
place (`collectives.reductions`). Integers, and all else that must arrive bit by bit, come as int32 or uint8, and have
marks beside their messages (`collectives.any_bits`): regions like A and B, behind them.

A part consists of rows of `width` elements, a row of units: 16 bytes of the result each. Flat tensors are one row. A
program does the same STEP units of every part, on all ranks, so it waits only for programs with its own number. Blocks
are [units, ranks]: the ranks of a unit lie in neighbouring lanes of a warp, so that sums need no shared memory, and a
warp still moves 128 contiguous bytes to or from each of 4 ranks. Neither x nor out need be on the heap.

A slot is region A, [R sources][quads of a unit][units of a part of x], and for a two-shot region B, [R sources][units]
of sums. For a broadcast region A is the root's units, then one unit of each rank.

The tiles of a product can be sent by its GEMM's epilogue (`collectives.message_tiles`): then this kernel loads nothing
and sends nothing but sums. The two kernels may run at once, since messages bring their own flags.

A row that is normalized is divided among PARTS programs. A program that has summed its units of a row sends the sum of
their squares, as a note, to whoever will store the row: in the two-shot everyone, along with the units themselves,
otherwise its own rank. Everyone adds the PARTS sums in the same order. Here a program waits for others than those of
its own number, see `_of_row`. Where rows of the norm have scales, in 8 bits, a second note beside it has the largest
product of value and weight (`collectives.normalizing` says why that will do). The second hop brings the total, from
which every rank makes the same 8 bits: to send these, too, would take more bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pyrocshmem import dependent_launch, message, note, signal, trace
from pyrocshmem.collectives import any_bits, float8, normalizing, reductions
from pyrocshmem.collectives import words as units
from pyrocshmem.collectives.epilogue import PLAIN, activate
from pyrocshmem.device import remote
from pyrocshmem.trace import now_ns

_BLOCK = tl.constexpr(float8.BLOCK)
_GIVEN, _ROWS, _GROUPS = (
    tl.constexpr(kind) for kind in (normalizing.GIVEN, normalizing.ROWS, normalizing.GROUPS)
)


class AfterSum(NamedTuple):
    """What becomes of a sum: `finish` is done to it; that is written to `total`, and its RMSNorm, where there is a
    weight, is the result. Tensors on the host, pointers in the kernel.

    columns: of the bias of `finish`, for rows of x that long. The residual and total: like the result. weight:
    [columns]; None: no norm. quantized: like the result, of 8-bit floating point: gets the norm over `scales`, which
    are one element that is given, or go one a row or one for each 128 elements to [rows, 1 or columns / 128], a column
    behind another; then the result gets the norm unless it is the total.
    """

    finish: Any = PLAIN
    columns: Any = 1
    total: Any = None
    weight: Any = None
    eps: Any = 0.0
    quantized: Any = None
    scales: Any = None

    @property
    def by_rows(self) -> bool:
        """Whether parts and pieces are whole rows: a bias counts columns from the first element of a piece."""
        return self.weight is not None or self.finish.bias is not None

    def tensors(self) -> tuple[Any, ...]:
        """Those that a kernel gets, or None."""
        return self.finish.bias, self.finish.residual, self.total, self.weight, self.quantized, self.scales

    @property
    def scales_kind(self) -> int:
        """Which scales a norm in 8 bits has: a number of `normalizing`, 0 where it isn't in 8 bits."""
        if self.quantized is None:
            return 0
        if self.scales.ndim == 0:
            return normalizing.GIVEN
        return normalizing.ROWS if self.scales.shape[1] == 1 else normalizing.GROUPS


@triton.jit
def _finished(values, added, place, mask, last, finish, columns, ACTIVATION: tl.constexpr):
    """`values`, of the elements from number `place` to `last`, finished: `added` is what the residual has there.
    columns: of the bias."""
    done = ()
    for e in tl.static_range(len(values)):
        value = values[e]
        if finish.bias is not None:
            here = mask & (place + e < last)
            value += tl.load(finish.bias + (place + e) % columns, mask=here, other=0.0).to(tl.float32)
        value = activate(value, ACTIVATION)
        if finish.residual is not None:
            value += added[e]
        done = done + (value,)  # type: ignore[assignment]
    return done


@triton.jit
def _note_row(
    notes, words, weights, column, width, valid, keeps, rank, number, UNIT: tl.constexpr, DTYPE: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Send what the norm of a row needs of this program's units, as COUNT notes of `rank`, to the ranks where `keeps`:
    the fp32 sum of squares; and the largest product of value and weight. words: blocks [U, ranks], the same in each
    column, as weights are."""
    values = units.unpack(words, UNIT, DTYPE)
    sum_here = normalizing.sum_of_units(values, values, column, width, valid)
    first = (tl.arange(0, column.shape[0]) == 0)[:, None] & keeps
    place = tl.zeros(values[0].shape, tl.int64) + rank * tl.num_programs(0) + tl.program_id(0)
    word = tl.zeros(values[0].shape, tl.int32) + sum_here.to(tl.int32, bitcast=True)
    note.push(notes + 2 * COUNT * place, word, number, first)
    if COUNT == 2:
        largest = normalizing.largest_of_units(values, weights, column, width, valid)
        word = tl.zeros(values[0].shape, tl.int32) + largest.to(tl.int32, bitcast=True)
        note.push(notes + 2 * COUNT * place + 2, word, number, first)


@triton.jit
def _of_row(
    notes, here, number, deadline, context, PARTS: tl.constexpr, STEP: tl.constexpr, WORLD: tl.constexpr,
    RANKS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """((squares, largest), late): in column r of both, [U, ranks], what the programs of the row that rank r has sent
    units of have noted (`_note_row`), added up, or the largest of them, where `here`. COUNT 1: without the second.

    The PARTS programs of a row wait for one another, hence some for higher numbers. A GPU starts programs in the order
    of their numbers and can run PARTS, 128 at most, at a time: on every rank those of the first row that is not done
    are running or done, so they end. Where they can't all run, the wait gives up as all waits do.
    """
    lane, ranks = tl.arange(0, STEP)[:, None], tl.arange(0, RANKS)[None, :]
    place = ranks * tl.num_programs(0) + tl.program_id(0) // PARTS * PARTS + lane
    words, late = note.poll(notes, COUNT * place, number, (lane < PARTS) & here, deadline, context, COUNT)
    found = (tl.sum(words[0].to(tl.float32, bitcast=True), axis=0),)
    if COUNT == 2:
        found = found + (tl.max(words[1].to(tl.float32, bitcast=True), axis=0),)  # type: ignore[assignment]
    spread = ()
    for i in tl.static_range(COUNT):
        wide = tl.zeros(late.shape, tl.float32)
        for k in tl.static_range(WORLD):
            wide = tl.where(ranks == k, normalizing.of_rank(found[i], k), wide)
        spread = spread + (wide,)  # type: ignore[assignment]
    return spread, late


@triton.jit
def _part(rank, row_end, n, x_part, longer, extra, limit):
    """(where the part of `rank` begins in x, the element of that part at which a unit ends: with its row, the part or
    x). Example, 7 elements for 3 ranks, x_part 2, longer 1, extra 1, limit 3: parts begin at 0, 3 and 5."""
    start = tl.cast(rank, tl.int64) * x_part + tl.minimum(rank, longer) * extra
    end = tl.minimum(row_end, tl.minimum(n - start, limit - tl.where(rank < longer, 0, extra)))
    return start, end


@triton.jit
def _units_here(rows, row_units, PARTS: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr):
    """This program's units of each part: (number of the first, numbers of all, which exist, their rows, the columns of
    their first elements)."""
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
    """Record that messages did not come, if so. absent [ranks]: 0, or larger the surer it is that the rank is late."""
    if tl.max(absent, axis=0) != 0:
        waited = (now_ns() - deadline) // 1000 + tl.load(context.control + signal.BUDGET_US)
        who = tl.argmax(absent, axis=0)
        signal.report(who, tl.program_id(0), number, number - 1, waited, number, context, OP, WORLD)


# Sizes, which differ from call to call: what is aligned, ALIGNED says.
@triton.jit(
    do_not_specialize=[
        "n", "rows", "width", "x_part", "longer", "extra", "limit", "out_part", "out_width", "scale_pitch",
    ]
)  # fmt: skip
def exchange_kernel(
    x, out, after, messages, slot_quads, context, n, rows, width, x_part, longer, extra, limit,
    out_part, out_width, scale_pitch, root, events,
    SUMS: tl.constexpr, GATHERS: tl.constexpr, BROADCASTS: tl.constexpr, UNEVEN: tl.constexpr, TILES: tl.constexpr,
    PARTS: tl.constexpr, ALIGNED: tl.constexpr, OP: tl.constexpr, WORLD: tl.constexpr,
    RANKS: tl.constexpr, STEP: tl.constexpr, ACTIVATION: tl.constexpr, REDUCTION: tl.constexpr,
    INTEGER: tl.constexpr, SCALES: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """x [n] to out by way of messages; one program for each STEP units of a part.

    Parts: each has `rows` rows of `width` elements, of which the first `longer` parts fill `limit` elements and the
    others `extra` fewer. A part begins `x_part` elements behind the one before (0: all of x is everyone's), `extra`
    more behind the `longer` ones. Parts of out are `out_part` elements apart, its rows `out_width`. Scales of a norm's
    groups are `scale_pitch` from one column of them to the next.
    after: an `AfterSum`. n: elements of x.
    SUMS, GATHERS, BROADCASTS: what becomes of messages, see `exchange._KINDS`. UNEVEN: of a gather, whose parts, each
    all of its rank's x, are of two lengths as above, and lie so in out. TILES: the tiles of a GEMM send x.
    RANKS: WORLD, or the next power of two. PARTS: the programs of a row that is normalized, STEP at most; 0: no norm.
    ALIGNED: see `words.load_unit`. REDUCTION: of `reductions.REDUCTIONS`, for what SUMS. INTEGER: the dtype of integers
    that are reduced. x and out then are int32 or uint8, as they are for whatever moves bit by bit. SCALES: of a norm in
    8 bits, a number of `normalizing`, or 0; KEEPS: out gets the norm, too.

    Example, two-shot all-reduce, R = 2, n = 1000, parts of one row of 504: rank 0 sums elements 0 to 503 of both
    ranks, rank 1 elements 504 to 999, and each sends its sums to both.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    UNIT: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    QUADS: tl.constexpr = UNIT * x.dtype.element_ty.primitive_bitwidth // 128
    LAST_QUADS: tl.constexpr = 1 if SUMS and GATHERS else QUADS
    # Whether what a rank has for itself stays in its registers, which saves a sum 0.2 us and costs a gather or a norm
    # 0.1 (2 x H200). Where elements come one by one, Triton 3.6 would move what is polled for to where they are.
    STAYS: tl.constexpr = (SUMS or BROADCASTS) and ALIGNED and not (PARTS or TILES)
    ANY_BITS: tl.constexpr = x.dtype.element_ty.is_int()
    # Of each part of a row; units of a scale.
    NOTES: tl.constexpr = 2 if SCALES == _ROWS else 1
    GROUP: tl.constexpr = _BLOCK // UNIT if _BLOCK // UNIT < STEP else STEP
    finish = after.finish
    if not TILES:
        dependent_launch.wait_for_previous()
    # All loads that the first push needs are under way before any of them is waited for.
    rank = tl.load(context.control + signal.RANK)
    home = remote(messages, tl.minimum(tl.arange(0, RANKS), WORLD - 1), context.heap_bases)[None, :]
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
    sent = there & (ranks != rank) if STAYS else there
    heard = sent
    if BROADCASTS:
        sent &= units_of < tl.where(rank == root, part_units, 1)
        heard &= units_of < tl.where(ranks == root, part_units, 1)
    if UNEVEN:
        start, end = _part(ranks, row_end[:, None], n, 0, 0, 0, limit)
    else:
        start, end = _part(ranks, row_end[:, None], n, x_part, longer, extra, limit)
    own, mine = _part(rank, row_end, n, x_part, longer, extra, limit)
    # Elements of this rank's part: nobody sends what is beyond them.
    _, in_own = _part(rank, n, n, x_part, longer, extra, limit)
    if TILES:
        heard = there & (unit * UNIT < in_own)[:, None]
    else:
        words = units.load_unit(x, start + elements, elements, end, there, UNIT, ALIGNED)
    number = message.number(messages, not TILES)
    slot, peers = message.slot_of(messages, slot_quads, number), message.slot_of(home, slot_quads, number)
    # Quads of a source in regions A and B, which follow one another without gaps.
    a_quads, b_quads = tl.cast(part_units, tl.int64) * QUADS, tl.cast(part_units, tl.int64)
    own_a, of_a, region_b = rank * a_quads, ranks * a_quads, WORLD * a_quads
    if BROADCASTS:
        own_a = tl.where(rank == root, 0, a_quads + rank)
        of_a = tl.where(ranks == root, 0, a_quads + ranks)
    if ANY_BITS:
        # Words from a quad to its marks.
        marks = 4 * (a_quads + WORLD if BROADCASTS else (2 if SUMS and GATHERS else 1) * region_b)
        any_bits.push(peers + (own_a + units_of) * 4, marks, words, sent)
    elif not TILES:
        words = units.clean(words)
        # All first quads, then all second ones, so that a warp sends contiguous bytes; else half sectors cross the
        # links.
        units.send(peers, own_a + units_of, part_units, words, sent)
    deadline = message.deadline_ns(context)
    last = signal.is_last(context, False)
    # The residual and the weights are loaded while the messages travel.
    added, weights = (), ()
    if finish.residual is not None:
        # By the layout of messages, or Triton 3.9 would convert every sum to that of the loads, one by one.
        place = tl.broadcast_to((own + element)[:, None], [STEP, RANKS])
        more = units.load_unit(finish.residual, place, elements, mine[:, None], valid[:, None], UNIT, ALIGNED)
        added = units.unpack(units.any_rank(more), UNIT, DTYPE)
    if PARTS:
        weights = normalizing.weights_of(
            after.weight, tl.broadcast_to(column[:, None], [STEP, RANKS]), width, there, UNIT, DTYPE, ALIGNED
        )

    trace.mark(events, trace.WAIT, -1)
    if TILES:
        # First only this rank's message for the first unit, which comes when its GEMM gets there: programs that polled
        # for all of theirs meanwhile would slow the GEMM, by a tenth where it takes long (2 x H200).
        at = first + tl.arange(0, 1)
        message.poll(slot + (own_a + at) * 4, at * UNIT < in_own, deadline, context)
        # Not before: programs of the next GEMM would start on multiprocessors that this GEMM's programs don't use,
        # worse ones than those they leave.
        dependent_launch.allow_next()
    taken = slot + (of_a + units_of) * 4
    if ANY_BITS:
        arrived, doubted, late = any_bits.poll(taken, marks, heard, deadline, context)
    else:
        arrived, late = message.poll(taken, heard, deadline, context, part_units * 4, QUADS)
    words = units.of_either(ranks == rank, words, arrived) if STAYS else arrived
    if not TILES:
        # Not before here either: a GEMM behind the gather of 16 rows took 42 us instead of 34 (2 x H200).
        dependent_launch.allow_next()
    if SUMS:
        trace.mark(events, trace.REDUCE, program)
        if ANY_BITS:
            values = reductions.integers(units.unpack_integers(words, INTEGER), ranks < WORLD, REDUCTION)
            words = units.pack_integers(values, INTEGER)
        else:
            values = units.unpack(words, UNIT, x.dtype.element_ty)
            values = reductions.floats(values, ranks < WORLD, REDUCTION, WORLD)
            values = _finished(
                values, added, own + element, valid, own + mine, finish, after.columns, ACTIVATION
            )
            words = units.pack(values, DTYPE)
        if GATHERS:
            # A sum that lacks a term is not sent: a peer so late that all it waits for has come would take it for
            # complete. Blocks [U], or the polls would be repeated. A rank whose own messages are missing is blamed
            # before one whose sums are.
            if not ANY_BITS:
                words = units.unless(tl.max(late, axis=1), words)
            missing = tl.max(late, axis=0) * 2
        words = units.spread(words, RANKS)
        # The ranks whose rows this one stores, and to which it sends its squares.
        keeps = ranks < WORLD
        if GATHERS:
            trace.mark(events, trace.PUSH, program)
            if ANY_BITS:
                (gone,) = units.spread((tl.max(late, axis=1),), RANKS)
                own_b = peers + (region_b + rank * b_quads + units_of) * 4
                any_bits.push(own_b, marks, words, there & (gone == 0))
            else:
                units.send(peers, region_b + rank * b_quads + units_of, 0, words, there)
        else:
            keeps = ranks == rank
            there, end = valid[:, None] & keeps, mine[:, None]
            ranks = tl.zeros_like(ranks)
        if PARTS:
            theirs = note.first(home, slot_quads, number)
            _note_row(theirs, words, weights, column, width, valid, keeps, rank, number, UNIT, DTYPE, NOTES)
        if GATHERS:
            if ANY_BITS:
                any_bits.restore(taken, marks, heard, doubted)
            else:
                message.restore(taken, heard, part_units * 4, QUADS)
            trace.mark(events, trace.WAIT, -1)
            taken, heard = slot + (region_b + ranks * b_quads + units_of) * 4, there
            if ANY_BITS:
                words, doubted, late = any_bits.poll(taken, marks, heard, deadline, context)
            else:
                words, late = message.poll(taken, heard, deadline, context)
    if TILES:
        # After the messages: where this rank's host was late between the two kernels, its peers may have finished this
        # call without it, given up on a later one, and sent messages of a call that uses this slot again.
        late = tl.maximum(late, tl.where(signal.load_now(context.abort) != 0, 1, 0))
    trace.mark(events, trace.STORE, program)
    if BROADCASTS:
        there &= ranks == root
        ranks = tl.zeros_like(ranks)
    place = tl.cast(ranks, tl.int64) * out_part + (row * out_width + column)[:, None]
    if UNEVEN:
        place += tl.minimum(ranks, longer) * extra
        end = tl.minimum(row_end[:, None], limit - tl.where(ranks < longer, 0, extra))
    if PARTS:
        if after.total is not None:
            units.store_unit(after.total, place, elements, end, words, there, UNIT, ALIGNED)
        trace.mark(events, trace.WAIT, -1)
        notes = note.first(messages, slot_quads, number)
        of_row, later = _of_row(notes, keeps, number, deadline, context, PARTS, STEP, WORLD, RANKS, NOTES)
        late |= later
        trace.mark(events, trace.STORE, program)
        words = normalizing.normalized(words, of_row[0], weights, width, after.eps, UNIT, DTYPE)
        if SCALES:
            scales = normalizing.scales_of(
                words, of_row[NOTES - 1], of_row[0], after.scales, column, width, valid, after.eps,
                UNIT, DTYPE, after.quantized.dtype.element_ty, SCALES, GROUP,
            )  # fmt: skip
            found = normalizing.in_float8(words, scales, UNIT, DTYPE, after.quantized.dtype.element_ty)
            units.store_bytes(after.quantized, place, elements, end, found, there, UNIT, ALIGNED)
            # Of a row the first unit has it, or of a group.
            stored = tl.cast(ranks, tl.int64) * (out_part // out_width) + row[:, None]
            if SCALES == _GROUPS:
                stored += (tl.cast(column, tl.int64) // _BLOCK * scale_pitch)[:, None]
                leads = (column % _BLOCK == 0)[:, None]
            else:
                leads = (column == 0)[:, None]
            if SCALES != _GIVEN:
                tl.store(after.scales + stored, scales, mask=there & leads & (elements < end))
    if KEEPS:
        units.store_unit(out, place, elements, end, words, there, UNIT, ALIGNED)
    absent = tl.max(late, axis=0)
    if SUMS and GATHERS:
        absent = tl.maximum(absent, missing)
    _report(absent, deadline, number, context, OP, WORLD)
    if ANY_BITS:
        any_bits.restore(taken, marks, heard, doubted)
    else:
        message.restore(taken, heard, part_units * 4, LAST_QUADS)
    if TILES:
        # The GEMM has then read the number of the call; and what follows on the stream counts on both kernels.
        dependent_launch.wait_for_previous()
    if last:
        message.advance(messages, number)
    trace.mark(events, trace.END, -1)
