"""Calls that differ from earlier ones in their rows alone: no vote, no new buffer, no plan that is kept for ever; and
what happens where ranks bring different rows."""

import contextlib
import gc
import tracemalloc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import pyrocshmem
from pyrocshmem import CallMismatch, Heap, ShmemError, collectives, stream_k
from pyrocshmem.calls import planning
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.workspace import KEPT_PLANS, Workspace, workspace_for
from pyrocshmem.collectives.all_reduce_rms_norm import normalized
from pyrocshmem.stream_k.local_gemm import plan
from pyrocshmem.stream_k.local_gemm.blas import BlasPlan
from pyrocshmem.testing.planning_heap import PlanningHeap
from tests.ranks import run_ranks, values
from tests.stream_k.products import device, integers, small_config

TIER = 2
TIMEOUT_S = 200.0
HEAP_BYTES = 64 << 20
F16 = torch.float16
N, K = 48, 40

# By op, what a rank calls with its rows of A, of M in all, and what is exact of small integers.
Call = Callable[[torch.Tensor, Heap], torch.Tensor]


def operand(rows: int, columns: int, seed: int) -> torch.Tensor:
    return integers(rows, columns, F16, seed)


def _b(rank: int) -> torch.Tensor:
    return operand(K, N, 100 + rank)


def _normed(a: torch.Tensor, heap: Heap) -> torch.Tensor:
    weight = torch.ones(N, dtype=F16, device=device())
    return stream_k.gemm_all_reduce_rms_norm(a, _b(heap.rank), None, weight, 1e-6, group=heap)[1]


CALLS: dict[str, Call] = {
    "gemm_all_reduce": lambda a, heap: stream_k.gemm_all_reduce(a, _b(heap.rank), group=heap),
    "gemm_reduce_scatter": lambda a, heap: stream_k.gemm_reduce_scatter(a, _b(heap.rank), group=heap),
    "gemm_all_scatter": lambda a, heap: stream_k.gemm_all_scatter(a, _b(heap.rank), group=heap),
    "all_gather_gemm": lambda a, heap: stream_k.all_gather_gemm(a, _b(heap.rank), group=heap),
    "gemm_all_reduce_rms_norm": _normed,
    "all_reduce": lambda a, heap: collectives.all_reduce(a, group=heap),
    "all_gather": lambda a, heap: collectives.all_gather(a, group=heap),
    "rms_norm": lambda a, heap: collectives.rms_norm(a, torch.ones_like(a[0]), 1e-6, group=heap),
}
ROWS = [300, 1, 299, 64, 128, 65, 17, 16, 130, 256, 31]
FEW_ROWS = [70, 1, 69, 64, 16, 17]


def rows_of(name: str) -> list[int]:
    """Of calls one after another. A row of a norm takes a program, interpreted."""
    return FEW_ROWS if name == "gemm_all_reduce_rms_norm" else ROWS


class Votes:
    """Counts what a heap's ranks vote on."""

    def __init__(self, heap: Heap) -> None:
        self.seen: list[str] = []
        vote = heap.vote

        def counted(call: str, payload: bytes = b"") -> list[bytes]:
            self.seen.append(call)
            return vote(call, payload)

        heap.vote = counted  # type: ignore[method-assign]

    def taken(self) -> list[str]:
        found, self.seen = self.seen, []
        return found


def expected(name: str, rows: int, rank: int, world: int) -> torch.Tensor:
    """The result of a call of CALLS, whose A is `operand(rows, K, 10 + rank)`."""
    a = [operand(rows, K, 10 + peer).double() for peer in range(world)]
    products = [x @ _b(peer).double() for peer, x in enumerate(a)]
    if name in ("gemm_all_reduce", "gemm_all_reduce_rms_norm"):
        return sum(products)  # type: ignore[return-value]
    if name == "gemm_reduce_scatter":
        return torch.tensor_split(sum(products), world)[rank]  # type: ignore[arg-type]
    if name == "gemm_all_scatter":
        return torch.cat([a[rank] @ _b(peer).double() for peer in range(world)], 1)
    if name == "all_gather_gemm":
        return torch.cat(a) @ _b(rank).double()
    if name == "all_reduce":
        return sum(a)  # type: ignore[return-value]
    if name == "all_gather":
        return torch.cat(a)
    scale = (sum((x * x).sum(1, keepdim=True) for x in a) / (world * K) + 1e-6).rsqrt()
    return a[rank] * scale


