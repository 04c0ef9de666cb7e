"""One gather, several products: the rows of all ranks times each of several matrices, `all_gather_gemm(a, [q, k, v])`.

While the rows come, the op multiplies by the widest matrix, which takes longest and so hides them best; the other
products follow, each a GEMM of the gathered rows. Nothing joins the matrices: that would copy them on every call, and
of few rows they are nearly all that a product reads.

Backward, with dC_i the gradient of C_i = A B_i and ' a transpose: A's gradient is the sum of all dC_i B_i', as one
`gemm_reduce_scatter` of [dC_0 dC_1 ..] with [B_0 B_1 ..]', which are copied for it; that of each B_i is gemm(A', dC_i).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pyrocshmem.calls import invariance
from pyrocshmem.calls.operators import (
    define,
    dispatched,
    find,
    name_of,
    needs_gradient,
    once,
    ops,
    ranks,
    refuse,
)
from pyrocshmem.calls.tensors import check_held
from pyrocshmem.calls.workspace import Workspace, find_workspace
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.local_gemm.operands import check_product
from pyrocshmem.stream_k.local_gemm.plan import run_gemm
from pyrocshmem.stream_k.local_gemm.scales import Scaled, Scaling, data_of
from pyrocshmem.stream_k.ops.gradients import both_gradients, product_like, sum_of_rows
from pyrocshmem.stream_k.ops.op import ACTIVATIONS, GemmOp, Request, run

NAME = "stream_k::all_gather_gemms"
# biased: which of the products have a bias (PyTorch differentiates no list that has a None in it). Returns the products
# and the gathered A; nothing in its place where it is not wanted.
SCHEMA = (
    "(Tensor a, Tensor[] bs, str group, SymInt num_rows, Tensor[] biases, int[] biased, str activation, "
    "bool allow_tf32, ScalarType? partial_dtype, bool save_gathered) -> Tensor[]"
)


class Several(NamedTuple):
    """A call as the caller made it: as `Request`, with a list of each of b, bias and out, equally long."""

    a: torch.Tensor
    bs: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor | None]
    outs: Sequence[torch.Tensor | None]
    activation: str = "none"
    allow_tf32: bool = False
    config: Config | None = None
    partial_dtype: torch.dtype | None = None
    num_rows: int | None = None
    # Of 8-bit operands, one for each b, all with the same scales of a.
    scalings: Sequence[Scaling] = ()


def as_list(name: str, given: Any, count: int) -> list[Any]:
    """What the caller gave for each of `count` matrices; None is nothing for any. ValueError, TypeError for others."""
    if given is None:
        return [None] * count
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{name} is a {type(given).__name__} beside {count} matrices; give a list, or None")
    if len(given) != count:
        raise ValueError(f"{name} has {len(given)} entries for {count} matrices; give one for each, or None")
    return [*given]


def whole_rows(a: torch.Tensor) -> torch.Tensor:
    """`a`, or a copy, whose rows lie one behind the other, as copies between ranks need them. What is no matrix is
    refused where operands are checked."""
    if not isinstance(a, torch.Tensor) or a.ndim != 2 or (a.stride(1) == 1 and a.stride(0) == a.shape[1]):
        return a
    check_held("a", a)
    return a.contiguous().as_strided(a.shape, (a.shape[1], 1))


def call(
    op: GemmOp, x: Several, save_gathered: bool, group: Any, workspace: Workspace | None
) -> list[torch.Tensor]:
    """The products, in the order of the matrices: through an operator where they have a gradient or something watches
    them, straight to the kernels otherwise."""
    plain = x.config is None and all(out is None for out in x.outs)
    operands = (x.a, *x.bs, *x.biases)
    if not dispatched(*operands, whole=plain):
        return run_products(op, x, False, group, workspace)[0]
    refuse("all_gather_gemm", out=None if all(out is None for out in x.outs) else x.outs, config=x.config)
    late = x.activation if needs_gradient(operands) else "none"
    name = name_of(group, workspace)
    num_rows = x.a.shape[0] * ranks(name)[1] if x.num_rows is None else x.num_rows
    activation = "none" if late != "none" else x.activation
    biased = [number for number, bias in enumerate(x.biases) if bias is not None]
    biases = [x.biases[number] for number in biased]
    more = (activation, x.allow_tf32, x.partial_dtype, save_gathered and needs_gradient(tuple(x.bs)))
    *found, _ = torch.ops.stream_k.all_gather_gemms(x.a, x.bs, name, num_rows, biases, biased, *more)
    return [ACTIVATIONS[late](c) for c in found] if late != "none" else found


def run_products(
    op: GemmOp, x: Several, save_gathered: bool, group: Any, workspace: Workspace | None
) -> tuple[list[torch.Tensor], Any]:
    """(the products, the gathered A where it is asked for, of 8 bits a `Scaled`), whatever becomes of gradients. op:
    `all_gather_gemm`'s."""
    if len(x.bs) > 1:  # a single one is checked by `run`
        for number, (b, bias) in enumerate(zip(x.bs, x.biases, strict=True)):
            check_product(x.a, b, bias, x.activation, x.scalings[number] if x.scalings else None)
    a = whole_rows(x.a)
    options = (x.activation, False, x.allow_tf32, x.config, None, x.num_rows)
    if not x.bs:
        none = a.new_empty(a.shape[-1], 0)
        return [], run(op, Request(a, none, None, None, *options, True), group, workspace)[1]
    widest = 0 if len(x.bs) == 1 else max(range(len(x.bs)), key=lambda number: x.bs[number].shape[1])
    gathers = save_gathered or len(x.bs) > 1
    request = Request(a, x.bs[widest], x.outs[widest], x.biases[widest], *options, gathers)
    if x.scalings:
        request = request._replace(scaling=x.scalings[widest])
    found = run(op, request, group, workspace)
    if not gathers:
        return [found], None
    first, gathered = found
    with invariance.at_least(invariance.current(find_workspace(group, workspace)[1])):
        rest = x._replace(a=data_of(gathered))
        if isinstance(gathered, Scaled):
            rest = rest._replace(scalings=[each._replace(a=gathered.scale) for each in x.scalings])
        products = [first if number == widest else _multiplied(rest, number) for number in range(len(x.bs))]
    return products, gathered if save_gathered else None


