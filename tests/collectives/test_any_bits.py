"""What moves without being added arrives bit by bit, whatever the bits: also those that an empty slot holds."""

import random
import time
from unittest import mock

import pytest
import torch

from pyrocshmem import Heap, collectives, message, target  # before Triton

import triton  # isort: skip

from pyrocshmem.calls.workspace import workspace_for
from pyrocshmem.collectives import any_bits, exchange
from pyrocshmem.elements import MOVED
from pyrocshmem.message_slots import HEAD_WORDS, NUM_SLOTS, SENTINEL
from tests.collectives.test_tensors import HEAP_BYTES, TIMEOUT_S, device, expected
from tests.ranks import run_ranks, values

TIER = 2
BITS = tuple(dtype for dtype in MOVED if dtype not in (torch.float16, torch.bfloat16, torch.float32))
# Where kernels are interpreted and start is slow, of three ranks.
FEW = (torch.int64, torch.uint8)
# The last one is longer than a piece, of the size that `everything` sets.
SHAPES = ((7,), (16, 8), (35, 51))
PIECE_BYTES = 6144
CANARY = 0x5A
# Bytes before a tensor: units that begin anywhere in one, and words that do.
SHIFTS = (0, 1, 4)


@triton.jit
def leave_marks(pointer, apart, mask, doubted):
    """`any_bits.restore` as it must not be: marks of two calls ago are taken for today's."""
    message.restore(pointer, mask)


@triton.jit
def push_unmarked(pointer, apart, words, mask):
    """`any_bits.push` as `message` has it for floating point."""
    message.push(
        pointer,
        (
            message.clean(words[0]),
            message.clean(words[1]),
            message.clean(words[2]),
            message.clean(words[3]),
        ),
        mask,
    )


@triton.jit
def poll_unmarked(pointer, apart, mask, deadline, context):
    """`any_bits.poll` without the look at marks."""
    words, late = message.poll(pointer, mask, deadline, context)
    return words, mask & (words[0] != words[0]), late


