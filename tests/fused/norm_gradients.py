"""Gradients of the products with RMSNorm over ranks, against the whole model in float64; both ops, and that of a
sum alone, in torch.library.

Bodies return what was wrong, in words.
"""

import contextlib
import functools
from typing import Any
from unittest import mock

import torch
from torch._ops import OpOverloadPacket
from torch.nn import functional

from pyrocshmem import Heap, collectives, stream_k
from pyrocshmem.calls.operators import name_of
from pyrocshmem.collectives import library
from pyrocshmem.reference.accuracy import make_operand
from pyrocshmem.stream_k.ops import gemm_rms_norm
from tests.fused.norm_bodies import EPS, F16, F32, Case, Whole
from tests.library.bodies import Ops, eagerly
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


def operators(heap: Heap) -> list[str]:
    """Of both ops and `all_reduce_rms_norm`: opcheck; that a call with a gradient is the fused one, of the same bits as
    without, and differentiated by the ops that it should be; that none of them goes through the dispatcher eagerly.
    What is wrong."""
    found = []
    whole = Whole(Case(5, 24, 17, F16, F32, bias=F16), heap, 7)
    columns = Whole(Case(5, 12, 17, F16, F32, bias=F16), heap, 7, scattered=True)
    a, b, residual, weight, bias = leaves(
        whole.a[:, whole.inner], whole.b[whole.inner], whole.residual, whole.weight, whole.bias
    ).values()
    given = (columns.a, columns.b, columns.weight, columns.bias)
    c, d, part, shift = leaves(
        given[0], *(x[..., columns.columns] for x in given[1:] if x is not None)
    ).values()
    x = torch.full((5, 24), 0.1 + heap.rank, dtype=F16, device=device(), requires_grad=True)
    name = name_of(heap)
    exchanged, products = ["rms_norm_backward", "gemm_all_reduce", "gemm"], ["gemm", "gemm"]
    calls: tuple[tuple[Any, tuple[Any, ...], list[str]], ...] = (
        (
            torch.ops.stream_k.gemm_all_reduce_rms_norm.default,
            (a, b, residual, weight, EPS, name, bias, False, None),
            products,
        ),
        (
            torch.ops.stream_k.gemm_rms_norm_all_scatter.default,
            (c, d, part, EPS, heap.world_size * d.shape[1], name, shift, False),
            exchanged,
        ),
        (
            torch.ops.collectives.all_reduce_rms_norm.default,
            (x, residual, weight, EPS, "auto", name),
            [],
        ),
    )
    for op, args, _ in calls:
        for test, outcome in torch.library.opcheck(op, args, raise_exception=False).items():
            if outcome != "SUCCESS":
                found.append(f"{op}: {test}: {outcome}")
    public = (
        lambda: stream_k.gemm_all_reduce_rms_norm(a, b, residual, weight, EPS, group=heap, bias=bias),
        lambda: (stream_k.gemm_rms_norm_all_scatter(c, d, part, EPS, group=heap, bias=shift),),
        lambda: collectives.all_reduce_rms_norm(x, residual, weight, EPS, group=heap),
    )
    for call, (op, _, duals) in zip(public, calls, strict=True):
        with torch.no_grad():
            plain = call()
        with Ops() as forward:
            results = call()
        with Ops() as backward:
            torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        again, through = eagerly(call)
        ones = [torch.ones_like(result) for result in results]
        _, behind = eagerly(functools.partial(torch.autograd.backward, again, ones))
        if (forward.seen, backward.seen, through + behind) != ([op._opname], duals, []):
            found.append(f"{op}: {forward.seen}, {backward.seen}, eagerly {through + behind}")
        if not all(
            torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(plain, results, again, strict=True)
        ):
            found.append(f"{op}: other bits with a gradient")
    return found


def fused_calls(backend: str, seen: list[list[str]]) -> Any:
    """A backend of torch.compile, which lists the ops of this package that each graph has."""

    def compile_graph(module: torch.fx.GraphModule, inputs: Any) -> Any:
        ops = [node.target for node in module.graph.nodes if isinstance(node.target, OpOverloadPacket)]
        names = [op._qualified_op_name.split("::") for op in ops]
        seen.append([name for space, name in names if space in ("stream_k", "collectives")])
        return torch._dynamo.lookup_backend(backend)(module, inputs)

    return compile_graph


def calls_made(heap: Heap) -> list[int]:
    """How often each op runs in a compiled function that calls it thrice: for a result that nobody reads, and for two
    equal ones."""
    a, b, w = (torch.ones(shape, device=device(), requires_grad=True) for shape in ((3, 4), (4, 6), (6,)))
    # Not what counts in its module below, which nothing can trace.
    gemm_all_reduce_rms_norm = stream_k.gemm_all_reduce_rms_norm

    def thrice(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = []
        for _ in range(3):
            y, _ = gemm_all_reduce_rms_norm(a, b, None, w, EPS, group=heap)
            z = stream_k.gemm_rms_norm_all_scatter(a, b, w, EPS, group=heap)
            v, _ = collectives.all_reduce_rms_norm(b, None, w, EPS, group=heap)
            x.append(y.sum() + z.sum() + v.sum())
        return x[1] * x[2]

    torch._dynamo.reset()
    places = (
        (gemm_rms_norm, "gemm_all_reduce_rms_norm"), (gemm_rms_norm, "scattered"), (library, "all_reduce_rms_norm")
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(mock.patch.object(module, name, wraps=getattr(module, name)))
            for module, name in places
        ]
        # With the partitioner of the backends that ship, which merges what is equal.
        torch.compile(thrice, fullgraph=True, backend="aot_eager_decomp_partition")(a, b, w)
        heap.synchronize()
        return [each.call_count for each in made]


def traced(heap: Heap) -> list[str]:
    """Both ops and `all_reduce_rms_norm` in one graph, one node each, with gradients and without, at two sizes, against
    the same eagerly: what differs."""

    def all_three(
        a: torch.Tensor, b: torch.Tensor, r: torch.Tensor, w: torch.Tensor, c: torch.Tensor
    ) -> torch.Tensor:
        y, total = stream_k.gemm_all_reduce_rms_norm(a, b, r, w, EPS, group=heap)
        z = stream_k.gemm_rms_norm_all_scatter(y, c, w[: c.shape[1]], EPS, group=heap)
        more = collectives.all_reduce_rms_norm(total, y, w, EPS, group=heap)
        return (z * z.detach().cos()).sum() + sum(x.pow(3).sum() for x in more)

    torch._dynamo.reset()
    seen: list[list[str]] = []
    graph = torch.compile(all_three, fullgraph=True, backend=fused_calls("aot_eager", seen))
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
    nodes = ["gemm_all_reduce_rms_norm", "gemm_rms_norm_all_scatter", "all_reduce_rms_norm"]
    return wrong + [f"a graph of {found}" for found in seen if found != nodes]
