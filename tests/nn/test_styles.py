"""Inputs of `ColwiseParallel` and `RowwiseParallel` that are `DTensor`s, in any layout, and their gradients."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from pyrocshmem import target
from pyrocshmem.stream_k import nn as parallel
from tests.ranks import run_ranks, values

TIER = 3
TOKENS, FEATURES, OUT = 6, 8, 12


def layouts(rank: int, ranks: int) -> dict[str, float]:
    """The largest error of results and of inputs' gradients, by style and layout."""
    device = target.device(rank)
    mesh = init_device_mesh(device.type, (ranks,))
    torch.manual_seed(5)
    linear, x = nn.Linear(FEATURES, OUT).to(device), torch.randn(TOKENS, FEATURES, device=device)
    x.requires_grad_()
    exact = linear(x)
    (of_x,) = torch.autograd.grad(exact.square().sum() / 2, x)
    styles: dict[str, tuple[Any, int]] = {
        "column": (parallel.ColwiseParallel(), 1),
        "column, rows": (parallel.ColwiseParallel(input_layouts=Shard(0)), 1),
        "column, rows from the end": (parallel.ColwiseParallel(input_layouts=Shard(-2)), 1),
        "row": (parallel.RowwiseParallel(), -1),
        "row, rows": (parallel.RowwiseParallel(output_layouts=Shard(0)), 0),
    }
    found = {}
    for name, (style, cut) in styles.items():
        model = parallelize_module(nn.Sequential(copy.deepcopy(linear)).eval(), mesh, {"0": style})
        assert not model[0].training
        wanted = exact if cut < 0 else exact.tensor_split(ranks, cut)[rank]
        for layout in (Replicate(), Shard(0), Shard(1), Partial()):
            if isinstance(layout, Partial):
                given = DTensor.from_local(x.detach() / ranks, mesh, [layout])
            else:
                given = distribute_tensor(x.detach(), mesh, [layout])
            given.requires_grad_()
            y = model(given)
            assert y.shape == wanted.shape, (name, layout, y.shape)
            found[f"{name}, {layout}"] = float((y - wanted).detach().abs().max())
            y.backward(wanted.detach())
            assert isinstance(given.grad, DTensor)
            found[f"{name}, {layout}: gradient"] = float((given.grad.full_tensor() - of_x).abs().max())
    return found


def of_two_dimensions(rank: int, ranks: int) -> bool:
    """Whether batches that are divided over another dimension of a mesh stay so."""
    device = target.device(rank)
    mesh = init_device_mesh(device.type, (ranks, 1), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(5)
    linear, x = nn.Linear(FEATURES, OUT).to(device), torch.randn(TOKENS, FEATURES, device=device)
    exact = linear(x).tensor_split(ranks)[rank]
    model = parallelize_module(nn.Sequential(linear), mesh["tensor"], {"0": parallel.ColwiseParallel()})
    return torch.allclose(model(distribute_tensor(x, mesh, [Shard(0), Replicate()])), exact, atol=1e-5)


@pytest.mark.num_ranks(2)
def test_inputs_of_a_larger_mesh() -> None:
    assert values(run_ranks(of_two_dimensions, 2)) == [True, True]


@pytest.mark.num_ranks(2)
@pytest.mark.gpu_a_rank("PyTorch's DTensor over gloo ends in a segmentation fault with tensors of a GPU")
def test_inputs_of_any_layout() -> None:
    for found in values(run_ranks(layouts, 2)):
        bad = {key: value for key, value in found.items() if not value <= 1e-5}
        assert not bad, bad
