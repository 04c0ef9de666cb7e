"""Small collectives: one kernel that exchanges messages (`pyrocshmem.message`), for all of them.

R ranks. A rank sends each peer a part of its tensor, or all of it to everyone; what arrives is summed over ranks, or
stored side by side:

    one-shot all-reduce   all of x to everyone, sum
    reduce-scatter        part j of x to rank j, sum
    two-shot all-reduce   part j of x to rank j, sum, the sum to everyone, store
    all-gather            all of x to everyone, store; all-scatter: the same, as columns
    broadcast             the root's x to everyone; of the others, as the protocol wants, the first quad

A program does block b of every part, on all ranks, so that it waits for programs with its own number only. Sums are
fp32, over ranks in an order that depends on R alone, rounded once: the same bits on every rank.

Neither x nor out need be on the heap. The slots are: region A, [R sources][quads of a part], and for a two-shot
region B, the same for the sums.

Blocks are [quads, ranks]: the ranks of a quad lie in neighbouring lanes of a warp, so that sums need no shared memory,
and a warp still moves 128 contiguous bytes to or from each of 4 ranks.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from pyrocshmem import message, signal, target, trace
from pyrocshmem.device import remote
from pyrocshmem.trace import now_ns
from stream_k.launch import Launch
from stream_k.workspace import Workspace

_INTERPRETED = tl.constexpr(target.interpreted())


@triton.jit
def _place(element, row, chunk, width, COLUMNS: tl.constexpr, WORLD: tl.constexpr):
    """Where element `element` of part `row` lies. Example, COLUMNS, width 4, R = 2: element 5 of part 1 is in row
    1, column 4 + 1 of 8: place 13."""
    if COLUMNS:
        place = element // width * (WORLD * width) + row * width + element % width
    else:
        place = row * chunk + element
    return place


@triton.jit
def _load(
    x,
    element,
    end,
    row,
    chunk,
    width,
    mask,
    COLUMNS: tl.constexpr,
    WORLD: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The quads that start at `element` of part `row`, of elements before `end`."""
    if ALIGNED:
        place = _place(element, row, chunk, width, COLUMNS, WORLD)
        words = message.fetch((x + place).to(tl.pointer_type(tl.int32), bitcast=True), mask & (element < end))
    else:
        words = ()
        PER_WORD: tl.constexpr = 32 // x.dtype.element_ty.primitive_bitwidth
        for k in tl.static_range(4):
            word = tl.zeros(element.shape, tl.int32)
            for i in tl.static_range(PER_WORD):
                e = element + k * PER_WORD + i
                value = tl.load(
                    x + _place(e, row, chunk, width, COLUMNS, WORLD), mask=mask & (e < end), other=0
                )
                word |= _bits(value) << (i * 16)
            words = words + (word,)
    return words


