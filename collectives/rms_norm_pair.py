"""`rms_norm_pair`: two norms of the same tokens, of queries and keys, in one exchange and one kernel.

    q, k = collectives.rms_norm_pair(q, k, q_weight, k_weight, 1e-6, group=group)       # over the columns of all ranks
    q, k = collectives.rms_norm_pair(q, k, q_weight, k_weight, 1e-6, head_dim=128)      # over each head

q and k may be columns of one product, such as that of queries, keys and values: they are read where they lie. Over the
columns of all ranks each has the bits of `collectives.rms_norm`, whose sums travel two by two (`row_sums`). A head lies
on one rank, so norms of heads exchange nothing.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from pyrocshmem import dependent_launch, message, note, signal, status, trace
from pyrocshmem.calls import invariance, planning, remembered
from pyrocshmem.calls.call_name import CallName
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.operators import define, dispatched, find, name_of, once, ops, ranks
from pyrocshmem.calls.planned import NUM_WARPS
from pyrocshmem.calls.tensors import (
    as_rows,
    check_eps,
    check_plain,
    kind,
    laid_alike,
    new_like,
    rows_laid_alike,
)
from pyrocshmem.calls.workspace import Workspace, find_workspace
from pyrocshmem.checks import as_integer
from pyrocshmem.collectives import row_sums
from pyrocshmem.collectives.epilogue import rounded
from pyrocshmem.collectives.rms_norm import all_columns
from pyrocshmem.collectives.rms_norm_kernels import normalize, squares_of
from pyrocshmem.collectives.rms_norm_plan import Norm, pieces_of
from pyrocshmem.collectives.rms_norm_plan import forward as norm_of_columns
from pyrocshmem.collectives.row_sums import Blocks
from pyrocshmem.elements import DTYPES, names
from pyrocshmem.target import num_sms

Pair = tuple[torch.Tensor, torch.Tensor]

_OP = tl.constexpr(status.op_number("rms_norm_pair"))
# Of heads: elements that a program has at a time, and programs on a multiprocessor.
_HELD, _SHARE = 4096, 8


class Side(NamedTuple):
    """One of the two, as kernels take it: x [M, columns], `stride` elements from one row to the next, weight [columns]
    or [head's columns], out and scales [M] (None: nobody needs them). hidden: columns of all ranks, or heads of a
    row."""

    x: Any
    weight: Any
    out: Any
    scales: Any
    columns: Any
    hidden: Any
    stride: Any


@triton.jit
def _normalize(side, sums, block, M, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A block of rows, whose squares have these sums."""
    normalize(
        side.x, side.stride, side.weight, (side.out,), side.columns, side.scales, sums, block, M, side.columns,
        side.hidden, eps, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def norm_pair_kernel(
    one, other, messages, slot_quads, context, M, eps, events,
    ONE: tl.constexpr, OTHER: tl.constexpr, PIECES: tl.constexpr, PIECES_OTHER: tl.constexpr, ROWS: tl.constexpr,
    WORLD: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Both norms over the columns of all ranks; one, other: `Side`. ONE, OTHER: columns at a time. PIECES,
    PIECES_OTHER: see `rms_norm_kernels.squares_of`. The protocol is that of `rms_norm_kernels`."""
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
            of_one = squares_of(
                one.x, one.x, one.x, ahead, M, one.columns, one.stride, 0, False, PIECES, ROWS, ONE
            )
            of_other = squares_of(
                other.x, other.x, other.x, ahead, M, other.columns, other.stride, 0, False, PIECES_OTHER, ROWS, OTHER
            )  # fmt: skip
            row_sums.send((of_one, of_other), ahead, notes, number, M, context, ROWS, WORLD, RANKS)
        block = ahead - programs
        if block >= 0:
            trace.mark(events, trace.WAIT, block)
            sums, missing = row_sums.receive(
                block, notes, number, M, deadline, context, ROWS, WORLD, RANKS, 2
            )
            absent = tl.maximum(absent, missing)
            if tl.max(missing, axis=0) == 0:
                trace.mark(events, trace.STORE, block)
                _normalize(one, sums[0], block, M, eps, ROWS, ONE)
                _normalize(other, sums[1], block, M, eps, ROWS, OTHER)
    row_sums.report(absent, deadline, number, context, _OP, WORLD)
    if signal.is_last(context):
        message.advance(messages, number)
    trace.mark(events, trace.END, -1)


@triton.jit
def _normalize_heads(side, block, M, eps, D, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Heads number block * ROWS and on, of D columns, row by row."""
    head = tl.cast(block * ROWS, tl.int64) + tl.arange(0, ROWS)
    i, lane = (head // side.hidden)[:, None], tl.arange(0, LANES)[None, :]
    j = (head % side.hidden)[:, None] * D + lane
    mask = (i < M) & (lane < D)
    value = tl.load(side.x + i * side.stride + j, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(side.weight + lane, mask=lane < D, other=0.0).to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(value * value, axis=1) / D + eps)
    value = rounded(value * scale[:, None] * w, side.out.dtype.element_ty)
    tl.store(side.out + i * side.columns + j, value, mask=mask)


@triton.jit(do_not_specialize=["M"])
def norm_heads_kernel(one, other, M, eps, events, D: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Both norms over each head of D columns. one, other: `Side`, of so many heads a row as its `hidden` says."""
    dependent_launch.wait_for_previous()
    dependent_launch.allow_next()
    first = tl.cdiv(M * one.hidden, ROWS)
    for block in range(tl.program_id(0), first + tl.cdiv(M * other.hidden, ROWS), tl.num_programs(0)):
        trace.mark(events, trace.STORE, block)
        if block < first:
            _normalize_heads(one, block, M, eps, D, ROWS, LANES)
        else:
            _normalize_heads(other, block - first, M, eps, D, ROWS, LANES)
    trace.mark(events, trace.END, -1)


def rms_norm_pair(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    *,
    group: Any = None,
    head_dim: int | None = None,
    hidden: tuple[int, int] | None = None,
    workspace: Workspace | None = None,
) -> Pair:
    """(RMSNorm of q, RMSNorm of k), contiguous, of their dtypes.

    q: [.., N], k: [.., N'], this rank's columns of the same tokens, in all but the last dimension alike; float16,
    bfloat16 or float32, one dtype for both; rows that are not contiguous are copied, columns of a larger matrix are
    not. q_weight: [N], k_weight: [N'], contiguous, of any of these dtypes. eps: added to the means of squares, 0 or
    more. Without head_dim the norms go over the columns of all ranks of `group`, as in `rms_norm`; hidden: how many
    these are, of each; None: R x N and R x N'; rank r holds block r of `torch.tensor_split(.., R)`. head_dim: the norms
    go over so many columns each, on this rank alone, and weights are [head_dim]; then `group`, `hidden` and `workspace`
    don't count.

    Differentiable. Raises TypeError, ValueError before any launch, and without head_dim `CallMismatch`, `PeerTimeout`,
    `PeerAborted`, `HeapOutOfMemory`, `WorkspaceBusy`.
    """
    by_hand = not dispatched(q, k, q_weight, k_weight)
    if head_dim is not None:
        head_dim = as_integer("head_dim", head_dim)
        _check(q, k, q_weight, k_weight, eps, head_dim)
        return _of_heads(q, k, q_weight, k_weight, float(eps), head_dim, by_hand)
    _check(q, k, q_weight, k_weight, eps, None)
    given = (None, None) if hidden is None else tuple(hidden)
    if len(given) != 2:
        raise ValueError(f"hidden is {hidden}, two numbers of columns are needed, of q and of k")
    if by_hand:
        heap, space = find_workspace(group, workspace)
        where = space.rank, space.world_size
    else:
        name = name_of(group, workspace)
        where = ranks(name)
    of_q, of_k = (all_columns(x.shape[-1], n, *where) for x, n in zip((q, k), given, strict=True))
    if not by_hand:
        found = ops.rms_norm_pair(q, k, q_weight, k_weight, eps, of_q, of_k, name)
    else:
        if q.device != heap.device:
            raise ValueError(
                f"q is on {q.device}, the group's heap on {heap.device}; both must be one device"
            )
        found = _forward(space, (q, k), (q_weight, k_weight), eps, (of_q, of_k))
    return found[0], found[1]


def _forward(
    workspace: Workspace, both: Pair, weights: Pair, eps: float, hidden: tuple[int, ...]
) -> tuple[torch.Tensor, ...]:
    """(both norms, the scales [M] of both), of arguments that are checked."""
    rows = math.prod(both[0].shape[:-1])
    # By what all ranks know alike: one of them may have no column.
    if workspace.hosts is not None or min(hidden) == 0 or rows == 0:
        found = [
            norm_of_columns(workspace, x, weight, None, Norm(eps, columns, False, x.dtype))
            for x, weight, columns in zip(both, weights, hidden, strict=True)
        ]
        return found[0][0], found[1][0], found[0][2], found[1][2]
    recorded, mode = trace.recorder() is not None, invariance.current(workspace)
    if mode:
        both = rows_laid_alike(both[0]), rows_laid_alike(both[1])
        weights = laid_alike(weights[0]), laid_alike(weights[1])
    key = ("rms_norm_pair", *map(kind, (*both, *weights)), eps, hidden, recorded, mode)
    plan: _Plan | None = workspace.plans.get(key)
    if plan is None:
        call = CallName.of(
            f"rms_norm_pair(# x {hidden[0]} and {hidden[1]}, {both[0].dtype}, eps {float(eps)!r}, {recorded=}"
            f"{invariance.of_call(workspace)})",
            rows,
        )

        def again(count: int) -> object:
            q, k = (x.new_empty(count, x.shape[-1]) for x in both)
            return _forward(workspace, (q, k), weights, eps, hidden)

        workspace.make_room(call, again)
        plan = workspace.planned_together(call, lambda _: _Plan(workspace, both, weights, eps, hidden))
        plan.called = call
        if planning.keeps_plans():
            workspace.plans[key] = plan
    return plan.run(both, weights)


class _Plan:
    """The launch of `norm_pair_kernel` for tensors of one kind."""

    called: CallName  # as the ranks compared it

    def __init__(
        self, workspace: Workspace, both: Pair, weights: Pair, eps: float, hidden: tuple[int, ...]
    ) -> None:
        heap = workspace.heap
        assert heap is not None
        world, mode, M = heap.world_size, invariance.current(workspace), math.prod(both[0].shape[:-1])
        self.workspace, self.hidden = workspace, hidden
        pieces = [pieces_of(mode, columns, world) for columns in hidden]
        one, other = (
            Blocks.of(M, x.shape[-1] // n, heap.device, alike=mode > 0)
            for x, n in zip(both, pieces, strict=True)
        )
        self.rest = (*workspace.messages(0, 2 * M * world), workspace.context, M, float(eps))
        constants = {
            "ONE": one.columns,
            "OTHER": other.columns,
            "PIECES": pieces[0],
            "PIECES_OTHER": pieces[1],
            "ROWS": one.rows,
            "WORLD": world,
            "RANKS": triton.next_power_of_2(world),
        }
        self.launch = Launch(norm_pair_kernel, one.programs, constants, NUM_WARPS, 1)
        self.launch.compile((*self._sides(both, weights)[0], *self.rest))

    def run(self, both: Pair, weights: Pair) -> tuple[torch.Tensor, ...]:
        """Enqueue the call; returns what `_forward` does."""
        sides, results = self._sides(both, weights)
        if planning.here.mode is None:
            with self.workspace.begin(self.called):
                self.launch((*sides, *self.rest))
        return results

    def _sides(self, both: Pair, weights: Pair) -> tuple[list[Side], tuple[torch.Tensor, ...]]:
        """(what the kernel gets, the results)."""
        sides = []
        for x, weight, hidden in zip(both, weights, self.hidden, strict=True):
            rows, out = as_rows(x), new_like(x)
            scales = torch.empty(len(rows), dtype=torch.float32, device=x.device)
            sides.append(Side(rows, weight, out, scales, x.shape[-1], hidden, rows.stride(0)))
        return sides, (sides[0].out, sides[1].out, sides[0].scales, sides[1].scales)


def _of_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    D: int,
    by_kernel: bool,
) -> Pair:
    """Norms over heads: where there is a gradient, or something watches, PyTorch's."""
    both = ((q, q_weight), (k, k_weight))
    if not by_kernel:
        first, second = (
            functional.rms_norm(x.unflatten(-1, (-1, D)).float(), (D,), weight.float(), eps)
            .to(x.dtype)
            .flatten(-2)
            for x, weight in both
        )
        return first, second
    sides, mode = [], invariance.current()
    for x, weight in both:
        rows = as_rows(x)
        if mode:
            rows, weight = laid_alike(rows), laid_alike(weight)
        sides.append(Side(rows, weight, new_like(x), None, x.shape[-1], x.shape[-1] // D, rows.stride(0)))
    M = len(sides[0].x)

    def make() -> Launch:
        lanes = triton.next_power_of_2(D)
        rows = max(1, _HELD // lanes)
        blocks = sum(-(-M * side.hidden // rows) for side in sides)
        programs = min(blocks, _SHARE * num_sms(q.device))
        constants = {"D": D, "ROWS": rows, "LANES": lanes}
        return Launch(norm_heads_kernel, programs, constants, NUM_WARPS, 1, chained=True)

    if q.numel() + k.numel() > 0:
        key = ("rms_norm_pair", D, *(kind(t) for side in sides for t in (side.x, side.weight, side.out)))
        remembered.launch(key, q.device, (*sides, M, eps), make)
    return sides[0].out, sides[1].out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int | None,
) -> None:
    """Raise TypeError or ValueError for what does not fit."""
    if head_dim is not None and head_dim < 1:
        raise ValueError(f"head_dim is {head_dim}, allowed are 1 or more")
    for name, x in (("q", q), ("k", k), ("q_weight", q_weight), ("k_weight", k_weight)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, a torch.Tensor is needed")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}, allowed are {names()}")
        check_plain(name, x)
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}; all must be on one device")
    if q.ndim == 0 or q.shape[:-1] != k.shape[:-1] or q.dtype != k.dtype:
        raise ValueError(
            f"q is {tuple(q.shape)} of {q.dtype}, k {tuple(k.shape)} of {k.dtype}; one dtype, and all dimensions but "
            "the last alike, are needed"
        )
    for name, x, weight in (("q", q, q_weight), ("k", k, k_weight)):
        columns = x.shape[-1] if head_dim is None else head_dim
        if columns and x.shape[-1] % columns != 0:
            raise ValueError(f"{name} has {x.shape[-1]} columns, no whole number of heads of {head_dim}")
        if weight.shape != (columns,) or not weight.is_contiguous():
            raise ValueError(
                f"{name}_weight is {tuple(weight.shape)}, strides {weight.stride()}; contiguous ({columns},) is needed"
            )
    check_eps(eps)


def _run(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, q_hidden: int,
    k_hidden: int, group: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    workspace = find_workspace(*find(group))[1]
    with torch.no_grad():
        return _forward(workspace, (q, k), (q_weight, k_weight), eps, (q_hidden, k_hidden))


def _shapes(q: torch.Tensor, k: torch.Tensor, *more: Any) -> tuple[torch.Tensor, ...]:
    scales = (x.new_empty(math.prod(x.shape[:-1]), dtype=torch.float32) for x in (q, k))
    return q.new_empty(q.shape), k.new_empty(k.shape), *scales


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, q_weight, k_weight, _, q_hidden, k_hidden, ctx.group = inputs
    ctx.hidden = q_hidden, k_hidden
    ctx.save_for_backward(q, k, q_weight, k_weight, *output[2:])
    ctx.mark_non_differentiable(*output[2:])


@once
def _backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Of each as that of `rms_norm`."""
    q, k, q_weight, k_weight, *scales = ctx.saved_tensors
    found = [
        ops.rms_norm_backward(g, None, x, weight, scale, hidden, x.dtype, ctx.group)
        for g, x, weight, scale, hidden in zip(
            grads[:2], (q, k), (q_weight, k_weight), scales, ctx.hidden, strict=True
        )
    ]
    return found[0][0], found[1][0], found[0][1], found[1][1], None, None, None, None


define(
    "collectives::rms_norm_pair",
    "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, SymInt q_hidden, SymInt k_hidden, str group) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _run,
    _shapes,
    _keep,
    _backward,
)
