"""Rows that are normalized where they are stored, on several programs: how they are cut, what they leave in a slot, and
that no program goes on without the sums of the others.

Where programs run one after another, a row has one; so rows on several are for GPUs, but for the wait that ends.
"""

import pytest
import torch

from collectives import exchange, exchange_kernel
from pyrocshmem import Heap, message, target  # before Triton
from pyrocshmem.errors import PeerAborted, PeerTimeout

import triton  # isort: skip
import triton.language as tl

from pyrocshmem.trace import now_ns
from stream_k.workspace import Workspace
from tests.fused import norm_bodies as bodies
from tests.fused.cases import digest
from tests.fused.norm_bodies import BF16, F16, F32, Case
from tests.ranks import run_ranks, values

TIER = 2
HEAP_BYTES = 64 << 20
ALGORITHMS = ("one_shot", "two_shot")
MOST_THREADS = 1024


@pytest.mark.parametrize("world_size", range(1, 9))
def test_rows_are_cut_for_programs(world_size: int) -> None:
    """Every unit has a program; the sums of a row's programs fit in one block; a thread has one unit at most."""
    ranks = 1 << (world_size - 1).bit_length()
    for row_units in (*range(1, 300), 511, 512, 513, 1024, 1025, 2048, 4095, 8192, 16384):
        step, programs = exchange.row_programs(row_units, world_size, interpreted=False)
        assert step & (step - 1) == 0
        assert 128 <= step * ranks <= MOST_THREADS
        assert (programs - 1) * step < row_units <= programs * step
        assert programs <= step
        # No more units than that takes.
        assert step * ranks == 128 or (step // 2) ** 2 < row_units
        step, programs = exchange.row_programs(row_units, world_size, interpreted=True)
        assert programs == 1
        assert row_units <= step < 2 * row_units
    # The least of the GPUs that we know has 132 multiprocessors, each with room for one program of that many threads.
    for row_units in (16385, 70_000, 1 << 20):
        step, programs = exchange.row_programs(row_units, world_size, interpreted=False)
        assert (programs - 1) * step < row_units <= programs * step
        assert programs <= 128


def test_rows_of_8192_columns_have_16_or_32_programs() -> None:
    """Of 16 bits each."""
    cut = [exchange.row_programs(1024, world_size, interpreted=False) for world_size in (2, 3, 4, 8)]
    assert cut == [(64, 16), (32, 32), (32, 32), (32, 32)]


@triton.jit
def leave_the_last_quad(messages, count, used_words):
    """`message.advance` as it must not be: the last program's sum of squares stays in the slot."""
    tl.store(messages + message._COUNT, count + 1)
    tl.store(messages + message._USED, used_words - 4)


def left_behind(rank: int, world_size: int, emptied: bool) -> list[str]:
    """What calls of both kinds leave in the slots; what should not be there."""
    wrong = []
    if not emptied:
        message.advance = leave_the_last_quad
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap)
        for seed, (algorithm, shape) in enumerate(
            (algorithm, shape) for shape in ((7, 45), (2, 24)) for algorithm in ALGORITHMS
        ):
            case = Case(*shape, 16, F16, F32, config=(("algorithm", algorithm),))
            bodies.Whole(case, heap, seed).all_reduce(workspace=workspace)
            heap.synchronize()
            heap.vote("all have called")
            messages, quads = workspace.messages(0)
            slots = messages[message.HEAD_WORDS :].view(message.NUM_SLOTS, quads * 4)
            full = (slots != int(message.SENTINEL.value)).cpu()
            last = (int(messages[message.COUNT]) - 1) % message.NUM_SLOTS
            used = int(messages[message.USED])
            rows = -(-shape[0] // (world_size if algorithm == "two_shot" else 1))
            piece = exchange._Piece(0, 0, rows, shape[1], 0, 0, 0, 0, 0, 0)
            planned = exchange.slot_bytes(algorithm, piece, F32, F16, world_size, True)
            if not full[last, :used].any() or used * 4 != planned:
                wrong.append(f"{case}: {used} words used, {planned} bytes planned")
            if full[last, used:].any() or full[[slot for slot in range(3) if slot != last]].any():
                wrong.append(f"{case}: words that nobody will empty")
            heap.vote("all have looked")
    return wrong


@pytest.mark.num_ranks(2)
def test_slots_are_empty_again() -> None:
    """Squares included; on a CPU also the control."""
    assert values(run_ranks(left_behind, 2, True)) == [[], []]
    if target.interpreted():
        for wrong in values(run_ranks(left_behind, 2, False)):
            assert any("nobody will empty" in text for text in wrong)


def out_of_order(rank: int, world_size: int) -> str:
    """A row on two programs that run one after another: how the first one's wait for the second ends."""
    config = (("algorithm", "one_shot"),)
    try:
        with Heap(HEAP_BYTES) as heap:
            workspace = Workspace(heap, wait_seconds=1.0)
            # What is compiled or loaded once is no part of the wait.
            bodies.Whole(Case(1, 24, 16, F16, F32, config=config), heap, 0).all_reduce(workspace=workspace)
            exchange.row_programs = lambda row_units, world_size, interpreted: (4, 2)
            bodies.Whole(Case(1, 40, 16, F16, F32, config=config), heap, 0).all_reduce(workspace=workspace)
    except (PeerTimeout, PeerAborted) as error:
        return str(error)
    return ""


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_the_wait_for_a_rows_programs_ends() -> None:
    """And says that the rank's own programs are missing; the other rank is told, or gives up as well."""
    ends = values(run_ranks(out_of_order, 2))
    assert all("gave up" in text or "in vain" in text for text in ends)
    assert any(
        "gemm_all_reduce_rms_norm" in text and "in vain for a program of its own" in text for text in ends
    )


WIDE = [
    Case(3, 2100, 64, F16, F16, config=(("algorithm", "one_shot"),)),
    Case(5, 2101, 64, F16, F32, config=(("algorithm", "two_shot"),)),
    Case(1, 4096, 64, BF16, BF16, config=(("algorithm", "one_shot"),)),
    Case(16, 4096, 64, BF16, BF16, config=(("algorithm", "two_shot"),)),
    Case(16, 8192, 64, BF16, F32, bias=F32, config=(("algorithm", "one_shot"),)),
    Case(7, 8192, 64, BF16, BF16, residual=False, wire=BF16, config=(("algorithm", "two_shot"),)),
    Case(5, 5000, 64, F32, F16, config=(("algorithm", "one_shot"),)),
    Case(9, 5000, 64, F32, F32, config=(("algorithm", "two_shot"),)),
]
CALLS = 30
LATE_NS = tl.constexpr(30_000)
_send_squares, _of_rank = exchange_kernel._send_squares, exchange_kernel._of_rank


@triton.jit
def send_squares_late(
    peers, place, words, column, width, valid, keeps, RANKS: tl.constexpr, UNIT: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """The squares, every third program's late."""
    now = now_ns()
    end = now + tl.where(tl.program_id(0) % 3 == 1, LATE_NS, 0)
    while now < end:
        now = now_ns()
    _send_squares(peers, place, words, column, width, valid, keeps, RANKS, UNIT, DTYPE)


@triton.jit
def squares_so_far(
    slot, region, keeps, deadline, context, PARTS: tl.constexpr, STEP: tl.constexpr, WORLD: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """`exchange_kernel._row_squares` as it must not be: without the wait."""
    lane, ranks = tl.arange(0, STEP)[:, None], tl.arange(0, RANKS)[None, :]
    place = region + ranks * tl.num_programs(0) + tl.program_id(0) // PARTS * PARTS + lane
    words = message.fetch(slot + place * 4, (lane < PARTS) & keeps)
    each = tl.sum(words[0].to(tl.float32, bitcast=True), axis=0)
    squares = tl.zeros(words[0].shape, tl.float32)
    for k in tl.static_range(WORLD):
        squares = tl.where(ranks == k, _of_rank(each, k, RANKS), squares)
    return squares, tl.zeros(words[0].shape, tl.int32)


def wide_rows(rank: int, world_size: int, late: bool, waits: bool) -> tuple[list[str], list[str]]:
    """(what was wrong, the bits) of calls on rows of several programs, which are late and wait, or not."""
    if late:
        exchange_kernel._send_squares = send_squares_late
    if not waits:
        exchange_kernel._row_squares = squares_so_far
    wrong, bits = [], []
    with Heap(HEAP_BYTES) as heap:
        for seed, case in enumerate(WIDE):
            whole = bodies.Whole(case, heap, seed)
            results = [whole.all_reduce() for _ in range(CALLS)]
            if rank == 1 and whole.residual is not None:
                # One element on in memory: this rank loads it an element at a time.
                there = torch.empty(whole.residual.numel() + 1, dtype=case.dtype, device=heap.device)
                whole.residual = there[1:].view(whole.residual.shape).copy_(whole.residual)
            results.append(whole.all_reduce())
            heap.synchronize()
            y, total = results[0]
            wrong += [
                f"{case}: {text}" for text in (whole.wrong_total(total), whole.wrong_norm(y, total)) if text
            ]
            found = {(digest(y), digest(total)) for y, total in results}
            if len(found) > 1:
                wrong.append(f"{case}: {len(found)} results of the same data")
            bits += sorted(map(str, found))
    return wrong, bits


@pytest.mark.num_gpus(2)
@pytest.mark.parametrize("late", [False, True], ids=["as they come", "late"])
def test_wide_rows(late: bool) -> None:
    """Against float64; the same bits in each call, on both ranks, and where one rank's residual is not aligned."""
    found = values(run_ranks(wide_rows, 2, late, True, timeout=150.0))
    assert [wrong for wrong, _ in found] == [[], []]
    assert found[0][1] == found[1][1]


@pytest.mark.num_gpus(2)
def test_without_the_wait_late_programs_are_noticed() -> None:
    """The control of the test above."""
    assert all(wrong for wrong, _ in values(run_ranks(wide_rows, 2, True, False, timeout=150.0)))
