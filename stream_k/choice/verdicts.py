"""Whether a placement suits, and why, by sizes alone: what measurements on H100 and H200 say (docs/log.md).

    Placement("messages", verdicts.few_tiles)

Ops name these in their placements, the shared ones once; `choice.rules` asks them in order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pyrocshmem.stream_k.choice.placement import Facts, Verdict
from pyrocshmem.stream_k.choice.tilings import FEW_ROWS


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


# Rows up to here leave the tiles of a GEMM as messages faster than from memory, and cuBLAS gains little; but it gains
# where an SM has fewer tiles than this, that rows don't fill, with K from here on: of tiles of half of those rows, and
# of taller ones (2 x H200, docs/log.md).
_SENT_ROWS, _SENT_TILES, _SENT_K, _TALL_SENT_K = 128, 0.875, 4608, 2048
# Tile rows below which the BLAS and an exchange take less time than copies in steps: of a rank's gathered rows, and of
# rows that end inside a tile (2 x H100, GEMMs of public models, docs/log.md). Of sums with several peers, whole tiles
# or not: of all ranks together in a reduce-scatter, of each in an all-reduce (4 and 8 x H200).
_GATHERED_TILES, _CUT_TILES = 5, 10
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


# But of more than a quarter of them, with columns for more than a wave of tiles of 64, the BLAS has 1.03 of our speed
# on average, 0.97 to 1.10, and with almost three times as many columns of fewer rows, too, 0.98 to 1.07 (one H200). Of
# more than a quarter, where tiles of 64 columns leave a third of the SMs or more idle and tiles of 32 are more than a
# wave, it has 1.10 on average, 0.88 to 1.29, up to this K. Where none of our tiles is cut, it has 1.07 on average, up
# to 1.20, of more than half of them and down to few columns, from a long K on.
_FEWEST_COLUMNS, _MOST_COLUMNS, _WAVE_COLUMNS = 64, 180, 2 * 64 / 3
_IDLE_COLUMNS, _IDLE_K = 32, 7168
_NARROWEST_COLUMNS, _DEEP_K = 13, 12288


# Of 16 bits and more than _OWN_ROWS rows our GEMM takes 0.85 of the BLAS' time, 1.12 at worst, where tiles of 128 x 128
# are a quarter of the SMs or fewer, up to the larger K; and 0.94, 1.14 at worst, whatever the tiles, up to the smaller
# one (one H200, 230 GEMMs drawn for it and 392 of a corpus, docs/log.md).
_SHORT_TILES, _SHORT_K, _SHORTEST_K = 0.25, 2048, 256


def faster_by_blas(facts: Facts) -> Verdict:
    """A GEMM alone by the BLAS, as measured on one H200 (docs/log.md)."""
    found = _by_blas(facts, _own_rows(facts))
    if not found.suits or not facts.in_16_bits or facts.M <= _OWN_ROWS:
        return found
    tiles = -(-facts.M // 128) * -(-facts.N // 128)
    longest = _SHORT_K if tiles <= _SHORT_TILES * facts.num_sms else _SHORTEST_K
    if longest >= facts.K:
        return Verdict(False, f"with K = {facts.K} it is so short that our GEMM is the faster one")
    return found


def _own_rows(facts: Facts) -> int:
    """Rows of a GEMM alone up to which ours is as fast as the BLAS."""
    columns = facts.N / facts.num_sms
    if columns > _MOST_COLUMNS:
        return 0
    if columns > _FEWEST_COLUMNS:
        return _OWN_ROWS // 4
    if _IDLE_COLUMNS < columns <= _WAVE_COLUMNS and facts.K <= _IDLE_K:
        return _OWN_ROWS // 4
    return _OWN_ROWS


def _whole_rows(facts: Facts) -> int:
    """The same where none of our tiles is cut along K, as behind a gather."""
    deep = _NARROWEST_COLUMNS < facts.N / facts.num_sms <= _WAVE_COLUMNS and facts.K >= _DEEP_K
    return _OWN_ROWS // 2 if deep else _own_rows(facts)


def _by_blas(facts: Facts, own_rows: int) -> Verdict:
    """Whether the BLAS multiplies faster than our GEMM: float32 always, 16 bits of more than `own_rows` rows."""
    if facts.target != "sm_90":
        return Verdict(False, f"the BLAS was measured on sm_90 alone, this is {facts.target}")
    if facts.in_tf32:
        return Verdict(
            False, "products may go through tf32, which for the BLAS a switch of the process decides"
        )
    if not facts.in_16_bits:
        return Verdict(True, "of float32 our GEMM has 0.70 of the BLAS' speed, 0.26 at worst")
    if own_rows == 0:
        return Verdict(True, f"with N = {facts.N} the BLAS is the faster one, whatever the rows")
    if own_rows >= facts.M:
        return Verdict(False, f"M = {facts.M} is at most {own_rows} rows, for which the BLAS gains little")
    return Verdict(True, f"M = {facts.M} is more than {own_rows} rows, of which the BLAS is the faster one")


def _sent_rows(facts: Facts) -> int:
    """Rows up to which the BLAS gains little over tiles of sums that leave as messages."""
    filled = facts.M % facts.block_m == 0 or facts.tiles >= _SENT_TILES * facts.num_sms
    least = _TALL_SENT_K if 2 * facts.block_m > _SENT_ROWS else _SENT_K
    return _OWN_ROWS if facts.is_narrow and not filled and least <= facts.K else _SENT_ROWS


def _before_messages(facts: Facts, then: Callable[[Facts], Verdict], own_rows: int | None = None) -> Verdict:
    """Whether the BLAS and an exchange take less time than a fused kernel: of 16 bits, whose GEMMs may overlap with
    communication, if `then` suits, too (2 x H200 and 2 x H100, docs/log.md). own_rows: as in `_by_blas`; None: those of
    sums, by what their tiles leave of the SMs."""
    first = _by_blas(facts, _sent_rows(facts) if own_rows is None else own_rows)
    if not first.suits or not facts.in_16_bits:
        return first
    second = then(facts)
    return Verdict(True, f"{first.why}, and {second.why}") if second.suits else second


def low_for_blas(facts: Facts) -> Verdict:
    """The BLAS and an exchange of columns, where there is little to overlap with. Whole columns gain nothing by
    leaving tile by tile, as messages (2 x H200, docs/log.md)."""
    return _before_messages(facts, _low_columns, _OWN_ROWS)


# What copies of columns leave when the GEMM is done: microseconds until those of the last step begin, and of each peer.
_LAST_US, _LAST_COLUMNS_US = 8.0, 25.0


def _low_columns(facts: Facts) -> Verdict:
    little = few_tiles(facts)
    if little.suits:
        return little
    num_sms = facts.num_sms
    waves = -(-facts.tiles // num_sms)
    idle = _idle_us(facts, waves, _tiles_in_full(facts))
    last = _LAST_US + _LAST_COLUMNS_US * (facts.world_size - 1)
    size = facts.M * facts.N * facts.world_size * facts.dtype.itemsize
    taken = _HOP_US + hop_us(facts, size)
    what = (
        f"{waves} waves on {num_sms} SMs leave some idle for {idle:.0f} us, and copies end {last:.0f} us late"
    )
    if idle + last > taken:
        return Verdict(True, f"{what}: more than an exchange behind the GEMM takes, {taken:.0f} us")
    return Verdict(False, f"{what}: an exchange behind the GEMM takes {taken:.0f} us")


def _idle_us(facts: Facts, waves: int, tiles: float) -> float:
    """For how many microseconds SMs idle in so many waves that have so many tiles."""
    return (waves * facts.num_sms / tiles - 1) * gemm_us(facts)


def _tiles_in_full(facts: Facts) -> float:
    """Tiles, counting of those of the last rows as much as has rows."""
    return facts.M / facts.block_m * facts.tiles / -(-facts.M // facts.block_m)


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
    return _before_messages(facts, partial(_behind, reduces=False, then=_leaves_late))


def _behind(facts: Facts, reduces: bool, then: Callable[[Facts], Verdict]) -> Verdict:
    """Whether an exchange follows the GEMM: `then`, but not where two ranks' blocks are copied beside it."""
    copied = _copied(facts, reduces)
    return Verdict(False, copied.why) if facts.world_size == 2 and copied.suits else then(facts)


