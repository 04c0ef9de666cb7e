"""Layers with the same input as one product: their weights lie one behind the other in one block of memory, the pack.

Each weight is a parameter of its own layer, under its own name: nothing but the product knows the pack. Whoever gives
parameters other memory takes them out of it (FSDP2, which gathers each for itself), and each product then begins with a
copy of these weights, as it does where a compiler traces it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn

from pyrocshmem.calls.operators import is_watched, needs_gradient
from pyrocshmem.stream_k.nn.parameters import ParallelLinear, is_dtensor, local


class WithPack(nn.Module):
    """A module whose layers `PACKED` have their weights in one pack: from the start, and again where PyTorch has given
    each memory of its own (`.to`, `to_empty`, `load_state_dict(assign=True)`, a copy)."""

    PACKED: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_pack_again)

    def pack(self) -> None:
        """Put the parameters together, where they are not; the parameters themselves stay the same objects."""
        layers = [getattr(self, name) for name in self.PACKED]
        if all(isinstance(layer, ParallelLinear) for layer in layers):
            for kind in ("weight", "bias"):
                _pack([getattr(layer, kind, None) for layer in layers])

    def quantize_weights(self) -> Self:
        """Hold the weights of all parallel layers in 8 bits alone: `ParallelLinear.quantize_weight` of each."""
        for layer in self.children():
            if isinstance(layer, ParallelLinear):
                layer.quantize_weight()
        self.pack()
        return self

    def adopt_all(self, **linears: nn.Linear) -> None:
        """Take the shares of ordinary layers, by the names of this module's. Raises as `from_linear`."""
        for name, linear in linears.items():
            getattr(self, name).adopt(linear)
        self.pack()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.pack()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        made.pack()
        return made


def _pack_again(module: WithPack, _: Any) -> None:
    module.pack()


def _pack(parameters: Sequence[Any]) -> None:
    # Those that FSDP2 has cut once more, it gives memory itself.
    if any(p is None or (is_dtensor(p) and len(p.placements) > 1) for p in parameters):
        return
    parts = [_holder(p).detach() for p in parameters]
    facts = {(part.dtype, part.device, part.shape[1:]) for part in parts}
    if _pack_of(parameters, parts) is not None:
        return
    vars(_holder(parameters[0])).pop("pack", None)
    shared = any(part.device.type == "cpu" and part.is_shared() for part in parts)
    if len(facts) > 1 or parts[0].is_meta or shared:
        return
    pack = torch.cat(parts)
    place = 0
    for parameter, part in zip(parameters, parts, strict=True):
        # Storages of their own: DTensors whose parts begin inside of one can't be pickled, and ordinary tensors are
        # saved with all of theirs.
        storage = pack.untyped_storage()[place : place + part.nbytes]
        view = torch.empty(0, dtype=part.dtype, device=part.device).set_(storage, 0, part.shape)
        place += part.nbytes
        if is_dtensor(parameter):
            parameter._local_tensor = view
        else:
            parameter.data = view
    # Here it lives as long as the memory of the first: whoever replaces that lets go of it, too.
    _holder(parameters[0]).pack = pack


def _holder(parameter: Any) -> Any:
    """The tensor that has the memory."""
    return parameter._local_tensor if is_dtensor(parameter) else parameter


def _pack_of(parameters: Sequence[Any], parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The pack that `parts`, the memory of `parameters`, are in; None where they are not. While it lives, nothing else
    has an address in it."""
    pack: torch.Tensor | None = getattr(_holder(parameters[0]), "pack", None)
    if pack is None or pack.dtype != parts[0].dtype or not all(part.is_contiguous() for part in parts):
        return None
    place = pack.data_ptr()
    for part in parts:
        if part.numel() and part.data_ptr() != place:
            return None
        place += part.nbytes
    return pack if place == pack.data_ptr() + pack.nbytes else None


def joined(parameters: Sequence[Any]) -> torch.Tensor:
    """This rank's shares of `parameters`, one below the other, with their gradients: without a copy where they are in
    one pack."""
    parts = [local(parameter) for parameter in parameters]
    pack = None if is_watched(tuple(parts), whole=False) else _pack_of(parameters, parts)
    if pack is None:
        return torch.cat(parts)
    return _Joined.apply(pack, parameters, *parts) if needs_gradient(tuple(parts)) else pack


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pack: torch.Tensor, parameters: Sequence[Any], *parts: torch.Tensor
    ) -> torch.Tensor:
        # The pack, which products keep, doesn't count what is written into its parts; nor do parts of DTensors.
        ctx.parameters, ctx.versions = parameters, [parameter._version for parameter in parameters]
        ctx.sizes = [part.shape[0] for part in parts]
        return pack.view_as(pack)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if [parameter._version for parameter in ctx.parameters] != ctx.versions:
            raise RuntimeError(
                "a weight that is needed for gradients was modified by an inplace operation after the forward pass"
            )
        return None, None, *grads[0].split(ctx.sizes)
