"""A transformer block twice: unsharded in plain torch, written out, and of parallel layers. Bodies that train it.

Keys of both state dicts are the same. Activations are matrices of tokens, one sequence below the other.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pyrocshmem.stream_k import nn as parallel
from pyrocshmem.stream_k.nn import functional, linear

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, THETA = 22, 34, 4, 2, 6, 100.0
RATE = 0.3


@dataclass(frozen=True)
class Case:
    """batch sequences of tokens each; the ranks need not divide their product. frugal: gathered rows are gathered once
    more."""

    sequence_parallel: bool
    bias: bool
    batch: int
    tokens: int
    dtype: torch.dtype = torch.float32
    frugal: bool = False

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    def inputs(self, step: int, device: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets [rows, HIDDEN], rounded to the dtype."""
        generator = torch.Generator().manual_seed(1000 * self.rows + step)
        x, target = (torch.randn(self.rows, HIDDEN, generator=generator).to(self.dtype) for _ in range(2))
        return x.to(device), target.to(device)


class Attention(nn.Module):
    """Causal attention with grouped queries and rotary embedding, in so many words."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias)

    def forward(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        tokens = x.shape[0] // batch
        q, k, v = (
            linear(x).view(batch, tokens, -1, HEAD_DIM).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = turned(q), turned(k)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
        scores = q @ k.transpose(2, 3) / HEAD_DIM**0.5
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(x.shape[0], -1))


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding by complex numbers: pair (i, i + HEAD_DIM / 2) is one."""
    half = HEAD_DIM // 2
    angles = torch.outer(torch.arange(x.shape[2]).double(), THETA ** (-torch.arange(half).double() / half))
    number = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((number.real, number.imag), -1)


class MLP(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(gate * torch.sigmoid(gate) * self.up_proj(x))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self.weight


EPS = 1e-5


class Block(nn.Module):
    """The unsharded block; compute in float64."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = Norm(), Attention(bias), Norm(), MLP(bias)

    def forward(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), batch)
        return x + self.mlp(self.norm2(x))


class ParallelBlock(nn.Module):
    """The same of parallel layers, made from the ordinary ones."""

    def __init__(
        self, block: Block, sequence_parallel: bool, group: Any = None, frugal: bool = False
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel}
        gathers = {"save_gathered": not frugal}
        weight = block.norm1.weight
        place = {"device": weight.device, "dtype": weight.dtype}
        attn, mlp = block.attn, block.mlp
        self.norm1 = parallel.RMSNorm(HIDDEN, EPS, **options, **place)
        self.norm2 = parallel.RMSNorm(HIDDEN, EPS, **options, **place)
        self.norm1.load_state_dict(block.norm1.state_dict())
        self.norm2.load_state_dict(block.norm2.state_dict())
        self.attn = parallel.ParallelAttention.from_linears(
            attn.q_proj,
            attn.k_proj,
            attn.v_proj,
            attn.o_proj,
            head_dim=HEAD_DIM,
            rope_theta=THETA,
            **options,
            **gathers,
        )
        self.mlp = parallel.ParallelMLP.from_linears(
            mlp.gate_proj, mlp.up_proj, mlp.down_proj, **options, **gathers
        )

    def forward(self, x: torch.Tensor, batch: int, num_rows: int) -> torch.Tensor:
        h, x = self.attn(self.norm1(x), batch_size=batch, num_rows=num_rows, residual=x, norm=self.norm2)
        return self.mlp(h, num_rows=num_rows, residual=x)


def unsharded(case: Case) -> Block:
    """The block of a case: the same weights every time, rounded to its dtype."""
    torch.manual_seed(case.rows)
    return Block(case.bias).to(case.dtype)


Trained = tuple[list[float], list[torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def train_unsharded(case: Case, steps: int) -> Trained:
    """(losses, gradients of the inputs, gradients of the last step by key, parameters afterwards), float64."""
    block = unsharded(case).double()
    losses, inputs = [], []
    for step in range(steps):
        x, target = (each.double() for each in case.inputs(step))
        x.requires_grad_()
        block.zero_grad()
        loss = (block(x, case.batch) - target).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        assert x.grad is not None
        inputs.append(x.grad)
        with torch.no_grad():
            for parameter in block.parameters():
                parameter -= RATE * parameter.grad
    grads = {key: parameter.grad for key, parameter in block.named_parameters()}
    return losses, inputs, grads, block.state_dict()


def train_parallel(rank: int, world_size: int, case: Case, steps: int, device: Any) -> Trained:
    """The same of the parallel block on this rank; the losses and the inputs' gradients of all rows."""
    model = ParallelBlock(unsharded(case).to(device), case.sequence_parallel, None, case.frugal)
    losses, inputs = [], []
    for step in range(steps):
        x, target = case.inputs(step, device)
        if case.sequence_parallel:
            x, target = (each.tensor_split(world_size)[rank] for each in (x, target))
        x.requires_grad_()
        model.zero_grad()
        y = model(x, case.batch, case.rows)
        # Of this rank's rows, all of which make the whole loss; where rows are replicated, the whole one.
        loss = (y.float() - target.float()).square().sum() / (case.rows * HIDDEN)
        loss.backward()
        losses.append(float(loss.detach()))
        assert x.grad is not None
        inputs.append(x.grad.cpu())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= RATE * parameter.grad
    values = parallel.full_state_dict(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    grads = parallel.full_state_dict(model)
    return losses, inputs, *({key: x.cpu() for key, x in each.items()} for each in (grads, values))  # type: ignore[return-value]


def without(what: str) -> None:
    """Take a sum of gradients over ranks out of this process's layers."""
    if what == "sum_gradient":
        linear.sum_gradient = lambda x, group: x
    else:
        assert what == "column_product"
        linear.column_product = lambda x, weight, bias, *more: functional.stream_k.gemm(
            x, weight.t(), bias=bias
        )
