"""The protocol of the fused ops: epochs, slots, flags and groups, each guard with the test that fails without it."""

import itertools

import pytest
import torch

from pyrocshmem.reference.problems import PROBLEMS
from tests.fused import block_bodies, block_sum_bodies, bodies
from tests.fused.cases import Case, assert_right
from tests.ranks import run_ranks, values

TIER = 3
TIMEOUT_S = 100.0
FP32 = torch.float32
SHAPE = (40, 24, 24)
SMALL, LARGE = (20, 30, 24), (60, 30, 24)
PLACEMENTS = ("after", "beside", "own_stream", "inside")
BLOCKS = [
    *(
        (op, "copy_engine", "two_shot")
        for op in ("all_gather", "reduce_scatter", "all_reduce", "all_scatter")
    ),
    ("all_scatter", "pull", "two_shot"),
    *((op, "blas_blocks", "two_shot") for op in ("all_gather", "reduce_scatter", "all_reduce")),
]
MESSAGES = [
    *(("all_reduce", "messages", algorithm) for algorithm in ("one_shot", "two_shot")),
    *((op, "messages", "two_shot") for op in ("all_gather", "reduce_scatter", "all_scatter")),
]
WAYS = [
    *(("all_reduce", p, a) for p in PLACEMENTS for a in ("one_shot", "two_shot")),
    ("all_scatter", "own_stream", "two_shot"),
    *BLOCKS,
    *MESSAGES,
]
# What a rank writes first in a call waits until the peers are in it. The sums of an all-reduce wait for the peers'
# partials, and so for the same (tests/model has all interleavings).
GUARDED = [(op, placement) for op, placement, _ in BLOCKS if op != "all_reduce"]


def cases(placement: str = "after") -> list[Case]:
    made = [Case("all_reduce", *SHAPE, FP32), Case("all_scatter", *SHAPE, FP32, "symmetric")]
    return [case.with_config(placement=placement) for case in made]


def block_cases() -> list[Case]:
    """Row blocks of 21 and 20 rows."""
    return [Case(op, 41, 24, 24, FP32).with_config(placement=placement) for op, placement, _ in BLOCKS]


@pytest.mark.parametrize(
    ("num_ranks", "ways"),
    [
        pytest.param(2, WAYS, marks=pytest.mark.num_ranks(2), id="2"),
        pytest.param(3, BLOCKS, marks=pytest.mark.num_ranks(3), id="3"),
    ],
)
def test_a_late_rank(num_ranks: int, ways: list[tuple[str, str, str]]) -> None:
    """Fault 7: changing data, nothing zeroed, one rank late."""
    found = values(run_ranks(bodies.changing_data, num_ranks, ways, True, timeout=TIMEOUT_S))
    assert found == [dict.fromkeys(ways, 0)] * num_ranks


@pytest.mark.cpu
def test_a_constant_epoch_is_caught() -> None:
    """The control of the test above."""
    ways = [("all_reduce", "after", "one_shot"), *BLOCKS]
    found = values(run_ranks(bodies.changing_data, 2, ways, False, timeout=TIMEOUT_S))
    wrong = {way: found[0][way] + found[1][way] for way in ways}
    assert min(wrong.values()) > 0, wrong


@pytest.mark.parametrize("shape", [(40, 24, 24), (151, 24, 24)], ids=["one step", "uneven blocks"])
@pytest.mark.parametrize(("op", "placement"), [way[:2] for way in BLOCKS])
@pytest.mark.cpu
def test_a_rank_that_is_a_call_ahead(op: str, placement: str, shape: tuple[int, int, int]) -> None:
    """Fault 8: what a peer has sent, or left to be pulled, is read before the peer may overwrite it."""
    run = run_ranks(block_bodies.ahead, 2, [op], placement, shape, True, timeout=TIMEOUT_S)
    assert values(run) == [0, 0]


@pytest.mark.parametrize(("op", "placement"), GUARDED)
@pytest.mark.cpu
@pytest.mark.alone
def test_a_push_before_the_peer_has_entered_is_caught(op: str, placement: str) -> None:
    """The control of the test above."""
    wrong = values(run_ranks(block_bodies.ahead, 2, [op], placement, SHAPE, False, timeout=TIMEOUT_S))
    assert wrong[1] > 0


