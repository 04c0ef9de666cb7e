"""The free list: random calls checked against a byte map, and planted mistakes that the same check must catch."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrocshmem.allocator import FreeList

TIER = 0
pytestmark = pytest.mark.cpu

UNITS = 64
OPS = st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=80)


def replay(blocks: FreeList, ops: list[tuple[bool, int]]) -> list[int | None]:
    """Do `ops` (free?, size or index), checking against a map of units; ends with everything freed."""
    align = blocks.alignment
    owner: list[int | None] = [None] * (blocks.total // align)
    live: dict[int, int] = {}
    offsets: list[int | None] = []

    def free(offset: int) -> None:
        blocks.free(offset)
        del live[offset]
        owner[:] = [None if mark == offset else mark for mark in owner]

    for is_free, number in ops:
        if is_free and live:
            free(sorted(live)[number % len(live)])
        elif not is_free:
            offset = blocks.alloc(number)
            offsets.append(offset)
            need = max(1, -(-number // align))
            if offset is None:
                assert longest_gap(owner) < need, "refused what would fit"
                continue
            assert offset % align == 0
            span = owner[offset // align : offset // align + need]
            assert len(span) == need, "beyond the end"
            assert set(span) == {None}, "overlaps a live block"
            owner[offset // align : offset // align + need] = [offset] * need
            live[offset] = need
        free_units = owner.count(None)
        assert blocks.free_bytes == free_units * align
        assert blocks.largest == longest_gap(owner) * align, "neighbours were not merged"
        assert blocks.num_allocations == len(live)
    for offset in list(live):
        free(offset)
    assert (blocks.free_bytes, blocks.largest) == (blocks.total, blocks.total)
    return offsets


def longest_gap(owner: list[int | None]) -> int:
    longest = run = 0
    for mark in owner:
        run = run + 1 if mark is None else 0
        longest = max(longest, run)
    return longest


@settings(max_examples=300)
@given(ops=OPS, alignment=st.sampled_from([1, 16, 256]))
def test_never_overlaps_merges_and_aligns(ops, alignment):
    replay(FreeList(UNITS * alignment, alignment), ops)


@settings(max_examples=50)
@given(ops=OPS)
def test_same_calls_give_same_offsets(ops):
    assert replay(FreeList(UNITS * 256), ops) == replay(FreeList(UNITS * 256), ops)


class NeverMerges(FreeList):
    def free(self, offset):
        size = self._live.pop(offset)
        self._free.append((offset, size))
        self._free.sort()


class MergesTooMuch(FreeList):
    def free(self, offset):
        super().free(offset)
        start, size = self._free[0]
        self._free[0] = (start, size + self.alignment)


class ForgetsToRound(FreeList):
    def alloc(self, nbytes):
        offset = super().alloc(max(0, nbytes - 1))
        return offset


@pytest.mark.parametrize("planted", [NeverMerges, MergesTooMuch, ForgetsToRound])
def test_the_check_catches_planted_mistakes(planted):
    chance = random.Random(7)
    sizes = [256, 257, 512, 3000]
    runs = [[(chance.random() < 0.4, chance.choice(sizes)) for _ in range(60)] for _ in range(200)]
    with pytest.raises(AssertionError):
        any(replay(planted(UNITS * 256), ops) is None for ops in runs)


def test_best_fit_leaves_the_large_block():
    blocks = FreeList(1024 * 16, 256)
    a, b, c = (blocks.alloc(size) for size in (1024, 256, 1024))
    blocks.free(a)
    assert blocks.alloc(1000) == a  # not from the larger rest
    assert (b, c) == (1024, 1280)


@pytest.mark.parametrize("offset", [256, 128, -256, 1 << 40, 0])
def test_free_of_what_is_not_live_changes_nothing(offset):
    blocks = FreeList(4096)
    kept = blocks.alloc(512)
    gone = blocks.alloc(256)
    blocks.free(gone)
    before = (blocks.free_bytes, blocks.largest, blocks.num_allocations)
    with pytest.raises(ValueError, match="no live block"):
        blocks.free(gone if offset == 0 else kept + offset)
    assert (blocks.free_bytes, blocks.largest, blocks.num_allocations) == before


@pytest.mark.parametrize(("total", "alignment"), [(0, 256), (100, 256), (512, 3), (-256, 256), (256, 0)])
def test_bad_arguments(total, alignment):
    with pytest.raises(ValueError, match="allowed are"):
        FreeList(total, alignment)


def test_negative_size():
    with pytest.raises(ValueError, match="-1 bytes"):
        FreeList(256).alloc(-1)


def test_offsets_beyond_31_bits():
    blocks = FreeList(1 << 40)
    first = blocks.alloc((1 << 33) + 1)
    second = blocks.alloc(1)
    assert (first, second) == (0, (1 << 33) + 256)
