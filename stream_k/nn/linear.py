"""`ColumnParallelLinear` and `RowParallelLinear`: linear layers whose features are divided over the ranks.

    up = ColumnParallelLinear(4096, 14336, bias=False, group=mesh, sequence_parallel=True)
    down = RowParallelLinear(14336, 4096, bias=False, group=mesh, sequence_parallel=True)
    y = down(silu(up(x)))            # x, y: [M/R, 4096], a block of rows on each rank

R ranks. sequence_parallel: activations outside the pair are divided by rows; otherwise every rank holds all of them.
Weights are shares of `nn.Linear`'s, in its layout: the ops read them transposed, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn

from pyrocshmem import stream_k
from pyrocshmem.checks import as_integer
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.nn.functional import (
    autocast,
    column_product,
    from_rows,
    row_product,
    sum_gradient,
    to_rows,
)
from pyrocshmem.stream_k.nn.parameters import OnGroup, ParallelLinear, Shard


class ColumnParallelLinear(ParallelLinear):
    """y = x @ W.T + b, the output's features divided over the ranks.

    out_features: a number; or, for several layers with the same input, their numbers by their names in the unsharded
    model ({"gate_proj": 14336, "up_proj": 14336}): one product then computes them all, and each is divided over the
    ranks. weight: [out/R, in]; bias: [out/R]. save_gathered: where sequence_parallel, keep all ranks' rows of the input
    for the weight's gradient; False: gather them once more. Other arguments: `ParallelLinear`.

    Raises ValueError, naming the layer, for features that the ranks can't divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        bias: bool = True,
        *,
        group: Any = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        partial_dtype: torch.dtype | None = None,
        save_gathered: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        layer = name or type(self).__name__
        given = out_features if isinstance(out_features, Mapping) else {"": out_features}
        parts = {p: as_integer(f"{layer}: {f'{p} out_features'.lstrip()}", n) for p, n in given.items()}
        super().__init__(
            in_features,
            sum(parts.values()),
            group=group,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            partial_dtype=partial_dtype,
            name=name,
        )
        self.save_gathered = save_gathered
        self.parts = {part: self.share_of(f"{part} out_features".strip(), n) for part, n in parts.items()}
        local = sum(self.parts.values())
        self.local_bias = local
        self._make_parameters((local, in_features), local if bias else None, device, dtype)

    @classmethod
    def from_linear(cls, linear: nn.Linear | Mapping[str, nn.Linear], **options: Any) -> Self:
        """The layer that computes what `linear` does, or several by their names, which all ranks hold alike.

        dtype, device, bias and requires_grad are taken from them; options: the class's other arguments. Raises
        ValueError for layers that differ in these or in their input.
        """
        parts = {"": linear} if isinstance(linear, nn.Linear) else dict(linear)
        sizes: Any = {part: each.out_features for part, each in parts.items()}
        first = next(iter(parts.values()))
        return cls(first.in_features, sizes.get("", sizes), device="meta", **options).adopt(parts)

    def shards(self) -> Iterator[Shard]:
        """See the base class."""
        sizes = list(self.parts.values())
        for kind, parameter in self.named_parameters(recurse=False):
            for part, local in zip(self.parts, parameter.detach().split(sizes), strict=True):
                yield Shard(f"{part}.{kind}" if part else kind, local, 0)

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """This rank's output of each of the layers that were joined: views."""
        return y.split(list(self.parts.values()), -1)

    def forward(self, x: torch.Tensor, num_rows: int | None = None) -> torch.Tensor:
        """[.., in] -> [.., out/R].

        x: where sequence_parallel this rank's block of `sequence_dim`, otherwise the same on all ranks. num_rows: rows
        of all ranks together, needed where R doesn't divide them: blocks are then those of `torch.tensor_split`.
        """
        self._check_input(x, self.in_features)
        if not self.sequence_parallel:
            rows, sizes = to_rows(x, 0)
            product = (rows, self.weight, self.bias, self.group, self.partial_dtype)
            return from_rows(self._named(column_product, *product), sizes, 0, sizes[0])
        rows, sizes = to_rows(x, self.sequence_dim)
        if num_rows is not None:
            self._check_blocks(num_rows, sizes)
        rows, weight, bias = autocast(rows, self.weight, self.bias)
        y = self._named(
            stream_k.all_gather_gemm,
            rows,
            weight.t(),
            num_rows=num_rows,
            group=self.group,
            bias=bias,
            partial_dtype=self.partial_dtype,
            save_gathered=self.save_gathered,
        )
        # No number of rows says how long an empty input is.
        total = num_rows // math.prod(sizes[1:]) if num_rows else sizes[0] * self.world_size
        return from_rows(y, sizes, self.sequence_dim, total)


