"""Gradients of the products with RMSNorm over ranks, against the whole model in float64; both ops, and that of a
sum alone, in one graph.

Bodies return what was wrong, in words.
"""

from typing import Any

import torch
from torch.nn import functional

import collectives
import stream_k
from pyrocshmem import Heap
from reference.accuracy import make_operand
from tests.fused.norm_bodies import EPS, F16, F32, Case, Whole
from tests.stream_k.products import device

CASES = (
    Case(7, 24, 17, F32, F32, bias=F32),
    Case(3, 18, 16, F16, F16, bias=F32),
    Case(2, 5, 3, F32, F32, residual=False),
    Case(5, 9, 6, F32, F32, bias=F32, hidden=9),
)
# How far a gradient may be off: roundings of the operands' dtype, relative to its largest element.
ROUNDINGS = 8


def leaves(*tensors: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """By their place, copies of those that are there, which want a gradient."""
    return {at: x.detach().clone().requires_grad_() for at, x in enumerate(tensors) if x is not None}


def expected(whole: Whole, y_grad: torch.Tensor, total_grad: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """Of a, b, the weight, the bias and the residual of the model as one, in float64."""
    residual = None if total_grad is None else whole.residual
    tensors = (whole.a, whole.b, whole.weight, whole.bias, residual)
    exact = leaves(*(None if x is None else x.double() for x in tensors))
    a, b, weight, *rest = exact.values()
    h = sum(rest, a @ b)
    loss = (functional.rms_norm(h, h.shape[1:], weight, EPS) * y_grad.double()).sum()
    if total_grad is not None:
        loss = loss + (h * total_grad.double()).sum()
    return dict(zip(exact, torch.autograd.grad(loss, list(exact.values())), strict=True))


def found(
    whole: Whole, y_grad: torch.Tensor, total_grad: torch.Tensor | None
) -> tuple[dict[int, torch.Tensor], dict[int, tuple[Any, ...]]]:
    """(the same of this rank's shares, which part of the whole each is)."""
    if total_grad is None:
        columns = (..., whole.columns)
        parts = {0: (...,), 1: columns, 2: columns, 3: columns}
        tensors = (whole.a, whole.b, whole.weight, whole.bias)
        mine = leaves(*(None if x is None else x[parts[at]] for at, x in enumerate(tensors)))
        y = stream_k.gemm_rms_norm_all_scatter(
            mine[0], mine[1], mine[2], EPS, hidden=whole.case.hidden, group=whole.heap, bias=mine.get(3)
        )
        outs, grads = [y], [y_grad]
    else:
        parts = {0: (..., whole.inner), 1: (whole.inner,), 2: (...,), 3: (...,), 4: (...,)}
        mine = leaves(whole.a[parts[0]], whole.b[parts[1]], whole.weight, whole.bias, whole.residual)
        y, total = stream_k.gemm_all_reduce_rms_norm(
            mine[0], mine[1], mine.get(4), mine[2], EPS, group=whole.heap, bias=mine.get(3)
        )
        outs, grads = [y, total], [y_grad, total_grad]
    return dict(zip(mine, torch.autograd.grad(outs, list(mine.values()), grads), strict=True)), parts


def gradients(heap: Heap) -> list[str]:
    """Of every operand of both ops; what differs, or would pass when doubled: the mistake of replicated tensors."""
    wrong = []
    for seed, case in enumerate(CASES):
        for scattered in (False, True):
            whole = Whole(case, heap, seed, scattered)
            # Of a result that every rank has there is one gradient.
            y_grad, total_grad = (
                make_operand((case.M, whole.b.shape[1]), case.dtype, seed, 0, tag=tag).to(device())
                for tag in ("y", "total")
            )
            given = (whole, y_grad, None if scattered else total_grad)
            mine, parts = found(*given)
            heap.synchronize()
            for at, exact in expected(*given).items():
                exact = exact[parts[at]]
                allowed = ROUNDINGS * torch.finfo(case.dtype).eps * exact.abs().max()
                off, doubled = (((k * mine[at].double() - exact).abs() > allowed).any() for k in (1, 2))
                if off or not doubled:
                    wrong.append(f"{case}, scattered={scattered}: gradient {at}, doubled {bool(doubled)}")
    return wrong


def traced(heap: Heap) -> list[str]:
    """Both ops and `all_reduce_rms_norm` in one graph, with gradients and without, at two sizes, against the same
    eagerly: what differs."""

    def all_three(
        a: torch.Tensor, b: torch.Tensor, r: torch.Tensor, w: torch.Tensor, c: torch.Tensor
    ) -> torch.Tensor:
        y, total = stream_k.gemm_all_reduce_rms_norm(a, b, r, w, EPS, group=heap)
        z = stream_k.gemm_rms_norm_all_scatter(y, c, w[: c.shape[1]], EPS, group=heap)
        more = collectives.all_reduce_rms_norm(total, y, w, EPS, group=heap)
        return (z * z.detach().cos()).sum() + sum(x.pow(3).sum() for x in more)

    torch._dynamo.reset()
    graph = torch.compile(all_three, fullgraph=True, backend="aot_eager")
    wrong = []
    for M in (4, 3):
        whole = Whole(Case(M, 24, 16, F32, F32), heap, M)
        more = Whole(Case(M, 8, 24, F32, F32), heap, M, scattered=True)
        shares = whole.a[:, whole.inner], whole.b[whole.inner]
        mine = list(leaves(*shares, whole.residual, whole.weight, more.b[:, more.columns]).values())
        pairs: list[tuple[torch.Tensor, ...]]
        pairs = [torch.autograd.grad(run(*mine), mine) for run in (all_three, graph)]
        with torch.no_grad():
            pairs = [(*grads, run(*mine)) for grads, run in zip(pairs, (all_three, graph), strict=True)]
        for number, (eager, other) in enumerate(zip(*pairs, strict=True)):
            if not torch.allclose(eager, other, rtol=1e-5, atol=1e-5):
                wrong.append(f"{M} rows, {number}")
    return wrong
