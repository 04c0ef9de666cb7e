"""What the layers share: a rank's part of the unsharded model's parameters, and checks of inputs.

Where the group is a `DeviceMesh`, parameters are `DTensor`s of the unsharded model's shapes, as those of PyTorch's own
styles are; otherwise they are this rank's shares, as ordinary tensors. Features are cut as `torch.chunk` cuts, which is
DTensor's way: 10 over 4 ranks are 3 3 3 1.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pyrocshmem import target
from pyrocshmem.checks import as_integer
from pyrocshmem.elements import DTYPES, names
from pyrocshmem.errors import CallMismatch
from pyrocshmem.groups import as_group
from pyrocshmem.heap import Heap
from pyrocshmem.stream_k.nn.float8 import Float8, Weight, check_recipe, quantized

# A copy to there does nothing, without a word.
NO_MEMORY = 'on "meta", which has no memory to load into; call to_empty(device=..) first'


def is_dtensor(x: Any) -> bool:
    """Whether `x` is a DTensor. Its import takes longer than all else here: where nobody has done it, there is none."""
    return isinstance(x, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def local(x: Any) -> Any:
    """This rank's part of a DTensor, with its gradient; anything else itself."""
    return x.to_local() if is_dtensor(x) else x


def chunk_range(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """[begin, end) of `size` items that `rank` holds, as `torch.chunk` and DTensor cut them; the last may have none."""
    step = -(-size // world_size)
    return min(rank * step, size), min((rank + 1) * step, size)


def distributed(part: torch.Tensor, mesh: DeviceMesh, dim: int | None, shape: tuple[int, ...]) -> Any:
    """The DTensor of `shape` whose part of this rank is `part`. dim: the divided dimension; None: all ranks have it."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    strides = torch.empty(shape, device="meta").stride()
    placement = Replicate() if dim is None else Shard(dim)
    return DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=strides
    )


def like(whole: torch.Tensor, mine: Any) -> Any:
    """`whole`, which every rank has, on the mesh of the DTensor `mine`, cut as that is; from any device."""
    from torch.distributed.tensor import distribute_tensor

    whole = whole.detach().to(mine.device)
    return distribute_tensor(whole, mine.device_mesh, mine.placements, src_data_rank=None)


class OnGroup:
    """What modules of a group have: `copy.deepcopy`, say for an average of the weights. A copy has parameters of its
    own, and the group, which can't be copied, in common. What `load_state_dict` finds whole, every rank takes its part
    of, where the parameter is a DTensor."""

    group: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.group)] = self.group
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *others: Any, **options: Any
    ) -> None:
        for name, mine in self.named_parameters(recurse=False):  # type: ignore[attr-defined]
            found = state_dict.get(prefix + name)
            if isinstance(found, torch.Tensor) and is_dtensor(mine) and not is_dtensor(found):
                state_dict[prefix + name] = like(found, mine) if found.shape == mine.shape else found
        super()._load_from_state_dict(state_dict, prefix, *others, **options)  # type: ignore[misc]


class ParallelLinear(OnGroup, nn.Module):
    """What both kinds of layer share. weight: Parameter; bias: Parameter or None.

    in_features, out_features: of the unsharded layer. group: a 1-D DeviceMesh: parameters are DTensors; a ProcessGroup
    or a Heap: they are this rank's shares; None: the default process group. sequence_parallel: activations outside are
    divided along sequence_dim (a dimension of the tokens) over the ranks; otherwise whole on each. partial_dtype: what
    partial sums travel in, forward and backward, as in `stream_k.Config`. float8: "rowwise" or "blockwise": the product
    is of 8-bit operands, see `stream_k.nn.float8`; gradients are not.
    device, dtype: of the parameters, as of `nn.Linear`. name: for error messages; None: the class's.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    # Of a weight in 8 bits.
    weight_scale: torch.Tensor | None

    # By parameter, the dimension that is divided; None: every rank has all of it.
    DIVIDED: ClassVar[dict[str, int | None]]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        group: Any,
        sequence_parallel: bool,
        sequence_dim: int,
        partial_dtype: torch.dtype | None,
        float8: Float8 | None,
        device: Any,
        dtype: torch.dtype | None,
        name: str | None,
    ) -> None:
        super().__init__()
        self.name = name or type(self).__name__
        check_recipe(self.name, float8)
        self.float8 = float8
        self.register_buffer("weight_scale", None)
        self.in_features = as_integer(f"{self.name}: in_features", in_features)
        self.out_features = as_integer(f"{self.name}: out_features", out_features)
        self.sequence_dim = as_integer(f"{self.name}: sequence_dim", sequence_dim)
        self.group, self.sequence_parallel = group, sequence_parallel
        self.partial_dtype = partial_dtype
        ranks = ranks_of(group)
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._make_parameters(bias, device, dtype)
        if not self.weight.is_meta:
            self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> Self:
        """The layer that computes what `linear` does, which all ranks hold alike.

        dtype, device, bias and requires_grad are taken from it; options: the class's other arguments. TypeError for
        what computes otherwise than `nn.Linear`; ValueError, naming the layer, for one without a weight, or on several
        devices.
        """
        made = cls(linear.in_features, linear.out_features, device="meta", **options)
        return made.adopt(linear)

    def quantize_weight(self) -> Self:
        """Hold the weight in 8 bits alone, by the layer's recipe, for inference; returns this layer. A buffer
        `weight_scale` has the scales of this rank's share. ValueError for a layer without float8, and for one that has
        no memory."""
        if self.float8 is None:
            raise ValueError(f"{self.name}: float8 is None, so nothing says how its weight is quantized")
        if self.weight.is_meta:
            raise ValueError(f"{self.name} is {NO_MEMORY}")
        if self.weight_scale is None:
            share, self.weight_scale = quantized(local(self.weight), self.float8)
            if isinstance(self.group, DeviceMesh):
                share = distributed(share, self.group, self.DIVIDED["weight"], self.full_shape("weight"))
            self.weight = nn.Parameter(share, requires_grad=False)
        return self

    def full_shape(self, kind: str) -> tuple[int, ...]:
        """Of a parameter, in the unsharded model."""
        return (self.out_features, self.in_features) if kind == "weight" else (self.out_features,)

    def load_share(self, kind: str, full: torch.Tensor) -> None:
        """Take this rank's share of the unsharded parameter `full`; from any device."""
        mine, dim = getattr(self, kind), self.DIVIDED[kind]
        with torch.no_grad():
            if is_dtensor(mine):
                mine.copy_(like(full, mine))
                return
            if dim is not None:
                first, last = chunk_range(full.shape[dim], self.rank, self.world_size)
                full = full.narrow(dim, first, last - first)
            mine.copy_(full)

    def adopt(self, linear: nn.Linear) -> Self:
        """Take the share, dtype and device of an ordinary layer; returns this layer. Raises as `from_linear`."""
        check_ordinary(self.name, linear)
        full = {kind: parameter.detach() for kind, parameter in linear.named_parameters()}
        if "weight" not in full:
            raise ValueError(f"{self.name}: weight is missing")
        devices = sorted({str(parameter.device) for parameter in full.values()})
        if len(devices) > 1:
            raise ValueError(f"{self.name}: the device must be one, they are {', '.join(devices)}")
        for kind, parameter in full.items():
            if tuple(parameter.shape) != self.full_shape(kind):
                raise ValueError(
                    f"{self.name}: {kind} is {tuple(parameter.shape)}, not {self.full_shape(kind)}"
                )
        self._make_parameters("bias" in full, full["weight"].device, full["weight"].dtype)
        for kind, parameter in full.items():
            if not parameter.is_meta:
                self.load_share(kind, parameter)
            getattr(self, kind).requires_grad_(getattr(linear, kind).requires_grad)
        return self

    def reset_parameters(self) -> None:
        """Draw all parameters as `nn.Linear` does, whole, and keep this rank's share: from equal seeds a model starts
        the same with any number of ranks."""
        limit = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for kind, mine in self.named_parameters(recurse=False):
            full = torch.empty(self.full_shape(kind), device=mine.device, dtype=mine.dtype)
            self.load_share(kind, full.uniform_(-limit, limit))

    def _make_parameters(self, bias: bool, device: Any, dtype: Any) -> None:
        for kind, dim in self.DIVIDED.items():
            shape = list(full := self.full_shape(kind))
            if dim is not None:
                first, last = chunk_range(shape[dim], self.rank, self.world_size)
                shape[dim] = last - first
            made: Any = None
            if kind == "weight" or bias:
                made = torch.empty(shape, device=device, dtype=dtype)
                if isinstance(self.group, DeviceMesh):
                    made = distributed(made, self.group, dim, full)
                made = nn.Parameter(made)
            self.register_parameter(kind, made)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *others: Any, **options: Any
    ) -> None:
        for key, mine in self.named_parameters(recurse=False):
            found = state_dict.get(prefix + key)
            if isinstance(found, torch.Tensor) and found.shape != mine.shape:
                share = "" if is_dtensor(mine) else f", this rank's share of {self.world_size}"
                raise ValueError(
                    f"{prefix}{key} has shape {tuple(found.shape)}, {tuple(mine.shape)} is needed{share}; load what "
                    "stream_k.nn.full_state_dict gave on the ranks that saved it, with "
                    "stream_k.nn.load_full_state_dict"
                )
        super()._load_from_state_dict(state_dict, prefix, *others, **options)

    def _in_eight_bits(self, weight: torch.Tensor, scale: torch.Tensor | None = None) -> Weight | None:
        """This rank's share of the weight for a product in 8 bits; None: the layer's is none. scale: its own where it
        is no share of this layer's alone."""
        scale = self.weight_scale if scale is None else scale
        return None if self.float8 is None else Weight(weight, self.float8, scale)

    def _check_input(self, x: torch.Tensor, weight: torch.Tensor, features: int, dim: int | None) -> None:
        """x: the input; weight: this rank's; dim: of the tokens that the ranks divide, if they do."""
        if x.ndim < 2 or x.shape[-1] != features:
            raise ValueError(f"{self.name}: the input has shape {tuple(x.shape)}, (.., {features}) is needed")
        tokens = x.ndim - 1
        if dim is not None and not (-x.ndim <= dim < tokens and dim != -1):
            raise ValueError(
                f"{self.name}: sequence_dim is {dim}, which is no dimension of tokens of an input of "
                f"shape {tuple(x.shape)}: allowed are 0 to {tokens - 1}, and {-x.ndim} to -2"
            )
        self._check_device("the input", x.device)
        if self.bias is not None:
            self._check_device("its bias", self.bias.device)
        if isinstance(self.group, Heap):
            self._check_device("its group's heap", self.group.device)
        elif not torch.compiler.is_compiling() and weight.device.type != target.device_type():
            raise ValueError(
                f"{self.name}: its weight is on {weight.device}, but kernels run elsewhere: {target.describe()}"
            )

    def _check_device(self, what: str, device: torch.device) -> None:
        if device != self.weight.device:
            raise ValueError(
                f"{self.name}: {what} is on {device}, its weight on {self.weight.device}; all must be on one device"
            )

    def _named(self, op: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What `op` returns; what the caller got wrong names the layer."""
        if torch.compiler.is_compiling():
            return op(*args, **options)
        try:
            return op(*args, **options)
        except (TypeError, ValueError, CallMismatch) as error:
            error.args = (f"{self.name}: {error}",)
            raise

    def _check_blocks(self, num_rows: int, sizes: torch.Size, dim: int) -> None:
        """Blocks of rows must be blocks of the divided dimension `dim`."""
        others = math.prod(sizes[1:])
        if others > 1 and num_rows // others % self.world_size:
            raise ValueError(
                f"{self.name}: dimension {dim} is {num_rows // others} in all, which the "
                f"{self.world_size} ranks divide unevenly: then the others before the features must be 1, they are "
                f"{tuple(sizes[1:])}; give a matrix of tokens"
            )

    def extra_repr(self) -> str:
        """The whole layer's sizes, and this rank's place."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank={self.rank}/{self.world_size}, sequence_parallel={self.sequence_parallel}"
        )


def check_ordinary(name: str, linear: nn.Module) -> None:
    """TypeError for what is no `nn.Linear`, or computes otherwise: a parallel layer would not."""
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"{name} is for nn.Linear, got {type(linear).__name__}")
    if type(linear).forward is not nn.Linear.forward or "forward" in vars(linear):
        raise TypeError(f"{name} is for nn.Linear, got {type(linear).__name__} with a forward of its own")


def check_styled(name: str, linear: nn.Linear, mesh: DeviceMesh) -> None:
    """ValueError for a layer, or a mesh, that no parallel style on the ops can take."""
    if linear.weight.dtype not in DTYPES:
        raise ValueError(f"{name}: the weight is of {linear.weight.dtype}, allowed are {names()}")
    if mesh.device_type != target.device_type():
        raise ValueError(
            f"{name}: the mesh is of {mesh.device_type}, but kernels run elsewhere: {target.describe()}"
        )


def ranks_of(group: Any) -> Any:
    """What has the rank and the number of ranks of `group`, which may be a heap."""
    return group if isinstance(group, Heap) else as_group(group)
