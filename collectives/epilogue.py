"""Epilogues: what happens to a finished tile.

`store_output` is the one of a plain GEMM, `store_with_squares` that of a GEMM whose rows are normalized next; those
that feed collectives are in their files. To write another, give a jit function with the signature that
`stream_k.local_gemm.kernel` describes to `Product.launch`. What is done to a finished tile is one thing, a `Finish`,
which every epilogue has in its `extra`; `finished`, `add_residual`, `row_squares` and `store_block` do it.
Before a sum over ranks every rank's tile becomes a `partial_sum`, the owner's like the others'.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language import target_info

from pyrocshmem import target
from pyrocshmem.calls.tensors import BLOCKS, POINTER

ACTIVATIONS = ("none", "relu", "gelu", "silu")

_RELU = tl.constexpr(1)
_GELU = tl.constexpr(2)
_SILU = tl.constexpr(3)
_POINTER = tl.constexpr(POINTER)
_BLOCKS = tl.constexpr(BLOCKS)
_INTERPRETED = tl.constexpr(target.interpreted())


class Finish(NamedTuple):
    """What is done to a finished tile, in fp32: activation(sum + bias) + residual. That is rounded once,
    to the type of the memory that it is stored in. A kernel is compiled for what is there: None costs nothing.

    bias: [N], added to every row. residual: [M, N], contiguous.
    The activation, a constant, is one of the kernel's: Triton 3.6 loses constants in a tuple that has pointers, too.
    """

    bias: Any
    residual: Any

    @classmethod
    def of(cls, added: torch.Tensor | None = None) -> Finish:
        """added: a bias or a residual, as `stream_k.local_gemm.operands.in_one` makes one of both."""
        if added is not None and added.ndim == 2:
            return cls(None, added)
        return cls(added, None)


# Of a call with neither: made once.
PLAIN = Finish.of()


def activation_number(name: str) -> int:
    """The place in `ACTIVATIONS`, which kernels are compiled for."""
    return ACTIVATIONS.index(name)


class Options(NamedTuple):
    """Constants of an epilogue that stores. c_how: how `c` is written, ROW or BLOCKS (descriptors) or POINTER.
    activation: its number."""

    c_how: int
    activation: int = 0


class Output(NamedTuple):
    """`extra` of `store_output`: the strides of `c`, where it is a pointer."""

    finish: Any
    stride_m: Any
    stride_n: Any


class OutputWithSquares(NamedTuple):
    """`extra` of `store_with_squares`. squares: fp32 [tiles_n, M]."""

    finish: Any
    stride_m: Any
    stride_n: Any
    squares: Any


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """`x` fp32 through an activation; gelu is the exact one (error function), as torch's default."""
    if ACTIVATION == _RELU:
        # Written so that NaN stays NaN, as torch.relu keeps it.
        x = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == _GELU:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == _SILU:
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def add_bias(x, bias, col, N, WIDTH: tl.constexpr):
    """`x` [*, WIDTH] plus bias[col : col + WIDTH] in every row."""
    cols = col + tl.arange(0, WIDTH)
    return x + tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def finished(part, finish, col, N, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr):
    """An fp32 block [*, WIDTH] of a sum, from column `col` on, biased and activated: all that is left of
    `finish` but the residual."""
    if finish.bias is not None:
        part = add_bias(part, finish.bias, col, N, WIDTH)
    return activate(part, ACTIVATION)


