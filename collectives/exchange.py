"""Planning and launching `exchange_kernel`: what each collective asks of it.

    exchange(workspace, status.Op.ALL_GATHER, "all_gather", x, out)

Large tensors go in pieces, one launch each, so that the slots stay small: pieces of more than PIECE_BYTES are no faster
(2 x H200: 350 GB/s on the links).

Floating-point tensors travel as they are, all others as bits (`collectives.any_bits`): the kernel gets them as int32
words or as bytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pyrocshmem import status, target, trace
from pyrocshmem.calls import planning
from pyrocshmem.calls.call_name import CallName
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives import normalizing
from pyrocshmem.collectives.exchange_kernel import AfterSum, exchange_kernel
from pyrocshmem.collectives.float8 import BLOCK
from pyrocshmem.counts import packed
from pyrocshmem.elements import DTYPES
from pyrocshmem.heap import Heap
from pyrocshmem.message_slots import QUAD_BYTES

# What a piece takes of a slot, at most.
PIECE_BYTES = 64 << 20

# Threads of a program, each of which handles a unit of one rank. In the interpreter, where a program costs more than
# its data, each handles more.
_THREADS, MOST_THREADS = 128, 1024
_INTERPRETED_UNITS = 2048
# In gathers of more units than this a thread handles two, so that more of them are in flight.
_MANY_UNITS = 1 << 20
# Programs of a row that is normalized, at most: a GPU has a multiprocessor for each.
_MOST_PARTS = 128

# SUMS, GATHERS, BROADCASTS.
_KINDS = {
    "one_shot": (True, False, False),
    "two_shot": (True, True, False),
    "reduce_scatter": (True, False, False),
    "all_gather": (False, True, False),
    "all_scatter": (False, True, False),
    "broadcast": (False, True, True),
}


_NOTHING = AfterSum()

# Of integers that are reduced, as the kernel takes them.
_INTEGERS = {
    torch.bool: tl.uint8,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}


class _Piece(NamedTuple):
    """Elements of each part, from number `first` on, which go to `out_first` on; the other sizes as the kernel takes
    them."""

    first: int
    out_first: int
    rows: int
    width: int
    x_part: int
    longer: int
    extra: int
    limit: int
    out_part: int
    out_width: int


class Exchange:
    """The launches of an exchange of tensors of one kind, one a piece. rows: that an all-gather joins, as
    `torch.tensor_split` cuts them; None: as many of every rank as x has. tiles: x is sent by the tiles of a product, in
    whole units (`sent_by_tiles`); of x itself only shape and dtype count. piece_bytes: what a piece takes of a slot, at
    most; None: PIECE_BYTES. activation: of sums, its number. reduction: of `reductions.REDUCTIONS`. integer: the dtype
    of what is reduced bit by bit, which x and out then have as int32 or uint8."""

    def __init__(
        self,
        workspace: Workspace,
        op: int,
        kind: str,
        x: torch.Tensor,
        out: torch.Tensor,
        root: int = 0,
        after: AfterSum = _NOTHING,
        rows: int | None = None,
        tiles: bool = False,
        piece_bytes: int | None = None,
        activation: int = 0,
        reduction: str = "sum",
        integer: tl.dtype | None = None,
    ) -> None:
        heap = workspace.heap
        assert heap is not None
        world = heap.world_size
        pieces = _pieces(kind, x, out.dtype, world, after.by_rows, piece_bytes or PIECE_BYTES, rows)
        largest = max(slot_bytes(kind, piece, x.dtype, out.dtype, world) for piece in pieces)
        notes = 0
        if after.weight is not None:
            units = _row_units(pieces[0], out.dtype)
            of_row = row_programs(units, world, target.interpreted())[1]
            notes = world * of_row * max(piece.rows for piece in pieces)
            notes *= 2 if after.scales_kind == normalizing.ROWS else 1
        pitch = after.scales.stride(1) if after.scales_kind == normalizing.GROUPS else 0
        place = self.messages, self.slot_quads = workspace.messages(largest, notes)
        self.out_dtype = out.dtype
        self.launches: list[tuple[Launch, _Piece, tuple[Any, ...]]] = []
        for piece in pieces:
            rest = (*place, workspace.context, x.numel() - piece.first, *piece[2:], pitch, root)
            launch = _launch(heap, op, kind, x, out, after, piece, tiles, activation, reduction, integer)
            launch.compile((*_at(piece, x, out, after), *rest))
            self.launches.append((launch, piece, rest))

    def part_of_tiles(self) -> tuple[int, ...]:
        """Where elements of x belong: `collectives.message_tiles.Parts`, behind its `finish`."""
        _, piece, _ = self.launches[0]
        units = piece.rows * _row_units(piece, self.out_dtype)
        return self.slot_quads, *map(packed, (units, piece.x_part, piece.longer, piece.extra, piece.limit))

    def run(self, x: torch.Tensor, out: torch.Tensor, after: AfterSum = _NOTHING) -> None:
        """Enqueue it for tensors of this kind."""
        for launch, piece, rest in self.launches:
            launch((*_at(piece, x, out, after), *rest))


def sent_by_tiles(kind: str, x: torch.Tensor, out_dtype: torch.dtype, world_size: int, by_rows: bool) -> bool:
    """Whether the tiles of a product like `x` can send it: rows and parts are whole units, none is empty, for every
    rank must hear from every rank, and all go in one piece."""
    unit = QUAD_BYTES // out_dtype.itemsize
    first, *more = _pieces(kind, x, out_dtype, world_size, by_rows, PIECE_BYTES)
    last = (world_size - 1) * first.x_part + min(world_size - 1, first.longer) * first.extra
    return not more and x.shape[-1] % unit == 0 and last < x.numel() and first.extra < first.limit


def exchange(
    workspace: Workspace,
    op: int,
    kind: str,
    x: torch.Tensor,
    out: torch.Tensor,
    root: int = 0,
    reduction: str = "sum",
    dim: int = 0,
    shape: torch.Size | None = None,
) -> None:
    """Exchange contiguous `x` into contiguous `out` of its dtype. kind: a name of `_KINDS`. reduction: of what is
    summed, a name of `reductions.REDUCTIONS`. dim, shape: of the tensor that x is made of, along which it is joined or
    divided, for whoever reads that ranks made different calls.

    The first call of a kind is compared between ranks, compiled and loaded by all.
    """
    recorded = trace.recorder() is not None
    dtype = x.dtype
    if dtype not in DTYPES:
        x, out = _as_bits(x, out)
    key: Hashable = (
        "exchange", op, kind, x.shape, dtype, x.dtype, x.data_ptr() % 16, out.data_ptr() % 16, root, reduction,
        dim, recorded,
    )  # fmt: skip
    found: tuple[CallName, Exchange] | None = workspace.plans.get(key)
    if found is None:
        how = f"{kind} by messages, {reduction or 'moved'} along {dim}, root {root}, recorded={recorded}"
        sizes = tuple(x.shape if shape is None else shape)
        shown = ", ".join(("#", *map(str, sizes[1:]))) if sizes else ""
        call = CallName.of(
            f"{status.Op(op).name.lower()} of ({shown}) {dtype}: {how}", sizes[0] if sizes else 0
        )
        integer = _INTEGERS.get(dtype)

        def make(_: int) -> Exchange:
            return Exchange(workspace, op, kind, x, out, root, reduction=reduction, integer=integer)

        plan = workspace.planned_together(call, make)
        found = call, plan
        if planning.keeps_plans():
            workspace.plans[key] = found
    call, plan = found
    if planning.here.mode is not None:
        return
    with workspace.begin(call):
        plan.run(x, out)


def _as_bits(x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as int32, or, where one begins or a row ends inside a word, as uint8. Rows of x stay rows."""
    both = x.view(x.shape[0] if x.ndim else 1, -1).view(torch.uint8), out.view(-1).view(torch.uint8)
    if both[0].shape[1] % 4 == 0 and all((t.data_ptr() | t.storage_offset()) % 4 == 0 for t in both):
        return both[0].view(torch.int32), both[1].view(torch.int32)
    return both


