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
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from pyrocshmem.calls.operators import name_of, needs_gradient, once, ops, ranks, refuse
from pyrocshmem.calls.streams import CALLS, Streams
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives.all_reduce_rms_norm import gradients as norm_gradients
from pyrocshmem.stream_k.local_gemm.operands import check_product

_Gradients = tuple[torch.Tensor | None, ...]


def _keep(
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


def _b_gradient(ctx: Any, a: torch.Tensor, grad: torch.Tensor, workspace: str = "") -> torch.Tensor:
    """A' dC, laid out as B: where B is a weight read transposed, autograd takes it for the weight's without a copy."""
    more = (None, "none", ctx.allow_tf32, workspace)
    return ops.gemm(grad.t(), a, *more).t() if ctx.b_by_columns else ops.gemm(a.t(), grad, *more)


def _bias_gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
    if ctx.bias_dtype is None:
        return None
    return grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)


def overlapped(
    name: str,
    communicating: Callable[[], torch.Tensor],
    local: Callable[[], torch.Tensor],
    grad: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(communicating(), local()), the second on a stream of its own where there are streams and peers."""
    # What is traced, as a tensor of a derived class too, the compiler puts in order.
    traced = torch.compiler.is_compiling() or type(grad) is not torch.Tensor
    if traced or grad.device.type != "cuda" or ranks(name)[1] == 1:
        return communicating(), local()
    streams = _streams(grad.device, threading.get_ident())
    # Either stream waits for all that the other held, so memory that one frees is safe in the other's hands.
    streams.fork(CALLS)
    first = communicating()
    with streams.beside(CALLS):
        second = local()
    streams.join(CALLS)
    return first, second


@functools.cache
def _streams(device: torch.device, thread: int) -> Streams:
    """A thread's own: between a record of an event and the wait for it there could be another's. Only the stream CALLS
    of these is used: it has no priority over the op that communicates."""
    return Streams(device)


def keep_gemm(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """`setup_context` of `gemm`."""
    a, b, bias, activation, ctx.allow_tf32, ctx.workspace = inputs
    ctx.needs = ctx.needs_input_grad[:3]
    _keep(ctx, a, b, bias, activation)


def gemm(ctx: Any, grad: torch.Tensor) -> _Gradients:
    """Backward of `gemm`: plain products."""
    a, b = ctx.saved_tensors
    more = (None, "none", ctx.allow_tf32, ctx.workspace)
    grad_a = ops.gemm(grad, b.t(), *more) if b is not None else None
    grad_b = _b_gradient(ctx, a, grad, ctx.workspace) if a is not None else None
    return grad_a, grad_b, _bias_gradient(ctx, grad), None, None, None


def keep_sum(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """`setup_context` of `gemm_reduce_scatter`, `gemm_all_reduce` and `gemm_all_scatter`, whose schemas are alike."""
    a, b, ctx.group, bias, activation, ctx.allow_tf32, ctx.partial_dtype = inputs
    ctx.needs = (*ctx.needs_input_grad[:2], ctx.needs_input_grad[3])
    ctx.num_rows = a.shape[0]
    _keep(ctx, a, b, bias, activation)


@once
def gemm_all_reduce(ctx: Any, grad: torch.Tensor) -> _Gradients:
    """Backward of `gemm_all_reduce`: every rank has the whole gradient, so nothing is sent."""
    a, b = ctx.saved_tensors
    grad_a, grad_b = _of_replicated(ctx, a, b, grad)
    return grad_a, grad_b, None, _bias_gradient(ctx, grad), None, None, None


def _of_replicated(
    ctx: Any, a: torch.Tensor | None, b: torch.Tensor | None, grad: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A's and B's gradient, from that of a sum over ranks that every rank has."""
    grad_a = ops.gemm(grad, b.t(), None, "none", ctx.allow_tf32, "") if b is not None else None
    return grad_a, _b_gradient(ctx, a, grad) if a is not None else None


@once
def gemm_reduce_scatter(ctx: Any, grad: torch.Tensor) -> _Gradients:
    """Backward of `gemm_reduce_scatter`: one all-gather of the gradient's rows serves A's, B's and the bias'."""
    a, b = ctx.saved_tensors
    gathers = a is not None or ctx.bias_dtype is not None
    # Where A has no gradient the rows are gathered alone: by no columns.
    columns = b.t() if b is not None else grad.new_empty(grad.shape[1], 0)
    grad_a, gathered = ops.all_gather_gemm(
        grad, columns, ctx.group, ctx.num_rows, None, "none", ctx.allow_tf32, None, gathers
    )
    grad_b = _b_gradient(ctx, a, gathered) if a is not None else None
    return grad_a if b is not None else None, grad_b, None, _bias_gradient(ctx, gathered), None, None, None


@once
def gemm_all_scatter(ctx: Any, grad: torch.Tensor) -> _Gradients:
    """Backward of `gemm_all_scatter`: this rank's columns of the gradient are its own, A's is a sum over ranks."""
    a, b = ctx.saved_tensors
    rank, world_size = ranks(ctx.group)
    width = grad.shape[1] // world_size
    columns = grad[:, rank * width : (rank + 1) * width]
    grad_a, grad_b = _of_columns(ctx, a, b, columns)
    return grad_a, grad_b, None, _bias_gradient(ctx, columns), None, None, None


def _of_columns(
    ctx: Any, a: torch.Tensor, b: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A's gradient, which is a sum over ranks, and B's, from that of this rank's columns of the product."""

    def for_a() -> torch.Tensor:
        more = (None, "none", ctx.allow_tf32, ctx.partial_dtype)
        return ops.gemm_all_reduce(columns, b.t(), ctx.group, *more)

    def for_b() -> torch.Tensor:
        return _b_gradient(ctx, a, columns)

    return _gradients(ctx, for_a, for_b, columns)


def keep_gemm_all_reduce_rms_norm(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]
) -> None:
    """`setup_context` of `gemm_all_reduce_rms_norm`."""
    a, b, residual, weight, ctx.eps, _, bias, ctx.allow_tf32, _ = inputs
    ctx.needs = (*ctx.needs_input_grad[:2], ctx.needs_input_grad[6])
    ctx.set_materialize_grads(False)
    _keep(ctx, a, b, bias, "none", output[1], weight)


@once
def gemm_all_reduce_rms_norm(ctx: Any, g: torch.Tensor | None, more: torch.Tensor | None) -> _Gradients:
    """Backward of `gemm_all_reduce_rms_norm`: nothing is sent, as in that of `gemm_all_reduce`."""
    a, b, total, weight = ctx.saved_tensors
    grad, of_weight = norm_gradients(g, more, total, weight, ctx.eps, ctx.needs_input_grad[3])
    grad_a, grad_b = _of_replicated(ctx, a, b, grad)
    of_residual = grad if ctx.needs_input_grad[2] else None
    return grad_a, grad_b, of_residual, of_weight, None, None, _bias_gradient(ctx, grad), None, None


def keep_gemm_rms_norm_all_scatter(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]
) -> None:
    """`setup_context` of `gemm_rms_norm_all_scatter`."""
    a, b, weight, _, _, ctx.group, bias, ctx.allow_tf32 = inputs
    ctx.needs = (*ctx.needs_input_grad[:2], ctx.needs_input_grad[6])
    ctx.partial_dtype = None
    ctx.mark_non_differentiable(*output[1:])
    _keep(ctx, a, b, bias, "none", *output[1:], weight)