@triton.jit
def add_residual(x, residual, row, row_end, col, N, R: tl.constexpr, C: tl.constexpr):
    """fp32 `x` [R, C], at (row, col) of rows of N that end at `row_end`, plus what `residual` has there, if there is
    one: before `x` is rounded, so that their sum is rounded once."""
    if residual is not None:
        i = tl.arange(0, R)
        j = tl.arange(0, C)
        mask = (row + i < row_end)[:, None] & (col + j < N)[None, :]
        # Offsets inside the block are int32, which takes fewer registers.
        place = residual + tl.cast(row, tl.int64) * N + col
        x += tl.load(place + i[:, None] * N + j[None, :], mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def row_squares(value, col, N, WIDTH: tl.constexpr):
    """Of each row of fp32 `value` [*, WIDTH] the sum of the squares, but for columns outside of N."""
    squares = value * value
    # On NVIDIA masks for every tile take registers: split tiles of 128 x 256 would then need more than there are
    # (255), and need 206. On AMD a branch takes more than the masks do.
    if (not _INTERPRETED and target_info.is_hip()) or col + WIDTH > N:
        squares = tl.where((col + tl.arange(0, WIDTH) < N)[None, :], squares, 0.0)
    return tl.sum(squares, axis=1)


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """fp32 values, or such as are rounded already, as DTYPE, to nearest, ties to even."""
    return value.to(DTYPE)


@triton.jit
def partial_sum(part, DTYPE: tl.constexpr):
    """This rank's term of a sum over ranks, of an fp32 block of its product: rounded once to DTYPE, in which terms
    travel. An owner adds its own term as it would have travelled, or a row's bits would depend on who owns the row."""
    return rounded(part, DTYPE)


@triton.jit
def store_block(
    c, row, col, value, M, N, stride_m, stride_n, C_HOW: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """`value` [R, C] to (row, col) of an output [M, N]; nothing outside is touched."""
    if C_HOW == _POINTER:
        i = row + tl.arange(0, R)
        j = col + tl.arange(0, C)
        offsets = i.to(tl.int64)[:, None] * stride_m + j.to(tl.int64)[None, :] * stride_n
        tl.store(c + offsets, rounded(value, c.dtype.element_ty), mask=(i < M)[:, None] & (j < N)[None, :])
    elif C_HOW == _BLOCKS:
        height = c.shape[1]
        c.store([row // height, row % height, col], rounded(value, c.dtype).reshape((1, R, C)))
    else:
        c.store([row, col], rounded(value, c.dtype))


@triton.jit
def store_output(
    parts, tile, row, row_end, tile_n, epoch, c, extra, context, problem,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """C = A B, finished. `extra` is an `Output`."""
    N = problem.N
    PART_N: tl.constexpr = BLOCK_N // len(parts)
    for i in tl.static_range(len(parts)):
        col = tile_n * BLOCK_N + i * PART_N
        value = finished(parts[i], extra.finish, col, N, PART_N, OPTIONS.activation)
        value = add_residual(value, extra.finish.residual, row, row_end, col, N, BLOCK_M, PART_N)
        store_block(
            c, row, col, value, row_end, N, extra.stride_m, extra.stride_n, OPTIONS.c_how, BLOCK_M, PART_N
        )  # fmt: skip


@triton.jit
def store_with_squares(
    parts, tile, row, row_end, tile_n, epoch, c, extra, context, problem,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """As `store_output`, without a residual, and of each row of the tile the sum of the squares of what is stored.
    `extra` is an `OutputWithSquares`."""
    M, N = problem.M, problem.N
    PART_N: tl.constexpr = BLOCK_N // len(parts)
    DTYPE: tl.constexpr = c.dtype.element_ty if OPTIONS.c_how == _POINTER else c.dtype
    sums = tl.zeros((BLOCK_M,), tl.float32)
    for i in tl.static_range(len(parts)):
        col = tile_n * BLOCK_N + i * PART_N
        value = finished(parts[i], extra.finish, col, N, PART_N, OPTIONS.activation)
        value = rounded(value, DTYPE)
        sums += row_squares(value.to(tl.float32), col, N, PART_N)
        store_block(
            c, row, col, value, row_end, N, extra.stride_m, extra.stride_n, OPTIONS.c_how, BLOCK_M, PART_N
        )  # fmt: skip
    rows = row + tl.arange(0, BLOCK_M)
    tl.store(extra.squares + tl.cast(tile_n, tl.int64) * M + rows, sums, mask=rows < row_end)
