"""`ParallelAttention` against an unsharded one: decoding through a cache."""

import pytest
import torch

from pyrocshmem import target
from stream_k import nn as parallel
from tests.nn import models
from tests.nn.models import HEAD_DIM, HIDDEN, THETA
from tests.nn.test_layers import TOLERANCE, off
from tests.ranks import run_ranks, values

TIER = 3


@torch.no_grad()
def decoding(rank: int, world_size: int) -> tuple[float, float]:
    """A prompt at once, then token by token, through a cache that is longer than the sequences: how far off, and how
    far the control without rotation."""
    device = target.device(rank)
    torch.manual_seed(5)
    ordinary = models.Attention(bias=False)
    attention = parallel.ParallelAttention.from_linears(
        *(each.to(device) for each in (ordinary.q_proj, ordinary.k_proj, ordinary.v_proj, ordinary.o_proj)),
        head_dim=HEAD_DIM,
        rope_theta=THETA,
    )
    x = torch.randn(2, 6, HIDDEN)
    exact = ordinary.cpu().double()(x.double().flatten(0, 1), 2).view(2, 6, HIDDEN)
    cache = attention.make_cache(2, 9)
    parts = []
    for first, last in ((0, 3), (3, 4), (4, 6)):
        positions = torch.arange(first, last, device=device)
        turn = parallel.rotation(positions, HEAD_DIM, THETA) if first == 3 else None
        parts.append(attention(x[:, first:last].to(device), positions=positions, turn=turn, cache=cache))
    assert attention(x[:, :0].to(device)).shape == (2, 0, HIDDEN)
    assert attention(x[0, :0].to(device)).shape == (0, HIDDEN)
    attention.rope_theta = None
    wrong = off(attention(x.to(device)), exact)
    return off(torch.cat(parts, 1), exact), wrong


@pytest.mark.num_ranks(2)
def test_decoding() -> None:
    for exact, control in values(run_ranks(decoding, 2)):
        assert exact <= TOLERANCE
        assert control > 0.01
