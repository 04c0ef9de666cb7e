"""The configuration of a GEMM of 8-bit operands: that of 16-bit ones with half of K, whose steps take as many bytes
and, by matrix units of twice the rate, as long. The BLAS multiplies where that is faster."""

from __future__ import annotations

import torch

from pyrocshmem import target
from pyrocshmem.calls.invariance import Invariance
from pyrocshmem.collectives.float8 import BLOCK, UNIT
from pyrocshmem.stream_k.choice.config import Config, changed
from pyrocshmem.stream_k.choice.placement import num_tiles
from pyrocshmem.stream_k.choice.rules import cost_model
from pyrocshmem.stream_k.choice.tilings import FEW_ROWS
from pyrocshmem.stream_k.choice.verdicts import least_copied_us, peers_us
from pyrocshmem.stream_k.local_gemm.scales import Scheme, promoted

# A tile whose sum grows beside the product of a part of K has registers for so many columns: 128 x 256 spill (sm_90).
_MOST_COLUMNS = 128
# Elements of one sum of a warp, and what is read ahead, in steps and bytes.
_MOST_OF_A_WARP, _MOST_STAGES, _STAGED_BYTES = 2048, 8, 216 << 10
# Elements of a part of a tile.
_MOST_OF_A_PART = 8192
# Elements of our tile up to which, where there is at most a wave of them, our GEMM alone is the faster one.
_SMALL_TILE = 64 * 128
# Rows of a GEMM alone from which the BLAS is the faster one where sums aren't added in fp32 outside of the matrix unit:
# it has 1.04 of our speed on average, 0.97 to 1.11, from 2048 on; of fewer, and more than 64, 0.91 (H200, 69 GEMMs).
_FAST_ROWS = 2048
# Tiles of 128 x 128 for each SM from which the BLAS is the faster one, of rows that were gathered: with scales of
# blocks and of rows.
_GATHERED_BLOCKS, _GATHERED_ROWS = 0.45, 1.5
# Gathered rows of a rank from which they are a product of their own, while others' are on their way.
_OWN_PRODUCT_ROWS = 1280
# Steps that the parts of a small tile of up to 64 rows must have fewer than all of it, where they are cut for all SMs,
# and how many a tile must have where the parts are for two programs an SM. The kernel that adds the parts takes 3.4 us,
# a step 0.22 (H200).
_SAVED_STEPS, _STEPS_FOR_TWO = 16, 64
# Steps from which up to 128 rows gain by tiles of 128 columns as high as all rows together, in two parts or more, of
# more than 64 rows in three: 1.1 times the speed on average, 0.98 to 1.85 (H200).
_STEPS_FOR_WIDE = 96
# Rows of the small tiles of more than 64 rows. Microseconds of such tiles, by their columns: what they take but for
# steps, and a step; and what parts take that a second kernel adds (H200).
_SMALL_ROWS = 64
_STEP_US, _PARTS_US = {32: (3.0, 0.27), 64: (3.6, 0.24), 128: (4.6, 0.285)}, 2.8
# With scales of blocks the BLAS takes rows by UNIT, so that results of other numbers of rows are copied. Rows of a
# fused op's product from which that doesn't count, and microseconds of a sum's of fewer rows.
_COPIED_ROWS, _COPIED_US = 1024, 50.0
# Inner size from which the BLAS is the faster one in an all-reduce whose sums copy engines bring to their owners a
# block of rows at a time: with one scale or scales of blocks, and with scales of rows. Share of the product's time that
# such an all-reduce takes longer, beside the waves that blocks add.
_SUMMED_K, _SUMMED_K_BY_ROWS, _DIVIDED = 3072, 5120, 0.04
# Multiply-adds of an SM in a microsecond, of a tile of 128 x 128 by the BLAS, and by our GEMM with scales of blocks;
# and microseconds for which columns of the last tiles travel behind it.
_MULTIPLY_ADDS, _OUR_MULTIPLY_ADDS, _LAST_COLUMNS_US = 5.15e6, 3.8e6, 60.0
# SMs that our GEMM leaves free beside copies, since beside one of its programs there is no room for one that waits
# (`ops.planned.least_free`): with scales of blocks, and one more, whatever the scales, where an all-reduce has two.
_SPARE_OF_BLOCKS, _SPARE_OF_TWO = 1, 1
# What takes the place of those whose GEMM is the BLAS's.
_OWN = {"blas": "after", "unfused": "messages", "blas_blocks": "copy_engine"}


