"""Weights of layers in 8-bit floating point: by which recipe, and how they are held.

    recipe       scales of tokens      scales of weights [out, in]
    "rowwise"    one each              one a row, as torchao's recipe of that name has them
    "blockwise"  one for 128 features  one for 128 x 128, as DeepSeek-V3 has them (arXiv 2412.19437)

Tokens are quantized in each call, and so are weights, unless a layer holds them in 8 bits (`quantize_weight` of the
layer). `float8_products` multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch

from pyrocshmem import stream_k
from pyrocshmem.collectives.float8 import BLOCK

Float8 = Literal["rowwise", "blockwise"]
_OF_WEIGHTS = {"rowwise": "rowwise", "blockwise": "blockwise_weight"}


class Weight(NamedTuple):
    """This rank's share of a layer's weight [out, in], the recipe, and the share's scales where it is in 8 bits."""

    share: torch.Tensor
    recipe: Float8
    scale: torch.Tensor | None = None


def check_recipe(name: str, recipe: str | None) -> None:
    """ValueError, naming the layer `name`, for what is no recipe."""
    if recipe is not None and recipe not in _OF_WEIGHTS:
        allowed = ", ".join(map(repr, get_args(Float8)))
        raise ValueError(f"{name}: float8 is {recipe!r}, allowed are None, {allowed}")


def shares_fit(shares: Sequence[torch.Tensor], recipe: Float8 | None) -> bool:
    """Whether shares of weights, one below the other, have the scales that each has by itself."""
    return recipe != "blockwise" or all(share.shape[0] % BLOCK == 0 for share in shares[:-1])


def quantized(weight: torch.Tensor, recipe: Float8) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [out, in] in 8 bits, and its scales."""
    return stream_k.quantize(weight.detach(), _OF_WEIGHTS[recipe])