def _leaves_late(facts: Facts) -> Verdict:
    idle = _idles(facts, hops=1)
    if idle.suits:
        return idle
    multiple, least = 2 * _SENT_ROWS, _SENT_TILES * facts.num_sms
    if facts.M % multiple == 0 and facts.K < _SENT_K and least <= facts.tiles < facts.num_sms:
        return Verdict(
            False,
            f"M = {facts.M} is a multiple of {multiple} rows, whose sums leave as they are made: K = {facts.K} is "
            f"less than {_SENT_K}, and {facts.tiles} tiles keep most of {facts.num_sms} SMs busy",
        )
    if facts.tiles <= 1.5 * facts.num_sms:
        return Verdict(True, f"{facts.tiles} tiles are at most one and a half waves on {facts.num_sms} SMs")
    short = _short(facts)
    few = _SCATTERED_TILES // facts.world_size
    return short if short.suits else _low_sums(facts, few, min(_CUT_TILES, few))


def _low_sums(facts: Facts, several: int, cut: int = _CUT_TILES) -> Verdict:
    """`_low` of a block of sums. several: tile rows that are enough of whole ones, where a rank has several peers."""
    return _low(facts, _block_rows(facts), several if facts.world_size > 2 else 0, cut)


# Microseconds that copies of partial blocks must take, or an exchange behind the GEMM is as fast: to begin with, and of
# each peer; and so many times as long in an all-reduce, whose sums are pulled, too (2 and 4 x H200, docs/log.md).
_COPIES_US, _PEER_US, _PULLED_TOO = 8.0, 10.0, 1.5
# A reduce-scatter of two ranks needs no more than this and a share of the GEMM, which in blocks takes longer; and what
# our GEMMs send in steps ends so many microseconds later than the sums of the BLAS' blocks (2 x H200, docs/log.md).
_SCATTERED_US, _CUT_GEMM, _STEPS_LATE_US = 12.0, 0.035, 12.0
# Of several peers' sums: tiles for which our waves have room, over tiles that there are, where the BLAS gains more than
# the sums cost, in a reduce-scatter and in an all-reduce.
_SCATTERED_ROOM, _REDUCED_ROOM = 1.3, 1.5
# Of two ranks' (2 x H200, docs/log.md): what else the BLAS costs, microseconds and bytes a microsecond of a block that
# is read twice and written; and of the time that sums take on the link, the share that is left at the end.
_BLOCKS_US, _SUMMED_BYTES, _PULLED_LATE = 15.0, 2.5e6, 0.75
# Tile rows of a block below which our GEMMs read B too often where K is long.
_BLOCK_TILES, _LONG_K = 5, 6144


