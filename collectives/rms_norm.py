"""`rms_norm`: RMSNorm of rows whose columns are spread over ranks, with an optional residual, differentiable.

    y = collectives.rms_norm(x, weight, 1e-6, group=group)                        # own columns of the result
    y, h = collectives.rms_norm(x, weight, 1e-6, group=group, residual=h)         # norm of x + h, which is returned
    y = collectives.rms_norm(x, weight, 1e-6, group=group, replicated=True)       # all columns, on every rank

h = x + residual, rounded to the residual's dtype; result = h * weight / sqrt(mean of h^2 over all columns + eps).
`rms_norm_kernels` has how; here are the checks, the operators of torch.library and their derivatives.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch

from collectives.rms_norm_kernels import as_rows, backward, columns_of, forward
from collectives.tensors import DTYPES
from pyrocshmem.heap import Heap
from stream_k.workspace import Workspace, find_workspace, workspace_for


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
    copied. weight: [N], of these columns. residual: like x, but for its dtype: added before the norm. eps: added to
    the mean of squares. hidden: the columns of all ranks, R x N unless given; rank r holds those of
    `torch.tensor_split(..., R)`. replicated: all columns on every rank, instead of its own. out: where the result
    goes, [..., N] or (replicated) [..., hidden] with contiguous rows; replicated, symmetric and contiguous: peers
    write it directly. out_dtype: of the result, that of `out` or of x unless given.

    Differentiable in x, weight and residual, where neither `out` nor `workspace` is given; the gradient of a
    replicated result is the same on all ranks. Returns the result, with a residual also the sum, in the residual's
    dtype, of which the norm was taken. Rows of zeros with eps 0 are NaN, and a NaN stays in its row, as in
    `torch.nn.functional.rms_norm` (https://arxiv.org/abs/1910.07467).

    Raises TypeError, ValueError before any launch; `CallMismatch`, `PeerTimeout`, `PeerAborted`,
    `HeapOutOfMemory`, `WorkspaceBusy`.
    """
    heap, shared = find_workspace(group, workspace)
    hidden = heap.world_size * _width(x) if hidden is None else hidden
    if out_dtype is None:
        out_dtype = out.dtype if isinstance(out, torch.Tensor) else x.dtype
    _check(heap, x, weight, eps, residual, hidden, out, out_dtype, replicated)
    operands = (x, weight, residual)
    if torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    ):
        if out is not None or workspace is not None:
            raise ValueError(
                "out and workspace can't be given where gradients are recorded or the call is compiled: "
                "leave them out, or make the call under torch.no_grad()"
            )
        result, updated, _ = _rms_norm(*operands, eps, hidden, replicated, out_dtype, _name_of(heap))
    else:
        result, updated, _ = forward(shared, *operands, eps, hidden, replicated, out_dtype, out)
    return result if residual is None else (result, updated)


# By what the operators' schemas call a heap.
_heaps: weakref.WeakValueDictionary[str, Heap] = weakref.WeakValueDictionary()


def _name_of(heap: Heap) -> str:
    """A name for `heap` in this process."""
    # Ranks that are threads have groups of one name.
    name = f"{heap.group.name}/{heap.rank}@{heap.base:x}"
    _heaps[name] = heap
    return name


@torch.library.custom_op("collectives::rms_norm", mutates_args=())
def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    hidden: int,
    replicated: bool,
    out_dtype: torch.dtype,
    heap: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(result, x + residual, or nothing without a residual, scales [M])."""
    workspace = workspace_for(_heaps[heap])
    result, updated, scales = forward(workspace, x, weight, residual, eps, hidden, replicated, out_dtype)
    return result, x.new_empty(0) if residual is None else updated, scales


@_rms_norm.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    hidden: int,
    replicated: bool,
    out_dtype: torch.dtype,
    heap: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], hidden if replicated else x.shape[-1])
    updated = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    scales = x.new_empty(math.prod(x.shape[:-1]), dtype=torch.float32)
    return x.new_empty(shape, dtype=out_dtype), updated, scales


@torch.library.custom_op("collectives::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    g: torch.Tensor,
    more: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    hidden: int,
    dtype: torch.dtype,
    heap: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of h, of the weight)."""
    return backward(workspace_for(_heaps[heap]), g, more, h, weight, scales, hidden, dtype)


@_rms_norm_backward.register_fake
def _(
    g: torch.Tensor,
    more: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    hidden: int,
    dtype: torch.dtype,
    heap: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return h.new_empty(h.shape, dtype=dtype), torch.empty_like(weight)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, residual, _, ctx.hidden, _, _, ctx.heap = inputs
    _, updated, scales = output
    ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
    ctx.save_for_backward(x if residual is None else updated, weight, scales)
    ctx.mark_non_differentiable(scales)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, g: torch.Tensor | None, more: torch.Tensor | None, _: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    h, weight, scales = ctx.saved_tensors
    x_dtype, residual_dtype = ctx.dtypes
    if residual_dtype is None:
        more = None
    if g is None:
        # Of the sum alone: nothing of the norm comes back, on any rank.
        return _cast(more, x_dtype), None, _cast(more, residual_dtype), *(None,) * 5
    dtype = x_dtype if residual_dtype is None else torch.promote_types(x_dtype, residual_dtype)
    grad, of_weight = _rms_norm_backward(g, more, h, weight, scales, ctx.hidden, dtype, ctx.heap)
    return _cast(grad, x_dtype), of_weight, _cast(grad, residual_dtype), *(None,) * 5


def _cast(x: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    return None if x is None or dtype is None else x.to(dtype)


_rms_norm.register_autograd(_differentiate, setup_context=_remember)


def _width(x: torch.Tensor) -> int:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}, a torch.Tensor is needed")
    if x.ndim == 0:
        raise ValueError("x has no dimension, at least one is needed: the columns of this rank")
    return x.shape[-1]


def _check(
    heap: Heap,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    hidden: int,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    replicated: bool,
) -> None:
    first, end = columns_of(hidden, heap.rank, heap.world_size)
    if x.shape[-1] != end - first:
        raise ValueError(
            f"x has {x.shape[-1]} columns on rank {heap.rank}, {end - first} of hidden = {hidden} are needed; "
            "where ranks hold different numbers, give hidden, and the columns that torch.tensor_split gives each"
        )
    wanted = {"x": tuple(x.shape), "weight": (x.shape[-1],), "residual": tuple(x.shape)}
    wanted["out"] = (*x.shape[:-1], hidden) if replicated else tuple(x.shape)
    for name, tensor in (("x", x), ("weight", weight), ("residual", residual), ("out", out)):
        if tensor is None and name in ("residual", "out"):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, a torch.Tensor is needed")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}, allowed are {', '.join(map(str, DTYPES))}")
        if tuple(tensor.shape) != wanted[name] or tensor.device != heap.device:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} on {tensor.device}, {wanted[name]} on {heap.device} is needed"
            )
    if out_dtype not in DTYPES or (out is not None and out.dtype != out_dtype):
        got = "" if out is None else f", out is {out.dtype}"
        raise TypeError(f"out_dtype is {out_dtype}{got}; allowed are {', '.join(map(str, DTYPES))}")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps is {eps}, allowed are finite numbers of 0 or more")
    if not weight.is_contiguous():
        raise ValueError(f"weight has strides {weight.stride()}; contiguous is needed")
    if out is not None:
        if as_rows(out).data_ptr() != out.data_ptr():
            raise ValueError(
                f"out has shape {tuple(out.shape)} and strides {out.stride()}; contiguous rows are needed"
            )
