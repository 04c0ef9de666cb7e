"""The command that measures host time makes the calls that it says, and sums them up."""

import pytest

from pyrocshmem import Heap
from tests.ranks import run_ranks, values
from tests.stream_k.graph_standins import replay_what_was_enqueued
from tests.stress.host_time import CALLS, LIMIT_US, WAYS, Calls, Case, cases_for, measure, summary

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
    for (found,) in values(run_ranks(measure, 2, cases_for(2, on_gpu=False)[1:], 1)):
        assert found["placement"] == "messages"
        assert all(len(found[way]) == 1 and found[way][0] > 0 for way in WAYS)


@pytest.mark.parametrize(("replayed_us", "within"), [(LIMIT_US - 1, True), (LIMIT_US + 1, False)])
def test_the_median_of_the_slowest_ranks_counts(replayed_us: float, within: bool) -> None:
    one = {
        "placement": "copy_engine",
        "enqueued": (1e-4, 9e-4, 2e-4),
        "captured": (1e-3,),
        "replayed": (replayed_us * 1e-6,),
    }
    other = {
        "placement": "copy_engine",
        "enqueued": (3e-4, 1e-4, 1e-4),
        "captured": (2e-3,),
        "replayed": (1e-6,),
    }
    found = summary(Case("all_scatter", (64, 64, 64)), [one, other])
    assert found["case"] == "gemm_all_scatter 64 x 64 x 64"
    assert (found["placement"], found["enqueued_us"], found["captured_us"]) == ("copy_engine", 300.0, 2000.0)
    assert (found["replayed_us"], found["within"]) == (replayed_us, within)
