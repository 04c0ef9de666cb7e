"""The protocols hold in every interleaving of 2 and 3 ranks; take a guard out, and the checker shows how they break.

A counterexample is printed: `pytest -s tests/model -k "guard and slots"`.
"""

import re

import pytest

from tests.model.checker import Model, Step, explore
from tests.model.protocols import GUARDS, PROTOCOLS

TIER = 0
pytestmark = pytest.mark.cpu

# Those with one thread a rank, or one wait a call: three ranks that may give up at any wait are few states.
SMALL = ("push_partials", "scatter", "messages", "pull_partials")
FLAGGED = [name for name in PROTOCOLS if name != "messages"]
WRONG_DATA, AHEAD = "calls call .* done, with wrong data", "finds a flag 7 calls ahead"
TWICE = "waits its budget out a second time"

# What shows that a guard is needed: protocol, what is left out, whether waits may give up, what goes wrong then.
NEEDED = [
    *(
        (name, {guard}, False, wrong)
        for name in FLAGGED
        for guard, wrong in (("settle", WRONG_DATA), ("epoch", WRONG_DATA), ("wrap", AHEAD))
    ),
    *(
        (name, {"entered"}, False, WRONG_DATA)
        for name in ("scatter", "copy_rows", "pull_columns", "sum_rows")
    ),
    *((name, {"slots"}, False, WRONG_DATA) for name in ("pull_partials", "split_tile")),
    ("messages", {"slots"}, False, WRONG_DATA),
    ("messages", {"restore"}, False, WRONG_DATA),
    *((name, {"abort"}, True, TWICE) for name in FLAGGED if name != "pull_partials"),
    *(
        (name, {guard}, True, WRONG_DATA)
        for name in ("copy_rows", "split_tile", "sum_rows", "pull_sums")
        for guard in ("tell", "end")
    ),
    # Behind the look at the abort word when a call ends, heeding a wait's answer is a second line.
    ("push_partials", {"heed", "end"}, True, WRONG_DATA),
]


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize(("ranks", "calls"), [(2, 4), (3, 3)])
def test_a_protocol_holds(name: str, ranks: int, calls: int) -> None:
    found, states = explore(PROTOCOLS[name](ranks, calls, GUARDS))
    assert found is None, f"\n{found}"
    assert states > 50


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("dies", [False, True], ids=["late", "dead"])
def test_a_protocol_holds_when_waits_give_up(name: str, dies: bool) -> None:
    """Any rank may be late by more than the budget at any wait, or die at any step: who raises nothing is right."""
    found, states = explore(PROTOCOLS[name](2, 3, GUARDS), may_time_out=True, crash=1 if dies else None)
    assert found is None, f"\n{found}"
    assert states > 100


@pytest.mark.parametrize("name", SMALL)
def test_three_ranks_that_give_up(name: str) -> None:
    found, states = explore(PROTOCOLS[name](3, 2, GUARDS), may_time_out=True)
    assert found is None, f"\n{found}"
    assert states > 1000


@pytest.mark.parametrize(("name", "without", "gives_up", "wrong"), NEEDED)
def test_a_guard_is_needed(name: str, without: set[str], gives_up: bool, wrong: str) -> None:
    found, _ = explore(PROTOCOLS[name](2, 4, GUARDS - without), may_time_out=gives_up)
    assert found is not None, (
        f"{name} holds without {', '.join(without)}: the guard is not what keeps it right"
    )
    print(f"\n{name} without {', '.join(without)}:\n{found}")
    assert re.search(wrong, found.wrong)


def test_every_guard_is_shown_to_be_needed() -> None:
    assert set().union(*(without for _, without, _, _ in NEEDED)) == GUARDS


def test_two_ranks_that_wait_for_one_another_are_found() -> None:
    """Each waits for the other before it raises its own flag."""
    model = Model(2, GUARDS)
    first = model.word("first epoch")
    flags = [model.word(f"rank {rank}'s flag") for rank in range(2)]
    for rank in range(2):
        raised = Step("raise", (flags[1 - rank],), first + 1)
        model.add_thread(rank, [Step("wait", (flags[rank],), first + 1), raised])
    found, _ = explore(model)
    assert found is not None
    assert found.wrong == "nobody can go on"
