"""The collectives on whole tensors in `torch.library`: schemas, shapes for tracing, gradients, order.

    torch.ops.collectives.all_reduce(x, "auto", pyrocshmem.calls.operators.name_of(group), "sum")

A public function (`collectives.whole_tensors`) calls these operators (`pyrocshmem.calls.operators`) where a gradient
is needed or anything watches it, and launches its kernel right away otherwise. With g the gradient of the result,
that of x is

    all_reduce       g; of averages g / R
    all_gather       this rank's rows of g
    all_scatter      this rank's columns of g
    broadcast        g on the root, zeros elsewhere
    reduce_scatter   g of all ranks, by rows; of averages over R

Along another dimension its rows are those of that dimension. Largest and smallest values have no gradient, and
 `all_reduce_rms_norm` has that of the total that it normalizes, for x and the residual (`gradients` there).

A result that every rank has whole has one gradient, the same on all ranks (`stream_k.ops.gradients`), so only
reduce_scatter's backward communicates; it can be differentiated once. Graphs keep each call, and their order, as with
the fused ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from pyrocshmem.calls.op import Op, Sizes, register
from pyrocshmem.calls.operators import find, once, ops, ranks
from pyrocshmem.collectives import whole_tensors
from pyrocshmem.collectives.all_reduce_rms_norm import all_reduce_rms_norm, gradients

# What follows x in the schemas.
_ARGUMENTS = {
    "all_reduce": ("algorithm", "group", "op"),
    "all_gather": ("group", "gather_dim"),
    "reduce_scatter": ("group", "op", "scatter_dim"),
    "all_scatter": ("group",),
    "broadcast": ("root", "group"),
}


def _run(name: str) -> Any:
    """The public function, by the schema's arguments. Below the dispatcher nothing needs a gradient."""
    function = getattr(whole_tensors, name)

    def run(x: torch.Tensor, *more: Any) -> torch.Tensor:
        options = dict(zip(_ARGUMENTS[name], more, strict=False))
        group, workspace = find(options.pop("group"))
        with torch.no_grad():
            return function(x, group=group, workspace=workspace, **options)

    return run


def _sized(name: str) -> Callable[[Sizes], Callable[[int], object]]:
    """Of calls with so many rows of x."""
    function = getattr(whole_tensors, name)

    def sized(sizes: Sizes) -> Callable[[int], object]:
        x, space = sizes.empty(sizes.rows, sizes.N), sizes.workspace
        return lambda rows: function(x[:rows], group=space.heap, workspace=space)

    return sized


def _sized_norm(sizes: Sizes) -> Callable[[int], object]:
    x, weight, space = sizes.empty(sizes.rows, sizes.N), sizes.empty(sizes.N), sizes.workspace
    more: Any = {"group": space.heap, "workspace": space}

    def call(rows: int) -> object:
        return [
            all_reduce_rms_norm(x[:rows], residual, weight, 1e-6, **more) for residual in (None, x[:rows])
        ]

    return call


def _run_norm(
    x: torch.Tensor, residual: Any, weight: torch.Tensor, eps: float, algorithm: str, label: str
) -> tuple[torch.Tensor, torch.Tensor]:
    group, workspace = find(label)
    with torch.no_grad():
        return all_reduce_rms_norm(
            x, residual, weight, eps, group=group, algorithm=algorithm, workspace=workspace
        )


def _norm_shapes(x: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, _, weight, ctx.eps, _, group = inputs
    ctx.ranks = ranks(group)[1]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], weight)


