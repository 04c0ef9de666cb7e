"""`all_reduce_rms_norm`: a sum over ranks, plus a residual, and the RMSNorm of its rows, in one exchange of messages.

    y, h = collectives.all_reduce_rms_norm(x, h, weight, 1e-6, group=group)     # between two blocks of a transformer
    q, scale, h, _ = collectives.all_reduce_rms_norm(x, h, weight, 1e-6, quantize="rowwise", group=group)

Whoever sums an element adds the residual, in fp32, and rounds; whoever stores a row normalizes what was rounded
(`collectives.exchange_kernel`). So all ranks get the same bits. What `stream_k.gemm_all_reduce_rms_norm` does behind
its GEMM is the same, and its parts are these: `check_norm`, `results`, `normalized`, `gradients`.
"""

from __future__ import annotations

import math
from typing import Any, overload

import torch
from torch.nn import functional

from pyrocshmem import status, trace
from pyrocshmem.calls import invariance, planning
from pyrocshmem.calls.call_name import CallName
from pyrocshmem.calls.invariance import NONE, TP, Invariance
from pyrocshmem.calls.operators import dispatched, name_of, ops
from pyrocshmem.calls.planned import agree
from pyrocshmem.calls.tensors import check_eps, check_plain, kind, laid_alike, new_like
from pyrocshmem.calls.workspace import Workspace, find_workspace
from pyrocshmem.collectives.epilogue import Finish
from pyrocshmem.collectives.exchange import Exchange, cheaper_algorithm
from pyrocshmem.collectives.exchange_kernel import AfterSum
from pyrocshmem.collectives.over_hosts import exchange_over_hosts
from pyrocshmem.collectives.quantized_norm import Quantization, QuantizedNorm, Recipe, quantization, quantized
from pyrocshmem.collectives.row_norm import is_apart, row_norm, row_norm_gradients
from pyrocshmem.collectives.whole_tensors import all_reduce, check_algorithm, check_kind, check_place
from pyrocshmem.elements import DTYPES, names
from pyrocshmem.hosts import Hosts


@overload
def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    group: Any = None,
    algorithm: str = "auto",
    workspace: Workspace | None = None,
    quantize: None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    group: Any = None,
    algorithm: str = "auto",
    workspace: Workspace | None = None,
    quantize: Recipe,
    quantize_scale: torch.Tensor | None = None,
    keep_norm: bool = False,
) -> QuantizedNorm: ...


