"""What kernels on rows that are cut into columns share: a float a row, or two, exchanged between all ranks.

R ranks hold N columns each of M rows. A program does blocks of ROWS rows. For each block it sends its sums (one block
ahead of the one that it finishes, so that they travel meanwhile), polls for those of all ranks, and adds them in an
order that depends on R alone, so that all ranks get the same bits. A sum travels as a note (`pyrocshmem.note`): 8 bytes
for each row and rank.

    notes of a rank: [R sources][M rows][sums of a row]

A program waits only for programs with its own number, which send before they wait: nothing deadlocks, however few of
a grid's programs are resident at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pyrocshmem import note, signal, target
from pyrocshmem.collectives import pair_sums
from pyrocshmem.device import remote
from pyrocshmem.target import num_sms
from pyrocshmem.trace import now_ns

# Elements that a program holds at a time, 16 for each thread of 8 warps; and the most rows in a block.
_TILE = 4096
_MAX_ROWS = 16
# Programs on a multiprocessor: while some wait for peers, others move data.
_SHARE = 4


@dataclass(frozen=True)
class Blocks:
    """How M rows of N columns are cut: `rows` x `columns` at a time, in `count` blocks of rows on `programs`."""

    rows: int
    columns: int
    count: int
    programs: int

    @classmethod
    def of(cls, M: int, N: int, device: torch.device, alike: bool = False) -> Blocks:
        """Few rows: one a program. Many: as many as keep all programs busy, at most 16. alike: whatever M, all rows are
        cut, and so added up, in the same way: one at a time."""
        share = num_sms(device) * (1 if target.interpreted() else _SHARE)
        rows = 1 if alike else min(_MAX_ROWS, triton.next_power_of_2(max(1, -(-M // share))))
        columns = min(triton.next_power_of_2(max(N, 1)), _TILE // rows)
        count = -(-M // rows)
        return cls(rows, columns, count, min(count, share))


@triton.jit
def of_tiles(parts, block, M, tiles_n, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Sums [ROWS] of a block of rows over `parts`, fp32 [tiles_n, M], always in the same order."""
    i = (tl.cast(block * ROWS, tl.int64) + tl.arange(0, ROWS))[:, None]
    total = tl.zeros((ROWS, TILES), tl.float32)
    for first in range(0, tiles_n, TILES):
        j = first + tl.arange(0, TILES)[None, :]
        total += tl.load(parts + j * tl.cast(M, tl.int64) + i, mask=(i < M) & (j < tiles_n), other=0.0)
    return tl.sum(total, axis=1)


@triton.jit
def send(
    sums, block, notes, number, M, context, ROWS: tl.constexpr, WORLD: tl.constexpr, RANKS: tl.constexpr
):
    """Send this rank's fp32 sums of a block of rows, a tuple of one or two blocks [ROWS], to every rank, itself too.
    RANKS: WORLD, or the next power of two."""
    COUNT: tl.constexpr = len(sums)
    ranks = tl.arange(0, RANKS)
    row = block * ROWS + tl.arange(0, ROWS)[None, :]
    there = (ranks < WORLD)[:, None] & (row < M)
    places = remote(notes, tl.minimum(ranks, WORLD - 1), context.heap_bases)[:, None]
    places += (tl.cast(tl.load(context.control + signal.RANK), tl.int64) * M + row) * (2 * COUNT)
    for k in tl.static_range(COUNT):
        word = tl.broadcast_to(sums[k].to(tl.int32, bitcast=True)[None, :], [RANKS, ROWS])
        note.push(places + 2 * k, word, number, there)


@triton.jit
def receive(
    block, notes, number, M, deadline, context, ROWS: tl.constexpr, WORLD: tl.constexpr, RANKS: tl.constexpr,
    COUNT: tl.constexpr = 1,
):  # fmt: skip
    """(the COUNT sums [ROWS] over all ranks of a block of rows, [RANKS] with 1 for each rank whose sums did not
    come)."""
    ranks = tl.arange(0, RANKS)[:, None]
    row = block * ROWS + tl.arange(0, ROWS)[None, :]
    there = (ranks < WORLD) & (row < M)
    place = (tl.cast(ranks, tl.int64) * M + row) * COUNT
    words, late = note.poll(notes, place, number, there, deadline, context, COUNT)
    sums = ()
    for k in tl.static_range(COUNT):
        each = pair_sums.along(tl.where(there, words[k].to(tl.float32, bitcast=True), 0.0), 0)
        sums = sums + (each,)  # type: ignore[assignment]
    return sums, tl.max(late, axis=1)


@triton.jit
def report(absent, deadline, number, context, OP: tl.constexpr, WORLD: tl.constexpr):
    """Record that sums of a rank did not come, if so (absent [RANKS]: 1): once a program, after its last block."""
    if tl.max(absent, axis=0) != 0:
        waited = (now_ns() - deadline) // 1000 + tl.load(context.control + signal.BUDGET_US)
        who = tl.argmax(absent, axis=0)
        signal.report(who, tl.program_id(0), number, number - 1, waited, number, context, OP, WORLD)
