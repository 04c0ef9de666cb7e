"""`ParallelMLP` and `ParallelAttention` on a mesh, whose parameters are DTensors: packs, optimizers, FSDP2; and
`clip_grad_norm_` for layers that have ordinary tensors.

Tolerance: 1e-5 of the largest element, for fp32 through two layers; 1e-4 after steps of AdamW.
"""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pyrocshmem import Heap
from pyrocshmem.stream_k import nn as parallel
from pyrocshmem.stream_k.nn.packed import joined
from tests.nn import models
from tests.nn.models import Case
from tests.ranks import run_ranks, values

TIER = 3
pytestmark = pytest.mark.cpu

CASE = Case(sequence_parallel=False, bias=True, batch=2, tokens=3)


def block_on(group: Any, seed: int = 0) -> models.ParallelBlock:
    torch.manual_seed(seed)
    return models.ParallelBlock(models.Block(CASE.bias), False, group)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x, target = CASE.inputs(step)
    if isinstance(model, models.Block):
        return (model(x.double(), CASE.batch) - target.double()).square().mean()
    return (model(x, CASE.batch, CASE.rows) - target).square().mean()


def off(found: Any, wanted: torch.Tensor) -> float:
    found = found.full_tensor() if isinstance(found, DTensor) else found
    assert found.shape == wanted.shape
    return float((found.double() - wanted).detach().abs().max() / wanted.detach().abs().max())


def is_packed(model: models.ParallelBlock) -> bool:
    """Whether all four packs are there; joined tensors must be right in any case."""
    found = []
    for module in (model.attn, model.mlp):
        for kind in ("weight", "bias"):
            parameters = [getattr(getattr(module, name), kind) for name in module.PACKED]
            parts = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
            whole = joined(parameters)
            assert torch.equal(whole.nan_to_num(), torch.cat(parts).nan_to_num())
            found.append(whole.data_ptr() == parts[0].data_ptr())
    assert len(set(found)) == 1
    return found[0]


def packs(group: Any, mesh: DeviceMesh | None) -> None:
    """Packs are there from the start and after all that gives parameters other memory; nobody else sees them."""
    model = block_on(group)
    assert is_packed(model)
    before = list(model.parameters())
    model.to(torch.float64)
    assert is_packed(model)
    assert all(map(lambda x, y: x is y, before, model.parameters()))
    model.to(torch.float32)
    again = copy.deepcopy(model)
    assert is_packed(again)
    assert is_packed(model)
    empty = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    assert is_packed(empty)
    empty.load_state_dict(model.state_dict())
    assert is_packed(empty)
    assigned = copy.deepcopy(model).to("meta")
    assigned.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert is_packed(assigned)
    losses = [loss_of(each, 0) for each in (model, again, empty, assigned)]
    assert len({float(loss.detach()) for loss in losses}) == 1
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    if mesh is None:  # a pickled DTensor has more than its numbers
        held = sum(4 * x.numel() for x in model.parameters())
        assert saved.tell() < 1.1 * held + 1000 * len(before), "each tensor is saved once"
    saved.seek(0)
    other = block_on(group, seed=4)
    other.load_state_dict(torch.load(saved, weights_only=False))
    assert torch.equal(loss_of(other, 0), losses[0])
    loss = loss_of(assigned, 0)
    with torch.no_grad():
        assigned.mlp.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()
    if mesh is not None:
        whole = parallel.full_state_dict(model)
        fourth = block_on(group, seed=5)
        fourth.load_state_dict(whole)
        assert torch.equal(loss_of(fourth, 0), losses[0])
        assert is_packed(fourth)
    # Memory of their own for some parameters: slower, and right.
    odd = copy.deepcopy(model)
    weight = odd.mlp.up_proj.weight
    odd.mlp.up_proj.weight = nn.Parameter(weight.detach().clone())
    odd.attn.k_proj.weight = nn.Parameter(odd.attn.k_proj.weight.detach().clone())
    odd.attn.k_proj.bias = nn.Parameter(odd.attn.k_proj.bias.detach().clone())
    odd.mlp.up_proj.bias = nn.Parameter(odd.mlp.up_proj.bias.detach().clone())
    assert not is_packed(odd)
    loss = loss_of(odd, 0)
    loss.backward()
    losses[0].backward()
    assert torch.equal(loss, losses[0])
    for mine, other in zip(odd.parameters(), model.parameters(), strict=True):
        assert torch.equal(*(x.grad.to_local() if mesh else x.grad for x in (mine, other)))


def optimized(mesh: DeviceMesh) -> dict[str, float]:
    """Three steps of AdamW, foreach and fused, with PyTorch's clipping: how far from the unsharded model's."""
    found = {}
    for kind in ("foreach", "fused"):
        torch.manual_seed(0)
        whole = models.Block(CASE.bias).double()
        model = block_on(mesh)
        assert model.state_dict().keys() == whole.state_dict().keys()
        for name, x in model.state_dict().items():
            assert isinstance(x, DTensor)
            assert torch.equal(x.full_tensor().double(), whole.state_dict()[name])
        for each in (whole, model):
            optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, **{kind: True})
            norms = []
            for step in range(3):
                optimizer.zero_grad()
                loss_of(each, step).backward()
                norms.append(nn.utils.clip_grad_norm_(each.parameters(), 0.1))
                optimizer.step()
            if each is whole:
                wanted = norms
        found |= {f"{kind}: norm {i}": off(*pair) for i, pair in enumerate(zip(norms, wanted, strict=True))}
        found |= {f"{kind}: {key}": off(x, whole.state_dict()[key]) for key, x in model.state_dict().items()}
    return found


