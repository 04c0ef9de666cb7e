"""The layer that `benchmarks.layers` times: ordinary, and of `stream_k.nn`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyrocshmem.benchmarks.shapes import LayerSize
from pyrocshmem.stream_k import nn as parallel
from pyrocshmem.stream_k.nn.attention import KVCache, attend, attend_cached, rotation
from pyrocshmem.stream_k.nn.pointwise import rotate

THETA, EPS = 5e5, 1e-5


class Place(NamedTuple):
    """Of the tokens in their sequences: int64 [S], and the rotation that all layers of a model share."""

    positions: torch.Tensor
    turn: tuple[torch.Tensor, torch.Tensor]


def place_of(positions: torch.Tensor, head_dim: int) -> Place:
    """For heads of this size."""
    return Place(positions, rotation(positions, head_dim, THETA))


class Attention(nn.Module):
    """Ordinary causal attention with a rotary embedding and grouped queries."""

    def __init__(self, size: LayerSize) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
        self.q_proj = nn.Linear(size.hidden, queries, bias=False)
        self.k_proj = nn.Linear(size.hidden, keys, bias=False)
        self.v_proj = nn.Linear(size.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, size.hidden, bias=False)
        self.attend: Callable[..., torch.Tensor] = attend

    def forward(self, x: torch.Tensor, *, place: Place, cache: KVCache | None) -> torch.Tensor:
        """[B, S, hidden], or [S, hidden] -> the same."""
        B, S = x.shape[:-1] if x.ndim == 3 else (1, *x.shape[:-1])
        heads = (layer(x).view(B, S, -1, self.head_dim) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (each.transpose(1, 2) for each in heads)
        q, k = rotate(q, place.turn), rotate(k, place.turn)
        y = self.attend(q, k, v, True) if cache is None else attend_cached(q, k, v, cache, place.positions)
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class MLP(nn.Module):
    """Ordinary SwiGLU."""

    def __init__(self, size: LayerSize) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.down_proj = nn.Linear(size.intermediate, size.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., hidden] -> [.., hidden]."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The ordinary layer."""

    def __init__(self, size: LayerSize) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size.hidden, EPS), nn.RMSNorm(size.hidden, EPS)
        self.attn, self.mlp = Attention(size), MLP(size)

    def forward(self, x: torch.Tensor, place: Place, cache: KVCache | None = None) -> torch.Tensor:
        """[B, S, hidden], or of one sequence [S, hidden] -> the same."""
        x = x + self.attn(self.norm1(x), place=place, cache=cache)
        return x + self.mlp(self.norm2(x))


class OurLayer(nn.Module):
    """The same of `stream_k.nn`, of the weights of `layer`."""

    def __init__(
        self, layer: Layer, group: Any, sequence_parallel: bool, partial_dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel}
        attn, mlp, weight = layer.attn, layer.mlp, layer.norm1.weight
        norm = partial(
            parallel.RMSNorm, weight.numel(), EPS, device=weight.device, dtype=weight.dtype, **options
        )
        self.norm1, self.norm2 = norm(), norm()
        options["partial_dtype"] = partial_dtype
        self.norm1.load_state_dict(layer.norm1.state_dict())
        self.norm2.load_state_dict(layer.norm2.state_dict())
        self.attn = parallel.ParallelAttention.from_linears(
            attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj,
            head_dim=attn.head_dim, **options,
        )  # fmt: skip
        self.mlp = parallel.ParallelMLP.from_linears(mlp.gate_proj, mlp.up_proj, mlp.down_proj, **options)

    def forward(self, x: torch.Tensor, place: Place, cache: KVCache | None = None) -> torch.Tensor:
        """x: [B, S, hidden], or this rank's rows of one sequence, [S/R, hidden]."""
        options = {"positions": place.positions, "turn": place.turn, "cache": cache}
        h, x = self.attn(self.norm1(x), **options, residual=x, norm=self.norm2)
        return self.mlp(h, residual=x)


def attend_by_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """`attend`, a head at a time: in float64 a GPU has no kernel that keeps the scores of all to itself."""
    group = q.shape[1] // k.shape[1]
    heads = [
        checkpoint(
            attend, q[:, i : i + 1], k[:, (j := i // group) : j + 1], v[:, j : j + 1], causal, use_reentrant=False
        )
        for i in range(q.shape[1])
    ]  # fmt: skip
    return torch.cat(heads, 1)
