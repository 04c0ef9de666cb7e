"""`gemm_reduce_scatter`: the row-parallel product, summed over ranks, a block of rows on each. The protocol is
`collectives.row_blocks`'s."""

from __future__ import annotations

from typing import Any

import torch

from pyrocshmem.calls.operators import dispatched
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.heap import Heap
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.choice import rules, variants
from pyrocshmem.stream_k.choice.config import BY_MESSAGE, Config
from pyrocshmem.stream_k.choice.placement import Placement
from pyrocshmem.stream_k.ops.by_message import MessagePlan
from pyrocshmem.stream_k.ops.gradients import Options, differentiable
from pyrocshmem.stream_k.ops.op import Call, FusedOp, Request, fused_gemm
from pyrocshmem.stream_k.ops.planned import FusedPlan
from pyrocshmem.stream_k.ops.rows import RowsPlan


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
) -> torch.Tensor:
    """This rank's rows of activation(sum over ranks of a @ b + bias), the same bits on every run.

    a: [M, K/R], b: [K/R, N]: this rank's shares, any strides; float16, bfloat16 or float32. M and N are the
    same on all ranks; shares of K may differ, and change as in `gemm_all_reduce`.
    out: [M/R, N], any strides: block `rank` of `torch.tensor_split(result, R)`, which has one row more on the first
    M % R ranks. None: a new tensor. bias: [N], added once, to the sum.
    activation, allow_tf32, group, config, partial_dtype, workspace, gradients: as in `gemm_all_reduce`.

    Returns out. Nothing waits for the device: a peer's fault shows at the next call, or at
    `heap.synchronize()`. Raises TypeError, ValueError before any launch; `CallMismatch`, `PeerTimeout`,
    `PeerAborted`, `HeapOutOfMemory`, `WorkspaceBusy`.
    """
    if dispatched(a, b, bias, whole=out is None and config is None):
        options = Options(activation, allow_tf32, partial_dtype)
        unsupported = {"out": out, "config": config}
        return differentiable("gemm_reduce_scatter", a, b, bias, options, group, workspace, **unsupported)
    request = Request(a, b, out, bias, activation, False, allow_tf32, config, partial_dtype)
    return run(request, group, workspace)


def run(request: Request, group: Any, workspace: Workspace | None) -> Any:
    """Make the call, whatever becomes of its gradient."""
    return fused_gemm(_OP, request, group, workspace)


def _sizes(request: Request, heap: Heap) -> tuple[int, tuple[int, int]]:
    rows = request.a.shape[0]
    first, last = shard_range(rows, heap.rank, heap.world_size)
    return rows, (last - first, request.b.shape[1])


def _make_plan(call: Call) -> FusedPlan:
    if call.config.placement in BY_MESSAGE:
        return MessagePlan(call, "gemm_reduce_scatter")
    return RowsPlan(call, everywhere=False)


# In the order in which they are asked; those behind the first that suits any sizes are had by name.
_PLACEMENTS = (
    Placement("unfused", rules.few_cut_tiles_for_blas),
    Placement("messages", rules.few_tiles, variants=variants.nothing),
    Placement(
        "copy_engine", rules.otherwise, rules.own_row_blocks, variants=variants.scattered_blocks, blocks=True
    ),
)
_OP = FusedOp(
    "gemm_reduce_scatter",
    _sizes,
    _make_plan,
    shared=False,
    shares_k=True,
    placements=_PLACEMENTS,
)
