"""Which tile, and which rows, come when: the part of `stream_k.local_gemm.schedule` that kernels compute for
themselves.

Shape letters: M rows of A and of the whole result; R ranks; P programs; tiles of [BLOCK_M, BLOCK_N].

Ops that hand rows to ranks cut the M rows into R blocks, as `torch.tensor_split` does: the first M % R blocks
have a row more. Tiles are counted from the first row of each block, so that none straddles two of them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pyrocshmem import counts


class Problem(NamedTuple):
    """The sizes of a GEMM and its schedule (`stream_k.local_gemm.schedule`): numbers on the host and in a kernel.

    M, N, K: of the whole result and the inner size. iterations: steps of BLOCK_K along K of a tile. num_split_tiles,
    num_split_programs: the tiles that are cut along K, and the programs that share them. cohort: how many of these work
    in step. num_gemm_programs: those that have tiles. group: as for `tile_coords`.
    """

    M: Any
    N: Any
    K: Any
    iterations: Any
    num_split_tiles: Any
    num_split_programs: Any
    cohort: Any
    num_gemm_programs: Any
    group: Any

    def packed(self) -> "Problem":
        """As a kernel gets it, which is compiled for any number of rows and any schedule (`pyrocshmem.counts`)."""
        of_rows = (
            self.num_split_tiles,
            self.num_split_programs,
            self.cohort,
            self.num_gemm_programs,
            self.group,
        )
        return Problem(counts.packed(self.M), self.N, self.K, self.iterations, *map(counts.packed, of_rows))


@triton.jit
def unpacked(problem):
    """The `Problem` that came packed."""
    return Problem(
        counts.unpacked(problem.M), problem.N, problem.K, problem.iterations, counts.unpacked(problem.num_split_tiles),
        counts.unpacked(problem.num_split_programs), counts.unpacked(problem.cohort),
        counts.unpacked(problem.num_gemm_programs), counts.unpacked(problem.group),
    )  # fmt: skip


@triton.jit
def tile_coords(tile, tiles_m, tiles_n, group):
    """Grouped order: `group` tile rows at a time, column by column, so that a wave re-reads little of A and B.

    Example: 4 x 2 tiles, groups of 2: (0,0) (1,0) (0,1) (1,1) (2,0) (3,0) (2,1) (3,1).
    """
    width = group * tiles_n
    first = tile // width * group
    size = min(tiles_m - first, group)
    return first + tile % width % size, tile % width // size


@triton.jit
def program_range(program, problem):
    """[lo, hi) of the iterations of its row of split tiles, one of each column, that `program` does; the first `extra`
    cohorts have one more."""
    turn = program // problem.cohort
    base, extra = _share(problem)
    lo = turn * base + min(turn, extra)
    return lo, lo + base + (turn < extra).to(tl.int32)


@triton.jit
def cohort_of(iteration, problem):
    """The cohort whose share holds `iteration`: the inverse of `program_range`."""
    base, extra = _share(problem)
    longer = extra * (base + 1)
    return tl.where(iteration < longer, iteration // (base + 1), extra + (iteration - longer) // base)


@triton.jit
def _share(problem):
    """(iterations of a cohort, how many cohorts have one more)."""
    iterations = problem.num_split_tiles // problem.cohort * problem.iterations
    cohorts = problem.num_split_programs // problem.cohort
    return iterations // cohorts, iterations % cohorts


@triton.jit
def first_whole(program, problem):
    """The first tile that `program` does as a whole: round robin, from the first program that has no share on."""
    turn = program + problem.num_gemm_programs - problem.num_split_programs
    return problem.num_split_tiles + turn % problem.num_gemm_programs


@triton.jit
def num_finished_tiles(program, problem, tiles):
    """How many of `tiles` tiles `program` finishes: (split ones, all)."""
    iterations = problem.iterations
    split = 0
    if program < problem.num_split_programs:
        lo, hi = program_range(program, problem)
        split = hi // iterations - lo // iterations
    whole = tl.cdiv(max(tiles - first_whole(program, problem), 0), problem.num_gemm_programs)
    return split, split + whole


@triton.jit
def finished_tile(i, split, program, problem):
    """The i-th of the tiles that `program` finishes, the first `split` of which are split ones."""
    tile = first_whole(program, problem) + (i - split) * problem.num_gemm_programs
    if i < split:
        lo, hi = program_range(program, problem)
        tile = (lo // problem.iterations + i) * problem.cohort + program % problem.cohort
    return tile


@triton.jit
def block_start(block, M, WORLD: tl.constexpr):
    """First row of row block `block`, a number or a block of numbers.

    Example, M = 10, R = 4: blocks of 3 3 2 2 rows, which start at 0 3 6 8.
    """
    extra = M % WORLD
    return block * (M // WORLD) + tl.where(block < extra, block, extra)


@triton.jit
def block_size(block, M, WORLD: tl.constexpr):
    """Rows of row block `block`."""
    return M // WORLD + tl.where(block < M % WORLD, 1, 0)


@triton.jit
def block_tiles(M, WORLD: tl.constexpr, BLOCK_M: tl.constexpr):
    """Tile rows of the largest row block; every block counts as many, so that all ranks number tiles alike."""
    return tl.cdiv(tl.cdiv(M, WORLD), BLOCK_M)


@triton.jit
def peer_row(tile_m, rank, M, WORLD: tl.constexpr, BLOCK_M: tl.constexpr):
    """Row of A where tile row `tile_m` starts, of those that `rank` computes for its peers: block after block, the
    neighbour's first, so that ranks don't all send to the same one.

    Example, rank 0 of 3, M = 8, BLOCK_M = 2: blocks start at 0 3 6 and have two tile rows each, so 3 5, then 6 8.
    """
    tiles = block_tiles(M, WORLD, BLOCK_M)
    block = (rank + 1 + tile_m // tiles) % WORLD
    return block_start(block, M, WORLD) + tile_m % tiles * BLOCK_M
