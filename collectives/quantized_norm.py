"""The norm of a total in 8-bit floating point: what callers ask for, what they get, and how it comes about.

    how = quantization("all_reduce_rms_norm", "rowwise", None, False, x)
    found = quantized(how, norm, total)      # by a kernel of its own; an exchange (`AfterSum`) makes the same bits

It has the bits of `quantize` of the norm.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import torch

from pyrocshmem.calls.operators import needs_gradient
from pyrocshmem.calls.tensors import kind
from pyrocshmem.collectives import saturation
from pyrocshmem.collectives.exchange import groups_fit
from pyrocshmem.collectives.exchange_kernel import AfterSum
from pyrocshmem.collectives.quantize import check_scale, in_blocks_of_rows, quantize
from pyrocshmem.elements import float8

Recipe = Literal["tensorwise", "rowwise", "blockwise"]


class QuantizedNorm(NamedTuple):
    """What a sum with a norm returns that is asked to quantize: the norm in 8 bits, its scales, and the total; and the
    norm as it was before, where it was asked for."""

    quantized: torch.Tensor
    scale: torch.Tensor
    total: torch.Tensor
    norm: torch.Tensor | None = None

    def in_rows_of(self, sizes: tuple[int, ...]) -> QuantizedNorm:
        """Results of M rows as ones of [*sizes, ..]; a scale of all rows stays as it is."""
        columns = self.total.shape[-1]
        scale = self.scale.view(*sizes, -1) if self.scale.shape[:-1] == self.total.shape[:1] else self.scale
        norm = None if self.norm is None else self.norm.view(*sizes, columns)
        return QuantizedNorm(
            self.quantized.view(*sizes, columns), scale, self.total.view(*sizes, columns), norm
        )


class Quantization(NamedTuple):
    """Of a call. scale: of "tensorwise". keep: whether the norm itself is a result, too. counted: what it saturates is
    counted (`collectives.saturation`)."""

    recipe: str
    scale: torch.Tensor | None
    keep: bool
    counted: bool

    @property
    def kind(self) -> Any:
        """All of it that a plan depends on."""
        return self.recipe, kind(self.scale), self.keep, self.counted

    def __str__(self) -> str:
        return self.recipe + (", norm kept" if self.keep else "")

    def is_fused(self, columns: int, dtype: torch.dtype, world_size: int) -> bool:
        """Whether an exchange can make it of rows of so many elements."""
        return not self.counted and (self.recipe != "blockwise" or groups_fit(columns, dtype, world_size))

    def memory(self, rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """For so many rows in 8 bits and for their scales, or the one that is given, as kernels take them."""
        to = float8()[0]
        if self.recipe == "blockwise":
            return in_blocks_of_rows(rows, columns, to, device)
        if self.scale is not None:
            scales = self.scale.view(())
        else:
            scales = torch.empty(rows, 1, dtype=torch.float32, device=device)
        return torch.empty(rows, columns, dtype=to, device=device), scales

    def beside(self, like: torch.Tensor, after: AfterSum) -> AfterSum:
        """`after` of an exchange that makes a norm like `like`, which it then quantizes, too."""
        q, scales = self.memory(like.numel() // after.columns, after.columns, like.device)
        return after._replace(quantized=q.view(like.shape), scales=scales)

    def results(self, out: torch.Tensor, after: AfterSum) -> QuantizedNorm:
        """Those of a call, of what its exchange has written."""
        assert after.total is not None
        return self.found(after.quantized, after.scales, after.total, out)

    def found(
        self, q: torch.Tensor, scales: torch.Tensor, total: torch.Tensor, norm: torch.Tensor | None
    ) -> QuantizedNorm:
        """The results of a call, of those of its rows: q [M, N], scales [M, groups], norm [M, N]; total as it is."""
        scale = scales.view(*total.shape[:-1], scales.shape[1]) if self.scale is None else self.scale
        kept = norm.view(total.shape) if self.keep and norm is not None else None
        return QuantizedNorm(q.view(total.shape), scale, total, kept)


def quantization(
    name: str, recipe: str | None, scale: torch.Tensor | None, keep: bool, x: Any, *more: Any
) -> Quantization | None:
    """What the arguments `quantize`, `quantize_scale` and `keep_norm` of a call of op `name` ask for, whose operands
    are x and more; None: nothing. Raises TypeError and ValueError."""
    if recipe is None:
        if scale is not None or keep:
            raise ValueError("quantize_scale and keep_norm go with quantize")
        return None
    if recipe not in get_args(Recipe):
        allowed = ", ".join(map(repr, get_args(Recipe)))
        raise ValueError(f"quantize is {recipe!r}, allowed are None, {allowed}")
    if (recipe == "tensorwise") != (scale is not None):
        raise ValueError(
            "quantize='tensorwise' and quantize_scale go together: the scale must be known before"
        )
    if scale is not None:
        check_scale("quantize_scale", scale, x)
    if needs_gradient((x, *more)):
        raise ValueError(f"{name} that quantizes has no gradient; call it under torch.no_grad()")
    return Quantization(recipe, scale, keep, scale is not None and bool(saturation.here.counts))


def quantized(how: Quantization | None, norm: torch.Tensor, total: torch.Tensor) -> Any:
    """The results of a call that has these two by now."""
    if how is None:
        return norm, total
    rows = norm.view(math.prod(norm.shape[:-1]), norm.shape[-1])
    q, scale = quantize(rows, how.recipe, scale=how.scale)
    return how.found(q, scale, total, norm)