@pytest.mark.cpu
@pytest.mark.alone
def test_a_rank_that_is_in_the_next_op() -> None:
    """Ops whose peers write into the same place in turn. Then the control, as above."""
    for guarded in (True, False):
        # More of K than of N, so that rows reach into the peers' partials.
        ways = ["all_gather", "reduce_scatter"], "copy_engine", (40, 24, 72)
        run = run_ranks(block_bodies.ahead, 2, *ways, guarded, timeout=TIMEOUT_S)
        assert values(run) == [0, 0] if guarded else values(run)[1] > 0, guarded


OF_SUMS = pytest.mark.parametrize("placement", ["copy_engine", "blas_blocks"])


@OF_SUMS
@pytest.mark.parametrize("op", ["reduce_scatter", "all_reduce"])
@pytest.mark.cpu
def test_partials_that_come_late(op: str, placement: str) -> None:
    """Sums are made when the peers' partials are there."""
    assert values(run_ranks(block_bodies.late_partials, 2, op, placement, True, timeout=TIMEOUT_S)) == [0, 0]


@OF_SUMS
@pytest.mark.parametrize("op", ["reduce_scatter", "all_reduce"])
@pytest.mark.cpu
@pytest.mark.alone
def test_sums_that_do_not_wait_are_caught(op: str, placement: str) -> None:
    """The control of the test above."""
    assert values(run_ranks(block_bodies.late_partials, 2, op, placement, False, timeout=TIMEOUT_S))[0] > 0


@pytest.mark.parametrize("sent", [False, True], ids=["nothing sent", "sent after giving up"])
@pytest.mark.cpu
def test_no_sums_of_partials_that_were_given_up(sent: bool) -> None:
    """A wait for partials that gives up leaves the rows of its step as they were, those of other tiles too; so do
    partials of a peer that gave up. Then the control, in which a program heeds its own waits alone."""
    for heeds in (True, False):
        ends = run_ranks(block_bodies.sums_without_partials, 2, sent, heeds, timeout=TIMEOUT_S)
        written, _ = values(ends)
        assert (written == 0) if heeds else (written > 0), heeds


@pytest.mark.parametrize("sent", [False, True], ids=["nothing sent", "sent after giving up"])
@pytest.mark.parametrize("op", ["gemm_reduce_scatter", "gemm_all_reduce"])
@pytest.mark.cpu
def test_no_sums_of_blocks_that_were_given_up(op: str, sent: bool) -> None:
    """The same of products that are in memory."""
    for heeds in (True, False):
        ends = run_ranks(block_sum_bodies.sums_without_partials, 2, op, sent, heeds, timeout=TIMEOUT_S)
        written, _ = values(ends)
        assert (written == 0) if heeds else (written > 0), heeds


@pytest.mark.cpu
def test_no_sums_of_blocks_that_were_not_announced() -> None:
    """Programs leave alone what a peer has said nothing of: sums that they pull, and the sums of first rows, which
    copies bring. Then the control, in which they don't wait."""
    for waits, first in itertools.product((True, False), (True, False)):
        ranks = run_ranks(block_sum_bodies.rows_without_word, 2, waits, first, timeout=TIMEOUT_S)
        of_first, others = values(ranks)[0]
        assert (of_first == 0) if waits else (of_first > 0), (waits, first)
        assert (others > 0) == first, (waits, first)


@pytest.mark.cpu
def test_no_columns_that_were_not_announced() -> None:
    """Programs that pull leave alone what a peer has said nothing of. Then the control, in which they don't wait."""
    for waits in (True, False):
        written = values(run_ranks(block_bodies.columns_without_word, 2, waits, timeout=TIMEOUT_S))[0]
        assert (written == 0) if waits else (written > 0), waits


