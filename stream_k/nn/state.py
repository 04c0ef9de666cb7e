"""State dicts of models with parallel layers, in terms of the unsharded model.

    state = full_state_dict(model)                # what the unsharded model's load_state_dict takes, on every rank
    load_full_state_dict(model, state)            # with any number of ranks
    up_proj = full_linears(mlp)["up_proj"]        # an ordinary nn.Linear again, on every rank

    dcp.save(sharded_state_dict(model), checkpoint_id=folder)       # torch.distributed.checkpoint: no rank holds all
    dcp.load(sharded_state_dict(model), checkpoint_id=folder)       # in place, with any number of ranks

`model.state_dict()` has the shares of this rank: fine for the same number of ranks, one file a rank. To
`torch.distributed.checkpoint` these are ordinary tensors, of which it keeps one rank's: give it the sharded one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from pyrocshmem.stream_k.nn.parameters import NO_MEMORY, ParallelLinear, Shard


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """Keys and shapes of the unsharded model; what is divided as `DTensor`s, views of the parameters.

    Everything else as `model.state_dict()` has it. Raises ValueError, naming the layer, for a layer whose group is no
    ProcessGroup and no DeviceMesh, and for parts that have the name of another layer's.
    """
    # Only here: its import takes longer than all else of this package.
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor import Shard as ShardPlacement

    state, found = _parts(model)
    meshes: dict[Any, Any] = {}
    for key, (shard, layer) in found.items():
        kind = (layer.group, shard.local.device.type)
        if kind not in meshes:
            meshes[kind] = _mesh(layer, shard.local.device.type)
        placement = Replicate() if shard.dim is None else ShardPlacement(shard.dim)
        state[key] = DTensor.from_local(shard.local, meshes[kind], [placement], run_check=False)
    return state


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the unsharded model, on every rank: the group's ranks call it together. All its tensors are
    the caller's. Raises as `sharded_state_dict`."""
    return {key: _whole(x) for key, x in sharded_state_dict(model).items()}


def full_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The unsharded model's `nn.Linear` for each layer that is divided in `model`, by its name there; of a layer alone
    under "". On every rank, on the parameters' device: the group's ranks call it together.

    Layers that were joined come apart; weight [out, in] and bias are copies that require gradients as theirs do. It is
    what undoes `from_linear`. Raises as `sharded_state_dict`.
    """
    state, found = sharded_state_dict(model), _parts(model)[1]
    linears = {}
    for name, layer in {key.rpartition(".")[0]: layer for key, (_, layer) in found.items()}.items():
        kinds = dict(layer.named_parameters(recurse=False))
        full = {kind: _whole(state[f"{name}.{kind}" if name else kind]) for kind in kinds}
        sizes = reversed(full["weight"].shape)
        linear = nn.Linear(*sizes, bias="bias" in full, device="meta").train(layer.training)
        linear.load_state_dict(full, assign=True)
        for kind, parameter in kinds.items():
            getattr(linear, kind).requires_grad_(parameter.requires_grad)
        linears[name] = linear
    return linears


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Take this rank's share of the unsharded model's `state`, whatever number of ranks saved it; from any device.

    Raises ValueError, naming the layers, before anything is changed: keys are missing or unknown, shapes differ, or the
    model is on "meta".
    """
    rest, found = _parts(model)
    problems = [f"{key} is missing" for key in (*found, *rest) if key not in state]
    problems += [f"{key} is unknown" for key in state if key not in found and key not in rest]
    for key, (shard, layer) in found.items():
        full = shard.full_shape(layer.world_size)
        if key in state and tuple(state[key].shape) != full:
            problems.append(
                f"{key} has shape {tuple(state[key].shape)}, the whole of it is {full}; shares of a rank are put "
                "together by stream_k.nn.full_state_dict, on the ranks that have them"
            )
    problems += [
        f"{key} has shape {tuple(state[key].shape)}, {tuple(mine.shape)} is needed"
        for key, mine in rest.items()
        if key in state and isinstance(mine, torch.Tensor) and state[key].shape != mine.shape
    ]
    places = {key: shard.local for key, (shard, _) in found.items()} | rest
    empty = [key for key, mine in places.items() if isinstance(mine, torch.Tensor) and mine.is_meta]
    problems += [f"{', '.join(empty)}: {NO_MEMORY}"] if empty else []
    if problems:
        raise ValueError(f"the state dict doesn't fit the model: {'; '.join(problems)}")
    for prefix, layer in _layers(model):
        layer.load_shards({shard.key: state[_key(prefix, layer, shard)] for shard in layer.shards()})
    model.load_state_dict({key: state[key] for key in rest}, strict=False)


def _whole(x: Any) -> Any:
    """A copy of all of `x`."""
    from torch.distributed.tensor import DTensor

    if not isinstance(x, DTensor):
        return x.clone() if isinstance(x, torch.Tensor) else x
    full = x.full_tensor()
    return full.clone() if full.data_ptr() == x.to_local().data_ptr() else full


def _parts(model: nn.Module) -> tuple[dict[str, Any], dict[str, tuple[Shard, ParallelLinear]]]:
    """(what parallel layers don't hold, what they hold): by the unsharded model's keys. ValueError, naming the layer,
    for a key that stands for two tensors, one of which no state dict would have."""
    state = dict(model.state_dict())
    found: dict[str, tuple[Shard, ParallelLinear]] = {}
    for prefix, layer in _layers(model):
        for kind, _ in layer.named_parameters(recurse=False):
            del state[f"{prefix}{kind}"]
        for shard in layer.shards():
            key = _key(prefix, layer, shard)
            if found.setdefault(key, (shard, layer))[1] is not layer:
                _refuse_twice(key, layer)
    for key in found.keys() & state.keys():
        _refuse_twice(key, found[key][1])
    return state, found


def _refuse_twice(key: str, layer: ParallelLinear) -> NoReturn:
    raise ValueError(
        f"{layer.name}: {key} stands for a part of it and for another layer's; give the parts other names, or put the "
        "layers into modules of their own"
    )


def _layers(model: nn.Module) -> list[tuple[str, ParallelLinear]]:
    return [
        (f"{path}." if path else "", layer)
        for path, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, ParallelLinear)
    ]


def _key(prefix: str, layer: ParallelLinear, shard: Shard) -> str:
    """Layers that were joined are the joined one's siblings in the unsharded model."""
    if shard.key in ("weight", "bias"):
        return prefix + shard.key
    return prefix[: prefix.rstrip(".").rfind(".") + 1] + shard.key


def _mesh(layer: ParallelLinear, device_type: str) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    group = dist.group.WORLD if layer.group is None else layer.group
    if isinstance(group, DeviceMesh):
        return group
    if isinstance(group, dist.ProcessGroup):
        return DeviceMesh.from_group(group, device_type)
    raise ValueError(
        f"{layer.name}: its group is a {type(group).__name__}; state dicts need a ProcessGroup or a DeviceMesh"
    )