def _multiplied(x: Several, number: int) -> torch.Tensor:
    """A product with the gathered A."""
    more = (x.activation, x.outs[number], x.allow_tf32, None, None, None)
    return run_gemm(x.a, x.bs[number], x.biases[number], *more, x.scalings[number] if x.scalings else None)


def _run(
    op: GemmOp, a: torch.Tensor, bs: list[torch.Tensor], group: str, num_rows: int, biases: list[torch.Tensor],
    biased: list[int], activation: str, allow_tf32: bool, partial_dtype: Any, save_gathered: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """The call by the schema's arguments."""
    given = dict(zip(biased, biases, strict=True))
    lists = (bs, [given.get(number) for number in range(len(bs))], [None] * len(bs))
    x = Several(a, *lists, activation, allow_tf32, None, None, num_rows)
    products, gathered = run_products(op, x, save_gathered, *find(group))
    return [*products, a.new_empty(0, a.shape[1]) if gathered is None else gathered]


def _shapes(
    a: torch.Tensor, bs: list[torch.Tensor], group: str, num_rows: int, biases: list[torch.Tensor],
    biased: list[int], activation: str, allow_tf32: bool, partial_dtype: Any, save_gathered: bool,
) -> list[torch.Tensor]:  # fmt: skip
    given = dict(zip(biased, biases, strict=True))
    for number, b in enumerate(bs):
        check_product(a, b, given.get(number), activation)
    rows = a.new_empty(num_rows if save_gathered else 0, a.shape[1])
    return [*(a.new_empty(num_rows, b.shape[1]) for b in bs), rows]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    """`setup_context`: keeps the gathered A in the place of A where the call made it."""
    a, bs, ctx.group, ctx.num_rows, biases, ctx.biased, activation, *more = inputs
    ctx.allow_tf32, ctx.partial_dtype, ctx.saved = more
    if activation != "none":
        raise ValueError(f"the op has no gradient with activation {activation!r}: apply it to the results")
    # PyTorch's `needs_input_grad` is flat here and has lists in the backward pass.
    ctx.needs = (a.requires_grad, any(b.requires_grad for b in bs), False)
    ctx.b_wants = [b.requires_grad for b in bs]
    ctx.by_columns = [b.stride(0) == 1 and b.stride(1) != 1 for b in bs]
    ctx.bias_dtypes = [bias.dtype if bias.requires_grad else None for bias in biases]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[-1])
    ctx.zeros = functools.partial(torch.zeros, dtype=a.dtype, device=a.device)
    ctx.save_for_backward((output[-1] if ctx.saved else a) if ctx.needs[1] else None, *bs)


@once
def _gradients(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Of a, of each b, of each bias, from those of the products: one that is missing counts as zeros, since the peers
    may have it."""
    rows, *bs = ctx.saved_tensors
    of = [
        ctx.zeros((ctx.num_rows, b.shape[1])) if grad is None else grad
        for b, grad in zip(bs, grads, strict=True)
    ]
    if rows is not None and not ctx.saved:
        more = (ctx.num_rows, None, "none", ctx.allow_tf32, None, True)
        _, rows = ops.all_gather_gemm(rows, rows.new_empty(rows.shape[1], 0), ctx.group, *more)

    def for_a() -> torch.Tensor:
        more = (None, "none", ctx.allow_tf32, ctx.partial_dtype)
        return ops.gemm_reduce_scatter(torch.cat(of, 1), torch.cat([b.t() for b in bs]), ctx.group, *more)

    def for_bs() -> list[torch.Tensor | None]:
        each = zip(of, ctx.b_wants, ctx.by_columns, strict=True)
        return [product_like(by, ctx.allow_tf32, rows, grad) if wants else None for grad, wants, by in each]

    grad_a, grad_bs = both_gradients(ctx, for_a, for_bs, of[0])
    of_biases = [
        sum_of_rows(of[number], dtype) for number, dtype in zip(ctx.biased, ctx.bias_dtypes, strict=True)
    ]
    return grad_a, *(grad_bs or [None] * len(bs)), *of_biases


def _backward(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    *of_products, _ = grads
    grad_a, *rest = _gradients(ctx, *of_products)
    count = len(of_products)
    # An empty list, whatever it is of, is one of tensors to PyTorch.
    return grad_a, rest[:count], None, None, rest[count:], None if ctx.biased else [], *(None,) * 4


def define_several(op: GemmOp) -> None:
    """The operator, which makes its gather by `op`, `all_gather_gemm`'s."""
    define(NAME, SCHEMA, functools.partial(_run, op), _shapes, _keep, _backward)
