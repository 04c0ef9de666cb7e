"""State dicts of models with parallel layers, in terms of the unsharded model.

    state = full_state_dict(model)                # what the unsharded model's load_state_dict takes, on every rank
    load_full_state_dict(model, state)            # with any number of ranks
    up_proj = full_linears(mlp)["up_proj"]        # an ordinary nn.Linear again, on every rank

    dcp.save(sharded_state_dict(model), checkpoint_id=folder)       # torch.distributed.checkpoint: no rank holds all
    dcp.load(sharded_state_dict(model), checkpoint_id=folder)       # in place, with any number of ranks

Layers on a `DeviceMesh` have `DTensor`s, and `model.state_dict()` is the sharded one. On other groups they have
ordinary tensors, this rank's shares, of which `torch.distributed.checkpoint` would keep one rank's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pyrocshmem.stream_k.nn.parameters import NO_MEMORY, ParallelLinear, distributed, is_dtensor, like


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """`model.state_dict()`, with the shapes of the unsharded model: what is divided as `DTensor`s that share memory
    with the parameters.

    Raises ValueError, naming the layer, for a layer whose group is no ProcessGroup and no DeviceMesh.
    """
    state = dict(model.state_dict())
    meshes: dict[Any, Any] = {}
    for key, (layer, kind) in divided(model).items():
        part = state[key]
        if is_dtensor(part):
            continue
        place = (layer.group, part.device.type)
        if place not in meshes:
            meshes[place] = _mesh(layer, part.device.type)
        state[key] = distributed(part, meshes[place], layer.DIVIDED[kind], layer.full_shape(kind))
    return state


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the unsharded model, on every rank: the group's ranks call it together. All its tensors are
    the caller's. Raises as `sharded_state_dict`."""
    return {key: _whole(x) for key, x in sharded_state_dict(model).items()}


def full_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The unsharded model's `nn.Linear` for each layer that is divided in `model`, by its name; of a layer alone
    under "". On every rank, on the parameters' device: the group's ranks call it together.

    weight [out, in] and bias are copies that require gradients as theirs do. It is what undoes `from_linear`. Raises
    as `sharded_state_dict`.
    """
    state = sharded_state_dict(model)
    linears = {}
    for name, layer in _layers(model).items():
        kinds = dict(layer.named_parameters(recurse=False))
        full = {kind: _whole(state[f"{name}.{kind}" if name else kind]) for kind in kinds}
        linear = nn.Linear(layer.in_features, layer.out_features, bias="bias" in full, device="meta")
        linear.train(layer.training).load_state_dict(full, assign=True)
        for kind, parameter in kinds.items():
            getattr(linear, kind).requires_grad_(parameter.requires_grad)
        linears[name] = linear
    return linears


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Take this rank's share of the unsharded model's `state`, whatever number of ranks saved it; from any device.

    Raises ValueError, naming the layers, before anything is changed: keys are missing or unknown, shapes differ, or the
    model is on "meta".
    """
    mine, parts = dict(model.state_dict()), divided(model)
    problems = [f"{key} is missing" for key in mine if key not in state]
    problems += [f"{key} is unknown" for key in state if key not in mine]
    for key in mine.keys() & state.keys():
        if not isinstance(mine[key], torch.Tensor):
            continue
        found, wanted = tuple(state[key].shape), tuple(mine[key].shape)
        if key in parts:
            layer, kind = parts[key]
            if found != (full := layer.full_shape(kind)):
                problems.append(
                    f"{key} has shape {found}, the whole of it is {full}; shares of a rank are put "
                    "together by stream_k.nn.full_state_dict, on the ranks that have them"
                )
        elif found != wanted:
            problems.append(f"{key} has shape {found}, {wanted} is needed")
    empty = [key for key, x in mine.items() if isinstance(x, torch.Tensor) and x.is_meta]
    problems += [f"{', '.join(empty)}: {NO_MEMORY}"] if empty else []
    if problems:
        raise ValueError(f"the state dict doesn't fit the model: {'; '.join(problems)}")
    for key, (layer, kind) in parts.items():
        layer.load_share(kind, state[key])
    rest = {key: state[key] for key in mine if key not in parts}
    rest |= {key: like(x, mine[key]) for key, x in rest.items() if is_dtensor(mine[key])}
    model.load_state_dict(rest, strict=False)


def divided(model: nn.Module) -> dict[str, tuple[ParallelLinear, str]]:
    """(layer, "weight" or "bias") of each parameter of a parallel linear layer, by its name in `model`."""
    return {
        f"{path}.{kind}" if path else kind: (layer, kind)
        for path, layer in _layers(model).items()
        for kind, _ in layer.named_parameters(recurse=False)
    }


def _layers(model: nn.Module) -> dict[str, ParallelLinear]:
    modules = model.named_modules(remove_duplicate=False)
    return {path: layer for path, layer in modules if isinstance(layer, ParallelLinear)}


def _whole(x: Any) -> Any:
    """A copy of all of `x`."""
    if not is_dtensor(x):
        return x.clone() if isinstance(x, torch.Tensor) else x
    full = x.full_tensor()
    return full.clone() if full.data_ptr() == x.to_local().data_ptr() else full


def _mesh(layer: ParallelLinear, device_type: str) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    group = dist.group.WORLD if layer.group is None else layer.group
    if isinstance(group, dist.ProcessGroup):
        return DeviceMesh.from_group(group, device_type)
    raise ValueError(
        f"{layer.name}: its group is a {type(group).__name__}; state dicts need a ProcessGroup or a DeviceMesh"
    )