def patterns(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits, among them the words that stand for an empty slot and the ones beside them, in every place of a
    unit; of bool, bytes that are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    words = torch.randint(-(2**31), 2**31, (nbytes // 4 + 1,), generator=generator).to(torch.int32)
    which = torch.randint(0, 4, words.shape, generator=generator)
    words[which < 3] = SENTINEL - 1 + which[which < 3].to(torch.int32)
    raw = words.view(torch.uint8)[:nbytes]
    if dtype == torch.bool:
        raw = raw & 1
    return raw.view(dtype).view(shape).to(device())


def shifted(shape: tuple[int, ...], dtype: torch.dtype, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(a tensor `shift` bytes, rounded up to whole elements, off the start of what is around it, that as bytes)."""
    nbytes, before = torch.Size(shape).numel() * dtype.itemsize, -(-shift // dtype.itemsize) * dtype.itemsize
    around = torch.full((16 + before + nbytes + 64,), CANARY, dtype=torch.uint8, device=device())
    return around[16 + before : 16 + before + nbytes].view(dtype).view(shape), around


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    flat = [t.contiguous().view(-1).view(torch.uint8) for t in (x, y)]
    return x.shape == y.shape and torch.equal(*flat)


def everything(rank: int, world_size: int, piece_bytes: int) -> list[str]:
    """All dtypes, shapes and places of what moves; what came out wrong."""
    exchange.PIECE_BYTES = piece_bytes
    calls = {
        "all_gather": collectives.all_gather,
        "all_scatter": collectives.all_scatter,
        "broadcast": lambda x, **k: collectives.broadcast(x, world_size - 1, **k),
    }
    wrong = []
    with Heap(HEAP_BYTES) as heap:
        for number, dtype in enumerate(FEW if target.interpreted() and world_size != 2 else BITS):
            for shape in SHAPES:
                parts = [patterns(shape, dtype, 100 * number + r) for r in range(world_size)]
                for name, call in calls.items():
                    if name == "all_scatter" and len(shape) != 2:
                        continue
                    shift = SHIFTS[(number + len(name)) % len(SHIFTS)]
                    x, _ = shifted(shape, dtype, shift)
                    x.copy_(parts[rank])
                    right = expected(name, parts, rank)
                    out, around = shifted(tuple(right.shape), dtype, SHIFTS[rank % 3])
                    call(x, group=heap, out=out)
                    heap.synchronize()
                    if not same_bits(out, right) or not same_bits(x, parts[rank]):
                        wrong.append(f"{name} {shape} {dtype}, {shift} bytes off")
                    out.view(-1).view(torch.uint8).fill_(CANARY)
                    if not (around == CANARY).all():
                        wrong.append(f"{name} {shape} {dtype}: outside")
        wrong += in_every_place(heap)
        if len(wrong) == 0 and world_size > 1:
            wrong += not_emptied(heap)
    return wrong


def in_every_place(heap: Heap) -> list[str]:
    """A single word of the four of a unit is the empty slot's, or the one beside it."""
    wrong = []
    for place in range(8):
        for word in (SENTINEL, SENTINEL - 1):
            x = torch.zeros(8, dtype=torch.int32, device=heap.device)
            x[place] = word
            found = collectives.all_gather(x, group=heap).view(-1, 8)
            heap.synchronize()
            if not (found == x).all():
                wrong.append(f"{word:#x} in place {place}: {found.tolist()}")
    return wrong


def not_emptied(heap: Heap) -> list[str]:
    """Calls of all kinds after which a slot is not empty."""
    left = []
    x = patterns((9, 8), torch.int32, 5)
    calls = {
        "all_gather": lambda: collectives.all_gather(x, group=heap),
        "all_scatter": lambda: collectives.all_scatter(x, group=heap),
        "broadcast": lambda: collectives.broadcast(x, 1, group=heap),
        "reduce_scatter": lambda: collectives.reduce_scatter(x, group=heap, op="max"),
        "one_shot": lambda: collectives.all_reduce(x, group=heap, op="max", algorithm="one_shot"),
        "two_shot": lambda: collectives.all_reduce(x, group=heap, op="max", algorithm="two_shot"),
    }
    for name, call in calls.items():
        call()
        heap.synchronize()
        messages, quads = workspace_for(heap).messages(0)
        slots = messages[HEAD_WORDS:][: NUM_SLOTS * 4 * quads].view(NUM_SLOTS, -1)
        if (slots != SENTINEL).any():
            left.append(f"{name}: {(slots != SENTINEL).sum(1).tolist()} words left")
        heap.vote("looked")
    return left


def unguarded(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """(what is left in slots where marks are not emptied, what is wrong where there are none)."""
    with Heap(HEAP_BYTES) as heap, mock.patch.object(any_bits, "restore", leave_marks):
        left = not_emptied(heap)
    with (
        Heap(HEAP_BYTES) as heap,
        mock.patch.object(any_bits, "push", push_unmarked),
        mock.patch.object(any_bits, "poll", poll_unmarked),
    ):
        wrong = in_every_place(heap)
    return left, wrong


def many_calls(rank: int, world_size: int) -> int:
    """Elements that came out wrong of calls whose ranks are late at random, each with other bits."""
    rounds, longest_s = (30, 0.01) if target.interpreted() else (3000, 0.0003)
    chance = random.Random(rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    with Heap(HEAP_BYTES) as heap:
        pool = [[patterns((9, 24), torch.int64, 10 * k + r) for r in range(world_size)] for k in range(5)]
        for number in range(rounds):
            parts = pool[number % len(pool)]
            if chance.random() < 0.25:
                time.sleep(chance.uniform(0, longest_s))
            if number % 2:
                total = collectives.all_reduce(parts[rank], group=heap, algorithm="two_shot")
                wrong += (total != torch.stack(parts).sum(0)).sum()
            else:
                wrong += (collectives.all_gather(parts[rank], group=heap) != torch.cat(parts)).sum()
        heap.synchronize()
        heap.vote("all have called")
    return int(wrong)


@pytest.mark.parametrize(
    ("world_size", "piece_bytes"),
    [
        (1, 1 << 20),
        pytest.param(2, 1 << 20, marks=pytest.mark.num_ranks(2)),
        pytest.param(3, PIECE_BYTES, marks=pytest.mark.num_ranks(3)),
        *(pytest.param(n, PIECE_BYTES, marks=[pytest.mark.num_ranks(n), pytest.mark.gpu]) for n in (4, 8)),
    ],
)
def test_every_pattern_arrives(world_size: int, piece_bytes: int) -> None:
    found = run_ranks(everything, world_size, piece_bytes, timeout=TIMEOUT_S)
    assert values(found) == [[]] * world_size


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_without_marks_patterns_are_lost() -> None:
    """The controls."""
    for left, wrong in values(run_ranks(unguarded, 2, timeout=TIMEOUT_S)):
        assert len(left) == 6, left
        assert len(wrong) == 8, wrong


@pytest.mark.num_ranks(2)
def test_many_calls_with_random_delays() -> None:
    assert values(run_ranks(many_calls, 2, timeout=TIMEOUT_S)) == [0, 0]
