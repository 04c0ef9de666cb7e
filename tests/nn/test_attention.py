"""`ParallelAttention` against an unsharded one: decoding through a cache; nothing to attend to."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from pyrocshmem import target
from pyrocshmem.stream_k import nn as parallel
from tests.nn import models
from tests.nn.models import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, THETA
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


@torch.no_grad()
def test_a_cache_under_autocast() -> None:
    """Made under it or before, it holds what the products give; made under it, in as few bits."""
    device = target.device(0)
    torch.manual_seed(6)
    attention = parallel.ParallelAttention(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, rope_theta=THETA, device=device)
    x = torch.randn(2, 5, HIDDEN, device=device)
    context: dict[str, Any] = {"device_type": device.type, "dtype": torch.float16}
    for made, used, dtype in (
        (True, True, torch.float16),
        (False, True, torch.float32),
        (True, False, torch.float16),
        (False, False, torch.float32),
    ):
        with torch.autocast(**context) if made else contextlib.nullcontext():
            cache = attention.make_cache(2, 7)
        assert {each.dtype for each in (cache.keys, cache.values)} == {dtype}
        with torch.autocast(**context) if used else contextlib.nullcontext():
            whole = attention(x)
            parts = [
                attention(x[:, first:last], positions=torch.arange(first, last, device=device), cache=cache)
                for first, last in ((0, 3), (3, 5))
            ]
        assert parts[0].dtype == whole.dtype
        allowed = 4e-3 if made or used else TOLERANCE
        assert off(torch.cat(parts, 1), whole.cpu().double()) <= allowed, (made, used)


@pytest.mark.parametrize("by_kernels", [False, True])
def test_no_sequences(by_kernels: bool, request: pytest.FixtureRequest) -> None:
    """As of ordinary layers: an empty result, gradients of zero."""
    if by_kernels:
        request.getfixturevalue("kernels")
    device = target.device(0)
    norm = nn.RMSNorm(HIDDEN, device=device)
    attention = parallel.ParallelAttention(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, rope_theta=THETA, device=device)
    for sizes, options in (
        ((0, 4), {}),
        ((0, 4), {"positions": torch.arange(3, 7, device=device), "cache": attention.make_cache(0, 9)}),
        ((0, 0), {}),
        ((3, 0), {"norm": norm}),
        ((0, 4), {"norm": norm}),
        ((0,), {"batch_size": 0}),
        ((0,), {"batch_size": 3}),
    ):
        attention.zero_grad()
        x = torch.zeros(*sizes, HIDDEN, device=device, requires_grad=True)
        found = attention(x, residual=x, **options)
        y = found[0] if "norm" in options else found
        assert y.shape == x.shape
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        for parameter in attention.parameters():
            assert parameter.grad is not None
            assert not parameter.grad.any()
