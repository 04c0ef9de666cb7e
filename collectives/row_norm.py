"""RMSNorm of whole rows on one rank, forward and backward, in the order of `collectives.exchange_kernel`.

    y = row_norm(total, weight, eps, ranks=4)        # the bits that an exchange between 4 ranks gives this row

PyTorch's norm is as fast, but adds the squares of a row in another order, which may depend on the number of rows. So
where a row must have the same bits in every batch, calls with more rows than an exchange normalizes have this one, and
so do calls on one rank.

Shape letters: M rows of N columns, in units of 16 bytes; s the scale of a row, w the weight, g the gradient of the
result h s w (https://arxiv.org/abs/1910.07467). Backward, as in `rms_norm_kernels`: with t = sum of g w h, times s / N,
the gradient of h is s (g w - h s t), that of the weight the sum over rows of g h s.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pyrocshmem import dependent_launch, target, trace
from pyrocshmem.calls import remembered
from pyrocshmem.calls.invariance import BATCH, TP, Invariance
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.operators import define, ops
from pyrocshmem.calls.tensors import as_rows, kind, laid_alike
from pyrocshmem.collectives import normalizing
from pyrocshmem.collectives import words as units
from pyrocshmem.collectives.exchange import MOST_THREADS, row_programs
from pyrocshmem.message_slots import QUAD_BYTES
from pyrocshmem.versions import version_of

# Parts of a row that fit into registers with their weights, 12 of a thread each in 16 bits; and up to how many rows
# that is faster (one H200, 8192 columns of bf16: 1 row 3.2 us instead of 5.8, 128 rows 3.6 instead of 6.1, 1024 rows
# 14.1 instead of 13.1, 4096 rows 57.5 instead of 48.5, since fewer programs share an SM).
_KEPT_PARTS, _KEPT_ROWS = 8, 512
# Triton before 3.7 lays a block that is added as the loads lie that it comes from, on AMD always, and on NVIDIA where
# these are not of whole units: an exchange's and those of the kernels here differ.
_LAYS_ALIKE = target.interpreted() or version_of(triton.__version__) >= (3, 7)


def is_apart(mode: Invariance, like: torch.Tensor, columns: int, weight: torch.Tensor) -> bool:
    """Whether this mode has rows of `columns` elements as those of `like` normalized by the kernel here however few
    they are, behind the exchange that sums them, which would give them other bits: those of its number of ranks, or,
    by an older Triton, of its loads."""
    if mode != BATCH:
        return mode == TP
    row_bytes = columns * min(like.element_size(), weight.element_size())
    return not _LAYS_ALIKE and (target.backend() == "hip" or row_bytes % QUAD_BYTES != 0)


@triton.jit
def _part_of_row(part, row_units, width, STEP: tl.constexpr, UNIT: tl.constexpr, RANKS: tl.constexpr):
    """(columns of the first elements of a part's units [STEP], which exist, the same two as blocks [STEP, RANKS])."""
    of_row = part * STEP + tl.arange(0, STEP)
    column, valid = of_row * UNIT, of_row < row_units
    wide = tl.broadcast_to(column[:, None], [STEP, RANKS])
    return column, valid, wide, tl.broadcast_to(valid[:, None], [STEP, RANKS])


@triton.jit
def _values(x, start, wide, width, there, UNIT: tl.constexpr, ALIGNED: tl.constexpr):
    """Those of a part's units, of the row of `x` that begins at `start`."""
    words = units.load_unit(x, start + wide, wide, width, there, UNIT, ALIGNED)
    return units.unpack(words, UNIT, x.dtype.element_ty)


@triton.jit
def _with_squares(sums, lanes, part, words, column, width, valid, UNIT: tl.constexpr, DTYPE: tl.constexpr):
    """`sums`, one of each part, with that of the squares of this part's units."""
    values = units.unpack(words, UNIT, DTYPE)
    return tl.where(lanes == part, normalizing.sum_of_units(values, values, column, width, valid), sums)


@triton.jit
def _sum_of_parts(sums):
    """The sum of the parts of a row, one in each row of `sums` [STEP, RANKS]."""
    return normalizing.of_rank(tl.sum(sums, axis=0), 0)


@triton.jit
def row_norm_kernel(
    h, weight, out, width, eps, events, PARTS: tl.constexpr, STEP: tl.constexpr, RANKS: tl.constexpr,
    ALIGNED: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """out [M, width] = the norm of h [M, width], one row a program, in PARTS parts of STEP units. KEEPS: all of a row
    is loaded at once, weights too, and stays in registers; else it is read twice, a part at a time.

    Example, a row of 16-bit (3, 5, 5, 1) and eps 0: squares 60, their mean 15, so (3, 5, 5, 1) / sqrt(15) times w.
    """
    dependent_launch.wait_for_previous()
    dependent_launch.allow_next()
    DTYPE: tl.constexpr = h.dtype.element_ty
    UNIT: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    row = tl.program_id(0)
    trace.mark(events, trace.STORE, row)
    row_units, start = tl.cdiv(width, UNIT), tl.cast(row, tl.int64) * width
    lanes = tl.broadcast_to(tl.arange(0, STEP)[:, None], [STEP, RANKS])
    sums = tl.zeros((STEP, RANKS), tl.float32)
    one = tl.broadcast_to(tl.arange(0, RANKS)[None, :], [STEP, RANKS]) == 0
    if KEEPS:
        words, weights = (), ()
        for part in tl.static_range(PARTS):
            column, valid, wide, there = _part_of_row(part, row_units, width, STEP, UNIT, RANKS)
            loaded = units.load_unit(h, start + wide, wide, width, there, UNIT, ALIGNED)
            weighted = normalizing.weights_of(weight, wide, width, there, UNIT, DTYPE, ALIGNED)
            words, weights = words + (loaded,), weights + (weighted,)  # type: ignore[assignment]
        for part in tl.static_range(PARTS):
            column, valid, wide, there = _part_of_row(part, row_units, width, STEP, UNIT, RANKS)
            sums = _with_squares(sums, lanes, part, words[part], column, width, valid, UNIT, DTYPE)
        squares = _sum_of_parts(sums)
        for part in tl.static_range(PARTS):
            column, valid, wide, there = _part_of_row(part, row_units, width, STEP, UNIT, RANKS)
            done = normalizing.normalized(words[part], squares, weights[part], width, eps, UNIT, DTYPE)
            units.store_unit(out, start + wide, wide, width, done, there & one, UNIT, ALIGNED)
    else:
        for part in range(PARTS):
            column, valid, wide, there = _part_of_row(part, row_units, width, STEP, UNIT, RANKS)
            loaded = units.load_unit(h, start + wide, wide, width, there, UNIT, ALIGNED)
            sums = _with_squares(sums, lanes, part, loaded, column, width, valid, UNIT, DTYPE)
        squares = _sum_of_parts(sums)
        for part in range(PARTS):
            column, valid, wide, there = _part_of_row(part, row_units, width, STEP, UNIT, RANKS)
            loaded = units.load_unit(h, start + wide, wide, width, there, UNIT, ALIGNED)
            weighted = normalizing.weights_of(weight, wide, width, there, UNIT, DTYPE, ALIGNED)
            done = normalizing.normalized(loaded, squares, weighted, width, eps, UNIT, DTYPE)
            units.store_unit(out, start + wide, wide, width, done, there & one, UNIT, ALIGNED)
    trace.mark(events, trace.END, -1)


@triton.jit
def row_norm_backward_kernel(
    g, h, weight, grad, scales, width, eps, events, PARTS: tl.constexpr, STEP: tl.constexpr, RANKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """grad [M, width] of h, of g, that of the norm, one row a program; scales [M], fp32, gets s of each row.

    Example, h = (1, 2, 2, 0) / 1.5 and eps 0, whose s is 1: of g w = (2, 0, 0, 0) the sum t is 4/3 / 4 = 1/3, so the
    gradient is (2, 0, 0, 0) - h / 3.
    """
    dependent_launch.wait_for_previous()
    dependent_launch.allow_next()
    DTYPE: tl.constexpr = h.dtype.element_ty
    UNIT: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    row = tl.program_id(0)
    trace.mark(events, trace.STORE, row)
    row_units, start = tl.cdiv(width, UNIT), tl.cast(row, tl.int64) * width
    lanes = tl.broadcast_to(tl.arange(0, STEP)[:, None], [STEP, RANKS])
    squares_of, products_of = tl.zeros((STEP, RANKS), tl.float32), tl.zeros((STEP, RANKS), tl.float32)
    for part in range(PARTS):
        column, valid, wide, there = _part_of_row(part, row_units, width, STEP, UNIT, RANKS)
        values = _values(h, start, wide, width, there, UNIT, ALIGNED)
        given = _values(g, start, wide, width, there, UNIT, ALIGNED)
        weights = normalizing.weights_of(weight, wide, width, there, UNIT, DTYPE, ALIGNED)
        weighted = ()
        for e in tl.static_range(UNIT):
            weighted = weighted + (given[e] * weights[e],)  # type: ignore[assignment]
        squares = normalizing.sum_of_units(values, values, column, width, valid)
        products = normalizing.sum_of_units(weighted, values, column, width, valid)
        squares_of = tl.where(lanes == part, squares, squares_of)
        products_of = tl.where(lanes == part, products, products_of)
    scale = normalizing.scale_of(_sum_of_parts(squares_of), width, eps)
    t = _sum_of_parts(products_of) * scale / width
    tl.store(scales + row, scale)
    one = tl.broadcast_to(tl.arange(0, RANKS)[None, :], [STEP, RANKS]) == 0
    for part in range(PARTS):
        column, valid, wide, there = _part_of_row(part, row_units, width, STEP, UNIT, RANKS)
        values = _values(h, start, wide, width, there, UNIT, ALIGNED)
        given = _values(g, start, wide, width, there, UNIT, ALIGNED)
        weights = normalizing.weights_of(weight, wide, width, there, UNIT, DTYPE, ALIGNED)
        found = ()
        for e in tl.static_range(UNIT):
            found = found + (scale * (given[e] * weights[e] - values[e] * scale * t),)  # type: ignore[assignment]
        words = units.pack(found, DTYPE)
        units.store_unit(grad, start + wide, wide, width, words, there & one, UNIT, ALIGNED)
    trace.mark(events, trace.END, -1)


def _launched(kernel: Any, tensors: tuple[torch.Tensor, ...], eps: float, ranks: int) -> None:
    """Launch for rows of `tensors`; the first is [M, N], all are contiguous."""
    first = tensors[0]
    M, N = first.shape
    args = (*tensors, N, float(eps))

    def make() -> Launch:
        step, parts = row_programs(-(-N * first.element_size() // QUAD_BYTES), ranks, target.interpreted())
        columns = triton.next_power_of_2(ranks)
        places = (*(t.data_ptr() for t in tensors), N * min(t.element_size() for t in tensors))
        aligned = all(place % QUAD_BYTES == 0 for place in places)
        constants = {"PARTS": parts, "STEP": step, "RANKS": columns, "ALIGNED": aligned}
        if kernel is row_norm_kernel:
            constants["KEEPS"] = parts <= _KEPT_PARTS and M <= _KEPT_ROWS
        lanes = 64 if target.backend() == "hip" else 32
        warps = max(1, min(MOST_THREADS, step * columns) // lanes)
        return Launch(kernel, M, constants, warps, 1, chained=True)

    remembered.launch((kernel.__name__, *map(kind, tensors), ranks), first.device, args, make)


def _forward(x: torch.Tensor, weight: torch.Tensor, eps: float, ranks: int) -> torch.Tensor:
    rows, weight = laid_alike(as_rows(x).contiguous()), laid_alike(weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() > 0:
        _launched(row_norm_kernel, (rows, weight, out.view(rows.shape)), eps, ranks)
    return out


def _backward(
    g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, weight = laid_alike(as_rows(x).contiguous()), laid_alike(weight)
    given = laid_alike(as_rows(g.to(x.dtype)).contiguous())
    grad = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scales = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
    if grad.numel() > 0:
        tensors = (given, rows, weight, grad.view(rows.shape), scales)
        _launched(row_norm_backward_kernel, tensors, eps, ranks)
    of_weight = (given.float() * rows.float() * scales[:, None]).sum(0)
    return grad, of_weight.to(weight.dtype)


def row_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, ranks: int = 1) -> torch.Tensor:
    """RMSNorm of rows of `x`, [.., N], with the bits that an exchange between so many ranks gives them; x of float16,
    bfloat16 or float32, weight [N], contiguous, of any of these. Has a gradient, whose rows don't depend on one another
    either, but for that of the weight. Arguments are not checked."""
    return ops.row_norm(x, weight, float(eps), ranks)


def row_norm_gradients(
    g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, ranks: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """(that of x, that of the weight), from that of `row_norm`."""
    found: tuple[torch.Tensor, torch.Tensor] = ops.row_norm_backward(g, x, weight, float(eps), ranks)
    return found


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.eps, ctx.ranks = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return *row_norm_gradients(g, x, weight, ctx.eps, ctx.ranks), None, None


define(
    "collectives::row_norm",
    "(Tensor x, Tensor weight, float eps, int ranks) -> Tensor",
    _forward,
    lambda x, weight, eps, ranks: x.new_empty(x.shape),
    _keep,
    _differentiate,
    ordered=False,
)
define(
    "collectives::row_norm_backward",
    "(Tensor g, Tensor x, Tensor weight, float eps, int ranks) -> (Tensor, Tensor)",
    _backward,
    lambda g, x, weight, eps, ranks: (x.new_empty(x.shape), torch.empty_like(weight)),
    ordered=False,
)
