"""The launches of `rms_norm`, forward and backward.

    result, updated, scales = forward(workspace, x, weight, residual, Norm(eps, hidden, False, x.dtype))
    grad, of_weight = backward(workspace, g, None, updated, weight, scales, hidden, x.dtype)

updated: x + residual, or x. scales: fp32 [M], the factor of each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import triton

from pyrocshmem import trace
from pyrocshmem.calls import invariance, planning
from pyrocshmem.calls.call_name import CallName
from pyrocshmem.calls.graphs import Graphs
from pyrocshmem.calls.invariance import TP, blocks_of_share
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.planned import NUM_WARPS, agree, run
from pyrocshmem.calls.tensors import (
    as_rows,
    is_laid_alike,
    kind,
    laid_alike,
    new_like,
    rows_laid_alike,
    shape_of,
)
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives import rms_norm_over_hosts
from pyrocshmem.collectives.rms_norm_kernels import rms_norm_backward_kernel, rms_norm_kernel
from pyrocshmem.collectives.row_sums import Blocks
from pyrocshmem.shards import shard_range

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Norm(NamedTuple):
    """What a call asks for, beside its tensors. hidden: the number of columns of all ranks."""

    eps: float
    hidden: int
    replicated: bool
    out_dtype: torch.dtype

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Of the result."""
        return (*x.shape[:-1], self.hidden) if self.replicated else x.shape

    def templates(self, x: torch.Tensor, residual: torch.Tensor | None) -> Tensors:
        """For `new_results`: of the result, of x + residual, and of the scales."""
        updated = shape_of(x, x.shape, None if residual is None else residual.dtype)
        rows = (math.prod(x.shape[:-1]),)
        return shape_of(x, self.shape(x), self.out_dtype), updated, shape_of(x, rows, torch.float32)


def new_results(
    templates: Tensors, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None
) -> Tensors:
    """`out`, or memory for the result; memory for x + residual, or x where there is no residual; for the scales."""
    result, updated, scales = templates
    return (
        new_like(result) if out is None else out,
        x if residual is None else new_like(updated),
        new_like(scales),
    )


class Producer(Protocol):
    """A GEMM that makes x: `stream_k.local_gemm.plan.GemmPlan`, or `BlasPlan`. switch: as of `Graphs`."""

    switch: Callable[[], bool] | None

    @property
    def replayable(self) -> bool: ...

    def run(self, a: Any, b: Any, bias: torch.Tensor | None, out: torch.Tensor) -> None: ...


class _Tensors(NamedTuple):
    """Those of `rms_norm_kernel`, whose docstring says more."""

    x: torch.Tensor
    residual: torch.Tensor
    updated: torch.Tensor
    weight: torch.Tensor
    squares: torch.Tensor
    out: torch.Tensor
    scales: torch.Tensor


