"""Which bytes of a heap are free: a best-fit list that merges neighbours. No memory is touched here.

    blocks = FreeList(1 << 20)
    offset = blocks.alloc(1000)      # None when nothing is large enough
    blocks.free(offset)

A heap that grows has addresses for all of it, and memory behind some, in pieces that come and go at any place:

    blocks = FreeList(1 << 40, held=1 << 20)
    offset = blocks.place(1 << 30)   # where the fewest bytes are missing: those of blocks.missing(offset, ...)
    blocks.hold(1 << 20, 1 << 30)    # there is memory now: blocks.alloc finds room

Deterministic: the same calls in the same order give the same offsets, which is what makes a heap symmetric.
"""

import bisect
from collections.abc import Iterator


class FreeList:
    """Blocks of [0, `total`) bytes, each a multiple of `alignment` and aligned to it. held: bytes at the start that
    there is memory for, None: for all.

    Raises `ValueError` when `alignment` is not a power of two or `total` is not a positive multiple of it.
    """

    def __init__(self, total: int, alignment: int = 256, held: int | None = None) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment}, allowed are powers of two")
        if total < alignment or total % alignment:
            raise ValueError(
                f"{total} bytes in all, allowed are positive multiples of the alignment {alignment}"
            )
        self.total, self.alignment = total, alignment
        self._free: list[tuple[int, int]] = [(0, total)]  # (offset, bytes), by offset, never adjacent
        self._live: dict[int, int] = {}
        self._held: list[tuple[int, int]] = [(0, total if held is None else min(held, total))]  # (start, end)

    @property
    def held_bytes(self) -> int:
        """Bytes that there is memory for."""
        return sum(end - start for start, end in self._held)

    @property
    def free_bytes(self) -> int:
        """Bytes that there is memory for and no block."""
        return sum(size for _, size in self._usable())

    @property
    def largest(self) -> int:
        """The most of these in one piece."""
        return max((size for _, size in self._usable()), default=0)

    @property
    def num_allocations(self) -> int:
        return len(self._live)

    def size(self, offset: int) -> int | None:
        """Bytes of the live block that starts at `offset`, or None when none does."""
        return self._live.get(offset)

    def alloc(self, nbytes: int) -> int | None:
        """The offset of a new block of `nbytes` bytes or a little more, or None when none fits.

        Cut from the smallest free block that is large enough, the lowest of equals; never empty, so that
        every offset is one allocation's. `ValueError` for a negative size.
        """
        need = self.rounded(nbytes)
        fitting = [(size, offset) for offset, size in self._usable() if size >= need]
        if not fitting:
            return None
        _, offset = min(fitting)
        index = bisect.bisect_right(self._free, (offset, self.total)) - 1
        start, size = self._free[index]
        behind = start + size - offset - need
        parts = [(start, offset - start), (offset + need, behind)]
        self._free[index : index + 1] = [part for part in parts if part[1]]
        self._live[offset] = need
        return offset

    def rounded(self, nbytes: int) -> int:
        """Bytes of a block of `nbytes`; `ValueError` for a negative size."""
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes, allowed are 0 or more")
        return max(1, -(-nbytes // self.alignment)) * self.alignment

    def place(self, nbytes: int) -> int | None:
        """The offset at which a block of `nbytes` needs the fewest bytes more, the lowest of equals; None where no
        place is large enough."""
        need = self.rounded(nbytes)
        starts = [start for start, _ in self._held]
        found = []
        for run, size in self._free:
            end = run + size
            for offset in [run, *(start for start in starts if run < start < end)]:
                if offset + need <= end:
                    lacking = sum(stop - start for start, stop in self.missing(offset, need))
                    found.append((lacking, offset))
        return min(found)[1] if found else None

    def missing(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """The ranges (start, end) of the `nbytes` bytes from `offset` on that there is no memory for."""
        found, at, stop = [], offset, offset + nbytes
        for start, end in self._held:
            if end > at and start < stop:
                if start > at:
                    found.append((at, start))
                at = end
        return [*found, (at, stop)] if at < stop else found

    def hold(self, start: int, end: int) -> None:
        """There is memory for [start, end), all of which there was none for, or this very call was made before."""
        piece = start, min(end, self.total)
        if piece not in self._held:
            bisect.insort(self._held, piece)

    def let_go(self, start: int, end: int) -> None:
        """There is no memory any more for what `hold` was called with; nothing where it wasn't."""
        piece = start, min(end, self.total)
        if piece in self._held:
            self._held.remove(piece)

    def is_free(self, start: int, end: int) -> bool:
        """Whether no block has a byte of [start, end), as far as that goes."""
        index = bisect.bisect_right(self._free, (start, self.total)) - 1
        return index >= 0 and sum(self._free[index]) >= min(end, self.total)

    def _usable(self) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of what is free and has memory; what touches is one."""
        joined: list[tuple[int, int]] = []
        for start, end in self._held:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        for offset, size in self._free:
            for start, end in joined:
                first, last = max(offset, start), min(offset + size, end)
                if first < last:
                    yield first, last - first

    def free(self, offset: int) -> None:
        """Give a block back. `ValueError` when no live block starts at `offset`; then nothing changes."""
        size = self._live.pop(offset, None)
        if size is None:
            raise ValueError(
                f"no live block starts at offset {offset}: freed already, inside a block, or never allocated"
            )
        index = bisect.bisect_left(self._free, (offset, 0))
        end = offset + size
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            index -= 1
            offset = self._free.pop(index)[0]
        self._free.insert(index, (offset, end - offset))
