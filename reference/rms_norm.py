"""`collectives.rms_norm`'s counterpart of torch.distributed: squares, all-reduce of their sums, scaling.

    y, h = rms_norm(x, weight, 1e-6, residual=residual)              # own columns; the default process group
    check(y, whole_h, whole_weight, 1e-6, baseline).ok               # against float64

Sums are fp32; h = x + residual is rounded to the residual's dtype, the result once, to its own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from reference import accuracy
from reference.accuracy import Accuracy
from reference.ops import Group, gather_columns, shard_range


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: Group = None,
    *,
    residual: torch.Tensor | None = None,
    replicated: bool = False,
    hidden: int | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, what was normalized: x, or x + residual) of x [M, N], weight [N], as `collectives.rms_norm` has them."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    columns = ranks * x.shape[1] if hidden is None else hidden
    begin, end = shard_range(columns, rank, ranks)
    if x.shape[1] != end - begin or weight.shape != (end - begin,):
        raise ValueError(
            f"x and weight must have {end - begin} of the {columns} columns on rank {rank}, "
            f"got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    h = x if residual is None else (x.float() + residual.float()).to(residual.dtype)
    squares = h.float().square().sum(1, keepdim=True)
    dist.all_reduce(squares, group=group)
    scaled = h.float() * torch.rsqrt(squares / columns + eps) * weight.float()
    if not replicated:
        return scaled.to(x.dtype if out_dtype is None else out_dtype) if out is None else out.copy_(scaled), h
    block = torch.nn.functional.pad(scaled, (0, -(-columns // ranks) - x.shape[1]))
    return gather_columns(block.to(x.dtype if out_dtype is None else out_dtype), columns, group, out=out), h


def in_float64(h: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The formula for whole rows h [M, H], weight [H]."""
    h, weight = h.double(), weight.double()
    return h * torch.rsqrt(h.square().mean(1, keepdim=True) + eps) * weight


def check(
    out: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    baseline: torch.Tensor,
    columns: slice = slice(None),
) -> Accuracy:
    """Hold `out`, the given columns of the result for whole rows h [M, H], against float64, beside `baseline`.

    The bound: |out - ref64| <= |baseline - ref64| + sqrt(H + 16) 2^-23 |ref64| + one rounding of the output's dtype;
    16 for the division, the root and the products that follow the sum.
    """
    ref64 = in_float64(h, weight, eps)[:, columns]
    allowed = accuracy.bound(ref64, baseline, ref64.abs(), h.shape[1] + 16, out.dtype)
    return accuracy.compare(out, ref64, baseline, allowed)
