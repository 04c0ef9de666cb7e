"""`gemm`: one product on one GPU, by the Stream-K kernel."""

from __future__ import annotations

from typing import Any

import torch

from pyrocshmem import status, target
from stream_k.config import Config, choose
from stream_k.epilogue import ACTIVATIONS, store_output
from stream_k.launch import Launch
from stream_k.operands import aligned, as_argument, check_device, check_product, how_to_write
from stream_k.product import Product, make_product
from stream_k.workspace import Workspace, local_workspace


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

    a: [M, K], b: [K, N], any strides (transposed views are read as they lie), float16, bfloat16 or float32, one dtype for both.
    bias: [N], of their dtype or float32. activation: "none", "relu", "gelu" (exact) or "silu". out: [M, N], any strides without overlap, of their
    dtype; None: a new tensor. allow_tf32: float32 operands go through tf32 matrix units. config: None chooses one. workspace: of the same
    device; None: the device's own, on which calls run one after another where tiles are split.

    Returns out. Raises TypeError and ValueError before anything is launched, `PeerTimeout` (of the fix-up) when the device stood still.
    Algorithm: Stream-K, Osama et al., PPoPP 2023; see docs/schedule.md.
    """
    M, N, K = check_product(a, b, bias, activation, out, b.shape[1] if isinstance(b, torch.Tensor) and b.ndim == 2 else 0)
    check_device(a, a.device if a.device.type == target.device().type else target.device())
    if out is None:
        out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    if min(M, N) == 0:
        return out
    a, b = with_inner_size(a, b)
    if target.interpreted() and a.dtype == torch.bfloat16:
        # The interpreter gets bf16 wrong (hardware facts in docs/architecture.md): the same product in fp32, rounded once.
        return out.copy_(gemm(a.float(), b.float(), bias=widened(bias), activation=activation, config=config, workspace=workspace))
    if workspace is None:
        workspace = local_workspace(a.device)
    elif workspace.device != a.device:
        raise ValueError(f"the workspace is on {workspace.device}, a on {a.device}")
    key = ("gemm", _kind(a), _kind(b), _kind(bias), _kind(out), activation, allow_tf32, config)
    plan = workspace.plans.get(key)
    if plan is None:
        chosen = config if config is not None else choose("gemm", M, N, K, a.dtype, 1, a.device)
        plan = _Plan(make_product(a, b, chosen, allow_tf32), bias, activation, out, workspace)
        plan.launch.compile(plan.arguments(a, b, bias, out))
        workspace.plans[key] = plan
    with workspace.call():
        plan.launch(plan.arguments(a, b, bias, out))
    return out


def with_inner_size(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands; where K is 0, zeros of K = 1, which have the same product and can be read."""
    if a.shape[1] > 0:
        return a, b
    return a.new_zeros(a.shape[0], 1), b.new_zeros(1, b.shape[1])


def widened(bias: torch.Tensor | None) -> torch.Tensor | None:
    """A bias in fp32."""
    return None if bias is None else bias.float()


def _kind(x: torch.Tensor | None) -> Any:
    """All of a tensor that code is specialized for."""
    return None if x is None else (x.shape, x.stride(), x.dtype, aligned(x))


class _Plan:
    """The launch of a GEMM for operands of one kind."""

    def __init__(self, product: Product, bias: torch.Tensor | None, activation: str, out: torch.Tensor, workspace: Workspace) -> None:
        self.product = product
        self.out_how = how_to_write(out)
        options = (ACTIVATIONS.index(activation), int(bias is not None), self.out_how)
        self.context = workspace.context
        self.fix_up_tiles, self.fix_up_flags = product.fix_up(workspace)
        # Without a fix-up nothing counts the calls: such GEMMs share the workspace's words without writing them.
        self.launch: Launch = product.launch(
            int(status.Op.FIX_UP), 1, store_output, None, options, lag=-1, ends=product.split
        )

    def arguments(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> tuple[Any, ...]:
        product = self.product
        x, y = product.operands(a, b)
        c = as_argument(out, self.out_how, product.config.block_m, product.part_n)
        extra = (bias if bias is not None else out, out.stride(0), out.stride(1))
        return (x, y, c, self.fix_up_tiles, self.fix_up_flags, extra, self.context, product.problem, product.strides)
