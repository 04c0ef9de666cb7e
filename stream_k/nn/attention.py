"""`ParallelAttention`: self-attention, its heads divided over the ranks, around `scaled_dot_product_attention`.

Shapes: B sequences, S tokens each, H heads, G key-value heads (grouped queries, Ainslie et al. 2023), D a head's size,
R ranks. Rotary embedding: the two halves of a head turned against one another, as in Llama (`stream_k.nn.pointwise`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from pyrocshmem.checks import as_integer
from pyrocshmem.stream_k.nn.float8 import Float8
from pyrocshmem.stream_k.nn.functional import autocast
from pyrocshmem.stream_k.nn.linear import ColumnParallelLinear, RowParallelLinear, joint_product
from pyrocshmem.stream_k.nn.packed import WithPack
from pyrocshmem.stream_k.nn.parameters import local, ranks_of
from pyrocshmem.stream_k.nn.pointwise import rotated_heads


@dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens so far, of this rank's heads. keys, values: [B, G/R, length, D], of any dtype."""

    keys: torch.Tensor
    values: torch.Tensor

    def update(self, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k, v [B, G/R, S, D], as the cache's dtype, at `positions` [S], int64, each below `length`."""
        self.keys.index_copy_(2, positions, k.to(self.keys.dtype))
        self.values.index_copy_(2, positions, v.to(self.values.dtype))


class ParallelAttention(WithPack):
    """Causal self-attention; query, key and value projection as one product.

    hidden: features. num_heads: H. num_kv_heads: G; None: H. head_dim: D; None: hidden / H. rope_theta: base of the
    rotary embedding; None: without. causal: a token sees itself and earlier ones only. Its layers have the names of the
    unsharded model's: q_proj, k_proj, v_proj, o_proj. Raises ValueError, naming the layer, where the ranks can't divide
    the heads of either kind, or G doesn't divide H. Other arguments: `ColumnParallelLinear`.
    """

    PACKED: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rope_theta: float | None = None,
        causal: bool = True,
        bias: bool = False,
        group: Any = None,
        sequence_parallel: bool = False,
        partial_dtype: torch.dtype | None = None,
        save_gathered: bool = True,
        float8: Float8 | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        name: str = "ParallelAttention",
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        ranks = ranks_of(group).world_size
        for what, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
            if as_integer(f"{name}: {what}", heads) < ranks or heads % ranks:
                raise ValueError(f"{name}: {what} is {heads}, which the {ranks} ranks can't divide")
        if head_dim is None and hidden % num_heads:
            raise ValueError(
                f"{name}: hidden is {hidden}, no multiple of num_heads, {num_heads}; give head_dim"
            )
        head_dim = hidden // num_heads if head_dim is None else head_dim
        if num_heads % num_kv_heads:
            raise ValueError(f"{name}: num_heads is {num_heads}, no multiple of num_kv_heads, {num_kv_heads}")
        if rope_theta is not None and head_dim % 2:
            raise ValueError(f"{name}: head_dim is {head_dim}; a rotary embedding needs an even one")
        self.num_heads, self.num_kv_heads = num_heads // ranks, num_kv_heads // ranks
        self.head_dim, self.rope_theta, self.causal = head_dim, rope_theta, causal
        options: dict[str, Any] = {
            "group": group, "sequence_parallel": sequence_parallel, "partial_dtype": partial_dtype,
            "float8": float8, "device": device, "dtype": dtype,
        }  # fmt: skip
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        for each, size in zip(self.PACKED, (queries, keys, keys), strict=True):
            layer = ColumnParallelLinear(
                hidden, size, bias, save_gathered=save_gathered, name=f"{name}.{each}", **options
            )
            self.add_module(each, layer)
        self.o_proj = RowParallelLinear(queries, hidden, bias, name=f"{name}.o_proj", **options)
        self.pack()

    @classmethod
    def from_linears(
        cls,
        q_proj: nn.Linear,
        k_proj: nn.Linear,
        v_proj: nn.Linear,
        o_proj: nn.Linear,
        *,
        head_dim: int,
        rope_theta: float | None = None,
        causal: bool = True,
        group: Any = None,
        sequence_parallel: bool = False,
        partial_dtype: torch.dtype | None = None,
        save_gathered: bool = True,
        float8: Float8 | None = None,
        name: str = "ParallelAttention",
    ) -> Self:
        """Of ordinary layers, which all ranks hold alike."""
        made = cls(
            o_proj.out_features,
            q_proj.out_features // head_dim,
            k_proj.out_features // head_dim,
            head_dim,
            rope_theta=rope_theta,
            causal=causal,
            group=group,
            sequence_parallel=sequence_parallel,
            partial_dtype=partial_dtype,
            save_gathered=save_gathered,
            float8=float8,
            device="meta",
            name=name,
        )
        made.adopt_all(q_proj=q_proj, k_proj=k_proj, v_proj=v_proj, o_proj=o_proj)
        return made

    def make_cache(self, batch_size: int, length: int) -> KVCache:
        """An empty cache for `length` tokens of each of `batch_size` sequences, in the weights' dtype, or that of
        `torch.autocast`, where that is on."""
        (like,) = autocast(local(self.o_proj.weight).new_empty(0))
        shape = (batch_size, self.num_kv_heads, length, self.head_dim)
        return KVCache(like.new_zeros(shape), like.new_zeros(shape))

    def forward(
        self,
        x: torch.Tensor,
        *,
        batch_size: int | None = None,
        num_rows: int | None = None,
        positions: torch.Tensor | None = None,
        turn: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: KVCache | None = None,
        residual: torch.Tensor | None = None,
        norm: nn.Module | None = None,
    ) -> Any:
        """[.., hidden] -> [.., hidden], + residual; with a norm, (norm(y), y).

        x: [B, S, hidden], or [B S, hidden], one sequence below the other: then batch_size is B, None: 1. Where
        sequence_parallel, this rank's rows of the latter; num_rows: B S, where the ranks don't divide it.
        positions: [S], int64, on x's device: of the tokens in each sequence; None: 0, 1, ..
        turn: their `rotation`, which all layers of a model can share; None: made here, where there is a rope_theta.
        cache: tokens so far, which these join at `positions`, and which they see up to their own; ValueError, naming
        the layer, where it is not causal.
        """
        if self.o_proj.sequence_parallel and x.ndim != 2:
            raise ValueError(
                f"{self.o_proj.name}: x has shape {tuple(x.shape)}; this rank's rows of tokens are needed"
            )
        if cache is not None and not self.causal:
            raise ValueError(
                f"{self.o_proj.name}: causal is False; with a cache a token sees those up to its own position"
            )
        shape = x.shape
        if x.ndim == 3:
            batch_size = x.shape[0]
            x, residual = x.flatten(0, 1), None if residual is None else residual.flatten(0, 1)
        qkv = joint_product((self.q_proj, self.k_proj, self.v_proj), x, num_rows)
        batch_size = 1 if batch_size is None else batch_size
        length = shape[1] if len(shape) == 3 else qkv.shape[0] // max(batch_size, 1)
        if batch_size * length != qkv.shape[0]:
            raise ValueError(f"{self.o_proj.name}: {qkv.shape[0]} tokens are no {batch_size} equal sequences")
        heads = qkv.view(batch_size, length, qkv.shape[1] // self.head_dim, self.head_dim)
        if positions is None:
            positions = torch.arange(heads.shape[1], device=x.device)
        if turn is None and self.rope_theta is not None:
            turn = rotation(positions, self.head_dim, self.rope_theta)
        q, k, v = rotated_heads(heads, turn, self.num_kv_heads)
        if q.numel() == 0:
            y = q  # of q's shape; not every kernel of PyTorch's takes a batch of nothing
        else:
            y = attend(q, k, v, self.causal) if cache is None else attend_cached(q, k, v, cache, positions)
        rows = y.transpose(1, 2).reshape(qkv.shape[0], y.shape[1] * self.head_dim)
        found = self.o_proj(rows, residual=residual, norm=norm)
        if len(shape) == 2:
            return found
        return found.view(shape) if norm is None else tuple(each.view(shape) for each in found)


def rotation(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(cosines, sines) of each position's angles, fp32 [S, D/2]."""
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None].float() * theta ** (-steps / head_dim)
    return angles.cos(), angles.sin()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention of q [B, H, S, D] to k, v [B, G, S, D]: [B, H, S, D]."""
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def attend_cached(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: KVCache, positions: torch.Tensor
) -> torch.Tensor:
    """k, v [B, G, S, D] join the cache at `positions`; attention of q [B, H, S, D] to all up to its own position."""
    cache.update(positions, k, v)
    keys, values = cache.keys.to(q.dtype), cache.values.to(q.dtype)
    B, H, S, D = q.shape
    G, length = cache.keys.shape[1:3]
    seen = torch.arange(length, device=q.device) <= positions[:, None]
    # The heads that share keys as more queries of them: no kernel for masks knows groups.
    mask = seen.expand(H // G, S, length).reshape(-1, length)
    y = scaled_dot_product_attention(q.reshape(B, G, H // G * S, D), keys, values, attn_mask=mask)
    return y.reshape(B, H, S, D)
