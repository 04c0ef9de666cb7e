"""The configuration of an op without a measured table: what measurements on H200 say (docs/log.md), by sizes alone.

`decide` begins with a tile, asks the op's placements in order, and lets the first that suits complete the
configuration. The rules that ops name in their placements are here, the shared ones once: verdicts (does it suit, and
why), and what completes a configuration. Tiles are `tilings`'.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from pyrocshmem import interpreter, target
from pyrocshmem.calls.invariance import NONE, TP, Invariance
from pyrocshmem.calls.op import find
from pyrocshmem.collectives.exchange import cheaper_algorithm
from pyrocshmem.stream_k.choice.config import BY_BLAS, SPARE, Config, changed
from pyrocshmem.stream_k.choice.gemm_model import balanced_programs
from pyrocshmem.stream_k.choice.invariant import fixed
from pyrocshmem.stream_k.choice.placement import (
    Facts,
    Placement,
    Tiling,
    Verdict,
    find_placement,
    placements_of,
    wire_of,
)
from pyrocshmem.stream_k.choice.tilings import FEW_ROWS, first_tile, piece_rows


class Decision(NamedTuple):
    """What the rules say of a call, and why.

    config: the configuration. facts: what they decided by. placement: the one that decided, or that was asked for.
    asked: the placements that were asked, with what they said, in order: the last one suits; none where the caller
    asked for a placement by name. behind: those behind it, which were not asked. tiling: the tile, and why.
    """

    config: Config
    facts: Facts
    placement: Placement
    asked: tuple[tuple[Placement, Verdict], ...]
    behind: tuple[Placement, ...]
    tiling: Tiling


def decide(
    op: str,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device,
    partial_dtype: torch.dtype | None = None,
    placement: str | None = None,
    allow_tf32: bool = False,
    invariance: Invariance = NONE,
) -> Decision:
    """What `cost_model` gives, and why. The arguments are `stream_k.choose`'s. ValueError for an op without placements,
    and for a placement that the op doesn't have."""
    num_sms = target.num_sms(device)
    where = _target()
    if invariance and where == "cpu":
        interpreter.check_rows()
    if invariance == TP and getattr(find(op), "sums", False):
        if partial_dtype not in (None, torch.float32):
            raise ValueError(
                f"partial_dtype of {op} is {partial_dtype}, but the call is {invariance}: partial sums travel in fp32"
            )
        partial_dtype = torch.float32
    first = first_tile(M, N, dtype, num_sms, where, invariance)
    config = dataclasses.replace(first.config, partial_dtype=partial_dtype) if partial_dtype else first.config
    tiles = -(-M // config.block_m) * -(-N // config.block_n)
    wire = wire_of(op, dtype, partial_dtype)
    sizes = (M, N, K, dtype, world_size, device, wire, where, num_sms, config.block_m, tiles)
    facts = Facts(*sizes, allow_tf32, invariance)
    asked: list[tuple[Placement, Verdict]] = []
    behind: tuple[Placement, ...] = ()
    if placement is not None:
        chosen = find_placement(op, placement)
    else:
        placements = placements_of(op)
        if invariance:
            placements = tuple(each for each in placements if each.name not in BY_BLAS)
        for chosen in placements:
            asked.append((chosen, chosen.suits(facts)))
            if asked[-1][1].suits:
                break
        else:
            raise ValueError(f"no placement of {op} suits {facts}: one of them must, whatever the sizes")
        behind = placements[len(asked) :]
    tiling = first._replace(config=changed(config, placement=chosen.name))
    if chosen.tile is not None:
        tiling = chosen.tile(tiling, facts)
    config = fixed(chosen.configure(tiling.config, facts), facts)
    return Decision(config, facts, chosen, tuple(asked), behind, tiling)


def cost_model(
    op: str,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device,
    partial_dtype: torch.dtype | None = None,
    placement: str | None = None,
    allow_tf32: bool = False,
    invariance: Invariance = NONE,
) -> Config:
    """What `stream_k.choose`, which has the arguments, gives without a table."""
    return decide(
        op, M, N, K, dtype, world_size, device, partial_dtype, placement, allow_tf32, invariance
    ).config


def _target() -> str:
    """`Facts.target`."""
    if target.interpreted():
        return "cpu"
    return {"cuda": "sm_90", "hip": "hip"}.get(target.backend(), "host")


# Verdicts: whether a placement suits.


def otherwise(facts: Facts) -> Verdict:
    """What remains where nothing before it suits."""
    return Verdict(True, "it suits any sizes")


def nothing_to_consume(facts: Facts) -> Verdict:
    """Of a GEMM alone."""
    return Verdict(True, "nothing consumes its tiles")


def by_name(facts: Facts) -> Verdict:
    """Never by rule."""
    return Verdict(False, "no rule chooses it: only a measurement does, or who asks for it by name")


def on_sm_90(facts: Facts) -> Verdict:
    """Where kernels are compiled for NVIDIA."""
    if facts.target == "sm_90":
        return Verdict(True, "it suits any sizes on sm_90")
    return Verdict(False, f"it was measured on sm_90 alone, this is {facts.target}")


def few_tiles(facts: Facts) -> Verdict:
    """The GEMM is over before much could travel beside it."""
    if facts.in_16_bits and facts.M <= FEW_ROWS:
        # Messages are short, whatever the number of tiles.
        return Verdict(True, f"M = {facts.M} is at most {FEW_ROWS} rows, whose messages are short")
    if facts.tiles < facts.num_sms:
        return Verdict(True, f"{facts.tiles} tiles are fewer than {facts.num_sms} SMs, less than a wave")
    return Verdict(False, f"{facts.tiles} tiles are at least as many as {facts.num_sms} SMs, a wave")


# Rows up to here leave the tiles of a GEMM as messages faster than from memory, and cuBLAS gains little.
_SENT_ROWS = 128
# Tile rows below which the BLAS and an exchange take less time than copies in steps: of columns, of a rank's gathered
# rows, and of rows that end inside a tile (2 x H100, GEMMs of public models, docs/log.md). Of sums with several peers,
# whole tiles or not: of all ranks together in a reduce-scatter, of each in an all-reduce (4 and 8 x H200).
_COLUMN_TILES, _GATHERED_TILES, _CUT_TILES = 7, 5, 10
_SCATTERED_TILES, _REDUCED_TILES = 32, 8
# What an exchange by messages takes: of each hop, microseconds and bytes a microsecond; and multiply-adds of an SM in a
# microsecond, of 16 bits (2 x H200 and 2 x H100, docs/log.md).
_HOP_US, _HOP_BYTES, _SM_MULTIPLY_ADDS = 4.0, 330e3, 2.95e6
# A last wave that idles so many times as long as the exchange takes is the BLAS' to fill. A GEMM of fewer microseconds
# is over before copies have begun.
_IDLES, _SHORT_US = 1.1, 50.0
# Inner size beyond which the GEMM of an all-reduce is long enough to overlap with copies of fp32 sums.
_PAIR_K = 2048


# Rows of 16 bits up to which our GEMM alone is as fast as the BLAS: of 17 to 64 it had 1.07 of its speed on average,
# 0.91 at worst, of more 0.914 on average (one H200, weights as [N, K], docs/log.md).
_OWN_ROWS = FEW_ROWS


def faster_by_blas(facts: Facts) -> Verdict:
    """A GEMM alone by the BLAS, as measured on one H200 (docs/log.md)."""
    return _by_blas(facts, _OWN_ROWS)


def _by_blas(facts: Facts, own_rows: int) -> Verdict:
    """Whether the BLAS multiplies faster than our GEMM: float32 always, 16 bits of more than `own_rows` rows."""
    if facts.target != "sm_90":
        return Verdict(False, f"the BLAS was measured on sm_90 alone, this is {facts.target}")
    if facts.in_tf32:
        return Verdict(
            False, "products may go through tf32, which for the BLAS a switch of the process decides"
        )
    if not facts.in_16_bits:
        return Verdict(True, "of float32 our GEMM has a fifth of the BLAS' speed")
    if own_rows >= facts.M:
        return Verdict(False, f"M = {facts.M} is at most {own_rows} rows, for which the BLAS gains little")
    return Verdict(True, f"M = {facts.M} is more than {own_rows} rows, of which the BLAS is the faster one")


def _before_messages(facts: Facts, then: Callable[[Facts], Verdict]) -> Verdict:
    """Whether the BLAS and an exchange take less time than a fused kernel: of 16 bits, whose GEMMs may overlap with
    communication, if `then` suits, too (2 x H200 and 2 x H100, docs/log.md)."""
    first = _by_blas(facts, _SENT_ROWS)
    if not first.suits or not facts.in_16_bits:
        return first
    second = then(facts)
    return Verdict(True, f"{first.why}, and {second.why}") if second.suits else second


def low_for_blas(facts: Facts) -> Verdict:
    """The BLAS and an exchange of columns, where there is little to overlap with."""
    return _before_messages(facts, _low_columns)


def _low_columns(facts: Facts) -> Verdict:
    little = few_tiles(facts)
    return little if little.suits else _low(facts, facts.M, _COLUMN_TILES)


def _low(facts: Facts, rows: int, whole: int = 0, cut: int = _CUT_TILES) -> Verdict:
    """Whether `rows`, of what is copied, are too few for steps. whole, cut: tile rows that are enough where they are
    whole, and where the last one isn't."""
    is_cut = rows % facts.block_m != 0
    least = (cut if is_cut else whole) * facts.block_m
    what = f"{rows} rows, which end {'inside' if is_cut else 'with'} a tile,"
    if rows < least:
        return Verdict(True, f"{what} are fewer than {least}")
    return Verdict(False, f"{what} are enough to copy in steps")


def _block_rows(facts: Facts) -> int:
    return -(-facts.M // facts.world_size)


def few_cut_tiles_for_blas(facts: Facts) -> Verdict:
    """The same of sums, unless those of whole tiles leave as fast as they are made."""
    return _before_messages(facts, _leaves_late)


def _leaves_late(facts: Facts) -> Verdict:
    idle = _idles(facts, hops=1)
    if idle.suits:
        return idle
    multiple = 2 * _SENT_ROWS
    if few_tiles(facts).suits and facts.M % multiple == 0:
        return Verdict(
            False, f"M = {facts.M} is a multiple of {multiple} rows, whose sums leave as they are made"
        )
    if facts.tiles <= 1.5 * facts.num_sms:
        return Verdict(True, f"{facts.tiles} tiles are at most one and a half waves on {facts.num_sms} SMs")
    short = _short(facts)
    few = _SCATTERED_TILES // facts.world_size
    return short if short.suits else _low_sums(facts, few, min(_CUT_TILES, few))


def _low_sums(facts: Facts, several: int, cut: int = _CUT_TILES) -> Verdict:
    """`_low` of a block of sums. several: tile rows that are enough of whole ones, where a rank has several peers."""
    return _low(facts, _block_rows(facts), several if facts.world_size > 2 else 0, cut)


_WIDE = Verdict(False, "partial sums travel in fp32, which no BLAS gives")


def _gemm_us(facts: Facts) -> float:
    """Of a GEMM that leaves no SM idle."""
    return facts.M * facts.N * facts.K / (facts.num_sms * _SM_MULTIPLY_ADDS)


def _idles(facts: Facts, hops: int) -> Verdict:
    """Whether SMs that have no tile in the last wave idle longer than an exchange behind the GEMM takes. The BLAS has
    more shapes of tiles. hops: of the exchange."""
    if not facts.is_narrow or facts.wire is None:
        return _WIDE
    waves = facts.tiles / facts.num_sms
    idle = (math.ceil(waves) / waves - 1) * _gemm_us(facts) if waves else 0.0
    sent = facts.M * facts.N * facts.wire.itemsize * (facts.world_size - 1) / facts.world_size
    taken = hops * (_HOP_US + sent / _HOP_BYTES)
    what = f"{facts.tiles} tiles on {facts.num_sms} SMs leave some idle for {idle:.0f} us"
    if idle > _IDLES * taken:
        return Verdict(True, f"{what}, longer than an exchange behind the GEMM takes, {taken:.0f} us")
    return Verdict(False, f"{what}, an exchange behind the GEMM takes {taken:.0f} us")


def _short(facts: Facts) -> Verdict:
    if not facts.is_narrow:
        return _WIDE
    took = _gemm_us(facts)
    if took <= _SHORT_US:
        return Verdict(True, f"a GEMM of {took:.0f} us is too short to overlap with copies")
    return Verdict(False, f"a GEMM of {took:.0f} us is long enough to overlap with copies")


def short_sum_for_blas(facts: Facts) -> Verdict:
    """The same for an all-reduce: also where the GEMM is too short to overlap with, up to two waves of tiles, and of
    fp32 sums `_PAIR_K`."""
    return _before_messages(facts, _short_sum)


def _short_sum(facts: Facts) -> Verdict:
    little = few_tiles(facts)
    if little.suits:
        return little
    low = _low_sums(facts, _REDUCED_TILES)
    if low.suits:
        return low
    waves = f"{facts.tiles} tiles are %s two waves on {facts.num_sms} SMs"
    if facts.tiles > 2 * facts.num_sms:
        for verdict in (_short(facts), _idles(facts, hops=2)):
            if verdict.suits:
                return verdict
        return Verdict(False, f"{waves % 'more than'}: the GEMM is long enough to overlap with")
    if facts.is_narrow:
        return Verdict(True, f"{waves % 'at most'}, and partial sums travel in 16 bits")
    if facts.K > _PAIR_K:
        return Verdict(False, f"K = {facts.K} is more than {_PAIR_K}: the GEMM is long enough for fp32 sums")
    return Verdict(True, f"{waves % 'at most'}, and K = {facts.K} is at most {_PAIR_K}")


# Gathered rows up to here come faster by messages, in 15 us, than by copy engines; of up to _FEW_GATHERED rows, whose
# GEMM is short, twice as many bytes do.
_GATHERED_BYTES, _FEW_GATHERED = 4 << 20, 1024


def few_gathered_bytes(facts: Facts) -> Verdict:
    """A is gathered soon. Ranks may differ in columns but must agree, so for an all-gather this alone decides."""
    most = _GATHERED_BYTES * (2 if facts.M <= _FEW_GATHERED else 1)
    size = facts.M * facts.K * facts.dtype.itemsize
    gathered = f"all ranks' A is {size} bytes"
    if size <= most:
        return Verdict(True, f"{gathered}, at most {most} for {facts.M} rows")
    return Verdict(False, f"{gathered}, more than {most} for {facts.M} rows")


# Microseconds that evenly cut rows must take to gather: their products by the BLAS cost the host 100 us more.
_LATE_US = 60.0


def blocks_for_blas(facts: Facts) -> Verdict:
    """The BLAS, a block of rows at a time, where they take long to gather (2 x H200, docs/log.md). Here, too, columns
    must not matter."""
    blas, few = _by_blas(facts, _SENT_ROWS), few_gathered_bytes(facts)
    if not blas.suits:
        return blas
    if not facts.in_16_bits or facts.world_size != 2:
        return Verdict(False, "it was measured in 16 bits alone, between 2 ranks")
    if few.suits:
        return Verdict(False, few.why)
    # Each block ends with a wave of its own, half of whose SMs idle.
    ends = (facts.world_size - 1) * 128 * 256 / 2 * facts.K / _SM_MULTIPLY_ADDS
    took = facts.M * facts.K * facts.dtype.itemsize * (facts.world_size - 1) / facts.world_size / _HOP_BYTES
    least = ends if _little_gathered(facts).suits else max(ends, _LATE_US)
    what = f"the peers' rows come in {took:.0f} us"
    if took > least:
        return Verdict(True, f"{what}, longer than the {least:.0f} us of a product for each block")
    return Verdict(False, f"{what}, a product for each block takes {least:.0f} us")


def few_gathered_bytes_for_blas(facts: Facts) -> Verdict:
    """The same, with a GEMM of the BLAS; here, too, columns must not matter. Also where a rank has few rows, or
    unequally many, which would be stored by pointers."""
    return _before_messages(facts, _little_gathered)


def _little_gathered(facts: Facts) -> Verdict:
    few = few_gathered_bytes(facts)
    if few.suits:
        return few
    if facts.M % facts.world_size != 0:
        return Verdict(True, f"M = {facts.M} rows are not equally many on each of {facts.world_size} ranks")
    low = _low(facts, _block_rows(facts), _GATHERED_TILES)
    return low if low.suits else Verdict(False, f"{few.why}, and {low.why}")


# Tile rows of a block of sums below which consumers beside the GEMM are as fast.
_PULLED_TILES = 8


def tall_blocks(facts: Facts) -> Verdict:
    """Blocks of sums that copy engines move faster than programs."""
    where = on_sm_90(facts)
    if not where.suits:
        return where
    rows, least = -(-facts.M // facts.world_size), _PULLED_TILES * facts.block_m
    if rows >= least:
        return Verdict(True, f"a rank's block has {rows} rows, at least {least}: {_PULLED_TILES} tiles")
    return Verdict(False, f"a rank's block has {rows} rows, fewer than {least}: {_PULLED_TILES} tiles")


# Inner size, over the number of peers, below which links are busier than SMs. Programs pull faster there than copy
# engines, which get in one another's way where a rank has several peers: on 4 x H200 at 8192, not at 16384.
_PULLED_K = 4096


def busy_links(facts: Facts) -> Verdict:
    """Programs pull columns faster than copy engines."""
    where = on_sm_90(facts)
    if not where.suits:
        return where
    peers, width = facts.world_size - 1, facts.N * facts.dtype.itemsize
    if peers < 2:
        return Verdict(False, f"a rank has {peers} peers: copy engines don't get in one another's way")
    if peers * _PULLED_K <= facts.K:
        return Verdict(
            False,
            f"K = {facts.K} is at least {peers * _PULLED_K}, {_PULLED_K} a peer: SMs are busier than links",
        )
    if width % 16 != 0:
        return Verdict(False, f"rows of {width} bytes don't begin at multiples of 16")
    return Verdict(
        True, f"K = {facts.K} is less than {peers * _PULLED_K}, {_PULLED_K} a peer: links are busier than SMs"
    )


# What completes a configuration.


def fewest_hops(config: Config, facts: Facts) -> Config:
    """An all-reduce with little to overlap with: the fewest hops, or the fewest bytes."""
    assert facts.wire is not None
    sent = facts.M * facts.N * facts.wire.itemsize
    return changed(config, algorithm=cheaper_algorithm(sent, facts.world_size))


def _shares_sms(facts: Facts) -> bool:
    """Whether programs of both sides are worth balancing, from measurements on 4 x H200 (docs/log.md has them)."""
    return facts.target == "sm_90" and not few_tiles(facts).suits


def pushed_within(config: Config, facts: Facts) -> Config:
    """Tiles that programs of the GEMM's launch, or of one after it, push to the peers."""
    return _within(config, facts, comm=32, rows=16)


def summed_within(config: Config, facts: Facts) -> Config:
    """The same for sums over ranks."""
    return _within(config, facts, *((24, 16) if facts.is_narrow else (40, 8)))


def summed_after(config: Config, facts: Facts) -> Config:
    """The same for an all-reduce after the GEMM."""
    return summed_within(fewest_hops(config, facts), facts)


def _within(config: Config, facts: Facts, comm: int, rows: int) -> Config:
    """comm: programs that consume, of 132."""
    if not _shares_sms(facts):
        return config
    return changed(config, num_comm_programs=max(1, facts.num_sms * comm // 132), comm_rows=rows)


def beside(config: Config, facts: Facts) -> Config:
    """Consumers on a stream of their own, that share SMs with the GEMM."""
    if not _shares_sms(facts):
        return config
    comm, rows = (facts.num_sms // 2, 8) if facts.is_narrow else (2 * facts.num_sms, 4)
    return _balanced(config, facts, facts.num_sms - SPARE, comm, 4, rows)


def pushed_beside(config: Config, facts: Facts) -> Config:
    """Pushing takes an eighth of the SMs, three programs each, for itself."""
    if not _shares_sms(facts):
        return config
    most = facts.num_sms * 7 // 8
    return _balanced(config, facts, most, 3 * (facts.num_sms - balanced_programs(facts.tiles, most)), 8, 32)


def _balanced(config: Config, facts: Facts, most: int, comm: int, warps: int, rows: int) -> Config:
    """most: programs of the GEMM. comm, warps, rows: programs that consume, their warps, and what they move at once."""
    return changed(
        config,
        split="none",
        num_programs=balanced_programs(facts.tiles, most),
        num_comm_programs=comm,
        comm_warps=warps,
        comm_rows=rows,
    )


# What a copy of pulled 16-bit rows should move: of less the gaps between copies count, of more what follows the last.
_PULLED_BYTES = 8 << 20


def own_row_blocks(config: Config, facts: Facts) -> Config:
    """A reduce-scatter by copy engines, block by block of all ranks' rows, from measurements on H200 (docs/log.md): at
    least two steps, of few tile rows, since something follows the last one; but a step costs the copy engines as long
    as it takes them to move a megabyte or two."""
    tile_rows = _tile_rows(config, facts, facts.world_size)
    return beside(_in_steps(config, min(8, -(-tile_rows // 2))), facts)


def summed_row_blocks(config: Config, facts: Facts) -> Config:
    """The same for an all-reduce, whose sums travel once more."""
    tile_rows = _tile_rows(config, facts, facts.world_size)
    return beside(_in_steps(config, _copied_rows(config, facts, tile_rows, least=4)), facts)


def copied_columns(config: Config, facts: Facts) -> Config:
    """An all-scatter by copy engines, in steps of all rows."""
    tile_rows = _tile_rows(config, facts, 1)
    return beside(_in_steps(config, _copied_rows(config, facts, tile_rows, least=8)), facts)


def pulled_columns(config: Config, facts: Facts) -> Config:
    """An all-scatter whose columns programs pull. With 64 KiB on their way each, they need an SM of their own."""
    config = _in_steps(config, min(8, -(-_tile_rows(config, facts, 1) // 2)))
    config = changed(config, comm_rows=config.block_m)
    if not _shares_sms(facts):
        return config
    most = facts.num_sms * 10 // 11
    free = facts.num_sms - balanced_programs(facts.tiles, most)
    return _balanced(config, facts, most, max(1, free - free % facts.world_size), 16, config.comm_rows)


def _tile_rows(config: Config, facts: Facts, blocks: int) -> int:
    """Tile rows of the largest of so many blocks of rows."""
    largest = -(-facts.M // blocks)
    return -(-largest // config.block_m)


def _copied_rows(config: Config, facts: Facts, tile_rows: int, least: int) -> int:
    """Tile rows that move about _PULLED_BYTES, at least so many."""
    columns = -(-facts.N // config.block_n)
    size = config.block_m * config.block_n * columns * 2
    rows = _PULLED_BYTES // size if size else 0
    return min(max(least, _power_of_two(rows)), -(-tile_rows // 2))


def _in_steps(config: Config, chunk: int) -> Config:
    chunk = max(1, chunk)
    return changed(config, split="none", chunk=chunk, group_m=min(config.group_m, chunk))


def _power_of_two(size: int) -> int:
    """The largest one up to `size`; 0 for 0."""
    return 1 << (size.bit_length() - 1) if size else 0


def gathered_pieces(config: Config, facts: Facts) -> Config:
    """An all-gather by copy engines."""
    chunk = piece_rows(facts) // config.block_m
    return changed(config, split="none", chunk=chunk, group_m=min(config.group_m, chunk))