def clipped(mesh: DeviceMesh, heap: Heap) -> dict[str, float]:
    """`parallel.clip_grad_norm_` of groups of every kind, and of several in one model."""
    found = {}
    groups: dict[str, tuple[Any, Any]] = {
        "default": (None, None), "process group": (dist.group.WORLD, None), "heap": (heap, heap), "mesh": (mesh, mesh),
        "several": (mesh, heap),
    }  # fmt: skip
    for name, (first, second) in groups.items():
        for norm_type, largest in ((2.0, 0.05), (1.0, 0.5), (float("inf"), 0.01), (2.0, 1e4)):
            torch.manual_seed(0)
            ordinary = nn.ModuleList([models.MLP(True), nn.LayerNorm(models.HIDDEN), models.MLP(True)])
            model = nn.ModuleList([
                parallel.ParallelMLP.from_linears(each.gate_proj, each.up_proj, each.down_proj, group=group)
                for each, group in ((ordinary[0], first), (ordinary[2], second))
            ])  # fmt: skip
            model.insert(1, copy.deepcopy(ordinary[1]))
            norms = []
            ordinary.double()
            for each in (ordinary, model):
                x = CASE.inputs(0)[0].to(each[1].weight.dtype)
                for layer in each:
                    x = layer(x)
                x.square().mean().backward()
                clip = parallel.clip_grad_norm_ if each is model else nn.utils.clip_grad_norm_
                norms.append(clip(each if each is model else each.parameters(), largest, norm_type))
            key = f"{name}, {norm_type}, {largest}: "
            found[key + "norm"] = off(norms[1], norms[0])
            with torch.no_grad():
                for parameter in (*model.parameters(), *ordinary.parameters()):
                    parameter.copy_(parameter.grad)
            grads = parallel.full_state_dict(model) if name != "heap" and name != "several" else {}
            found |= {key + kind: off(x, ordinary.state_dict()[kind]) for kind, x in grads.items()}
    x = torch.full((1,), torch.nan)
    model[0].down_proj.bias.grad = None
    model[1].bias.grad = model[1].bias.detach() * x
    assert parallel.clip_grad_norm_(model, 1.0).isnan()
    with pytest.raises(RuntimeError, match=r"the norm of order 2\.0 of the gradients is nan"):
        parallel.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    return found


def on_two(rank: int, ranks: int) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (ranks,))
    packs(mesh, mesh)
    packs(None, None)
    with Heap(16 << 20) as heap:
        return optimized(mesh) | clipped(mesh, heap)


def on_four(rank: int, ranks: int) -> dict[str, float]:
    """FSDP2 on two halves with a batch each, as one rank trains on both; features that the ranks don't divide."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    whole, model = models.Block(CASE.bias).double(), block_on(mesh["tensor"])
    for module in (model.attn, model.mlp, model):
        fully_shard(module, mesh=mesh["data"])
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=True) for each in (whole, model)]
    half = mesh.get_local_rank("data")
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ((loss_of(whole, 2 * step) + loss_of(whole, 2 * step + 1)) / 2).backward()
        loss_of(model, 2 * step + half).backward()
        for optimizer in optimizers:
            optimizer.step()
    found = {f"FSDP2: {key}": off(x, whole.state_dict()[key]) for key, x in model.state_dict().items()}
    saved = {key: x + 1 for key, x in parallel.full_state_dict(model).items()}
    parallel.load_full_state_dict(model, saved)
    assert all(torch.equal(x.full_tensor(), saved[key]) for key, x in model.state_dict().items())
    line = init_device_mesh("cpu", (4,))
    for inner in (10, 3):
        for group in (line, None):
            torch.manual_seed(inner)
            layers = [nn.Linear(8, inner), nn.Linear(8, inner), nn.Linear(inner, 8)]
            mlp = parallel.ParallelMLP.from_linears(*layers, group=group)
            x = torch.randn(5, 8)
            layers = [layer.double() for layer in layers]
            exact = layers[2](nn.functional.silu(layers[0](x.double())) * layers[1](x.double()))
            y = mlp(x)
            exact.square().sum().backward()
            y.square().sum().backward()
            key = f"{inner} features, {type(group).__name__}: "
            found[key + "y"] = off(y, exact)
            with torch.no_grad():
                for parameter in mlp.parameters():
                    parameter.copy_(parameter.grad)
            names = ("gate_proj", "up_proj", "down_proj")
            for name, linear in parallel.full_linears(mlp).items():
                ordinary = layers[names.index(name)]
                found[f"{key}{name}"] = off(linear.weight, ordinary.weight.grad)
                found[f"{key}{name}, bias"] = off(linear.bias, ordinary.bias.grad)
    return found


@pytest.mark.parametrize(
    ("body", "ranks", "count"),
    [
        pytest.param(body, ranks, count, marks=pytest.mark.num_ranks(ranks))
        for body, ranks, count in ((on_two, 2, 100), (on_four, 4, 30))
    ],
)
def test_layers_on_a_mesh(body: Any, ranks: int, count: int) -> None:
    for found in values(run_ranks(body, ranks, timeout=150)):
        bad = {key: x for key, x in found.items() if not x <= (1e-4 if "f" in key[:2].lower() else 1e-5)}
        assert not bad, bad
        assert len(found) > count