def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    group: Any = None,
    algorithm: str = "auto",
    workspace: Workspace | None = None,
    quantize: Recipe | None = None,
    quantize_scale: torch.Tensor | None = None,
    keep_norm: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | QuantizedNorm:
    """(RMSNorm of the total, the total), total = sum over ranks of x, + residual, rounded to x's dtype: on every rank,
    the same bits on all of them.

    x: [..., N], of any strides; float16, bfloat16 or float32. residual: of x's shape and dtype, the same on every rank;
    None: none. weight: [N], contiguous, of any of these dtypes. eps: added to the mean of squares, 0 or more. group,
    algorithm, workspace: as in `all_reduce`. Both results are new and contiguous. Rows of zeros with eps 0 are NaN, and
    a NaN stays in its row, as in `torch.nn.functional.rms_norm`.

    quantize: "rowwise", "blockwise", or "tensorwise" with quantize_scale, fp32 of one element: returns a
    `QuantizedNorm`, (the norm in 8 bits, its scales, the total, None), to the bits of `stream_k.quantize` of the norm
    and of what the call returns otherwise; scales [.., 1] or [.., N / 128], rounded up, which lie as those of
    `quantize`, or quantize_scale. keep_norm: with the norm itself in the place of None. There is no gradient then, and
    torch.compile traces two operators.

    Over several hosts what travels is `all_reduce`'s, and every rank normalizes. On one rank it is PyTorch's own sum
    and norm. Has a gradient, with PyTorch's derivative of the norm; those of the results must be the same on all ranks.
    Raises TypeError, ValueError before any launch; `CallMismatch` where ranks disagree, `PeerTimeout`, `PeerAborted`,
    `HeapOutOfMemory`, `WorkspaceBusy`.
    """
    how = None
    if quantize is not None or quantize_scale is not None or keep_norm:
        asked = quantize, quantize_scale, keep_norm
        how = quantization("all_reduce_rms_norm", *asked, x, residual, weight)
    by_hand = not dispatched(x, residual, weight)
    if by_hand:
        heap, space = find_workspace(group, workspace)
        recorded = trace.recorder() is not None
        mode = invariance.current(space)
        given = (kind(x), kind(residual), kind(weight), eps, algorithm, how and how.kind)
        key = ("all_reduce_rms_norm", *given, recorded, mode)
        plan: _Plan | None = space.plans.get(key)
        if plan is not None:
            return plan.run(x, residual, weight, eps, how)
    check_algorithm(algorithm)
    check_kind(x, 1, DTYPES)
    check_norm(x, x.shape, residual, weight, eps)
    if not by_hand:
        op, name = ops.all_reduce_rms_norm, name_of(group, workspace)
        return quantized(how, *op(x, residual, weight, eps, algorithm, name))
    check_place(heap, x)
    if space.hosts is not None:
        return quantized(how, *_over_hosts(space.hosts, mode, x, residual, weight, eps))
    if heap.world_size == 1:
        with invariance.at_least(mode):
            total = all_reduce(x, group=heap, workspace=space)
            return quantized(how, *normalized(total, residual, weight, eps))
    call = CallName.of(
        f"all_reduce_rms_norm(# x {x.shape[-1]} {x.dtype}, residual={residual is not None}, "
        f"weight={weight.dtype}, eps={eps}, {algorithm}, quantize={how}, {recorded=}{invariance.of_call(space)})",
        math.prod(x.shape[:-1]),
    )
    if x.numel() == 0:
        agree(space, call)
        return quantized(how, x.new_empty(x.shape), x.new_empty(x.shape))

    def again(rows: int) -> object:
        like = (t if t is None else t.new_empty(rows, t.shape[-1]) for t in (x, residual))
        more: Any = {"group": heap, "algorithm": algorithm, "workspace": space}
        more |= {"quantize": quantize, "quantize_scale": quantize_scale, "keep_norm": keep_norm}
        return all_reduce_rms_norm(next(like), next(like), weight, eps, **more)

    space.make_room(call, again)
    plan = space.planned_together(call, lambda _: _Plan(x, residual, weight, eps, algorithm, space, how))
    plan.called = call
    if planning.keeps_plans():
        space.plans[key] = plan
    return plan.run(x, residual, weight, eps, how)


def _over_hosts(
    hosts: Hosts,
    mode: Invariance,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a group over several hosts: the residual is added where the hosts' terms are, and every rank normalizes."""
    total = new_like(x)
    finish = Finish.of()._replace(residual=None if residual is None else residual.contiguous())
    given = x.resolve_neg().contiguous()
    exchange_over_hosts(hosts, status.Op.ALL_REDUCE_RMS_NORM, "all_reduce", given, total, finish=finish)
    with invariance.at_least(mode):
        return normalized(total, None, weight, eps, hosts.world_size)


class _Plan:
    """The exchange of tensors of one kind."""

    called: CallName  # as the ranks compared it

    def __init__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        algorithm: str,
        workspace: Workspace,
        how: Quantization | None,
    ) -> None:
        self.workspace = workspace
        if algorithm == "auto":
            algorithm = cheaper_algorithm(x.numel() * x.element_size(), workspace.world_size)
        self.mode = invariance.current(workspace)
        # Whose kernels are other ones, behind the exchange: the norm's, and that which quantizes it.
        self.apart = is_apart(self.mode, x, x.shape[-1], weight)
        self.quantizes_apart = self.apart or (
            how is not None and not how.is_fused(x.shape[-1], x.dtype, workspace.world_size)
        )
        out, after = self._results(x, residual, weight, eps, how)
        op = status.Op.ALL_REDUCE_RMS_NORM
        self.exchange = Exchange(workspace, op, algorithm, self._read(x), out, after=after)

    def run(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        how: Quantization | None,
    ) -> Any:
        """Enqueue the call; returns what `all_reduce_rms_norm` does."""
        out, after = self._results(x, residual, weight, eps, how)
        if planning.here.mode is None:
            with self.workspace.begin(self.called):
                self.exchange.run(self._read(x), out, after)
        if self.apart:
            with invariance.at_least(self.mode):
                return quantized(how, *normalized(out, None, weight, eps, self.workspace.world_size))
        assert after.total is not None
        if how is None or self.quantizes_apart:
            return quantized(how, out, after.total)
        return how.results(out, after)

    def _read(self, x: torch.Tensor) -> torch.Tensor:
        """x as the exchange reads it."""
        x = x.resolve_neg().contiguous()
        return laid_alike(x) if self.mode else x

    def _results(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        how: Quantization | None,
    ) -> tuple[torch.Tensor, AfterSum]:
        how = None if self.quantizes_apart else how
        out, after = results(x, residual, weight, eps, how=how, alike=self.mode > NONE)
        return (out, after._replace(total=None, weight=None)) if self.apart else (out, after)


