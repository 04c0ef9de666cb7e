"""`stream_k.local_gemm.kernel` for products alone, of which there are many sizes: one machine code for all, and
another where blocks of B are fetched ahead.

While the launch before it still runs, each program may already ask L2 for the first blocks of B that it will read. That
launch may still be writing them: nothing is read here, and L2 is where all of a device's reads and writes meet.

Triton compiles a kernel anew for integer arguments that are 1 or that 16 divides. For integers in a tuple that can't be
switched off; so here `problem` is passed in its parts. In the main loop none of them matters (the same registers and
shared memory on sm_90). Where consumers run in the same kernel, their wide accesses do depend on what divides N.
"""

import triton
import triton.language as tl

from pyrocshmem.calls.tensors import COLUMN
from pyrocshmem.collectives.order import Problem, tile_coords
from pyrocshmem.stream_k.local_gemm.kernel import run_program
from pyrocshmem.stream_k.local_gemm.mainloop import ask_l2

_UNSPECIALIZED = (
    "M", "N", "K", "iterations", "num_split_tiles", "num_split_programs", "cohort",
    "num_gemm_programs", "group", "b_place", "b_pitch", "blocks_ahead",
)  # fmt: skip
_COLUMN = tl.constexpr(COLUMN)
_LINE_BYTES = tl.constexpr(128)


@triton.jit
def _fetch_ahead(
    b, pitch, blocks, M, N, K, group, B_HOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Ask L2 for the first `blocks` blocks of B of this program's first tile. pitch: elements between rows of B, or, of
    a B_HOW of COLUMN, between columns."""
    ELEMENTS: tl.constexpr = _LINE_BYTES * 8 // b.dtype.element_ty.primitive_bitwidth
    # A block is `ROWS` rows, or columns, of `LENGTH` elements one after another.
    ROWS: tl.constexpr = BLOCK_N if B_HOW == _COLUMN else BLOCK_K
    LENGTH: tl.constexpr = BLOCK_K if B_HOW == _COLUMN else BLOCK_N
    LINES: tl.constexpr = (LENGTH + ELEMENTS - 1) // ELEMENTS
    _, tile_n = tile_coords(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), group)
    lanes = tl.arange(0, ROWS * LINES)
    for k in range(0, blocks):
        row, column = lanes // LINES + k * BLOCK_K, lanes % LINES * ELEMENTS + tile_n * BLOCK_N
        rows, columns = K, N
        if B_HOW == _COLUMN:
            row, column = lanes // LINES + tile_n * BLOCK_N, lanes % LINES * ELEMENTS + k * BLOCK_K
            rows, columns = N, K
        inside = (row < rows) & (column < columns)
        ask_l2(b + row.to(tl.int64) * pitch + column, inside)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def gemm_kernel(
    a, b, c, workspace, fix_up_flags, extra, context, M, N, K, iterations, num_split_tiles, num_split_programs,
    cohort, num_gemm_programs, group, strides, b_place, b_pitch, blocks_ahead, events,
    EPILOGUE: tl.constexpr, ANNOUNCE: tl.constexpr, CONSUMER: tl.constexpr, OPTIONS: tl.constexpr,
    OP: tl.constexpr, WORLD: tl.constexpr,
    LAG: tl.constexpr, ENDS: tl.constexpr, PEERS: tl.constexpr, GATHERS: tl.constexpr, SUMS: tl.constexpr,
    SPLIT: tl.constexpr, SEPARATE: tl.constexpr, A_HOW: tl.constexpr, B_HOW: tl.constexpr, ALONG: tl.constexpr,
    FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SUBTILES: tl.constexpr,
):  # fmt: skip
    """`run_program`, without `gathered` and `arrived`. b_place, b_pitch: where B lies, and the elements between
    its rows, or columns, of which `blocks_ahead` blocks are fetched ahead; None: none is."""
    if b_place is not None:
        _fetch_ahead(b_place, b_pitch, blocks_ahead, M, N, K, group, B_HOW, BLOCK_M, BLOCK_N, BLOCK_K)
    problem = Problem(
        M, N, K, iterations, num_split_tiles, num_split_programs, cohort, num_gemm_programs, group
    )
    run_program(
        a, None, b, c, workspace, fix_up_flags, None, extra, context, problem, strides, events,
        EPILOGUE, ANNOUNCE, CONSUMER, OPTIONS, OP, WORLD, LAG, ENDS, PEERS, GATHERS, SUMS, SPLIT, SEPARATE, A_HOW,
        B_HOW, ALONG, FLATTEN, BLOCK_M, BLOCK_N, BLOCK_K, SUBTILES,
    )  # fmt: skip
