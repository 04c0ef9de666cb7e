"""What is done with models that PyTorch's tensor-parallel styles have divided, done with ours, too: the same results.

Each recipe runs with both on the same ranks, from the same weights. Tolerance of values, absolute: 1e-5, of numbers of
about 1 that were computed in fp32 in different orders; after steps of AdamW, which divides by the root of a gradient's
square, 1e-4. PyTorch's styles are the measure: where they raise an error, ours raise it as well.
"""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.nn import llama
from tests.nn.llama import LENGTH, STYLES, WIDTH
from tests.ranks import run_ranks, values

TIER = 3
pytestmark = pytest.mark.cpu

Results = dict[str, Any]
CLOSE, AFTER_ADAMW = 1e-5, 1e-4


def full(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


def state_of(model: nn.Module) -> Results:
    """All of every parameter, and its kind."""
    found: Results = {}
    for name, x in model.state_dict().items():
        found[name] = full(x).clone()
        found[f"{name}: kind"] = (type(x).__name__, x.placements, x.shape, x.to_local().shape)
    return found


def gradients_of(model: nn.Module) -> Results:
    return {f"gradient of {name}": full(x.grad).clone() for name, x in model.named_parameters()}


def differences(ours: Results, torchs: Results, tolerance: float) -> list[str]:
    """What differs, in words."""
    assert ours.keys() == torchs.keys()
    wrong = []
    for key, mine in ours.items():
        other = torchs[key]
        if isinstance(mine, torch.Tensor):
            off = float((mine.double() - other.double()).abs().max()) if mine.numel() else 0.0
            if mine.shape != other.shape or not off <= tolerance:
                wrong.append(f"{key}: off by {off}, shapes {tuple(mine.shape)}, {tuple(other.shape)}")
        elif mine != other:
            wrong.append(f"{key}: {mine}, PyTorch's {other}")
    return wrong


def raised_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# --- recipes: what a model of either style gives ---


def steps(which: str, mesh: DeviceMesh, **options: Any) -> Results:
    """Three steps of an optimizer with clipped gradients."""
    model = llama.divided(which, mesh)
    kind = options.pop("kind", torch.optim.AdamW)
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    found: Results = {}
    for step in range(3):
        optimizer.zero_grad()
        loss = llama.loss_of(model, step)
        loss.backward()
        if step == 0:
            found |= gradients_of(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found |= {f"loss {step}": loss.detach(), f"norm {step}": full(norm)}
    return found | state_of(model)


def mixed(which: str, mesh: DeviceMesh) -> Results:
    """DTensors beside the ordinary weights of norms in one group: PyTorch's functions say that they can't."""
    torch.manual_seed(0)
    block = parallelize_module(llama.Block(), mesh, llama.replicated(which))
    x = torch.randn(2, LENGTH, WIDTH)
    block(x).square().sum().backward()
    optimizer = torch.optim.AdamW(block.parameters(), foreach=True)
    return {
        "clip": raised_by(lambda: nn.utils.clip_grad_norm_(block.parameters(), 1.0)),
        "foreach": raised_by(optimizer.step),
        "DDP": raised_by(lambda: DistributedDataParallel(block)),
        **{name: full(x.grad) for name, x in block.named_parameters()},
    }


def checkpoints(which: str, mesh: DeviceMesh, folder: Path) -> Results:
    """Saved by PyTorch's ways, and read by other ranks' weights."""
    model, other = llama.divided(which, mesh), llama.divided(which, mesh, seed=5)
    dcp.save(model.state_dict(), checkpoint_id=folder / which)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder / which)
    other.load_state_dict(state)
    found = state_of(other)
    options = StateDictOptions(full_state_dict=True)
    whole = get_model_state_dict(model, options=options)
    found |= {f"whole {name}": x for name, x in whole.items()}
    third = llama.divided(which, mesh, seed=6)
    set_model_state_dict(third, {name: x.clone() for name, x in whole.items()}, options=options)
    found |= {f"set {name}": x for name, x in state_of(third).items()}
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    third.load_state_dict(torch.load(saved, weights_only=False))
    return found | {"loss": llama.loss_of(third, 0).detach()}


def copied(which: str, mesh: DeviceMesh) -> Results:
    model = llama.divided(which, mesh)
    again = copy.deepcopy(model)
    llama.loss_of(again, 0).backward()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter -= parameter.grad
    return state_of(model) | {f"copy {name}": x for name, x in state_of(again).items()}


def from_meta(which: str, mesh: DeviceMesh) -> Results:
    """A model without memory, divided, then given memory and weights."""
    model = llama.divided(which, mesh, device="meta")
    kinds = {name: (x.shape, x.placements, x.to_local().shape) for name, x in model.state_dict().items()}
    model.to_empty(device="cpu")
    wanted = llama.divided(which, mesh, seed=3)
    model.load_state_dict(wanted.state_dict())
    assigned = llama.divided(which, mesh, device="meta")
    assigned.load_state_dict(wanted.state_dict(), assign=True)
    losses = [llama.loss_of(each, 0) for each in (model, assigned)]
    losses[0].backward()
    return (
        kinds
        | state_of(model)
        | gradients_of(model)
        | {"loss": losses[0].detach(), "assigned": losses[1].detach()}
    )


def compiled(which: str, mesh: DeviceMesh) -> Results:
    torch._dynamo.reset()
    model = llama.divided(which, mesh)
    words, wanted = llama.batch_of(0)
    traced = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = nn.functional.cross_entropy(traced(words).flatten(0, 1), wanted.flatten())
    loss.backward()
    return {"loss": loss.detach()} | gradients_of(model)


def moved(which: str, mesh: DeviceMesh) -> Results:
    """In another dtype and back, frozen in part."""
    model = llama.divided(which, mesh).to(torch.bfloat16).to(torch.float32)
    model.block.attn.requires_grad_(False)
    llama.loss_of(model, 0).backward()
    grads = {name: None if x.grad is None else full(x.grad) for name, x in model.named_parameters()}
    return grads | state_of(model)


def uneven(which: str, mesh: DeviceMesh) -> Results:
    """Tokens and features that the ranks don't divide, even fewer than ranks, between DTensors."""
    found: Results = {}
    column, row = STYLES[which].ColwiseParallel, STYLES[which].RowwiseParallel
    for tokens, inner in ((10, 10), (5, 7), (3, 3)):
        torch.manual_seed(tokens)
        model = nn.ModuleDict(
            {"norm": nn.LayerNorm(6), "up": nn.Linear(6, inner), "down": nn.Linear(inner, 6)}
        )
        plan = {
            "norm": SequenceParallel(sequence_dim=1),
            "up": column(input_layouts=Shard(1), use_local_output=False),
            "down": row(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(model, mesh, plan)
        x = distribute_tensor(torch.randn(2, tokens, 6), mesh, [Shard(1)], src_data_rank=None)
        x.requires_grad_()
        between = model["up"](model["norm"](x))
        y = model["down"](between.relu())
        y.square().sum().backward()
        name = f"{tokens} tokens, {inner} features: "
        found |= {
            name + key: value
            for key, value in {
                "y": full(y),
                "part": y.to_local().detach(),
                "placements": (y.shape, y.placements, between.shape, between.placements),
                "x": full(x.grad),
                "x's placements": x.grad.placements,
                **gradients_of(model),
                **state_of(model),
            }.items()
        }
    return found


def layouts(which: str, mesh: DeviceMesh) -> Results:
    """Layouts that no op has, and outputs as DTensors."""
    found: Results = {}
    torch.manual_seed(1)
    linear, x, ranks = nn.Linear(8, 12), torch.randn(4, 8, 8), mesh.size()
    style = STYLES[which]
    rank = mesh.get_local_rank()
    parts = {"Replicate": x, "Shard 1": x.chunk(ranks, 1)[rank], "Shard -1": x.chunk(ranks, -1)[rank]}
    given = {"Replicate": Replicate(), "Shard 1": Shard(1), "Shard -1": Shard(-1)}
    for name in ("ColwiseParallel", "RowwiseParallel"):
        for before, part in parts.items():
            for after in given.values():
                made = getattr(style, name)(
                    input_layouts=given[before], output_layouts=after, use_local_output=name[0] == "C"
                )
                model = parallelize_module(nn.Sequential(copy.deepcopy(linear)), mesh, {"0": made})
                mine = part.detach().clone().requires_grad_()
                y = model(mine)
                y.backward(torch.ones_like(y))
                key = f"{name}, {before}, {after}: "
                found |= {f"{key}{what}": each for what, each in gradients_of(model).items()}
                found |= {f"{key}y": full(y), f"{key}x": mine.grad, f"{key}kind": type(y).__name__}
    return found


def two_dimensions(which: str, mesh: DeviceMesh) -> Results:
    """FSDP2 around tensor parallelism: three steps, on batches of each half's own; then a checkpoint's state."""
    model = llama.divided(which, mesh["tensor"])
    for module in (model.block, model):
        fully_shard(module, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    found: Results = {}
    for step in range(3):
        optimizer.zero_grad()
        loss = llama.loss_of(model, 10 * step + mesh.get_local_rank("data"))
        loss.backward()
        found |= {f"norm {step}": full(nn.utils.clip_grad_norm_(model.parameters(), 0.5))}
        optimizer.step()
        found |= {f"loss {step}": loss.detach()}
    found |= {name: (x.placements, x.to_local().shape) for name, x in model.state_dict().items()}
    options = StateDictOptions(full_state_dict=True)
    return found | {f"whole {name}": x for name, x in get_model_state_dict(model, options=options).items()}


# --- the ranks ---


def every_recipe(rank: int, ranks: int, folder: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (ranks,))
    recipes: dict[str, tuple[Callable[[str], Results], float]] = {
        "AdamW, foreach": (lambda which: steps(which, mesh, foreach=True), AFTER_ADAMW),
        "AdamW, fused": (lambda which: steps(which, mesh, fused=True), AFTER_ADAMW),
        "SGD": (lambda which: steps(which, mesh, kind=torch.optim.SGD), CLOSE),
        "mixed": (lambda which: mixed(which, mesh), CLOSE),
        "checkpoints": (lambda which: checkpoints(which, mesh, folder), CLOSE),
        "copied": (lambda which: copied(which, mesh), CLOSE),
        "from meta": (lambda which: from_meta(which, mesh), CLOSE),
        "compiled": (lambda which: compiled(which, mesh), CLOSE),
        "moved": (lambda which: moved(which, mesh), CLOSE),
        "layouts": (lambda which: layouts(which, mesh), CLOSE),
    }
    wrong = []
    for name, (recipe, tolerance) in recipes.items():
        ours, torchs = recipe("ours"), recipe("torch")
        wrong += [f"{name}: {text}" for text in differences(ours, torchs, tolerance)]
    return wrong


def on_four(rank: int, ranks: int) -> list[str]:
    line, square = (
        init_device_mesh("cpu", (4,)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")),
    )
    wrong = differences(uneven("ours", line), uneven("torch", line), CLOSE)
    return wrong + differences(two_dimensions("ours", square), two_dimensions("torch", square), AFTER_ADAMW)


@pytest.mark.slow
@pytest.mark.num_ranks(2)
def test_recipes_on_two_ranks(tmp_path: Path) -> None:
    assert values(run_ranks(every_recipe, 2, tmp_path, timeout=200)) == [[], []]


@pytest.mark.num_ranks(4)
def test_uneven_tensors_and_two_dimensions() -> None:
    assert values(run_ranks(on_four, 4, timeout=150)) == [[]] * 4
