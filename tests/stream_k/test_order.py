"""`collectives.order`: row blocks are `torch.tensor_split`'s, and every rank computes every tile of every block once.

The device functions run in a kernel of one program; what they return is compared with torch and with enumeration.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrocshmem.collectives import order
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.local_gemm.product import tiles_of_block
from pyrocshmem.stream_k.local_gemm.schedule import Schedule
from pyrocshmem.stream_k.ops.pulls import blocks_of
from pyrocshmem.stream_k.ops.rows import RowsPlan
from tests.pyrocshmem.kernels import run
from tests.stream_k.schedule_checks import tiles_in_order

TIER = 1
pytestmark = pytest.mark.cpu
LANES = 8

rows = st.integers(0, 300)
worlds = st.integers(1, 8)
several = st.integers(2, 8)
chunks = st.integers(1, 9)
heights = st.sampled_from((1, 16, 32, 128))


@triton.jit
def blocks_kernel(
    out, M, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, START: tl.constexpr, LANES: tl.constexpr
):
    """out[0], out[1]: start and size of blocks 0 to LANES - 1; out[2]: the tile rows of a block."""
    lanes = tl.arange(0, LANES)
    tl.store(out + lanes, START(lanes, M, WORLD))
    tl.store(out + LANES + lanes, order.block_size(lanes, M, WORLD))
    tl.store(out + 2 * LANES + lanes, lanes * 0 + order.block_tiles(M, WORLD, BLOCK_M))


@triton.jit
def rows_kernel(out, tiles, rank, M, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, ROW: tl.constexpr):
    """out[i]: the row where tile row i for others starts."""
    for i in range(0, (WORLD - 1) * tiles):
        tl.store(out + i, ROW(i, rank, M, WORLD, BLOCK_M))


@triton.jit
def shares_kernel(out, count, problem, RANGE: tl.constexpr):
    """out[p]: the range of program p; out[count + c]: the cohorts with the first and the last iteration of column c."""
    for program in range(0, count):
        lo, hi = RANGE(program, problem)
        tl.store(out + 2 * program, lo)
        tl.store(out + 2 * program + 1, hi)
    for column in range(0, problem.num_split_tiles // problem.cohort):
        first = order.cohort_of(column * problem.iterations, problem)
        last = order.cohort_of(column * problem.iterations + problem.iterations - 1, problem)
        tl.store(out + 2 * (count + column), first)
        tl.store(out + 2 * (count + column) + 1, last)


@triton.jit
def finished_kernel(out, counts, tiles, programs, problem, MOST: tl.constexpr):
    """counts[p]: how many tiles program p finishes; out[p, i]: the i-th of them."""
    for program in range(0, programs):
        split, count = order.num_finished_tiles(program, problem, tiles)
        tl.store(counts + program, count)
        for i in range(0, count):
            tl.store(out + program * MOST + i, order.finished_tile(i, split, program, problem))


@triton.jit
def range_without_cohorts(program, problem):
    """`order.program_range`, but that every program has a share of its own."""
    total = problem.num_split_tiles * problem.iterations
    base = total // problem.num_split_programs
    extra = total % problem.num_split_programs
    lo = program * base + min(program, extra)
    return lo, lo + base + (program < extra).to(tl.int32)


@triton.jit
def start_off_by_one(block, M, WORLD: tl.constexpr):
    """`order.block_start`, but that the last of the longer blocks passes for a shorter one."""
    extra = M % WORLD
    return block * (M // WORLD) + tl.where(block < extra, block, extra - 1)


@triton.jit
def row_off_by_one(tile_m, rank, M, WORLD: tl.constexpr, BLOCK_M: tl.constexpr):
    """`order.peer_row`, but that it takes all blocks for as high as the first one."""
    tiles = order.block_tiles(M, WORLD, BLOCK_M)
    block = (rank + 1 + tile_m // tiles) % WORLD
    return block * tl.cdiv(M, WORLD) + tile_m % tiles * BLOCK_M


def wrong_blocks(M: int, world: int, block_m: int, start: Any = order.block_start) -> str:
    """How the row blocks differ from torch's, "" if they don't."""
    out = torch.full((3, LANES), -1, dtype=torch.int32)
    run(blocks_kernel, 1, out, M, WORLD=world, BLOCK_M=block_m, START=start, LANES=LANES)
    expected = [part.tolist() for part in torch.arange(M).tensor_split(world)]
    starts, sizes, tiles = out.tolist()
    found = [list(range(starts[block], starts[block] + sizes[block])) for block in range(world)]
    if found != expected or [shard_range(M, block, world) for block in range(world)] != [
        (starts[block], starts[block] + sizes[block]) for block in range(world)
    ]:
        return f"blocks start at {starts[:world]}, sizes {sizes[:world]}"
    most = max(len(part) for part in expected)
    if not tiles[0] * block_m >= most > (tiles[0] - 1) * block_m or tiles[0] != tiles_of_block(
        M, world, block_m
    ):
        return f"{tiles[0]} tile rows of {block_m} for {most} rows"
    return ""


def problem_of(schedule: Schedule) -> order.Problem:
    """What kernels are told of it."""
    split = (schedule.num_split_tiles, schedule.num_split_programs, schedule.cohort)
    return order.Problem(0, 0, 0, schedule.iters_per_tile, *split, schedule.num_programs, 0)


def shares(schedule: Schedule, program_range: Any = order.program_range) -> list[tuple[int, int]]:
    """What kernels make of a schedule with split tiles: each program's range, each column's first and last cohort."""
    count = schedule.num_split_programs
    out = torch.full((count + schedule.num_columns, 2), -1, dtype=torch.int32)
    run(shares_kernel, 1, out, count, problem_of(schedule), RANGE=program_range)
    return [tuple(pair) for pair in out.tolist()]


def shares_on_the_host(schedule: Schedule) -> list[tuple[int, int]]:
    """The same by `stream_k.local_gemm.schedule`, whose own tests say that it is right."""
    ranges = [schedule.program_range(program) for program in range(schedule.num_split_programs)]
    iters, cohort = schedule.iters_per_tile, schedule.cohort
    ends = []
    for column in range(schedule.num_columns):
        first = [p // cohort for p, (lo, hi) in enumerate(ranges) if lo <= column * iters < hi]
        ends.append((first[0], schedule.finisher(column * cohort) // cohort))
    return ranges + ends


def order_of(M: int, rank: int, world: int, block_m: int, row: Any = order.peer_row) -> list[int]:
    """The row where each tile row for others starts, in order."""
    tiles = tiles_of_block(M, world, block_m)
    out = torch.full((tiles * (world - 1),), -1, dtype=torch.int32)
    run(rows_kernel, 1, out, tiles, rank, M, WORLD=world, BLOCK_M=block_m, ROW=row)
    return out.tolist()


def enumerated(M: int, rank: int, world: int, block_m: int) -> list[int]:
    """The same, counted out: one block after another, the neighbour's first, all of as many tile rows."""
    owners = [(rank + turn) % world for turn in range(1, world)]
    tiles = tiles_of_block(M, world, block_m)
    return [shard_range(M, owner, world)[0] + i * block_m for owner in owners for i in range(tiles)]


