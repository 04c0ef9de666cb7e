"""Stream-K schedule: who does which K-iterations of which tile, as a pure function of a few integers.

Usage::

    schedule = make_schedule(8192, 1792, 4096, 128, 256, 64, num_programs=132)
    for segment in schedule.segments(program):
        ...                                   # accumulate iterations [k_begin, k_end) of segment.tile

M N K are the product's sizes, T its tiles, I the K-iterations of a tile, P the programs launched. The virtual
tiles are numbered 0..T-1; `tile_coords` places one in the output. The kernel recomputes all of this from
(T, I, P, T_s, P_s), so the closed form below is the contract between the two:

1. Tiles [0, T_s) are cut at K-iterations, by P_s programs, which work in cohorts of h: T_s / h columns of h tiles one
   after another, and P_s / h cohorts. Cohort c is programs [c h, (c + 1) h), each of which does one tile of a column,
   the same iterations at the same time as the others, so that what they share of A and B is read once. The cohorts
   take consecutive shares of all T_s / h * I iterations; the first `extra` shares are one iteration longer. One
   column, h = T_s, is split-K: each tile has programs of its own. h = 1 is Stream-K as it was published.
   Tiles [T_s, T) stay whole, one program each, round robin over P, from the first program that has no share on.
2. A cohort visits the columns of its share from the last to the first, then its programs do their whole tiles. Only
   the last column of a share can be left unfinished, so a program contributes before anything it may have to wait for.
3. The program that does a tile's last iterations finishes it: it adds the partials of the programs that did
   the earlier ones, h apart, in ascending order of their ids. It waits for lower ids only, so a grid larger than what
   is resident, and an interpreter that runs programs one after another, both end. With split="separate" a second
   kernel does that (`stream_k.local_gemm.sum_of_parts`), and no program waits.

Rules of `make_schedule`: tiles stay whole where waves are exact and where a tile has few iterations. Else the tiles
of the last, part-full wave (all of them, where there are fewer than programs) are cut into as many equal parts as
take the least time; one part is a whole tile. Stream-K is there to be asked for, in its two-tile form, for which the
last full wave and the remainder are cut together (Osama et al., PPoPP 2023; CUTLASS on Hopper). Cohorts are ours: as
published, programs are at different iterations of their tiles and so read different parts of A and B, which made an
iteration a quarter longer; programs of a cohort of 8 lose a twentieth (docs/schedule.md).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pyrocshmem.checks import as_integer

# A share of fewer iterations does not pay for the round trip of its partial tile through the workspace.
MIN_SPLIT_ITERS = 8
# What each part of a tile adds to the time of its finisher, in iterations: 4.3 us of 0.62 for a tile of 128 x 256 x 64,
# 2.4 of 0.37 for 128 x 128 x 64, 1.0 of 0.36 for 64 x 64 x 128 (H200, as `stream_k.choice.gemm_model` has them).
# Since a finisher's loads overlap it is less, but 2 and 3 chose no better for 98 products.
FIX_UP_ITERS = 6
# Whole tiles take an eleventh longer behind parts: their programs are out of step and share less of what they read.
OUT_OF_STEP = 11

# How much longer an iteration of a cohort takes than one of whole tiles: this over the cohort, at most ALONE (H100:
# 1.06 of 8 programs, 1.13 of 4, 1.19 of 3; H200: 1.26 of one).
IN_STEP, ALONE = 0.5, 0.26

# The same of parts that a second kernel adds, and what that kernel costs whatever the parts: 64 x 64 x 128 (H200).
SEPARATE_ITERS = 1
SEPARATE_ONCE = 8

SPLITS = ("auto", "none", "stream_k", "split_k", "separate")


@dataclass(frozen=True)
class Segment:
    """Iterations [k_begin, k_end) of one tile, done by one program without a break.

    finishing: this segment ends its tile, so its program writes the output. contributors: the programs, all of lower
    id, whose fp32 partials it adds first, in this order; empty unless finishing with k_begin > 0.
    """

    tile: int
    k_begin: int
    k_end: int
    finishing: bool
    contributors: range


@dataclass(frozen=True)
class Schedule:
    """The work of a GEMM cut into programs; see the module's docstring for the closed form.

    tiles_m, tiles_n: tiles along M and N. iters_per_tile: cdiv(K, BLOCK_K). num_programs: the launch size P.
    num_split_tiles: T_s. num_split_programs: P_s, the programs that share the split tiles. cohort: h, how many of them
    work in step.
    Raises ValueError when the numbers contradict one another (values got in the message).
    """

    tiles_m: int
    tiles_n: int
    iters_per_tile: int
    num_programs: int
    num_split_tiles: int = 0
    num_split_programs: int = 0
    cohort: int = 1

    def __post_init__(self) -> None:
        if not _are_counts(self.__dict__.values()):
            for name, value in self.__dict__.items():
                _non_negative(name, value)
        if self.cohort == 0 or self.num_split_tiles % self.cohort or self.num_split_programs % self.cohort:
            raise ValueError(
                f"cohort is {self.cohort}, allowed are divisors of {self.num_split_tiles} split tiles and of "
                f"{self.num_split_programs} split programs"
            )
        if self.num_tiles > 0 and self.num_programs == 0:
            raise ValueError(f"num_programs must be at least 1 for {self.num_tiles} tiles, got 0")
        if self.num_split_tiles > self.num_tiles:
            raise ValueError(f"num_split_tiles is {self.num_split_tiles}, allowed 0..{self.num_tiles}")
        if self.num_split_programs > self.num_programs:
            raise ValueError(
                f"num_split_programs is {self.num_split_programs}, allowed 0..{self.num_programs}"
            )
        if (self.num_split_tiles == 0) != (self.num_split_programs == 0):
            raise ValueError(
                f"{self.num_split_tiles} split tiles for {self.num_split_programs} split programs: "
                "both must be 0 or neither"
            )
        if self.split_iters < self.num_split_programs:
            raise ValueError(
                f"{self.split_iters} split iterations for {self.num_split_programs} split programs: "
                "each needs at least one"
            )

    @property
    def num_tiles(self) -> int:
        """T, the tiles of the output."""
        return self.tiles_m * self.tiles_n

    @property
    def split_iters(self) -> int:
        """The K-iterations that the split programs share."""
        return self.num_split_tiles * self.iters_per_tile

    @property
    def num_columns(self) -> int:
        """Groups of `cohort` split tiles."""
        return self.num_split_tiles // self.cohort

    @property
    def num_cohorts(self) -> int:
        """Groups of `cohort` split programs."""
        return self.num_split_programs // self.cohort

    @property
    def whole_tiles(self) -> int:
        """Tiles [T_s, T), each done by one program from first to last iteration."""
        return self.num_tiles - self.num_split_tiles

    @property
    def waves(self) -> int:
        """Rounds that whole-tile scheduling would take on these programs; the last may be partly idle."""
        return _cdiv(self.num_tiles, self.num_programs) if self.num_programs else 0

    @property
    def has_shared_tiles(self) -> bool:
        """Whether any tile is cut between two programs (equal shares of whole tiles are not cuts)."""
        return (
            self.num_split_programs > 0
            and self.iters_per_tile > 1
            and self.num_columns % self.num_cohorts != 0
        )

    @property
    def workspace_tiles(self) -> int:
        """fp32 tiles of workspace needed, slot p for program p's partial; 0 when no tile is shared."""
        return self.num_split_programs if self.has_shared_tiles else 0

    @property
    def kind(self) -> str:
        """data_parallel (no tile is shared), split_k (every split tile has programs of its own) or stream_k."""
        if not self.has_shared_tiles:
            return "data_parallel"
        return "split_k" if self.num_columns == 1 else "stream_k"

    @property
    def slower_in_step(self) -> float:
        """How much longer an iteration of a split tile takes than one of a whole tile, as a fraction of it."""
        return min(IN_STEP / self.cohort, ALONE)

    @property
    def max_iters(self) -> int:
        """Iterations of the busiest program: the length of the schedule."""
        if self.num_programs == 0:
            return 0
        # The first program of those without a share has the most whole tiles of these, program 0 of the others, and the
        # longest share.
        found = []
        for program in {0, self.num_split_programs % self.num_programs}:
            lo, hi = self.program_range(program)
            tiles = len(range(self._first_whole(program), self.num_tiles, self.num_programs))
            found.append(hi - lo + tiles * self.iters_per_tile)
        return max(found)

    def program_range(self, program: int) -> tuple[int, int]:
        """[lo, hi) of the iterations of a row of split tiles, one of each column, that `program` does; (0, 0) for one
        that has none. Raises ValueError for a negative program.
        """
        if program < 0:
            raise ValueError(f"program is {program}, allowed 0 or more")
        if program >= self.num_split_programs:
            return 0, 0
        turn = program // self.cohort
        base, extra = divmod(self.num_columns * self.iters_per_tile, self.num_cohorts)
        lo = turn * base + min(turn, extra)
        return lo, lo + base + (turn < extra)

    def segments(self, program: int) -> list[Segment]:
        """The segments of `program`, 0 <= program < num_programs, in the order in which it does them.

        Raises ValueError for a program out of range.
        """
        if not 0 <= program < self.num_programs:
            raise ValueError(f"program is {program}, allowed 0..{self.num_programs - 1}")
        iters = self.iters_per_tile
        lo, hi = self.program_range(program)
        found = []
        if lo < hi:
            place = program % self.cohort
            for column in range((hi - 1) // iters, lo // iters - 1, -1):
                first = column * iters
                k_begin, k_end = max(lo - first, 0), min(hi - first, iters)
                finishing = k_end == iters
                contributors = range(0)
                if finishing and k_begin > 0:
                    contributors = range(self._cohort_of(first) * self.cohort + place, program, self.cohort)
                found.append(Segment(column * self.cohort + place, k_begin, k_end, finishing, contributors))
        for tile in range(self._first_whole(program), self.num_tiles, self.num_programs):
            found.append(Segment(tile, 0, iters, True, range(0)))
        return found

    def finisher(self, tile: int) -> int:
        """The program that writes `tile`, 0 <= tile < num_tiles. Raises ValueError out of that range."""
        if not 0 <= tile < self.num_tiles:
            raise ValueError(f"tile is {tile}, allowed 0..{self.num_tiles - 1}")
        if tile < self.num_split_tiles:
            column, place = divmod(tile, self.cohort)
            return self._cohort_of((column + 1) * self.iters_per_tile - 1) * self.cohort + place
        return (tile - self.num_split_tiles + self.num_split_programs) % self.num_programs

    def _first_whole(self, program: int) -> int:
        """The first whole tile of `program`, if there are so many."""
        return self.num_split_tiles + (program - self.num_split_programs) % self.num_programs

    def _cohort_of(self, iteration: int) -> int:
        """The cohort whose share holds `iteration` of the columns: the inverse of `program_range`."""
        base, extra = divmod(self.num_columns * self.iters_per_tile, self.num_cohorts)
        longer = extra * (base + 1)
        if iteration < longer:
            return iteration // (base + 1)
        return extra + (iteration - longer) // base


def make_schedule(
    M: int,
    N: int,
    K: int,
    block_m: int,
    block_n: int,
    block_k: int,
    num_programs: int,
    *,
    split: str = "auto",
    group_m: int = 8,
    min_split_iters: int = MIN_SPLIT_ITERS,
) -> Schedule:
    """Choose the schedule of an M x N x K product in steps of block_m x block_n x block_k.

    num_programs: how many programs may run, as a rule the number of SMs; the schedule's own num_programs is
    never more than what has work, so it is 0 for an empty output. M, N, K may be 0.
    split: "auto" follows the module's rules; "none" keeps every tile whole; "split_k" cuts the tiles of the last,
    part-full wave into equal parts, "stream_k" those and the wave before into equal shares of cohorts, whatever it
    costs. The last two keep tiles whole, too, where there is nothing to cut (exact waves, at most `min_split_iters`
    iterations a tile, fewer than two programs a tile to cut it for, a cut that makes no program's work shorter).
    "separate": as "auto" where there is no full wave, of parts that a second kernel adds; else all tiles stay whole.
    group_m: as for `tile_coords`: programs of one column of such a group work in step where split is "stream_k".
    min_split_iters: no program's share of the split iterations is shorter than this.

    Raises TypeError for a size that is no integer, ValueError for a negative size, for a block, program or
    iteration count below 1, and for an unknown `split`.
    """
    least_1 = (block_m, block_n, block_k, num_programs, min_split_iters)
    if not _are_counts((M, N, K, *least_1)) or 0 in least_1:
        for name, size in zip(("M", "N", "K"), (M, N, K), strict=True):
            _non_negative(name, size)
        names = ("block_m", "block_n", "block_k", "num_programs", "min_split_iters")
        for name, size in zip(names, least_1, strict=True):
            if _non_negative(name, size) == 0:
                raise ValueError(f"{name} must be at least 1, got 0")
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, allowed {', '.join(SPLITS)}")

    tiles_m, tiles_n, iters = _cdiv(M, block_m), _cdiv(N, block_n), _cdiv(K, block_k)
    tiles = tiles_m * tiles_n
    whole = Schedule(tiles_m, tiles_n, iters, min(num_programs, tiles))
    full_waves, remainder = divmod(tiles, num_programs)
    if split == "none" or remainder == 0 or iters <= min_split_iters or (split == "separate" and full_waves):
        return whole
    if split == "stream_k":
        return _in_step(whole, num_programs, min(tiles_m, group_m), min_split_iters)
    most = min(num_programs // remainder, iters // min_split_iters)
    once, each = (SEPARATE_ONCE, SEPARATE_ITERS) if split == "separate" else (0, FIX_UP_ITERS)
    parts = _best_parts(iters, full_waves, most, 2 if split == "split_k" else 1, once, each)
    if parts == 1:
        return whole
    programs = num_programs if full_waves else parts * remainder
    cut = Schedule(tiles_m, tiles_n, iters, programs, remainder, parts * remainder, remainder)
    return cut if cut.max_iters < whole.max_iters else whole


def _in_step(whole: Schedule, num_programs: int, height: int, min_split_iters: int) -> Schedule:
    """`whole`, but that cohorts share the tiles of the last, part-full wave and those of the wave before. A cohort has
    the rows of a column of tiles, `height`, or a part of them: of those that shorten the schedule, as many as
    take the least time; `whole` where there are none."""
    tiles, iters = whole.num_tiles, whole.iters_per_tile
    full_waves, remainder = divmod(tiles, num_programs)
    # One full wave joins the remainder so that shares are between one and two tiles, never slivers.
    cut = remainder + (num_programs if full_waves else 0)
    sharers = min(num_programs, cut * iters // min_split_iters)

    def of(cohort: int) -> Schedule:
        # Whole columns: a few programs may have one whole tile less than others.
        columns, cohorts = min(_cdiv(cut, cohort), tiles // cohort), sharers // cohort
        programs = min(num_programs, cohorts * cohort + tiles - columns * cohort)
        sizes = (whole.tiles_m, whole.tiles_n, iters, programs)
        return Schedule(*sizes, columns * cohort, cohorts * cohort, cohort)

    def time(schedule: Schedule) -> float:
        return schedule.max_iters * (1 + schedule.slower_in_step)

    # Of equal ones the largest cohort.
    cohorts = (
        cohort for cohort in range(height, 0, -1) if height % cohort == 0 and cohort <= max(sharers, 1)
    )
    return min((cut for cut in map(of, cohorts) if cut.max_iters < whole.max_iters), key=time, default=whole)


def _best_parts(iters: int, full_waves: int, most: int, fewest: int, once: int, each: int) -> int:
    """The number of equal parts, from `fewest` to `most`, in which the tiles behind the full waves are done first; 1 if
    there is none. once, each: what parts cost together, and each of them, in iterations."""

    def time(parts: int) -> int:
        if parts == 1:
            return iters
        return _cdiv(iters, parts) + once + each * parts + full_waves * iters // OUT_OF_STEP

    return min(range(fewest, most + 1), key=time, default=1)


def even_group(tiles_m: int, about: int) -> int:
    """Tile rows of a group, of so many that a group has about `about` of them and the last one about as many: few rows
    left over would read all of B once more.

    Example: of 9 tile rows and about 8 it is 9, of 18 it is 9, of 20 it is 7, of 28 it is 7.
    """
    return _cdiv(tiles_m, max(1, (2 * tiles_m + about) // (2 * about)))


def tile_coords(tile: int, tiles_m: int, tiles_n: int, group_m: int) -> tuple[int, int]:
    """(pm, pn), the place of virtual tile `tile`: down columns of `group_m` tiles, for reuse in L2.

    Example: tiles_m = 3, tiles_n = 2, group_m = 2 gives (0,0) (1,0) (0,1) (1,1) | (2,0) (2,1).
    """
    width = group_m * tiles_n
    group, within = divmod(tile, width)
    first = group * group_m
    size = min(tiles_m - first, group_m)
    return first + within % size, within // size


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _are_counts(values: Collection[Any]) -> bool:
    """Whether all are plain integers of 0 or more: what plans ask of each schedule that they make."""
    return {*map(type, values)} == {int} and min(values) >= 0


def _non_negative(name: str, value: int) -> int:
    """`value` if it is an integer of 0 or more; TypeError or ValueError with the value got otherwise."""
    number = as_integer(name, value)
    if number < 0:
        raise ValueError(f"{name} must be 0 or more, got {number}")
    return number
