"""The Stream-K schedule on random products and at its edges; planted mistakes must be caught."""

import ast
import itertools
import random
import sys
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from pyrocshmem import checks
from pyrocshmem.stream_k.local_gemm import schedule as schedule_module
from pyrocshmem.stream_k.local_gemm import schedule_plot
from pyrocshmem.stream_k.local_gemm.schedule import (
    MIN_SPLIT_ITERS,
    SPLITS,
    Schedule,
    Segment,
    make_schedule,
    tile_coords,
)
from tests.stream_k.schedule_checks import check_schedule, simulate

TIER = 0
pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]


def random_case(rng: random.Random) -> tuple[tuple[int, ...], dict[str, object]]:
    """Arguments of make_schedule: log-uniform, prime and zero sizes, at most some thousand tiles."""
    primes = (2, 3, 7, 13, 97, 131, 193, 509, 1021, 4093)
    block_m, block_n = rng.choice((16, 64, 128, 256)), rng.choice((16, 64, 128, 256))

    def size(block: int) -> int:
        how = rng.random()
        if how < 0.03:
            return 0
        return (
            rng.choice(primes) if how < 0.3 else int(2 ** rng.uniform(0, 6) * block * rng.uniform(0.5, 1.0))
        )

    block_k = rng.choice((32, 64, 128))
    K = 0 if rng.random() < 0.03 else rng.choice((rng.randrange(1, 9000), rng.choice(primes)))
    programs = rng.choice((1, 2, 3, 7, 16, 78, 132, 304, rng.randrange(1, 400)))
    options = {"split": rng.choice(("auto", "auto", *SPLITS)), "min_split_iters": rng.choice((1, 4, 8, 8))}
    options["group_m"] = rng.choice((1, 2, 8, 8, 16))
    return (size(block_m), size(block_n), K, block_m, block_n, block_k, programs), options


@pytest.mark.parametrize("seed", range(8))
def test_random_products(seed: int) -> None:
    rng = random.Random(seed)
    kinds: Counter[str] = Counter()
    for _ in range(300):
        arguments, options = random_case(rng)
        schedule = make_schedule(*arguments, **options)
        kinds[schedule.kind] += 1
        try:
            check_schedule(schedule)
            check_choice(schedule, arguments, options)
        except AssertionError as error:
            raise AssertionError(f"make_schedule{arguments} {options} -> {schedule}: {error}") from error
    assert min(kinds["data_parallel"], kinds["stream_k"], kinds["split_k"]) > 0, kinds


