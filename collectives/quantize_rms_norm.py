"""`quantize_rms_norm`: the RMSNorm of a rank's own rows, in 8-bit floating point, in one kernel.

    q, scale, h, _ = stream_k.quantize_rms_norm(x, weight, 1e-6, quantize="rowwise", residual=h)
    c = stream_k.all_gather_gemm(q, b, scale_a=scale, scale_b=scale_b, group=group)

A row is read twice: once for its sum of squares and its largest product of value and weight, from which its scale
follows (`collectives.normalizing`), and once to be normalized and converted.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.nn import functional

from pyrocshmem import signal, target
from pyrocshmem.calls import invariance, remembered
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.operators import is_watched
from pyrocshmem.calls.tensors import kind, new_like
from pyrocshmem.collectives.all_reduce_rms_norm import check_norm
from pyrocshmem.collectives.epilogue import rounded
from pyrocshmem.collectives.float8 import BLOCK, magnitude, over, scale_for, to_float8
from pyrocshmem.collectives.quantize import rows_at_once
from pyrocshmem.collectives.quantized_norm import QuantizedNorm, Recipe, quantization, quantized
from pyrocshmem.collectives.whole_tensors import check_kind
from pyrocshmem.elements import DTYPES

_COLUMNS, _WARPS = 512, 4
_BLOCK = tl.constexpr(BLOCK)


@triton.jit(do_not_specialize=["M", "pitch"])
def quantize_norm_kernel(
    x, residual, weight, total, norm, q, scales, M, K, pitch, eps,
    GIVEN: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of x [M, K], + residual where there is one, which is stored as total: their norm, in q's type. norm:
    None, or gets it as it was before. Scales: GIVEN, of GROUPS of a row, a column `pitch` behind another, or of rows.

    Example, eps 0, weights of 1: (3, 4, 0, 0) has the mean square 6.25, so the norm (1.2, 1.6, 0, 0), whose row's scale
    is 1.6 over the largest number of the type.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    TO: tl.constexpr = q.dtype.element_ty
    i = (tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    most = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, K, COLUMNS, num_stages=1):
        j = first + tl.arange(0, COLUMNS)[None, :]
        mask = (i < M) & (j < K)
        value = tl.load(x + i * K + j, mask=mask, other=0.0).to(tl.float32)
        if residual is not None:
            value += tl.load(residual + i * K + j, mask=mask, other=0.0).to(tl.float32)
            kept = rounded(value, DTYPE)
            tl.store(total + i * K + j, kept, mask=mask)
            value = kept.to(tl.float32)
        squares += value * value
        w = tl.load(weight + j, mask=j < K, other=0.0).to(tl.float32)
        most = tl.maximum(most, magnitude(value * w))
    factor = tl.math.rsqrt(tl.sum(squares, axis=1) / K + eps)
    if GIVEN:
        scale = tl.zeros((ROWS,), tl.float32) + tl.load(scales)
    elif not GROUPS:
        largest = rounded(tl.max(most, axis=1) * factor, DTYPE).to(tl.float32)
        scale = scale_for(magnitude(largest), TO)
        tl.store(scales + i, scale[:, None], mask=i < M)
    # Threads that load need not be those that stored.
    signal.settle()
    for first in tl.range(0, K, COLUMNS, num_stages=1):
        j = first + tl.arange(0, COLUMNS)[None, :]
        mask = (i < M) & (j < K)
        value = tl.load(total + i * K + j, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(weight + j, mask=j < K, other=0.0).to(tl.float32)
        normal = rounded(value * w * factor[:, None], DTYPE)
        if norm is not None:
            tl.store(norm + i * K + j, normal, mask=mask)
        normal = tl.where(mask, normal.to(tl.float32), 0.0)
        if GROUPS:
            # Of a group, then of each element.
            of_group = tl.max(magnitude(normal).reshape((ROWS, COLUMNS // _BLOCK, _BLOCK)), axis=2)
            of_group = scale_for(of_group, TO)
            groups, g = tl.cdiv(K, _BLOCK), first // _BLOCK + tl.arange(0, COLUMNS // _BLOCK)[None, :]
            tl.store(scales + i + g * tl.cast(pitch, tl.int64), of_group, mask=(i < M) & (g < groups))
            each = tl.broadcast_to(of_group[:, :, None], (ROWS, COLUMNS // _BLOCK, _BLOCK))
            value = over(normal, each.reshape((ROWS, COLUMNS)))
        else:
            value = over(normal, tl.zeros((ROWS, COLUMNS), tl.float32) + scale[:, None])
        tl.store(q + i * K + j, to_float8(value, TO), mask=mask)


def quantize_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    quantize: Recipe,
    quantize_scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    keep_norm: bool = False,
) -> QuantizedNorm:
    """RMSNorm of the rows of x, or of x + residual, in 8-bit floating point, on this rank alone.

    x: [.., N], of any strides; float16, bfloat16 or float32. weight: [N], contiguous, of any of these dtypes. eps:
    added to the mean of squares, 0 or more. quantize: "rowwise", "blockwise", or "tensorwise" with quantize_scale, fp32
    of one element. residual: of x's shape and dtype. keep_norm: with the norm as it was before, rounded to x's dtype,
    whose `quantize` gives the same bits.

    Returns a `QuantizedNorm`: (the norm in 8 bits, its scales, x + residual or x, the norm or None); scales [.., 1] or
    [.., N / 128], rounded up, which lie as those of `quantize`, or quantize_scale. There is no gradient. Raises
    TypeError and ValueError.
    """
    check_kind(x, 1, DTYPES)
    check_norm(x, x.shape, residual, weight, eps)
    how = quantization("quantize_rms_norm", quantize, quantize_scale, keep_norm, x, residual, weight)
    if how is None:
        raise ValueError("quantize is None, a recipe is needed")
    if how.counted or is_watched((x, residual, weight, quantize_scale)):
        total = x if residual is None else x + residual
        columns = (int(weight.shape[0]),)
        norm = functional.rms_norm(total.float(), columns, weight.float(), eps).to(x.dtype)
        return quantized(how, norm, total)
    total, (M, N) = new_like(x) if residual is not None else x, (math.prod(x.shape[:-1]), x.shape[-1])
    rows, added = (None if t is None else t.resolve_neg().contiguous() for t in (x, residual))
    norm = new_like(x) if keep_norm else None
    q, scales = how.memory(M, N, x.device)
    if x.numel() > 0:
        read = rows if residual is None else total
        pitch = scales.stride(1) if scales.ndim else 0
        args = (rows, added, weight, read, norm, q, scales, M, N, pitch, float(eps))
        # Where a row must have the same bits in every batch, its squares are added by as many threads in all of them.
        alike = invariance.current() > 0 and not target.interpreted()

        def make() -> Launch:
            at_once = 1 if alike else rows_at_once(M, x.device)
            constants = {
                "GIVEN": quantize == "tensorwise",
                "GROUPS": quantize == "blockwise",
                "ROWS": at_once,
                "COLUMNS": _COLUMNS,
            }
            return Launch(quantize_norm_kernel, -(-M // at_once), constants, _WARPS, 1)

        key = ("quantize_rms_norm", quantize, alike, *map(kind, args[:7]))
        remembered.launch(key, x.device, args, make)
    elif quantize_scale is None:
        scales.fill_(1.0)
    return how.found(q, scales, total, norm)
