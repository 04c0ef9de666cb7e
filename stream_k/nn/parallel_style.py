"""`ColwiseParallel` and `RowwiseParallel` on the fused ops, for `parallelize_module`.

    parallelize_module(model, mesh, {
        "up": stream_k.nn.ColwiseParallel(input_layouts=Shard(0)),
        "down": stream_k.nn.RowwiseParallel(output_layouts=Shard(0)),
    })

They take what torch's styles of the same names take, and mix with the others, such as `SequenceParallel`: parameters
are `DTensor`s, and rows and features are cut as DTensor cuts them (`torch.chunk`: 10 over 4 ranks are 3 3 3 1). An
`nn.Linear` becomes a parallel layer, in place. Layouts that the ops don't have are DTensor's to redistribute; an
ordinary tensor is this rank's part of what has the layout, and of a `DTensor` of a larger mesh the local part is taken.
An `nn.Embedding`, which has no product, gets torch's own style.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from pyrocshmem.stream_k.nn.linear import ColumnParallelLinear, RowParallelLinear
from pyrocshmem.stream_k.nn.parameters import (
    ParallelLinear,
    check_ordinary,
    check_styled,
    chunk_range,
    distributed,
    local,
)


class _Styled(ParallelLinear):
    """A parallel layer between tensors of any layouts. Attributes: those of the style."""

    input_layouts: Placement
    output_layouts: Placement
    use_local_output: bool

    def _given(self, x: torch.Tensor, wanted: Placement) -> torch.Tensor:
        """`x` as it was given, as a DTensor of the layout `wanted`; a tensor that has it already, as it is."""
        if not isinstance(x, DTensor):
            layout = _of(self.input_layouts, x)
            if layout == wanted:
                return x
            x = DTensor.from_local(x, self.group, [layout], run_check=False)
        # Otherwise its part would have the right features, and other tokens. On a larger mesh that is the caller's.
        if x.device_mesh.ndim == 1 and x.placements != (wanted,):
            x = x.redistribute(placements=[wanted])
        return x

    def _result(self, y: torch.Tensor, layout: Placement, shape: torch.Size) -> torch.Tensor:
        """What the layer returns for its own `y`. layout, shape: of the whole."""
        wanted = _of(self.output_layouts, y)
        if self.use_local_output and wanted == layout:
            return y
        dim = layout.dim if isinstance(layout, Shard) else None
        if dim is None or shape[dim] % self.world_size == 0:
            whole = DTensor.from_local(y, self.group, [layout], run_check=False)
        else:
            # By itself it takes every rank's part for as large as this one's.
            whole = distributed(y.contiguous(), self.group, dim, shape)
        if wanted != layout:
            whole = whole.redistribute(placements=[wanted])
        return whole.to_local() if self.use_local_output else whole


class ColwiseLinear(_Styled, ColumnParallelLinear):
    """What `ColwiseParallel` makes of an `nn.Linear`."""

    def forward(self, x: torch.Tensor, num_rows: int | None = None) -> torch.Tensor:
        """[.., in] -> [.., out], in the layouts of the style. num_rows: as of `ColumnParallelLinear`."""
        dim = _token_dim(self.input_layouts, x)
        x = self._given(x, Replicate() if dim is None else Shard(dim))
        size: Any = None  # of all ranks' tokens, where it is known
        sums = True
        if isinstance(x, DTensor):
            own = x.device_mesh.ndim == 1
            if dim is None:
                # Its gradient is summed once, where all that read it have given theirs.
                sums = not own
                x = x.to_local(grad_placements=[Partial()] if own else None)
            else:
                cuts = sum(_of(placement, x) == Shard(dim) for placement in x.placements)
                size = x.shape[dim] if cuts == 1 and num_rows is None else None
                x = x.to_local()
        # Blocks of DTensor's that are filled up to the longest are those of the ops; what was added comes last.
        uneven = size is not None and size % self.world_size != 0
        if uneven:
            x = _filled(x, dim, -(-size // self.world_size))
        y = self.product(x, local(self.weight), local(self.bias), num_rows, dim, sums)
        if uneven:
            y = y.narrow(dim, 0, size)
        return self._result(y, Shard(y.ndim - 1), torch.Size((*y.shape[:-1], self.out_features)))


class RowwiseLinear(_Styled, RowParallelLinear):
    """What `RowwiseParallel` makes of an `nn.Linear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """[.., in] -> [.., out], in the layouts of the style."""
        dim = _token_dim(self.output_layouts, x)
        x = local(self._given(x, Shard(x.ndim - 1)))
        shape = torch.Size((*x.shape[:-1], self.out_features))
        if dim is None:
            return self._result(self.product(x, None), Replicate(), shape)
        size = shape[dim]
        uneven = size % self.world_size != 0
        if uneven:
            x = _filled(x, dim, -(-size // self.world_size) * self.world_size)
        y = self.product(x, dim)
        if uneven:
            first, last = chunk_range(size, self.rank, self.world_size)
            y = y.narrow(dim, 0, last - first)
        return self._result(y, Shard(dim), shape)


class _FusedStyle(ParallelStyle):
    """What both styles share."""

    layer: type[ColwiseLinear] | type[RowwiseLinear]
    torch_style: type[ParallelStyle]

    def __init__(
        self, given: dict[str, Placement | None], use_local_output: bool, **layouts: Placement
    ) -> None:
        """given: the layouts as the caller gave them; layouts: the same, with those that stand for None."""
        super().__init__()
        for name, layout in layouts.items():
            partial = isinstance(layout, Partial) and name == "input_layouts"
            if not (isinstance(layout, Replicate | Shard) or partial):
                more = ", Partial()" if name == "input_layouts" else ""
                raise ValueError(f"{name} is {layout}, allowed are Replicate(), Shard(dimension){more}")
        self.given, self.layouts, self.use_local_output = given, layouts, use_local_output

    def __repr__(self) -> str:
        texts = [f"{name}={layout}" for name, layout in self.layouts.items()]
        return f"{type(self).__name__}({', '.join(texts)}, use_local_output={self.use_local_output})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = type(self).__name__
        if isinstance(module, nn.Embedding):
            style: Any = self.torch_style(**self.given, use_local_output=self.use_local_output)
            style.src_data_rank = self.src_data_rank
            return style._apply(module, device_mesh)
        if not isinstance(module, nn.Linear):
            raise TypeError(f"{name} is for nn.Linear and nn.Embedding, got {type(module).__name__}")
        check_ordinary(name, module)
        check_styled(name, module, device_mesh)
        outer = self.layouts["input_layouts" if self.layer is ColwiseLinear else "output_layouts"]
        sharded = self.layer(
            module.in_features,
            module.out_features,
            module.bias is not None,
            group=device_mesh,
            sequence_parallel=isinstance(outer, Shard) and outer.dim != -1,
            device="meta",
            dtype=module.weight.dtype,
        )
        for kind, parameter in module.named_parameters(recurse=False):
            dim = sharded.DIVIDED[kind]
            placement = Replicate() if dim is None else Shard(dim)
            made = distribute_tensor(
                parameter.detach(), device_mesh, [placement], src_data_rank=self.src_data_rank
            )
            # Not a part of the whole one's memory.
            made = distributed(made.to_local().clone(), device_mesh, dim, tuple(parameter.shape))
            sharded.register_parameter(kind, nn.Parameter(made, parameter.requires_grad))
        sharded.__dict__.update(self.layouts, use_local_output=self.use_local_output)
        # The module itself, which others hold, becomes the parallel one; its hooks stay, and whether it is trained.
        kept = {key: value for key, value in vars(module).items() if "hook" in key or key == "training"}
        vars(module).update(vars(sharded) | kept)
        module.__class__ = type(sharded)
        return module


def _of(layout: Placement, x: torch.Tensor) -> Placement:
    """`layout` with dimensions counted from the front of `x`. ValueError for one that `x` doesn't have."""
    if not isinstance(layout, Shard):
        return layout
    if not -x.ndim <= layout.dim < x.ndim:
        raise ValueError(
            f"the layout is {layout}, of a tensor of shape {tuple(x.shape)}: allowed are dimensions {-x.ndim} to "
            f"{x.ndim - 1}"
        )
    return Shard(layout.dim % x.ndim)


def _token_dim(layout: Placement, x: torch.Tensor) -> int | None:
    """The dimension of tokens that `layout` divides; None: it divides features, or nothing."""
    layout = _of(layout, x)
    return layout.dim if isinstance(layout, Shard) and layout.dim < x.ndim - 1 else None


def _filled(x: torch.Tensor, dim: Any, size: int) -> torch.Tensor:
    """`x` with zeros behind it, up to `size` of dimension `dim`."""
    return nn.functional.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, size - x.shape[dim]])


class ColwiseParallel(_FusedStyle):
    """Divides a Linear's output features.

    input_layouts: Replicate(), the default; or Shard(d): the tokens' dimension d is divided, and gathered while it is
    multiplied; any other is redistributed first. Tokens that the ranks don't divide come as a `DTensor`, which knows
    how many there are. output_layouts: Shard(-1), the default; any other is made of that. use_local_output: False:
    outputs are `DTensor`s.

    Raises ValueError for a partial output; where it is applied, ValueError for weights of another dtype than the ops',
    and a mesh of another device than theirs, TypeError for modules but `nn.Linear` and `nn.Embedding`.
    """

    layer = ColwiseLinear
    torch_style = torch_styles.ColwiseParallel

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        given = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        super().__init__(
            given,
            use_local_output,
            input_layouts=input_layouts or Replicate(),
            output_layouts=output_layouts or Shard(-1),
        )


class RowwiseParallel(_FusedStyle):
    """Divides a Linear's input features; the sum over ranks is part of the product.

    input_layouts: Shard(-1), the default; any other is redistributed first. output_layouts: Replicate(), the default;
    or Shard(d): each rank gets a block of the tokens' dimension d. use_local_output: False: outputs are `DTensor`s.
    Raises as `ColwiseParallel`.
    """

    layer = RowwiseLinear
    torch_style = torch_styles.RowwiseParallel

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        given = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        super().__init__(
            given,
            use_local_output,
            input_layouts=input_layouts or Shard(-1),
            output_layouts=output_layouts or Replicate(),
        )
