"""The layer of `benchmarks.layers` whose linears call `torch.ops.symm_mem`, as torchtitan's asynchronous tensor
parallelism does: whoever serves these ops, PyTorch or `pyrocshmem.torch_ops.install`, computes the layer.

R ranks, rows of tokens divided. A column-parallel linear gathers the rows that it multiplies, a row-parallel one
scatters its sums. For the weight's gradient the former keeps K/R columns of the gathered rows, as many numbers as its
input has, and gathers those again.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from pyrocshmem.benchmarks.layer_models import Layer, Place
from pyrocshmem.stream_k.nn.attention import attend
from pyrocshmem.stream_k.nn.pointwise import rotate


class _GatherLinear(torch.autograd.Function):
    """x [M/R, K] of all ranks times each weight [N/R, K], transposed: one gather, a result [M, N/R] a weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: int, ranks: int, group: str, *weights: torch.Tensor) -> Any:
        gathered, results = torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t() for w in weights], 0, group)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(gathered.chunk(ranks, 1)[rank].contiguous(), *weights)
        ctx.group = group
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        columns, *weights = ctx.saved_tensors
        of_x = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            torch.cat(grads, 1), torch.cat(weights), "sum", 0, ctx.group
        )
        each = [grad.contiguous() for grad in grads]
        _, products = torch.ops.symm_mem.fused_all_gather_matmul(columns.t().contiguous(), each, 0, ctx.group)
        return of_x, None, None, None, *(product.t() for product in products)


class _LinearScatter(torch.autograd.Function):
    """x [M, K/R] times the weight [N, K/R], transposed: this rank's rows [M/R, N] of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gathered, (of_x,) = torch.ops.symm_mem.fused_all_gather_matmul(
            grad.contiguous(), [weight], 0, ctx.group
        )
        return of_x, None, gathered.t() @ x


class SymmMemLayer(nn.Module):
    """The same as `layer`, this rank's shares of its weights; group: the name of its process group."""

    def __init__(self, layer: Layer, rank: int, ranks: int, group: str) -> None:
        super().__init__()
        self.ranks = rank, ranks, group
        self.head_dim = layer.attn.head_dim
        self.norm1, self.norm2 = copy.deepcopy(layer.norm1), copy.deepcopy(layer.norm2)

        def share(linear: nn.Linear, dim: int) -> nn.Parameter:
            return nn.Parameter(linear.weight.detach().chunk(ranks, dim)[rank].contiguous())

        attn, mlp = layer.attn, layer.mlp
        self.qkv = nn.ParameterList(share(each, 0) for each in (attn.q_proj, attn.k_proj, attn.v_proj))
        self.gate_up = nn.ParameterList(share(each, 0) for each in (mlp.gate_proj, mlp.up_proj))
        self.o, self.down = share(attn.o_proj, 1), share(mlp.down_proj, 1)

    def forward(self, x: torch.Tensor, place: Place, cache: None = None) -> torch.Tensor:
        """This rank's rows of one sequence, [S/R, hidden] -> the same."""
        group = self.ranks[-1]
        heads = _GatherLinear.apply(self.norm1(x), *self.ranks, *self.qkv)
        q, k, v = (each.view(1, -1, each.shape[1] // self.head_dim, self.head_dim) for each in heads)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = attend(rotate(q, place.turn), rotate(k, place.turn), v, True)
        x = x + _LinearScatter.apply(y.transpose(1, 2).flatten(2)[0], group, self.o)
        gate, up = _GatherLinear.apply(self.norm2(x), *self.ranks, *self.gate_up)
        return x + _LinearScatter.apply(nn.functional.silu(gate) * up, group, self.down)
