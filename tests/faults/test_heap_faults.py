"""Faults in calls on a heap: cases 1, 4, 5, 6 (what the host does in them) and 14 to 16.

Each test asserts every rank's error, how long it took, that contents around are unchanged, and that the next call, or
the next job, works. `canary` surrounds what a fault might touch.
"""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from pyrocshmem import (
    CallMismatch,
    Heap,
    HeapOutOfMemory,
    PeerAborted,
    PeerTimeout,
    collectives,
    finegrained_alloc,
    stream_k,
    target,
)
from pyrocshmem.forming import SYSTEM_BYTES
from tests.faults.heap_support import (
    MIB,
    assert_next_job_works,
    canary,
    healthy,
    mapped_files,
    raised_by,
    raised_within,
    warm_up,
)
from tests.ranks import run_ranks, values
from tests.stopwatch import Stopwatch

TIER = 2
BUDGET_S = 2.0


def _killed(rank, world_size):
    heap = Heap(MIB)
    x = heap.ones(4)
    heap.timeout = BUDGET_S
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = raised_within(BUDGET_S + 2, lambda: heap.free(x))
    op = getattr(error, "op", None)
    return type(error), error.peer, op, float(x.sum()), mapped_files()


@pytest.mark.num_ranks(3)
@pytest.mark.alone
def test_case_1_a_killed_peer_is_named_in_time_and_leaves_nothing():
    ends = run_ranks(_killed, 3)
    assert ends[1].exitcode == -signal.SIGKILL
    heard = [ends[rank].value for rank in (0, 2)]
    assert PeerTimeout in [kind for kind, *_ in heard]
    for kind, peer, op, total, files in heard:
        # The second survivor may hear of the first one's timeout before its own.
        assert (kind, peer, op) == (PeerTimeout, 1, "free") if kind is PeerTimeout else kind is PeerAborted
        assert total == 4
        assert len(files) == (3 if target.backend() == "host" else 0)
    assert_next_job_works()


def _raises_first(rank, world_size):
    warm_up(rank)
    if rank == 1:
        time.sleep(1)  # the others are waiting by then
        raise KeyError(f"weights, at {time.time()}")
    watch = Stopwatch()
    error, _ = raised_by(lambda: Heap(MIB))
    return type(error), error.peer, str(error), time.time(), watch.late()


@pytest.mark.num_ranks(3)
@pytest.mark.alone
def test_case_4_a_rank_that_raises_before_its_call():
    ends = run_ranks(_raises_first, 3)
    raised_at = float(str(ends[1].exception).rpartition(" ")[2].strip("'\""))
    for rank in (0, 2):
        kind, peer, text, when, late = ends[rank].value
        assert (kind, peer) == (PeerAborted, 1)
        assert "KeyError: 'weights" in text
        assert when - raised_at < 1 + late


# ---- 5, 6: different calls


def _different_calls(rank, world_size):
    found = []
    with Heap(MIB) as heap:
        kept = heap.ones(32)
        for call in (
            lambda: heap.zeros(8 + (rank == 1)),
            lambda: heap.zeros(8, dtype=torch.float16 if rank == 2 else torch.float32),
            lambda: heap.zeros(8) if rank else heap.ones(8),
            lambda: heap.zeros(8) if rank else heap.free(kept),
            lambda: heap.barrier() if rank else heap.empty(3),
            lambda: heap.zeros(8) if rank else heap.zeros(-8),
        ):
            with canary(heap):
                error = raised_within(1, call)
            found.append((type(error).__name__, getattr(error, "calls", [str(error)])))
        assert float(kept.sum()) == 32
    return found


@pytest.mark.num_ranks(3)
@pytest.mark.alone
def test_cases_5_and_6_different_calls_are_listed_on_all_ranks():
    ends = values(run_ranks(_different_calls, 3))
    for rank in range(3):
        kinds = [kind for kind, _ in ends[rank]]
        # In the last, rank 0's own mistake matters more than the mismatch it makes.
        assert kinds == ["CallMismatch"] * 5 + (["RuntimeError"] if rank == 0 else ["CallMismatch"])
    calls = [call for _, call in ends[1]]
    assert calls[0] == [f"zeros([{n}], torch.float32)" for n in (8, 9, 8)]
    assert calls[1][2] == "zeros([8], torch.float16)"
    assert calls[2][0].startswith("ones")
    assert calls[3] == ["free", *["zeros([8], torch.float32)"] * 2]
    assert calls[4] == ["empty([3], torch.float32)", "barrier", "barrier"]
    assert "RuntimeError" in calls[5][0]