@given(st.data())
@settings(max_examples=60)
def test_kernels_share_iterations_as_the_schedule_does(data: st.DataObject) -> None:
    columns, iters = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 30))
    cohort = data.draw(st.integers(1, 4))
    cohorts = min(data.draw(st.integers(1, columns * iters)), 24 // cohort)
    tiles, programs = columns * cohort, cohorts * cohort
    schedule = Schedule(tiles, 1, iters, programs, tiles, programs, cohort)
    assert shares(schedule) == shares_on_the_host(schedule)


@given(st.data())
@settings(max_examples=60)
def test_kernels_know_what_a_program_finishes(data: st.DataObject) -> None:
    cohort, columns, iters = (data.draw(st.integers(1, most)) for most in (3, 3, 9))
    split, whole = columns * cohort, data.draw(st.integers(0, 9))
    sharers = data.draw(st.integers(1, columns * iters)) * cohort
    programs = sharers + data.draw(st.integers(0, whole))
    schedule = Schedule(split + whole, 1, iters, programs, split, sharers, cohort)
    counts, most = torch.full((programs,), -1, dtype=torch.int32), 32
    out = torch.full((programs, most), -1, dtype=torch.int32)
    run(finished_kernel, 1, out, counts, schedule.num_tiles, programs, problem_of(schedule), MOST=most)
    for program in range(programs):
        done = [s.tile for s in schedule.segments(program) if s.finishing]
        assert sorted(out[program, : counts[program]].tolist()) == sorted(done)


def test_a_share_of_the_wrong_iterations_is_caught() -> None:
    own = Schedule(2, 1, 17, 4, 2, 4, 2)
    assert shares(own) == shares_on_the_host(own)
    assert shares(own, range_without_cohorts) != shares_on_the_host(own)


@given(rows, worlds, heights)
@settings(max_examples=100)
def test_blocks_are_those_of_tensor_split(M: int, world: int, block_m: int) -> None:
    assert wrong_blocks(M, world, block_m) == ""


def test_a_start_off_by_one_is_caught() -> None:
    assert wrong_blocks(97, 3, 16) == ""
    assert wrong_blocks(97, 3, 16, start_off_by_one) != ""


@given(st.data())
@settings(max_examples=60)
def test_every_row_of_every_peer_once(data: st.DataObject) -> None:
    world, block_m = data.draw(several), data.draw(heights)
    M, rank = data.draw(st.integers(1, 32 * block_m)), data.draw(st.integers(0, world - 1))
    found = order_of(M, rank, world, block_m)
    assert found == enumerated(M, rank, world, block_m)
    # Tiles reach past the ends of their blocks, where their rows are not stored.
    tiles = tiles_of_block(M, world, block_m)
    for turn in range(1, world):
        first, last = shard_range(M, (rank + turn) % world, world)
        covered = [row + j for row in found[(turn - 1) * tiles : turn * tiles] for j in range(block_m)]
        assert sorted(row for row in covered if row < last) == list(range(first, last))


def test_a_row_off_by_one_is_caught() -> None:
    assert order_of(8, 0, 3, 2) == enumerated(8, 0, 3, 2) == [3, 5, 6, 8]
    expected = enumerated(97, 1, 4, 16)
    assert order_of(97, 1, 4, 16) == expected
    assert order_of(97, 1, 4, 16, row_off_by_one) != expected


def uncovered(plan: Any) -> list[int]:
    """Tiles of a step that the copy of these rows and columns would not wait for."""
    tiles_n = plan.for_peers.schedule.tiles_n
    order = tiles_in_order((plan.world - 1) * plan.tiles, tiles_n, plan.for_peers.config.group_m)
    missed = []
    for step in blocks_of(plan.tiles, tiles_n, plan.chunk, plan.for_peers.config.group_m, 128 * 256):
        for peer in range(plan.world - 1):
            first, last = RowsPlan._tiles_of(plan, step, peer)
            wanted = {
                tile
                for tile, (row, column) in enumerate(order)
                if row - peer * plan.tiles in range(*step.rows) and column in range(*step.columns)
            }
            assert 0 <= first < last <= len(order)
            missed += [tile for tile in wanted if not first <= tile < last]
    return missed


def plan_of(world: int, tiles: int, chunk: int, tiles_n: int, group_m: int) -> Any:
    product = SimpleNamespace(
        config=SimpleNamespace(group_m=group_m), schedule=SimpleNamespace(tiles_n=tiles_n)
    )
    return SimpleNamespace(for_peers=product, world=world, tiles=tiles, chunk=min(chunk, tiles))


@given(several, st.integers(1, 12), chunks, st.integers(1, 5) | st.integers(100, 300), st.integers(1, 12))
def test_a_copy_waits_for_all_tiles_of_its_rows(
    world: int, tiles: int, chunk: int, tiles_n: int, group_m: int
) -> None:
    assert uncovered(plan_of(world, tiles, chunk, tiles_n, group_m)) == []


def test_a_tile_that_a_copy_forgets_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RowsPlan._tiles_of
    monkeypatch.setattr(RowsPlan, "_tiles_of", lambda *args: (honest(*args)[0], honest(*args)[1] - 1))
    assert uncovered(plan_of(3, 5, 3, 3, 2))
