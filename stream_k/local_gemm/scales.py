"""Scales of 8-bit operands: which recipe they are of, whether they fit, and how kernels get them.

    scaling = Scaling(scale_a, scale_b, torch.bfloat16)
    recipe_of(scaling, a, b)                   # "tensorwise", "rowwise" or "blockwise"; raises what is wrong

An element stands for its scale times its value, so the product is the sum over k of (scale_a a) (scale_b b). By the
shapes of the scales, which are those of `torch.nn.functional.scaled_mm`:

    tensorwise   one element each
    rowwise      scale_a [M, 1], scale_b [1, N]; one element in the place of either, too
    blockwise    scale_a [M, K / 128], scale_b [K / 128, N / 128], rounded up: of 1 x 128 and of 128 x 128 elements, as
                 in DeepSeek-V3 (arXiv 2412.19437). The sums of 128 products are scaled and added in fp32

All are fp32. The last blocks of a K or an N that 128 doesn't divide are shorter.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from pyrocshmem import target
from pyrocshmem.calls.tensors import _check_same_device, check_plain, kind
from pyrocshmem.collectives.float8 import BLOCK
from pyrocshmem.elements import SCALED_RESULTS, names

Recipe = Literal["tensorwise", "rowwise", "blockwise"]
# What a kernel multiplies by them: a tile when it is summed, or the sum of each BLOCK of K. 0: there are none.
TILES, BLOCKS = 1, 2


class Scaling(NamedTuple):
    """Of a call: the scales of its operands, as the caller gave them, and what comes of them.

    result: the dtype of what is stored. fast: whether sums of 8-bit products may stay in the matrix unit, which keeps
    fewer bits of them than fp32 has, for longer than a step along K.
    """

    a: torch.Tensor
    b: torch.Tensor
    result: torch.dtype
    fast: bool = False


class Scheme(NamedTuple):
    """What kernels are compiled for: the recipe, and fast as `Scaling` has it."""

    recipe: Recipe
    fast: bool


def promoted(scheme: Scheme) -> bool:
    """Whether sums of at most BLOCK products leave the matrix unit: to be scaled, or as it keeps fewer bits of them
    than fp32 has, on all but AMD."""
    return scheme.recipe == "blockwise" or (not scheme.fast and target.backend() != "hip")


class Scaled(NamedTuple):
    """An 8-bit operand of a call that is enqueued: the matrix, and its scales."""

    data: torch.Tensor
    scale: torch.Tensor


Operand: TypeAlias = torch.Tensor | Scaled


def operands_of(a: torch.Tensor, b: torch.Tensor, scaling: Scaling | None) -> tuple[Operand, Operand]:
    """The operands as plans take them."""
    if scaling is None:
        return a, b
    return Scaled(a, scaling.a), Scaled(b, scaling.b)


def data_of(x: Operand) -> torch.Tensor:
    """The matrix of an operand."""
    return x.data if isinstance(x, Scaled) else x


def parts_of(x: Operand) -> tuple[torch.Tensor, ...]:
    """Its tensors."""
    return tuple(x) if isinstance(x, Scaled) else (x,)


def rows_in(x: Operand, rows: slice) -> Operand:
    """These rows of an A, with their scales."""
    if not isinstance(x, Scaled):
        return x[rows]
    return Scaled(x.data[rows], x.scale if x.scale.numel() == 1 else x.scale[rows])


def with_data(x: Operand, data: torch.Tensor) -> Operand:
    """`data` in the place of the matrix of `x`."""
    return Scaled(data, x.scale) if isinstance(x, Scaled) else data


def scaling_of(
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Scaling | None:
    """Of these arguments of a public function; None: the operands have no scales. ValueError for one scale alone, and
    for an out_dtype or a use_fast_accum without them, TypeError for an out_dtype that is none of results."""
    if scale_a is None and scale_b is None:
        if out_dtype is not None or use_fast_accum:
            raise ValueError("out_dtype and use_fast_accum go with scale_a and scale_b")
        return None
    if scale_a is None or scale_b is None:
        raise ValueError("scale_a and scale_b come together")
    result = SCALED_RESULTS[0] if out_dtype is None else out_dtype
    if result not in SCALED_RESULTS:
        raise TypeError(f"out_dtype is {out_dtype}, allowed are {names(SCALED_RESULTS)}")
    return Scaling(scale_a, scale_b, result, use_fast_accum)


def result_dtype(a: torch.Tensor, scaling: Scaling | None) -> torch.dtype:
    """Of a product with `a`: its operands', or what was asked for of 8-bit ones."""
    return a.dtype if scaling is None else scaling.result


def kind_of(scaling: Scaling | None) -> Any:
    """All of it that a plan depends on."""
    if scaling is None:
        return None
    return kind(scaling.a), kind(scaling.b), scaling.result, scaling.fast


def recipe_of(scaling: Scaling, a: torch.Tensor, b: torch.Tensor) -> Recipe:
    """Of operands a [M, K] and b [K, N], by the scales' shapes. TypeError for scales that are no fp32 tensors,
    ValueError for shapes of no recipe, or another device."""
    for name, x in (("scale_a", scaling.a), ("scale_b", scaling.b)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, a torch.Tensor is needed")
        if x.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {x.dtype}, allowed is torch.float32")
        check_plain(name, x)
        _check_same_device(name, x, a)
    (M, K), N = a.shape, b.shape[1]
    found = tuple(scaling.a.shape), tuple(scaling.b.shape)
    blocks, columns = -(-K // BLOCK), -(-N // BLOCK)
    # One block each way is one scale a row, which other recipes have, too.
    if found == ((M, blocks), (blocks, columns)) and max(blocks, columns) > 1:
        return "blockwise"
    if scaling.a.numel() == 1 and scaling.b.numel() == 1:
        return "tensorwise"
    if (found[0] == (M, 1) or scaling.a.numel() == 1) and (found[1] == (1, N) or scaling.b.numel() == 1):
        return "rowwise"
    raise ValueError(
        f"scale_a has shape {found[0]} and scale_b {found[1]}; for a ({M}, {K}) and b ({K}, {N}) allowed are one "
        f"element or ({M}, 1) with one or (1, {N}), and ({M}, {blocks}) with ({blocks}, {columns})"
    )


def scheme_of(scaling: Scaling | None, a: torch.Tensor, b: torch.Tensor) -> Scheme | None:
    """Of a call with these operands. Raises as `recipe_of`."""
    return None if scaling is None else Scheme(recipe_of(scaling, a, b), scaling.fast)


def scales_a_row(scale_a: torch.Tensor) -> int:
    """How many travel with a row of A; where all of it has one, each row has that."""
    return 1 if scale_a.numel() == 1 else scale_a.shape[1]


def placed(a: Operand, b: Operand, recipe: Recipe) -> dict[str, Any]:
    """The scales of operands as kernels take them: those fields of `stream_k.local_gemm.mainloop.Strides`."""
    assert isinstance(a, Scaled)
    assert isinstance(b, Scaled)
    of_a, of_b = a.scale, b.scale
    if recipe == "blockwise":
        (am, ak), (bk, bn) = of_a.stride(), of_b.stride()
    else:
        # One of all, or one a row, as gathered rows have them of every recipe.
        ak = bk = 0
        am, bn = (0 if x.numel() == 1 else x.stride(dim) for dim, x in enumerate((of_a, of_b)))
    steps = {"scale_am": am, "scale_ak": ak, "scale_bk": bk, "scale_bn": bn}
    return {"scale_a": of_a, "scale_b": of_b, **steps}
