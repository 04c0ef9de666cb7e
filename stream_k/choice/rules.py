"""The configuration of an op without a measured table: what readings on H200 say (docs/log.md), by sizes alone."""

from __future__ import annotations

from dataclasses import replace

import torch

from pyrocshmem import target
from pyrocshmem.collectives.exchange import cheaper_algorithm
from pyrocshmem.stream_k.choice.config import BY_MESSAGE, BY_ROWS, SPARE, Config
from pyrocshmem.stream_k.choice.gemm_model import (
    DEEP,
    Tile,
    balanced_programs,
    fastest_gathering,
    fastest_tile,
)
from pyrocshmem.stream_k.local_gemm.schedule import make_schedule
from pyrocshmem.target import num_multiprocessors


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
) -> Config:
    """What `stream_k.choose`, which has the arguments, gives without a table."""
    processors = num_multiprocessors(device)
    if target.interpreted():
        config = _for_cpu(M, N)
    elif target.backend() == "hip":
        config = _for_amd(dtype)
    else:
        config = _for_nvidia(M, N, dtype, processors)
    config = replace(config, partial_dtype=partial_dtype)
    tiles = -(-M // config.block_m) * -(-N // config.block_n)
    on_sm_90 = target.backend() == "cuda" and not target.interpreted()
    if op == "gemm":
        config = replace(config, placement="after")  # nothing consumes beside it
        return _alone(config, M, N, K, dtype, processors) if on_sm_90 else config
    # Few rows: messages are short, whatever the number of tiles.
    small = tiles < processors or (on_sm_90 and dtype != torch.float32 and M <= _FEW_ROWS)
    if placement is None:
        little = M * K * dtype.itemsize <= _GATHERED_BYTES * (2 if M <= _FEW_GATHERED else 1)
        little &= M % world_size == 0
        tall = -(-M // world_size) >= _PULLED_TILES * config.block_m
        pulled = world_size > 2 and _PULLED_K * (world_size - 1) > K and N * dtype.itemsize % 16 == 0
        placement = _placement(op, small, on_sm_90, little, tall, pulled)
        long = tiles > 2 * processors or (K > _PAIR_K and not _is_narrow(config))
        if on_sm_90 and dtype != torch.float32 and _faster_unfused(op, placement, M, long):
            placement = "unfused"
    if op == "all_gather_gemm" and placement == "copy_engine":
        return _gathering(config, M, N, K, dtype, world_size, processors, on_sm_90)
    if placement in BY_ROWS:
        blocks = 1 if op == "gemm_all_scatter" else world_size
        rows = -(-M // blocks)
        config = _by_rows(config, op, placement, -(-rows // config.block_m), -(-N // config.block_n))
    if op == "gemm_all_reduce" and placement in ("after", *BY_MESSAGE):
        # Little to overlap with: the fewest hops, or the fewest bytes.
        partial_bytes = M * N * (partial_dtype or torch.float32).itemsize
        config = replace(config, algorithm=cheaper_algorithm(partial_bytes, world_size))
    if on_sm_90 and not small and placement not in BY_MESSAGE:
        return _for_sm_90(config, op, placement, tiles, processors, world_size)
    return replace(config, placement=placement)


# Gathered rows up to here come faster by messages, in 15 us, than by copy engines; of up to _FEW_GATHERED rows, whose
# product is short, twice as many bytes do.
_GATHERED_BYTES, _FEW_GATHERED = 4 << 20, 1024


def _placement(op: str, small: bool, on_sm_90: bool, little: bool, tall: bool, pulled: bool) -> str:
    """The fastest one but for the unfused pair. small: the product is over before much could travel beside it. little:
    all ranks' rows, of which each has as many, are soon gathered; for the all-gather it alone decides, since all ranks
    must decide alike, whatever columns they have. tall: whether a rank's block of rows has `_PULLED_TILES` tile rows.
    pulled: whether programs pull columns faster than copy engines."""
    if op == "all_gather_gemm":
        return "messages" if little else "copy_engine"
    if small:
        return "messages"
    if op == "gemm_all_scatter" and on_sm_90:
        return "pull" if pulled else "copy_engine"
    if op == "gemm_reduce_scatter" or (on_sm_90 and tall):
        return "copy_engine"
    return "own_stream" if on_sm_90 else "beside"


# Rows up to here leave the tiles of a product as messages faster than from memory, and cuBLAS gains little.
_SENT_ROWS = 128
# Inner size beyond which the product of an all-reduce is long enough to overlap with copies of fp32 sums.
_PAIR_K = 2048


def _faster_unfused(op: str, placement: str, M: int, long: bool) -> bool:
    """Whether the BLAS and an exchange take less time than `placement`: readings of 2 x H200, 16-bit operands
    (docs/log.md). long: beyond two waves of tiles, or, of fp32 sums, `_PAIR_K`; for the all-gather it must not matter.
    """
    if M <= _SENT_ROWS:
        return False
    if placement == "messages":
        # The partial sums of whole tiles leave as fast as they are made.
        return op != "gemm_reduce_scatter" or M % (2 * _SENT_ROWS) != 0
    return op == "gemm_all_reduce" and not long


# A block of more bytes is gathered in two pieces, of twelve times as many in pieces of four times as many or more:
# where a rank has few columns its own rows are soon multiplied, and the peers' come late. A piece costs 4 us.
_GATHERED_PIECE = 16 << 20


def _gathering(
    config: Config,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    world_size: int,
    processors: int,
    on_sm_90: bool,
) -> Config:
    """`all_gather_gemm` by copy engine. How many rows a piece has is for all ranks alike, which may have different
    columns: a multiple of any tile's, by the size of a block."""
    rows, multiple = -(-M // world_size), 64 if target.interpreted() else 256
    size = rows * K * dtype.itemsize
    pieces = 1 if size <= _GATHERED_PIECE else max(2, size // (4 * _GATHERED_PIECE))
    height = -(-max(rows, 1) // (pieces * multiple)) * multiple
    config = replace(config, placement="copy_engine")
    if on_sm_90 and dtype != torch.float32:
        tile, programs = fastest_gathering(max(M, 1), N, K, world_size, height, processors - SPARE)
        config = replace(with_tile(config, tile), num_programs=programs)
    chunk = height // config.block_m
    return replace(config, split="none", chunk=chunk, group_m=min(config.group_m, chunk))


# What a copy of pulled 16-bit rows should move: of less the gaps between copies count, of more what follows the last.
_PULLED_BYTES = 8 << 20
# Inner size, over the number of peers, below which links are busier than multiprocessors. Programs pull faster there
# than copy engines, which get in one another's way where a rank has several peers: on 4 x H200 at 8192, not at 16384.
_PULLED_K = 4096
# Tile rows of a block of sums below which consumers beside the GEMM are as fast.
_PULLED_TILES = 8


def _by_rows(config: Config, op: str, placement: str, tiles_m: int, tiles_n: int) -> Config:
    """`tiles_m` tile rows a row block, `tiles_n` columns of tiles, from readings on H200 (docs/log.md): at least two
    steps, of few tile rows, since something follows the last one; but a step costs the copy engines as long as it takes
    them to move a megabyte or two."""
    if op in ("gemm_all_reduce", "gemm_all_scatter") and placement == "copy_engine":
        tile_rows = _PULLED_BYTES // (config.block_m * config.block_n * tiles_n * 2)
        least = 4 if op == "gemm_all_reduce" else 8
        chunk = min(max(least, _power_of_two(tile_rows)), -(-tiles_m // 2))
    else:
        chunk = min(8, -(-tiles_m // 2))
    return replace(
        config,
        placement=placement,
        split="none",
        comm_rows=config.comm_rows if placement == "copy_engine" else config.block_m,
        chunk=max(1, chunk),
        group_m=min(config.group_m, max(1, chunk)),
    )


def _power_of_two(size: int) -> int:
    """The largest one up to `size`; 0 for 0."""
    return 1 << (size.bit_length() - 1) if size else 0


def _for_cpu(M: int, N: int) -> Config:
    # An interpreted step costs about 0.3 ms whatever its size: fewer, larger blocks are faster, as long as
    # there are tiles to split.
    block = 64 if max(M, N) > 64 else 32
    return Config(
        block_m=block,
        block_n=block,
        block_k=64,
        num_warps=1,
        num_stages=1,
        group_m=2,
        subtiles=2,
        flatten=False,
        num_comm_programs=1,
        comm_rows=block,
    )


def _for_amd(dtype: torch.dtype) -> Config:
    # comm_rows: as many as give every thread of a consumer 16 bytes to store.
    config = Config(block_n=64, num_stages=2, subtiles=1, flatten=False, comm_rows=64)
    if dtype == torch.float32:
        return replace(config, block_m=64, block_k=32, num_warps=4)
    # 128 x 128 spills where tiles are split: 44 to 99 vector registers with Triton 3.6; 128 x 64 nowhere.
    return config


def _for_nvidia(M: int, N: int, dtype: torch.dtype, processors: int) -> Config:
    if dtype == torch.float32:
        return Config(block_m=64, block_n=128, block_k=32, num_stages=3, subtiles=1, flatten=False)
    if M <= _FEW_ROWS:
        return _of_few_rows(M, N, processors)
    if N <= 64:
        return Config(block_m=64, block_n=64, block_k=128, num_warps=4, subtiles=1)
    for block_m, block_n in _TILES_128 if M <= 128 else _TILES:
        if -(-M // block_m) * -(-N // block_n) <= processors:
            return small_tile(block_m, block_n)
    return Config()


# Products of so many rows are as fast as B is read.
_FEW_ROWS = 64


def _of_few_rows(M: int, N: int, processors: int) -> Config:
    """From readings on H200 (docs/log.md): narrow tiles, with as much of B on its way as memory takes to answer."""
    block_m, block_n = (16 if M <= 16 else 32 if M <= 32 else 64), 64
    tiles = -(-N // block_n)
    if block_m == 64 and 32 * processors >= N:
        block_n, block_k, stages = 32, 256, 4
    elif block_m == 64 and tiles > 2 * processors:
        block_n, block_k, stages = 128, 128, 4
    elif block_m == 64 or (block_m == 16 and 2 * tiles > processors):
        block_k, stages = 128, 5
    else:
        block_k, stages = 256, 5 if block_m == 16 else 4
    # Parts of tiles cost more than they save but where most multiprocessors have nothing to do, at all or at the end.
    cut = 4 * tiles <= processors
    if block_m > 16 and block_n == 64 and 2 * tiles > processors:
        cut = 0 < tiles % processors < 2 * processors // 3
    return Config(
        block_m=block_m, block_n=block_n, block_k=block_k, num_warps=4, num_stages=stages, subtiles=1,
        split="stream_k" if cut else "none",
    )  # fmt: skip


# Of other products of less than a wave, the smallest tile that is still one wave, since programs on all
# multiprocessors read memory faster. In the order in which they are tried, from readings on H200 at M = 128 and 256.
_TILES_128 = ((64, 64), (128, 64), (128, 128))
_TILES = ((64, 32), (64, 64), (128, 64), (64, 128), (128, 128), (64, 256))

# What a program has of shared memory on sm_90, but for a few words of its own.
_SHARED_BYTES = 229_000


def small_tile(block_m: int, block_n: int) -> Config:
    """As many bytes in flight as fit beside the tile on its way out, in fp32."""
    large = block_m * block_n >= 128 * 128
    block_k = 256 if block_m + block_n <= 96 else 64 if large else 128
    subtiles = 2 if block_m * block_n >= 128 * 64 else 1
    stages = (_SHARED_BYTES - block_m * block_n * 4 // subtiles) // ((block_m + block_n) * block_k * 2)
    return Config(
        block_m=block_m, block_n=block_n, block_k=block_k, num_warps=8 if large else 4, num_stages=min(6, stages),
        subtiles=subtiles,
    )  # fmt: skip


def with_tile(config: Config, tile: Tile | Config) -> Config:
    """`config` with another's tile, and how that is run."""
    return replace(
        config, block_m=tile.block_m, block_n=tile.block_n, block_k=tile.block_k, num_warps=tile.num_warps,
        num_stages=tile.num_stages, subtiles=tile.subtiles, split=tile.split,
    )  # fmt: skip


def _alone(config: Config, M: int, N: int, K: int, dtype: torch.dtype, processors: int) -> Config:
    """A GEMM alone; `config`: its choice beside communication, which must not depend on K."""
    M, N, K = max(M, 1), max(N, 1), max(K, 1)
    tiles = -(-M // config.block_m) * -(-N // config.block_n)
    if dtype != torch.float32 and M <= _FEW_ROWS:
        config = _cut_apart(config, M, N, K, processors)
    if dtype == torch.float32 or M <= _FEW_ROWS:
        blocks = (config.block_m, config.block_n, config.block_k)
        schedule, programs = make_schedule(M, N, K, *blocks, processors, split=config.split), processors
    elif M <= 128 and processors < 2 * tiles <= 2 * processors:
        # As fast as memory is read; the model is of products of more rows.
        return with_tile(config, DEEP) if (config.block_m, config.block_n) == (128, 64) else config
    else:
        tile, schedule = fastest_tile(M, N, K, processors)
        programs = tile.resident * processors
        config = with_tile(config, tile)
    # Of programs that share a multiprocessor, both must be there.
    if schedule.kind == "data_parallel" and programs == processors:
        programs = balanced_programs(schedule.num_tiles, processors)
    return replace(config, num_programs=programs)


def _cut_apart(config: Config, M: int, N: int, K: int, processors: int) -> Config:
    """`config` of a product of few rows; where it has few columns, too, with tiles whose parts are added by a second
    kernel, if K is long, or else whole: there a fix-up costs more than it gains."""
    tiles = -(-N // 64)
    if 3 * tiles > processors:
        return config
    block_m, stages = (16, 5) if M <= 16 else (32, 6) if M <= 32 else (64, 6)
    cut = replace(
        config, block_m=block_m, block_n=64, block_k=128, num_warps=4, num_stages=stages, subtiles=1,
        split="apart",
    )  # fmt: skip
    schedule = make_schedule(M, N, K, block_m, 64, 128, processors, split="apart")
    return cut if schedule.has_shared_tiles else replace(config, split="none")


def _is_narrow(config: Config) -> bool:
    """Whether partial sums travel in 16 bits."""
    return (config.partial_dtype or torch.float32) != torch.float32


def _for_sm_90(
    config: Config, op: str, placement: str, tiles: int, processors: int, world_size: int
) -> Config:
    """`config` with the programs of both sides, from readings on 4 x H200 (docs/log.md has them)."""
    scatters = op == "gemm_all_scatter"
    narrow = _is_narrow(config)
    if placement in ("after", "inside", "beside"):
        comm = 32 if scatters else 24 if narrow else 40
        rows = 16 if scatters or narrow else 8
        return replace(
            config, placement=placement, num_comm_programs=max(1, processors * comm // 132), comm_rows=rows
        )
    programs = balanced_programs(tiles, processors - SPARE)
    if placement == "pull":
        # With 64 KiB on their way each, programs need a multiprocessor of their own.
        programs = balanced_programs(tiles, processors * 10 // 11)
        free = processors - programs
        comm, warps, rows = max(1, free - free % world_size), 16, config.comm_rows
    elif scatters and placement == "own_stream":
        # Pushing takes an eighth of the multiprocessors, three programs each, for themselves.
        programs = balanced_programs(tiles, processors * 7 // 8)
        comm, warps, rows = 3 * (processors - programs), 8, 32
    elif narrow:
        comm, warps, rows = processors // 2, 4, 8
    else:
        comm, warps, rows = 2 * processors, 4, 4
    return replace(
        config,
        placement=placement,
        split="none",
        num_programs=programs,
        num_comm_programs=comm,
        comm_warps=warps,
        comm_rows=rows,
    )