def _at(piece: _Piece, x: torch.Tensor, out: torch.Tensor, after: AfterSum) -> tuple[Any, ...]:
    """x, out and `after` as the kernel takes them: from the first element of a piece on."""
    if piece.first:
        x, out = x.view(-1)[piece.first :], out.view(-1)[piece.out_first :]
        whole = (after.finish.residual, after.total, after.quantized)
        residual, total, quantized = (t if t is None else t.view(-1)[piece.first :] for t in whole)
        scales = after.scales
        if after.scales_kind > normalizing.GIVEN:
            scales = scales[piece.first // after.columns :]
        finish = after.finish._replace(residual=residual)
        after = after._replace(finish=finish, total=total, quantized=quantized, scales=scales)
    return x, out, after


def _row_units(piece: _Piece, out_dtype: torch.dtype) -> int:
    """Units of a row."""
    return -(-piece.width * out_dtype.itemsize // QUAD_BYTES)


def row_programs(row_units: int, world_size: int, interpreted: bool) -> tuple[int, int]:
    """(units of a program, programs of a row) where rows of so many units are normalized.

    As many units as give each thread one, so that all are waited for at once; more where the programs would outnumber
    them, for a program takes the sums of all programs of its row in one block as well, or could not all run at a time.
    Interpreted: programs run one after another, so none may wait for a later one.
    """
    if interpreted:
        return triton.next_power_of_2(row_units), 1
    step = _THREADS // triton.next_power_of_2(world_size)
    while step * min(step, _MOST_PARTS) < row_units:
        step *= 2
    return step, -(-row_units // step)


def slot_bytes(kind: str, piece: _Piece, dtype: torch.dtype, out_dtype: torch.dtype, world_size: int) -> int:
    """What a piece takes of a slot: quads of x, and of sums in a two-shot."""
    quads = piece.rows * _row_units(piece, out_dtype)
    quads *= dtype.itemsize // out_dtype.itemsize + (kind == "two_shot")
    # A broadcast's has the root's, and a unit of each rank.
    quads = quads + world_size if kind == "broadcast" else quads * world_size
    # Any bits need room for marks.
    return quads * QUAD_BYTES * (1 if dtype.is_floating_point else 2)


def groups_fit(columns: int, dtype: torch.dtype, world_size: int) -> bool:
    """Whether each group of elements that has a scale is one program's, where rows of so many are normalized."""
    unit = QUAD_BYTES // dtype.itemsize
    step, parts = row_programs(-(-columns // unit), world_size, target.interpreted())
    return parts == 1 or step % (BLOCK // unit) == 0


def _split_rows(rows: int, columns: int, world_size: int) -> tuple[int, int, int, int]:
    """(elements of a longest part, of a shortest one, how many are longer, by how much) of rows as
    `torch.tensor_split` cuts them."""
    longer = rows % world_size
    shortest, extra = rows // world_size * columns, columns if longer else 0
    return shortest + extra, shortest, longer, extra


def _pieces(
    kind: str,
    x: torch.Tensor,
    out_dtype: torch.dtype,
    world_size: int,
    by_rows: bool,
    piece_bytes: int,
    rows: int | None = None,
) -> list[_Piece]:
    """How an exchange of `x` is cut. by_rows: parts are whole rows, and so are pieces. piece_bytes: what a piece takes
    of a slot, at most; of a two-shot as much again for its sums. rows: that an all-gather joins."""
    n = x.numel()
    columns = x.shape[-1] if x.ndim else 1
    if not x.dtype.is_floating_point:
        piece_bytes //= 2
    unit = QUAD_BYTES // out_dtype.itemsize
    x_part, longer, extra, out_part = 0, 0, 0, None
    if kind == "reduce_scatter":
        part, x_part, longer, extra = _split_rows(x.shape[0], n // x.shape[0], world_size)
    elif kind == "two_shot":
        # In whole units, so that parts stay aligned.
        part = -(-n // (columns * world_size)) * columns if by_rows else -(-n // (world_size * unit)) * unit
        x_part = part
    elif rows is not None:
        part, out_part, longer, extra = _split_rows(rows, columns, world_size)
    else:
        part = n
    if out_part is None:
        out_part = columns if kind == "all_scatter" else part
    # Pieces are whole rows, even if a part has but one, or runs of units.
    whole_rows = by_rows or kind == "all_scatter"
    width = columns if whole_rows else part
    # Of a slot (`slot_bytes`) that a source has.
    room = piece_bytes - world_size * QUAD_BYTES if kind == "broadcast" else piece_bytes // world_size
    grain = width if whole_rows else unit
    most = max(room // x.element_size() // grain, 1) * grain
    # All of one length, so that slots are no longer than they must be.
    step = -(-part // (-(-part // most) * grain)) * grain
    pieces = []
    for first in range(0, part, step):
        size = min(step, part - first)
        pieces.append(
            _Piece(
                first,
                first * world_size if kind == "all_scatter" else first,
                size // width if whole_rows else 1,
                width if whole_rows else size,
                x_part,
                longer,
                extra,
                part - first,
                out_part,
                columns * world_size if kind == "all_scatter" else width,
            )
        )
    return pieces


def _launch(
    heap: Heap,
    op: int,
    kind: str,
    x: torch.Tensor,
    out: torch.Tensor,
    after: AfterSum,
    piece: _Piece,
    tiles: bool,
    activation: int,
    reduction: str,
    integer: tl.dtype | None,
) -> Launch:
    world = heap.world_size
    ranks = triton.next_power_of_2(world)
    row_units = _row_units(piece, out.dtype)
    sums, gathers, broadcasts = _KINDS[kind]
    if after.weight is not None:
        step, parts = row_programs(row_units, world, target.interpreted())
        programs, threads = piece.rows * parts, min(MOST_THREADS, step * ranks)
    else:
        units, threads, parts = piece.rows * row_units, _THREADS, 0
        step = (_INTERPRETED_UNITS if target.interpreted() else _THREADS) // ranks
        if not (sums or broadcasts) and units > _MANY_UNITS:
            step *= 2
        programs = -(-units // step)
    # Places that must be multiples of 16 bytes for whole units to be loaded and stored at once.
    aligned = (x, out, after.finish.residual, after.total, after.weight)
    places = [t.data_ptr() for t in aligned if t is not None]
    sizes = (x.numel(), piece.first, piece.out_first, piece.width, piece.x_part, piece.extra, piece.limit)
    places += [out.element_size() * size for size in (*sizes, piece.out_part, piece.out_width)]
    constants = {
        "SUMS": sums,
        "GATHERS": gathers,
        "BROADCASTS": broadcasts,
        "UNEVEN": piece.extra > 0 and not sums,
        "TILES": tiles,
        "PARTS": parts,
        "ALIGNED": all(place % QUAD_BYTES == 0 for place in places),
        "OP": op,
        "WORLD": world,
        "RANKS": ranks,
        "STEP": step,
        "ACTIVATION": activation,
        "REDUCTION": reduction if sums else "",
        "INTEGER": integer if sums else None,
        "SCALES": after.scales_kind,
        "KEEPS": after.quantized is None or out is not after.total,
    }
    lanes = 64 if target.backend() == "hip" else 32
    return Launch(exchange_kernel, programs, constants, threads // lanes, 1, chained=True)


# Below this, over the number of peers, the bytes that a second hop saves cost less than it does: 1.05 us on 2 x H200,
# where an all-reduce by messages takes 3.9 us a MiB in one shot, 3.0 in two.
_ONE_SHOT_BYTES = 1 << 20
# Of two ranks it saves no bytes, but each of them adds half as much: two hops take less from here on (2 x H200: 186 us
# and 189 at 64 MiB, 49.5 and 48.9 at 16). A norm, which each then makes of half the rows, keeps the limit above (7.5 us
# and 7.9 at a MiB, 6.2 and 5.7 at a half), and so do a product's sums, which gain 2%.
_ONE_SHOT_PAIR_BYTES = 32 << 20


def cheaper_algorithm(nbytes: int, world_size: int, alone: bool = False) -> str:
    """How an all-reduce of so many bytes by messages takes less time: "one_shot" or "two_shot". alone: of a whole
    tensor, whose sum is the result."""
    most = _ONE_SHOT_PAIR_BYTES if alone and world_size == 2 else _ONE_SHOT_BYTES
    return "one_shot" if nbytes * (world_size - 1) < most else "two_shot"
