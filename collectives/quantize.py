"""`quantize` and `dequantize`: 16-bit or fp32 tensors as 8-bit floating point with scales, and back; `quantize_swiglu`.

A group of elements has one scale, fp32: its largest magnitude over the largest number of the 8-bit type. Of each recipe
of `stream_k.local_gemm.scales` the groups are those of its operands. Graphs have it as the operator
`torch.ops.collectives.quantize`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.functional import silu

from pyrocshmem import target
from pyrocshmem.calls import remembered
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.operators import define, is_watched, ops
from pyrocshmem.calls.tensors import check_device, check_plain, kind
from pyrocshmem.collectives import saturation
from pyrocshmem.collectives.epilogue import ACTIVATIONS, activate, rounded
from pyrocshmem.collectives.float8 import BLOCK, UNIT, magnitude, over, scale_for, to_float8
from pyrocshmem.elements import DTYPES, float8, names
from pyrocshmem.target import num_sms

RECIPES = ("tensorwise", "rowwise", "blockwise", "blockwise_weight")
# Columns that a program reads at once; rows, of groups of one row: many where a program costs more than its data.
_COLUMNS, _ROWS, _INTERPRETED_ROWS = 1024, 8, 64
_WARPS = 4
# Programs on a multiprocessor that whole rows are spread over.
_SHARE = 4
_SILU = tl.constexpr(ACTIVATIONS.index("silu"))


@triton.jit(do_not_specialize=["M", "across"])
def quantize_kernel(
    x, q, scales, M, K, across, stride_m, stride_k, q_pitch, scale_m, scale_k,
    GIVEN: tl.constexpr, WHOLE_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    SWIGLU: tl.constexpr,
):  # fmt: skip
    """A block [ROWS, COLUMNS] of x [M, K], `across` of which lie side by side, or all columns of ROWS rows where
    WHOLE_ROWS, as numbers of q's type. Each GROUP rows of the block have one scale, or, GIVEN, all have the one that is
    there. q_pitch: elements from one row of q to the next. SWIGLU: x is a gate, and behind it lies what it opens to."""
    DTYPE: tl.constexpr = q.dtype.element_ty
    block = tl.program_id(0) % across
    i = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    first = block * COLUMNS
    there = i < M
    steps = 1
    if WHOLE_ROWS:
        steps = tl.cdiv(K, COLUMNS)
    if GIVEN:
        scale = tl.zeros((ROWS,), tl.float32) + tl.load(scales)
    else:
        most = tl.zeros((ROWS,), tl.float32)
        for step in tl.range(0, steps, num_stages=1):
            value = _block(x, i, first + step * COLUMNS, there, K, stride_m, stride_k, COLUMNS, SWIGLU)
            most = tl.maximum(most, tl.max(magnitude(value), axis=1))
        if GROUP > 1:
            most = tl.zeros((ROWS,), tl.float32) + tl.max(most, axis=0)
        scale = scale_for(most, DTYPE)
        of_group = scales + i // GROUP * scale_m + block * scale_k
        tl.store(of_group, scale, mask=there & (i % GROUP == 0))
    for step in tl.range(0, steps, num_stages=1):
        at = first + step * COLUMNS
        value = _block(x, i, at, there, K, stride_m, stride_k, COLUMNS, SWIGLU)
        value = over(value, tl.zeros((ROWS, COLUMNS), tl.float32) + scale[:, None])
        k = at + tl.arange(0, COLUMNS)
        place = q + i.to(tl.int64)[:, None] * q_pitch + k[None, :]
        tl.store(place, to_float8(value, DTYPE), mask=there[:, None] & (k < K)[None, :])


@triton.jit
def _block(x, i, at, there, K, stride_m, stride_k, COLUMNS: tl.constexpr, SWIGLU: tl.constexpr):
    """fp32 columns [at, at + COLUMNS) of rows `i`, zeros outside."""
    k = at + tl.arange(0, COLUMNS)
    place = x + i.to(tl.int64)[:, None] * stride_m + k.to(tl.int64)[None, :] * stride_k
    mask = there[:, None] & (k < K)[None, :]
    value = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if SWIGLU:
        up = tl.load(place + tl.cast(K, tl.int64) * stride_k, mask=mask, other=0.0).to(tl.float32)
        value = rounded(activate(value, _SILU) * up, x.dtype.element_ty).to(tl.float32)
    return value


def quantize(
    x: torch.Tensor, recipe: str, *, dtype: torch.dtype | None = None, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] as 8-bit floating point and its scales, for `gemm` and the fused ops.

    x: float16, bfloat16 or float32, any strides. recipe: which elements share a scale:

        "tensorwise"         all: scale []
        "rowwise"            those of a row: [M, 1]
        "blockwise"          128 of a row: [M, K / 128], rounded up; those of a column lie one behind another
        "blockwise_weight"   128 x 128: [M / 128, K / 128], rounded up; those of a row do, with up to three zeros behind

    dtype: float8_e4m3fn (None) or float8_e5m2; on gfx942 their fnuz kinds. scale: of "tensorwise", float32 of one
    element: a scale that is known, to which x is saturated; None: the one of x itself.

    Returns (q, scale): q like x, contiguous; of "blockwise" up to three rows of memory behind both are theirs, for what
    the BLAS multiplies by four. An element becomes the number nearest to x / scale, ties to even. The scale of a group
    is its largest magnitude over the largest number of the dtype, 1 where all are zeros. A NaN or an infinity makes the
    scale of its group infinite and itself NaN, and the group's other elements 0. Raises TypeError and ValueError.
    """
    to = float8()[0] if dtype is None else dtype
    _check(x, recipe, to, scale)
    if is_watched((x, scale)):
        q, scales = ops.quantize(x, recipe, to, scale)
    else:
        q, scales = _quantized(x, recipe, to, scale)
    return q, scales if scale is None else scale


