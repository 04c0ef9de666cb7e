"""Copies of layers: parameters of their own, on the group of the original, whatever kind it is."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel

from pyrocshmem import Heap, target
from pyrocshmem.stream_k import nn as parallel
from tests.ranks import run_ranks, values

TIER = 2
HIDDEN = 8


def model(group: Any, device: torch.device) -> nn.Sequential:
    """With a layer that is there twice."""
    options: dict[str, Any] = {"group": group, "sequence_parallel": True, "device": device}
    norm = parallel.RMSNorm(HIDDEN, 1e-5, **options)
    return nn.Sequential(norm, parallel.ParallelMLP(HIDDEN, 12, **options), norm)


def step(layers: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """One of gradient descent; the result before it."""
    y: torch.Tensor = layers(x)
    y.square().sum().backward()
    with torch.no_grad():
        for parameter in layers.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad
    return y.detach()


def copied(group: Any, device: torch.device) -> None:
    original = model(group, device)
    x = torch.randn(2, HIDDEN, device=device)
    before = {key: value.clone() for key, value in original.state_dict().items()}
    average = AveragedModel(original)
    again = copy.deepcopy(original)
    assert all(each.group is group for each in again.modules() if hasattr(each, "group"))
    assert again[0] is again[2]
    assert again[0] is not original[0]
    y = original(x).detach()
    assert torch.equal(step(again, x), y)
    assert not torch.equal(again(x), y)
    assert all(torch.equal(value, before[key]) for key, value in original.state_dict().items())
    average.update_parameters(original)
    average.update_parameters(again)
    for mean, one, other in zip(average.parameters(), original.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(mean.detach(), (one + other).detach() / 2)
    average(x).sum().backward()
    saved = io.BytesIO()
    torch.save(again.state_dict(), saved)
    saved.seek(0)
    original.load_state_dict(torch.load(saved, weights_only=True))
    assert torch.equal(original(x), again(x))


def body(rank: int, world_size: int) -> None:
    device = target.device(rank)
    for group in (None, dist.group.WORLD, init_device_mesh(device.type, (world_size,))):
        copied(group, device)
    with Heap(16 << 20) as heap:
        copied(heap, device)


@pytest.mark.num_ranks(2)
def test_copies() -> None:
    assert values(run_ranks(body, 2)) == [None, None]
