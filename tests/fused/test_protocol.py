"""The protocol of the fused ops: epochs, slots, flags and groups, each guard with the test that fails without it."""

import pytest
import torch

from tests.fused import bodies
from tests.fused.cases import Case, assert_right
from tests.ranks import run_ranks, values

TIER = 3
TIMEOUT_S = 60.0
FP32 = torch.float32
SHAPE = (40, 24, 24)
SMALL, LARGE = (20, 30, 24), (60, 30, 24)
WAYS = [(p, a) for p in ("after", "beside", "inside") for a in ("one_shot", "two_shot")]


def cases(placement: str = "after") -> list[Case]:
    made = [Case("all_reduce", *SHAPE, FP32), Case("all_scatter", *SHAPE, FP32, "symmetric")]
    return [case.with_config(placement=placement) for case in made]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.num_ranks(2)
def test_a_late_rank(way: tuple[str, str]) -> None:
    """Fault 7: changing data, nothing zeroed, one rank late."""
    assert values(run_ranks(bodies.changing_data, 2, *way, True, timeout=TIMEOUT_S)) == [0, 0]


@pytest.mark.cpu
def test_a_constant_epoch_is_caught() -> None:
    """The control of the test above."""
    wrong = values(run_ranks(bodies.changing_data, 2, "after", "one_shot", False, timeout=TIMEOUT_S))
    assert sum(wrong) > 0


@pytest.mark.parametrize("placement", ["after", "beside", "inside"])
@pytest.mark.parametrize(
    "shapes", [[SHAPE], [SMALL, LARGE], [LARGE, SMALL]], ids=["one", "growing", "shrinking"]
)
@pytest.mark.cpu
def test_a_stalled_reader(placement: str, shapes: list[tuple[int, int, int]]) -> None:
    """Fault 8: a fast rank one call ahead, its peer stalled between flag and read; one shape, or two in turn."""
    ends = run_ranks(bodies.stalled_reader, 2, shapes, placement, False, timeout=TIMEOUT_S)
    assert values(ends) == [0, 0]


@pytest.mark.parametrize("placement", ["after", "inside"])
@pytest.mark.cpu
def test_a_single_slot_is_caught(placement: str) -> None:
    """The control of the test above."""
    ends = run_ranks(bodies.stalled_reader, 2, [SHAPE], placement, True, timeout=TIMEOUT_S)
    assert sum(values(ends)) > 0


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.cpu
def test_slow_flags(world_size: int) -> None:
    """A flag that comes late must not undo that of a later call, of another op or shape: each word has one writer."""
    # What rank 1 raises at itself in the one, rank 0 raises in the other, unless each rank has words of its own.
    calls = [("all_scatter", SMALL), ("all_reduce", (60, 60, 24))]
    ends = run_ranks(bodies.slow_flags, world_size, calls, timeout=TIMEOUT_S)
    assert values(ends) == [0] * world_size


@pytest.mark.parametrize("epoch", [2**31 - 3, -3], ids=["2^31", "2^32"])
@pytest.mark.num_ranks(2)
def test_epochs_wrap_around(epoch: int) -> None:
    assert_right(values(run_ranks(bodies.wrapped, 2, epoch, cases(), timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(2)
def test_two_workspaces_and_two_heaps() -> None:
    assert_right(values(run_ranks(bodies.two_workspaces, 2, cases("inside"), timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(3)
def test_subgroups_and_a_mesh() -> None:
    assert_right(values(run_ranks(bodies.subgroups, 3, cases("beside"), timeout=TIMEOUT_S)))
