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

Nor, in the mode TP, on the number of ranks where K is cut over them. There K is a tree of blocks of one length, a
rank's share a branch of it, and partial sums travel in fp32. What is not cut over ranks needs no tree.
"""

from __future__ import annotations

import torch

from pyrocshmem.calls.invariance import BLOCKS, TP, blocks_of_share
from pyrocshmem.stream_k.choice.config import BY_BLAS, BY_MESSAGE, Config, changed
from pyrocshmem.stream_k.choice.placement import Facts
from pyrocshmem.stream_k.local_gemm.product import TREE_REGISTERS, TREE_REGISTERS_ALONE

# Columns of a step at most; of shorter ones, as many more are under way.
_STEP, _MOST_STAGES = 64, 12
# Rows, or columns, of a wgmma; warps of a group that issues them.
_WGMMA, _WARPS = 64, 4


def fixed(config: Config, facts: Facts) -> Config:
    """`config`, which the rules chose for `facts`, as the mode has it. ValueError for what it can't keep."""
    if not facts.invariance:
        return config
    config = changed(config, split="none")
    if facts.invariance < TP or facts.wire is None:
        return config
    return in_blocks(changed(config, partial_dtype=torch.float32), facts)


def in_blocks(config: Config, facts: Facts) -> Config:
    """`config` of whole tiles, but that K of `facts`, a share of an inner size that ranks divide, is a branch of the
    tree."""
    blocks = blocks_of_share("K", facts.K * facts.world_size, facts.world_size)
    if blocks == 1:
        return changed(config, k_blocks=1)
    if facts.in_16_bits:
        # As many sums as the tree is deep, and one that grows, are in a thread's registers.
        alone = config.placement in (*BY_MESSAGE, "after")
        room = TREE_REGISTERS_ALONE if alone else TREE_REGISTERS
        if blocks.bit_length() * config.block_m * config.block_n > 32 * config.num_warps * room:
            height, width = (64, 128) if blocks == BLOCKS else (128, 64) if alone else (128, 128)
            small = {
                "block_m": height,
                "block_n": width,
                "block_k": 64,
                "num_warps": 8,
                "num_stages": 4,
                "subtiles": 2 if alone else 4,
            }
            config = changed(config, **small, comm_rows=min(config.comm_rows, height))
        # Steps that end with a block can be read by TMA; on a CPU, and by FMA, their length is part of the order.
        # Several blocks are multiplied in one loop: short steps of each.
        length, step, stages = facts.K // blocks, min(config.block_k, _STEP), config.num_stages
        while step > 16 and length % step:
            step, stages = step // 2, min(2 * stages, _MOST_STAGES) if alone else stages
        if length % step == 0:
            config = changed(config, block_k=step, num_stages=stages)
    return changed(config, k_blocks=blocks)


def why_not(config: Config, rules: Config, facts: Facts) -> str:
    """Why a row's bits could depend on the batch, or on the number of ranks, with `config`, where the rules have
    `rules`: a clause; "" where they can't."""
    if config.split != "none":
        return f"Config.split is {config.split!r}: where tiles are cut depends on M; take 'none'"
    if config.placement in BY_BLAS:
        return f"Config.placement is {config.placement!r}: which kernel the BLAS takes depends on M"
    wires = [each.wire_dtype(facts.dtype) for each in (config, rules)]
    if facts.invariance == TP and facts.wire is not None and wires[0] != wires[1]:
        return f"Config.partial_dtype is {config.partial_dtype}: partial sums travel in {wires[1]}"
    # Of a GEMM alone K may be any tree.
    same = () if facts.wire is None else ("k_blocks",)
    for name in same if facts.in_16_bits else (*same, "block_m", "block_n", "block_k"):
        mine, theirs = getattr(config, name), getattr(rules, name)
        if mine != theirs:
            return f"Config.{name} is {mine}, and here all calls of these N, K and dtype have {theirs}"
    if facts.in_16_bits and (max(config.block_m, config.block_n) < _WGMMA or config.num_warps % _WARPS):
        return (
            f"Config has tiles of {config.block_m} x {config.block_n} and {config.num_warps} warps, but others are "
            f"multiplied by wgmma, which needs {_WGMMA} rows or columns, and a multiple of {_WARPS} warps"
        )
    return ""
