"""`gemm_reduce_scatter`: the row-parallel product, summed over ranks, a block of rows on each. The protocol is
`collectives.row_blocks`'s."""

from __future__ import annotations

from typing import Any

import torch

from pyrocshmem.calls.operators import once, ops
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.stream_k.choice import completed, tilings, variants, verdicts
from pyrocshmem.stream_k.choice.config import BY_MESSAGE, Config
from pyrocshmem.stream_k.choice.placement import Placement
from pyrocshmem.stream_k.local_gemm.scales import scaling_of
from pyrocshmem.stream_k.ops import over_hosts
from pyrocshmem.stream_k.ops.by_message import MessagePlan
from pyrocshmem.stream_k.ops.gradients import (
    Gradients,
    b_gradient,
    bias_gradient,
    keep_sum,
)
from pyrocshmem.stream_k.ops.op import NO_SCALES, Call, GemmOp, Request, call, register_gemm
from pyrocshmem.stream_k.ops.planned import FusedPlan
from pyrocshmem.stream_k.ops.rows import RowsPlan
from pyrocshmem.stream_k.ops.summed_blocks import SummedBlocksPlan


def gemm_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    allow_tf32: bool = False,
    config: Config | None = None,
    partial_dtype: torch.dtype | None = None,
    workspace: Workspace | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """This rank's rows of activation(sum over ranks of a @ b + bias), the same bits on every run.

    a: [M, K/R], b: [K/R, N]: this rank's shares, any strides; float16, bfloat16 or float32. M and N are the
    same on all ranks; shares of K may differ, and change as in `gemm_all_reduce`. Or a: [D, .., K/R]: the result is
    [D/R, .., N], and D must be a multiple of R.
    out: [M/R, N], any strides: block `rank` of `torch.tensor_split(result, R)`, which has one row more on the first
    M % R ranks. None: a new tensor. bias: [N], added once, to the sum.
    activation, allow_tf32, group, config, partial_dtype, workspace, gradients: as in `gemm_all_reduce`.

    Inside a host partial sums go through the heap, while the next rows are multiplied; over several hosts each rank
    sends the sum of its host of M N / R elements to the rank of its number on every other host, beside the GEMM.

    Returns out. Nothing waits for the device: a peer's fault shows at the next call, or at
    `heap.synchronize()`. Raises TypeError, ValueError before any launch; `CallMismatch`, `PeerTimeout`,
    `PeerAborted`, `HeapOutOfMemory`, `WorkspaceBusy`.
    """
    scaling = scaling_of(scale_a, scale_b, out_dtype, use_fast_accum)
    request = Request(a, b, out, bias, activation, False, allow_tf32, config, partial_dtype, scaling=scaling)
    return call(OP, request, group, workspace)


def _make_plan(call: Call) -> FusedPlan:
    if call.config.placement in BY_MESSAGE:
        return MessagePlan(call, OP, "reduce_scatter")
    if call.config.placement == "blas_blocks":
        return SummedBlocksPlan(call, everywhere=False)
    return RowsPlan.of(call, everywhere=False)


@once
def _backward(ctx: Any, grad: torch.Tensor) -> Gradients:
    """Backward of `gemm_reduce_scatter`: one all-gather of the gradient's rows serves A's, B's and the bias'."""
    a, b = ctx.saved_tensors
    gathers = a is not None or ctx.bias_dtype is not None
    # Where A has no gradient the rows are gathered alone: by no columns.
    columns = b.t() if b is not None else grad.new_empty(grad.shape[1], 0)
    grad_a, gathered = ops.all_gather_gemm(
        grad, columns, ctx.group, ctx.num_rows, None, "none", ctx.allow_tf32, None, gathers
    )
    grad_b = b_gradient(ctx, a, gathered) if a is not None else None
    return (
        grad_a if b is not None else None,
        grad_b,
        None,
        bias_gradient(ctx, gathered),
        None,
        None,
        None,
        *NO_SCALES,
    )


# In the order in which they are asked; those behind the first that suits any sizes are had by name.
_PLACEMENTS = (
    Placement("blas_blocks", verdicts.blocks_to_scatter),
    Placement("unfused", verdicts.few_cut_tiles_for_blas),
    Placement("messages", verdicts.few_tiles, tile=tilings.sent, variants=variants.nothing),
    Placement(
        "copy_engine",
        verdicts.otherwise,
        completed.own_row_blocks,
        variants=variants.scattered_blocks,
        blocks=True,
    ),
)

OP = register_gemm(
    GemmOp(
        name="gemm_reduce_scatter",
        package="stream_k",
        holds="M x K/R, K/R x N",
        result="its M/R rows of the sum over ranks",
        command="reduce_scatter",
        steps="matmul, then reduce_scatter",
        reference="gemm_reduce_scatter",
        a_cut="K",
        b_cut="K",
        out_cut="M",
        placements=_PLACEMENTS,
        plan=_make_plan,
        over_hosts=over_hosts.summed_rows,
        keep=keep_sum,
        backward=_backward,
    )
)
