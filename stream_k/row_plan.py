"""Ops that sum row blocks, moved by the copy engine: `gemm_reduce_scatter`, and `gemm_all_reduce` of large
products. The protocol is `collectives.row_blocks`'s.

The caller's stream has the GEMM. Others beside it copy partial rows to their owners as tiles finish, sum what
arrived, and, in an all-reduce, pull the sums of the other owners; they meet again before the call ends.
"""

from __future__ import annotations

from typing import Any

import torch

from collectives import row_blocks
from pyrocshmem import signal, status, trace
from pyrocshmem.copies import RowCopy, takes_rows
from reference.ops import shard_range
from stream_k.config import num_multiprocessors
from stream_k.fused import Call, FusedPlan
from stream_k.launch import Launch
from stream_k.operands import aligned, as_argument, how_to_write
from stream_k.product import tiles_of_block
from stream_k.pulls import Pull, Pulls

# Streams beside the caller's. The first has all that isn't the GEMM; from it fork those that wait for tiles, copy, and
# sum.
_MAIN, _TILES, _COPIES, _SUMS = range(4)

# A program of the sums: 2048 elements at a time, 16 of each partial a thread.
_ROWS, _COLUMNS, _WARPS = 8, 256, 4


def step_launch(
    op: int, world_size: int, *, enters: bool = False, ends: bool = False, between: bool = False
) -> Launch:
    """A launch of `collectives.row_blocks.step_kernel`."""
    constants = {"OP": op, "WORLD": world_size, "ENTERS": enters, "ENDS": ends, "BETWEEN": between}
    return Launch(row_blocks.step_kernel, 1, constants, 4, 1)


