"""`ColwiseParallel` and `RowwiseParallel` on the fused ops, for `parallelize_module`.

    parallelize_module(model, mesh, {
        "up": stream_k.nn.ColwiseParallel(input_layouts=Shard(0)),
        "down": stream_k.nn.RowwiseParallel(output_layouts=Shard(0)),
    })

They take what torch's styles of the same names take, and mix with the others, such as `SequenceParallel`. An
`nn.Linear` becomes a `ColumnParallelLinear` or a `RowParallelLinear`, in place; its parameters are ordinary ones.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from stream_k.nn.linear import ColumnParallelLinear, RowParallelLinear


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
        if not isinstance(module, nn.Linear):
            raise TypeError(f"{type(self).__name__} is for nn.Linear, got {type(module).__name__}")
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
        # The module itself, which others hold, becomes the parallel one; hooks that it has stay.
        hooks = {name: value for name, value in vars(module).items() if "hook" in name}
        vars(module).update(vars(sharded) | hooks)
        module.__class__ = type(sharded)
        module.register_forward_pre_hook(_take_local)
        if not self.use_local_output:
            module.register_forward_hook(
                lambda _, inputs, y: DTensor.from_local(y, device_mesh, [self.output], run_check=False)
            )
        return module


def _take_local(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.to_local() if isinstance(x, DTensor) else x for x in inputs)


class ColwiseParallel(_FusedStyle):
    """Divides a Linear's output features.

    input_layouts: Replicate(), or Shard(d): the tokens' dimension d is divided, and gathered while it is multiplied.
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
