"""The fused ops' unfused counterparts: torch.matmul, then a torch.distributed collective.

Usage (inside ranks whose process group exists; NCCL, RCCL and gloo all do)::

    c = gemm_all_reduce(a, b, group)                       # allocates its result
    gemm_reduce_scatter(a, b, group, out=c, partial=p)     # allocates nothing: for timing

C = A x B on R ranks, M N K global sizes. Every rank calls the same function with the same sizes, and gets an
ordinary tensor of the operands' dtype and device. Results are what the collective library gives: partial sums
are rounded to the operands' dtype before they are added, which is what the fused ops are compared with.

Every `out` and scratch argument is optional; one that is given must be contiguous and have exactly the stated
shape and the operands' dtype and device. All raise ValueError (value got, value wanted) before communicating.

Rows that R does not divide are shared out by `shard_range`. The libraries want equal blocks, so such shares travel
padded to the longest one, in scratch that is allocated during the call whatever the caller gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist

from pyrocshmem.shards import shard_range

Group: TypeAlias = dist.ProcessGroup | None


def all_reduce(x: torch.Tensor, group: Group = None, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum over ranks of `x`, same shape, on every rank. `out` may be `x` itself."""
    out = _buffer("out", out, tuple(x.shape), x)
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    if out.numel() > 0:
        dist.all_reduce(out, group=group)
    return out


