"""`gemm`: one product on one GPU, by the Stream-K kernel or by the vendor's BLAS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pyrocshmem.calls.op import Sizes, register
from pyrocshmem.calls.operators import dispatched, find, local_name, ops
from pyrocshmem.calls.workspace import Workspace, check_workspace
from pyrocshmem.stream_k.choice import tilings, variants, verdicts
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.choice.placement import Placement
from pyrocshmem.stream_k.local_gemm.operands import check_product
from pyrocshmem.stream_k.local_gemm.plan import run_gemm
from pyrocshmem.stream_k.local_gemm.scales import result_dtype, scaling_of
from pyrocshmem.stream_k.ops.batches import by_rows, is_batched, scales_of_rows
from pyrocshmem.stream_k.ops.gradients import (
    Gradients,
    b_gradient,
    bias_gradient,
    keep,
)
from pyrocshmem.stream_k.ops.op import GemmOp, Request, check_no_gradient, through_operator


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    out: torch.Tensor | None = None,
    allow_tf32: bool = False,
    config: Config | None = None,
    workspace: Workspace | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """activation(a @ b + bias), accumulated in fp32, the same bits on every run.

    a: [M, K] or [.., M, K], whose dimensions the result has then, b: [K, N], any strides, float16, bfloat16 or
    float32, one dtype for both. Transposed and sliced
    views are read as they lie; on NVIDIA 16-bit operands whose rows or columns don't start at multiples of 16
    bytes are copied first, into memory of PyTorch's allocator (`stream_k.local_gemm.aligned_copies`). An A of few
    rows may be copied, too, unless it is the top of a larger tensor: then up to 255 rows behind its last are read,
    and not used.
    Operands of 8-bit floating point (float8_e4m3fn, float8_e5m2; their fnuz kinds on gfx942) come with scale_a and
    scale_b, float32, of one of the recipes of `stream_k.local_gemm.scales`, whose shapes are those of
    `torch.nn.functional.scaled_mm`; `stream_k.quantize` makes both. The result is then of out_dtype: bfloat16 (None),
    float16 or float32. use_fast_accum: sums of 8-bit products may stay in the matrix unit, which on NVIDIA keeps some
    13 bits of them; otherwise they are added in fp32 after at most 128 of K. With scales of blocks up to three rows
    behind the last one of any A, and their scales, may be read and not used. There is no gradient.
    bias: [N], of their dtype or float32. activation: "none", "relu", "gelu" (exact) or "silu". out: [M, N], any
    strides without overlap, of their dtype; None: a new tensor. allow_tf32: float32 operands may go through tf32
    matrix units, where there are any (NVIDIA); otherwise they don't, whatever PyTorch's switches say. config: None:
    what `stream_k.choose` gives; where its placement is "blas", the vendor's BLAS multiplies if it computes the same
    (`stream_k.local_gemm.blas`). workspace: of the same device; None: the device's own, on which calls run one after
    another where tiles are split.

    Returns out. Has a gradient (`stream_k.ops.gradients`); where one is needed, and where torch.compile traces the
    call, out and config are a ValueError. Raises TypeError and ValueError before anything is launched, also for a
    config that a GEMM alone can't run with, `PeerTimeout` where a fix-up waited in vain because the device stood still.
    Algorithm: Stream-K, Osama et al., PPoPP 2023; see docs/schedule.md.
    """
    if is_batched(a):
        more: Any = {"bias": bias, "activation": activation, "allow_tf32": allow_tf32}
        more |= {"config": config, "workspace": workspace}
        more |= {
            "scale_a": scales_of_rows(scale_a, a),
            "scale_b": scale_b,
            "out_dtype": out_dtype,
            "use_fast_accum": use_fast_accum,
        }
        return by_rows(lambda a, out: gemm(a, b, out=out, **more), a, out)
    if workspace is not None:
        check_workspace(workspace)
    scaling = scaling_of(scale_a, scale_b, out_dtype, use_fast_accum)
    check_no_gradient("gemm", scaling, a, b, bias)
    if dispatched(a, b, bias, whole=out is None and config is None):
        request = Request(a, b, out, bias, activation, False, allow_tf32, config, scaling=scaling)
        return through_operator(OP, request, local_name(workspace))
    return run_gemm(a, b, bias, activation, out, allow_tf32, config, workspace, None, scaling)


def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: Any,
    activation: str,
    allow_tf32: bool,
    workspace: str,
    *scales: Any,
) -> torch.Tensor:
    """The call by the schema's arguments."""
    space = find(workspace)[1]
    return run_gemm(a, b, bias, activation, None, allow_tf32, None, space, None, scaling_of(*scales))


def _shape(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: Any,
    activation: str,
    allow_tf32: bool,
    workspace: str,
    *scales: Any,
) -> torch.Tensor:
    scaling = scaling_of(*scales)
    M, N, _ = check_product(a, b, bias, activation, scaling)
    return a.new_empty(M, N, dtype=result_dtype(a, scaling))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """`setup_context` of `gemm`."""
    a, b, bias, activation, ctx.allow_tf32, ctx.workspace, *_ = inputs
    ctx.needs = ctx.needs_input_grad[:3]
    keep(ctx, a, b, bias, activation)


def _backward(ctx: Any, grad: torch.Tensor) -> Gradients:
    """Backward of `gemm`: plain products."""
    a, b = ctx.saved_tensors
    more = (None, "none", ctx.allow_tf32, ctx.workspace)
    grad_a = ops.gemm(grad, b.t(), *more) if b is not None else None
    grad_b = b_gradient(ctx, a, grad, ctx.workspace) if a is not None else None
    return grad_a, grad_b, bias_gradient(ctx, grad), *[None] * 7


def _sized(sizes: Sizes) -> Callable[[int], object]:
    b = sizes.empty(sizes.N, sizes.K).t()
    return lambda rows: gemm(sizes.empty(rows, sizes.K), b, workspace=sizes.workspace)


# In the order in which they are asked. What the sizes don't tell, `local_gemm.blas.why_not` looks at.
_PLACEMENTS = (
    Placement("blas", verdicts.faster_by_blas, tile=tilings.alone, alone=True),
    Placement("after", verdicts.nothing_to_consume, tile=tilings.alone, variants=variants.alone, alone=True),
)

OP = register(
    GemmOp(
        name="gemm",
        package="stream_k",
        holds="M x K, K x N",
        result="M x N; no group",
        schema="(Tensor a, Tensor b, Tensor? bias, str activation, bool allow_tf32, str workspace, "
        "Tensor? scale_a=None, Tensor? scale_b=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor",
        placements=_PLACEMENTS,
        arguments=lambda request, workspace: (
            request.a,
            request.b,
            request.bias,
            request.activation,
            request.allow_tf32,
            workspace,
            *(() if request.scaling is None else request.scaling),
        ),
        run=_run,
        shapes=_shape,
        keep=_keep,
        backward=_backward,
        sized=_sized,
        ordered=False,  # no peers count on it: its calls may be merged and moved
    )
)
