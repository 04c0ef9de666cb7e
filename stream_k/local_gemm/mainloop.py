"""The main loop: blocks of A and B, read and multiplied.

How an operand is read (A_HOW, B_HOW):
  ROW, COLUMN   by a tensor descriptor (TMA) of contiguous rows, or of contiguous columns
  POINTER       by pointers, any strides
  MASKED        A alone, by pointers, where K is whole blocks: rows outside, for which TMA would fetch zeros, cost
                nothing
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language import target_info

from pyrocshmem import target
from pyrocshmem.calls.tensors import COLUMN, MASKED, POINTER
from pyrocshmem.collectives import pair_sums
from pyrocshmem.collectives.float8 import BLOCK
from pyrocshmem.stream_k.local_gemm.scales import BLOCKS, TILES

_COLUMN = tl.constexpr(COLUMN)
_POINTER = tl.constexpr(POINTER)
_MASKED = tl.constexpr(MASKED)
_INTERPRETED = tl.constexpr(target.interpreted())
_SCALED = tl.constexpr(BLOCK)
_TILES = tl.constexpr(TILES)
_BLOCKS = tl.constexpr(BLOCKS)
# Of scales of blocks: how many a sector of L2 has, 32 bytes, how many steps ahead L2 is asked for them, and for tiles
# of how many elements at most.
_SECTOR, _AHEAD, _SMALL_TILE = tl.constexpr(8), tl.constexpr(8), tl.constexpr(64 * 128)


class Along(NamedTuple):
    """Constants of the sum along K. precision: of `tl.dot`. blocks: into how many parts of one length, each summed from
    zero, K is cut; their sums are added as a tree of neighbours (`collectives.pair_sums`). together: how many of them
    grow in one loop. scaled: TILES or BLOCKS of `stream_k.local_gemm.scales`, of 8-bit operands, else 0. promoted:
    whether the product of each step along K, of at most BLOCK, is added in fp32 outside of the matrix unit, which keeps
    fewer bits of a sum of 8-bit products."""

    precision: str
    blocks: int = 1
    together: int = 1
    scaled: int = 0
    promoted: bool = False


class Strides(NamedTuple):
    """Elements from one row, and one column, of A and of B to the next, where they are read by pointers; descriptors
    have their own.

    Of 8-bit operands, the scale of element (i, k) of A is scale_a[i scale_am + k' scale_ak], that of (k, j) of B
    scale_b[k' scale_bk + j' scale_bn]. k', j': of BLOCKS of `stream_k.local_gemm.scales`, k and j in blocks of BLOCK;
    of TILES, which are multiplied when all of K is summed, scale_ak and scale_bk are 0, and j' is j. They are in no
    tuple of their own: Triton 3.6 loses the constants of a tuple in a tuple."""

    am: Any
    ak: Any
    bk: Any
    bn: Any
    scale_a: Any = None
    scale_b: Any = None
    scale_am: Any = None
    scale_ak: Any = None
    scale_bk: Any = None
    scale_bn: Any = None


@triton.jit
def _load_block(
    x, row, col, rows, cols, stride_row, stride_col, HOW: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Block [R, C] at (row, col) of a matrix [rows, cols], zeros outside; MASKED: no column may be outside."""
    if HOW == _POINTER or HOW == _MASKED:
        i = row + tl.arange(0, R)
        j = col + tl.arange(0, C)
        offsets = i.to(tl.int64)[:, None] * stride_row + j.to(tl.int64)[None, :] * stride_col
        inside = (i < rows)[:, None]
        if HOW == _POINTER:
            inside = inside & (j < cols)[None, :]
        block = tl.load(x + offsets, mask=inside, other=0.0)
    elif HOW == _COLUMN:
        block = x.load([col, row]).T
    else:
        block = x.load([row, col])
    return block


@triton.jit
def _halves(x, R: tl.constexpr, C: tl.constexpr):
    """The left and the right half of a block [R, C]."""
    return x.reshape((R, 2, C // 2)).permute(0, 2, 1).split()


@triton.jit
def split_columns(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr):
    """`acc` [BLOCK_M, BLOCK_N] as a tuple of SUBTILES (1, 2, 4 or 8) blocks of columns, left to right."""
    if SUBTILES == 1:
        parts = (acc,)
    elif SUBTILES == 2:
        parts = _halves(acc, BLOCK_M, BLOCK_N)
    else:
        left, right = _halves(acc, BLOCK_M, BLOCK_N)
        first = split_columns(left, BLOCK_M, BLOCK_N // 2, SUBTILES // 2)
        parts = first + split_columns(right, BLOCK_M, BLOCK_N // 2, SUBTILES // 2)
    return parts


@triton.jit
def _in_rows(y, R: tl.constexpr, C: tl.constexpr):
    """A block [R, C] that was read as columns, laid out anew in shared memory as rows, for products by FMA on NVIDIA.

    Left as it is, a warp's 32 lanes read 32 columns that begin in one bank: 8 times as many cycles as they need, and a
    fifth of the speed (docs/log.md). Halves that are taken apart and joined again are in the order of rows; the casts
    keep the compiler from seeing that nothing else happens.
    """
    even, odd = y.reshape((R, C // 2, 2)).split()
    both = tl.join(even.to(tl.int32, bitcast=True), odd.to(tl.int32, bitcast=True))
    return both.reshape((R, C)).to(tl.float32, bitcast=True)


@triton.jit
def multiply(
    a, b, row, rows, tile_n, k_begin, k_end, problem, strides, A_HOW: tl.constexpr, B_HOW: tl.constexpr,
    ALONG: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum over the K-iterations [k_begin, k_end) of the tile at row `row` of `a`, which has `rows` rows, and tile
    column `tile_n` of `b`: fp32 [BLOCK_M, BLOCK_N]. Where ALONG has several blocks, the iterations must be all."""
    if ALONG.blocks == 1:
        acc = _chain(
            a, b, row, rows, tile_n, 0, problem.K, k_begin, k_end, problem, strides, A_HOW, B_HOW, ALONG,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        acc = _tree(
            a, b, row, rows, tile_n, 0, ALONG.blocks, problem, strides, A_HOW, B_HOW, ALONG, BLOCK_M, BLOCK_N, BLOCK_K
        )  # fmt: skip
    if ALONG.scaled == _TILES:
        of_rows, of_columns = _tile_scales(strides, row, rows, tile_n, problem.N, BLOCK_M, BLOCK_N)
        acc = acc * of_rows[:, None] * of_columns[None, :]
    return acc


@triton.jit
def _tree(
    a, b, row, rows, tile_n, FIRST: tl.constexpr, COUNT: tl.constexpr, problem, strides, A_HOW: tl.constexpr,
    B_HOW: tl.constexpr, ALONG: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sum over COUNT blocks of K, a power of two, from number FIRST on. In the order of `pair_sums.of_terms`, but
    a block is multiplied when it is added, or with its nearest neighbours, so that few sums take registers at once."""
    if ALONG.together >= COUNT:
        acc = _chains(
            a, b, row, rows, tile_n, FIRST, COUNT, problem, strides, A_HOW, B_HOW, ALONG, BLOCK_M, BLOCK_N, BLOCK_K
        )  # fmt: skip
    else:
        HALF: tl.constexpr = COUNT // 2
        acc = _tree(
            a, b, row, rows, tile_n, FIRST, HALF, problem, strides, A_HOW, B_HOW, ALONG, BLOCK_M, BLOCK_N, BLOCK_K
        )  # fmt: skip
        acc += _tree(
            a, b, row, rows, tile_n, FIRST + HALF, HALF, problem, strides, A_HOW, B_HOW, ALONG, BLOCK_M, BLOCK_N,
            BLOCK_K,
        )  # fmt: skip
    return acc


@triton.jit
def _chain(
    a, b, row, rows, tile_n, first, last, k_begin, k_end, problem, strides, A_HOW: tl.constexpr, B_HOW: tl.constexpr,
    ALONG: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sum over the iterations [k_begin, k_end) of the block [first, last) of K, one behind the other."""
    if ALONG.promoted:
        acc = _promoted_chain(
            a, b, row, rows, tile_n, last, k_begin, k_end, problem, strides, A_HOW, B_HOW, ALONG, BLOCK_M, BLOCK_N,
            BLOCK_K,
        )  # fmt: skip
    else:
        acc = _zeros(BLOCK_M, BLOCK_N)
        for k in range(k_begin, k_end):
            acc = _add_step(
                acc, a, b, row, rows, tile_n, first + k * BLOCK_K, last, problem, strides, A_HOW, B_HOW, ALONG,
                BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    return _upright(acc, BLOCK_M, BLOCK_N)


@triton.jit
def _promoted_chain(
    a, b, row, rows, tile_n, last, k_begin, k_end, problem, strides, A_HOW: tl.constexpr, B_HOW: tl.constexpr,
    ALONG: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`_chain` of steps whose products are added in fp32, each times its factor.

    Of two steps, the first one's product is added while the matrix unit makes the second one's, which is added in the
    next turn: Triton lets a product run on that nobody reads in the turn that made it (wgmma)."""
    # Where tiles are small a turn takes less time than memory takes to answer.
    ASKS: tl.constexpr = (
        ALONG.scaled == _BLOCKS
        and BLOCK_M * BLOCK_N <= _SMALL_TILE
        and not _INTERPRETED
        and not target_info.is_hip()
    )
    if ASKS:
        _ask_for_scales(strides, row, rows, tile_n, k_begin, k_end, _AHEAD, BLOCK_M, BLOCK_N)
    acc = _zeros(BLOCK_M, BLOCK_N)
    late, late_factor = acc, _factor(strides, row, 0, tile_n, 0, last, ALONG, BLOCK_M, BLOCK_N)
    factor = _factor(strides, row, rows, tile_n, k_begin * BLOCK_K, last, ALONG, BLOCK_M, BLOCK_N)
    behind = tl.cdiv(last, BLOCK_K)
    for k in range(k_begin, k_end, 2):
        rows_late, at_late = _step(k + 1, k_end, rows, behind, BLOCK_K)
        rows_ahead, at_ahead = _step(k + 2, k_end, rows, behind, BLOCK_K)
        if ASKS:
            _ask_for_scales(strides, row, rows, tile_n, k + _AHEAD, k_end, 2, BLOCK_M, BLOCK_N)
        product = _add_step(
            _zeros(BLOCK_M, BLOCK_N), a, b, row, rows, tile_n, k * BLOCK_K, last, problem, strides, A_HOW, B_HOW,
            ALONG, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc = _promoted(acc, late, late_factor, ALONG, BLOCK_M, BLOCK_N)
        # A factor is read a turn after it is loaded, and loaded where the one before it was read last: so it comes to
        # the register it is read from. Elsewhere it would be moved there in this turn, which waits for it.
        late_factor = _factor(strides, row, rows_late, tile_n, at_late, last, ALONG, BLOCK_M, BLOCK_N)
        late = _add_step(
            _zeros(BLOCK_M, BLOCK_N), a, b, row, rows_late, tile_n, at_late, last, problem, strides, A_HOW, B_HOW,
            ALONG, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc = _promoted(acc, product, factor, ALONG, BLOCK_M, BLOCK_N)
        factor = _factor(strides, row, rows_ahead, tile_n, at_ahead, last, ALONG, BLOCK_M, BLOCK_N)
    return _promoted(acc, late, late_factor, ALONG, BLOCK_M, BLOCK_N)


@triton.jit
def _step(k, k_end, rows, behind, BLOCK_K: tl.constexpr):
    """(rows of A, its column) of step k; from k_end on no rows, and a column behind K, where there are zeros."""
    there = k < k_end
    return tl.where(there, rows, 0), tl.where(there, k, behind) * BLOCK_K


@triton.jit
def _promoted(acc, product, factor, ALONG: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`acc` and the product of a step, each row times its factor: with scales of blocks in this place, on NVIDIA. Put
    off, it would keep the product in registers that the next one needs."""
    if ALONG.scaled == _BLOCKS:
        of_rows, of_columns = factor
        factors = of_rows * of_columns
        if BLOCK_M < 64 and BLOCK_N >= 64:
            factors = factors[None, :]
        else:
            factors = factors[:, None]
        if _INTERPRETED or target_info.is_hip():
            acc += product * factors
        else:
            acc = tl.inline_asm_elementwise(
                "fma.rn.f32 $0, $1, $2, $3;",
                "=f,f,f,f",
                [product, factors, acc],
                dtype=tl.float32,
                is_pure=False,
                pack=1,
            )
    else:
        acc += product
    return acc


@triton.jit
def _chains(
    a, b, row, rows, tile_n, FIRST: tl.constexpr, COUNT: tl.constexpr, problem, strides, A_HOW: tl.constexpr,
    B_HOW: tl.constexpr, ALONG: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sum of COUNT blocks of K from number FIRST on, which grow side by side: a loop for each would fill and drain
    its stages as often."""
    length = problem.K // ALONG.blocks
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (_zeros(BLOCK_M, BLOCK_N),)  # type: ignore[assignment]
    for k in range(0, tl.cdiv(length, BLOCK_K)):
        grown = ()
        for j in tl.static_range(COUNT):
            first = (FIRST + j) * length
            acc = _add_step(
                sums[j], a, b, row, rows, tile_n, first + k * BLOCK_K, first + length, problem, strides, A_HOW, B_HOW,
                ALONG, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            grown = grown + (acc,)  # type: ignore[assignment]
        sums = grown
    return _upright(pair_sums.of_terms(sums), BLOCK_M, BLOCK_N)


# wgmma, which reads both operands from shared memory, has 64 rows or more: for fewer, columns are its rows.


@triton.jit
def _zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A sum that grows, transposed where that is multiplied."""
    if BLOCK_M < 64 and BLOCK_N >= 64:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    return acc


@triton.jit
def _upright(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A sum that has grown, [BLOCK_M, BLOCK_N]."""
    if BLOCK_M < 64 and BLOCK_N >= 64:
        acc = acc.T
    return acc


@triton.jit
def _add_step(
    acc, a, b, row, rows, tile_n, at, last, problem, strides, A_HOW: tl.constexpr, B_HOW: tl.constexpr,
    ALONG: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`acc` and the product of the columns of A from `at` on, before `last`, with those rows of B."""
    TRANSPOSED: tl.constexpr = BLOCK_M < 64 and BLOCK_N >= 64
    FMA_OF_COLUMNS: tl.constexpr = (
        B_HOW == _COLUMN
        and ALONG.precision == "ieee"
        and not TRANSPOSED
        and not _INTERPRETED
        and not target_info.is_hip()
    )
    x = _load_block(a, row, at, rows, last, strides.am, strides.ak, A_HOW, BLOCK_M, BLOCK_K)
    y = _load_block(b, at, tile_n * BLOCK_N, last, problem.N, strides.bk, strides.bn, B_HOW, BLOCK_K, BLOCK_N)
    if FMA_OF_COLUMNS and y.dtype == tl.float32:
        y = _in_rows(y, BLOCK_K, BLOCK_N)
    if TRANSPOSED:
        left, right = y.T, x.T
    else:
        left, right = x, y
    return tl.dot(left, right, acc, input_precision=ALONG.precision)


@triton.jit
def _tile_scales(strides, row, rows, tile_n, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(of each row of A, of each column of B) of a tile."""
    i = row + tl.arange(0, BLOCK_M)
    j = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    of_rows = tl.load(strides.scale_a + i.to(tl.int64) * strides.scale_am, mask=i < rows, other=0.0)
    return of_rows, tl.load(strides.scale_b + j.to(tl.int64) * strides.scale_bn, mask=j < N, other=0.0)


@triton.jit
def _ask_for_scales(
    strides, row, rows, tile_n, k, k_end, STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Ask L2 for the scales of blocks of a tile at steps [k, k + STEPS), before k_end. Of A only where those of a
    step's rows lie one behind another, as the BLAS wants them and `quantize` makes them; elsewhere a sector has those
    of eight steps."""
    # The first half of these asks for A's, each for a sector of a step, the second one for B's, each for a step's.
    SECTORS: tl.constexpr = (BLOCK_M + _SECTOR - 1) // _SECTOR
    HALF: tl.constexpr = SECTORS * STEPS
    # One for each thread at least, or several would ask the same.
    THREADS: tl.constexpr = tl.extra.cuda.num_threads()
    LANES: tl.constexpr = THREADS if THREADS > 2 * HALF else 2 * HALF
    lanes = tl.arange(0, LANES)
    of_b = lanes >= HALF
    i = row + lanes % SECTORS * _SECTOR
    step = k + tl.where(of_b, lanes - HALF, lanes // SECTORS)
    place = tl.where(
        of_b,
        strides.scale_b
        + (tile_n * BLOCK_N // _SCALED) * strides.scale_bn
        + step.to(tl.int64) * strides.scale_bk,
        strides.scale_a + i + step.to(tl.int64) * strides.scale_ak,
    )
    wanted = tl.where(of_b, lanes < HALF + STEPS, (strides.scale_am == 1) & (i < rows))
    ask_l2(place, wanted & (step < k_end))


@triton.jit
def ask_l2(places, wanted):
    """Have L2 read what is at `places`, pointers, where `wanted`. Each thread that holds a place asks: of fewer places
    than threads, several. NVIDIA alone."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        setp.ne.s32 wanted, $2, 0;
        @wanted prefetch.global.L2 [$1];
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [places, wanted.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _factor(
    strides, row, rows, tile_n, at, last, ALONG: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """(of each row of a tile, of all its columns), for the product from column `at` of A on; zeros outside. Not
    multiplied: that would wait for both. That of the columns is loaded for each row: a number that all threads share
    goes to a register that they share, which is waited for where it is loaded (sm_90)."""
    if ALONG.scaled == _BLOCKS:
        # All columns of a tile are in one block.
        tl.static_assert(BLOCK_N <= _SCALED)
        i = row + tl.arange(0, BLOCK_M)
        block = at // _SCALED
        of_rows = strides.scale_a + i.to(tl.int64) * strides.scale_am + block * strides.scale_ak
        of_columns = (
            strides.scale_b + block * strides.scale_bk + (tile_n * BLOCK_N // _SCALED) * strides.scale_bn
        )
        rows_of_b = tl.where(at < last, rows, 0)
        factor = (
            tl.load(of_rows, mask=i < rows, other=0.0),
            tl.load(of_columns + tl.zeros_like(i), mask=i < rows_of_b, other=0.0),
        )
    else:
        factor = 1.0, 1.0
    return factor
