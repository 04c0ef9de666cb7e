"""What completes a configuration that has a placement and a tile, from measurements on H200 (docs/log.md): steps of
what copy engines move, and programs of a GEMM and of what runs beside it.

    Placement("copy_engine", verdicts.otherwise, completed.own_row_blocks)
"""

from __future__ import annotations

from pyrocshmem.collectives.exchange import cheaper_algorithm
from pyrocshmem.stream_k.choice.config import SPARE, Config, changed
from pyrocshmem.stream_k.choice.gemm_model import balanced_programs
from pyrocshmem.stream_k.choice.placement import Facts
from pyrocshmem.stream_k.choice.tilings import piece_rows
from pyrocshmem.stream_k.choice.verdicts import few_tiles, first_rows, gemm_us, partials_us
from pyrocshmem.stream_k.local_gemm.schedule import even_group


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


def _beside_copies(config: Config, facts: Facts) -> Config:
    """All SMs, which waits share: fewer programs that take as many waves are 3% slower here (docs/log.md)."""
    if not _shares_sms(facts):
        return config
    return changed(config, split="none", num_programs=facts.num_sms)


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


# Elements that a step of copies should move: of fewer the gaps between copies count, of more what follows the last.
STEP_ELEMENTS = 4 << 20
# Tile rows of a step: of a reduce-scatter at most, where links have less to do than SMs; of an all-reduce at least.
_MOST_REDUCED, _FEWEST_SUMMED = 8, 4
# Tile rows that share columns of B in L2: about so many, at most so many.
_GROUP, _MOST_GROUP = 8, 16
# The same of an all-reduce of more than _MOST_GROUP, whose steps they are: the first one must be there when the GEMM of
# a rank's own rows begins, and little may be left when it ends (2 x H200, docs/log.md).
_SUMMED_GROUP = 10


def own_row_blocks(config: Config, facts: Facts) -> Config:
    """A reduce-scatter by copy engines, block by block of all ranks' rows, from measurements on H200 (docs/log.md): at
    least two steps, of few tile rows, since something follows the last one."""
    tile_rows, hop = _tile_rows(config, facts, facts.world_size), partials_us(facts)
    if _pays_to_cut(facts, hop) and tile_rows <= _MOST_GROUP:
        return _beside_copies(_in_parts(config), facts)
    steps = max(2, -(-tile_rows // _MOST_REDUCED))
    if hop > gemm_us(facts):
        steps = max(steps, _steps_of(facts, facts.world_size))
    return _beside_copies(in_steps(config, -(-tile_rows // steps)), facts)


def summed_row_blocks(config: Config, facts: Facts) -> Config:
    """The same for an all-reduce, whose sums travel once more: more steps of fp32 sums, since what follows the last one
    is twice as long."""
    assert facts.wire is not None
    tile_rows = _tile_rows(config, facts, facts.world_size)
    if _pays_to_cut(facts, 2 * partials_us(facts)):
        group = even_group(tile_rows, _SUMMED_GROUP) if tile_rows > _MOST_GROUP else _MOST_GROUP
        return _beside_copies(_in_parts(config, group), facts)
    fewest = facts.wire.itemsize
    steps = max(fewest, _steps_of(facts, facts.world_size))
    least = min(_FEWEST_SUMMED, -(-tile_rows // fewest))
    return _beside_copies(in_steps(config, max(least, -(-tile_rows // steps))), facts)


def _pays_to_cut(facts: Facts, on_links: float) -> bool:
    """Whether sums, which take so many microseconds on the links, go in parts of columns: of two ranks, in 16 bits, and
    where SMs have more to do (2 x H100, docs/log.md)."""
    return facts.world_size == 2 and facts.is_narrow and on_links <= gemm_us(facts)


def own_rows_in_two(config: Config, facts: Facts) -> Config:
    """An all-reduce by the BLAS, a block after another, of which a rank's own is multiplied in two parts or in one."""
    rows = first_rows(facts) or facts.M
    return changed(config, chunk=max(1, -(-rows // config.block_m)))


def columns_in_parts(config: Config, facts: Facts) -> Config:
    """An all-scatter by copy engines."""
    return _beside_copies(_in_parts(config), facts)


def _in_parts(config: Config, group: int = _MOST_GROUP) -> Config:
    """`config` in parts of the columns of `group` tile rows, which share them."""
    return changed(config, split="none", chunk=group, group_m=group)


def pulled_columns(config: Config, facts: Facts) -> Config:
    """An all-scatter whose columns programs pull. With 64 KiB on their way each, they need an SM of their own."""
    config = in_steps(config, min(8, -(-_tile_rows(config, facts, 1) // 2)))
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


def _steps_of(facts: Facts, blocks: int) -> int:
    """Steps of a block of rows, of so many blocks, that move about STEP_ELEMENTS each."""
    return round(-(-facts.M // blocks) * facts.N / STEP_ELEMENTS)


def in_steps(config: Config, chunk: int) -> Config:
    """`config` in steps of `chunk` tile rows. Groups of tile rows end where steps do, or a step waits for tiles of the
    next one."""
    chunk = max(1, chunk)
    if chunk > _MOST_GROUP:
        chunk = -(-chunk // _GROUP) * _GROUP
    group = min(
        (size for size in range(1, _MOST_GROUP + 1) if chunk % size == 0),
        key=lambda size: (abs(size - _GROUP), -size),
    )
    return changed(config, split="none", chunk=chunk, group_m=group)


def gathered_pieces(config: Config, facts: Facts) -> Config:
    """An all-gather by copy engines."""
    chunk = piece_rows(facts) // config.block_m
    return changed(config, split="none", chunk=chunk, group_m=even_group(chunk, config.group_m))
