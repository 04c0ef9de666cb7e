"""The command that measures host time makes the calls that it says, and sums them up."""

import pytest

from pyrocshmem import Heap
from tests.ranks import run_ranks, values
from tests.stream_k.graph_standins import replay_what_was_enqueued
from tests.stress.host_time import (
    CALLS,
    LIMIT_US,
    PRODUCTS,
    WAYS,
    Calls,
    Case,
    cases_for,
    exit_status,
    measure,
    summary,
)
from tests.stress.ops import OPS

TIER = 2
pytestmark = pytest.mark.cpu


def ways_taken(rank: int, world_size: int, case: Case) -> dict[str, list[str]]:
    """By way, of three samples: "e" for each call that was enqueued, "c" captured, "r" replayed. The graphs are
    stand-ins that enqueue."""
    log: list[str] = []

    replay_what_was_enqueued(log)
    found: dict[str, list[str]] = {way: [] for way in WAYS}
    with Heap(16 << 20) as heap:
        calls = Calls(case, heap)
        for way, letters in found.items():
            for _ in range(3):
                calls.prepare(way)
                log.clear()
                for number in range(CALLS[way]):
                    calls.call(way, number)
                letters.append("".join(log))
        heap.vote("done")
    return found


@pytest.mark.num_ranks(2)
def test_calls_are_made_as_they_are_named() -> None:
    letters = zip(WAYS, "ecr", strict=True)
    expected = {way: [letter * CALLS[way]] * 3 for way, letter in letters}
    case = cases_for(2, on_gpu=False)[1]
    assert values(run_ranks(ways_taken, 2, case)) == [expected] * 2


@pytest.mark.num_ranks(2)
def test_every_way_is_measured() -> None:
    some = ("gemm_all_scatter", "gemm_all_reduce_rms_norm", "all_reduce_rms_norm", "all_gather", "barrier")
    cases = [case for case in cases_for(2, on_gpu=False) if case.op in some]
    for found in values(run_ranks(measure, 2, cases, 1)):
        assert found[0]["placement"] == "messages"
        for case, each in zip(cases, found, strict=True):
            ways = WAYS if case.op in PRODUCTS else WAYS[2:]
            assert all(len(each[way]) == 1 and each[way][0] > 0 for way in ways), case
            assert set(each) == {"placement", *ways}


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_every_op_is_measured(on_gpu: bool) -> None:
    missing = set(OPS) - {case.op for case in cases_for(4, on_gpu)}
    assert missing == ({"gemm"} if on_gpu else {"gemm", "all_gather_gemm", "gemm_reduce_scatter"})


@pytest.mark.parametrize(("repeated_us", "within"), [(LIMIT_US - 1, True), (LIMIT_US + 1, False)])
def test_the_median_of_the_slowest_ranks_counts(repeated_us: float, within: bool) -> None:
    one = {
        "placement": "copy_engine",
        "enqueued": (1e-4, 9e-4, 2e-4),
        "captured": (1e-3,),
        "repeated": (repeated_us * 1e-6,),
    }
    other = {
        "placement": "copy_engine",
        "enqueued": (3e-4, 1e-4, 1e-4),
        "captured": (2e-3,),
        "repeated": (1e-6,),
    }
    found = summary(Case("gemm_all_scatter", (64, 64, 64)), [one, other])
    assert found["case"] == "gemm_all_scatter 64 x 64 x 64"
    assert (found["placement"], found["enqueued_us"], found["captured_us"]) == ("copy_engine", 300.0, 2000.0)
    assert (found["repeated_us"], found["within"]) == (repeated_us, within)
    assert exit_status([found], on_gpu=True) == int(not within)
    assert exit_status([found], on_gpu=False) == 0


def test_of_a_collective_repeated_calls_count_alone() -> None:
    found = summary(Case("all_reduce", (16, 64)), [{"placement": "", "repeated": (1e-6, 3e-6, 2e-6)}])
    assert (found["case"], found["enqueued_us"], found["repeated_us"]) == ("all_reduce 16 x 64", None, 2.0)
