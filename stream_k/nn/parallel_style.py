"""`ColwiseParallel` and `RowwiseParallel` on the fused ops, for `parallelize_module`.

    parallelize_module(model, mesh, {
        "up": stream_k.nn.ColwiseParallel(input_layouts=Shard(0)),
        "down": stream_k.nn.RowwiseParallel(output_layouts=Shard(0)),
    })

They take what torch's styles of the same names take, and mix with the others, such as `SequenceParallel`. An
`nn.Linear` becomes a `ColumnParallelLinear` or a `RowParallelLinear`, in place; its parameters are ordinary ones. A
`DTensor` of one dimension of a mesh, in another layout than the style's, is redistributed first; of an ordinary tensor,
and of one of several dimensions, this rank's part is taken for what has that layout.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.nn.linear import ColumnParallelLinear, RowParallelLinear
from pyrocshmem.stream_k.nn.parameters import ParallelLinear, check_ordinary


class _FusedStyle(ParallelStyle):
    """What both share. `outer`: the layout of the side that need not be divided by features."""

    layer: type[ColumnParallelLinear] | type[RowParallelLinear]

    def __init__(self, what: str, outer: Placement, output: Placement, use_local_output: bool) -> None:
        super().__init__()
        if not isinstance(outer, Replicate | Shard) or outer == Shard(-1):
            raise ValueError(f"{what} is {outer}, allowed are Replicate() and Shard(dimension of the tokens)")
        self.outer, self.output, self.use_local_output = outer, output, use_local_output

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.outer}, output {self.output}, local {self.use_local_output})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_ordinary(type(self).__name__, module)
        assert isinstance(module, nn.Linear)
        sequence_dim = self.outer.dim if isinstance(self.outer, Shard) else None
        sharded = self.layer(
            module.in_features,
            module.out_features,
            module.bias is not None,
            group=device_mesh,
            sequence_parallel=sequence_dim is not None,
            sequence_dim=sequence_dim or 0,
            device="meta",
            dtype=module.weight.dtype,
        )
        for shard in sharded.shards():
            parameter = getattr(module, shard.key)
            placement = Replicate() if shard.dim is None else Shard(shard.dim)
            made = distribute_tensor(parameter, device_mesh, [placement], src_data_rank=self.src_data_rank)
            local = nn.Parameter(made.to_local().detach().clone(), parameter.requires_grad)
            sharded.register_parameter(shard.key, local)
        # The module itself, which others hold, becomes the parallel one; its hooks stay, and whether it is trained.
        kept = {name: value for name, value in vars(module).items() if "hook" in name or name == "training"}
        vars(module).update(vars(sharded) | kept)
        module.__class__ = type(sharded)
        module.register_forward_pre_hook(_take_local, with_kwargs=True)
        if not self.use_local_output:
            if isinstance(sharded, RowParallelLinear) and sharded.sequence_parallel:
                module.register_forward_pre_hook(
                    lambda layer, inputs: _check_split(layer, inputs[0].shape[layer.sequence_dim])
                )
            module.register_forward_hook(
                lambda layer, inputs, y: _as_dtensor(layer, inputs[0], y, device_mesh, self.output)
            )
        return module


def _take_local(
    layer: ParallelLinear, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The local tensors; of a DTensor whose tokens the ranks divide unevenly, also how many there are in all."""
    x, *more = inputs
    if not isinstance(x, DTensor):
        return inputs, options
    placement: Placement = Shard(x.ndim - 1)
    if isinstance(layer, ColumnParallelLinear):
        placement = Replicate()
        if layer.sequence_parallel:
            size = x.shape[layer.sequence_dim]
            placement = Shard(layer.sequence_dim % x.ndim)
            _check_split(layer, size)
            if size % layer.world_size and not more:
                options = {"num_rows": math.prod(x.shape[:-1]), **options}
    # Otherwise its part would have the right features, and other tokens. What lies on a larger mesh is the caller's.
    if x.device_mesh.ndim == 1 and x.placements != (placement,):
        x = x.redistribute(placements=[placement])
    return (x.to_local(), *more), options


def _as_dtensor(
    layer: ParallelLinear, x: torch.Tensor, y: torch.Tensor, mesh: DeviceMesh, placement: Placement
) -> DTensor:
    sizes: dict[str, Any] = {}
    if placement == Shard(layer.sequence_dim) and x.shape[layer.sequence_dim] % layer.world_size:
        # By itself it takes every rank's block for as large as this one's.
        shape = torch.Size((*x.shape[:-1], layer.out_features))
        sizes = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
    return DTensor.from_local(y, mesh, [placement], run_check=False, **sizes)


def _check_split(layer: ParallelLinear, size: int) -> None:
    """ValueError where DTensor cuts `size` tokens otherwise than `torch.tensor_split`, as the ops do."""
    world_size = layer.world_size
    step = -(-size // world_size)
    first = [min(rank * step, size) for rank in range(world_size)]
    if first != [shard_range(size, rank, world_size)[0] for rank in range(world_size)]:
        raise ValueError(
            f"{layer.name}: dimension {layer.sequence_dim} is {size}, which DTensor cuts into blocks of {step}, other "
            f"ones than those of torch.tensor_split for {world_size} ranks; pad it"
        )


class ColwiseParallel(_FusedStyle):
    """Divides a Linear's output features.

    input_layouts: Replicate(), or Shard(d): the tokens' dimension d is divided, and gathered while it is multiplied.
    Tokens that the ranks don't divide come as a `DTensor`, which knows how many there are; ValueError where it cuts
    them otherwise than `torch.tensor_split`.
    output_layouts: Shard(-1) alone. use_local_output: False: outputs are `DTensor`s. Raises ValueError for other
    layouts, TypeError for other modules.
    """

    layer = ColumnParallelLinear

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        if output_layouts not in (None, Shard(-1)):
            raise ValueError(f"output_layouts is {output_layouts}, allowed is Shard(-1)")
        super().__init__("input_layouts", input_layouts or Replicate(), Shard(-1), use_local_output)


class RowwiseParallel(_FusedStyle):
    """Divides a Linear's input features; the sum over ranks is part of the product.

    input_layouts: Shard(-1) alone. output_layouts: Replicate(), or Shard(d): each rank gets a block of the tokens'
    dimension d. use_local_output: False: outputs are `DTensor`s. Raises as `ColwiseParallel`.
    """

    layer = RowParallelLinear

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        if input_layouts not in (None, Shard(-1)):
            raise ValueError(f"input_layouts is {input_layouts}, allowed is Shard(-1)")
        outer = output_layouts or Replicate()
        super().__init__("output_layouts", outer, outer, use_local_output)