def choose_scaled(
    op: str,
    M: int,
    N: int,
    K: int,
    world_size: int,
    device: torch.device,
    scheme: Scheme,
    invariance: Invariance,
    result: torch.dtype = torch.bfloat16,
    partial_dtype: torch.dtype | None = None,
    placement: str | None = None,
) -> Config:
    """The configuration for a rank's GEMM [M, K] x [K, N] of `op`, by the rules. The arguments are those of `choose`;
    scheme: of the operands' scales. result: of what is stored, in which partial sums travel unless partial_dtype says
    otherwise. placement: None: the fastest one."""
    wire = partial_dtype if partial_dtype is not None or result == torch.bfloat16 else result
    half = (op, M, N, -(-K // 2), torch.bfloat16, world_size, device, wire)
    config = cost_model(*half, placement=placement, invariance=invariance)
    if placement is None:
        placement = _OWN.get(config.placement, config.placement)
        # The BLAS stores bfloat16, unless there is one scale.
        stored = wire in (None, torch.bfloat16) or scheme.recipe == "tensorwise"
        if stored and not invariance and target.backend() == "cuda":
            placement = _where(op, M, N, K, world_size, target.num_sms(device), scheme, placement, config)
    if placement != config.placement:
        config = cost_model(*half, placement=placement, invariance=invariance)
    config = changed(config, block_k=2 * config.block_k, partial_dtype=partial_dtype)
    if promoted(scheme):
        config = _for_promotion(config, M, N, target.num_sms(device))
        if op == "gemm" and config.placement == "after" and not invariance and target.backend() == "cuda":
            config = _shared_out(config, M, N, K, target.num_sms(device))
    if config.placement == "copy_engine" and config.num_programs == target.num_sms(device):
        spare = _SPARE_OF_BLOCKS * (scheme.recipe == "blockwise") + _SPARE_OF_TWO * (op == "gemm_all_reduce")
        config = changed(config, num_programs=max(1, config.num_programs - spare))
    # Parts of a tile leave in fp32 where they are parts of a sum, or the result is.
    parts = config.block_m * min(config.block_n, _MOST_COLUMNS) // _MOST_OF_A_PART
    return changed(config, subtiles=max(config.subtiles, parts))


def _where(
    op: str, M: int, N: int, K: int, world_size: int, num_sms: int, scheme: Scheme, own: str, config: Config
) -> str:
    """The placement whose GEMM is `torch._scaled_mm`, where that is faster than with ours; elsewhere `own`. config: of
    a GEMM alone, whose tile is the same whoever multiplies. As measured on two H100, 2 x 66 GEMMs fused, and on two
    H200, 170 GEMMs alone and 69 with fast sums, gathers, and 140 sums with scales of rows, 81 with scales of blocks
    (docs/log.md)."""
    one = scheme.recipe == "tensorwise"
    if op == "gemm" and one:
        return "blas"
    if M <= FEW_ROWS:
        return own
    if not promoted(scheme):
        return "blas" if op == "gemm" and M >= _FAST_ROWS else own
    if op == "gemm":
        tile = changed(config, block_n=min(config.block_n, _MOST_COLUMNS))
        return own if _is_small(tile) and num_tiles(tile, M, N) <= num_sms else "blas"
    of_blocks, tiles = scheme.recipe == "blockwise", -(-M // 128) * -(-N // 128)
    copies_results = of_blocks and M % UNIT != 0 and M < _COPIED_ROWS
    if op == "all_gather_gemm":
        if one:
            return own  # gathered rows have a scale each, and the BLAS takes none of all of B beside those
        if own == "copy_engine":
            # By rows alone: ranks may have different columns, and these placements move rows in ways of their own. One
            # product has no results to copy where UNIT divides all rows and not those of a rank.
            rows = -(-M // world_size)
            whole = of_blocks and rows % UNIT != 0 and M % UNIT == 0
            return "unfused" if whole or rows < _OWN_PRODUCT_ROWS else "blas_blocks"
        tiles_of_sm = _GATHERED_BLOCKS if of_blocks and not copies_results else _GATHERED_ROWS
        return "unfused" if tiles >= tiles_of_sm * num_sms else own
    if op in ("gemm_reduce_scatter", "gemm_all_reduce"):
        if copies_results and _product_us(M, N, K, num_sms) < _COPIED_US:
            return own
        reduces = op == "gemm_all_reduce"
        if not _copies_blocks(M, N, K, world_size, num_sms, scheme, reduces):
            return "unfused"
        by_blas_from = _SUMMED_K_BY_ROWS if scheme.recipe == "rowwise" else _SUMMED_K
        return own if reduces and own == "copy_engine" and by_blas_from > K else "blas_blocks"
    if own == "messages":
        return "unfused"
    if of_blocks:
        beside = op == "gemm_all_scatter" and own == "copy_engine" and world_size == 2
        return own if beside and _copies_columns(M, N, K, tiles, num_sms) else "unfused"
    return "unfused" if one and op != "gemm_all_scatter" else own


def _copies_blocks(
    M: int, N: int, K: int, world_size: int, num_sms: int, scheme: Scheme, reduces: bool
) -> bool:
    """Whether partial sums are copied, a block of rows for each owner, while the next one is multiplied: where that
    takes longer than it costs to begin, and the last waves of so many products. Of one scale the BLAS fills those."""
    least = least_copied_us(world_size, reduces)
    if scheme.recipe != "tensorwise":
        columns = -(-N // 128)
        waves = [-(-(-(-rows // 128) * columns) // num_sms) for rows in (-(-M // world_size), M)]
        least += (world_size * waves[0] - waves[1]) * _product_us(128, 128, K, 1)
        if reduces:
            least += _DIVIDED * _product_us(M, N, K, num_sms)
    return peers_us(2 * M * N, world_size) > least


def _product_us(M: int, N: int, K: int, num_sms: int) -> float:
    """Microseconds of a product by the BLAS that leaves no SM idle."""
    return M * N * K / (num_sms * _MULTIPLY_ADDS)


def _copies_columns(M: int, N: int, K: int, tiles: int, num_sms: int) -> bool:
    """Whether our GEMM with scales of blocks, while columns are copied between two ranks, takes less time than the BLAS
    and an exchange behind it (2 x H200, docs/log.md). tiles: of 128 x 128."""
    exchange = peers_us(2 * M * 2 * N, 2)
    waves = -(-tiles // (num_sms - _SPARE_OF_BLOCKS))
    ours = max(waves * 128 * 128 * K / _OUR_MULTIPLY_ADDS, exchange) + _LAST_COLUMNS_US
    return ours < _product_us(M, N, K, num_sms) + exchange


def _shared_out(config: Config, M: int, N: int, K: int, num_sms: int) -> Config:
    """`config` of a GEMM alone, with tiles cut along K where small ones leave SMs idle for so long that it pays to add
    parts in a kernel of its own, or with two programs an SM where they are a little more than a wave (170 GEMMs on an
    H200, and 60 of few rows or long K, docs/log.md)."""
    steps = -(-K // BLOCK)
    if num_tiles(config, M, N) == 0 or not _is_small(config):
        return config
    if M <= 2 * FEW_ROWS and steps >= _STEPS_FOR_WIDE:
        block_m, fewest = (config.block_m, 2) if M <= FEW_ROWS else (128, 3)
        wide = _with_tile(config, block_m, _MOST_COLUMNS)
        if fewest * num_tiles(wide, M, N) <= num_sms:
            return changed(wide, split="separate", num_programs=num_sms)
    if M > FEW_ROWS:
        times = ((_small_tiles_us(columns, M, N, steps, num_sms), columns) for columns in _STEP_US)
        (_, parts), columns = min(times)
        config = _with_tile(config, _SMALL_ROWS, columns)
        return changed(config, split="separate" if parts > 1 else "none", num_programs=num_sms)
    # A step takes as long of half the columns.
    config = _with_tile(config, config.block_m, max(config.block_n, 64))
    tiles = num_tiles(config, M, N)
    if steps - steps // max(1, num_sms // tiles) >= _SAVED_STEPS:
        return changed(config, split="separate", num_programs=num_sms)
    narrow = config.block_m * config.block_n <= _SMALL_TILE // 2
    cut = narrow and 3 * tiles <= 2 * num_sms and steps >= _STEPS_FOR_TWO
    if cut or (config.block_m == 16 and num_sms < tiles <= 2 * num_sms):
        stages = min(config.num_stages, _stages(config.block_m, config.block_n, programs=2))
        split = "separate" if cut else "none"
        return changed(config, split=split, num_programs=2 * num_sms, num_stages=stages)
    return config


def _small_tiles_us(columns: int, M: int, N: int, steps: int, num_sms: int) -> tuple[float, int]:
    """(microseconds of a product by tiles of _SMALL_ROWS and so many columns, into how many parts each is cut)."""
    start, step = _STEP_US[columns]
    tiles = -(-M // _SMALL_ROWS) * -(-N // columns)
    parts = num_sms // tiles
    whole = start + -(-tiles // num_sms) * steps * step, 1
    return min(whole, (start + -(-steps // parts) * step + _PARTS_US, parts)) if parts > 1 else whole


def _with_tile(config: Config, block_m: int, block_n: int) -> Config:
    """`config` with a tile of that size. Three sums take registers at once; a turn's steps are loaded, and let go of,
    together."""
    warps = max(config.num_warps, block_m * block_n // _MOST_OF_A_WARP)
    stages = _stages(block_m, block_n)
    return changed(config, block_m=block_m, block_n=block_n, num_warps=warps, num_stages=stages)


def _is_small(config: Config) -> bool:
    return config.block_m * config.block_n <= _SMALL_TILE


def _stages(block_m: int, block_n: int, programs: int = 1) -> int:
    """Steps that are read ahead by each of so many programs of an SM."""
    return min(_MOST_STAGES, _STAGED_BYTES // programs // ((block_m + block_n) * BLOCK))


def _for_promotion(config: Config, M: int, N: int, num_sms: int) -> Config:
    """`config` for steps whose sums are added beside the next step's, in turns of two steps. Of one length whatever the
    tile, so that the order of additions is, too."""
    block_m, block_n = config.block_m, min(config.block_n, _MOST_COLUMNS)
    if target.backend() == "hip":
        return changed(config, block_n=block_n, block_k=min(config.block_k, BLOCK))
    if M <= FEW_ROWS and -(-N // block_n) > num_sms:
        # A step costs as much whatever its columns: of wider tiles, fewer steps, where most SMs still have a tile.
        block_n = _MOST_COLUMNS
    return changed(_with_tile(config, block_m, block_n), block_k=BLOCK)


def check_scaled(op: str, config: Config, rules: Config, scheme: Scheme, invariance: Invariance) -> None:
    """ValueError for a caller's configuration with which scales can't be multiplied, or which breaks the mode. rules:
    what `choose_scaled` gives."""
    if config.k_blocks > 1:
        raise ValueError(
            f"Config.k_blocks is {config.k_blocks}: products of 8-bit operands are one sum along K"
        )
    if promoted(scheme) and config.block_k > BLOCK:
        raise ValueError(
            f"Config.block_k is {config.block_k}: the sum of a step is added in fp32, or scaled, so at most {BLOCK} "
            "are allowed"
        )
    if scheme.recipe == "blockwise" and config.block_n > BLOCK:
        raise ValueError(
            f"Config.block_n is {config.block_n}: each {BLOCK} columns have scales of their own, and a tile one of them"
        )
    if invariance and config != rules:
        raise ValueError(f"{op} is {invariance} here, where 8-bit operands take no config; leave it out")
