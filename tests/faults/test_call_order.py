"""Calls that all ranks have planned, then made in another order on each: noticed before, not after, a wrong result."""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from pyrocshmem import CallMismatch, Heap, ShmemError, collectives, stream_k
from pyrocshmem.calls.workspace import workspace_for
from pyrocshmem.groups import as_group
from pyrocshmem.lifecycle import _KEPT, _NUMBERS, MOST_ROWS, Begun, Difference, Ledger
from tests.ranks import run_ranks, values
from tests.stopwatch import Stopwatch
from tests.stream_k.products import device, integers, small_config

TIER = 3
TIMEOUT_S = 90.0
HEAP_BYTES = 32 << 20
SOON_S = 5.0  # half of what a wait lasts
F16, F32 = torch.float16, torch.float32

Call = Callable[[Heap], torch.Tensor]


def ones(*shape: int, dtype: torch.dtype = F16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device())


def summed(*shape: int, dtype: torch.dtype = F16) -> Call:
    return lambda heap: collectives.all_reduce(ones(*shape, dtype=dtype), group=heap)


def multiplied(**options: Any) -> Call:
    def call(heap: Heap) -> torch.Tensor:
        a, b = integers(20, 24, F16, 1), integers(24, 16, F16, 2)
        return stream_k.gemm_all_reduce(a, b, group=heap, **options)

    return call


def normalized(columns: int) -> Call:
    return lambda heap: collectives.rms_norm(ones(4, columns), ones(columns), 1e-6, group=heap)


def gathered(heap: Heap) -> torch.Tensor:
    return collectives.all_gather(ones(4, 8), group=heap)


# Pairs that would mix without an error of their own, and one whose messages are of different numbers.
PAIRS: dict[str, tuple[Call, Call]] = {
    "dtypes": (summed(4, 8), summed(2, 8, dtype=F32)),
    "shapes": (summed(4, 8), summed(8, 4)),
    "sizes": (summed(4, 8), summed(600, 16)),
    "rows": (summed(4, 8), summed(600, 8)),
    "collectives": (summed(4, 8), gathered),
    "columns of a norm": (normalized(8), normalized(16)),
    "activations": (multiplied(), multiplied(activation="relu")),
    "flags": (
        multiplied(config=small_config()),
        multiplied(config=small_config(), activation="relu"),
    ),
}


def in_another_order(rank: int, world_size: int, names: list[str]) -> dict[str, tuple[str, bool, bool]]:
    """(what is raised, whether soon, whether the heap then recovers) where the ranks make the calls of a pair in
    opposite order."""
    found = {}
    with Heap(HEAP_BYTES) as heap:
        for name in names:
            calls = PAIRS[name]
            expected = [call(heap).clone() for call in calls]
            heap.barrier()
            raised, watch = "nothing", Stopwatch()
            try:
                for call in calls if rank == 0 else calls[::-1]:
                    call(heap)
                heap.synchronize()
            except ShmemError as error:
                raised = f"{type(error).__name__}: {error}"
            soon = watch.seconds() < SOON_S + watch.late()
            if raised != "nothing":
                heap.recover()
            heap.barrier()
            right = all(torch.equal(call(heap), each) for call, each in zip(calls, expected, strict=True))
            found[name] = raised, soon, right
    return found


@pytest.mark.num_ranks(2)
def test_case_6_planned_calls_in_another_order() -> None:
    for found in values(run_ranks(in_another_order, 2, [*PAIRS], timeout=TIMEOUT_S)):
        for name, (raised, soon, right) in found.items():
            assert raised.startswith(f"{CallMismatch.__name__}: ranks made different calls as number"), (
                name,
                raised,
            )
            assert "\n  rank 0: " in raised
            assert "\n  rank 1: " in raised
            assert (soon, right) == (True, True), name


def nobody_recovers(rank: int, world_size: int) -> tuple[str, bool]:
    """(what is raised, whether soon) where rank 0 waits in a kernel when rank 1 makes another call."""
    with Heap(HEAP_BYTES) as heap:
        calls = PAIRS["sizes"]
        for call in calls:
            call(heap)
        heap.barrier()
        watch = Stopwatch()
        if rank == 1:
            time.sleep(0.5)
        try:
            calls[rank](heap)
            heap.synchronize()
        except ShmemError as error:
            found = type(error).__name__, watch.seconds() < SOON_S + watch.late()
            time.sleep(SOON_S)
            return found
        return "nothing", False


@pytest.mark.num_ranks(2)
def test_who_waits_is_told_before_anybody_recovers() -> None:
    assert values(run_ranks(nobody_recovers, 2, timeout=TIMEOUT_S)) == [(CallMismatch.__name__, True)] * 2


def unguarded(rank: int, world_size: int) -> dict[str, tuple[str, bool, bool]]:
    with mock.patch.object(Ledger, "compare", return_value=None):
        return in_another_order(rank, world_size, ["dtypes", "activations"])


