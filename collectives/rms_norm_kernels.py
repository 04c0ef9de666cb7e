"""The kernels of `rms_norm`, forward and backward; `rms_norm_plan` launches them.

Shape letters: M rows of H columns, R ranks, N columns a rank. h is what is normalized (x, or x + residual),
s = 1 / sqrt(mean of h^2 over H + eps) the scale of a row, w the weight, g the gradient of the result h s w
(https://arxiv.org/abs/1910.07467).

Forward: every rank sums the squares of its columns, in fp32; the sums of a row travel to all ranks (`row_sums`), and
all add them in the same order, so that the scale of a row has the same bits everywhere. Then each rank normalizes its
own columns: for itself (sharded: only the sums travel), or into its columns of every rank's result (replicated).

    note (rank, row)            the rank's sum of squares of the row; backward: of g w h
    done[block][rank] >= epoch  replicated: the rank's columns of a block of rows have arrived here

A rank writes into a peer's result only after the peer's sums of this call have come: by then the peer is done with what
the result held before. They also reach a rank that comes too late, so it looks at the abort word, too.

Backward (the derivative of the formula above): with t = sum over H of g w h, times s / H, the gradient of h is
s (g w - h s t), and that of the weight the sum over rows of g h s, which needs no peer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyrocshmem import dependent_launch, message, note, signal, status, trace
from pyrocshmem.collectives import pair_sums, row_sums
from pyrocshmem.collectives.epilogue import rounded
from pyrocshmem.device import others

_OP = tl.constexpr(int(status.Op.RMS_NORM))


@triton.jit
def squares_of(
    x, residual, updated, block, M, N, x_stride, residual_stride,
    ADDS: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of squares [ROWS] of a block of rows, the sums of PIECES of their columns as a tree; where ADDS, of x +
    residual, which is stored."""
    i = (tl.cast(block * ROWS, tl.int64) + tl.arange(0, ROWS))[:, None]
    sums = ()
    for piece in tl.static_range(PIECES):
        end = N // PIECES * (piece + 1)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(N // PIECES * piece, end, COLUMNS):
            j = first + tl.arange(0, COLUMNS)[None, :]
            mask = (i < M) & (j < end)
            value = tl.load(x + i * x_stride + j, mask=mask, other=0.0).to(tl.float32)
            if ADDS:
                value += tl.load(residual + i * residual_stride + j, mask=mask, other=0.0).to(tl.float32)
                kept = rounded(value, updated.dtype.element_ty)
                tl.store(updated + i * N + j, kept, mask=mask)
                value = kept.to(tl.float32)
            total += value * value
        sums = sums + (tl.sum(total, axis=1),)  # type: ignore[assignment]
    return pair_sums.of_terms(sums)


