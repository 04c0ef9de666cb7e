"""`ColumnParallelLinear` and `RowParallelLinear`: linear layers whose features are divided over the ranks.

    up = ColumnParallelLinear(4096, 14336, bias=False, group=mesh, sequence_parallel=True)
    down = RowParallelLinear(14336, 4096, bias=False, group=mesh, sequence_parallel=True)
    y = down(silu(up(x)))            # x, y: [M/R, 4096], a block of rows on each rank

R ranks. sequence_parallel: activations outside the pair are divided by rows; otherwise every rank holds all of them.
Weights are laid out as `nn.Linear`'s: the ops read a rank's share transposed, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pyrocshmem import stream_k
from pyrocshmem.calls import invariance
from pyrocshmem.calls.operators import dispatched
from pyrocshmem.collectives.row_norm import row_norm
from pyrocshmem.elements import DTYPES
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.nn.float8 import Float8, shares_fit
from pyrocshmem.stream_k.nn.float8_products import column_product as float8_columns
from pyrocshmem.stream_k.nn.float8_products import product as float8_product
from pyrocshmem.stream_k.nn.functional import (
    autocast,
    column_product,
    from_rows,
    is_plain,
    row_product,
    sum_gradient,
    to_rows,
)
from pyrocshmem.stream_k.nn.packed import joined
from pyrocshmem.stream_k.nn.parameters import OnGroup, ParallelLinear, distributed, local


class ColumnParallelLinear(ParallelLinear):
    """y = x @ W.T + b, the output's features divided over the ranks.

    This rank's share of weight: [out/R, in]; of bias: [out/R]. save_gathered: where sequence_parallel, keep all ranks'
    rows of the input for the weight's gradient; False: gather them once more. Other arguments: `ParallelLinear`.
    """

    DIVIDED: ClassVar[dict[str, int | None]] = {"weight": 0, "bias": 0}

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
        save_gathered: bool = True,
        float8: Float8 | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias,
            group=group,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            partial_dtype=partial_dtype,
            float8=float8,
            device=device,
            dtype=dtype,
            name=name,
        )
        self.save_gathered = save_gathered

    def forward(self, x: torch.Tensor, num_rows: int | None = None) -> torch.Tensor:
        """[.., in] -> [.., out/R].

        x: where sequence_parallel this rank's block of `sequence_dim`, otherwise the same on all ranks. num_rows: rows
        of all ranks together, needed where R doesn't divide them: blocks are then those of `torch.tensor_split`.
        """
        dim = self.sequence_dim if self.sequence_parallel else None
        return self.product(x, local(self.weight), local(self.bias), num_rows, dim)

    def product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        num_rows: int | None,
        dim: int | None,
        sums: bool = True,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`forward` with these shares. dim: of the tokens, divided over the ranks. sums: where there is none, whether
        the gradient of `x` is the sum over ranks, or a part of it. scale: of a weight in 8 bits; None: this layer's."""
        self._check_input(x, weight, self.in_features, dim)
        eight = self._in_eight_bits(weight, scale)
        if dim is None:
            rows, sizes = to_rows(x, 0)
            if eight is not None and sums:
                more = (bias, self.group, self.partial_dtype)
                y = self._named(float8_columns, rows, eight, *more)
            elif eight is not None:
                y = self._named(float8_product, "gemm", rows, eight, bias, None)
            elif sums:
                y = self._named(column_product, rows, weight, bias, self.group, self.partial_dtype)
            else:
                rows, weight, bias = autocast(rows, weight, bias)
                y = self._named(stream_k.gemm, rows, weight.t(), bias=bias)
            return from_rows(y, sizes, 0, sizes[0])
        rows, sizes = to_rows(x, dim)
        if num_rows is not None:
            self._check_blocks(num_rows, sizes, dim)
        options: dict[str, Any] = {"num_rows": num_rows, "partial_dtype": self.partial_dtype}
        if eight is not None:
            y = self._named(float8_product, "all_gather_gemm", rows, eight, bias, self.group, **options)
        else:
            rows, weight, bias = autocast(rows, weight, bias)
            options |= {"group": self.group, "bias": bias, "save_gathered": self.save_gathered}
            y = self._named(stream_k.all_gather_gemm, rows, weight.t(), **options)
        # No number of rows says how long an empty input is.
        total = num_rows // math.prod(sizes[1:]) if num_rows else sizes[0] * self.world_size
        return from_rows(y, sizes, dim, total)


