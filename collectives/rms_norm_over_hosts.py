"""`rms_norm` of rows whose columns are spread over the ranks of several hosts, and its gradient.

Ranks exchange one float a row, as on one host: an all-reduce in fp32. What is left is arithmetic on the own columns, by
PyTorch, in fp32, and an all-scatter where every rank wants all columns.
"""

from __future__ import annotations

import torch

from pyrocshmem import status
from pyrocshmem.calls import invariance
from pyrocshmem.calls.tensors import as_rows
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives.over_hosts import exchange_over_hosts
from pyrocshmem.hosts import Hosts
from pyrocshmem.shards import shard_range


def forward(
    workspace: Workspace,
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    hidden: int,
    replicated: bool,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `rms_norm_plan.forward`: (result, x + residual, scale [M] of each row in fp32)."""
    hosts = _hosts(workspace)
    h = x if residual is None else (x.float() + residual.float()).to(residual.dtype)
    rows = as_rows(h).float()
    scales = torch.rsqrt(_sum_over_ranks(hosts, rows.square().sum(1)) / hidden + eps)
    own = (rows * scales[:, None] * weight.float()).to(out_dtype)
    result = _all_columns(hosts, own, hidden) if replicated else own
    result = result.view(*x.shape[:-1], result.shape[1])
    return result if out is None else out.copy_(result), h, scales


def backward(
    workspace: Workspace,
    g: torch.Tensor,
    more: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    hidden: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rms_norm_plan.backward`: (gradient of h in `dtype`, gradient of the weight)."""
    hosts = _hosts(workspace)
    rows = as_rows(h).float() * scales[:, None]
    columns = rows.shape[1]
    first = shard_range(hidden, hosts.rank, hosts.world_size)[0] if g.shape[-1] != columns else 0
    of_result = as_rows(g)[:, first : first + columns].float()
    weighted = of_result * weight.float()
    dots = _sum_over_ranks(hosts, (weighted * rows).sum(1)) / hidden
    grad = scales[:, None] * (weighted - rows * dots[:, None])
    if more is not None:
        grad += as_rows(more).float()
    return grad.to(dtype).view(h.shape), (of_result * rows).sum(0).to(weight.dtype)


def _hosts(workspace: Workspace) -> Hosts:
    """ValueError in a mode that PyTorch's sums of rows don't keep."""
    if mode := invariance.current(workspace):
        raise ValueError(f"a norm of columns that are spread over several hosts is not {mode}")
    assert workspace.hosts is not None
    return workspace.hosts


def _sum_over_ranks(hosts: Hosts, x: torch.Tensor) -> torch.Tensor:
    """Of x [M], fp32: the same bits on every rank."""
    total = torch.empty_like(x)
    exchange_over_hosts(hosts, status.Op.RMS_NORM, "all_reduce", x, total)
    return total


def _all_columns(hosts: Hosts, own: torch.Tensor, hidden: int) -> torch.Tensor:
    """[M, hidden] of all ranks' columns, blocks of `torch.tensor_split`, which travel at one width."""
    width = -(-hidden // hosts.world_size)
    block = own if own.shape[1] == width else torch.nn.functional.pad(own, (0, width - own.shape[1]))
    every = own.new_empty(own.shape[0], hosts.world_size * width)
    exchange_over_hosts(hosts, status.Op.RMS_NORM, "all_scatter", block, every, dim=1)
    if hidden == every.shape[1]:
        return every
    shares = (shard_range(hidden, rank, hosts.world_size) for rank in range(hosts.world_size))
    blocks = every.split(width, 1)
    return torch.cat([block[:, : end - begin] for block, (begin, end) in zip(blocks, shares, strict=True)], 1)
