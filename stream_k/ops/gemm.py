"""`gemm`: one product on one GPU, by the Stream-K kernel."""

from __future__ import annotations

import torch

from pyrocshmem import target, trace
from pyrocshmem.calls.operators import dispatched
from pyrocshmem.calls.tensors import check_device, kind
from pyrocshmem.calls.workspace import Workspace, check_workspace, local_workspace
from pyrocshmem.stream_k.choice import rules, tilings, variants
from pyrocshmem.stream_k.choice.config import Config, check_config
from pyrocshmem.stream_k.choice.placement import Placement, pending
from pyrocshmem.stream_k.choice.table import choose
from pyrocshmem.stream_k.local_gemm.operands import check_output, check_product, claim, in_one, left_kind
from pyrocshmem.stream_k.local_gemm.plan import GemmPlan, with_inner_size
from pyrocshmem.stream_k.ops.gradients import Options, differentiable
from pyrocshmem.torch_contexts import on_device


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
) -> torch.Tensor:
    """activation(a @ b + bias), accumulated in fp32, the same bits on every run.

    a: [M, K], b: [K, N], any strides, float16, bfloat16 or float32, one dtype for both. Transposed and sliced
    views are read as they lie; on NVIDIA 16-bit operands whose rows or columns don't start at multiples of 16
    bytes are copied first, into memory of PyTorch's allocator (`stream_k.local_gemm.aligned_copies`). An A of few
    rows may be copied, too, unless it is the top of a larger tensor: then up to 255 rows behind its last are read,
    and not used.
    bias: [N], of their dtype or float32. activation: "none", "relu", "gelu" (exact) or "silu". out: [M, N], any
    strides without overlap, of their dtype; None: a new tensor. allow_tf32: float32 operands may go through tf32
    matrix units, where there are any (NVIDIA). config: None: what `stream_k.choose` gives. workspace: of the same
    device; None: the device's own, on which calls run one after another where tiles are split.

    Returns out. Has a gradient (`stream_k.ops.gradients`); where one is needed, and where torch.compile traces the
    call, out and config are a ValueError. Raises TypeError and ValueError before anything is launched, `PeerTimeout`
    where a fix-up waited in vain because the device stood still. Algorithm: Stream-K, Osama et al., PPoPP 2023; see
    docs/schedule.md.
    """
    if workspace is not None:
        check_workspace(workspace)
    if dispatched(a, b, bias, whole=out is None and config is None):
        options = Options(activation, allow_tf32)
        return differentiable("gemm", a, b, bias, options, workspace=workspace, out=out, config=config)
    return run(a, b, bias, activation, out, allow_tf32, config, workspace)


def run(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out: torch.Tensor | None,
    allow_tf32: bool,
    config: Config | None,
    workspace: Workspace | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Make the call, whatever becomes of its gradient. residual: [M, N], like the result, contiguous, checked; added to
    the product before it is rounded, where there is no activation."""
    if workspace is None and isinstance(a, torch.Tensor):
        workspace = local_workspace(a.device)
    recorded = trace.recorder() is not None
    more = None if residual is None else kind(residual)
    key = (
        "gemm",
        left_kind(a),
        kind(b),
        kind(bias),
        kind(out),
        more,
        activation,
        allow_tf32,
        config,
        recorded,
    )
    plan = workspace.plans.get(key) if workspace is not None else None
    if plan is None:
        M, N, K = check_product(a, b, bias, activation)
        check_config(config)
        check_output(out, (M, N), a, b, bias)
        assert workspace is not None
        check_device(a, workspace.device)
        workspace.check()
        if out is None:
            out = torch.empty(M, N, dtype=a.dtype, device=a.device)
        if min(M, N) == 0:
            return out
        if target.interpreted() and a.dtype == torch.bfloat16:
            # Triton's interpreter computes bf16 wrongly: the same product in fp32, rounded once.
            wide_bias = None if bias is None else bias.float()
            wide_residual = None if residual is None else residual.float()
            wide = (a.float(), b.float(), wide_bias, activation, None, allow_tf32, config, workspace)
            return out.copy_(run(*wide, wide_residual))
        chosen = config if config is not None else choose("gemm", M, N, K, a.dtype, 1, a.device)
        with on_device(workspace.device):
            added = in_one(bias, residual)
            plan = GemmPlan(*with_inner_size(a, b), chosen, allow_tf32, added, activation, out, workspace)
        workspace.plans[key] = plan
    elif out is not None:
        claim(out, a, b, bias)
    else:
        out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    a, b = with_inner_size(a, b)
    with workspace.begin(None):  # type: ignore[union-attr]
        plan.run(a, b, bias if residual is None else in_one(bias, residual), out)
    return out


_PLACEMENTS = (
    Placement("after", rules.nothing_to_consume, tile=tilings.alone, variants=variants.alone, alone=True),
)
pending.append(type("_Gemm", (), {"name": "gemm", "placements": _PLACEMENTS}))