def joint_product(layers: Sequence[nn.Module], x: torch.Tensor, num_rows: int | None = None) -> torch.Tensor:
    """The outputs of `layers`, side by side, as one product; they differ in weight, bias and output features alone.

    Where one was replaced or wrapped, has hooks, or differs from the others, each is called by itself; and of 8 bits,
    where blocks of weights would belong to two of them.
    """
    first = layers[0]
    alike = {
        (layer.weight.dtype, layer.bias is None, layer.float8) for layer in layers if is_plain(layer, _PLAIN)
    }
    # What is traced copies weights into one, which few tokens are not worth; divided ones would be gathered again.
    divided = getattr(first, "sequence_parallel", False)
    traced = torch.compiler.is_compiling() and not torch.is_grad_enabled() and not divided
    apart = traced or len(alike) > 1 or not all(is_plain(layer, _PLAIN) for layer in layers)
    if apart or not shares_fit([local(layer.weight) for layer in layers], first.float8):
        return torch.cat([layer(x, num_rows) for layer in layers], -1)
    assert isinstance(first, ColumnParallelLinear)
    weight = joined([layer.weight for layer in layers])
    bias = None if first.bias is None else joined([layer.bias for layer in layers])
    dim = first.sequence_dim if first.sequence_parallel else None
    scale = None if first.weight_scale is None else torch.cat([layer.weight_scale for layer in layers])
    return first.product(x, weight, bias, num_rows, dim, scale=scale)


_PLAIN = (ColumnParallelLinear,)


class RowParallelLinear(ParallelLinear):
    """y = x @ W.T + b, the input's features divided over the ranks; the sum over ranks is part of the product.

    This rank's share of weight: [out, in/R]; bias: [out], the same on all ranks, added once. Other arguments:
    `ParallelLinear`.
    """

    DIVIDED: ClassVar[dict[str, int | None]] = {"weight": 1, "bias": None}

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
        float8: Float8 | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias,
            group=group,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            partial_dtype=partial_dtype,
            float8=float8,
            device=device,
            dtype=dtype,
            name=name,
        )

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
        return self.product(x, self.sequence_dim if self.sequence_parallel else None, residual, norm)

    def product(
        self,
        x: torch.Tensor,
        dim: int | None,
        residual: torch.Tensor | None = None,
        norm: nn.Module | None = None,
        swiglu: bool = False,
    ) -> Any:
        """`forward`, the result divided by `dim` of the tokens; None: whole. swiglu: x is [.., 2 in/R], gate and up, of
        a layer in 8 bits where nothing needs a gradient."""
        weight, bias = local(self.weight), local(self.bias)
        self._check_input(x, weight, weight.shape[1] * (2 if swiglu else 1), dim)
        if not torch.compiler.is_compiling():
            self._check_added(x, dim, residual, norm)
        scatter, dim = dim is not None, dim or 0
        rows, sizes = to_rows(x, dim)
        first = sizes[0]
        if scatter:
            self._check_blocks(rows.shape[0], sizes, dim)
            begin, end = shard_range(first, self.rank, self.world_size)
            first = end - begin
        flat = None if residual is None else to_rows(residual, dim)[0]
        options: dict[str, Any] = {"scatter": scatter, "residual": flat, "norm": norm}
        options |= {"group": self.group, "partial_dtype": self.partial_dtype}
        options["plain_norms"] = (nn.RMSNorm, RMSNorm)
        eight = self._in_eight_bits(weight)
        if eight is not None:
            options["multiply"] = lambda op, rows, bias, **more: float8_product(
                op, rows, eight, bias, self.group, swiglu, partial_dtype=self.partial_dtype, **more
            )
        found = self._named(row_product, rows, weight, bias, **options)
        if norm is None:
            return from_rows(found, sizes, dim, first)
        return tuple(from_rows(each, sizes, dim, first) for each in found)

    def takes_swiglu(self, product: torch.Tensor, *more: torch.Tensor | None) -> bool:
        """Whether `product(.., swiglu=True)` does what `forward` would do with the SwiGLU of `product`: in 8 bits, no
        gradient for it or more, and nobody to see the difference."""
        operands = (product, self.weight, self.bias, *more)
        plain = self.float8 is not None and is_plain(self, (RowParallelLinear,))
        return plain and product.dtype in DTYPES and not dispatched(*map(local, operands))

    def _check_added(
        self, x: torch.Tensor, dim: int | None, residual: torch.Tensor | None, norm: nn.Module | None
    ) -> None:
        """ValueError, before the product, for what couldn't be added to it, or a norm that couldn't be taken."""
        weight = getattr(norm, "weight", None)
        if weight is not None:
            self._check_device("the norm's weight", weight.device)
        if residual is None:
            return
        self._check_device("the residual", residual.device)
        shape = [*x.shape[:-1], self.out_features]
        if dim is not None:
            first, last = shard_range(shape[dim], self.rank, self.world_size)
            shape[dim] = last - first
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
        if isinstance(group, DeviceMesh):
            weight = self.get_parameter("weight").detach()
            self.weight = nn.Parameter(distributed(weight, group, None, self.normalized_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., hidden] -> [.., hidden]."""
        weight = local(self.weight)
        if self.sequence_parallel:
            weight = sum_gradient(weight, self.group)
        if invariance.asked() and x.dtype in DTYPES:
            eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
            return row_norm(x, weight, eps)
        return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)
