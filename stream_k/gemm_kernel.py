"""`stream_k.kernel` for products alone, of which there are many sizes: one machine code for all.

Triton compiles a kernel anew for integer arguments that are 1 or that 16 divides. For integers in a tuple that can't be
switched off; so here `problem` is passed in its parts. In the main loop none of them matters (the same registers and
shared memory on sm_90). Where consumers run in the same kernel, their wide accesses do depend on what divides N.
"""

import triton
import triton.language as tl

from stream_k.kernel import stream_k_kernel

_PROBLEM = (
    "M", "N", "K", "iterations", "num_split_tiles", "num_split_programs", "num_gemm_programs"
)  # fmt: skip


@triton.jit(do_not_specialize=_PROBLEM)
def gemm_kernel(
    a, b, c, workspace, fix_up_flags, extra, context, M, N, K, iterations, num_split_tiles, num_split_programs,
    num_gemm_programs, strides, events,
    EPILOGUE: tl.constexpr, ANNOUNCE: tl.constexpr, CONSUMER: tl.constexpr, OPTIONS: tl.constexpr,
    OP: tl.constexpr, WORLD: tl.constexpr,
    LAG: tl.constexpr, ENDS: tl.constexpr, PEERS: tl.constexpr, GATHERS: tl.constexpr, SUMS: tl.constexpr,
    SPLIT: tl.constexpr, A_HOW: tl.constexpr, B_HOW: tl.constexpr, PRECISION: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
):  # fmt: skip
    """As `stream_k_kernel`, without `gathered` and `arrived`."""
    problem = (M, N, K, iterations, num_split_tiles, num_split_programs, num_gemm_programs)
    stream_k_kernel(
        a, None, b, c, workspace, fix_up_flags, None, extra, context, problem, strides, events,
        EPILOGUE, ANNOUNCE, CONSUMER, OPTIONS, OP, WORLD, LAG, ENDS, PEERS, GATHERS, SUMS, SPLIT, A_HOW, B_HOW,
        PRECISION, FLATTEN, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SUBTILES,
    )  # fmt: skip
