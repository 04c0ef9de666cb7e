"""A small Llama of ordinary layers, and the plans that divide it: PyTorch's tutorial's, and torchtitan's.

Each plan is of either style: `STYLES["ours"]`, `STYLES["torch"]`.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import PrepareModuleInput, SequenceParallel, parallelize_module

from pyrocshmem.stream_k import nn as parallel

STYLES: dict[str, Any] = {"ours": parallel, "torch": torch_styles}
WORDS, WIDTH, HEADS, INNER = 24, 16, 4, 20
BATCH, LENGTH = 2, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down_proj = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.RMSNorm(WIDTH), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Words [BATCH, LENGTH] -> logits [BATCH, LENGTH, WORDS]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(WORDS, WIDTH), Block()
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(self.words(words))))


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and the next ones, of a step."""
    words = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return words[:, :-1], words[:, 1:]


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """On every rank that of all words."""
    words, wanted = batch_of(step)
    return nn.functional.cross_entropy(model(words).flatten(0, 1), wanted.flatten())


def replicated(which: str) -> dict[str, Any]:
    """The plan of a `Block` whose activations every rank has whole; norms stay ordinary."""
    column, row = STYLES[which].ColwiseParallel, STYLES[which].RowwiseParallel
    columns = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    return {**{name: column() for name in columns}, "attn.o_proj": row(), "mlp.down_proj": row()}


def sequence(which: str, prefix: str = "") -> dict[str, Any]:
    """torchtitan's plan of a `Block`: tokens are divided, too; norms and what gathers are PyTorch's in either style."""
    row = STYLES[which].RowwiseParallel
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    plan |= {"attn": PrepareModuleInput(**gathered), "mlp": PrepareModuleInput(**gathered)}
    plan |= replicated(which) | {
        "attn.o_proj": row(output_layouts=Shard(1)),
        "mlp.down_proj": row(output_layouts=Shard(1)),
    }
    return {prefix + name: style for name, style in plan.items()}


def whole(which: str) -> dict[str, Any]:
    """torchtitan's plan of a `Llama`."""
    column, row = STYLES[which].ColwiseParallel, STYLES[which].RowwiseParallel
    return {
        "words": row(input_layouts=Replicate(), output_layouts=Shard(1)),
        **sequence(which, "block."),
        "norm": SequenceParallel(),
        "head": column(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def divided(which: str, mesh: DeviceMesh, seed: int = 0, device: str = "cpu") -> nn.Module:
    """A Llama of the weights of a seed, by torchtitan's plan."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = Llama()
    return parallelize_module(model, mesh, whole(which))