def quantize_swiglu(
    product: torch.Tensor,
    recipe: str,
    *,
    dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize` of silu(gate) * up (Shazeer 2020), of product [M, 2 K], which has the columns of gate and then those
    of up: computed in fp32, rounded to the product's dtype, and not stored on the way. The other arguments, results and
    errors are those of `quantize`, but "tensorwise" needs a scale: ValueError."""
    to = float8()[0] if dtype is None else dtype
    _check(product, recipe, to, scale)
    if product.shape[1] % 2 != 0:
        raise ValueError(f"product has shape {tuple(product.shape)}: gate and up have as many columns each")
    if recipe == "tensorwise" and scale is None:
        raise ValueError("recipe is 'tensorwise', which needs a scale here")
    if is_watched((product, scale)):
        gate, up = product.float().chunk(2, 1)
        return quantize((silu(gate) * up).to(product.dtype), recipe, dtype=to, scale=scale)
    q, scales = _quantized(product, recipe, to, scale, swiglu=True)
    return q, scales if scale is None else scale


def in_blocks_of_rows(
    M: int, K: int, to: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for [M, K] in 8 bits and for the scales of its rows' groups, as `torch._scaled_mm` takes them: a column of
    scales behind another, with room for rows up to a multiple of UNIT that it multiplies, in the numbers, too."""
    room = M + -M % UNIT
    scales = torch.empty(-(-K // BLOCK), room, dtype=torch.float32, device=device).t()
    return torch.empty(room, K, dtype=to, device=device)[:M], scales[:M]


def _results(x: torch.Tensor, recipe: str, to: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for both. Scales of a weight have zeros behind each row up to a multiple of UNIT blocks."""
    M, K = x.shape
    if recipe == "blockwise":
        return in_blocks_of_rows(M, K, to, x.device)
    if recipe == "tensorwise":
        return x.new_empty(M, K, dtype=to), x.new_empty((), dtype=torch.float32)
    rows, blocks = _groups(recipe, M, K)
    room = -blocks % UNIT if recipe == "blockwise_weight" else 0
    if room:
        return x.new_empty(M, K, dtype=to), x.new_zeros(rows, blocks + room, dtype=torch.float32)[:, :blocks]
    return x.new_empty(M, K, dtype=to), x.new_empty(rows, blocks, dtype=torch.float32)


def rows_at_once(M: int, device: torch.device) -> int:
    """Rows of a program, of M that are read whole: one where they are few, so that all SMs have some."""
    if target.interpreted():
        return _INTERPRETED_ROWS
    return min(_ROWS, triton.next_power_of_2(max(1, -(-M // (_SHARE * num_sms(device))))))


def _quantized(
    x: torch.Tensor, recipe: str, to: torch.dtype, scale: torch.Tensor | None, swiglu: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quantize` returns, or `quantize_swiglu`, but for a scale that was given. Arguments are not checked."""
    M, K = x.shape[0], x.shape[1] // 2 if swiglu else x.shape[1]
    q, scales = _results(x[:, :K], recipe, to)
    if q.numel() == 0:
        return q, scales.fill_(1.0)
    given = scale
    if recipe == "tensorwise" and given is None:
        most = x.abs().amax().float()
        # By a tensor: a GPU would multiply by a number's reciprocal.
        given = scales = torch.where(most == 0, 1.0, most / torch.full_like(most, torch.finfo(to).max))
    if scale is not None:
        for counts in saturation.here.counts:
            counts.add(silu(x[:, :K].float()) * x[:, K:] if swiglu else x, scale, to)
    group = BLOCK if recipe == "blockwise_weight" else 1
    columns = _COLUMNS if recipe in ("rowwise", "tensorwise") else BLOCK
    blocks = 1 if recipe == "rowwise" else -(-K // columns)
    strides = (0, 0) if given is not None else scales.stride()
    args = (x, q, scales if given is None else given, M, K, blocks, *x.stride(), K, *strides)

    def make() -> Launch:
        rows = BLOCK if group > 1 else rows_at_once(M * blocks, x.device)
        constants = {
            "GIVEN": given is not None,
            "WHOLE_ROWS": recipe == "rowwise",
            "ROWS": rows,
            "COLUMNS": columns,
            "GROUP": group,
            "SWIGLU": swiglu,
        }
        return Launch(quantize_kernel, -(-M // rows) * blocks, constants, _WARPS, 1)

    remembered.launch(("quantize", recipe, swiglu, *map(kind, args[:3])), x.device, args, make)
    return q, scales


def dequantize(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What q [M, K] with scales of `quantize` stands for, rounded to `dtype`. Made of PyTorch's ops, for tests."""
    M, K = q.shape
    if q.numel() == 0:
        return q.to(dtype)
    if scale.numel() > 1:
        height, width = (-(-size // groups) for size, groups in zip((M, K), scale.shape, strict=True))
        height, width = (1 if height == 1 else BLOCK), (K if scale.shape[1] == 1 and width > BLOCK else BLOCK)
        scale = scale.repeat_interleave(height, 0)[:M].repeat_interleave(width, 1)[:, :K]
    return (q.float() * scale).to(dtype)


def _groups(recipe: str, M: int, K: int) -> tuple[int, int]:
    """How many scales a column and a row have: of a row each, or of blocks of a weight."""
    return (M, 1) if recipe == "rowwise" else (-(-M // BLOCK), -(-K // BLOCK))


def _check(x: torch.Tensor, recipe: str, to: torch.dtype, scale: torch.Tensor | None) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}, a torch.Tensor is needed")
    if x.dtype not in DTYPES:
        raise TypeError(f"x has dtype {x.dtype}, allowed are {names()}")
    if x.ndim != 2:
        raise ValueError(f"x has {x.ndim} dimensions, shape {tuple(x.shape)}; a matrix is needed")
    check_plain("x", x)
    check_device(x, x.device)
    if recipe not in RECIPES:
        raise ValueError(f"recipe is {recipe!r}, allowed are {', '.join(RECIPES)}")
    if to not in float8():
        raise TypeError(f"dtype is {to}, allowed are {names(float8())}")
    if scale is None:
        return
    if recipe != "tensorwise":
        raise ValueError(f"scale is given, and recipe is {recipe!r}: allowed with 'tensorwise'")
    check_scale("scale", scale, x)


def check_scale(name: str, scale: Any, x: torch.Tensor) -> None:
    """TypeError or ValueError for what is not the scale of a whole tensor like `x`."""
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{name} is a {type(scale).__name__}, a torch.Tensor is needed")
    check_plain(name, scale)
    device = getattr(x, "device", scale.device)  # what is no tensor is refused elsewhere
    if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != device:
        raise ValueError(
            f"{name} has dtype {scale.dtype}, shape {tuple(scale.shape)}, on {scale.device}; one element of "
            f"torch.float32 on {device} is needed"
        )


define(
    "collectives::quantize",
    "(Tensor x, str recipe, ScalarType dtype, Tensor? scale) -> (Tensor, Tensor)",
    _quantized,
    lambda x, recipe, dtype, scale: _results(x, recipe, dtype),
    ordered=False,
)