@once
def _of_norm(ctx: Any, g: torch.Tensor | None, more: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    _, wants_residual, wants_weight, *_ = ctx.needs_input_grad
    total, weight = ctx.saved_tensors
    grad, of_weight = gradients(g, more, total, weight, ctx.eps, wants_weight, ctx.ranks)
    return grad, grad if wants_residual else None, of_weight, None, None, None


def _num_rows(rows: int, rank: int, world_size: int) -> int:
    """Of the rank's block of `torch.tensor_split`, without a branch on a size that may be symbolic."""
    return (rows + world_size - 1 - rank) // world_size


def _shape(name: str) -> Any:
    def make(x: torch.Tensor, *more: Any) -> torch.Tensor:
        options = dict(zip(_ARGUMENTS[name], more, strict=False))
        rank, world_size = ranks(options["group"])
        shape = list(x.shape)
        if name == "all_gather":
            shape[options.get("gather_dim", 0)] *= world_size
        elif name == "all_scatter":
            shape[1] *= world_size
        elif name == "reduce_scatter":
            dim = options.get("scatter_dim", 0)
            shape[dim] = _num_rows(shape[dim], rank, world_size)
        return x.new_empty(shape)

    return make


def _keep(name: str) -> Any:
    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, *more = inputs
        options = dict(zip(_ARGUMENTS[name], more, strict=False))
        ctx.group, ctx.root, ctx.op = options["group"], options.get("root"), options.get("op", "sum")
        ctx.dim = 1 if name == "all_scatter" else options.get("gather_dim", options.get("scatter_dim", 0))
        ctx.length = x.shape[ctx.dim] if x.ndim else 1

    return keep


def _backward(name: str, gradient: Any) -> Any:
    """`gradient` of x alone, for the schema's arguments."""

    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole_tensors.check_differentiable(name, ctx.op)
        return (gradient(ctx, g), *(None for _ in _ARGUMENTS[name]))

    return backward


def _of_all_reduce(ctx: Any, g: torch.Tensor) -> torch.Tensor:
    return g / ranks(ctx.group)[1] if ctx.op == "avg" else g


def _of_all_gather(ctx: Any, g: torch.Tensor) -> torch.Tensor:
    return g.narrow(ctx.dim, ranks(ctx.group)[0] * ctx.length, ctx.length)


def _of_broadcast(ctx: Any, g: torch.Tensor) -> torch.Tensor:
    return g if ranks(ctx.group)[0] == ctx.root else torch.zeros_like(g)


def _of_reduce_scatter(ctx: Any, g: torch.Tensor) -> torch.Tensor:
    _, world_size = ranks(ctx.group)
    dim, gather = ctx.dim, ops.all_gather
    if ctx.op == "avg":
        g = g / world_size
    if ctx.length % world_size == 0:
        return gather(g, ctx.group, dim)
    # Blocks of one length travel.
    longest = -(-ctx.length // world_size)
    block = g.new_zeros(*g.shape[:dim], longest, *g.shape[dim + 1 :])
    block.narrow(dim, 0, g.shape[dim]).copy_(g)
    blocks = gather(block, ctx.group, dim).split(longest, dim)
    sizes = (_num_rows(ctx.length, rank, world_size) for rank in range(world_size))
    return torch.cat([each.narrow(dim, 0, size) for each, size in zip(blocks, sizes, strict=True)], dim)


for _op in (
    Op(
        name="all_reduce",
        package="collectives",
        holds="x, any shape",
        result="the sum over ranks, on every rank",
        schema='(Tensor x, str algorithm, str group, str op="sum") -> Tensor',
        backward=_backward("all_reduce", _of_all_reduce),
        command="all_reduce",
        steps="all_reduce",
        reference="all_reduce",
    ),
    Op(
        name="all_gather",
        package="collectives",
        holds="x, M x ...",
        result="x of all ranks, one below the other, R M x ...",
        schema="(Tensor x, str group, int gather_dim=0) -> Tensor",
        backward=_backward("all_gather", _of_all_gather),
        command="all_gather",
        steps="all_gather",
        reference="all_gather",
    ),
    Op(
        name="reduce_scatter",
        package="collectives",
        holds="x, M x ...",
        result="its M/R rows of the sum over ranks",
        schema='(Tensor x, str group, str op="sum", int scatter_dim=0) -> Tensor',
        backward=once(_backward("reduce_scatter", _of_reduce_scatter)),
        command="reduce_scatter",
        steps="reduce_scatter",
        reference="reduce_scatter",
    ),
    Op(
        name="all_scatter",
        package="collectives",
        holds="x, M x N",
        result="x of all ranks, side by side, M x R N",
        schema="(Tensor x, str group) -> Tensor",
        backward=_backward("all_scatter", _of_all_gather),
        command="all_scatter",
        steps="all_gather, then a copy of the column blocks",
        reference="all_scatter",
    ),
    Op(
        name="broadcast",
        package="collectives",
        holds="x, any shape",
        result="x of the root, on every rank",
        schema="(Tensor x, int root, str group) -> Tensor",
        backward=_backward("broadcast", _of_broadcast),
        command="broadcast",
        steps="broadcast",
        reference="broadcast",
    ),
):
    _of_name = {"run": _run(_op.name), "shapes": _shape(_op.name), "keep": _keep(_op.name)}
    register(replace(_op, sized=_sized(_op.name), **_of_name))
register(
    Op(
        name="barrier",
        package="collectives",
        holds="nothing",
        result="what follows on a rank's stream runs after what came before on any rank's",
        command="barrier",
        steps="an all_reduce of one number",
    )
)
register(
    Op(
        name="all_reduce_rms_norm",
        package="collectives",
        holds="x and a residual, M x N",
        result="RMSNorm of the sum over ranks + residual, and that total, M x N",
        schema="(Tensor x, Tensor? residual, Tensor weight, float eps, str algorithm, str group) -> (Tensor, Tensor)",
        run=_run_norm,
        shapes=_norm_shapes,
        keep=_keep_norm,
        backward=_of_norm,
        sized=_sized_norm,
        command="all_reduce_rms_norm",
        steps="all_reduce, add, rms_norm",
        reference="all_reduce_rms_norm",
    )
)
