"""A Llama-style character model that can be cut into parts, and the text that it learns.

- **Text**: the sources of Python's standard library, a byte a character. A batch follows from the seed and the step's
  number alone: ranks need not exchange it, and a resumed run sees what an uninterrupted one would have seen.
- **Model**: RMSNorm, rotary embedding, SwiGLU, no biases. A part of it holds some of the layers, under the names and
  with the initial weights that they have in the whole, so that parts of any cut fit the same checkpoint.
"""

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 128


@dataclass(frozen=True)
class Shape:
    """Of model and batches; every field is an option of the command line."""

    width: Annotated[int, typer.Option(help="Size of a hidden state.")] = 128
    layers: Annotated[int, typer.Option(help="Layers of the whole model.")] = 4
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 16
    length: Annotated[int, typer.Option(help="Characters a sequence.")] = 128
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0


@cache
def text() -> Tensor:
    """The sources of the standard library's top-level modules, uint8 [characters]; what isn't ASCII becomes 127."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not sources:
        raise ValueError(f"{folder} holds no *.py to learn from")
    return torch.frombuffer(bytearray(sources), dtype=torch.uint8).clamp(max=VOCABULARY - 1)


def batch(shape: Shape, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Characters and, for each, the one that follows it: int64 [batch, length] both."""
    generator = torch.Generator().manual_seed(shape.seed * 1_000_003 + step)
    starts = torch.randint(len(text()) - shape.length, (shape.batch, 1), generator=generator)
    rows = text()[starts + torch.arange(shape.length + 1)].long().to(device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, the mean over all characters."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021) of `x` [batch, heads, length, size], halves paired as in Llama."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * frequency
    first, second = x.chunk(2, -1)
    return torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
    )


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width is {width}, allowed are multiples of {2 * heads}, twice the heads")
        self.heads = heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [batch, length, width]; the same shape."""
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., width]; the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape.width, shape.heads)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.mlp = MLP(shape.width, 3 * shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [batch, length, width]; the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def share(shape: Shape, part: int, num_parts: int) -> range:
    """The layers of one of `num_parts` parts. `ValueError` when a part would have none."""
    if num_parts > shape.layers:
        raise ValueError(
            f"{shape.layers} layers can't be cut into {num_parts} parts: allowed are 1 to {shape.layers}"
        )
    return range(shape.layers * part // num_parts, shape.layers * (part + 1) // num_parts)


class Part(nn.Module):
    """Layers `which` of the model, None: all; the embedding comes with the first of them, norm and head with the last.

    Weights depend on the seed and on the layer's number, not on the cut. `recompute`: keep only each layer's input for
    the backward pass, and compute the rest again there (gradient checkpointing: Chen et al., 2016).
    """

    def __init__(self, shape: Shape, which: range | None = None, recompute: bool = False) -> None:
        super().__init__()
        which = range(shape.layers) if which is None else which
        self.recompute = recompute

        def seeded(index: int, make: Callable[[], nn.Module]) -> nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(shape.seed * 1000 + index)
                return make()

        self.embedding = seeded(0, lambda: nn.Embedding(VOCABULARY, shape.width)) if 0 in which else None
        self.layers = nn.ModuleDict({str(i): seeded(i + 1, lambda: Layer(shape)) for i in which})
        self.norm = self.head = None
        if shape.layers - 1 in which:
            self.norm = nn.RMSNorm(shape.width)
            self.head = seeded(shape.layers + 1, lambda: nn.Linear(shape.width, VOCABULARY, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Characters, int64 [batch, length], go into the part with the first layer, hidden states into the others.

        Hidden states, [batch, length, width], come out; logits, [batch, length, VOCABULARY], of the last layer's part.
        """
        x = self.run_layers(x if self.embedding is None else self.embedding(x))
        return x if self.norm is None or self.head is None else self.head(self.norm(x))

    def run_layers(self, x: Tensor) -> Tensor:
        """Hidden states to hidden states."""
        for layer in self.layers.values():
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x
