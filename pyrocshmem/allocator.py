"""Which bytes of a heap are free: a best-fit list that merges neighbours. No memory is touched here.

    blocks = FreeList(1 << 20)
    offset = blocks.alloc(1000)      # None when nothing is large enough
    blocks.free(offset)

Deterministic: the same calls in the same order give the same offsets, which is what makes a heap symmetric.
"""

import bisect


class FreeList:
    """Blocks of [0, `total`) bytes, each a multiple of `alignment` and aligned to it.

    Raises `ValueError` when `alignment` is not a power of two or `total` is not a positive multiple of it.
    """

    def __init__(self, total: int, alignment: int = 256) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment}, allowed are powers of two")
        if total < alignment or total % alignment:
            raise ValueError(
                f"{total} bytes in all, allowed are positive multiples of the alignment {alignment}"
            )
        self.total, self.alignment = total, alignment
        self._free: list[tuple[int, int]] = [(0, total)]  # (offset, bytes), by offset, never adjacent
        self._live: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    @property
    def largest(self) -> int:
        """Bytes of the largest free block."""
        return max((size for _, size in self._free), default=0)

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
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes, allowed are 0 or more")
        need = max(1, -(-nbytes // self.alignment)) * self.alignment
        fitting = [(size, offset) for offset, size in self._free if size >= need]
        if not fitting:
            return None
        size, offset = min(fitting)
        index = bisect.bisect_left(self._free, (offset, 0))
        self._free[index : index + 1] = [(offset + need, size - need)] if size > need else []
        self._live[offset] = need
        return offset

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
