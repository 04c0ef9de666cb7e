"""What the Stream-K schedule refuses, and what it says then."""

import pytest

from pyrocshmem.stream_k.local_gemm.schedule import Schedule, make_schedule

TIER = 0
pytestmark = pytest.mark.cpu

SPLIT = Schedule(3, 3, 10, 4, 7, 4)

BAD_ARGUMENTS = [
    ("M", -1, ValueError, r"M must be 0 or more, got -1"),
    ("K", 1.5, TypeError, r"K must be an integer, got 1\.5"),
    ("N", None, TypeError, r"N must be an integer, got None"),
    ("M", True, TypeError, r"M must be an integer, got True"),
    ("block_m", 0, ValueError, r"block_m must be at least 1, got 0"),
    ("num_programs", 0, ValueError, r"num_programs must be at least 1, got 0"),
    ("min_split_iters", 0, ValueError, r"min_split_iters must be at least 1, got 0"),
    ("split", "fast", ValueError, r"split is 'fast', allowed auto, none, stream_k, split_k, separate"),
]


@pytest.mark.parametrize(("name", "value", "error", "text"), BAD_ARGUMENTS)
def test_bad_arguments(name: str, value: object, error: type[Exception], text: str) -> None:
    good = {"M": 64, "N": 64, "K": 64, "block_m": 16, "block_n": 16, "block_k": 16, "num_programs": 4}
    with pytest.raises(error, match=text):
        make_schedule(**{**good, name: value})


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((2, 2, 4, 0), "num_programs must be at least 1"),
        ((2, 2, 4, 4, 5, 4), "num_split_tiles is 5, allowed 0..4"),
        ((2, 2, 4, 4, 4, 5), "num_split_programs is 5, allowed 0..4"),
        ((2, 2, 4, 4, 4, 0), "both must be 0 or neither"),
        ((2, 2, 1, 4, 1, 2), "each needs at least one"),
        ((2, 2, 0, 4, 4, 4), "each needs at least one"),
        ((2, 2, 4, 4, 3, 4, 2), "cohort is 2, allowed are divisors of 3 split tiles and of 4 split programs"),
        ((2, 2, 4, 4, 4, 3, 2), "cohort is 2, allowed"),
        ((2, 2, 4, 4, 4, 4, 0), "cohort is 0, allowed"),
        ((2, -2, 4, 4), "tiles_n must be 0 or more, got -2"),
    ],
)
def test_contradictory_numbers(numbers: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Schedule(*numbers)


def test_out_of_range_lookups() -> None:
    for program in (-1, 4):
        with pytest.raises(ValueError, match=f"program is {program}, allowed 0..3"):
            SPLIT.segments(program)
    with pytest.raises(ValueError, match="program is -1, allowed 0 or more"):
        SPLIT.program_range(-1)
    assert SPLIT.program_range(4) == (0, 0)
    for tile in (-1, 9):
        with pytest.raises(ValueError, match=f"tile is {tile}, allowed 0..8"):
            SPLIT.finisher(tile)