def blocks_to_scatter(facts: Facts) -> Verdict:
    """The BLAS, a block of rows after another, each copied while the next is multiplied."""
    return _partial_blocks(facts, False, _leaves_late, _SCATTERED_ROOM)


def blocks_to_reduce(facts: Facts) -> Verdict:
    """The same for an all-reduce."""
    return _partial_blocks(facts, True, _short_sum, _REDUCED_ROOM)


def _partial_blocks(facts: Facts, reduces: bool, unfused: Callable[[Facts], Verdict], room: float) -> Verdict:
    """Whether to copy partial blocks: in the place of an exchange, where that is `unfused`, and of our GEMMs that leave
    SMs idle."""
    first = _by_blas(facts, _SENT_ROWS)
    if not first.suits:
        return first
    copied = _copied(facts, reduces)
    if not copied.suits:
        return copied
    if facts.world_size == 2:
        second = _left_idle(facts, reduces)
    else:
        second = unfused(facts)
        if not second.suits:
            second = _unfilled(facts, room)
    return Verdict(True, f"{copied.why}, and {second.why}") if second.suits else second


def _copied(facts: Facts, reduces: bool) -> Verdict:
    """Whether partial blocks take long to copy."""
    if not facts.in_16_bits or not facts.is_narrow or facts.wire is None:
        return Verdict(False, "it was measured in 16 bits alone")
    took = partials_us(facts)
    least = least_copied_us(facts.world_size, reduces)
    if facts.world_size == 2 and not reduces:
        least = min(least, _SCATTERED_US + _CUT_GEMM * gemm_us(facts))
    what = f"copies of partial blocks take {took:.1f} us"
    if took <= least:
        return Verdict(False, f"{what}, of up to {least:.1f} an exchange behind the GEMM is as fast")
    return Verdict(True, f"{what}, more than {least:.1f}")


