"""A vote has its result for all ranks that take part or for none, in every interleaving of 2 and 3 of them.

A counterexample of a control is printed: `pytest -s tests/model -k control`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from pyrocshmem.groups import Group
from tests.model.votes import BESIDE, LooksThenLeaves, explore

TIER = 0
pytestmark = pytest.mark.cpu

LIVE = ("votes", "aborts", "leaves")
ALL = (*LIVE, "dies", BESIDE)


@pytest.mark.parametrize(
    ("ranks", "rounds", "ways"),
    [(2, 3, (*LIVE, BESIDE)), (3, 1, (*LIVE, BESIDE)), (3, 2, ("votes", "aborts"))],
)
def test_votes_hold(ranks: int, rounds: int, ways: Sequence[str]) -> None:
    """Without time-outs: who waits hears of the abort, or the farewell, of whoever doesn't come."""
    found, states = explore(ranks, rounds, ways)
    assert found is None, f"\n{found}"
    assert states > 1000


@pytest.mark.parametrize(
    ("ranks", "rounds", "ways", "absent"), [(2, 3, ALL, 0), (3, 1, (*LIVE, "dies"), 0), (4, 1, ALL, 2)]
)
def test_votes_hold_when_ranks_die_and_time_runs_out(
    ranks: int, rounds: int, ways: Sequence[str], absent: int
) -> None:
    found, states = explore(ranks, rounds, ways, True, absent)
    assert found is None, f"\n{found}"
    assert states > 1000


class _DeafToFarewells(Group):
    def _farewell_of(self, peer: int) -> None:
        return None


class _AnyKey(Group):
    """One missing rank's key is as good as another's: then two ranks may each write into one."""

    def _reason_to_leave(self, missing: Any) -> Any:
        if self.rank % 2:
            missing.reverse()
        return super()._reason_to_leave(missing)


TWO_ENDS = "round 0 ends with .* and with the result"


@pytest.mark.parametrize(
    ("ranks", "absent", "ways", "late", "kind", "atomic", "wrong"),
    [
        (2, 0, LIVE, False, LooksThenLeaves, True, TWO_ENDS),
        (3, 0, LIVE, False, LooksThenLeaves, True, TWO_ENDS),
        (2, 0, ("votes",), True, LooksThenLeaves, True, "round 0 ends with a time-out that names nobody"),
        (2, 0, ("votes",), True, Group, False, TWO_ENDS),
        (3, 0, ("votes",), True, Group, False, TWO_ENDS),
        (2, 0, ("votes", BESIDE), False, Group, False, TWO_ENDS),
        (2, 0, ("votes", "leaves"), False, _DeafToFarewells, True, "a rank waits for ever"),
        (4, 2, ("votes",), True, _AnyKey, True, "round 0 has 2 tombstones"),
    ],
    ids=["abort", "abort, 3", "time-out", "set", "set, 3", "set, abort", "farewell", "any key"],
)
def test_control(
    ranks: int, absent: int, ways: Sequence[str], late: bool, kind: type[Group], atomic: bool, wrong: str
) -> None:
    """The protocol before tombstones, a store that sets a key without a comparison, a rank that doesn't listen."""
    found, _ = explore(ranks, 1, ways, late, absent, kind, atomic)
    assert found is not None
    print(f"\n{found}")
    assert re.search(wrong, found.wrong)