@triton.jit
def _store(
    out, words, element, end, row, chunk, width, mask, COLUMNS: tl.constexpr, WORLD: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """The counterpart of `_load`."""
    if ALIGNED:
        place = _place(element, row, chunk, width, COLUMNS, WORLD)
        message.keep((out + place).to(tl.pointer_type(tl.int32), bitcast=True), words, mask & (element < end))
    else:
        DTYPE: tl.constexpr = out.dtype.element_ty
        PER_WORD: tl.constexpr = 32 // DTYPE.primitive_bitwidth
        for k in tl.static_range(4):
            for i in tl.static_range(PER_WORD):
                e = element + k * PER_WORD + i
                value = _value(words[k], i, DTYPE)
                tl.store(out + _place(e, row, chunk, width, COLUMNS, WORLD), value, mask=mask & (e < end))


@triton.jit
def _bits(value):
    """The bits of an element in the low end of an int32."""
    if value.dtype.primitive_bitwidth == 32:
        bits = value.to(tl.int32, bitcast=True)
    else:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits


@triton.jit
def _value(word, i: tl.constexpr, DTYPE: tl.constexpr):
    """Element `i` of a word."""
    if DTYPE.primitive_bitwidth == 32:
        value = word.to(DTYPE, bitcast=True)
    else:
        value = (word >> (16 * i)).to(tl.int16).to(DTYPE, bitcast=True)
    return value


@triton.jit
def _rounded(total, DTYPE: tl.constexpr):
    """fp32 sums as bits of DTYPE in the low end of an int32."""
    if _INTERPRETED and DTYPE == tl.bfloat16:
        # The interpreter cuts off where hardware rounds to nearest, ties to even.
        bits = total.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(total == total, bits, 0x7FC0) & 0xFFFF
    else:
        bits = _bits(total.to(DTYPE))
    return bits


@triton.jit
def _sum(words, valid, DTYPE: tl.constexpr):
    """Words of the sums over parts (axis 1) where `valid`, in fp32, each rounded once."""
    sums = ()
    PER_WORD: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    for k in tl.static_range(4):
        word = tl.zeros((words[0].shape[0],), tl.int32)
        for i in tl.static_range(PER_WORD):
            value = _value(words[k], i, DTYPE).to(tl.float32)
            # -0.0 is what changes no sum, not even one of zeros.
            total = tl.sum(tl.where(valid, value, -0.0), axis=1)
            word |= _rounded(total, DTYPE) << (16 * i)
        sums = sums + (message.clean(word),)
    return sums


@triton.jit
def _spread(words, rows: tl.constexpr):
    """Blocks [Q] as [Q, rows], the same for every row."""
    spread = ()
    for k in tl.static_range(4):
        spread = spread + (tl.broadcast_to(words[k][:, None], [words[k].shape[0], rows]),)
    return spread


@triton.jit
def _cleaned(words):
    cleaned = ()
    for k in tl.static_range(4):
        cleaned = cleaned + (message.clean(words[k]),)
    return cleaned


@triton.jit
def exchange_kernel(
    x, out, messages, slot_quads, context, n, chunk, width, root, events,
    SCATTERS: tl.constexpr, SUMS: tl.constexpr, GATHERS: tl.constexpr, COLUMNS: tl.constexpr,
    BROADCASTS: tl.constexpr, ALIGNED: tl.constexpr, OP: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr,
    QUADS: tl.constexpr,
):  # fmt: skip
    """x [n] to out by way of messages. chunk: elements of a part; width: of a row, where parts are columns.

    Example, two-shot all-reduce, R = 2, n = 1000, chunk = 504: rank 0 sums elements 0 to 503 of both ranks, rank 1
    elements 504 to 999, and each sends its sums to both.
    """
    control, abort, record, heap_bases = context
    DTYPE: tl.constexpr = x.dtype.element_ty
    PER_QUAD: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    rank = tl.load(control + signal.RANK)
    count, slot = message.begin(messages, slot_quads, context)
    deadline = message.deadline_ns(context)
    part_quads = tl.cdiv(chunk, PER_QUAD)
    trace.mark(events, trace.PUSH, tl.program_id(0))

    ranks = tl.arange(0, ROWS)
    row = ranks[None, :]
    quad = tl.program_id(0) * QUADS + tl.arange(0, QUADS)[:, None]
    element = tl.cast(quad, tl.int64) * PER_QUAD
    there = (row < WORLD) & (quad < part_quads)
    sent, heard = there, there
    if BROADCASTS:
        sent = there & (quad < tl.where(rank == root, part_quads, 1))
        heard = there & (quad < tl.where(row == root, part_quads, 1))

    if SCATTERS:
        part, end = row, tl.minimum(chunk, n - tl.cast(row, tl.int64) * chunk)
    else:
        part, end = row * 0, tl.minimum(chunk, n)
    words = _cleaned(_load(x, element, end, part, chunk, width, there, False, WORLD, ALIGNED))
    inbox = slot + (tl.cast(row, tl.int64) * part_quads + quad) * 4
    slots = remote(slot, tl.minimum(ranks, WORLD - 1), heap_bases)[None, :]
    outbox = slots + (tl.cast(rank, tl.int64) * part_quads + quad) * 4
    message.push(outbox, words, sent)
    message.restore(messages, slot_quads, count, context, ROWS * QUADS)
    last = signal.is_last(context)

    trace.mark(events, trace.WAIT, -1)
    words, late = message.poll(inbox, heard, deadline, context)
    if SUMS:
        trace.mark(events, trace.REDUCE, tl.program_id(0))
        sums = _sum(words, row < WORLD, DTYPE)
        if GATHERS:
            trace.mark(events, trace.PUSH, tl.program_id(0))
            region = tl.cast(WORLD, tl.int64) * part_quads * 4
            message.push(outbox + region, _spread(sums, ROWS), there)
            trace.mark(events, trace.WAIT, -1)
            words, later = message.poll(inbox + region, there, deadline, context)
            late |= later
        else:
            if SCATTERS:
                end = tl.minimum(chunk, n - tl.cast(rank, tl.int64) * chunk)
            first = tl.zeros((1, 1), tl.int32)
            _store(
                out,
                _spread(sums, 1),
                element,
                end,
                first,
                chunk,
                width,
                quad < part_quads,
                False,
                WORLD,
                ALIGNED,
            )
    if GATHERS:
        trace.mark(events, trace.STORE, tl.program_id(0))
        if SUMS:
            end = tl.minimum(chunk, n - tl.cast(row, tl.int64) * chunk)
        kept, column = there, row
        if BROADCASTS:
            kept, column = there & (row == root), row * 0
        _store(out, words, element, end, column, chunk, width, kept, COLUMNS, WORLD, ALIGNED)
    if last:
        message.advance(count, (2 if SUMS and GATHERS else 1) * WORLD * part_quads * 4, context)
    if tl.max(late) != 0:
        waited = (now_ns() - deadline) // 1000 + tl.load(control + signal.BUDGET_US)
        who = tl.argmax(tl.max(late, axis=0), axis=0)
        signal.report(who, tl.program_id(0), count, count - 1, waited, count, context, OP, WORLD)
    trace.mark(events, trace.END, -1)


# What a program moves at a time: a quad a thread. On a CPU, where a program costs more than its data, more.
_THREADS = 256
_INTERPRETED_QUADS = 2048

KINDS = {
    "one_shot": {"SUMS": True},
    "reduce_scatter": {"SCATTERS": True, "SUMS": True},
    "two_shot": {"SCATTERS": True, "SUMS": True, "GATHERS": True},
    "all_gather": {"GATHERS": True},
    "all_scatter": {"GATHERS": True, "COLUMNS": True},
    "broadcast": {"GATHERS": True, "BROADCASTS": True},
}  # fmt: skip
_OFF = dict.fromkeys(("SCATTERS", "SUMS", "GATHERS", "COLUMNS", "BROADCASTS"), False)


def slot_bytes(kind: str, x: torch.Tensor, world_size: int) -> int:
    """Bytes of one of the three slots of an exchange of `x`."""
    part = _part(kind, x, world_size) * x.element_size()
    quads = -(-part // message.QUAD_BYTES)
    return quads * message.QUAD_BYTES * world_size * (2 if kind == "two_shot" else 1)


def _part(kind: str, x: torch.Tensor, world_size: int) -> int:
    """Elements of a part of `x`."""
    if kind == "two_shot":
        # Whole quads, so that parts stay aligned.
        per_quad = message.QUAD_BYTES // x.element_size()
        return -(-x.numel() // (world_size * per_quad)) * per_quad
    if kind == "reduce_scatter":
        rows = -(-x.shape[0] // world_size)
        return rows * (x.numel() // x.shape[0])
    return x.numel()


def exchange(
    workspace: Workspace, op: int, kind: str, x: torch.Tensor, out: torch.Tensor, root: int = 0
) -> None:
    """Launch an exchange of contiguous `x` into contiguous `out`. The first of a kind is compared between ranks,
    compiled and loaded by all."""
    heap = workspace.heap
    assert heap is not None
    recorded = trace.recorder() is not None
    key: Hashable = (
        "exchange", op, kind, x.shape, x.dtype, x.data_ptr() % 16, out.data_ptr() % 16, root, recorded
    )  # fmt: skip
    plan: tuple[Launch, tuple[Any, ...]] | None = workspace.plans.get(key)
    if plan is None:
        plan = _plan(workspace, key, op, kind, x, out, root, recorded)
    launch, rest = plan
    with workspace:
        launch((x, out, *rest))


def _plan(
    workspace: Workspace,
    key: Hashable,
    op: int,
    kind: str,
    x: torch.Tensor,
    out: torch.Tensor,
    root: int,
    recorded: bool,
) -> tuple[Launch, tuple[Any, ...]]:
    heap = workspace.heap
    assert heap is not None
    world = heap.world_size
    call = f"{kind} of {tuple(x.shape)} {x.dtype} by messages, root {root}, recorded={recorded}"
    new = call not in workspace.agreed
    if new:
        heap.vote(call)
    chunk = _part(kind, x, world)
    width = x.shape[-1] if x.ndim else 1
    aligned = all(
        size % message.QUAD_BYTES == 0
        for size in (
            x.data_ptr(),
            out.data_ptr(),
            chunk * x.element_size(),
            x.numel() * x.element_size(),
            width * x.element_size() if kind == "all_scatter" else 0,
        )
    )
    messages, slot_quads = workspace.messages(slot_bytes(kind, x, world))
    rows = triton.next_power_of_2(world)
    quads = (_INTERPRETED_QUADS if target.interpreted() else _THREADS) // rows
    part_quads = -(-chunk * x.element_size() // message.QUAD_BYTES)
    constants = {
        **_OFF,
        **KINDS[kind],
        "ALIGNED": aligned,
        "OP": op,
        "WORLD": world,
        "ROWS": rows,
        "QUADS": quads,
    }
    launch = Launch(exchange_kernel, -(-part_quads // quads), constants, _THREADS // 32, 1)
    rest = (messages, slot_quads, workspace.context, x.numel(), chunk, width, root)
    launch.compile((x, out, *rest))
    if new:
        heap.vote(f"{call}: ready")
        workspace.agreed[call] = 0
    workspace.plans[key] = launch, rest
    return launch, rest
