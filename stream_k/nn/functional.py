"""What the layers are made of: products whose gradients cross ranks, and activations as matrices of tokens.

Conjugate operators of tensor parallelism (f and g of Megatron-LM, Shoeybi et al. 2019; their sequence-parallel
forms, Korthikanti et al. 2022). A tensor that all ranks hold whole has a whole gradient on every rank:

    forward                      backward of its input
    all_gather_gemm              gemm_reduce_scatter          rows in, columns out
    gemm_reduce_scatter          all_gather_gemm              columns in, rows out
    gemm (input replicated)      gemm_all_reduce              replicated in, columns out: `column_product`
    gemm_all_reduce              gemm                         columns in, replicated out
    identity                     sum over ranks               parameters used on each rank's rows: `sum_gradient`
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.nn.modules.module import _has_any_global_hook

from pyrocshmem import stream_k
from pyrocshmem.calls.operators import is_watched, name_of, needs_gradient, ops
from pyrocshmem.stream_k.nn.parameters import local
from pyrocshmem.stream_k.ops import gradients


def autocast(x: torch.Tensor, *others: torch.Tensor | None) -> Any:
    """The operands of a product, in the dtype of `torch.autocast` where that is on."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, *others
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), *(None if other is None else other.to(dtype) for other in others)


def sum_gradient(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """`x` itself; its gradient is the sum of all ranks' gradients, in fp32, rounded once.

    For a parameter that every rank holds and applies to its own rows: a norm, an embedding, a head. x: any shape;
    float16, bfloat16 or float32. group: as in the ops. NotImplementedError under a transform of torch.func.
    """
    _refuse_transforms()
    return _SumGradient.apply(x, name_of(group))


def column_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: Any = None,
    partial_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias, of an `x` that all ranks hold: the gradient of `x` is the sum over ranks.

    x: [M, in], the same on all ranks. weight: [out/R, in], bias: [out/R]: this rank's. partial_dtype: what that sum's
    parts travel in, as in `stream_k.Config`. Returns [M, out/R]. Raises as `stream_k.gemm`; its backward as
    `stream_k.gemm_all_reduce`. NotImplementedError under a transform of torch.func.
    """
    _refuse_transforms()
    x, weight, bias = autocast(x, weight, bias)
    return _ColumnProduct.apply(x, weight, bias, name_of(group), partial_dtype)


def row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    group: Any = None,
    partial_dtype: torch.dtype | None = None,
    scatter: bool = False,
    residual: torch.Tensor | None = None,
    norm: torch.nn.Module | None = None,
    plain_norms: tuple[type, ...] = (torch.nn.RMSNorm,),
    multiply: Callable[..., Any] | None = None,
) -> Any:
    """y = sum over ranks of x @ weight.T, + bias + residual; with a `norm`, (norm(y), y).

    x: [M, in/R], weight: [out, in/R]: this rank's. bias: [out], the same on all ranks. scatter: False: y is [M, out]
    on every rank; True: [M/R, out], the block of `torch.tensor_split`. residual: of y's shape. partial_dtype: as of the
    ops. plain_norms: classes that compute what PyTorch's RMSNorm does, which can be part of the product. multiply:
    makes the call of the op of a name, for `x`, `bias` and more options, in another way; with a norm where nothing
    needs a gradient.
    """
    if multiply is None:
        x, weight, bias = autocast(x, weight, bias)
    alike = residual is None or residual.dtype == x.dtype
    fits = multiply is None or not needs_gradient((x, weight, bias, residual, getattr(norm, "weight", None)))
    if (
        norm is not None
        and is_plain(norm, plain_norms)
        and norm.weight is not None
        and not scatter
        and alike
        and fits
    ):
        # PyTorch's own default is that of the type it computes in, which is fp32 for products of 16 bits, too.
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        if multiply is not None:
            options = {"residual": residual, "weight": local(norm.weight), "eps": eps}
            return multiply("gemm_all_reduce_rms_norm", x, bias, **options)
        return stream_k.gemm_all_reduce_rms_norm(
            x,
            weight.t(),
            residual,
            local(norm.weight),
            eps,
            group=group,
            bias=bias,
            partial_dtype=partial_dtype,
        )
    op = "gemm_reduce_scatter" if scatter else "gemm_all_reduce"
    if multiply is None:
        y = getattr(stream_k, op)(x, weight.t(), group=group, bias=bias, partial_dtype=partial_dtype)
    else:
        y = multiply(op, x, bias)
    if residual is not None:
        # Nobody else has y, but for what watches operators, and no backward reads it: the sum takes no more memory.
        ours = y.dtype == residual.dtype and y.shape == residual.shape and not is_watched((y, residual))
        y = y.add_(residual) if ours else y + residual
    return y if norm is None else (norm(y), y)


def is_plain(module: torch.nn.Module, kinds: tuple[type, ...]) -> bool:
    """Whether nobody can tell if a call of `module` was made, or what became of its result: it is of one of `kinds`,
    no subclass, which may do otherwise, has no `forward` of its own, and there are no hooks, which see both."""
    own = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
    plain = type(module) in kinds and "forward" not in module.__dict__
    return plain and not (own or _has_any_global_hook())


def _refuse_transforms() -> None:
    """What torch.func wants of a `torch.autograd.Function` would cost the host time on every call."""
    if not torch.compiler.is_compiling() and peek_interpreter_stack() is not None:
        raise NotImplementedError(
            "torch.func can't transform layers that sum gradients over ranks; use torch.autograd.grad"
        )


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ops.all_reduce(grads[0], "auto", ctx.group), None


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: str,
        partial_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.partial_dtype = group, partial_dtype
        return stream_k.gemm(x, weight.t(), bias=bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]

        def for_x() -> torch.Tensor:
            # On the group of a name, which torch.compile can hand to a backward.
            more = (None, "none", False, ctx.partial_dtype)
            return ops.gemm_all_reduce(grad, weight, ctx.group, *more)

        def for_weight() -> torch.Tensor:
            return stream_k.gemm(grad.t(), x)

        if wants_x and wants_weight:
            grad_x, grad_weight = gradients.overlapped(ctx.group, for_x, for_weight, grad)
        else:
            grad_x = for_x() if wants_x else None
            grad_weight = for_weight() if wants_weight else None
        return grad_x, grad_weight, grad.sum(0) if wants_bias else None, None, None


def to_rows(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Size]:
    """`x` [.., features] as a matrix whose rows go through `dim` slowest, and the sizes before the features, `dim`
    first. A view where the strides allow it."""
    moved = x.movedim(dim, 0)
    sizes = moved.shape[:-1]
    return moved.reshape(math.prod(sizes), x.shape[-1]), sizes


def from_rows(rows: torch.Tensor, sizes: torch.Size, dim: int, first: int) -> torch.Tensor:
    """What `to_rows` does, undone, for rows of another number or length: `first` is in the place of the first size."""
    if len(sizes) == 1:
        return rows
    return rows.view(first, *sizes[1:], rows.shape[1]).movedim(0, dim)
