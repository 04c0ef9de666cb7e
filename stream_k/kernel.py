"""The persistent Stream-K GEMM kernel.

Shape letters: A [M, K], B [K, N]; P programs; T tiles [BLOCK_M, BLOCK_N], of which the first T_s are split.

Every program does its share of the split tiles first (`stream_k.schedule` has the closed form and its tests):
one contributing segment, whose fp32 partial goes to the program's own workspace tile, then the segments that
finish a tile, adding the partials of lower-numbered programs in ascending order, so the bits are the same on
every run. Then it walks whole tiles, P apart. Split tiles come first so that the wait of a fix-up (3 to 5 us)
hides behind the whole ones.

A finished tile goes to EPILOGUE, and after a program's tiles comes CONSUMER; both are jit functions handed
over as constexprs:

    EPILOGUE(parts, tile, tile_m, tile_n, epoch, c, extra, context, problem, WORLD, BLOCK_M, BLOCK_N, OPTIONS)
    CONSUMER(epoch, extra, context, problem, WORLD, BLOCK_M, BLOCK_N, GROUP_M, OPTIONS)

`parts` is a tuple of SUBTILES fp32 blocks [BLOCK_M, BLOCK_N / SUBTILES], left to right. `c` is the output as
a descriptor or a pointer, `extra` a tuple of pointers and integers that the pair understands, `context` the
one of `pyrocshmem.signal`, `problem` the tuple (M, N, K, iterations, num_split_tiles, num_split_programs,
num_gemm_programs), OPTIONS a tuple of constants. Programs from `num_gemm_programs` up have no tiles of their
own: that is where a consumer beside the GEMM runs.

A and B are read in one of three ways each: ROW, a descriptor of a matrix with contiguous rows; COLUMN, a
descriptor of its transpose; POINTER, any strides at all (sizes that TMA can't address come here).

Measured (sm_90, Triton 3.6, 2026-11-21): 128 x 256 x 64, 8 warps, 4 stages, two sub-tiles, FLATTEN: 165
registers, 229,408 B of shared memory, 625 us against cuBLAS' 630 at 8192 x 8192 x 3584. With SPLIT the fp32
fix-up needs four sub-tiles to fit beside the stages.
"""

import triton
import triton.language as tl

from pyrocshmem import signal, status

ROW = 0
COLUMN = 1
POINTER = 2

_COLUMN = tl.constexpr(COLUMN)
_POINTER = tl.constexpr(POINTER)
_FIX_UP = tl.constexpr(int(status.Op.FIX_UP))


