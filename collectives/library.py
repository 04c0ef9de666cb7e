"""The collectives on whole tensors in `torch.library`: schemas, shapes for tracing, gradients, order.

    torch.ops.collectives.all_reduce(x, "auto", pyrocshmem.calls.operators.name_of(group))

A public function (`collectives.whole_tensors`) calls these operators (`pyrocshmem.calls.operators`) where a gradient
is needed or anything watches it, and launches its kernel right away otherwise. With g the gradient of the result,
that of x is

    all_reduce       g
    all_gather       this rank's rows of g
    all_scatter      this rank's columns of g
    broadcast        g on the root, zeros elsewhere
    reduce_scatter   g of all ranks, by rows

and `all_reduce_rms_norm` has that of the total that it normalizes, for x and the residual (`gradients` there).

A result that every rank has whole has one gradient, the same on all ranks (`stream_k.ops.gradients`), so only
reduce_scatter's backward communicates; it can be differentiated once. Graphs keep each call, and their order, as with
the fused ops.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pyrocshmem.calls.op import Op, register
from pyrocshmem.calls.operators import find, once, ops, ranks
from pyrocshmem.collectives import whole_tensors
from pyrocshmem.collectives.all_reduce_rms_norm import all_reduce_rms_norm, gradients


def _run(name: str) -> Any:
    """The public function, by the schema's arguments. Below the dispatcher nothing needs a gradient."""
    option = {"all_reduce": "algorithm", "broadcast": "root"}.get(name)
    function = getattr(whole_tensors, name)

    def run(x: torch.Tensor, *more: Any) -> torch.Tensor:
        *options, label = more
        group, workspace = find(label)
        chosen = {option: options[0]} if option is not None else {}
        with torch.no_grad():
            return function(x, group=group, workspace=workspace, **chosen)

    return run


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
    _, _, weight, ctx.eps, *_ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], weight)


@once
def _of_norm(ctx: Any, g: torch.Tensor | None, more: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    _, wants_residual, wants_weight, *_ = ctx.needs_input_grad
    total, weight = ctx.saved_tensors
    grad, of_weight = gradients(g, more, total, weight, ctx.eps, wants_weight)
    return grad, grad if wants_residual else None, of_weight, None, None, None


def _num_rows(rows: int, rank: int, world_size: int) -> int:
    """Of the rank's block of `torch.tensor_split`, without a branch on a size that may be symbolic."""
    return (rows + world_size - 1 - rank) // world_size


def _shape(name: str) -> Any:
    def make(x: torch.Tensor, *more: Any) -> torch.Tensor:
        rank, world_size = ranks(more[-1])
        shape = list(x.shape)
        if name == "all_gather":
            shape[0] *= world_size
        elif name == "all_scatter":
            shape[1] *= world_size
        elif name == "reduce_scatter":
            shape[0] = _num_rows(shape[0], rank, world_size)
        return x.new_empty(shape)

    return make


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, *options, ctx.group = inputs
    ctx.length = x.shape[0] if x.ndim else 1
    ctx.root = options[0] if options else None


def _of_all_reduce(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return g, None, None


def _of_all_gather(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
    rank, _ = ranks(ctx.group)
    return g.narrow(0, rank * ctx.length, ctx.length), None


def _of_all_scatter(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
    rank, world_size = ranks(ctx.group)
    width = g.shape[1] // world_size
    return g.narrow(1, rank * width, width), None


def _of_broadcast(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return (g if ranks(ctx.group)[0] == ctx.root else torch.zeros_like(g)), None, None


@once
def _of_reduce_scatter(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
    _, world_size = ranks(ctx.group)
    gather = ops.all_gather
    if ctx.length % world_size == 0:
        return gather(g, ctx.group), None
    # Blocks of one length travel.
    longest = -(-ctx.length // world_size)
    block = g.new_zeros(longest, *g.shape[1:])
    block[: g.shape[0]] = g
    blocks = gather(block, ctx.group).split(longest)
    sizes = (_num_rows(ctx.length, rank, world_size) for rank in range(world_size))
    return torch.cat([each[:size] for each, size in zip(blocks, sizes, strict=True)]), None


_SCHEMA = "(Tensor x, str group) -> Tensor"
for _op in (
    Op(
        name="all_reduce",
        package="collectives",
        holds="x, any shape",
        result="the sum over ranks, on every rank",
        schema="(Tensor x, str algorithm, str group) -> Tensor",
        backward=_of_all_reduce,
        command="all_reduce",
        steps="all_reduce",
        reference="all_reduce",
    ),
    Op(
        name="all_gather",
        package="collectives",
        holds="x, M x ...",
        result="x of all ranks, one below the other, R M x ...",
        schema=_SCHEMA,
        backward=_of_all_gather,
        command="all_gather",
        steps="all_gather",
        reference="all_gather",
    ),
    Op(
        name="reduce_scatter",
        package="collectives",
        holds="x, M x ...",
        result="its M/R rows of the sum over ranks",
        schema=_SCHEMA,
        backward=_of_reduce_scatter,
        command="reduce_scatter",
        steps="reduce_scatter",
        reference="reduce_scatter",
    ),
    Op(
        name="all_scatter",
        package="collectives",
        holds="x, M x N",
        result="x of all ranks, side by side, M x R N",
        schema=_SCHEMA,
        backward=_of_all_scatter,
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
        backward=_of_broadcast,
        command="broadcast",
        steps="broadcast",
        reference="broadcast",
    ),
):
    register(replace(_op, run=_run(_op.name), shapes=_shape(_op.name), keep=_keep))
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
        command="all_reduce_rms_norm",
        steps="all_reduce, add, rms_norm",
        reference="all_reduce_rms_norm",
    )
)
