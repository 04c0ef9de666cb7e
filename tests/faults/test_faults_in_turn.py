"""Faults 1 to 4 as an op meets them: who raises what, how soon, what stays untouched, and that ranks recover.

One start of the ranks an op: a rank that is late, that raises, that is stopped and resumed, that is killed.
"""

import signal
from typing import Any

import pytest
import torch

from pyrocshmem import target
from pyrocshmem.reference.problems import PROBLEMS
from tests.faults.heap_support import assert_next_job_works
from tests.faults.in_turn import LATE_WAIT_S, VICTIM, WAIT_S, Whole, faults_in_turn
from tests.fused.cases import Case
from tests.ranks import run_ranks, values

TIER = 3
pytestmark = [pytest.mark.num_ranks(2), pytest.mark.alone]

NUM_RANKS = 3 if target.interpreted() else min(3, torch.cuda.device_count())
SLACK_S, PROMPT_S = 2.0, 1.0
CASES = [
    pytest.param(
        Case("all_reduce", 20, 33, 32, torch.float32).with_config(placement="inside", algorithm="one_shot"),
        id="all_reduce",
    ),
    # Data that are their own flags: of tiles, and of whole tensors.
    pytest.param(
        Case("all_reduce", 20, 32, 32, torch.float32).with_config(placement="messages", algorithm="two_shot"),
        id="messages",
    ),
    pytest.param(Whole(20, 33, "two_shot"), id="whole"),
    # On the CPU target copies are made by the host, and a start of the ranks more has no room in CI.
    pytest.param(
        Case("reduce_scatter", 41, 33, 48, torch.float32).with_config(placement="copy_engine"),
        marks=pytest.mark.gpu,
        id="reduce_scatter",
    ),
]


@pytest.fixture(scope="module", params=CASES)
def ends(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What each survivor found, and rank 1 before it died."""
    results = run_ranks(faults_in_turn, NUM_RANKS, request.param, timeout=90.0)
    killed = results.pop(VICTIM)
    assert killed.exitcode == -signal.SIGKILL, killed.describe()
    found = values(results)
    op = PROBLEMS[request.param.op].op if isinstance(request.param, Case) else "all_reduce"
    return {"op": op, "survivors": found, "victim": found[0]["of victim"]}


def assert_broken(found: dict[str, Any]) -> None:
    """Every later call says so, at once, as the first did."""
    assert found["again"] == [found["kind"]] * 4, found
    assert found["again_s"] < PROMPT_S + found["again_late_s"]


def assert_recovered(ends: dict[str, Any], case: str) -> None:
    for found in (ends["victim"][case], *(each[case] for each in ends["survivors"])):
        assert found["recovered"]
        assert_broken(found)


def assert_timeouts(ends: dict[str, Any], case: str, process: str) -> float:
    """PeerTimeout with its facts on those that gave up, PeerAborted on who heard of it; the longest wait.

    A rank may also name one that itself waits for the victim, and gives up at the same time.
    """
    found = [each[case] for each in ends["survivors"]]
    gave_up = [each for each in found if each["kind"] == "PeerTimeout"]
    assert VICTIM in [each["peer"] for each in gave_up], found
    for each in found:
        assert each["seconds"] < WAIT_S + SLACK_S + each["late_s"]
        assert_broken(each)
        assert each["kind"] in ("PeerTimeout", "PeerAborted"), each
    for each in gave_up:
        assert each["op"] == ends["op"], each
        assert WAIT_S <= each["waited_s"] <= each["seconds"]
        # Of flags: the number of the call that it waited for, and an earlier one that it saw.
        assert each["expected"] == each["call"] > each["seen"]
        state = process if each["peer"] == VICTIM else "is alive"
        for fact in (
            ends["op"],
            f"rank {each['peer']}",
            f"call {each['call']}",
            f"seen {each['seen']}",
            state,
        ):
            assert fact in each["text"]
    return max(each["seconds"] for each in found)


def test_case_1_a_peer_is_killed_in_the_middle_of_an_op(ends: dict[str, Any], record_property: Any) -> None:
    """Survivors name it, and go on with a new heap on a group of their own."""
    record_property("seconds", assert_timeouts(ends, "1", "has ended"))
    for found in ends["survivors"]:
        # Each rank's ledger, and on a CPU its heap.
        assert len(found["files"]) == NUM_RANKS * (2 if target.interpreted() else 1)
        assert found["went on"] < 10 + found["went on late"]
    assert_next_job_works()


def test_case_2_a_peer_is_stopped_and_resumed(ends: dict[str, Any], record_property: Any) -> None:
    record_property("seconds", assert_timeouts(ends, "2", "is stopped"))
    late = ends["victim"]["2"]
    assert late["kind"] == "PeerAborted", late
    assert late["untouched"] or not target.interpreted()
    assert_recovered(ends, "2")


def test_case_3_a_peer_that_is_late_changes_nothing(ends: dict[str, Any], record_property: Any) -> None:
    found = [ends["victim"]["3"], *(each["3"] for each in ends["survivors"])]
    assert all(each["same"] for each in found)
    assert all(each["seconds"] >= 0.8 * LATE_WAIT_S for each in found)
    record_property("seconds", max(each["seconds"] for each in found))


def test_case_4_a_rank_raises_before_its_call(ends: dict[str, Any], record_property: Any) -> None:
    raised = ends["victim"]["4"]["raised"]
    after = [each["4"]["ended"] - raised for each in ends["survivors"]]
    late = [each["4"]["late_s"] for each in ends["survivors"]]
    for each in ends["survivors"]:
        assert (each["4"]["kind"], each["4"]["peer"]) == ("PeerAborted", VICTIM)
        assert "KeyError: 'weights'" in each["4"]["text"]
    assert all(seconds < PROMPT_S + more for seconds, more in zip(after, late, strict=True))
    record_property("seconds", max(after))
    assert_recovered(ends, "4")