def other_rows(rank: int, world_size: int, name: str) -> dict[str, list[Any]]:
    """(votes of the first call; of the following ones, by their rows; errors of all) of a call with one number of rows
    after another, the largest first. Those of a column-parallel op have the same A on all ranks."""
    call, votes, wrong = CALLS[name], {}, []
    with Heap(HEAP_BYTES) as heap:
        votes_of = Votes(heap)
        for rows in rows_of(name):
            shared = name in ("gemm_all_scatter",)
            a = operand(rows, K, 10 + (0 if shared else rank))
            out = call(a, heap)
            truth = expected(name, rows, 0 if shared else rank, world_size)
            tolerance = 2e-3 if name == "rms_norm" else 0.0
            if not torch.allclose(out.double(), truth, rtol=tolerance, atol=tolerance):
                wrong.append(rows)
            votes[rows] = votes_of.taken()
        heap.barrier()
    return {"votes": [*votes.items()], "wrong": wrong}


@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_rows_that_were_never_seen_need_no_vote(name: str) -> None:
    for found in values(run_ranks(other_rows, 2, name, timeout=TIMEOUT_S)):
        assert found["wrong"] == []
        (_, first), *later = found["votes"]
        assert first
        # A smaller call may be made in another way, whose buffers come once.
        grown = [rows for rows, seen in later if seen]
        assert len(grown) <= 2, found["votes"]


def different_rows(rank: int, world_size: int, name: str) -> tuple[str, bool]:
    """(what is raised, whether the heap recovers) where ranks bring different rows of a call that all know."""
    call = CALLS[name]
    with Heap(HEAP_BYTES) as heap:
        for rows in (128, 64, 32):
            call(operand(rows, K, 1), heap)
        heap.barrier()
        raised = "nothing"
        try:
            call(operand(64 if rank == 0 else 32, K, 1), heap)
            heap.synchronize()
            call(operand(64, K, 1), heap)
            heap.synchronize()
        except ShmemError as error:
            raised = f"{type(error).__name__}: {error}"
            heap.recover()
        out = call(operand(64, K, 1), heap)
        heap.barrier()
        return raised, bool(out.isfinite().all())


@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("name", ["gemm_all_reduce", "all_gather_gemm", "all_reduce"])
def test_ranks_with_different_rows_hear_of_it(name: str) -> None:
    for raised, recovered in values(run_ranks(different_rows, 2, name, timeout=TIMEOUT_S)):
        assert raised.startswith(f"{CallMismatch.__name__}: ranks made different calls as number"), raised
        assert recovered