class RowParallelLinear(ParallelLinear):
    """y = x @ W.T + b, the input's features divided over the ranks; the sum over ranks is part of the product.

    weight: [out, in/R]; bias: [out], the same on all ranks, added once. Other arguments: `ParallelLinear`. Raises
    ValueError, naming the layer, for features that the ranks can't divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Any = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        partial_dtype: torch.dtype | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            group=group,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            partial_dtype=partial_dtype,
            name=name,
        )
        local = self.share_of("in_features", in_features)
        self.local_bias = out_features
        self._make_parameters((out_features, local), out_features if bias else None, device, dtype)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> Self:
        """The layer that computes what `linear`, which all ranks hold alike, does. See `ColumnParallelLinear`."""
        sizes = linear.in_features, linear.out_features
        return cls(*sizes, device="meta", **options).adopt({"": linear})

    def shards(self) -> Iterator[Shard]:
        """See the base class."""
        yield Shard("weight", self.weight.detach(), 1)
        if self.bias is not None:
            yield Shard("bias", self.bias.detach(), None)

    def forward(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        norm: nn.Module | None = None,
    ) -> Any:
        """[.., in/R] -> [.., out], + residual; with a norm, (norm(y), y).

        Where sequence_parallel, x holds all of `sequence_dim`, and the result this rank's block of it
        (`torch.tensor_split`). residual: of the result's shape. norm: a module, applied to the result's features.
        ValueError, naming the layer, for what doesn't fit or is on another device.
        """
        self._check_input(x, self.weight.shape[1])
        if not torch.compiler.is_compiling():
            self._check_added(x, residual, norm)
        dim = self.sequence_dim if self.sequence_parallel else 0
        rows, sizes = to_rows(x, dim)
        first = sizes[0]
        if self.sequence_parallel:
            self._check_blocks(rows.shape[0], sizes)
            begin, end = shard_range(first, self.rank, self.world_size)
            first = end - begin
        flat = None if residual is None else to_rows(residual, dim)[0]
        options: dict[str, Any] = {"scatter": self.sequence_parallel, "residual": flat, "norm": norm}
        options |= {"group": self.group, "partial_dtype": self.partial_dtype}
        options["plain_norms"] = (nn.RMSNorm, RMSNorm)
        found = self._named(row_product, rows, self.weight, self.bias, **options)
        if norm is None:
            return from_rows(found, sizes, dim, first)
        return tuple(from_rows(each, sizes, dim, first) for each in found)

    def _check_added(self, x: torch.Tensor, residual: torch.Tensor | None, norm: nn.Module | None) -> None:
        """ValueError, before the product, for what couldn't be added to it, or a norm that couldn't be taken."""
        weight = getattr(norm, "weight", None)
        if weight is not None:
            self._check_device("the norm's weight", weight.device)
        if residual is None:
            return
        self._check_device("the residual", residual.device)
        shape = [*x.shape[:-1], self.out_features]
        if self.sequence_parallel:
            first, last = shard_range(shape[self.sequence_dim], self.rank, self.world_size)
            shape[self.sequence_dim] = last - first
        if list(residual.shape) != shape:
            raise ValueError(
                f"{self.name}: the residual has shape {tuple(residual.shape)}, {tuple(shape)} is needed"
            )


class RMSNorm(OnGroup, nn.RMSNorm):
    """`nn.RMSNorm` between parallel layers: where each rank normalises its own rows, the gradient of the weight, which
    all ranks hold, is the sum over ranks. group, sequence_parallel: as of the layers."""

    def __init__(
        self,
        hidden: int,
        eps: float | None = None,
        *,
        group: Any = None,
        sequence_parallel: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden, eps, device=device, dtype=dtype)
        self.group, self.sequence_parallel = group, sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., hidden] -> [.., hidden]."""
        weight = sum_gradient(self.weight, self.group) if self.sequence_parallel else self.weight
        return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)