@triton.jit
def tile_coords(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Grouped order: GROUP_M tile rows at a time, column by column, so that a wave re-reads little of A and
    B.

    Example: 4 x 2 tiles, GROUP_M 2: (0,0) (1,0) (0,1) (1,1) (2,0) (3,0) (2,1) (3,1).
    """
    width = GROUP_M * tiles_n
    first = tile // width * GROUP_M
    size = min(tiles_m - first, GROUP_M)
    return first + tile % width % size, tile % width // size


@triton.jit
def program_range(program, iterations, num_split_tiles, num_split_programs):
    """[lo, hi) of the split iterations of `program`: the first `extra` programs have one more than the
    others."""
    total = num_split_tiles * iterations
    base = total // num_split_programs
    extra = total % num_split_programs
    lo = program * base + min(program, extra)
    return lo, lo + base + (program < extra).to(tl.int32)


@triton.jit
def _program_of(iteration, iterations, num_split_tiles, num_split_programs):
    """The program whose range holds `iteration`: the inverse of `program_range`."""
    total = num_split_tiles * iterations
    base = total // num_split_programs
    extra = total % num_split_programs
    boundary = extra * (base + 1)
    return tl.where(iteration < boundary, iteration // (base + 1), extra + (iteration - boundary) // base)


@triton.jit
def num_finished_tiles(program, problem, tiles):
    """How many tiles `program` finishes: (split ones, split and whole ones)."""
    M, N, K, iterations, num_split_tiles, num_split_programs, num_gemm_programs = problem
    split = 0
    if program < num_split_programs:
        lo, hi = program_range(program, iterations, num_split_tiles, num_split_programs)
        split = hi // iterations - lo // iterations
    whole = tl.cdiv(max(tiles - num_split_tiles - program, 0), num_gemm_programs)
    return split, split + whole


@triton.jit
def finished_tile(i, split, program, problem):
    """The i-th of the tiles that `program` finishes, `split` of which are split ones."""
    M, N, K, iterations, num_split_tiles, num_split_programs, num_gemm_programs = problem
    tile = num_split_tiles + program + (i - split) * num_gemm_programs
    if i < split:
        lo, hi = program_range(program, iterations, num_split_tiles, num_split_programs)
        tile = lo // iterations + i
    return tile


@triton.jit
def _load_block(
    x, row, col, rows, cols, stride_row, stride_col, HOW: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Block [R, C] of a matrix [rows, cols] at (row, col), zeros outside."""
    if HOW == _POINTER:
        i = row + tl.arange(0, R)
        j = col + tl.arange(0, C)
        offsets = i.to(tl.int64)[:, None] * stride_row + j.to(tl.int64)[None, :] * stride_col
        block = tl.load(x + offsets, mask=(i < rows)[:, None] & (j < cols)[None, :], other=0.0)
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
def _split_columns(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr):
    """`acc` [BLOCK_M, BLOCK_N] as a tuple of SUBTILES (1, 2 or 4) blocks of columns, left to right."""
    if SUBTILES == 1:
        parts = (acc,)
    elif SUBTILES == 2:
        parts = _halves(acc, BLOCK_M, BLOCK_N)
    else:
        left, right = _halves(acc, BLOCK_M, BLOCK_N)
        a, b = _halves(left, BLOCK_M, BLOCK_N // 2)
        c, d = _halves(right, BLOCK_M, BLOCK_N // 2)
        parts = (a, b, c, d)  # type: ignore[assignment]
    return parts


@triton.jit
def _multiply(
    a, b, tile_m, tile_n, k_begin, k_end, problem, strides, A_HOW: tl.constexpr, B_HOW: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum of the K-iterations [k_begin, k_end) of a tile, fp32 [BLOCK_M, BLOCK_N]."""
    M, N, K, iterations, num_split_tiles, num_split_programs, num_gemm_programs = problem
    stride_am, stride_ak, stride_bk, stride_bn = strides
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(k_begin, k_end):
        x = _load_block(a, tile_m * BLOCK_M, k * BLOCK_K, M, K, stride_am, stride_ak, A_HOW, BLOCK_M, BLOCK_K)
        y = _load_block(b, k * BLOCK_K, tile_n * BLOCK_N, K, N, stride_bk, stride_bn, B_HOW, BLOCK_K, BLOCK_N)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _add_partials(
    parts, first, last, epoch, tile, workspace, fix_up_flags, context,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """`parts` plus the workspace tiles of programs [first, last), in that order."""
    PART_N: tl.constexpr = BLOCK_N // SUBTILES
    one = tl.arange(0, 1)
    for program in range(first, last):
        signal.wait(fix_up_flags + program + one, one == 0, epoch, tile, program, context, _FIX_UP, 1, "gpu")
        row = program * BLOCK_M
        if SUBTILES == 1:
            parts = (parts[0] + workspace.load([row, 0]),)
        elif SUBTILES == 2:
            parts = (parts[0] + workspace.load([row, 0]), parts[1] + workspace.load([row, PART_N]))
        else:
            parts = (
                parts[0] + workspace.load([row, 0]),
                parts[1] + workspace.load([row, PART_N]),
                parts[2] + workspace.load([row, 2 * PART_N]),
                parts[3] + workspace.load([row, 3 * PART_N]),
            )
    return parts


@triton.jit
def nothing(
    epoch, extra, context, problem, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """The consumer of a GEMM that has none."""


@triton.jit
def stream_k_kernel(
    a, b, c, workspace, fix_up_flags, extra, context, problem, strides,
    EPILOGUE: tl.constexpr, CONSUMER: tl.constexpr, OPTIONS: tl.constexpr, OP: tl.constexpr, WORLD: tl.constexpr,
    LAG: tl.constexpr, ENDS: tl.constexpr,
    SPLIT: tl.constexpr, A_HOW: tl.constexpr, B_HOW: tl.constexpr, PRECISION: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
):  # fmt: skip
    """One program of the schedule; the module's docstring has the arguments.

    LAG: what this launch writes may be written once every peer has entered the call LAG before this one;
    negative: at once. ENDS: this launch closes the call. OP: a `status.Op`, for the record of a wait that
    gave up.

    Example, P = 2, four tiles of 3 iterations, the first two split among the two programs, 3 iterations each:
    program 0 does tile 0, then tile 2; program 1 does tile 1, then tile 3. With three split tiles (9
    iterations: 5 and 4) program 0 first leaves the first two iterations of tile 1 in its workspace, then does
    tile 0; program 1 does tile 2, then the last iteration of tile 1 and adds program 0's.
    """
    M, N, K, iterations, num_split_tiles, num_split_programs, num_gemm_programs = problem
    program = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    PART_N: tl.constexpr = BLOCK_N // SUBTILES
    epoch = signal.begin(context, WORLD > 1, WORLD)
    may_write = program >= 0
    if LAG >= 0:
        may_write = signal.wait_entered(epoch - LAG, context, OP, WORLD)

    if SPLIT:
        if may_write & (program < num_split_programs):
            lo, hi = program_range(program, iterations, num_split_tiles, num_split_programs)
            last = (hi - 1) // iterations
            for i in tl.range(0, last - lo // iterations + 1, num_stages=1):
                tile = last - i
                k_begin = max(lo - tile * iterations, 0)
                k_end = min(hi - tile * iterations, iterations)
                tile_m, tile_n = tile_coords(tile, tiles_m, tiles_n, GROUP_M)
                acc = _multiply(
                    a,
                    b,
                    tile_m,
                    tile_n,
                    k_begin,
                    k_end,
                    problem,
                    strides,
                    A_HOW,
                    B_HOW,
                    PRECISION,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                )
                parts = _split_columns(acc, BLOCK_M, BLOCK_N, SUBTILES)
                if k_end < iterations:
                    for part in tl.static_range(SUBTILES):
                        workspace.store([program * BLOCK_M, part * PART_N], parts[part])
                    signal.settle()
                    signal.raise_flag(fix_up_flags + program, epoch, scope="gpu")
                else:
                    first = _program_of(tile * iterations, iterations, num_split_tiles, num_split_programs)
                    parts = _add_partials(
                        parts,
                        first,
                        program,
                        epoch,
                        tile,
                        workspace,
                        fix_up_flags,
                        context,
                        BLOCK_M,
                        BLOCK_N,
                        SUBTILES,
                    )
                    EPILOGUE(
                        parts,
                        tile,
                        tile_m,
                        tile_n,
                        epoch,
                        c,
                        extra,
                        context,
                        problem,
                        WORLD,
                        BLOCK_M,
                        BLOCK_N,
                        OPTIONS,
                    )

    if may_write & (program < num_gemm_programs):
        for tile in tl.range(
            num_split_tiles + program, tiles_m * tiles_n, num_gemm_programs, flatten=FLATTEN
        ):
            tile_m, tile_n = tile_coords(tile, tiles_m, tiles_n, GROUP_M)
            acc = _multiply(
                a,
                b,
                tile_m,
                tile_n,
                0,
                iterations,
                problem,
                strides,
                A_HOW,
                B_HOW,
                PRECISION,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
            parts = _split_columns(acc, BLOCK_M, BLOCK_N, SUBTILES)
            EPILOGUE(
                parts,
                tile,
                tile_m,
                tile_n,
                epoch,
                c,
                extra,
                context,
                problem,
                WORLD,
                BLOCK_M,
                BLOCK_N,
                OPTIONS,
            )

    CONSUMER(epoch, extra, context, problem, WORLD, BLOCK_M, BLOCK_N, GROUP_M, OPTIONS)
    if ENDS:
        signal.end(context, epoch)


@triton.jit
def consumer_kernel(
    extra, context, problem, CONSUMER: tl.constexpr, OPTIONS: tl.constexpr, WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """A consumer on its own, in the stream after the GEMM whose call it closes."""
    epoch = signal.begin(context, False, WORLD)
    CONSUMER(epoch, extra, context, problem, WORLD, BLOCK_M, BLOCK_N, GROUP_M, OPTIONS)
    signal.end(context, epoch)
