"""`gemm_all_scatter` by pulls: each rank's columns stay on its heap, and every rank pulls them as they finish, a step
of rows at a time, by copy engine or by programs. The protocol is that of `collectives.row_blocks`.

The caller's stream has the GEMM. Beside it one small program a step waits for this rank's tiles and tells the peers. By
copy engine it also waits for the peers', and copies then bring the step's rows of all ranks into the caller's tensor.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pyrocshmem import status
from pyrocshmem.calls.row_copy import RowsWay, takes_rows
from pyrocshmem.calls.tensors import as_argument, how_to_write
from pyrocshmem.collectives import row_blocks
from pyrocshmem.collectives.epilogue import PLAIN, Finish, Options, activation_number
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.stream_k.local_gemm.scales import Operand
from pyrocshmem.stream_k.ops.op import Call
from pyrocshmem.stream_k.ops.planned import FusedPlan, least_free, on_all_ranks
from pyrocshmem.stream_k.ops.pulls import Block, Programs, Pull, Pulls, blocks_of
from pyrocshmem.stream_k.ops.steps import step_arguments, step_launch


class ColumnsPlan(FusedPlan):
    """The launches and copies of a call. R ranks have N columns each; the result is [M, R x N].

    columns: this rank's, [M, N], on the heap. result: as in `FusedPlan`, where rows of `out` don't lie together.
    """

    def __init__(self, call: Call) -> None:
        config, heap, workspace = call.config, call.heap, call.workspace
        self.workspace, self.rank, self.world = workspace, heap.rank, heap.world_size
        self.product = product = call.product(stores_fp32=ELEMENTS[call.out.dtype].wide)
        M, N = product.M, product.N
        self.result: torch.Tensor | None = None
        if not takes_rows(call.out):
            size = M * N * self.world
            buffer = workspace.buffer("own results", size, call.out.dtype, local=True)
            self.result = buffer[:size].view(M, N * self.world)
        self.columns = workspace.buffer("columns", M * N, call.out.dtype)[: M * N].view(M, N)
        c_how = how_to_write(self.columns)
        self.c = as_argument(self.columns, c_how, config.block_m, product.part_n)
        self.chunk = min(config.chunk, product.schedule.tiles_m)
        by_programs, schedule = config.placement == "pull", product.schedule
        tiles, tile = (schedule.tiles_m, schedule.tiles_n), config.block_m * config.block_n
        blocks = [*blocks_of(*tiles, self.chunk, config.group_m, tile, cut=not by_programs)]
        self.flags = workspace.flags(len(blocks))
        self.tile_flags = workspace.buffer("local flags", product.schedule.num_tiles, torch.int32, local=True)
        self.fix_up = product.fix_up(workspace)
        activation = activation_number(call.request.activation)
        op = int(status.Op.GEMM_ALL_SCATTER)
        # LAG 0: the columns of the call before are overwritten only when the peers have pulled them.
        self.gemm = product.launch(
            op,
            self.world,
            row_blocks.store_columns,
            Options(c_how, activation),
            announce=row_blocks.announce_rows,
            lag=0,
            once=True,
        )
        self.step = step_launch(workspace, op, between=True)
        self.end = step_launch(workspace, op, ends=True)
        out = call.out if self.result is None else self.result
        programs, ways = None, []
        if by_programs:
            step_rows = self.chunk * config.block_m
            programs = Programs(op, product, workspace, self.columns, self.flags, step_rows)
        else:
            ways = [RowsWay(columns, out) for columns in on_all_ranks(workspace, self.columns)]
        steps = [self._pull(step, block, ways) for step, block in enumerate(blocks)]
        self.pulls = Pulls(workspace, self.step, steps, programs)

    def _pull(self, step: int, block: Block, ways: list[RowsWay]) -> Pull:
        """A step: the wait for its tiles, and the copies of all ranks' columns, the neighbour's first. ways: from the
        columns of each; none where programs pull."""
        everyone = (1 << self.world) - 1
        if not ways:
            return Pull(self._step_arguments(step, everyone, block.tiles))
        peers = everyone ^ (1 << self.rank)
        N, copies = self.product.N, []
        top, left, shape = block.place(self.product.config, self.product.M, N)
        for turn in range(1, self.world + 1):
            owner = (self.rank + turn) % self.world
            copies.append(ways[owner].copy((top, left), (top, owner * N + left), shape))
        return Pull(self._step_arguments(step, peers, block.tiles, peers), copies[:-1], copies[-1:])

    def _step_arguments(
        self, step: int = 0, receivers: int = 0, tiles: tuple[int, int] = (0, 0), senders: int = 0
    ) -> tuple[Any, ...]:
        more = (step, receivers, tiles, step, senders)
        return step_arguments(self.workspace, self.flags, self.tile_flags, *more)

    def _gemm_arguments(self, a: Operand, b: Operand, bias: torch.Tensor | None) -> tuple[Any, ...]:
        extra = row_blocks.OwnColumns(self.tile_flags, PLAIN if bias is None else Finish.of(bias))
        return self.product.arguments(a, b, self.c, self.fix_up, extra, self.workspace.context)

    def compile(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        gemm = self.gemm.compile_once(partial(self._gemm_arguments, a, b, bias))
        waits = [launch.compile_once(self._step_arguments) for launch in (self.step, self.end)]
        self.least_free = least_free(gemm, waits, 1)
        self.pulls.compile(out if self.result is None else self.result)

    def run(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        a, b = self.product.readable(a, b)
        self.pulls.fork()
        self.gemm(self._gemm_arguments(a, b, bias))
        self.pulls.into(out if self.result is None else self.result)
        self.end(self._step_arguments())