class NormPlan:
    """The launch of `rms_norm_kernel` for tensors of one kind.

    direct: peers write a replicated result where it belongs, not into a buffer that it is copied from. gemm: makes x,
    and is enqueued before the norm. squares: fp32 [tiles_n, M], where it leaves the sums of squares of its tiles' rows;
    None: nowhere, and the norm makes them of x.
    """

    called: CallName  # as the ranks compared it

    def __init__(
        self,
        workspace: Workspace,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
        norm: Norm,
        out: torch.Tensor | None = None,
        direct: bool = False,
        gemm: Producer | None = None,
        squares: torch.Tensor | None = None,
    ) -> None:
        heap = workspace.heap
        assert heap is not None
        world, hidden = heap.world_size, norm.hidden
        self.workspace, self.norm, self.gemm = workspace, norm, gemm
        M, N = as_rows(x).shape
        self.buffer: torch.Tensor | None = None
        if norm.replicated and not direct:
            self.buffer = workspace.buffer("results", M * hidden, norm.out_dtype)[: M * hidden].view(
                -1, hidden
            )
        self.graphs: Graphs | None = None  # not of a single launch
        if gemm is not None or self.buffer is not None:
            switch = None if gemm is None else gemm.switch
            self.graphs = Graphs(workspace, gemm is None or gemm.replayable, switch=switch)
        mode = invariance.current(workspace)
        pieces = pieces_of(mode, hidden, world)
        blocks = Blocks.of(M, N // pieces, heap.device, alike=mode > 0)
        place = workspace.messages(0, M * world)
        flags = workspace.flags(blocks.count if norm.replicated else 1)
        self.squares = squares
        tiles_n = 0 if self.squares is None else len(self.squares)
        constants = {
            "ADDS": residual is not None,
            "REPLICATED": norm.replicated,
            "TILES": Blocks.of(M, tiles_n, heap.device).columns if tiles_n else 0,
            "PIECES": pieces,
            "ROWS": blocks.rows,
            "COLUMNS": blocks.columns,
            "WORLD": world,
            "RANKS": triton.next_power_of_2(world),
        }
        self.launch = Launch(rms_norm_kernel, blocks.programs, constants, NUM_WARPS, 1)
        self.templates = norm.templates(x, residual)
        tensors = self._tensors(x, weight, residual, new_results(self.templates, x, residual, out))
        strides = tensors.x.stride(0), tensors.residual.stride(0), tensors.out.stride(0)
        first = shard_range(hidden, heap.rank, world)[0] if norm.replicated else 0
        sizes = (M, N, hidden, first, tiles_n, *strides)
        self.rest = (*place, flags, workspace.context, *sizes, float(norm.eps))
        self.launch.compile((*tensors, *self.rest))

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
        out: torch.Tensor | None = None,
        operands: tuple[Any, ...] = (),
    ) -> Tensors:
        """Enqueue the call, behind the product of `operands`, if x is one; returns what `forward` does."""
        # Memory first: allocating may wait for kernels, of all devices of a process, and must not for one that spins.
        results = new_results(self.templates, x, residual, out)
        tensors = self._tensors(x, weight, residual, results)
        if planning.here.mode is not None:
            return results
        with self.workspace.begin(self.called):
            if self.graphs is None:
                self.launch((*tensors, *self.rest))
            else:
                # An 8-bit operand is two tensors.
                read = [t for each in operands for t in (each if isinstance(each, tuple) else (each,))]
                self.graphs.run(
                    (*read, *tensors, results[0]), lambda: self._enqueue(x, operands, tensors, results[0])
                )
        return results

    def _enqueue(
        self,
        x: torch.Tensor,
        operands: tuple[Any, ...],
        tensors: tuple[torch.Tensor, ...],
        result: torch.Tensor,
    ) -> None:
        if self.gemm is not None:
            a, b, bias = operands
            self.gemm.run(a, b, bias, x)
        self.launch((*tensors, *self.rest))
        if self.buffer is not None:
            result.copy_(self.buffer.view(result.shape))

    def _tensors(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, results: Tensors
    ) -> _Tensors:
        result, updated, scales = results
        rows = as_rows(x)
        added = rows if residual is None else as_rows(residual)
        squares = scales if self.squares is None else self.squares
        target = as_rows(result) if self.buffer is None else self.buffer
        return _Tensors(rows, added, updated, weight, squares, target, scales)


def pieces_of(mode: int, hidden: int, world_size: int) -> int:
    """Into how many pieces a rank's columns are cut whose sums are a tree."""
    return blocks_of_share("hidden", hidden, world_size) if mode == TP else 1


def plan_key(
    workspace: Workspace,
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    out: torch.Tensor | None,
) -> Any:
    """Of the plan of such a call, in `Workspace.plans`."""
    given = (kind(x), kind(weight), kind(residual), kind(out), _offset(workspace, norm, out))
    return "rms_norm", *given, norm, trace.recorder() is not None, invariance.current(workspace)


def _offset(workspace: Workspace, norm: Norm, out: torch.Tensor | None) -> int | None:
    """Where on the heap peers can write a replicated result into `out` itself; None where they can't."""
    heap = workspace.heap
    assert heap is not None
    if not norm.replicated or not isinstance(out, torch.Tensor) or not out.is_contiguous():
        return None
    return heap.offset(out) if heap.is_symmetric(out) else None


