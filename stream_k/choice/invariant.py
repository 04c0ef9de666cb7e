"""What a mode of `pyrocshmem.batch_invariant` fixes of a configuration, so that a row's bits don't depend on the batch.

An element of a GEMM is a chain of sums along K, in the order in which a matrix instruction takes K. Whatever changes
that chain must not depend on M:
  the split of K       tiles stay whole. Where to cut them depends on how many there are
  the vendor's BLAS    is not asked: which of its kernels it takes depends on M
  the instruction      of 16-bit operands on sm_90 it is wgmma for every tile that the rules or the table have, 16 of K
                       at a time, whatever M and N of the tile: there tiles may follow M. On a CPU the interpreter's
                       product of blocks is NumPy's, whose order depends on their sizes; AMD's instructions differ in
                       K from tile to tile; for both the tile is a function of N and the dtype
Sums over ranks have one order everywhere (`collectives.pair_sums`), so placements and algorithms may follow M.
"""

from __future__ import annotations

from pyrocshmem.stream_k.choice.config import BY_BLAS, Config, changed
from pyrocshmem.stream_k.choice.placement import Facts


def fixed(config: Config, facts: Facts) -> Config:
    """`config`, which the rules chose for `facts`, as the mode has it."""
    return changed(config, split="none") if facts.invariance else config


def why_not(config: Config, rules: Config, facts: Facts) -> str:
    """Why a row's bits could depend on the batch with `config`, where the rules have `rules`: a clause; "" where they
    can't."""
    if config.split != "none":
        return f"Config.split is {config.split!r}: where tiles are cut depends on M; take 'none'"
    if config.placement in BY_BLAS:
        return f"Config.placement is {config.placement!r}: which kernel the BLAS takes depends on M"
    if facts.in_16_bits:
        if max(config.block_m, config.block_n) < _WGMMA or config.num_warps % _WARPS:
            return (
                f"Config has tiles of {config.block_m} x {config.block_n} and {config.num_warps} warps, but others are "
                f"multiplied by wgmma, which needs {_WGMMA} rows or columns, and a multiple of {_WARPS} warps"
            )
        return ""
    for name in ("block_m", "block_n", "block_k"):
        mine, theirs = getattr(config, name), getattr(rules, name)
        if mine != theirs:
            return f"Config.{name} is {mine}, and here all calls of these N and dtype have {theirs}"
    return ""


# Rows, or columns, of a wgmma; warps of a group that issues them.
_WGMMA, _WARPS = 64, 4