@pytest.mark.cpu
def test_no_rows_that_were_not_announced() -> None:
    """A piece of a peer's rows is multiplied when it has come, whatever came before it. Then the control, which doesn't
    wait."""
    for waits in (True, False):
        written = values(run_ranks(block_bodies.rows_without_word, 2, waits, timeout=TIMEOUT_S))[0]
        assert written == ([32 * 33, 0, 0] if waits else [32 * 33] * 3), waits


@pytest.mark.parametrize(
    ("op", "placement", "name"),
    [
        ("all_gather", "copy_engine", "flags"),
        ("all_gather", "blas_blocks", "flags"),
        ("reduce_scatter", "blas_blocks", "flags"),
        ("all_reduce", "blas_blocks", "flags"),
        ("reduce_scatter", "copy_engine", "flags"),
        ("reduce_scatter", "copy_engine", "local flags"),
        ("all_reduce", "copy_engine", "flags"),
        ("all_reduce", "copy_engine", "local flags"),
        ("all_scatter", "copy_engine", "flags"),
        ("all_scatter", "copy_engine", "local flags"),
        ("all_scatter", "pull", "flags"),
        ("all_scatter", "pull", "local flags"),
        ("all_reduce", "own_stream", "flags"),
        ("all_scatter", "own_stream", "flags"),
        ("all_scatter", "own_stream", "local flags"),
        ("all_reduce", "messages", "messages"),
        ("all_gather", "messages", "messages"),
    ],
)
@pytest.mark.cpu
def test_an_announcement_that_is_kept_back(op: str, placement: str, name: str) -> None:
    """Whoever waits for it gives up and names the rank that kept it back; the other is told."""
    ends = values(run_ranks(block_bodies.kept_back, 2, op, placement, name, timeout=TIMEOUT_S))
    waiting, other = (1, 0) if name == "local flags" else (0, 1)
    assert ends[waiting] == ("PeerTimeout", PROBLEMS[op].op, 1)
    kind, _, peer = ends[other]
    assert (kind, peer) == ("PeerAborted", waiting)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.cpu
def test_a_stalled_reader(placement: str) -> None:
    """Fault 8: a fast rank one call ahead, its peer stalled between flag and read; one shape, or two in turn."""
    sequences = [[SHAPE], [SMALL, LARGE], [LARGE, SMALL]]
    ends = run_ranks(bodies.stalled_reader, 2, sequences, placement, False, timeout=TIMEOUT_S)
    assert values(ends) == [[0, 0, 0]] * 2


@pytest.mark.parametrize("placement", ["after", "own_stream", "inside"])
@pytest.mark.cpu
@pytest.mark.alone
def test_a_single_slot_is_caught(placement: str) -> None:
    """The control of the test above."""
    ends = run_ranks(bodies.stalled_reader, 2, [[SHAPE]], placement, True, timeout=TIMEOUT_S)
    assert sum(wrong for (wrong,) in values(ends)) > 0


@pytest.mark.cpu
def test_messages_of_a_rank_that_is_a_call_ahead() -> None:
    """Fault 8: what it sends of the next call stays, though its peer has yet to empty its slot. Then the controls: with
    one slot that is the one that it sends to; without emptying, old data look new."""
    kept, one_slot, never_emptied = block_bodies.PLANTS
    ways = MESSAGES[:3]
    first, second = values(run_ranks(block_bodies.messages_ahead, 2, ways, timeout=TIMEOUT_S))
    assert first[kept] == second[kept] == dict.fromkeys(ways, 0)
    for way in ways:
        assert first[one_slot][way] + second[one_slot][way] > 0, way
        assert first[never_emptied][way] + second[never_emptied][way] > 0, way


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
    made = [*cases(), *cases("own_stream"), *block_cases()]
    assert_right(values(run_ranks(bodies.wrapped, 2, epoch, made, timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(2)
def test_two_workspaces_and_two_heaps() -> None:
    made = [*cases("inside"), *block_cases()]
    assert_right(values(run_ranks(bodies.two_workspaces, 2, made, timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(3)
def test_subgroups_and_a_mesh() -> None:
    assert_right(values(run_ranks(bodies.subgroups, 3, cases("beside"), timeout=TIMEOUT_S)))