def forward(
    workspace: Workspace,
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    out: torch.Tensor | None = None,
) -> Tensors:
    """(result, x + residual, scale [M] of each row in fp32) of arguments that are checked. Without a residual the
    second is x itself."""
    if workspace.hosts is not None:
        return rms_norm_over_hosts.forward(workspace, x, weight, residual, *norm, out)
    if invariance.current(workspace):
        if out is not None and not is_laid_alike(as_rows(out)):
            result, updated, scales = forward(workspace, x, weight, residual, norm)
            return out.copy_(result), updated, scales
        x, weight = rows_laid_alike(x), laid_alike(weight)
        residual = residual if residual is None else rows_laid_alike(residual)
    key = plan_key(workspace, x, weight, residual, norm, out)
    plan: NormPlan | None = workspace.plans.get(key)
    if plan is None:
        place, rows = _offset(workspace, norm, out), math.prod(x.shape[:-1])
        words = f"# x {norm.hidden}, {x.dtype}, eps {float(norm.eps)!r}, weight {weight.dtype}, residual " + (
            "none" if residual is None else str(residual.dtype)
        )
        words += f", {'replicated' if norm.replicated else 'sharded'} {norm.out_dtype}"
        words += "" if place is None else f" at offset {place}"
        words += f", recorded={trace.recorder() is not None}{invariance.of_call(workspace)}"
        call = CallName.of(f"rms_norm({words})", rows)
        if rows == 0 or norm.hidden == 0:
            agree(workspace, call)
            return new_results(norm.templates(x, residual), x, residual, out)
        direct = place is not None

        def again(count: int) -> object:
            given = (t if t is None else t.new_empty(count, t.shape[-1]) for t in (x, residual, out))
            return forward(workspace, next(given), weight, next(given), norm, next(given))

        workspace.make_room(call, again)
        plan = workspace.planned_together(
            call, lambda _: NormPlan(workspace, x, weight, residual, norm, out, direct)
        )
        plan.called = call
        if planning.keeps_plans():
            workspace.plans[key] = plan
    return plan.run(x, weight, residual, out)


def backward(
    workspace: Workspace,
    g: torch.Tensor,
    more: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    hidden: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of h in `dtype`, gradient of the weight), from g, that of the result: of the own columns, or of all,
    as the result was; `more`: that of h itself, as the caller's residual stream brings it back."""
    if workspace.hosts is not None:
        return rms_norm_over_hosts.backward(workspace, g, more, h, weight, scales, hidden, dtype)
    heap = workspace.heap
    assert heap is not None
    world, device = heap.world_size, heap.device
    mode = invariance.current(workspace)
    if mode:
        g, h, weight = rows_laid_alike(g), rows_laid_alike(h), laid_alike(weight)
        more = more if more is None else rows_laid_alike(more)
    rows = as_rows(h)
    M, N = rows.shape
    first = shard_range(hidden, heap.rank, world)[0] if g.shape[-1] != N else 0
    gradient = as_rows(g)[:, first : first + N]
    pieces = pieces_of(mode, hidden, world)
    blocks = Blocks.of(M, N // pieces, device, alike=mode > 0)
    grad = torch.empty(h.shape, dtype=dtype, device=device)
    partials = torch.empty(blocks.programs, N, dtype=torch.float32, device=device)
    call = CallName.of(
        f"rms_norm_backward(# x {hidden}, {h.dtype}, gradient {g.dtype}, weight {weight.dtype}, to {dtype}"
        f"{invariance.of_call(workspace)})",
        M,
    )
    if M == 0 or hidden == 0:
        agree(workspace, call)
        return grad, torch.zeros_like(weight)
    messages, slot_quads = workspace.planned_together(call, lambda _: workspace.messages(0, M * world))
    added = gradient if more is None else as_rows(more)
    constants = {
        "ADDS": more is not None,
        "PIECES": pieces,
        "ROWS": blocks.rows,
        "COLUMNS": blocks.columns,
        "WORLD": world,
        "RANKS": triton.next_power_of_2(world),
    }
    tensors = (gradient, added, rows, weight, scales, grad, partials)
    strides = (gradient.stride(0), added.stride(0), rows.stride(0))
    key = (call.text, more is None, *map(kind, tensors))
    args = (*tensors, messages, slot_quads, workspace.context, M, N, hidden, *strides)
    planned = call._replace(text=f"{call.text}: plan")
    run(workspace, key, planned, rms_norm_backward_kernel, constants, blocks.programs, args)
    return grad, partials.sum(0).to(weight.dtype)
