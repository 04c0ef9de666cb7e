"""What the parallel linear layers share: a rank's part of the unsharded model's parameters, and checks of inputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from pyrocshmem import target
from pyrocshmem.checks import as_integer
from pyrocshmem.errors import CallMismatch
from pyrocshmem.groups import as_group
from pyrocshmem.heap import Heap

# A copy to there does nothing, without a word.
NO_MEMORY = 'on "meta", which has no memory to load into; call to_empty(device=..) first'


class Shard(NamedTuple):
    """A parameter, or a part of one, as the unsharded model knows it.

    key: its name there, below the layer's. local: this rank's share, a view of the parameter. dim: the divided
    dimension, None where every rank holds all of it.
    """

    key: str
    local: torch.Tensor
    dim: int | None

    def full_shape(self, world_size: int) -> tuple[int, ...]:
        """Shape in the unsharded model."""
        return tuple(
            size * world_size if dim == self.dim else size for dim, size in enumerate(self.local.shape)
        )


class OnGroup:
    """What modules of a group have: `copy.deepcopy`, say for an average of the weights. A copy has parameters of its
    own, and the group, which can't be copied, in common."""

    group: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.group)] = self.group
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made


class ParallelLinear(OnGroup, nn.Module):
    """What both kinds of layer share. weight: Parameter; bias: Parameter or None; this rank's shares.

    in_features, out_features: of the unsharded layer. group: a ProcessGroup, a 1-D DeviceMesh, a Heap; None: the
    default process group. sequence_parallel: activations outside are divided along sequence_dim (a dimension of the
    tokens) over the ranks; otherwise whole on each. partial_dtype: what partial sums travel in, forward and backward;
    None: fp32; a 16-bit type halves the traffic, for one rounding a rank. device, dtype: of the parameters, as of
    `nn.Linear`. name: for error messages; None: the class's.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Any,
        sequence_parallel: bool,
        sequence_dim: int,
        partial_dtype: torch.dtype | None,
        name: str | None,
    ) -> None:
        super().__init__()
        self.name = name or type(self).__name__
        self.in_features = as_integer(f"{self.name}: in_features", in_features)
        self.out_features = as_integer(f"{self.name}: out_features", out_features)
        self.sequence_dim = as_integer(f"{self.name}: sequence_dim", sequence_dim)
        self.group, self.sequence_parallel = group, sequence_parallel
        self.partial_dtype = partial_dtype
        ranks = ranks_of(group)
        self.rank, self.world_size = ranks.rank, ranks.world_size

    def shards(self) -> Iterator[Shard]:
        """The layer's parameters as the unsharded model knows them."""
        raise NotImplementedError

    def share_of(self, what: str, size: int) -> int:
        """A rank's share of `size` features. ValueError where they can't be divided."""
        if size < self.world_size or size % self.world_size:
            raise ValueError(
                f"{self.name}: {what} is {size}, which the {self.world_size} ranks can't divide; allowed are multiples"
            )
        return size // self.world_size

    def load_shards(self, full: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's share of the unsharded parameters `full`, by the keys of `shards`; from any device.
        ValueError, naming the layer, before anything is changed, where one is missing or has no memory here."""
        self._require([shard.key for shard in self.shards()], full)
        if self.weight.is_meta:
            raise ValueError(f"{self.name}: its parameters are {NO_MEMORY}")
        for shard in self.shards():
            _copy_share(shard, full[shard.key], self.rank, self.world_size)

    def adopt(self, linears: Mapping[str, nn.Linear]) -> Self:
        """Take the shares, dtype and device of ordinary layers, by the names of its parts; returns this layer.

        Raises ValueError, naming the layer, for linears of other sizes, without a weight, or that differ among
        themselves; TypeError for what computes otherwise than `nn.Linear`.
        """
        for linear in linears.values():
            check_ordinary(self.name, linear)
        full = {
            f"{part}.{kind}" if part else kind: parameter.detach()
            for part, linear in linears.items()
            for kind, parameter in linear.named_parameters()
        }
        self._require([f"{part}.weight" if part else "weight" for part in linears], full)
        facts = set()
        for linear in linears.values():
            devices = sorted({str(parameter.device) for parameter in linear.parameters()})
            trained = [parameter.requires_grad for parameter in linear.parameters()]
            facts.add(
                (linear.in_features, linear.bias is not None, linear.weight.dtype, str(trained), *devices)
            )
        if len(facts) > 1 or len(next(iter(facts))) > 5:
            texts = "; ".join(", ".join(map(str, fact)) for fact in sorted(facts, key=str))
            raise ValueError(
                f"{self.name}: input features, bias, dtype, requires_grad and device must be the same, they are: "
                f"{texts}"
            )
        first = next(iter(linears.values()))
        bias = None if first.bias is None else self.local_bias
        self._make_parameters(tuple(self.weight.shape), bias, "meta", first.weight.dtype)
        wrong = [
            f"{shard.key} is {tuple(full[shard.key].shape)}, not {wanted}"
            for shard in self.shards()
            if tuple(full[shard.key].shape) != (wanted := shard.full_shape(self.world_size))
        ]
        if wrong:
            raise ValueError(f"{self.name}: {'; '.join(wrong)}")
        if not first.weight.is_meta:
            self.to_empty(device=first.weight.device)
            self.load_shards(full)
        for kind, parameter in self.named_parameters():
            parameter.requires_grad_(getattr(first, kind).requires_grad)
        return self

    def reset_parameters(self) -> None:
        """Draw all parameters as `nn.Linear` does, whole, and keep this rank's share: from equal seeds a model starts
        the same with any number of ranks."""
        limit = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for shard in self.shards():
            full = shard.local.new_empty(shard.full_shape(self.world_size)).uniform_(-limit, limit)
            _copy_share(shard, full, self.rank, self.world_size)

    def _make_parameters(self, shape: tuple[int, int], bias: int | None, device: Any, dtype: Any) -> None:
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        made = None if bias is None else nn.Parameter(torch.empty(bias, device=device, dtype=dtype))
        self.register_parameter("bias", made)
        if not self.weight.is_meta:
            self.reset_parameters()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any, **options: Any
    ) -> None:
        for key, mine in self.named_parameters(recurse=False):
            found = state_dict.get(prefix + key)
            if isinstance(found, torch.Tensor) and found.shape != mine.shape:
                raise ValueError(
                    f"{prefix}{key} has shape {tuple(found.shape)}, this rank's share of {self.world_size} is "
                    f"{tuple(mine.shape)}: load what stream_k.nn.full_state_dict gave on the ranks that saved it, with "
                    "stream_k.nn.load_full_state_dict"
                )
        super()._load_from_state_dict(state_dict, prefix, *others, **options)

    def _require(self, keys: list[str], full: Mapping[str, torch.Tensor]) -> None:
        missing = [key for key in keys if key not in full]
        if missing:
            raise ValueError(f"{self.name}: {', '.join(missing)} is missing")

    def _check_input(self, x: torch.Tensor, features: int) -> None:
        if x.ndim < 2 or x.shape[-1] != features:
            raise ValueError(f"{self.name}: the input has shape {tuple(x.shape)}, (.., {features}) is needed")
        tokens = x.ndim - 1
        if self.sequence_parallel and not (-x.ndim <= self.sequence_dim < tokens and self.sequence_dim != -1):
            raise ValueError(
                f"{self.name}: sequence_dim is {self.sequence_dim}, which is no dimension of tokens of an input of "
                f"shape {tuple(x.shape)}: allowed are 0 to {tokens - 1}, and {-x.ndim} to -2"
            )
        self._check_device("the input", x.device)
        if self.bias is not None:
            self._check_device("its bias", self.bias.device)
        if isinstance(self.group, Heap):
            self._check_device("its group's heap", self.group.device)
        elif not torch.compiler.is_compiling() and self.weight.device.type != target.device().type:
            raise ValueError(
                f"{self.name}: its weight is on {self.weight.device}, but kernels run elsewhere: {target.describe()}"
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

    def _check_blocks(self, num_rows: int, sizes: torch.Size) -> None:
        """Blocks of rows must be blocks of the divided dimension."""
        others = math.prod(sizes[1:])
        if others > 1 and num_rows // others % self.world_size:
            raise ValueError(
                f"{self.name}: dimension {self.sequence_dim} is {num_rows // others} in all, which the "
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


def ranks_of(group: Any) -> Any:
    """What has the rank and the number of ranks of `group`, which may be a heap."""
    return group if isinstance(group, Heap) else as_group(group)


def _copy_share(shard: Shard, full: torch.Tensor, rank: int, world_size: int) -> None:
    share = full if shard.dim is None else full.chunk(world_size, shard.dim)[rank]
    shard.local.copy_(share)