class RowsPlan(FusedPlan):
    """The launches and copies of a call. `everywhere`: every rank gets all rows, not its own block alone."""

    def __init__(self, call: Call, everywhere: bool) -> None:
        config, heap, workspace = call.config, call.heap, call.workspace
        self.workspace, self.everywhere = workspace, everywhere
        self.rank, self.world = heap.rank, heap.world_size
        dtype = config.partial_dtype or torch.float32
        self.product = product = call.product(dtype == torch.float32, row_blocks=self.world)
        M, N = product.M, product.N
        self.tiles = tiles_of_block(M, self.world, config.block_m)
        self.chunk = min(config.chunk, self.tiles)
        self.num_steps = -(-self.tiles // self.chunk)
        self.flags = workspace.flags(2 * self.num_steps)
        self.tile_flags = workspace.buffer("local flags", product.schedule.num_tiles, torch.int32, local=True)
        block = self.tiles * config.block_m
        elements = (2 * self.world - 1) * block * N
        self.partials = workspace.buffer("row partials", elements, dtype)[:elements]
        rows = self.partials.view(-1, N)
        own = rows[: self.world * block]
        c_how = how_to_write(own)
        self.c = as_argument(own, c_how, config.block_m, product.part_n)
        self.result: torch.Tensor | None = None
        if everywhere and not takes_rows(call.out):
            self.result = workspace.buffer("own results", M * N, call.a.dtype, local=True)[: M * N].view(M, N)
        out = call.out if self.result is None else self.result
        # What the sums read when they run, since a graph keeps its arguments: the bias, and the address of the
        # result, of which `results` has the type only.
        self.results = call.a.new_empty(1)
        self.strides, self.aligned = (out.stride(0), out.stride(1)), aligned(out)
        self.where = workspace.buffer("result's place", 1, torch.int64, local=True)[:1]
        bias = call.request.bias
        self.bias = None if bias is None else workspace.buffer("row bias", N, bias.dtype, local=True)[:N]
        self.epoch = workspace.control[int(signal.CURRENT.value) :][:1]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.peers = ((1 << self.world) - 1) ^ (1 << self.rank)
        self.sums: torch.Tensor | None = None
        steps: list[Pull] = []
        if everywhere:
            most = -(-M // self.world)
            self.sums = workspace.buffer("row sums", most * N, call.a.dtype)[: most * N].view(most, N)
            steps = [self._pull(step, call, out, self.sums) for step in range(self.num_steps)]
        self.fix_up = product.fix_up(workspace)
        self.copies = [self._copies(step, rows, block, call) for step in range(self.num_steps)]
        self._make_launches(call, c_how)
        self.pulls = Pulls(workspace, self.step, steps)

    def _rows_of(self, step: int, owner: int) -> tuple[int, int]:
        """[begin, end) of a step's rows, counted from the first one of the owner's block."""
        first, last = shard_range(self.product.M, owner, self.world)
        height = self.chunk * self.product.config.block_m
        return min(step * height, last - first), min((step + 1) * height, last - first)

    def _copies(
        self, step: int, rows: torch.Tensor, block: int, call: Call
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(to, from, flag) of a step: the partial rows of the other ranks' blocks, in the order of their tiles."""
        copies = []
        for turn in range(1, self.world):
            owner = (self.rank + turn) % self.world
            begin, end = self._rows_of(step, owner)
            source = rows[owner * block + begin : owner * block + end]
            # At the owner, the blocks from its peers follow those of its own, its neighbour's first.
            place = (self.world + (self.rank - owner - 1) % self.world) * block
            to = call.heap.peer_view(rows[place + begin : place + end], owner)
            word = step * int(signal.MAX_WORLD.value) + self.rank
            copies.append((to, source, call.heap.peer_view(self.flags[word : word + 1], owner)))
        return copies

    def _pull(self, step: int, call: Call, out: torch.Tensor, sums: torch.Tensor) -> Pull:
        """The copies of a step's sums from their owners, the neighbour's first. Nothing keeps an owner from writing
        those of the next call but that it needs this rank's partials for them, which come when this call is over."""
        copies = []
        for turn in range(1, self.world):
            owner = (self.rank + turn) % self.world
            first, _ = shard_range(self.product.M, owner, self.world)
            begin, end = self._rows_of(step, owner)
            if begin < end:
                source = call.heap.peer_view(sums[begin:end], owner)
                copies.append(RowCopy.of(out[first + begin : first + end], out, source))
        return Pull(self._step_arguments(awaited=self.num_steps + step, senders=self.peers), copies)

    def _make_launches(self, call: Call, c_how: int) -> None:
        product, world = self.product, self.world
        op = int(status.Op.GEMM_ALL_REDUCE if self.everywhere else status.Op.GEMM_REDUCE_SCATTER)
        options = call.epilogue_options(c_how)
        self.gemm = product.launch(
            op, world, row_blocks.store_rows, row_blocks.announce_rows, None, options, -1, False, self.chunk
        )
        self.enter, self.step, self.end = (
            step_launch(op, world, enters=True),
            step_launch(op, world),
            step_launch(op, world, ends=True),
        )
        constants = {
            "OPTIONS": options,
            "EVERYWHERE": self.everywhere,
            "ALIGNED": self.aligned,
            "WORLD": world,
            "BLOCK_M": product.config.block_m,
            "ROWS": _ROWS,
            "COLUMNS": _COLUMNS,
        }
        programs = 2 * num_multiprocessors(call.heap.device)
        self.sum = Launch(row_blocks.reduce_rows_kernel, programs, constants, _WARPS, 1)

    def _gemm_arguments(self, a: torch.Tensor, b: torch.Tensor) -> tuple[Any, ...]:
        x, y = self.product.operands(a, b)
        extra = (self.tile_flags,)
        context = self.workspace.context
        return (
            x, None, y, self.c, *self.fix_up, None, extra, context, self.product.problem, self.product.strides
        )  # fmt: skip

    def _step_arguments(
        self,
        raised: int = 0,
        receivers: int = 0,
        tiles: tuple[int, int] = (0, 0),
        awaited: int = 0,
        senders: int = 0,
    ) -> tuple[Any, ...]:
        return (
            self.flags,
            self.tile_flags,
            raised,
            receivers,
            *tiles,
            awaited,
            senders,
            self.workspace.context,
        )

    def _sum_arguments(self, step: int) -> tuple[Any, ...]:
        bias = self.results if self.bias is None else self.bias
        return (
            self.partials,
            self.sums,
            self.results,
            self.where,
            *self.strides,
            bias,
            *self._rows_of(step, self.rank),
            self.product.M,
            self.product.N,
            self.workspace.context,
        )

    def _tiles_of(self, step: int, turn: int) -> tuple[int, int]:
        """[first, last) of the tiles that hold a step's rows of the block whose turn it is, 0 being the neighbour's
        and R - 1 the own: whole groups, since inside a group of tile rows the columns come first."""
        group, columns = self.product.config.group_m, self.product.schedule.tiles_n
        height = min(self.chunk, self.tiles - step * self.chunk)
        row = step * self.chunk * self.world + turn * height
        end = min(-(-(row + height) // group) * group, self.world * self.tiles)
        return row // group * group * columns, end * columns

    def compile(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        self.gemm.compile(self._gemm_arguments(a, b))
        for launch in (self.enter, self.step, self.end):
            launch.compile(self._step_arguments())
        self.sum.compile(self._sum_arguments(0))
        if self.workspace.device.type == "cuda" and trace.recorder() is None:
            # What runs beside the GEMM is the same for every call: one launch of a graph instead of dozens.
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self._beside()

    def run(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        workspace = self.workspace
        result = out if self.result is None else self.result
        self.where.fill_(result.data_ptr())
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)
        a, b = self.product.readable(a, b)
        workspace.fork(_MAIN)
        # Not in the graph, which keeps its arguments, while the result is another in every call.
        pull = self.pulls.into(result) if self.everywhere else None
        self.gemm(self._gemm_arguments(a, b))
        with workspace.beside(_MAIN):
            if self.graph is None or torch.cuda.is_current_stream_capturing():
                self._beside()
            else:
                self.graph.replay()
        if pull is not None:
            pull()
        workspace.join(_MAIN)
        self.end(self._step_arguments())

    def _beside(self) -> None:
        """All but the GEMM and the end of the call."""
        workspace = self.workspace
        for side in (_TILES, _COPIES, _SUMS):
            workspace.fork(side)
        # Copies follow one another with no kernel between them: copy engines take 15 us to start after one.
        launch = self.enter
        for step in range(self.num_steps):
            for turn, (to, source, flag) in enumerate(self.copies[step]):
                with workspace.beside(_TILES):
                    launch(self._step_arguments(tiles=self._tiles_of(step, turn)))
                    workspace.fork(_COPIES)
                with workspace.beside(_COPIES):
                    trace.copy(to.copy_, source)
                    flag.copy_(self.epoch)
                launch = self.step
        with workspace.beside(_SUMS):
            for step in range(self.num_steps):
                receivers = self.peers if step and self.everywhere else 0
                tiles = self._tiles_of(step, self.world - 1)
                self.step(self._step_arguments(self.num_steps + step - 1, receivers, tiles, step, self.peers))
                self.sum(self._sum_arguments(step))
            if self.everywhere:
                self.step(self._step_arguments(2 * self.num_steps - 1, self.peers))
        for side in (_TILES, _COPIES, _SUMS):
            workspace.join(side)