def check_choice(schedule: Schedule, arguments: tuple[int, ...], options: dict[str, object]) -> None:
    """What make_schedule promises beyond a right schedule: its sizes, what may be split, and that a split pays."""
    M, N, K, block_m, block_n, block_k, programs = arguments
    assert (schedule.tiles_m, schedule.tiles_n) == (-(-M // block_m), -(-N // block_n))
    assert schedule.iters_per_tile == -(-K // block_k)
    tiles, remainder = schedule.num_tiles, schedule.num_tiles % programs
    if schedule.kind == "data_parallel":
        assert schedule.num_split_tiles == 0
        assert schedule.num_programs == min(programs, tiles)
        return
    assert schedule.num_programs <= programs
    assert options["split"] != "none"
    assert options["split"] != "separate" or tiles <= programs
    assert schedule.kind == "split_k" or options["split"] == "stream_k"
    assert remainder > 0
    lo, hi = schedule.program_range(schedule.num_split_programs - 1)
    assert hi - lo >= options["min_split_iters"]
    if options["split"] == "stream_k":
        # Whole columns: up, or down where there are no more tiles.
        cut = remainder + programs if tiles >= programs else remainder
        columns = min(-(-cut // schedule.cohort), tiles // schedule.cohort)
        assert schedule.num_split_tiles == columns * schedule.cohort
        assert schedule.cohort <= min(schedule.tiles_m, options["group_m"])
    else:
        assert schedule.num_split_tiles == schedule.cohort == remainder
    assert schedule.max_iters < -(-tiles // programs) * schedule.iters_per_tile


@settings(max_examples=300)
@given(st.data())
def test_any_valid_numbers_make_a_schedule(data: st.DataObject) -> None:
    tiles_m, tiles_n = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 12))
    iters, programs = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 80))
    tiles = tiles_m * tiles_n
    programs = min(programs, tiles)
    split_tiles = data.draw(st.integers(0, tiles)) if iters else 0
    cohort = data.draw(st.integers(1, max(1, min(split_tiles, programs))))
    split_tiles -= split_tiles % cohort
    # Every program needs work: a share, or one of the whole tiles.
    most = min(programs // cohort, split_tiles // cohort * iters)
    least = max(1, -(-(programs - tiles + split_tiles) // cohort))
    cohorts = data.draw(st.integers(least, most)) if split_tiles and least <= most else 0
    if not cohorts:
        split_tiles, cohort = 0, 1
    check_schedule(Schedule(tiles_m, tiles_n, iters, programs, split_tiles, cohorts * cohort, cohort))


def test_equal_parts_of_every_small_last_wave() -> None:
    """All products of up to 3 waves of up to 9 programs: each tile of the last wave has programs of its own, whose
    shares differ by one iteration at most."""
    found = 0
    for programs, tiles, iters in itertools.product(range(2, 10), range(1, 28), (7, 16, 23, 40)):
        schedule = make_schedule(tiles, 1, iters, 1, 1, 1, programs, split="split_k", min_split_iters=2)
        check_schedule(schedule)
        rest = tiles % programs
        if schedule.kind == "data_parallel":
            assert rest == 0 or programs // rest < 2, (programs, tiles, iters)
            continue
        found += 1
        parts, uneven = divmod(schedule.num_split_programs, rest)
        assert (schedule.kind, uneven, schedule.num_split_tiles) == ("split_k", 0, rest)
        assert schedule.num_programs == (programs if tiles >= programs else parts * rest)
        for tile in range(rest):
            programs_of_tile = range(tile, schedule.num_split_programs, rest)
            own = [schedule.program_range(program) for program in programs_of_tile]
            assert (own[0][0], own[-1][1]) == (0, iters)
            assert {hi - lo for lo, hi in own} <= {iters // parts, iters // parts + 1}
            done = [schedule.segments(program)[0].tile for program in programs_of_tile]
            assert done == [tile] * parts
    assert found > 300


# Of nine tiles, seven shared by four programs; of five, the first by three of four, 4, 3 and 3 iterations.
SPLIT = Schedule(3, 3, 10, 4, 7, 4)
PARTS = Schedule(5, 1, 10, 4, 1, 3)
# Four columns of two tiles, by three cohorts of two, and a whole tile; program 6 has no share.
COHORTS = Schedule(3, 3, 10, 7, 8, 6, 2)


class WithoutExtra(Schedule):
    """The planted off-by-one: the first share forgets an iteration that does not divide evenly."""

    def program_range(self, program: int) -> tuple[int, int]:
        lo, hi = super().program_range(program)
        return lo, hi - (program == 0)


class ContributesLast(Schedule):
    def segments(self, program: int) -> list[Segment]:
        return super().segments(program)[::-1]


class OneContributorShort(Schedule):
    def segments(self, program: int) -> list[Segment]:
        return [replace(s, contributors=s.contributors[1:]) for s in super().segments(program)]


class FirstProgramFinishes(Schedule):
    """The program with a tile's first iterations finishes it, so it waits for higher ids."""

    def segments(self, program: int) -> list[Segment]:
        return [replace(s, finishing=s.k_begin == 0) for s in super().segments(program)]


class WholeTilesFromOne(Schedule):
    def segments(self, program: int) -> list[Segment]:
        return [
            replace(s, tile=s.tile + 1) if s.tile >= self.num_split_tiles else s
            for s in super().segments(program)
        ]


class WrongFinisher(Schedule):
    def finisher(self, tile: int) -> int:
        return super().finisher(tile) - (tile == 0)


@pytest.mark.parametrize(
    "mutant",
    [
        WithoutExtra,
        ContributesLast,
        OneContributorShort,
        FirstProgramFinishes,
        WholeTilesFromOne,
        WrongFinisher,
    ],
)
@pytest.mark.parametrize("schedule", [SPLIT, PARTS, COHORTS], ids=["stream_k", "split_k", "in_step"])
def test_checker_catches_a_planted_mistake(mutant: type[Schedule], schedule: Schedule) -> None:
    check_schedule(schedule)
    numbers = {field.name: getattr(schedule, field.name) for field in fields(schedule)}
    with pytest.raises(AssertionError):
        check_schedule(mutant(**numbers))


def test_simulation_catches_a_wait_that_nobody_ends() -> None:
    # Two programs that each finish a tile before they contribute to the other's.
    first = [Segment(0, 4, 8, True, range(1, 2)), Segment(1, 0, 4, False, range(0))]
    second = [Segment(1, 4, 8, True, range(1)), Segment(0, 0, 4, False, range(0))]
    with pytest.raises(AssertionError, match="deadlock"):
        simulate([first, second], [0, 1], resident=2)
    # A wait for a higher id ends only where both are resident.
    waits_up = [[Segment(0, 4, 8, True, range(1, 2))], [Segment(0, 0, 4, False, range(0))]]
    simulate(waits_up, [0, 1], resident=2)
    with pytest.raises(AssertionError, match="deadlock"):
        simulate(waits_up, [0, 1], resident=1)


def test_example_of_the_documentation() -> None:
    schedule = make_schedule(5 * 128, 256, 12 * 64, 128, 256, 64, 4, split="stream_k")
    assert schedule == Schedule(5, 1, 12, 4, 5, 4)
    none = range(0)
    assert [schedule.segments(program) for program in range(4)] == [
        [Segment(1, 0, 3, False, none), Segment(0, 0, 12, True, none)],
        [Segment(2, 0, 6, False, none), Segment(1, 3, 12, True, range(1))],
        [Segment(3, 0, 9, False, none), Segment(2, 6, 12, True, range(1, 2))],
        [Segment(4, 0, 12, True, none), Segment(3, 9, 12, True, range(2, 3))],
    ]
    text = (ROOT / "docs" / "schedule.md").read_text()
    for program in range(4):
        assert f"| {program} | {documented(schedule, program)} |" in text


def documented(schedule: Schedule, program: int) -> str:
    """A program's row in docs/schedule.md: its share, then what it does, in order."""
    lo, hi = schedule.program_range(program)
    steps = []
    for s in schedule.segments(program):
        what = "finishes" if s.finishing else "contributes"
        adds = "".join(f", adds program {peer}" for peer in s.contributors)
        steps.append(f"tile {s.tile} [{s.k_begin}, {s.k_end}) {what}{adds}")
    return f"[{lo}, {hi}) | " + " | ".join(steps)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((4096, 4096, 4096, 128, 128, 64, 128), "data_parallel"),  # 1024 tiles: 8 exact waves
        ((4096, 4096, 512, 128, 256, 64, 132), "data_parallel"),  # 8 iterations a tile
        ((4096, 1792, 4096, 128, 256, 64, 132), "data_parallel"),  # 224 tiles: last wave 92 of 132
        ((128 * 12, 256 * 14, 4096, 128, 256, 64, 132), "split_k"),  # 168 tiles: last wave 36 of 132
        ((128 * 12, 256 * 14, 1536, 128, 256, 64, 132), "data_parallel"),  # the same of 24 iterations
        ((128 * 24, 256 * 70, 4096, 128, 256, 64, 132), "data_parallel"),  # 12.7 waves
        (
            (128 * 24, 256 * 67, 8192, 128, 256, 64, 132),
            "data_parallel",
        ),  # last wave 24 of 132, behind 12 others
        ((128 * 13, 256 * 16, 8192, 128, 256, 64, 132), "data_parallel"),  # last wave 76: none of two parts
        ((16, 8192, 8192, 128, 256, 64, 132), "split_k"),  # 32 tiles in 4 parts
        ((16, 256, 64 * 127, 128, 256, 64, 132), "split_k"),  # one tile of 127 iterations
        ((0, 4096, 4096, 128, 256, 64, 132), "data_parallel"),
        ((4096, 0, 4096, 128, 256, 64, 132), "data_parallel"),
        ((4096, 4096, 0, 128, 256, 64, 132), "data_parallel"),
    ],
)
def test_rules(arguments: tuple[int, ...], kind: str) -> None:
    schedule = make_schedule(*arguments)
    assert schedule.kind == kind
    check_schedule(schedule)


def test_hybrid_shares_are_between_one_and_two_tiles() -> None:
    schedule = make_schedule(128 * 300, 256, 4096, 128, 256, 64, 132, split="stream_k")
    assert (schedule.num_split_tiles, schedule.whole_tiles, schedule.num_split_programs) == (168, 132, 128)
    assert schedule.cohort == 8
    lo, hi = schedule.program_range(127)
    assert schedule.iters_per_tile < hi - lo < 2 * schedule.iters_per_tile
    # Who has no share begins with a whole tile.
    assert [segment.tile for segment in schedule.segments(128)] == [168]


def test_programs_of_a_cohort_are_in_step() -> None:
    schedule = make_schedule(1000, 5120, 5120, 128, 256, 64, 132, split="stream_k")
    assert (schedule.cohort, schedule.num_cohorts, schedule.num_columns) == (8, 16, 20)
    for first in range(0, schedule.num_programs, schedule.cohort):
        each = [schedule.segments(program) for program in range(first, first + schedule.cohort)]
        for together in zip(*each, strict=True):
            assert len({(segment.k_begin, segment.k_end) for segment in together}) == 1
            places = [
                tile_coords(segment.tile, schedule.tiles_m, schedule.tiles_n, 8) for segment in together
            ]
            assert [row for row, _ in places] == list(range(8))
            assert len({column for _, column in places}) == 1


@pytest.mark.parametrize(
    ("M", "N", "K", "cohort"),
    [
        (1000, 5120, 5120, 8),
        (512, 5120, 12800, 4),  # all the rows there are
        (128, 5120, 12800, 1),
        (5 * 128, 256, 12 * 64, 1),  # five tiles are no column of four programs
    ],
)
def test_cohorts_that_take_the_least_time(M: int, N: int, K: int, cohort: int) -> None:
    programs = 4 if N == 256 else 132
    assert make_schedule(M, N, K, 128, 256, 64, programs, split="stream_k").cohort == cohort


def test_split_k_cuts_every_tile_into_equal_parts() -> None:
    schedule = make_schedule(16, 8192, 8192, 128, 256, 64, 132)
    assert (schedule.num_programs, schedule.workspace_tiles) == (128, 128)
    for program in range(128):
        (segment,) = schedule.segments(program)
        part, tile = divmod(program, 32)
        assert (segment.tile, segment.k_begin, segment.k_end) == (tile, part * 32, part * 32 + 32)


def test_empty_products() -> None:
    assert make_schedule(0, 8, 8, 16, 16, 16, 4).num_programs == 0
    schedule = make_schedule(100, 100, 0, 16, 16, 16, 4)
    assert schedule.segments(1)[0] == Segment(1, 0, 0, True, range(0))  # writes zeros
    assert schedule.max_iters == 0


@pytest.mark.parametrize(
    ("tiles_m", "tiles_n", "group_m"), [(3, 2, 2), (1, 1, 8), (7, 5, 3), (13, 1, 4), (64, 31, 8)]
)
def test_tile_coords_is_a_bijection(tiles_m: int, tiles_n: int, group_m: int) -> None:
    places = [tile_coords(tile, tiles_m, tiles_n, group_m) for tile in range(tiles_m * tiles_n)]
    assert sorted(places) == [(m, n) for m in range(tiles_m) for n in range(tiles_n)]
    # Within a group of rows, column after column: this is what makes a wave re-use its operands.
    assert places == sorted(places, key=lambda place: (place[0] // group_m, place[1], place[0]))


def test_imports_neither_torch_nor_triton() -> None:
    """Nor what it imports of this project."""
    for module in (schedule_module, checks):
        tree = ast.parse(Path(module.__file__).read_text())
        names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names += [
            alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        ]
        assert {name.split(".")[0] for name in names} <= {*sys.stdlib_module_names, "pyrocshmem"}
        assert [name for name in names if name.startswith("pyrocshmem")] in ([], ["pyrocshmem.checks"])


def test_minimum_of_iterations_is_the_default() -> None:
    shape = (640, 256, 16 * 64, 128, 256, 64, 132)
    schedule = make_schedule(*shape, split="split_k")
    lo, hi = schedule.program_range(schedule.num_split_programs - 1)
    assert hi - lo >= MIN_SPLIT_ITERS
    assert schedule.kind == "split_k"
    assert make_schedule(*shape, split="split_k", min_split_iters=9).kind == "data_parallel"


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    app = typer.Typer()
    app.command()(schedule_plot.main)

    def run(*options: str) -> Result:
        return CliRunner().invoke(app, ["--shape", "640,256,768", "--programs", "4", *options])

    out = tmp_path / "schedule.svg"
    assert run("--split", "stream_k", "--out", str(out)).exit_code == 0
    texts = [node.text for node in ElementTree.parse(out).iter("{http://www.w3.org/2000/svg}text")]
    # Both panels name their length; the lower one shows tile 4 and the cut tiles.
    assert "whole tiles: 24 iterations" in texts
    assert "stream_k: 15 iterations" in texts
    assert Counter(texts)["tile 1"] == 3
    for options, said in (
        (("--tile", "1,2"), "three integers"),
        (("--out", "nowhere/at.svg"), "nowhere/at.svg"),
    ):
        wrong = run("--out", str(out), *options)
        assert (wrong.exit_code, wrong.stderr.count("\n")) == (2, 1)
        assert said in wrong.stderr