def check_norm(
    x: torch.Tensor,
    shape: torch.Size | tuple[int, ...],
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> None:
    """TypeError or ValueError for a residual, a weight or an eps that doesn't fit sums of this shape, like x."""
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"weight is a {type(weight).__name__}, a torch.Tensor is needed")
    if weight.dtype not in DTYPES:
        raise TypeError(f"weight has dtype {weight.dtype}, allowed are {names()}")
    check_plain("weight", weight)
    N = shape[-1]
    if weight.shape != (N,) or weight.device != x.device or not weight.is_contiguous():
        raise ValueError(
            f"weight is {tuple(weight.shape)} on {weight.device}, strides {weight.stride()}; contiguous ({N},) on "
            f"{x.device} is needed"
        )
    check_eps(eps)
    if residual is None:
        return
    if not isinstance(residual, torch.Tensor):
        raise TypeError(f"residual is a {type(residual).__name__}, a torch.Tensor or None is needed")
    check_plain("residual", residual)
    if residual.dtype != x.dtype:
        raise TypeError(f"residual has dtype {residual.dtype}, allowed is {x.dtype}, that of the sum")
    if residual.shape != shape or residual.device != x.device:
        raise ValueError(
            f"residual is {tuple(residual.shape)} on {residual.device}; {tuple(shape)} on {x.device} is needed"
        )


def results(
    like: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    how: Quantization | None = None,
    alike: bool = False,
) -> tuple[torch.Tensor, AfterSum]:
    """(a new result like `like`, of any strides, what becomes of the sums on their way to it). how: the exchange
    quantizes the norm. alike: its bits must not depend on where residual and weight are."""
    total = new_like(like)
    out = new_like(like) if how is None or how.keep else total
    if residual is not None:
        residual = residual.contiguous()
    if alike:
        residual, weight = residual if residual is None else laid_alike(residual), laid_alike(weight)
    # A plan's kernel takes a float, whatever the type of a number that is equal.
    finish = Finish.of(bias)._replace(residual=residual)
    after = AfterSum(finish, like.shape[-1], total, weight, float(eps))
    return out, after if how is None else how.beside(like, after)


def normalized(
    total: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, ranks: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm, total + residual), by PyTorch. Where a row must have the same bits in every batch, those that an
    exchange between so many ranks gives it."""
    if planning.here.mode is not None:
        return torch.empty_like(total), total
    if residual is not None:
        total = total + residual
    if mode := invariance.current():
        return row_norm(total, weight, eps, 1 if mode == TP else ranks), total
    # A plain number: of a symbolic one torch 2.11's kernel on GPUs makes another.
    columns = (int(weight.shape[0]),)
    if weight.dtype == total.dtype:
        return functional.rms_norm(total, columns, weight, eps), total
    # PyTorch wants one type: neither total nor weight is rounded for that.
    return functional.rms_norm(total.float(), columns, weight.float(), eps).to(total.dtype), total


def gradients(
    g: torch.Tensor | None,
    more: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    wants_weight: bool,
    ranks: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(that of the total, that of the weight), from those of the norm, `g`, and of the total as a result, `more`, which
    may be missing. PyTorch's, which has one kernel for it: the norm is computed once more instead of kept. ranks: of
    the exchange."""
    if g is None:
        return torch.zeros_like(total) if more is None else more, None
    if mode := invariance.current():
        grad, of_weight = row_norm_gradients(g, total, weight, eps, 1 if mode == TP else ranks)
        return grad if more is None else grad + more, of_weight if wants_weight else None
    with torch.enable_grad():
        wanted = total.detach().requires_grad_(), weight.detach().requires_grad_(wants_weight)
        y, _ = normalized(wanted[0], None, wanted[1], eps)
    found = torch.autograd.grad(y, wanted if wants_weight else wanted[:1], g)
    return found[0] if more is None else found[0] + more, found[1] if wants_weight else None
