"""A small Llama of the parallel layers generates the same tokens, by the same bits of logits, alone and in batches."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import pyrocshmem
from pyrocshmem import heap_for, stream_k, target
from pyrocshmem.stream_k import nn as parallel
from pyrocshmem.stream_k.nn import linear
from tests.ranks import run_ranks, values

TIER = 3
HEAP_BYTES = 64 << 20
WORDS, WIDTH, HEADS, HEAD_DIM, INNER, LAYERS = 50, 32, 4, 8, 64, 1
PROMPT, LENGTH = 4, 6
SEQUENCES = 3


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attn = parallel.ParallelAttention(WIDTH, HEADS, head_dim=HEAD_DIM, rope_theta=100.0, **options)
        self.mlp = parallel.ParallelMLP(WIDTH, INNER, **options)
        self.norm = parallel.RMSNorm(WIDTH, 1e-6, **options)


class Llama(nn.Module):
    """Norms are part of the product before them, but for the first of all."""

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        device = target.device(rank)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.words = nn.Embedding(WORDS, WIDTH, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(LAYERS))
        self.first, self.last = (parallel.RMSNorm(WIDTH, 1e-6, **options) for _ in range(2))

    @torch.no_grad()
    def logits(self, words: torch.Tensor, caches: list[Any], begin: int) -> torch.Tensor:
        """Words [B, S] that begin at a position -> [B, words] of the last one."""
        h = self.words(words)
        positions = torch.arange(begin, begin + words.shape[1], device=h.device)
        x = self.first(h)
        following = [*(block.norm for block in self.blocks[1:]), self.last]  # type: ignore[union-attr]
        for block, cache, norm in zip(self.blocks, caches, following, strict=True):
            x, h = block.attn(x, positions=positions, cache=cache, residual=h, norm=block.norm)  # type: ignore[operator]
            x, h = block.mlp(x, residual=h, norm=norm)  # type: ignore[operator]
        return stream_k.gemm(x[:, -1], self.words.weight.t())

    def generate(self, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens [B, LENGTH], the logits of each that was generated [B, .., words]) of prompts [B, PROMPT]."""
        caches = [block.attn.make_cache(len(prompts), LENGTH) for block in self.blocks]  # type: ignore[operator, union-attr]
        found, words, tokens = [], prompts, prompts
        for begin in (0, *range(PROMPT, LENGTH)):
            found.append(self.logits(words, caches, begin))
            words = found[-1].argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, words), 1)
        return tokens[:, :LENGTH], torch.stack(found, 1)


def divided(rank: int, dtype: torch.dtype) -> Llama:
    """Of the weights of one seed."""
    model = Llama(rank, dtype)
    generator = torch.Generator().manual_seed(1)
    whole = {
        name: torch.randn(x.shape, generator=generator).to(dtype) / x.shape[-1] ** 0.5 + (x.ndim == 1)
        for name, x in parallel.full_state_dict(model).items()
    }
    parallel.load_full_state_dict(model, whole)
    return model


def generated(
    rank: int, world_size: int, dtype: torch.dtype, tp: bool = False
) -> tuple[list[str], list[float]]:
    """(sequences whose tokens or logits had other bits in a batch than alone, the logits of all)."""
    prompts = torch.randint(WORDS, (SEQUENCES, PROMPT), generator=torch.Generator().manual_seed(2))
    wrong = []
    with heap_for(None, HEAP_BYTES) as heap:
        model = divided(rank, dtype)
        prompts = prompts.to(target.device(rank))
        with pyrocshmem.batch_invariant(tp_invariant=tp):
            alone = [model.generate(prompt[None]) for prompt in prompts]
            for batch in ([2], [*range(SEQUENCES)]):
                tokens, logits = model.generate(prompts[batch])
                for number, place in enumerate(batch):
                    if not torch.equal(tokens[number], alone[place][0][0]):
                        wrong.append(f"tokens of {place} in {batch}")
                    if not torch.equal(logits[number], alone[place][1][0]):
                        wrong.append(f"logits of {place} in {batch}")
        heap.synchronize()
    return wrong, logits.flatten().tolist()


@pytest.mark.num_ranks(2)
def test_generation() -> None:
    for wrong, _ in values(run_ranks(generated, 2, torch.float16, timeout=240.0)):
        assert wrong == []


@pytest.mark.num_ranks(4)
@pytest.mark.timeout(600)
def test_generation_on_any_number_of_ranks() -> None:
    """With the same logits, bit by bit."""
    logits = []
    for num_ranks in (1, 2, 4):
        for wrong, found in values(run_ranks(generated, num_ranks, torch.float32, True, timeout=240.0)):
            assert wrong == []
            logits.append(found)
    assert all(found == logits[0] for found in logits)


def with_norms_of_pytorch(rank: int, world_size: int) -> list[str]:
    """As `generated`, with norms whose sums a row shares with its batch, as they must not be."""

    def mixed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x + x.mean(0) * 1e-3, x.shape[-1:], weight, eps)

    with mock.patch.object(linear, "row_norm", mixed):
        return generated(rank, world_size, torch.float32)[0]


@pytest.mark.num_ranks(1)
def test_a_norm_of_the_batch_is_caught() -> None:
    assert values(run_ranks(with_norms_of_pytorch, 1))[0]
