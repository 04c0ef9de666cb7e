"""Products of layers in 8-bit floating point: forward in 8 bits, gradients in the type of the operands."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pyrocshmem import stream_k
from pyrocshmem.calls.op import find
from pyrocshmem.calls.operators import local_name, name_of, needs_gradient, ranks
from pyrocshmem.stream_k.nn import functional
from pyrocshmem.stream_k.nn.float8 import Weight, quantized
from pyrocshmem.stream_k.nn.functional import autocast

# What the schemas of ops have behind a call without 8-bit operands.
_NO_SCALES = (None, None, None, False)


def product(
    op: str,
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    group: Any,
    swiglu: bool = False,
    /,
    **options: Any,
) -> Any:
    """x @ weight.T + bias by the op of that name, x [rows, features] being quantized. swiglu: the SwiGLU of x [rows, 2
    features] in the place of x, where nothing needs a gradient. options: of the op; a norm's only where nothing does.

    Raises as the op does; RuntimeError where torch.compile traces a call that needs a gradient.
    """
    x, share, bias = _operands(x, weight, bias)
    call = partial(_in_eight_bits, op, x, share, weight, bias, group, options, swiglu)
    if not needs_gradient((x, share, bias)):
        return call()
    _check_gradient(weight)
    given = (bias, "none", False)
    if op == "gemm":
        return _Product.apply(x, share.t(), *given, local_name(), *_NO_SCALES, find(op), call)
    name, partial_dtype = name_of(group), options.get("partial_dtype")
    if op == "all_gather_gemm":
        rows = options.get("num_rows")
        rows = x.shape[0] * ranks(name)[1] if rows is None else rows
        more = (partial_dtype, False, *_NO_SCALES, find(op), call)
        return _Product.apply(x, share.t(), name, rows, *given, *more)
    return _Product.apply(x, share.t(), name, *given, partial_dtype, *_NO_SCALES, find(op), call)


def column_product(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, group: Any, partial_dtype: torch.dtype | None
) -> torch.Tensor:
    """`functional.column_product` in 8 bits."""
    x, share, bias = _operands(x, weight, bias)
    call = partial(_in_eight_bits, "gemm", x, share, weight, bias, group, {})
    if not needs_gradient((x, share, bias)):
        return call()
    _check_gradient(weight)
    return _ColumnProduct.apply(x, share, bias, name_of(group), partial_dtype, call)


def _operands(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> Any:
    """(x, the weight's share, bias), all but a share of 8 bits in the dtype of autocast."""
    if weight.scale is None:
        return autocast(x, weight.share, bias)
    x, bias = autocast(x, bias)
    return x, weight.share, bias


def _check_gradient(weight: Weight) -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError("torch.compile traces layers with float8 under torch.no_grad() alone")
    if weight.scale is not None:
        raise ValueError(
            "a weight that is held in 8 bits has no gradient; call the layer under torch.no_grad()"
        )


def _in_eight_bits(
    op: str, x: torch.Tensor, share: torch.Tensor, weight: Weight, bias: torch.Tensor | None, group: Any,
    options: dict[str, Any], swiglu: bool = False,
) -> Any:  # fmt: skip
    with torch.no_grad():
        b, of_b = (share, weight.scale) if weight.scale is not None else quantized(share, weight.recipe)
        a, of_a = (stream_k.quantize_swiglu if swiglu else stream_k.quantize)(x, weight.recipe)
        more = options if op == "gemm" else {**options, "group": group}
        call = getattr(stream_k, op)
        return call(a, b.t(), bias=bias, scale_a=of_a, scale_b=of_b.t(), out_dtype=x.dtype, **more)


class _Product(torch.autograd.Function):
    """A call in 8 bits that has the gradient of its op. The arguments before the last two are those of the op's schema,
    which its `keep` and `backward` count on."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        *given, ctx.op, call = arguments
        found = call()
        # In the gathered rows' place, which are gathered once more.
        several = ctx.op.name == "all_gather_gemm"
        ctx.op.keep(ctx, tuple(given), (found, found.new_empty(0)) if several else found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        several = ctx.op.name == "all_gather_gemm"
        return *ctx.op.backward(ctx, *grads, *((None,) if several else ())), None, None


class _ColumnProduct(functional._ColumnProduct):
    """The same of a product in 8 bits."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        x, weight, _, ctx.group, ctx.partial_dtype, call = arguments
        ctx.save_for_backward(x, weight)
        return call()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *functional._ColumnProduct.backward(ctx, *grads), None
