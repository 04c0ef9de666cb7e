"""`rms_norm`: RMSNorm of rows whose columns are spread over ranks, with an optional residual, differentiable.

    y = collectives.rms_norm(x, weight, 1e-6, group=group)                        # own columns of the result
    y, h = collectives.rms_norm(x, weight, 1e-6, group=group, residual=h)         # norm of x + h, which is returned
    y = collectives.rms_norm(x, weight, 1e-6, group=group, replicated=True)       # all columns, on every rank

h = x + residual, rounded to the residual's dtype; result = h * weight / sqrt(mean of h^2 over all columns + eps).
The kernels and their protocol are in `rms_norm_kernels`, the launches in `rms_norm_plan`; here are the checks, the
operators of torch.library and their derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pyrocshmem.calls.op import Op, Sizes, register
from pyrocshmem.calls.operators import define, dispatched, find, name_of, once, ops, ranks, refuse
from pyrocshmem.calls.tensors import (
    as_rows,
    check_eps,
    check_held,
    check_plain,
    check_writable,
    share_memory,
    tell_autograd,
)
from pyrocshmem.calls.workspace import Workspace, find_workspace
from pyrocshmem.checks import as_integer
from pyrocshmem.collectives.rms_norm_plan import Norm, NormPlan, backward, forward, plan_key
from pyrocshmem.elements import DTYPES, names
from pyrocshmem.shards import shard_range


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    group: Any = None,
    residual: torch.Tensor | None = None,
    replicated: bool = False,
    hidden: int | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the columns of all ranks of `group`, whose sums of squares are added in fp32.

    x: [..., N], this rank's columns, ordinary memory; float16, bfloat16 or float32; rows that are not contiguous are
    copied. weight: [N], contiguous, of these columns, of any of these dtypes. residual: of x's shape and any of these
    dtypes; added before the norm. eps: added to the mean of squares, 0 or more. group: as in `all_reduce`.
    Over several hosts the sums are an `all_reduce`, and a replicated result is an `all_scatter`.
    hidden: the columns of all ranks together, R x N unless given; rank r holds block r of `torch.tensor_split(..., R)`.
    replicated: the result has all columns, on every rank, instead of this rank's.
    out: where the result goes, [..., N] or (replicated) [..., hidden], with contiguous rows; None: a new tensor. Not
    replicated, it may be x or residual itself; replicated, where it is contiguous and on the heap at the same offset on
    all ranks, peers write it directly. out_dtype: of the result; None: that of `out` or of x.

    Returns the result; with a residual (result, x + residual), the latter in the residual's dtype. Differentiable in x,
    weight and residual, where `out` is not given; the gradient of a replicated result must be the same on all ranks.
    Rows of zeros with eps 0 are NaN, and a NaN stays in its row, as in `torch.nn.functional.rms_norm`
    (https://arxiv.org/abs/1910.07467).

    Raises TypeError, ValueError before any launch; `CallMismatch`, `PeerTimeout`, `PeerAborted`,
    `HeapOutOfMemory`, `WorkspaceBusy`.
    """
    by_hand = not dispatched(x, weight, residual, whole=out is None)
    if by_hand:
        heap, space = find_workspace(group, workspace)
        rank, world_size = space.rank, space.world_size
    else:
        name = name_of(group, workspace)
        rank, world_size = ranks(name)
    hidden = all_columns(_width(x), hidden, rank, world_size)
    if out_dtype is None:
        out_dtype = out.dtype if isinstance(out, torch.Tensor) else x.dtype
    norm = Norm(eps, hidden, replicated, out_dtype)
    tensors = {"x": x, "weight": weight, "residual": residual, "out": out}
    key = plan_key(space, x, weight, residual, norm, out) if by_hand else None
    plan: NormPlan | None = space.plans.get(key) if by_hand else None
    if plan is None:
        _check(tensors, norm)
    if not by_hand:
        refuse("rms_norm", out=out)
        op = ops.rms_norm
        result, updated, _ = op(x, weight, residual, *norm, name)
        return result if residual is None else (result, updated)
    if x.device != heap.device:
        raise ValueError(f"x is on {x.device}, the group's heap on {heap.device}; both must be one device")
    if out is not None:
        _check_apart(out, tensors, replicated)
        tell_autograd(out)
    run = plan.run if plan is not None else partial(forward, space, norm=norm)
    result, updated, _ = run(x, weight, residual, out=out)
    return result if residual is None else (result, updated)


def _workspace(name: str) -> Workspace:
    """What an operator's group stands for: see `pyrocshmem.calls.operators.name_of`."""
    return find_workspace(*find(name))[1]


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    hidden: int,
    replicated: bool,
    out_dtype: torch.dtype,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(result, x + residual, or nothing without a residual, scales [M])."""
    norm = Norm(eps, hidden, replicated, out_dtype)
    result, updated, scales = forward(_workspace(group), x, weight, residual, norm)
    return result, x.new_empty(0) if residual is None else updated, scales


def _shapes(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    hidden: int,
    replicated: bool,
    out_dtype: torch.dtype,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], hidden if replicated else x.shape[-1])
    updated = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    scales = x.new_empty(math.prod(x.shape[:-1]), dtype=torch.float32)
    return x.new_empty(shape, dtype=out_dtype), updated, scales


def _run_backward(
    g: torch.Tensor,
    more: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    hidden: int,
    dtype: torch.dtype,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of h, of the weight)."""
    return backward(_workspace(group), g, more, h, weight, scales, hidden, dtype)


