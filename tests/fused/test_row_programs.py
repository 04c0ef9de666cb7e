"""Rows that are normalized where they are stored, on several programs: how they are cut, what they leave in a slot, and
that no program goes on without the sums of the others.

Where programs run one after another, a row has one; so rows on several are for GPUs, but for the wait that ends.
"""

from typing import Any

import pytest
import torch

from pyrocshmem import Heap, signal, stream_k  # before Triton
from pyrocshmem.collectives import exchange, exchange_kernel, normalizing
from pyrocshmem.errors import PeerAborted, PeerTimeout
from pyrocshmem.message_slots import HEAD_WORDS, NUM_SLOTS, SENTINEL

import triton  # isort: skip
import triton.language as tl

from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.trace import now_ns
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


def left_behind(rank: int, world_size: int) -> list[str]:
    """Calls of both kinds that leave something in the slots, or not the notes that they should."""
    wrong = []
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
            slots, notes = messages[HEAD_WORDS:].split(
                [NUM_SLOTS * 4 * quads, len(messages) - HEAD_WORDS - NUM_SLOTS * 4 * quads]
            )
            rows = -(-shape[0] // (world_size if algorithm == "two_shot" else 1))
            # Of each source a program's of a row; the second word of a note is its call's number.
            numbers = notes.view(-1, NUM_SLOTS, 2)[:, seed % NUM_SLOTS, 1]
            if (numbers == seed).sum() != rows * (world_size if algorithm == "two_shot" else 1):
                wrong.append(f"{case}: notes {numbers[:64].tolist()} of call {seed}")
            if (slots != SENTINEL).any():
                wrong.append(f"{case}: words that nobody will empty")
            heap.vote("all have looked")
    return wrong


@pytest.mark.num_ranks(2)
def test_slots_are_empty_again() -> None:
    """And squares are noted beside them."""
    assert values(run_ranks(left_behind, 2)) == [[], []]


def out_of_order(rank: int, world_size: int) -> str:
    """A row on two programs that run one after another: how the first one's wait for the second ends."""
    config = (("algorithm", "one_shot"),)
    try:
        with Heap(HEAP_BYTES) as heap:
            workspace = Workspace(heap, wait_seconds=20.0)
            # What is compiled or loaded once is no part of the wait.
            bodies.Whole(Case(1, 24, 16, F16, F32, config=config), heap, 0).all_reduce(workspace=workspace)
            workspace.control[int(signal.BUDGET_US.value)] = 1_000_000
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
    Case(7, 8192, 64, BF16, BF16, residual=False, wire=F32, config=(("algorithm", "two_shot"),)),
    Case(5, 5000, 64, F32, F16, config=(("algorithm", "one_shot"),)),
    Case(9, 5000, 64, F32, F32, config=(("algorithm", "two_shot"),)),
]
CALLS = 30
LATE_NS = tl.constexpr(30_000)
_note_row, of_rank = exchange_kernel._note_row, normalizing.of_rank


@triton.jit
def note_row_late(
    notes, words, weights, column, width, valid, keeps, rank, number, UNIT: tl.constexpr, DTYPE: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """The notes, every third program's late."""
    now = now_ns()
    end = now + tl.where(tl.program_id(0) % 3 == 1, LATE_NS, 0)
    while now < end:
        now = now_ns()
    _note_row(notes, words, weights, column, width, valid, keeps, rank, number, UNIT, DTYPE, COUNT)


@triton.jit
def row_so_far(
    notes, here, number, deadline, context, PARTS: tl.constexpr, STEP: tl.constexpr, WORLD: tl.constexpr,
    RANKS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """`exchange_kernel._of_row` as it must not be: without the wait for the last of the notes."""
    lane, ranks = tl.arange(0, STEP)[:, None], tl.arange(0, RANKS)[None, :]
    place = COUNT * (ranks * tl.num_programs(0) + tl.program_id(0) // PARTS * PARTS + lane)
    found = ()
    for i in tl.static_range(COUNT):
        both = tl.load(notes + 2 * (place + i), mask=(lane < PARTS) & here, other=0)
        each = tl.where(both >> 32 == number, both, 0).to(tl.int32).to(tl.float32, bitcast=True)
        each = tl.sum(each, axis=0) if i == 0 else tl.max(each, axis=0)
        wide = tl.zeros(both.shape, tl.float32)
        for k in tl.static_range(WORLD):
            wide = tl.where(ranks == k, of_rank(each, k), wide)
        found = found + (wide,)  # type: ignore[assignment]
    return found, tl.zeros(both.shape, tl.int32)


def wide_rows(rank: int, world_size: int, late: bool, waits: bool) -> tuple[list[str], list[str]]:
    """(what was wrong, the bits) of calls on rows of several programs, which are late and wait, or not."""
    if late:
        exchange_kernel._note_row = note_row_late
    if not waits:
        exchange_kernel._of_row = row_so_far
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
            wrong += in_8_bits(whole, y, total)
            found = {(digest(y), digest(total)) for y, total in results}
            if len(found) > 1:
                wrong.append(f"{case}: {len(found)} results of the same data")
            bits += sorted(map(str, found))
    return wrong, bits


def in_8_bits(whole: bodies.Whole, y: torch.Tensor, total: torch.Tensor) -> list[str]:
    """What is wrong with norms that are quantized, whose programs note the largest element of their part, too."""
    wrong = []
    for recipe in ("rowwise", "blockwise"):
        q, scale = stream_k.quantize(y, recipe)
        for number in range(CALLS // 3):
            found: Any = whole.all_reduce(quantize=recipe, keep_norm=number % 2 == 0)
            whole.heap.synchronize()
            same = torch.equal(found.quantized.view(torch.uint8), q.view(torch.uint8))
            if not same or not torch.equal(found.scale, scale) or not torch.equal(found.total, total):
                wrong.append(f"{whole.case}: {recipe}, call {number}")
    return wrong


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
