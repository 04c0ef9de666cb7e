"""The stress runner finds what it is there for, and makes it smaller without breaking it."""

import json
from random import Random

import pytest

from tests.stress.ops import OPS
from tests.stress.rounds import Round, draw_rounds, groups_of, shrunk
from tests.stress.runner import Options, hunt

TIER = 2
SEED = 3


@pytest.mark.cpu
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_planted_mistake_is_found() -> None:
    """Epochs that stay as they are: what the call before left looks fresh."""
    options = Options(
        minutes=1.0, seed=SEED, ops=("gemm_all_reduce",), ranks=2, shrink_seconds=3.0, plant="constant_epoch"
    )
    report = hunt(options)
    assert report.failure is not None, f"{report.rounds} rounds, {dict(report.counts)}"
    assert report.failure.wrong
    smallest = report.failure.smallest
    if smallest is not None:  # within 3 s on a busy machine it may not have shown again
        assert len(smallest.order) <= len(report.failure.rounds[-1].order)
        assert report.failure.smallest_wrong
    assert json.loads(json.dumps(report.as_json()))["failure"]["seed"] == report.failure.seed


def _check(each: Round, world_size: int) -> None:
    assert [kind for kind, _ in each.order[: len(each.kinds)]] == list(range(len(each.kinds)))
    assert all(-1 <= kind < len(each.kinds) for kind, _ in each.order)
    members = groups_of(world_size)[each.group]
    assert all(len(delays) == len(members) for delays in each.delays_ms)
    assert len(each.delays_ms) == len(each.order)
    if each.cancelled is not None:
        call, rank = each.cancelled
        assert len(each.kinds) <= call < len(each.order)
        assert 0 <= rank < len(members)
        assert OPS[each.kinds[each.order[call][0]][0]].meets


@pytest.mark.cpu
@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_rounds_are_repeatable_and_shrink_to_rounds(on_gpu: bool) -> None:
    names = list(OPS)
    rounds = draw_rounds(Random(SEED), 60, 3, names, on_gpu)
    assert rounds == draw_rounds(Random(SEED), 60, 3, names, on_gpu)
    assert {name for each in rounds for name, _ in each.kinds} == set(names)
    assert any(each.cancelled for each in rounds)
    assert any(any(kind < 0 for kind, _ in each.order) for each in rounds) == on_gpu
    for each in rounds:
        _check(each, 3)
        smaller = list(shrunk(each, 3))
        assert smaller
        for candidate in smaller:
            _check(candidate, 3)
            assert candidate != each


@pytest.mark.cpu
def test_shrinking_ends() -> None:
    each = draw_rounds(Random(SEED), 1, 2, list(OPS), False)[0]
    steps = 0
    while (smaller := next(iter(shrunk(each, 2)), None)) is not None:
        each, steps = smaller, steps + 1
        assert steps < 400, str(each)
    assert len(each.kinds) == 1


@pytest.mark.cpu
def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="op is gemm_all, allowed gemm, "):
        Options(ops=("gemm_all",))
    with pytest.raises(ValueError, match="minutes is 0"):
        Options(minutes=0)