def _backward_shapes(
    g: torch.Tensor,
    more: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    hidden: int,
    dtype: torch.dtype,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return h.new_empty(h.shape, dtype=dtype), torch.empty_like(weight)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, residual, _, ctx.hidden, _, _, ctx.group = inputs
    result, updated, scales = output
    ctx.zeros = partial(torch.zeros, result.shape, dtype=result.dtype, device=result.device)
    ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
    ctx.save_for_backward(x if residual is None else updated, weight, scales)
    ctx.mark_non_differentiable(scales)
    ctx.set_materialize_grads(False)


@once
def _differentiate(
    ctx: Any, g: torch.Tensor | None, more: torch.Tensor | None, _: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    h, weight, scales = ctx.saved_tensors
    x_dtype, residual_dtype = ctx.dtypes
    if residual_dtype is None:
        more = None
    if g is None:
        # Nothing reads this rank's columns of the norm; the peers' may be read, and their squares need its sums.
        g = ctx.zeros()
    dtype = x_dtype if residual_dtype is None else torch.promote_types(x_dtype, residual_dtype)
    grad, of_weight = ops.rms_norm_backward(g, more, h, weight, scales, ctx.hidden, dtype, ctx.group)
    return _cast(grad, x_dtype), of_weight, _cast(grad, residual_dtype), *(None,) * 5


def _cast(x: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    return None if x is None or dtype is None else x.to(dtype)


def _check_apart(out: torch.Tensor, tensors: dict[str, torch.Tensor | None], replicated: bool) -> None:
    """ValueError where `out` shares memory with an operand that is still read while it is written."""
    for name in ("x", "weight", "residual"):
        tensor = tensors[name]
        if tensor is None:
            continue
        # A program writes an element after it has read that of the same place, and no other.
        same = (out.data_ptr(), out.stride(), out.dtype) == (tensor.data_ptr(), tensor.stride(), tensor.dtype)
        if share_memory(as_rows(out), as_rows(tensor)) and (replicated or not same):
            raise ValueError(f"out shares memory with {name}; give another out, or, sharded, {name} itself")


def _sized(sizes: Sizes) -> Callable[[int], object]:
    x, weight, space = sizes.empty(sizes.rows, sizes.N), sizes.empty(sizes.N), sizes.workspace
    return lambda rows: rms_norm(x[:rows], weight, 1e-6, group=space.heap, workspace=space)


register(
    Op(
        name="rms_norm",
        package="collectives",
        holds="its columns of x, M x N/R",
        result="its columns of the RMSNorm of whole rows; replicated: all columns, M x N",
        schema="(Tensor x, Tensor weight, Tensor? residual, float eps, SymInt hidden, bool replicated, "
        "ScalarType out_dtype, str group) -> (Tensor, Tensor, Tensor)",
        run=_run,
        shapes=_shapes,
        keep=_remember,
        backward=_differentiate,
        sized=_sized,
        command="rms_norm",
        steps="square, all_reduce of the sums, scale",
        reference="rms_norm",
    )
)
define(
    "collectives::rms_norm_backward",
    "(Tensor g, Tensor? more, Tensor h, Tensor weight, Tensor scales, SymInt hidden, ScalarType dtype, "
    "str group) -> (Tensor, Tensor)",
    _run_backward,
    _backward_shapes,
)


def _width(x: torch.Tensor) -> int:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}, a torch.Tensor is needed")
    if x.ndim == 0:
        raise ValueError("x has no dimension, at least one is needed: the columns of this rank")
    return x.shape[-1]


def all_columns(columns: int, hidden: int | None, rank: int, world_size: int) -> int:
    """The columns of all ranks, `hidden` if given. ValueError where this one doesn't hold its own of them, TypeError
    where it is no integer."""
    if hidden is None:
        return world_size * columns
    hidden = as_integer("hidden", hidden)
    first, end = shard_range(hidden, rank, world_size)
    if columns != end - first:
        raise ValueError(
            f"{columns} columns on rank {rank}, {end - first} of hidden = {hidden} are needed; where ranks hold "
            "different numbers, give hidden, and the columns that torch.tensor_split gives each"
        )
    return hidden


def _check(tensors: dict[str, torch.Tensor | None], norm: Norm) -> None:
    """Raise TypeError or ValueError for what does not fit."""
    x, weight, out = tensors["x"], tensors["weight"], tensors["out"]
    assert x is not None
    wanted = dict.fromkeys(tensors, tuple(x.shape)) | {
        "weight": (x.shape[-1],),
        "out": tuple(norm.shape(x)),
    }
    for name, tensor in tensors.items():
        if tensor is None and name in ("residual", "out"):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, a torch.Tensor is needed")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}, allowed are {names()}")
        check_held(name, tensor)
        if tuple(tensor.shape) != wanted[name] or tensor.device != x.device:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} on {tensor.device}, {wanted[name]} on {x.device} is needed"
            )
    out_dtype = norm.out_dtype
    if out_dtype not in DTYPES or (out is not None and out.dtype != out_dtype):
        got = "" if out is None else f", out is {out.dtype}"
        raise TypeError(f"out_dtype is {out_dtype}{got}; allowed are {names()}")
    check_eps(norm.eps)
    assert weight is not None
    check_plain("weight", weight)
    if not weight.is_contiguous():
        raise ValueError(f"weight has strides {weight.stride()}; contiguous is needed")
    if out is None:
        return
    check_writable("out", out)
    if as_rows(out).data_ptr() != out.data_ptr():
        raise ValueError(
            f"out has shape {tuple(out.shape)} and strides {out.stride()}; contiguous rows are needed"
        )
