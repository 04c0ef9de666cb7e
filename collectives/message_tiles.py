"""Tiles that leave a GEMM as messages: the epilogue for products whose exchange costs microseconds.

A tile goes from its program's registers straight into the slots of the ranks that sum or store it. `exchange_kernel`
would otherwise load and send it, a kernel and a trip through memory later. Messages carry their own flags, so nothing
is announced, and parts of a row are taken while other tiles are still being multiplied.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pyrocshmem import message, signal
from pyrocshmem.collectives import words as units
from pyrocshmem.collectives.epilogue import finished
from pyrocshmem.counts import unpacked
from pyrocshmem.device import remote


class Parts(NamedTuple):
    """`extra`. slot_quads, part_units: quads of a slot, units of a part (`exchange_kernel`). x_part, longer, more,
    limit: tell the part of an element from its number in the product, row by row, as in that kernel (`more` is its
    `extra`). Packed but for slot_quads."""

    finish: Any
    slot_quads: Any
    part_units: Any
    x_part: Any
    longer: Any
    more: Any
    limit: Any


class Options(NamedTuple):
    """Constants: the activation's number, the number of ranks, and the elements of a unit."""

    activation: int
    ranks: int
    unit: int


@triton.jit
def send_tile(
    parts, tile, row, row_end, tile_n, epoch, c, extra, context, problem,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Epilogue: send the tile, finished, to each rank of whose part of the product it has elements.

    `c` is the messages (`pyrocshmem.message`), as elements of the dtype that travels. `extra` is `Parts`, OPTIONS are
    `Options`. There is no residual. N and all parts are whole units. A term of a sum has no bias and no activation
    either: it is the `epilogue.partial_sum`, rounded here as it is packed.

    Example, M = N = 16, two ranks that sum 128 elements each, units of 8: row 9, columns 8 to 15, is unit 3 of rank 1.
    """
    N = problem.N
    longer, more = unpacked(extra.longer), unpacked(extra.more)
    x_part, limit, part_units = unpacked(extra.x_part), unpacked(extra.limit), unpacked(extra.part_units)
    RANKS: tl.constexpr = OPTIONS.ranks
    UNIT: tl.constexpr = OPTIONS.unit
    PART_N: tl.constexpr = BLOCK_N // len(parts)
    DTYPE: tl.constexpr = c.dtype.element_ty
    QUADS: tl.constexpr = UNIT * DTYPE.primitive_bitwidth // 128
    messages = c.to(tl.pointer_type(tl.int32), bitcast=True)
    rank = tl.load(context.control + signal.RANK)
    call = message.number(messages)
    quads = tl.cast(part_units, tl.int64) * (rank * QUADS)
    i = row + tl.arange(0, BLOCK_M)[:, None]
    for part in tl.static_range(len(parts)):
        col = tile_n * BLOCK_N + part * PART_N
        value = finished(parts[part], extra.finish, col, N, PART_N, OPTIONS.activation)
        words = units.pack(units.cut(value, BLOCK_M, PART_N, UNIT), DTYPE)
        j = col + tl.arange(0, PART_N // UNIT)[None, :] * UNIT
        number = i.to(tl.int64) * N + j
        there = (i < row_end) & (j < N)
        for turn in tl.static_range(RANKS):
            # The neighbour first, so that ranks don't all send to the same one.
            peer = (rank + 1 + turn) % RANKS
            within = number - tl.cast(peer, tl.int64) * x_part - tl.minimum(peer, longer) * more
            size = limit - tl.where(peer < longer, 0, more)
            slot = message.slot_of(remote(messages, peer, context.heap_bases), extra.slot_quads, call)
            place = quads + within // UNIT
            units.send(slot, place, part_units, words, there & (within >= 0) & (within < size))
