"""All-reduce of GEMM tiles: the epilogues that publish partial tiles and the consumers that sum them.

Shape letters: M N of the result; R ranks; T tiles of [BLOCK_M, BLOCK_N]; P GEMM programs.

A partial tile (this rank's term of the sum) is stored packed, BLOCK_M x BLOCK_N contiguous, so odd M and N cost no
masks on the wire. Every rank computes the same tiles in the same order. Each R consecutive tiles form a group, of which
each rank owns one; ownership moves on by one rank from wave to wave (`owned_tile`), so that every rank and every
program gets its share.

Two-shot:   source --partial tile, flag ready[source][tile]--> owner: sums the R partials in fp32
                                                              (`pair_sums`), adds the bias, activates, adds the residual
            owner  --final tile, flag done[tile]-------------> every rank's result
One-shot:   every rank sums every tile itself: no second hop, R / 2 times the bytes.

Where the partials lie depends on the placement:
  after, beside, own_stream   in the source's heap (`publish_partial`); consumers pull them over the links
  inside                      in the consumer's heap, room for each source: the GEMM's epilogue pushes them
                              (`push_partial`)

No wait can deadlock. Within a rank a consumer waits only for tiles of programs with its own or lower ids;
across ranks likewise, and for the other owners' `done` only after all its own pushes.

Flags (`signal.word`): ready[source][t] is number t, written by the source; done[t] is number T + t, by the owner.

Slots: calls use two in turn. A peer that has entered call n - 1 has finished reading the partials of call n - 2
(LAG = 1 in the kernel). The result needs no slots: an owner pushes a tile only when all ranks have published their
partials of this call, hence have entered it, hence are done with what the result held before.

`extra` is a `Sums`, OPTIONS are `Options`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pyrocshmem import signal, status, trace
from pyrocshmem.collectives import pair_sums
from pyrocshmem.collectives.epilogue import finished, partial_sum, rounded
from pyrocshmem.collectives.order import finished_tile, num_finished_tiles, tile_coords
from pyrocshmem.device import others, remote

_OP = tl.constexpr(int(status.Op.GEMM_ALL_REDUCE))


class Sums(NamedTuple):
    """Pointers, but for slot_elements, the int64 size of a slot of `partials`. squares, when asked for: fp32
    [tiles_n, M], the sum of squares, over a tile's columns, of each row of the *reduced* tile, before it is rounded."""

    partials: Any
    slot_elements: Any
    results: Any
    flags: Any
    squares: Any
    finish: Any


class Options(NamedTuple):
    """Constants. rows: of a tile that a consumer sums at a time. beside: it runs on programs of the GEMM's launch.
    activation: its number."""

    activation: int
    one_shot: bool
    squares: bool
    rows: int
    beside: bool


@triton.jit
def owned_tile(group, num_gemm_programs, rank, WORLD: tl.constexpr):
    """The tile of `group` that `rank` (a number or a block) owns.

    Example, R = 2, P = 4: groups (0,1) (2,3) are wave 0, where rank 0 owns tiles 0 and 2; (4,5) (6,7) are
    wave 1, where it owns 5 and 7.
    """
    wave = group // tl.cdiv(num_gemm_programs, WORLD)
    return group * WORLD + (rank + wave) % WORLD


@triton.jit
def tile_owner(tile, num_gemm_programs, WORLD: tl.constexpr):
    """The rank that owns `tile`: the inverse of `owned_tile`."""
    wave = tile // WORLD // tl.cdiv(num_gemm_programs, WORLD)
    return (tile % WORLD + WORLD - wave % WORLD) % WORLD