@pytest.mark.num_ranks(2)
def test_without_the_ledger_nobody_notices() -> None:
    for found in values(run_ranks(unguarded, 2, timeout=TIMEOUT_S)):
        assert [raised for raised, _, _ in found.values()] == ["nothing"] * 2


class _Book(Ledger):
    """A ledger, and what `compare` has said of it."""

    def __init__(self) -> None:
        self.members = as_group(None)
        self.said: list[Any] = []
        super().__init__(self.members, 10.0)

    def both(self, mine: list[int]) -> None:
        """The ranks begin calls at the same time, then look."""
        for which in mine:
            self.begin(which)
        self.members.exchange(b"", "began")
        self.said.append(self.compare())
        self.members.exchange(b"", "compared")

    def restart(self) -> None:
        super().restart()
        self.members.exchange(b"", "restarted")


def written_down(rank: int, world_size: int) -> list[Any]:
    """What `Ledger.compare` says as two ranks begin calls, one of them later, or not at all."""
    book = _Book()
    book.both([5, 6, 5])
    book.both([7] if rank == 0 else [])  # late is not different
    book.both([] if rank == 0 else [7])
    book.both([8, 9] if rank == 0 else [8])
    book.both([1] if rank == 0 else [2, 1])
    book.restart()
    book.both([3] if rank == 0 else [4])
    book.restart()
    # A rank that is further behind than words are kept: what can be compared still is.
    book.both([1] * (_KEPT + 10) if rank == 0 else [])
    book.both([] if rank == 0 else [1] * (_KEPT + 9) + [2])
    return book.said


@pytest.mark.num_ranks(2)
def test_who_is_late_is_compared_later() -> None:
    nothing = [None] * 4
    found = [(6, [9, 2]), (1, [3, 4]), None, (_KEPT + 10, [1, 2])]
    expected = [*nothing, *(each and Difference(each[0], [*map(Begun, each[1])]) for each in found)]
    for found in values(run_ranks(written_down, 2, timeout=TIMEOUT_S)):
        assert found == expected


def counted_on(rank: int, world_size: int) -> list[Any]:
    """What `Ledger.compare` says, once all have begun, of calls of two ranks around the one whose number is 0 again."""
    book = _Book()
    book._begun = book._compared = _NUMBERS - _KEPT - 2
    book.both([0] * _KEPT)
    book.both([0] * 5 if rank == 0 else [0])  # the other one's words have the last numbers before
    book.both([] if rank == 0 else [0] * 4)
    book.both([0, 1] if rank == 0 else [0, 2])
    return book.said


@pytest.mark.num_ranks(2)
def test_numbers_of_calls_wrap() -> None:
    expected = [None, None, None, Difference(_NUMBERS + 5, [Begun(1), Begun(2)])]
    for found in values(run_ranks(counted_on, 2, timeout=TIMEOUT_S)):
        assert found == expected


def with_rows(rank: int, world_size: int) -> list[Any]:
    """What a ledger says of calls whose rows alone differ, of the most rows there may be, of a call that rank 0 alone
    has begun, and of one that rank 0 closes its heap instead of making."""
    book, said = _Book(), []

    def found(mine: Begun | None, look: Callable[[], Any]) -> None:
        if mine is not None:
            book.begin(*mine)
        book.members.exchange(b"", "began")
        said.append(look())
        book.members.exchange(b"", "looked")
        book.restart()

    most = Begun(65_534, MOST_ROWS)
    found(Begun(3, 8), book.compare)
    found(Begun(3, 8 + rank), book.compare)
    found(most if rank == 0 else Begun(0), book.compare)
    found(Begun(1, 7) if rank == 0 else None, book.overtaken)
    if rank == 0:
        book.close()
    found(Begun(1, 7) if rank == 1 else None, book.compare)
    return said


@pytest.mark.num_ranks(2)
def test_rows_are_compared() -> None:
    different = Difference(1, [Begun(3, 8), Begun(3, 9)]), Difference(1, [Begun(65_534, MOST_ROWS), Begun(0)])
    mine, theirs = values(run_ranks(with_rows, 2, timeout=TIMEOUT_S))
    assert mine == [None, *different, None, None]
    assert theirs == [
        None,
        *different,
        Difference(1, [Begun(1, 7), None]),
        Difference(1, [None, Begun(1, 7)], 0),
    ]


def of_one_rank(rank: int, world_size: int) -> bool:
    """A product on a heap's workspace is no call of the others."""
    with Heap(HEAP_BYTES) as heap:
        space = workspace_for(heap)
        call = summed(4, 8)
        call(heap)
        if rank == 0:
            stream_k.gemm(integers(20, 24, F16, 1), integers(24, 16, F16, 2), workspace=space)
        right = torch.equal(call(heap), ones(4, 8) * world_size)
        heap.barrier()
        return right


@pytest.mark.num_ranks(2)
def test_a_product_of_one_rank_is_not_counted() -> None:
    assert values(run_ranks(of_one_rank, 2, timeout=TIMEOUT_S)) == [True, True]