@triton.jit
def normalize(
    h, h_stride, weight, places, out_stride, scales, sums, block, M, N, H, eps, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of rows of h [M, N], whose squares over all H columns have these sums, to all places; their scales to
    `scales` [M]. places: where results of this rank's columns begin."""
    row = tl.cast(block * ROWS, tl.int64) + tl.arange(0, ROWS)
    scale = tl.math.rsqrt(sums / H + eps)
    tl.store(scales + row, scale, mask=row < M)
    for first in range(0, N, COLUMNS):
        i, j = row[:, None], first + tl.arange(0, COLUMNS)[None, :]
        mask = (i < M) & (j < N)
        value = tl.load(h + i * h_stride + j, mask=mask, other=0.0)
        w = tl.load(weight + j, mask=j < N, other=0.0).to(tl.float32)
        value = rounded(value.to(tl.float32) * scale[:, None] * w, places[0].dtype.element_ty)
        for k in tl.static_range(len(places)):
            tl.store(places[k] + i * out_stride + j, value, mask=mask)


@triton.jit(do_not_specialize=["M"])
def rms_norm_kernel(
    x, residual, updated, weight, squares, out, scales, messages, slot_quads, flags, context,
    M, N, H, column, tiles_n, x_stride, residual_stride, out_stride, eps, events,
    ADDS: tl.constexpr, REPLICATED: tl.constexpr, TILES: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WORLD: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Normalize x [M, N], this rank's columns of H, from number `column` on. out: its columns, or (REPLICATED) all.
    updated: ADDS: gets x + residual. scales: fp32 [M]. TILES: 0, or how many rows at a time to add of `squares`
    [tiles_n, M], the sums of squares that a GEMM's tiles left. PIECES: see `squares_of`.

    Example, R = 2, H = 4, eps = 0: rank 0 has (1, 3), rank 1 (5, 1) of a row. Sums 10 and 26, mean of squares 9:
    (1/3, 1) and (5/3, 1/3) times the weights.
    """
    rank = tl.load(context.control + signal.RANK)
    program, programs = tl.program_id(0), tl.num_programs(0)
    blocks = tl.cdiv(M, ROWS)
    lanes = tl.arange(0, signal.MAX_WORLD)
    number = message.number(messages)
    notes = note.first(messages, slot_quads, number)
    dependent_launch.allow_next()
    deadline = message.deadline_ns(context)
    epoch = number
    places = (out + column,)
    if REPLICATED:
        epoch = signal.begin(context, True, WORLD)
        places = others(out + column, rank, context.heap_bases, WORLD) + (out + column,)
    absent = tl.zeros((RANKS,), tl.int32)
    for ahead in range(program, blocks + programs, programs):
        if ahead < blocks:
            trace.mark(events, trace.PUSH, ahead)
            if TILES:
                sums = row_sums.of_tiles(squares, ahead, M, tiles_n, ROWS, TILES)
            else:
                sums = squares_of(
                    x, residual, updated, ahead, M, N, x_stride, residual_stride, ADDS, PIECES, ROWS, COLUMNS
                )
            row_sums.send((sums,), ahead, notes, number, M, context, ROWS, WORLD, RANKS)
        block = ahead - programs
        if block >= 0:
            trace.mark(events, trace.WAIT, block)
            told = program - program
            if REPLICATED:
                told = signal.load_now(context.abort)
            sums, missing = row_sums.receive(block, notes, number, M, deadline, context, ROWS, WORLD, RANKS)
            absent = tl.maximum(absent, missing)
            if (tl.max(missing, axis=0) == 0) & (told == 0):
                trace.mark(events, trace.STORE, block)
                if ADDS:
                    normalize(
                        updated, N, weight, places, out_stride, scales, sums[0], block, M, N, H, eps, ROWS, COLUMNS
                    )  # fmt: skip
                else:
                    normalize(
                        x, x_stride, weight, places, out_stride, scales, sums[0], block, M, N, H, eps, ROWS, COLUMNS
                    )  # fmt: skip
                if REPLICATED:
                    signal.publish(
                        signal.word(flags, block, rank), epoch, lanes, context.heap_bases, lanes < WORLD
                    )
    row_sums.report(absent, deadline, number, context, _OP, WORLD)
    if REPLICATED:
        trace.mark(events, trace.WAIT, -1)
        for block in range(program, blocks, programs):
            done = signal.word(flags, block, lanes)
            signal.wait(done, lanes < WORLD, epoch, block, lanes, context, _OP, WORLD)
        last = signal.end(context, epoch)
    else:
        last = signal.is_last(context)
    if last:
        message.advance(messages, number)
    trace.mark(events, trace.END, -1)


@triton.jit
def _products(
    g, h, weight, block, M, N, g_stride, h_stride, PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sums of g w h [ROWS] of a block of rows, the sums of PIECES of their columns as a tree."""
    i = (tl.cast(block * ROWS, tl.int64) + tl.arange(0, ROWS))[:, None]
    sums = ()
    for piece in tl.static_range(PIECES):
        end = N // PIECES * (piece + 1)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(N // PIECES * piece, end, COLUMNS):
            j = first + tl.arange(0, COLUMNS)[None, :]
            mask = (i < M) & (j < end)
            w = tl.load(weight + j, mask=j < end, other=0.0).to(tl.float32)
            product = tl.load(g + i * g_stride + j, mask=mask, other=0.0).to(tl.float32) * w
            total += product * tl.load(h + i * h_stride + j, mask=mask, other=0.0).to(tl.float32)
        sums = sums + (tl.sum(total, axis=1),)  # type: ignore[assignment]
    return pair_sums.of_terms(sums)


@triton.jit(do_not_specialize=["M"])
def rms_norm_backward_kernel(
    g, more, h, weight, scales, grad, partials, messages, slot_quads, context,
    M, N, H, g_stride, more_stride, h_stride, events,
    ADDS: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WORLD: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """grad [M, N] of h, plus (ADDS) `more`, the gradient that reached h in other ways; and the weight's gradient of the
    rows of each program, partials [programs, N] in fp32.

    Example, R = 2, H = 4, s = 1/3 as in the forward kernel's, g w = (3, 0) and (0, 0): sums 3 and 0, t = 3/12; of
    column 0 the gradient is (3 - 1/3 * 1/4) / 3.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    blocks = tl.cdiv(M, ROWS)
    number = message.number(messages)
    notes = note.first(messages, slot_quads, number)
    dependent_launch.allow_next()
    deadline = message.deadline_ns(context)
    absent = tl.zeros((RANKS,), tl.int32)
    for ahead in range(program, blocks + programs, programs):
        if ahead < blocks:
            trace.mark(events, trace.PUSH, ahead)
            sums = _products(g, h, weight, ahead, M, N, g_stride, h_stride, PIECES, ROWS, COLUMNS)
            row_sums.send((sums,), ahead, notes, number, M, context, ROWS, WORLD, RANKS)
        block = ahead - programs
        if block >= 0:
            trace.mark(events, trace.WAIT, block)
            sums, missing = row_sums.receive(block, notes, number, M, deadline, context, ROWS, WORLD, RANKS)
            absent = tl.maximum(absent, missing)
            if tl.max(missing, axis=0) == 0:
                trace.mark(events, trace.STORE, block)
                row = tl.cast(block * ROWS, tl.int64) + tl.arange(0, ROWS)
                scale = tl.load(scales + row, mask=row < M, other=0.0)
                t = (sums[0] * scale / H)[:, None]
                # The threads that load what the last block left need not be those that stored it.
                signal.settle()
                for first in range(0, N, COLUMNS):
                    lane = first + tl.arange(0, COLUMNS)
                    i, j = row[:, None], lane[None, :]
                    mask = (i < M) & (j < N)
                    w = tl.load(weight + j, mask=j < N, other=0.0).to(tl.float32)
                    gradient = tl.load(g + i * g_stride + j, mask=mask, other=0.0).to(tl.float32)
                    normal = (
                        tl.load(h + i * h_stride + j, mask=mask, other=0.0).to(tl.float32) * scale[:, None]
                    )
                    value = scale[:, None] * (gradient * w - normal * t)
                    if ADDS:
                        value += tl.load(more + i * more_stride + j, mask=mask, other=0.0).to(tl.float32)
                    tl.store(grad + i * N + j, rounded(value, grad.dtype.element_ty), mask=mask)
                    place = partials + tl.cast(program, tl.int64) * N + lane
                    of_weight = tl.sum(gradient * normal, axis=0)
                    if block >= programs:
                        of_weight += tl.load(place, mask=lane < N, other=0.0)
                    tl.store(place, of_weight, mask=lane < N)
    row_sums.report(absent, deadline, number, context, _OP, WORLD)
    if signal.is_last(context):
        message.advance(messages, number)
    trace.mark(events, trace.END, -1)