@triton.jit
def _num_tiles(problem, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    return tl.cdiv(problem.M, BLOCK_M) * tl.cdiv(problem.N, BLOCK_N)


@triton.jit
def _packed(tile, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Element offsets of the block rows x cols of packed tile number `tile`."""
    return tl.cast(tile, tl.int64) * (BLOCK_M * BLOCK_N) + rows[:, None] * BLOCK_N + cols[None, :]


@triton.jit
def _slot_tile(tile, tiles, source, ONE_SHOT: tl.constexpr, WORLD: tl.constexpr):
    """Number, within a slot that sources push into, of the packed tile that is `tile` from `source`.

    Two-shot, an owner gets one tile of each group from every source; one-shot it gets them all.
    """
    if ONE_SHOT:
        place = source * tiles + tile
    else:
        place = source * tl.cdiv(tiles, WORLD) + tile // WORLD
    return place


@triton.jit
def announce_partial(
    tile, told, epoch, extra, context, problem, WORLD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Announcement: raise ready[this rank][tile], at every rank in a one-shot, at the owner in a two-shot."""
    lanes = tl.arange(0, signal.MAX_WORLD)
    to = lanes < WORLD * told
    if not OPTIONS.one_shot:
        to = lanes == tl.where(told == 1, tile_owner(tile, problem.num_gemm_programs, WORLD), -1)
    flag = signal.word(extra.flags, tile, tl.load(context.control + signal.RANK))
    signal.publish(flag, epoch, lanes, context.heap_bases, to)


@triton.jit
def publish_partial(
    parts, tile, row, row_end, tile_n, epoch, c, extra, context, problem,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Epilogue: the partial tile into this rank's heap. `c` describes both slots as rows of BLOCK_N elements."""
    PART_N: tl.constexpr = BLOCK_N // len(parts)
    top = ((epoch & 1) * (extra.slot_elements // BLOCK_N)).to(tl.int32) + tile * BLOCK_M
    for i in tl.static_range(len(parts)):
        c.store([top, i * PART_N], partial_sum(parts[i], c.dtype))


@triton.jit
def push_partial(
    parts, tile, row, row_end, tile_n, epoch, c, extra, context, problem,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Epilogue: the partial tile into its consumer's slot (one-shot: everyone's), then its flag: at once, since Triton
    3.6 can't compile these stores with an announcement behind a condition."""
    heap_bases = context.heap_bases
    rank = tl.load(context.control + signal.RANK)
    tiles = _num_tiles(problem, BLOCK_M, BLOCK_N)
    PART_N: tl.constexpr = BLOCK_N // len(parts)
    place = extra.partials + (epoch & 1) * extra.slot_elements
    rows = tl.arange(0, BLOCK_M)
    number = _slot_tile(tile, tiles, rank, OPTIONS.one_shot, WORLD)
    for i in tl.static_range(len(parts)):
        offsets = _packed(number, rows, i * PART_N + tl.arange(0, PART_N), BLOCK_M, BLOCK_N)
        value = partial_sum(parts[i], extra.partials.dtype.element_ty)
        if OPTIONS.one_shot:
            for k in tl.static_range(WORLD):
                tl.store(remote(place, (rank + 1 + k) % WORLD, heap_bases) + offsets, value)
        else:
            owner = tile_owner(tile, problem.num_gemm_programs, WORLD)
            tl.store(remote(place, owner, heap_bases) + offsets, value)
    announce_partial(tile, 1, epoch, extra, context, problem, WORLD, BLOCK_M, BLOCK_N, OPTIONS)


@triton.jit
def _sources(
    tile, tiles, epoch, extra, context, PUSHED: tl.constexpr, WORLD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Where the R partials of `tile` start: a tuple of pointers, in rank order."""
    slot = extra.partials + (epoch & 1) * extra.slot_elements
    places = ()
    for source in tl.static_range(WORLD):
        if PUSHED:
            place = slot + tl.cast(_slot_tile(tile, tiles, source, OPTIONS.one_shot, WORLD), tl.int64) * (
                BLOCK_M * BLOCK_N
            )
        else:
            place = remote(slot + tl.cast(tile, tl.int64) * (BLOCK_M * BLOCK_N), source, context.heap_bases)
        places = places + (place,)  # type: ignore[assignment]
    return places


@triton.jit
def _targets(pointer, context, WORLD: tl.constexpr, ONE_SHOT: tl.constexpr):
    """Where a final tile goes: to every rank; in a one-shot, where each makes its own, only here."""
    places = (pointer,)
    if not ONE_SHOT:
        rank = tl.load(context.control + signal.RANK)
        places = others(pointer, rank, context.heap_bases, WORLD) + (pointer,)
    return places


@triton.jit
def _sum_of(sources, offsets, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The fp32 sum of what COUNT of the `sources`, from number FIRST on, have at `offsets`. In the order of
    `pair_sums.of_terms`, but a term is loaded when it is added, so that few take registers at once."""
    if COUNT == 1:
        total = pair_sums.in_fp32(tl.load(sources[FIRST] + offsets))
    else:
        LEFT: tl.constexpr = triton.next_power_of_2(COUNT) // 2
        total = _sum_of(sources, offsets, FIRST, LEFT) + _sum_of(sources, offsets, FIRST + LEFT, COUNT - LEFT)
    return total


@triton.jit
def _reduce_tile(
    tile, epoch, extra, context, problem, events, PUSHED: tl.constexpr, WORLD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Wait for the R partials of `tile`, sum them, and store the result where it belongs."""
    M, N, flags, finish = problem.M, problem.N, extra.flags, extra.finish
    ROWS: tl.constexpr = OPTIONS.rows
    tiles = _num_tiles(problem, BLOCK_M, BLOCK_N)
    lanes = tl.arange(0, signal.MAX_WORLD)
    trace.mark(events, trace.WAIT, tile)
    if signal.wait(signal.word(flags, tile, lanes), lanes < WORLD, epoch, tile, lanes, context, _OP, WORLD):
        trace.mark(events, trace.REDUCE, tile)
        tile_m, tile_n = tile_coords(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), problem.group)
        sources = _sources(tile, tiles, epoch, extra, context, PUSHED, WORLD, BLOCK_M, BLOCK_N, OPTIONS)
        targets = _targets(extra.results, context, WORLD, OPTIONS.one_shot)
        square_targets = _targets(extra.squares, context, WORLD, OPTIONS.one_shot)
        cols = tl.arange(0, BLOCK_N)
        j = tile_n * BLOCK_N + cols
        for step in range(0, BLOCK_M // ROWS):
            rows = step * ROWS + tl.arange(0, ROWS)
            packed = rows[:, None] * BLOCK_N + cols[None, :]
            total = _sum_of(sources, packed, 0, WORLD)
            total = finished(total, finish, tile_n * BLOCK_N, N, BLOCK_N, OPTIONS.activation)
            i = tile_m * BLOCK_M + rows
            offsets = i.to(tl.int64)[:, None] * N + j[None, :]
            mask = (i < M)[:, None] & (j < N)[None, :]
            if finish.residual is not None:
                total += tl.load(finish.residual + offsets, mask=mask, other=0.0).to(tl.float32)
            value = rounded(total, extra.results.dtype.element_ty)
            for k in tl.static_range(len(targets)):
                tl.store(targets[k] + offsets, value, mask=mask)
            if OPTIONS.squares:
                sums = tl.sum(tl.where(mask, total * total, 0.0), axis=1)
                for k in tl.static_range(len(targets)):
                    tl.store(square_targets[k] + tl.cast(tile_n, tl.int64) * M + i, sums, mask=i < M)
        if not OPTIONS.one_shot:
            trace.mark(events, trace.ANNOUNCE, tile)
            flag = signal.word(flags, tiles + tile, tl.load(context.control + signal.RANK))
            signal.publish(flag, epoch, lanes, context.heap_bases, lanes < WORLD)


@triton.jit
def reduce_groups(
    epoch, extra, context, problem, events, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Consumer beside the GEMM (programs from num_gemm_programs up) or after it (all programs of its own
    launch): pulls."""
    num_gemm_programs = problem.num_gemm_programs
    tiles = _num_tiles(problem, BLOCK_M, BLOCK_N)
    groups = tl.cdiv(tiles, WORLD)
    first = tl.program_id(0)
    step = tl.num_programs(0)
    if OPTIONS.beside:
        first -= num_gemm_programs
        step -= num_gemm_programs
    rank = tl.load(context.control + signal.RANK)
    if first >= 0:
        if OPTIONS.one_shot:
            for tile in range(first, tiles, step):
                _reduce_tile(
                    tile, epoch, extra, context, problem, events, False, WORLD, BLOCK_M, BLOCK_N,
                    OPTIONS,
                )  # fmt: skip
        else:
            for group in range(first, groups, step):
                tile = owned_tile(group, num_gemm_programs, rank, WORLD)
                if tile < tiles:
                    _reduce_tile(
                        tile, epoch, extra, context, problem, events, False, WORLD, BLOCK_M, BLOCK_N,
                        OPTIONS,
                    )  # fmt: skip
            # Only after all own pushes: the tiles of the same groups that the other ranks own.
            trace.mark(events, trace.WAIT, -1)
            lanes = tl.arange(0, signal.MAX_WORLD)
            for group in range(first, groups, step):
                tile = owned_tile(group, num_gemm_programs, lanes, WORLD)
                mask = (lanes < WORLD) & (tile < tiles)
                done = signal.word(extra.flags, tiles + tile, lanes)
                signal.wait(done, mask, epoch, tile, lanes, context, _OP, WORLD)


@triton.jit
def reduce_own_tiles(
    epoch, extra, context, problem, events, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Consumer inside the GEMM's programs: each sums the pushed tiles that it produced itself and, two-shot,
    its rank owns."""
    num_gemm_programs = problem.num_gemm_programs
    tiles = _num_tiles(problem, BLOCK_M, BLOCK_N)
    rank = tl.load(context.control + signal.RANK)
    program = tl.program_id(0)
    split, count = num_finished_tiles(program, problem, tiles)
    for i in range(0, count):
        tile = finished_tile(i, split, program, problem)
        if OPTIONS.one_shot:
            _reduce_tile(tile, epoch, extra, context, problem, events, True, WORLD, BLOCK_M, BLOCK_N, OPTIONS)
        elif tile_owner(tile, num_gemm_programs, WORLD) == rank:
            _reduce_tile(tile, epoch, extra, context, problem, events, True, WORLD, BLOCK_M, BLOCK_N, OPTIONS)
    if not OPTIONS.one_shot:
        trace.mark(events, trace.WAIT, -1)
        one = tl.arange(0, 1)
        for i in range(0, count):
            tile = finished_tile(i, split, program, problem)
            owner = tile_owner(tile, num_gemm_programs, WORLD)
            done = signal.word(extra.flags, tiles + tile, owner + one)
            signal.wait(done, one == 0, epoch, tile, owner, context, _OP, WORLD)