def warmed(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """(votes of calls after warming up for them, errors, whether anything was launched meanwhile)."""
    call, wrong = CALLS[name], []
    with Heap(HEAP_BYTES) as heap:
        with mock.patch.object(Launch, "__call__") as launched:
            done = pyrocshmem.warm_up(
                lambda rows: call(operand(rows, K, 1), heap), rows=max(rows_of(name)), group=heap
            )
        votes_of = Votes(heap)
        for rows in rows_of(name):
            shared = name == "gemm_all_scatter"
            out = call(operand(rows, K, 10 + (0 if shared else rank)), heap)
            truth = expected(name, rows, 0 if shared else rank, world_size)
            tolerance = 2e-3 if name == "rms_norm" else 0.0
            if not torch.allclose(out.double(), truth, rtol=tolerance, atol=tolerance):
                wrong.append(rows)
        return {
            "votes": votes_of.taken(),
            "wrong": wrong,
            "launched": launched.call_count,
            "seconds": done.seconds,
        }


@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_no_vote_after_warming_up(name: str) -> None:
    for found in values(run_ranks(warmed, 2, name, timeout=TIMEOUT_S)):
        assert (found["votes"], found["wrong"], found["launched"]) == ([], [], 0)
        assert found["seconds"] > 0


@pytest.mark.parametrize("mode", ["collect", "sizes", "plan"])
def test_a_norm_of_pytorch_is_not_computed_while_planning(mode: planning.Mode) -> None:
    total, weight = torch.empty(3, N, dtype=F16), torch.empty(N, dtype=F16)
    with mock.patch.object(torch.nn.functional, "rms_norm") as computed, planning.only(mode):
        norm, same = normalized(total, None, weight, 1e-6)
    assert (norm.shape, norm.dtype, computed.call_count) == (total.shape, F16, 0)
    assert same is total


def by_name(rank: int, world_size: int) -> list[str]:
    """Votes of calls after warming up for them by their sizes."""
    with Heap(HEAP_BYTES) as heap:
        ops = ("gemm", "gemm_all_reduce", "all_gather_gemm", "gemm_all_reduce_rms_norm")
        sizes = [(op, N, K) for op in ops]
        pyrocshmem.warm_up(*sizes, ("all_reduce", N, 0), ("rms_norm", N, 0), rows=200, dtype=F16, group=heap)
        votes_of = Votes(heap)
        x, b = operand(150, N, 1), operand(N, K, 2).t()
        stream_k.gemm_all_reduce(operand(150, K, 1), b, group=heap)
        stream_k.all_gather_gemm(operand(70, K, 1), b, group=heap)
        stream_k.gemm_all_reduce_rms_norm(operand(9, K, 1), b, None, torch.ones_like(x[0]), 1e-6, group=heap)
        collectives.all_reduce(x, group=heap)
        collectives.rms_norm(x, torch.ones_like(x[0]), 1e-6, group=heap)
        heap.synchronize()
        return votes_of.taken()


@pytest.mark.num_ranks(2)
def test_calls_by_their_sizes() -> None:
    assert values(run_ranks(by_name, 2, timeout=TIMEOUT_S)) == [[], []]


@pytest.mark.cpu
def test_what_can_not_be_warmed_up() -> None:
    with Heap(1 << 20) as heap:
        for error, match, calls, options in (
            (ValueError, "rows is 0, at least 1", (("gemm", 8, 8),), {"rows": 0}),
            (ValueError, "op is 'gemms', allowed are", (("gemms", 8, 8),), {}),
            (ValueError, "K of gemm is 0, at least 1", (("gemm", 8, 0),), {}),
            (ValueError, "'barrier', which needs no warming up", (("barrier", 8, 0),), {}),
            (TypeError, "dtype is None, allowed are", (("gemm", 8, 8),), {"dtype": None}),
            (TypeError, "a call is 'gemm'; ", ("gemm",), {}),
        ):
            given: dict[str, Any] = {"rows": 8, "dtype": F16, "group": heap} | options
            with pytest.raises(error, match=match):
                pyrocshmem.warm_up(*calls, **given)
        with pytest.raises(ValueError, match="rows is 0, at least 1"):
            Workspace(heap).reserve(0)


MANY = 1000


def announced(rank: int, world_size: int, name: str, rows: int) -> tuple[list[str], bool]:
    """(votes of a call of MANY rows after one of 3, of a workspace on which `rows` were announced if any, whether the
    result is right)."""
    call = CALLS[name]
    with Heap(HEAP_BYTES) as heap:
        if rows:
            workspace_for(heap).reserve(rows)
        call(operand(3, K, 1), heap)
        votes_of = Votes(heap)
        of = 0 if name == "gemm_all_scatter" else rank
        out = call(operand(MANY, K, 10 + of), heap)
        return votes_of.taken(), bool((out.double() == expected(name, MANY, of, world_size)).all())


@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("name", ["gemm_reduce_scatter", "gemm_all_scatter"])
def test_rows_that_were_announced(name: str) -> None:
    for votes, right in values(run_ranks(announced, 2, name, 2 * MANY, timeout=TIMEOUT_S)):
        assert (votes, right) == ([], True)
    # The control: buffers grow, of which ranks vote.
    for votes, right in values(run_ranks(announced, 2, name, 0, timeout=TIMEOUT_S)):
        assert right
        assert len(votes) > 1


def _nothing(*args: object) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


def _planned(heap: PlanningHeap, rows: int) -> None:
    a = torch.empty(rows, K, dtype=F16)
    stream_k.gemm_all_reduce(a, torch.empty(K, N, dtype=F16), group=heap)


@pytest.mark.cpu
def test_ten_thousand_numbers_of_rows_leave_memory_flat() -> None:
    heap = PlanningHeap(2)
    workspace = heap.workspace = Workspace(heap)
    with (
        # No mocks: they would remember every call.
        mock.patch.object(Launch, "__call__", _nothing),
        mock.patch.object(Workspace, "begin", _nothing),
    ):
        torch.manual_seed(0)
        order = [1 + number for number in torch.randperm(10_000).tolist()]
        _planned(heap, 10_000)
        tracemalloc.start()
        try:
            for rows in order[:3000]:
                _planned(heap, rows)
            gc.collect()
            begin, buffers = tracemalloc.get_traced_memory()[0], workspace.nbytes_in_use()
            for rows in order[3000:]:
                _planned(heap, rows)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - begin
        finally:
            tracemalloc.stop()
    assert len(workspace.plans) <= KEPT_PLANS
    assert workspace.nbytes_in_use() == buffers
    assert len(workspace.agreed) < 8
    # A plan has some 20 KB; those that are kept are of other sizes now.
    assert grown < 4 << 20, grown


@pytest.mark.cpu
@pytest.mark.parametrize("op", ["gemm_all_reduce", "all_gather_gemm"])
def test_the_blas_multiplies_beforehand_only_where_ranks_wait_for_one_another(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of each new number of rows would be made twice."""
    heap = PlanningHeap(2)
    heap.workspace = Workspace(heap)
    loaded: list[bool] = []

    def noted(*args: Any, loads: bool, **options: Any) -> BlasPlan:
        loaded.append(loads)
        return BlasPlan(*args, loads=loads, **options)

    monkeypatch.setattr(plan, "BlasPlan", noted)
    config = small_config(placement="unfused", algorithm="one_shot")
    b = torch.empty(K, N, dtype=torch.float32)
    with planning.only("plan"):
        for rows in (300, 200, 300):
            a = torch.empty(rows // (2 if op == "all_gather_gemm" else 1), K)
            getattr(stream_k, op)(a, b, group=heap, config=config)
    assert loaded == [True, False]
