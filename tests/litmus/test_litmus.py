"""The memory order that the protocol stands on, between every pair of ranks; each guard with its control.

On GPUs a million rounds in both directions between all that there are, and every control must be seen failing; on the
CPU target 200, and only controls that can fail there: the interpreter runs a program's steps one after another,
and its loads and stores are the processor's own.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
import triton

from pyrocshmem import target
from tests import ranks
from tests.litmus.bodies import Litmus, Outcome, litmus, pairs_in_turn
from tests.ranks import run_ranks, values

TIER = 2
ON_CPU = target.interpreted()
NUM_RANKS = 2 if ON_CPU else max(2, torch.cuda.device_count())
ROUNDS, CONTROL_ROUNDS = (200, 20) if ON_CPU else (1_000_000, 200_000)
# A message of one tile and, for TMA, of eight: stores that are still on their way when the last was issued.
TILES = 1 if ON_CPU else 8
# Two H200s take 88 s; of more, disjoint pairs play at a time.
TIMEOUT_S = 150.0 if ON_CPU else 250.0 * len(pairs_in_turn(NUM_RANKS, both_ways=True))
pytestmark = [pytest.mark.num_ranks(2), pytest.mark.timeout(ranks.slower * TIMEOUT_S + 20)]
if not ON_CPU:
    # GPUs that other processes share take turns, and a round is two turns.
    pytestmark.append(pytest.mark.alone)

GUARDED = {
    "push": Litmus("push", ROUNDS),
    "pull": Litmus("pull", ROUNDS),
    "tma": Litmus("tma", ROUNDS, pieces=TILES),
    "buffering": Litmus("buffering", ROUNDS),
    "copies": Litmus("copies", ROUNDS),
}
CONTROLS = {
    "no barrier": Litmus("push", CONTROL_ROUNDS, ("SETTLED",)),
    "no acquire": Litmus("push", CONTROL_ROUNDS, ("ACQUIRED",)),
    "no meeting": Litmus("buffering", CONTROL_ROUNDS, ("MET",)),
    "flag before data": Litmus("copies", CONTROL_ROUNDS, ("ORDER",)),
}
ON_GPU_ONLY = {
    "no barrier": "the interpreter has one thread a program",
    "no acquire": "the processor's caches are coherent",
    "no meeting": "a store leaves the processor's buffer in nanoseconds, the interpreter's next step takes 0.1 ms",
}
Run = Callable[[Litmus], list[list[Outcome]]]


@pytest.fixture(scope="module")
def outcomes() -> list[list[Outcome]]:
    """Of every rank, all experiments, on one start of the ranks."""
    controls = [each for name, each in CONTROLS.items() if not (ON_CPU and name in ON_GPU_ONLY)]
    experiments = [*GUARDED.values(), *controls]
    return values(run_ranks(litmus, NUM_RANKS, experiments, timeout=TIMEOUT_S))


@pytest.mark.cpu
@pytest.mark.parametrize("world_size", range(2, 9))
def test_every_pair_plays_once_each_way(world_size: int) -> None:
    turns = pairs_in_turn(world_size, both_ways=True)
    assert sorted(pair for turn in turns for pair in turn) == list(
        itertools.permutations(range(world_size), 2)
    )
    for turn in turns:
        players = [rank for pair in turn for rank in pair]
        assert len(set(players)) == len(players)


def _of(outcomes: list[list[Outcome]], each: Litmus) -> dict[tuple[int, int], list[Outcome]]:
    """By pair, the outcomes of its two ranks."""
    found: dict[tuple[int, int], list[Outcome]] = {}
    for of_rank in outcomes:
        for outcome in of_rank:
            if outcome.litmus == each:
                found.setdefault(outcome.pair, []).append(outcome)
    return found


@pytest.mark.parametrize("name", [name for name in GUARDED if name != "buffering"])
def test_no_stale_read(outcomes: list[list[Outcome]], name: str) -> None:
    found = _of(outcomes, GUARDED[name])
    assert set(found) == set(itertools.permutations(range(NUM_RANKS), 2))
    for pair, ends in found.items():
        sender, receiver = ends if pair[0] < pair[1] else reversed(ends)
        assert receiver.played == GUARDED[name].rounds, pair
        assert sender.played > 0
        assert receiver.bad == 0, f"{pair}: {receiver.bad} of {receiver.played} rounds read stale data"


def _missed(outcomes: list[list[Outcome]], each: Litmus) -> tuple[int, int]:
    """Of all pairs, the rounds in which a rank missed the other's write, and those in which both did."""
    found, one, both = _of(outcomes, each), 0, 0
    assert set(found) == set(itertools.combinations(range(NUM_RANKS), 2))
    for ends in found.values():
        assert [end.played for end in ends] == [each.rounds] * 2
        first, second = (end.missed for end in ends)
        assert set(first) | set(second) <= {0, 1}
        one += sum(first) + sum(second)
        both += sum(a & b for a, b in zip(first, second, strict=True))
    return one, both


def test_who_has_met_misses_nothing(outcomes: list[list[Outcome]]) -> None:
    assert _missed(outcomes, GUARDED["buffering"]) == (0, 0)


@pytest.mark.parametrize("name", CONTROLS)
def test_a_guard_that_is_left_out_is_missed(outcomes: list[list[Outcome]], name: str) -> None:
    if ON_CPU and name in ON_GPU_ONLY:
        pytest.skip(f"can't fail on the CPU target: {ON_GPU_ONLY[name]}")
    if name == "no barrier" and not triton.__version__.startswith(("3.6.", "3.7.")):
        pytest.skip(f"Triton {triton.__version__} puts the barrier before a release by itself")
    each = CONTROLS[name]
    if each.how == "buffering":
        assert _missed(outcomes, each)[1] > 0
        return
    bad = sum(end.bad for ends in _of(outcomes, each).values() for end in ends)
    assert bad > 0, f"{each.rounds} rounds each way without {', '.join(each.without)}, and none went wrong"