def all_gather(
    x: torch.Tensor, group: Group = None, *, num_rows: int | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The ranks' `x` [m, ...] one after another along dimension 0: [num_rows, ...] on every rank.

    num_rows: by default R * m, the ranks' shapes being equal; otherwise rank r brings the rows
    `shard_range(num_rows, r, R)`.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = ranks * x.shape[0] if num_rows is None else num_rows
    shards = [shard_range(rows, peer, ranks) for peer in range(ranks)]
    mine = shards[rank][1] - shards[rank][0]
    if x.shape[0] != mine:
        raise ValueError(f"x must have {mine} of the {rows} rows on rank {rank}, got {x.shape[0]}")
    out = _buffer("out", out, (rows, *x.shape[1:]), x)
    if out.numel() == 0:
        return out
    gather = _single("all_gather_single", "all_gather_into_tensor")
    if rows % ranks == 0:
        gather(out, x.contiguous(), group=group)
        return out
    longest = -(-rows // ranks)
    block, gathered = x.new_empty(longest, *x.shape[1:]), x.new_empty(ranks * longest, *x.shape[1:])
    block[:mine] = x
    gather(gathered, block, group=group)
    for (begin, end), arrived in zip(shards, gathered.split(longest), strict=True):
        out[begin:end] = arrived[: end - begin]
    return out


def reduce_scatter(x: torch.Tensor, group: Group = None, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The rows `shard_range(m, r, R)` of the sum over ranks of `x` [m, ...], on rank r."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = x.shape[0]
    shards = [shard_range(rows, peer, ranks) for peer in range(ranks)]
    mine = shards[rank][1] - shards[rank][0]
    out = _buffer("out", out, (mine, *x.shape[1:]), x)
    # Not out's elements: a rank without rows takes part for the others.
    if x.numel() == 0:
        return out
    scatter = _single("reduce_scatter_single", "reduce_scatter_tensor")
    if rows % ranks == 0:
        scatter(out, x.contiguous(), group=group)
        return out
    longest = -(-rows // ranks)
    block, padded = x.new_empty(longest, *x.shape[1:]), x.new_zeros(ranks * longest, *x.shape[1:])
    for (begin, end), leaving in zip(shards, padded.split(longest), strict=True):
        leaving[: end - begin] = x[begin:end]
    scatter(block, padded, group=group)
    return out.copy_(block[:mine])


def all_scatter(
    x: torch.Tensor,
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    gathered: torch.Tensor | None = None,
) -> torch.Tensor:
    """The ranks' `x` [M, N], of one shape, side by side: [M, R * N] on every rank. gathered: scratch [R, M, N]."""
    ranks, (rows, columns) = dist.get_world_size(group), x.shape
    gathered = _buffer("gathered", gathered, (ranks, rows, columns), x)
    out = _buffer("out", out, (rows, ranks * columns), x)
    all_gather(x, group, out=gathered.view(ranks * rows, columns))
    out.view(rows, ranks, columns).copy_(gathered.transpose(0, 1))
    return out


def gemm_all_reduce(
    a: torch.Tensor, b: torch.Tensor, group: Group = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Row-parallel: sum over ranks of a [M, K/R] @ b [K/R, N] -> [M, N] on every rank.

    The ranks' shares of K may differ in length.
    """
    out = _buffer("out", out, _product_shape(a, b), a)
    torch.matmul(a, b, out=out)
    return all_reduce(out, group, out=out)


def gemm_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    partial: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row-parallel: the sum over ranks of a [M, K/R] @ b [K/R, N], of which rank r gets the rows
    `shard_range(M, r, R)`.

    The ranks' shares of K may differ in length. partial: scratch [M, N], the local product.
    """
    rows, columns = _product_shape(a, b)
    begin, end = shard_range(rows, dist.get_rank(group), dist.get_world_size(group))
    partial = _buffer("partial", partial, (rows, columns), a)
    out = _buffer("out", out, (end - begin, columns), a)
    torch.matmul(a, b, out=partial)
    return reduce_scatter(partial, group, out=out)


def gemm_all_gather(
    a: torch.Tensor,
    b_local: torch.Tensor,
    group: Group = None,
    *,
    num_columns: int | None = None,
    out: torch.Tensor | None = None,
    block: torch.Tensor | None = None,
    gathered: torch.Tensor | None = None,
) -> torch.Tensor:
    """Column-parallel: a [M, K] @ b_local [K, N/R], the ranks' column blocks gathered -> [M, N] everywhere.

    The counterpart of `gemm_all_scatter`. num_columns: N, by default R times b_local's width; where R does
    not divide it, rank r holds the columns `shard_range(N, r, R)` and blocks travel padded to W = ceil(N/R).
    block, gathered: scratch [M, W], the local product, and [R, M, W], the blocks as they arrive. The last
    step copies them into row-major order, as every user of a collective that gathers along rows must.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows, width = _product_shape(a, b_local)
    columns = ranks * width if num_columns is None else num_columns
    shards = [shard_range(columns, peer, ranks) for peer in range(ranks)]
    mine = shards[rank][1] - shards[rank][0]
    if width != mine:
        raise ValueError(f"b_local must have {mine} of the {columns} columns on rank {rank}, got {width}")
    padded = -(-columns // ranks)
    block = _buffer("block", block, (rows, padded), a)
    gathered = _buffer("gathered", gathered, (ranks, rows, padded), a)
    out = _buffer("out", out, (rows, columns), a)
    torch.matmul(a, b_local, out=block[:, :width])
    return gather_columns(block, columns, group, out=out, gathered=gathered)


def gather_columns(
    block: torch.Tensor,
    columns: int,
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    gathered: torch.Tensor | None = None,
) -> torch.Tensor:
    """The ranks' column blocks side by side: [M, columns] on every rank.

    block: [M, W], W = ceil(columns/R): the columns `shard_range(columns, r, R)` of rank r, padded. gathered: scratch
    [R, M, W].
    """
    ranks = dist.get_world_size(group)
    rows, padded = block.shape
    out = _buffer("out", out, (rows, columns), block)
    gathered = _buffer("gathered", gathered, (ranks, rows, padded), block)
    all_gather(block, group, out=gathered.view(ranks * rows, padded))
    for peer in range(ranks):
        begin, end = shard_range(columns, peer, ranks)
        out[:, begin:end] = gathered[peer, :, : end - begin]
    return out


def all_gather_gemm(
    a_shard: torch.Tensor,
    b: torch.Tensor,
    group: Group = None,
    *,
    num_rows: int | None = None,
    out: torch.Tensor | None = None,
    gathered: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather a_shard [M/R, K] of all ranks along rows, then A [M, K] @ b [K, N/R] -> [M, N/R] on each rank.

    num_rows: M, by default R times a_shard's rows; where R does not divide it, rank r holds the rows
    `shard_range(M, r, R)`. The ranks' columns may differ in number. gathered: scratch [M, K].
    """
    rows, columns = _product_shape(a_shard, b)
    rows = dist.get_world_size(group) * rows if num_rows is None else num_rows
    gathered = _buffer("gathered", gathered, (rows, a_shard.shape[1]), a_shard)
    out = _buffer("out", out, (rows, columns), a_shard)
    all_gather(a_shard, group, num_rows=rows, out=gathered)
    return torch.matmul(gathered, b, out=out)


def _single(name: str, older: str) -> Callable[..., object]:
    """The collective on one tensor, by the name that this torch wants: 2.13 warns of the older."""
    function: Callable[..., object] = getattr(dist, name, None) or getattr(dist, older)
    return function


def _product_shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int]:
    """(rows, columns) of a @ b; ValueError unless both are matrices that fit one another."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        got = f"{tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
        raise ValueError(f"operands must be [m, k] and [k, n] of one dtype, got {got}")
    return a.shape[0], b.shape[1]


def _buffer(
    name: str, given: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor
) -> torch.Tensor:
    """`given` if it is usable as a [shape] buffer beside `like`, a new one if None; ValueError otherwise."""
    if given is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    got = (tuple(given.shape), given.dtype, given.device)
    wanted = (shape, like.dtype, like.device)
    if got != wanted or not given.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {wanted}, got {got}, contiguous: {given.is_contiguous()}"
        )
    return given
