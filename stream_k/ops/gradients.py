"""Gradients of the ops: each one's backward is made of its duals, which are ops of this package as well.

Shape letters: M N K of the whole product, R ranks; C = A B + bias, dC the gradient of C, ' a transpose.

    op                    A's gradient                          B's gradient                bias' gradient
    gemm                  gemm(dC, B')                          gemm(A', dC)                sum of dC's rows
    all_gather_gemm       gemm_reduce_scatter(dC, B')           gemm(gathered A', dC)       sum of dC's rows
    gemm_reduce_scatter   all_gather_gemm(dC, B')               gemm(A', gathered dC)       sum of all ranks' rows
    gemm_all_reduce       gemm(dC, B')                          gemm(A', dC)                sum of dC's rows
    gemm_all_scatter      gemm_all_reduce(own dC columns, B')   gemm(A', own dC columns)    sum of those' rows

The products with RMSNorm first take the derivative of the norm, and then do as `gemm_all_reduce` does with that of the
total, and as `gemm_all_scatter` with that of the own columns.

**Replicated tensors have replicated gradients.** Where every rank has a tensor whole (the result of
`gemm_all_reduce` and of `gemm_all_scatter`, A of the latter, the bias of ops that sum over ranks), every rank has its
whole gradient too, the same one on all of them: that of the loss of the model as one, not a part of it, and not the sum
over ranks of what each computes. So the loss of a replicated result is computed on every rank alike, and
is neither divided by R nor summed over ranks afterwards. Where ranks hold blocks (rows, columns, shares of K), each has
the gradient of its block. Nothing checks that the ranks' gradients of a replicated result are equal.

Of several Bs of one gather `stream_k.ops.several` says the same.

A is kept for B's gradient, B for A's, where these are wanted. `all_gather_gemm` keeps the gathered A, or gathers it
once more, as its caller says. On a GPU B's gradient is computed on a stream of its own, beside the op that
communicates. Gradients of 16-bit tensors are rounded to them; bias gradients are summed in fp32.
An activation has PyTorch's own gradient: `differentiable` takes it out of the op.
Ops that communicate can be differentiated once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from pyrocshmem.calls.operators import local_name, ops, ranks
from pyrocshmem.calls.streams import LOCAL, Streams

Gradients = tuple[torch.Tensor | None, ...]


def keep(
    ctx: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *more: torch.Tensor,
) -> None:
    """What every backward wants: its factors, where they are needed, the dtype of the bias, and what the op adds."""
    if activation != "none":
        raise ValueError(
            f"the op has no gradient with activation {activation!r}: apply the activation to its result, as "
            "stream_k's functions do where a gradient is needed"
        )
    for_a, for_b, for_bias = ctx.needs
    ctx.save_for_backward(a if for_b else None, b if for_a else None, *more)
    ctx.bias_dtype = bias.dtype if bias is not None and for_bias else None
    ctx.b_by_columns = b.stride(0) == 1 and b.stride(1) != 1


def b_gradient(ctx: Any, a: torch.Tensor, grad: torch.Tensor, workspace: str | None = None) -> torch.Tensor:
    """A' dC, laid out as B."""
    return product_like(ctx.b_by_columns, ctx.allow_tf32, a, grad, workspace)


def product_like(
    by_columns: bool, allow_tf32: bool, a: torch.Tensor, grad: torch.Tensor, workspace: str | None = None
) -> torch.Tensor:
    """A' dC, by columns where B is a weight read transposed: autograd takes it for the weight's without a copy.
    workspace: as the schema of `gemm` has it; None: the device's own."""
    more = (None, "none", allow_tf32, local_name() if workspace is None else workspace)
    return ops.gemm(grad.t(), a, *more).t() if by_columns else ops.gemm(a.t(), grad, *more)


def bias_gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
    return sum_of_rows(grad, ctx.bias_dtype)


def sum_of_rows(grad: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | None:
    """In fp32, rounded to the bias' dtype; None: it needs no gradient."""
    return None if dtype is None else grad.sum(0, dtype=torch.float32).to(dtype)


def overlapped(
    name: str,
    communicating: Callable[[], torch.Tensor],
    local: Callable[[], Any],
    grad: torch.Tensor,
) -> tuple[torch.Tensor, Any]:
    """(communicating(), local()), the second on a stream of its own where there are streams and peers."""
    # What is traced, as a tensor of a derived class too, the compiler puts in order.
    traced = torch.compiler.is_compiling() or type(grad) is not torch.Tensor
    if traced or grad.device.type != "cuda" or ranks(name)[1] == 1:
        return communicating(), local()
    streams = _streams(grad.device, threading.get_ident())
    # Either stream waits for all that the other held, so memory that one frees is safe in the other's hands.
    streams.fork(LOCAL)
    first = communicating()
    with streams.beside(LOCAL):
        second = local()
    streams.join(LOCAL)
    return first, second


@functools.cache
def _streams(device: torch.device, thread: int) -> Streams:
    """A thread's own: between a record of an event and the wait for it there could be another's. Only the stream LOCAL
    of these is used: it has no priority over the op that communicates."""
    return Streams(device)


def keep_sum(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """`setup_context` of `gemm_reduce_scatter`, `gemm_all_reduce` and `gemm_all_scatter`, whose schemas are alike."""
    a, b, ctx.group, bias, activation, ctx.allow_tf32, ctx.partial_dtype = inputs[:7]
    ctx.needs = (*ctx.needs_input_grad[:2], ctx.needs_input_grad[3])
    ctx.num_rows = a.shape[0]
    keep(ctx, a, b, bias, activation)


def of_replicated(
    ctx: Any, a: torch.Tensor | None, b: torch.Tensor | None, grad: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A's and B's gradient, from that of a sum over ranks that every rank has."""
    more = (None, "none", ctx.allow_tf32, local_name())
    grad_a = ops.gemm(grad, b.t(), *more) if b is not None else None
    return grad_a, b_gradient(ctx, a, grad) if a is not None else None


def of_columns(
    ctx: Any, a: torch.Tensor, b: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A's gradient, which is a sum over ranks, and B's, from that of this rank's columns of the product."""

    def for_a() -> torch.Tensor:
        more = (None, "none", ctx.allow_tf32, ctx.partial_dtype)
        return ops.gemm_all_reduce(columns, b.t(), ctx.group, *more)

    def for_b() -> torch.Tensor:
        return b_gradient(ctx, a, columns)

    return both_gradients(ctx, for_a, for_b, columns)


def both_gradients(
    ctx: Any, for_a: Callable[[], torch.Tensor], for_b: Callable[[], Any], grad: torch.Tensor
) -> tuple[torch.Tensor | None, Any]:
    """A's gradient, which communicates, and B's, as far as they are needed."""
    wants_a, wants_b, _ = ctx.needs
    if wants_a and wants_b:
        return overlapped(ctx.group, for_a, for_b, grad)
    return for_a() if wants_a else None, for_b() if wants_b else None
