"""`collectives.rms_norm`'s counterpart of torch.distributed: squares, all-reduce of their sums, scaling; and those of
sums and products with RMSNorm, made of it and of `reference.ops`.

    y, h = rms_norm(x, weight, 1e-6, residual=residual)              # own columns; the default process group
    check(y, whole_h, whole_weight, 1e-6, baseline).ok               # against float64

Sums are fp32; h = x + residual is rounded to the residual's dtype, the result once, to its own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional

from pyrocshmem.reference import accuracy
from pyrocshmem.reference.accuracy import Accuracy
from pyrocshmem.reference.ops import Group, all_reduce, gather_columns, gemm_all_reduce
from pyrocshmem.shards import shard_range


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


def all_reduce_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: Group = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm of the total, the total: sum over ranks of x, plus residual), all of one dtype, as
    `collectives.all_reduce_rms_norm` has them; all_reduce, add, rms_norm."""
    total = all_reduce(x, group).add_(residual)
    return functional.rms_norm(total, weight.shape, weight, eps), total


def gemm_all_reduce_rms_norm(
    a: torch.Tensor,
    b: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: Group = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm of the total, the total: sum over ranks of a @ b, plus residual), all of one dtype, as
    `stream_k.gemm_all_reduce_rms_norm` has them; matmul, all_reduce, add, rms_norm."""
    total = gemm_all_reduce(a, b, group).add_(residual)
    return functional.rms_norm(total, weight.shape, weight, eps), total


def gemm_rms_norm_all_gather(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, eps: float, group: Group = None
) -> torch.Tensor:
    """RMSNorm over the columns of all ranks of a @ b, on every rank, as `stream_k.gemm_rms_norm_all_scatter` has it."""
    return rms_norm(torch.matmul(a, b), weight, eps, group, replicated=True)[0]


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


def check_product(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    baseline: torch.Tensor,
    *,
    num_partials: int = 1,
    partial_roundings: int = 0,
) -> Accuracy:
    """Hold `out`, the RMSNorm of h = a [M, K] @ b [K, N] + residual, against float64, beside `baseline`. num_partials,
    partial_roundings: as in `accuracy.check`.

    The bound: as in `check`, and what the norm makes of an error of h, to first order. That may be, elementwise,
    sqrt(K) 2^-23 (|a| @ |b| + |residual|), one rounding of h to out's dtype, and those of the partials.
    """
    a, b = a.double(), b.double()
    h, partials = accuracy.sum_of_partials(a, b, num_partials)
    magnitude = a.abs() @ b.abs()
    if residual is not None:
        h, magnitude = h + residual.double(), magnitude + residual.double().abs()
    terms = accuracy.Partials(partials, num_partials, out.dtype).times(partial_roundings)
    error = accuracy.bound(
        h, h, magnitude, max(a.shape[1], 1), out.dtype, terms if partial_roundings else None
    )
    ref64 = in_float64(h, weight, eps)
    allowed = accuracy.bound(ref64, baseline, ref64.abs(), h.shape[1] + 16, out.dtype)
    return accuracy.compare(out, ref64, baseline, allowed + passed(error, h, weight, eps))


def passed(error: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """What the norm of rows h [M, H] makes of errors of h, to first order: of the value and of the root. float64."""
    scale = torch.rsqrt(h.square().mean(1, keepdim=True) + eps)
    moved = error + h.abs() * scale.square() * (h.abs() * error).mean(1, keepdim=True)
    return moved * scale * weight.double().abs()