def _different_sizes(rank, world_size):
    error = raised_within(5, lambda: Heap(MIB * (1 + rank)))
    assert finegrained_alloc.live().allocations == 0
    return type(error), str(error), healthy(rank, world_size)


@pytest.mark.num_ranks(2)
@pytest.mark.alone
def test_heaps_of_different_sizes():
    for kind, text, total in values(run_ranks(_different_sizes, 2)):
        assert (kind, total) == (CallMismatch, 8.0)
        assert str(MIB) in text
        assert str(2 * MIB) in text


# ---- 14: out of memory


def _exhausted_on_one(rank, world_size):
    with Heap(MIB) as heap, canary(heap):
        # Ranks stay symmetric by themselves; so take the memory of one behind the heap's back.
        hidden = heap._free_list.alloc(MIB // 2 + 256) if rank == 1 else None
        error = raised_within(1, lambda: heap.zeros(MIB // 2, dtype=torch.uint8))
        if hidden is not None:
            heap._free_list.free(hidden)
        return type(error), error.requested, error.free, error.largest, error.rank


@pytest.mark.num_ranks(3)
@pytest.mark.alone
def test_case_14_exhausted_on_one_rank():
    ends = values(run_ranks(_exhausted_on_one, 3))
    for kind, requested, free, largest, rank in ends:
        assert (kind, requested, rank) == (HeapOutOfMemory, MIB // 2, 1)
        assert free == largest == MIB - 1024 - MIB // 2 - 256


def test_case_14_exhausted_by_fragments():
    with Heap(16 * 256) as heap:
        tensors = [heap.empty(256, dtype=torch.uint8) for _ in range(16)]
        for tensor in tensors[::2]:
            heap.free(tensor)
        with pytest.raises(
            HeapOutOfMemory, match="512 bytes requested, 2048 free, 256 the largest free block"
        ):
            heap.empty(512, dtype=torch.uint8)
        assert heap.usage().num_allocations == 8
        assert heap.offset(heap.empty(256, dtype=torch.uint8)) == SYSTEM_BYTES


# ---- 15: bad frees


def _bad_frees(rank, world_size):
    found = []
    with Heap(MIB, debug=True) as heap, canary(heap):
        x, y = heap.full((100,), 3.0), heap.full((100,), 4.0)
        gone = heap.ones(10)
        heap.free(gone)
        elsewhere = torch.ones(100, device=heap.device)
        reused = heap.ones(10)  # the bytes of `gone`
        mistakes = {
            "freed": gone, "interior": x[10:], "foreign": elsewhere, "not a tensor": 3, "another device": x.to("meta"),
        }  # fmt: skip
        for tensor in mistakes.values():
            for who in (0, 1):  # the mistake of one rank, then of all
                wrong = who == 0 or rank == 1
                error = raised_within(1, lambda wrong=wrong, tensor=tensor: heap.free(tensor if wrong else y))
                found.append((type(error).__name__, str(error)))
        assert heap.usage().num_allocations == 5
        assert float(x.sum() + y.sum() + reused.sum()) == 710
        heap.free(x.view(10, 10)[:2])  # the start of its block
        assert bool(x.isnan().all()), "use after free must read NaN in debug mode"
        heap.free(y)
        heap.free(reused)
    return found


@pytest.mark.num_ranks(2)
@pytest.mark.alone
def test_case_15_bad_frees():
    ends = values(run_ranks(_bad_frees, 2))
    words = ["was freed"] * 2 + ["starts inside its block"] * 2 + ["not on this heap"] * 2
    words += ["got a int"] * 2 + ["the tensor is on meta"] * 2
    for rank in range(2):
        for (kind, text), word, who in zip(ends[rank], words, (0, 1) * 5, strict=True):
            assert word in text
            own = who == 0 or rank == 1
            assert kind == ("TypeError" if word == "got a int" and own else "ValueError")
            assert own or "nothing was freed, because rank 1 raised" in text


def _use_after_free(rank, world_size):
    """What calls with freed tensors raised, the first ones and repeated ones, with how the call names the tensor."""
    found = []
    with Heap(16 * MIB) as heap:
        a, b = torch.ones(16, 16, device=heap.device), torch.ones(16, 16 // world_size, device=heap.device)
        square, weight = a.clone(), a[0].clone()
        reduce, gather = stream_k.gemm_all_reduce, stream_k.all_gather_gemm
        everything = {
            "gemm_all_reduce, out": lambda x: reduce(a, square, group=heap, out=x),
            "gemm_all_reduce, a": lambda x: reduce(x, square, group=heap),
            "gemm_reduce_scatter, b": lambda x: stream_k.gemm_reduce_scatter(a, x, group=heap),
            "gemm_all_scatter, out": lambda x: stream_k.gemm_all_scatter(a, b, group=heap, out=x),
            "all_gather_gemm, a": lambda x: gather(x.t(), square, group=heap),
            "gemm, bias": lambda x: stream_k.gemm(a, square, bias=x[1]),
            "gemm_all_reduce_rms_norm, residual": lambda x: stream_k.gemm_all_reduce_rms_norm(
                a, square, x, weight, 1e-6, group=heap
            ),
            "all_reduce_rms_norm, weight": lambda x: collectives.all_reduce_rms_norm(
                a, a, x[0], 1e-6, group=heap
            ),
            "rms_norm, out": lambda x: collectives.rms_norm(a, weight, 1e-6, group=heap, out=x),
            "all_reduce, out": lambda x: collectives.all_reduce(a, group=heap, out=x),
            "all_reduce, x": lambda x: collectives.all_reduce(x, group=heap),
        }
        fresh = heap.ones(16, 16)
        collectives.barrier(group=heap)  # makes the workspace
        for name, call in everything.items():
            for calls in (0, 2):
                gone = heap.ones(16, 16)
                for _ in range(calls):
                    call(gone)
                heap.synchronize()
                place = heap.offset(gone)
                heap.free(gone)
                reused = heap.full((16, 16), 7.0)
                assert heap.offset(reused) == place
                with canary(heap):
                    error = raised_within(1, lambda call=call, gone=gone: call(gone))
                    heap.synchronize()
                assert bool((reused == 7).all()), name
                found.append((name.rpartition(" ")[2], type(error).__name__, str(error)))
                call(fresh)
                heap.synchronize()
                heap.free(reused)
    return found


@pytest.mark.num_ranks(2)
def test_case_15_use_after_free():
    for found in values(run_ranks(_use_after_free, 2)):
        for operand, kind, text in found:
            assert (kind, text.split(":")[0]) == ("ValueError", f"{operand} was freed")


# ---- 16: what a peer can't be asked for


def _bad_views(rank, world_size):
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    with Heap(MIB, pairs[rank // 2]) as heap, Heap(MIB) as other, canary(heap):
        x = heap.ones(3)
        assert (heap.rank, heap.world_size) == (rank % 2, 2)
        errors = [
            raised_by(call)[0]
            for call in (
                lambda: heap.peer_view(torch.ones(3, device=heap.device), 0),
                lambda: heap.peer_view(other.ones(3), 0),
                lambda: heap.peer_view(torch.ones(3, device="meta"), 0),
                lambda: heap.peer_view(x, 2),
                lambda: heap.peer_view(x, -1),
            )
        ]
        heap.free(x)
        return [(type(error), str(error)) for error in errors]


@pytest.mark.num_ranks(4)
def test_case_16_views_that_can_not_be():
    for rank, errors in enumerate(values(run_ranks(_bad_views, 4))):
        assert [kind for kind, _ in errors] == [ValueError] * 5
        members = [0, 1] if rank < 2 else [2, 3]
        texts = [text for _, text in errors]
        assert "not on this heap" in texts[0]
        assert "not on this heap" in texts[1]
        assert "the tensor is on meta, the heap on" in texts[2]
        for text, asked in ((texts[3], 2), (texts[4], -1)):
            assert f"rank {asked}, allowed are 0..1: ranks count within the heap's group" in text
            assert str(members) in text


# ---- 17: bad handles