def _left_idle(facts: Facts, reduces: bool) -> Verdict:
    """Whether our GEMMs of two ranks' blocks leave SMs idle for longer than sums of the BLAS' blocks take."""
    assert facts.wire is not None
    rows, least = _block_rows(facts), _BLOCK_TILES * facts.block_m
    if rows < least and facts.K >= _LONG_K:
        return Verdict(
            True, f"blocks of {rows} rows are fewer than {least}, with K = {facts.K} at least {_LONG_K}"
        )
    short = _short(facts)
    if short.suits:
        return short
    # The second GEMM begins on SMs that the first one leaves, so that all tiles come in one row of waves.
    num_sms, tiles = facts.num_sms, _tiles_in_full(facts)
    waves = -(-facts.world_size * _block_tiles(facts) // num_sms)
    idle = _idle_us(facts, waves, tiles)
    size = facts.M * facts.N * facts.wire.itemsize
    taken = size / facts.world_size * (facts.world_size + 1) / _SUMMED_BYTES
    what = f"our GEMMs take {waves} waves on {num_sms} SMs for {tiles:.0f} tiles, {idle:.0f} us more than full ones"
    if reduces:
        taken += _BLOCKS_US + _PULLED_LATE * _behind_products(facts) * partials_us(facts)
    else:
        idle += _STEPS_LATE_US
        what = f"{what} and {_STEPS_LATE_US:.0f} us of late copies"
        taken += _CUT_GEMM * gemm_us(facts)
    if idle > taken:
        return Verdict(True, f"{what}: longer than sums of the BLAS' blocks take, {taken:.0f} us")
    return Verdict(False, f"{what}: sums of the BLAS' blocks take {taken:.0f} us")


# Of the rows that a rank of two sums, the least and the largest share that the BLAS multiplies first, in heights of so
# many rows, of which there must be so many (2 x H200, docs/log.md).
_LEAST_FIRST, _MOST_FIRST, _BLAS_ROWS, _FEWEST_TALL = 0.625, 0.75, 128, 8


def first_rows(facts: Facts) -> int:
    """Rows of its own block of an all-reduce that a rank multiplies before the others, by the BLAS, so that their sums
    travel beside the product of those, for about as long as it takes; 0: none."""
    tall = -(-_block_rows(facts) // _BLAS_ROWS)
    if facts.world_size != 2 or tall < _FEWEST_TALL or facts.N == 0:
        return 0
    product = gemm_us(facts) / 2
    share = product / (product + partials_us(facts))
    return round(min(max(share, _LEAST_FIRST), _MOST_FIRST) * tall) * _BLAS_ROWS


def _behind_products(facts: Facts) -> float:
    """Of the time that an all-reduce's sums take on the link, the share that is left behind the BLAS' last product."""
    first, rows = first_rows(facts), _block_rows(facts)
    if not first:
        return 1.0
    last = (rows - first) / facts.M * gemm_us(facts)
    return max(1 - first / rows, 1 - last / partials_us(facts))


def least_copied_us(world_size: int, reduces: bool) -> float:
    """Microseconds that copies of partial blocks must take to be worth their while: in an all-reduce or a
    reduce-scatter."""
    return (_COPIES_US + _PEER_US * (world_size - 1)) * (_PULLED_TOO if reduces else 1.0)


def _unfilled(facts: Facts, room: float) -> Verdict:
    """Whether our GEMMs have room in their waves for more than `room` times the tiles that there are."""
    num_sms, tiles, block = facts.num_sms, _tiles_in_full(facts), _block_tiles(facts)
    # Counted apart, as when these limits were found (4 and 8 x H200), though they come in one row.
    waves = -(-block * (facts.world_size - 1) // num_sms) + -(-block // num_sms)
    what = f"our GEMMs take {waves} waves on {num_sms} SMs for {tiles:.0f} tiles, with room for"
    if waves * num_sms > room * tiles:
        return Verdict(True, f"{what} more than {room:g} times as many")
    return Verdict(False, f"{what} at most {room:g} times as many")


def _block_tiles(facts: Facts) -> int:
    """Tiles of a rank's block of rows."""
    return -(-_block_rows(facts) // facts.block_m) * facts.tiles // -(-facts.M // facts.block_m)


_WIDE = Verdict(False, "partial sums travel in fp32, and it was measured of 16 bits")


def gemm_us(facts: Facts) -> float:
    """Of a GEMM that leaves no SM idle."""
    return facts.M * facts.N * facts.K / (facts.num_sms * _SM_MULTIPLY_ADDS)


def hop_us(facts: Facts, nbytes: int) -> float:
    """Of the peers' share of so many bytes of all ranks, on its way."""
    return peers_us(nbytes, facts.world_size)


def peers_us(nbytes: int, world_size: int) -> float:
    """The same of so many ranks."""
    return nbytes * (world_size - 1) / world_size / _HOP_BYTES


def partials_us(facts: Facts) -> float:
    """Of the partial sums that a rank has of its peers' rows."""
    assert facts.wire is not None
    return hop_us(facts, facts.M * facts.N * facts.wire.itemsize)


def _idles(facts: Facts, hops: int) -> Verdict:
    """Whether SMs that have no tile in the last wave idle longer than an exchange behind the GEMM takes. The BLAS has
    more shapes of tiles. hops: of the exchange."""
    if not facts.is_narrow or facts.wire is None:
        return _WIDE
    idle = _idle_us(facts, -(-facts.tiles // facts.num_sms), facts.tiles) if facts.tiles else 0.0
    taken = hops * (_HOP_US + partials_us(facts))
    what = f"{facts.tiles} tiles on {facts.num_sms} SMs leave some idle for {idle:.0f} us"
    if idle > _IDLES * taken:
        return Verdict(True, f"{what}, longer than an exchange behind the GEMM takes, {taken:.0f} us")
    return Verdict(False, f"{what}, an exchange behind the GEMM takes {taken:.0f} us")


def _short(facts: Facts) -> Verdict:
    if not facts.is_narrow:
        return _WIDE
    took = gemm_us(facts)
    if took <= _SHORT_US:
        return Verdict(True, f"a GEMM of {took:.0f} us is too short to overlap with copies")
    return Verdict(False, f"a GEMM of {took:.0f} us is long enough to overlap with copies")


def short_sum_for_blas(facts: Facts) -> Verdict:
    """The same for an all-reduce: also where the GEMM is too short to overlap with, up to two waves of tiles, and of
    fp32 sums `_PAIR_K`."""
    return _before_messages(facts, partial(_behind, reduces=True, then=_short_sum))


def few_tiles_or_two_waves(facts: Facts) -> Verdict:
    """The GEMM is over before much could travel beside it, or its second wave of tiles is as full as the first, whose
    messages travel beside it."""
    few = few_tiles(facts)
    return few if few.suits else _two_waves(facts)


def _two_waves(facts: Facts) -> Verdict:
    """Whether tiles of an all-reduce fill two waves: as messages they take 0.93 of the time of the BLAS and an exchange
    (2 x H200, docs/log.md)."""
    if not facts.in_16_bits or not facts.is_narrow or facts.world_size != 2:
        return Verdict(False, "full waves were measured in 16 bits alone, between 2 ranks")
    most = 2 * facts.num_sms
    least = _SENT_TILES * most
    what = f"{facts.tiles} tiles on {facts.num_sms} SMs"
    if not least <= facts.tiles <= most:
        return Verdict(False, f"{what} are not {least:.0f} to {most}, two full waves")
    if facts.K > _LONG_K:
        return Verdict(False, f"{what} fill two waves, but K = {facts.K} is more than {_LONG_K}")
    return Verdict(True, f"{what} fill two waves, and K = {facts.K} is at most {_LONG_K}")


def _short_sum(facts: Facts) -> Verdict:
    full = _two_waves(facts)
    if full.suits:
        return Verdict(False, full.why)
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
_GATHERED_BYTES, _FEW_GATHERED = 4 << 20, 1280


def _gathered_size(facts: Facts) -> int:
    """Bytes of all ranks' A."""
    return facts.M * facts.K * facts.dtype.itemsize


def few_gathered_bytes(facts: Facts) -> Verdict:
    """A is gathered soon. Ranks may differ in columns but must agree, so for an all-gather this alone decides."""
    most = _GATHERED_BYTES * (2 if facts.M <= _FEW_GATHERED else 1)
    size = _gathered_size(facts)
    gathered = f"all ranks' A is {size} bytes"
    if size <= most:
        return Verdict(True, f"{gathered}, at most {most} for {facts.M} rows")
    return Verdict(False, f"{gathered}, more than {most} for {facts.M} rows")


# Gathered rows, unevenly cut, and bytes of them, up to which one product behind an exchange is as fast as one for each
# block; and inner size up to which our GEMM multiplies evenly cut ones as fast.
_BLOCKS_OF_ROWS, _BLOCKS_BYTES, _BLOCKS_K = 1500, 16 << 20, 2048


def blocks_for_blas(facts: Facts) -> Verdict:
    """The BLAS, a block of rows at a time (2 x H200 and 2 x H100, docs/log.md). Here, too, columns must not matter."""
    blas, few = _by_blas(facts, _SENT_ROWS), few_gathered_bytes(facts)
    if not blas.suits:
        return blas
    if not facts.in_16_bits or facts.world_size != 2:
        return Verdict(False, "it was measured in 16 bits alone, between 2 ranks")
    if few.suits:
        return Verdict(False, few.why)
    little = _little_gathered(facts)
    if little.suits:
        found, what, most = facts.M > _BLOCKS_OF_ROWS, f"{little.why}; M = {facts.M}", _BLOCKS_OF_ROWS
        if not found:
            size = _gathered_size(facts)
            what = f"{what} is at most {most}, and A of {size} bytes"
            found, most = size > _BLOCKS_BYTES, _BLOCKS_BYTES
    else:
        found, what, most = facts.K > _BLOCKS_K, f"K = {facts.K}", _BLOCKS_K
    return Verdict(found, f"{what} is {'more than' if found else 'at most'} {most}")


def few_gathered_bytes_for_blas(facts: Facts) -> Verdict:
    """The same, with a GEMM of the BLAS. Also where a rank has few rows, or unequally many, which would be stored by
    pointers. Of few rows that every rank gathers by messages columns may matter: those are the same, whoever
    multiplies behind them."""
    alike = facts.M <= FEW_ROWS and few_gathered_bytes(facts).suits
    return _before_messages(facts, _little_gathered, _whole_rows(facts) if alike else _SENT_ROWS)


def _little_gathered(facts: Facts) -> Verdict:
    few = few_gathered_bytes(facts)
    if few.suits:
        return few
    if facts.M % facts.world_size != 0:
        return Verdict(True, f"M = {facts.M} rows are not equally many on each of {facts.world_size} ranks")
    low = _low(facts, _block_rows(facts), _GATHERED_TILES)
    return low if low.suits else Verdict(False, f"{few.why}, and {low.why}")


# Tile rows of a block of sums below which consumers beside the GEMM are as fast: in general, and where two ranks' sums
# travel in 16 bits.
_PULLED_TILES, _PULLED_BY_TWO = 8, 4


def tall_blocks(facts: Facts) -> Verdict:
    """Blocks of sums that copy engines move faster than programs."""
    where = on_sm_90(facts)
    if not where.suits:
        return where
    tiles = _PULLED_BY_TWO if facts.is_narrow and facts.world_size == 2 else _PULLED_TILES
    rows, least = _block_rows(facts), tiles * facts.block_m
    if rows >= least:
        return Verdict(True, f"a rank's block has {rows} rows, at least {least}: {tiles} tiles")
    return Verdict(False, f"a rank's block has {rows} rows, fewer than {least}: {tiles} tiles")


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