@once
def gemm_rms_norm_all_scatter(ctx: Any, grad: torch.Tensor, *_: Any) -> _Gradients:
    """Backward of `gemm_rms_norm_all_scatter`: one exchange of a float a row, then as that of `gemm_all_scatter`."""
    a, b, block, scales, weight = ctx.saved_tensors
    columns, of_weight = ops.rms_norm_backward(
        grad, None, block, weight, scales, grad.shape[1], block.dtype, ctx.group
    )
    grad_a, grad_b = _of_columns(ctx, a, b, columns)
    return grad_a, grad_b, of_weight, None, None, None, _bias_gradient(ctx, columns), None


def keep_all_gather_gemm(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """`setup_context` of `all_gather_gemm`: keeps the gathered A in the place of A where the call made it."""
    a, b, ctx.group, ctx.num_rows, bias, activation, ctx.allow_tf32, ctx.partial_dtype, ctx.saved = inputs
    ctx.needs = (*ctx.needs_input_grad[:2], ctx.needs_input_grad[4])
    # Zeros in the gathered A's place would be made for nothing.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.zeros = functools.partial(torch.zeros, output[0].shape, dtype=a.dtype, device=a.device)
    _keep(ctx, output[1] if ctx.saved else a, b, bias, activation)


@once
def all_gather_gemm(ctx: Any, grad: torch.Tensor | None, _: Any) -> _Gradients:
    """Backward of `all_gather_gemm`. Without a gradient it communicates too: the peers may have one."""
    a, b = ctx.saved_tensors
    grad = ctx.zeros() if grad is None else grad
    if a is not None and not ctx.saved:
        none = a.new_empty(a.shape[1], 0)
        more = (ctx.num_rows, None, "none", ctx.allow_tf32, None, True)
        _, a = ops.all_gather_gemm(a, none, ctx.group, *more)

    def for_a() -> torch.Tensor:
        more = (None, "none", ctx.allow_tf32, ctx.partial_dtype)
        return ops.gemm_reduce_scatter(grad, b.t(), ctx.group, *more)

    def for_b() -> torch.Tensor:
        return _b_gradient(ctx, a, grad)

    grad_a, grad_b = _gradients(ctx, for_a, for_b, grad)
    return grad_a, grad_b, None, None, _bias_gradient(ctx, grad), None, None, None, None


def _gradients(
    ctx: Any, for_a: Callable[[], torch.Tensor], for_b: Callable[[], torch.Tensor], grad: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A's gradient, which communicates, and B's, as far as they are needed."""
    wants_a, wants_b, _ = ctx.needs
    if wants_a and wants_b:
        return overlapped(ctx.group, for_a, for_b, grad)
    return for_a() if wants_a else None, for_b() if wants_b else None


_ACTIVATIONS = {"relu": torch.relu, "gelu": functional.gelu, "silu": functional.silu}


class Options(NamedTuple):
    """Arguments of the public functions, which document them, that a schema has too."""

    activation: str
    allow_tf32: bool
    partial_dtype: torch.dtype | None = None
    num_rows: int | None = None
    save_gathered: bool = False


def differentiable(
    name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    options: Options,
    group: Any = None,
    workspace: Workspace | None = None,
    **unsupported: Any,
) -> torch.Tensor:
    """Make a call of the op `name` that has a gradient or that something watches.

    unsupported: arguments that such a call can't have; ValueError where one is given. The others are the public
    functions'. Where there is a gradient, an activation is PyTorch's own, on what the op computes without it: that is
    kept for the backward pass, in the dtype of the result, and rounded to it before the activation, not after.
    """
    check_product(a, b, bias, options.activation)
    refuse(name, **unsupported)
    late = options.activation if needs_gradient((a, b, bias)) else "none"
    common = (bias, "none" if late in _ACTIVATIONS else options.activation, options.allow_tf32)
    op = getattr(ops, name)
    if name == "gemm":
        value = op(a, b, *common, "" if workspace is None else workspace.label)
    elif name == "all_gather_gemm":
        where = name_of(group, workspace)
        num_rows = options.num_rows if options.num_rows is not None else a.shape[0] * ranks(where)[1]
        # Only for a gradient of b.
        save = options.save_gathered and needs_gradient((b,))
        value, _ = op(a, b, where, num_rows, *common, options.partial_dtype, save)
    else:
        value = op(a, b, name_of(group, workspace), *common, options.partial_dtype)
    return _ACTIVATIONS[late](value) if late in _ACTIVATIONS else value
