"""How a heap grows and shrinks: which pieces of memory an allocation needs, and which may go.

A heap has addresses for the most that it may hold. Where an allocation doesn't fit into the memory that there is, all
ranks put pieces of memory at the same addresses, no more than is needed in whole pieces of 2 MiB, but at least an
eighth of what is there and at most 32 MiB. What nobody uses goes again, piece by piece, as soon as more than 64 MiB
are free: so a heap holds at most 64 MiB more than it needs, but for what free bytes lie between tensors that live.

A piece goes as a whole or not at all. So a large block has one of its own, and shares only the 2 MiB at either end:
what lies beside it doesn't keep its memory when it is freed.
"""

import itertools

from pyrocshmem.allocator import FreeList
from pyrocshmem.finegrained_alloc import PIECE
from pyrocshmem.forming import SYSTEM_BYTES

SPARE_BYTES = 64 << 20
_LARGEST_SHARED = 32 << 20
_SHARE_OF_HELD = 8

Piece = tuple[int, int]  # (bytes from the heap's base, bytes), multiples of PIECE


def blocks_of(limit: int, alignment: int, first: int | None) -> FreeList:
    """The free list of a heap of at most `limit` bytes for tensors, of which the piece `first` is there; None: all."""
    return FreeList(limit, alignment, None if first is None else first - SYSTEM_BYTES)


def needed(blocks: FreeList, nbytes: int) -> list[Piece]:
    """The pieces with which `nbytes` more bytes fit; none where they never will."""
    offset = blocks.place(nbytes)
    if offset is None:
        return []
    start, end = offset + SYSTEM_BYTES, offset + SYSTEM_BYTES + blocks.rounded(nbytes)
    gaps = [(_down(a + SYSTEM_BYTES), _up(b + SYSTEM_BYTES)) for a, b in blocks.missing(offset, end - start)]
    if not gaps:
        return []
    least = min(_LARGEST_SHARED, blocks.held_bytes // _SHARE_OF_HELD)
    more = _up(least) - sum(b - a for a, b in gaps)
    if more > 0:
        first, last = gaps[-1]
        # Up to where there is memory already, or no address.
        for a, b in blocks.missing(last - SYSTEM_BYTES, more)[:1]:
            if a + SYSTEM_BYTES == last:
                last = min(b + SYSTEM_BYTES, _up(blocks.total + SYSTEM_BYTES))
        gaps[-1] = (first, last)
    return [piece for gap in gaps for piece in _cut(*gap, start, end)]


def spare(blocks: FreeList, pieces: list[Piece]) -> list[Piece]:
    """Of `pieces`, the ones to give back: the largest first, of those in which nothing lies, as long as too much is
    free."""
    free, found = blocks.free_bytes, []
    for start, nbytes in sorted(pieces, key=lambda piece: (-piece[1], -piece[0])):
        if free <= SPARE_BYTES:
            break
        if blocks.is_free(start - SYSTEM_BYTES, start - SYSTEM_BYTES + nbytes):
            found.append((start, nbytes))
            free -= nbytes
    return found


def hold(blocks: FreeList, piece: Piece) -> None:
    """There is memory now for `piece`."""
    start, nbytes = piece
    blocks.hold(start - SYSTEM_BYTES, start - SYSTEM_BYTES + nbytes)


def let_go(blocks: FreeList, piece: Piece) -> None:
    """There is none any more."""
    start, nbytes = piece
    blocks.let_go(start - SYSTEM_BYTES, start - SYSTEM_BYTES + nbytes)


def _cut(first: int, last: int, start: int, end: int) -> list[Piece]:
    """[first, last), in which the block [start, end) is to lie: what others may share, and what is its own."""
    if last - first <= _LARGEST_SHARED:
        return [(first, last - first)]
    cuts = {first, last}
    cuts |= {cut for cut in (_up(start), _down(end)) if first < cut < last}
    ends = sorted(cuts)
    return [(a, b - a) for a, b in itertools.pairwise(ends)]


def _down(number: int) -> int:
    return number // PIECE * PIECE


def _up(number: int) -> int:
    return -(-number // PIECE) * PIECE
