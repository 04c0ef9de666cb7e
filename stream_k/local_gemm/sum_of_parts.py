"""The second kernel of a product whose tiles are cut into parts along K: it adds the parts (`split="separate"`).

A program that finishes a tile itself adds the others' partials one after another, while the rest of the device has
nothing to do. Here all of it adds, and nobody waits for a flag; but all partials go through memory. So it is for small
tiles: products of few rows and columns, whose time is that of reading B.

Shapes: partials fp32 [P * T, BLOCK_M, BLOCK_N], the first parts of the T tiles, then their second ones, and so on. They
are added in that order, whatever runs when, so that the bits are the same on every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pyrocshmem import dependent_launch, trace
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.tensors import POINTER
from pyrocshmem.collectives.epilogue import Finish, add_residual, finished, store_block
from pyrocshmem.collectives.order import tile_coords
from pyrocshmem.stream_k.local_gemm.product import Product

_POINTER = tl.constexpr(POINTER)
# Loads on their way at once.
_AT_ONCE = tl.constexpr(4)
# Elements of a program: 16 bytes of a part a thread.
_ELEMENTS, _WARPS = 512, 4


@triton.jit(do_not_specialize=("M", "N", "num_tiles", "num_parts", "group"))
def sum_parts_kernel(
    partials, c, finish, M, N, num_tiles, num_parts, group, stride_m, stride_n, events,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Rows [r ROWS, (r + 1) ROWS) of tile t, program t BLOCK_M / ROWS + r: C = the sum of the parts, finished.

    finish: a `collectives.epilogue.Finish`. c, [M, N], is written by pointers.
    """
    dependent_launch.wait_for_previous()
    dependent_launch.allow_next()
    PROGRAMS: tl.constexpr = BLOCK_M // ROWS
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    tile = tl.program_id(0) // PROGRAMS
    first = tl.program_id(0) % PROGRAMS * ROWS
    trace.mark(events, trace.REDUCE, tile)
    tile_m, tile_n = tile_coords(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), group)
    row, column = tile_m * BLOCK_M + first, tile_n * BLOCK_N
    if row < M:
        inside = (first + tl.arange(0, ROWS))[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        place = partials + tl.cast(tile, tl.int64) * SIZE + inside
        step = tl.cast(num_tiles, tl.int64) * SIZE
        total = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for begin in tl.range(0, num_parts, _AT_ONCE, num_stages=1):
            loaded = ()
            for i in tl.static_range(_AT_ONCE):
                there = tl.full((ROWS, BLOCK_N), begin + i, tl.int32) < num_parts
                loaded = loaded + (tl.load(place + (begin + i) * step, mask=there, other=0.0),)  # type: ignore[assignment]
            for i in tl.static_range(_AT_ONCE):
                total += loaded[i]
        value = finished(total, finish, column, N, BLOCK_N, ACTIVATION)
        value = add_residual(value, finish.residual, row, M, column, N, ROWS, BLOCK_N)
        store_block(c, row, column, value, M, N, stride_m, stride_n, _POINTER, ROWS, BLOCK_N)
    trace.mark(events, trace.END, -1)


class SumOfParts:
    """The launch behind that of `product`, which leaves its parts in `partials`, for results like `out`. activation:
    its number."""

    def __init__(self, product: Product, partials: torch.Tensor, out: torch.Tensor, activation: int) -> None:
        schedule, config = product.schedule, product.config
        rows = min(config.block_m, max(1, _ELEMENTS // config.block_n))
        constants = {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "ROWS": rows,
            "ACTIVATION": activation,
        }
        programs = schedule.num_split_tiles * config.block_m // rows
        self.partials = partials
        parts = (schedule.num_split_tiles, schedule.num_cohorts, config.group_m)
        self.sizes = (product.M, product.N, *parts, *out.stride())
        self.launch = Launch(sum_parts_kernel, programs, constants, _WARPS, 1, chained=True)

    def compile(self, finish: Finish, out: torch.Tensor) -> None:
        """Compile and load the kernel for tensors of this kind."""
        self.launch.compile(self._arguments(finish, out))

    def run(self, finish: Finish, out: torch.Tensor) -> None:
        """Enqueue it for tensors of this kind."""
        self.launch(self._arguments(finish, out))

    def _arguments(self, finish: Finish, out: torch.Tensor) -> tuple[Any, ...]:
        return self.partials, out, finish, *self.sizes
