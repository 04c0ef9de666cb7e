"""Ops that sum row blocks, moved by copy engines: `gemm_reduce_scatter`, and `gemm_all_reduce` of large products. The
protocol is that of `collectives.row_blocks`.

The caller's stream has the product in two launches: the peers' rows, then this rank's, whose epilogue adds the peers'
partials. Streams beside it copy partial rows to their owners as tiles finish and, in an all-reduce, pull the sums of
all owners; all streams join before the call ends.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pyrocshmem import status, trace
from pyrocshmem.calls.graphs import capture, graphs_are_wanted
from pyrocshmem.calls.row_copy import RowCopy, RowsWay, takes_rows
from pyrocshmem.calls.tensors import POINTER, ROW, as_argument, filled, how_to_write, template
from pyrocshmem.collectives import row_blocks
from pyrocshmem.collectives.epilogue import PLAIN, Finish, Options, activation_number
from pyrocshmem.counts import packed
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.choice.config import changed
from pyrocshmem.stream_k.local_gemm.product import tiles_of_block
from pyrocshmem.stream_k.local_gemm.scales import Operand
from pyrocshmem.stream_k.ops.op import Call
from pyrocshmem.stream_k.ops.planned import FusedPlan, in_passing, least_free, on_all_ranks
from pyrocshmem.stream_k.ops.pulls import WAITS, Block, Pull, Pulls, blocks_of, tiles_of
from pyrocshmem.stream_k.ops.steps import step_arguments, step_launch

# Streams beside the caller's: the first waits for tiles of the peers' rows, the second copies, the third tells owners
# what has been copied.
_TILES, _COPIES, _FLAGS = range(3)
# Inner size for each peer below which sums are pulled from one peer after another: links have so much to do that most
# is left when the GEMM ends. Above it, step by step beside the GEMM. 4 x H200: the first is faster at 3584, the second
# at 6656.
_BUSY_K = 1600


class RowsPlan(FusedPlan):
    """The launches and copies of a call of at least two ranks: the launch of this rank's rows, which waits for nothing
    before it, must follow the launch of the peers' rows. `everywhere`: every rank gets all rows, not its own block
    alone.

    product: of this rank's rows; for_peers: of the others'. sums: [rows, N], this rank's rows of an all-reduce, on the
    heap. owned: [first, last) of the rows of each rank's block. partials: R - 1 blocks of rows for the peers, the next
    rank's first, then R - 1 from them, the previous rank's first. there: these rows, of all ranks. free: `least_free`
    of plans that are made of one another, by their compiled kernels, none of which goes.
    """

    def __init__(self, call: Call, everywhere: bool) -> None:
        config, heap, workspace = call.config, call.heap, call.workspace
        self.workspace, self.everywhere = workspace, everywhere
        self.rank, self.world = heap.rank, heap.world_size
        dtype, peers = call.wire, self.world - 1
        self.for_peers = call.product(ELEMENTS[dtype].wide, row_blocks=self.world, num_blocks=peers)
        self.tiles = tiles_of_block(call.num_rows, self.world, config.block_m)
        self.chunk = min(config.chunk, self.tiles)
        # No split tiles: they would come before any other, when no peer's partial is here. A group of tile rows lies
        # within one step.
        at_once = self.chunk == self.tiles
        group = config.group_m if at_once else math.gcd(config.group_m, self.chunk)
        own = changed(config, split="none", group_m=group)
        # True: room in shared memory for the fp32 parts of a tile, as for a fix-up.
        self.product = product = replace(call, config=own).product(
            True, row_blocks=self.world, num_blocks=1, peer_bytes=peers * dtype.itemsize
        )
        N = product.N
        tile = config.block_m * config.block_n
        cut = partial(blocks_of, self.tiles, product.schedule.tiles_n, self.chunk, group, tile)
        # What a tile of this rank waits for is told by its number, so that all steps have as many.
        self.steps = [*cut(cut=at_once)]
        self.pulled = [*cut()] if everywhere else []
        self.flags = workspace.flags(len(self.steps) + len(self.pulled))
        num_tiles = self.world * self.tiles * product.schedule.tiles_n
        self.tile_flags = workspace.buffer("local flags", num_tiles, torch.int32, local=True)
        self._step_arguments = partial(step_arguments, workspace, self.flags, self.tile_flags)
        block = self.tiles * config.block_m
        half = peers * block * N
        self.partials = in_passing(workspace, 2 * half, dtype)
        self.received = self.partials[half:]
        self.peers = ((1 << self.world) - 1) ^ (1 << self.rank)
        self.op = op = int(status.Op.GEMM_ALL_REDUCE if everywhere else status.Op.GEMM_REDUCE_SCATTER)
        self.enter, self.step, self.end = (
            step_launch(workspace, op, enters=True),
            step_launch(workspace, op, between=everywhere),
            step_launch(workspace, op, ends=True),
        )
        rows = self.partials.view(-1, N)
        self.free: dict[tuple[int, ...], int] = {}
        self.there = on_all_ranks(workspace, rows)
        self.way = RowsWay(rows, rows)
        self._begin(call)
        self._make_launches(call, rows[: peers * block])

    @classmethod
    def of(cls, call: Call, everywhere: bool) -> RowsPlan:
        """That of a call: made of the one of other rows that end in the same row of tiles, where there is one."""
        tiles = tiles_of_block(call.num_rows, call.heap.world_size, call.config.block_m)
        key = cls, everywhere, call.alike, call.config, tiles
        shared = call.workspace.plans.shared
        found: RowsPlan | None = None if call.alike is None else shared.get(key)
        if found is None:
            found = cls(call, everywhere)
            # What lies in columns may be read in another way for other rows, and what is copied has memory for these.
            both = (found.product, found.for_peers)
            if call.alike is not None and all(x.a_how == ROW and x.copies is None for x in both):
                shared[key] = changed(found)  # a copy, without the graphs of its calls
            return found
        plan = changed(found)
        plan.product, plan.for_peers = (
            x.of_rows(call.num_rows, call.a) for x in (found.product, found.for_peers)
        )
        plan._begin(call)
        return plan

    def _begin(self, call: Call) -> None:
        """All that depends on how many rows the last tiles have."""
        workspace, M, N = self.workspace, self.product.M, self.product.N
        self.owned = [shard_range(M, owner, self.world) for owner in range(self.world)]
        self.sending: torch.cuda.CUDAGraph | None = None
        self.was_called = False
        self.result: torch.Tensor | None = None
        self.sums: torch.Tensor | None = None
        steps: list[Pull] = []
        if self.everywhere:
            if not takes_rows(call.out):
                held = workspace.buffer("own results", M * N, call.out.dtype, local=True)
                self.result = held[: M * N].view(M, N)
            most = -(-M // self.world)
            self.sums = workspace.buffer("row sums", most * N, call.out.dtype)[: most * N].view(most, N)
            out = call.out if self.result is None else self.result
            ways = [RowsWay(sums, out) for sums in on_all_ranks(workspace, self.sums)]
            steps = [self._pull(len(self.steps) + i, each, ways) for i, each in enumerate(self.pulled)]
        self.copies = [self._copies(step) for step in self.steps]
        together = len(steps) if steps and _BUSY_K * (self.world - 1) > self.product.K else 1
        self.pulls = Pulls(workspace, self.step, steps, together=together)

    def _place(self, step: Block, owner: int) -> tuple[int, int, tuple[int, int]]:
        """(row, counted from the first one of the owner's block, column, shape) of a step."""
        first, last = self.owned[owner]
        return step.place(self.product.config, last - first, self.product.N)

    def _copies(self, step: Block) -> list[tuple[int, RowCopy, torch.Tensor]]:
        """(owner, copy, into) of a step: of the partial rows of the other ranks' blocks, in the order of their
        tiles."""
        copies, peers, block = [], self.world - 1, self.tiles * self.product.config.block_m
        for peer in range(peers):
            owner = (self.rank + 1 + peer) % self.world
            top, left, shape = self._place(step, owner)
            begin, to = (peer * block + top, left), ((peers + peer) * block + top, left)
            copies.append((owner, self.way.copy(begin, to, shape), self.there[owner]))
        return copies

    def _pull(self, word: int, step: Block, ways: list[RowsWay]) -> Pull:
        """The copies of a step's sums from their owners, the neighbour's first. An owner can't write those of the next
        call too early: it needs this rank's partials for them, which come when this call is over. ways: from the sums
        of each."""
        before = (self.world - 1) * self.tiles * self.product.schedule.tiles_n
        tiles = before + step.tiles[0], before + step.tiles[1]
        copies: dict[int, RowCopy] = {}
        for turn in range(1, self.world + 1):
            owner = (self.rank + turn) % self.world
            top, left, shape = self._place(step, owner)
            if shape[0] > 0:
                copies[owner] = ways[owner].copy((top, left), (self.owned[owner][0] + top, left), shape)
        own = [copies.pop(self.rank)] if self.rank in copies else []
        return Pull(
            self._step_arguments(word, self.peers, tiles, word, self.peers), list(copies.values()), own
        )

    def _make_launches(self, call: Call, for_peers: torch.Tensor) -> None:
        product, peers, world = self.product, self.for_peers, self.world
        op = self.op
        how = how_to_write(for_peers)
        self.for_peers_c = as_argument(for_peers, how, peers.config.block_m, peers.part_n)
        self.fix_up = peers.fix_up(self.workspace)
        # Partials get no bias and no activation: one machine code for all.
        self.peers_gemm = peers.launch(
            op,
            world,
            row_blocks.store_rows,
            Options(how),
            announce=row_blocks.announce_rows,
            order="PEERS",
            once=True,
        )
        out = call.out if self.sums is None else self.sums
        self.c_template = template(out, POINTER, product.config.block_m, product.part_n)
        self.strides = (out.stride(0), out.stride(1))
        self.no_fix_up = product.fix_up(self.workspace)
        announce = row_blocks.announce_rows if self.everywhere else None
        options = row_blocks.SumOptions(POINTER, activation_number(call.request.activation), op)
        self.own_gemm = product.launch(
            op, world, row_blocks.sum_rows, options, announce=announce, order="SUMS", once=True
        )

    def _peers_arguments(self, a: Operand, b: Operand) -> tuple[Any, ...]:
        extra = row_blocks.PeersRows(self.tile_flags, PLAIN)
        context = self.workspace.context
        return self.for_peers.arguments(a, b, self.for_peers_c, self.fix_up, extra, context)

    def _own_arguments(
        self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor
    ) -> tuple[Any, ...]:
        product = self.product
        c = filled(self.c_template, out if self.sums is None else self.sums)
        step_tiles = packed(self.chunk * self.steps[0].columns[1])
        finish = PLAIN if bias is None else Finish.of(bias)
        extra = row_blocks.OwnRows(
            self.tile_flags, self.flags, step_tiles, self.received, finish, *self.strides
        )
        return product.arguments(a, b, c, self.no_fix_up, extra, self.workspace.context)

    def _tiles_of(self, step: Block, peer: int) -> tuple[int, int]:
        """[first, last) of the tiles of a step of the block of a peer, counted from the neighbour, 0."""
        product, before = self.for_peers, peer * self.tiles
        rows = before + step.rows[0], before + step.rows[1]
        all_rows = (self.world - 1) * self.tiles
        return tiles_of(rows, step.columns, all_rows, product.schedule.tiles_n, product.config.group_m)

    def compile(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        peers = self.peers_gemm.compile_once(partial(self._peers_arguments, a, b))
        own = self.own_gemm.compile_once(partial(self._own_arguments, a, b, bias, out))
        waits = [launch.compile_once(self._step_arguments) for launch in (self.enter, self.step, self.end)]
        compiled = tuple(map(id, (peers, own, *waits)))
        if compiled in self.free:
            self.least_free = self.free[compiled]
            return
        # Before the GEMMs begin there may be a wait for the peers' tiles and, in an all-reduce, one for own tiles. Only
        # that one can keep the second GEMM from beginning: the other ends with the first.
        both = int(self.everywhere)
        self.least_free = max(least_free(peers, waits, 1 + both), least_free(own, waits, both))
        self.free[compiled] = self.least_free

    def _prepare_sending(self) -> None:
        """What brings the partials to their owners is the same for every call: from the second one on it is one launch
        of a graph instead of dozens. A capture takes the host longer than these, and most numbers of rows that a
        serving engine brings never come again."""
        if self.sending is None and self.was_called and self._may_capture():
            self.sending = capture(self.workspace, self._send_beside)
        self.was_called = True

    def _may_capture(self) -> bool:
        on_gpu = self.workspace.device.type == "cuda" and graphs_are_wanted()
        return on_gpu and trace.recorder() is None and not torch.cuda.is_current_stream_capturing()

    def run(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        workspace = self.workspace
        self._prepare_sending()
        a, b = self.product.readable(a, b)
        workspace.fork(_TILES)
        if self.everywhere:
            workspace.fork(WAITS)  # no programs pull: copies do
        self.peers_gemm(self._peers_arguments(a, b))
        with workspace.beside(_TILES):
            if self.sending is None or torch.cuda.is_current_stream_capturing():
                self._send()
            else:
                self.sending.replay()
        self.own_gemm(self._own_arguments(a, b, bias, out))
        if self.everywhere:
            self.pulls.into(out if self.result is None else self.result)
        workspace.join(_TILES)
        self.end(self._step_arguments())

    def _send_beside(self) -> None:
        # On a stream of helpers, whose priority the kernels of a graph keep.
        self.workspace.fork(_TILES)
        with self.workspace.beside(_TILES):
            self._send()
        self.workspace.join(_TILES)

    def _send(self) -> None:
        """Copy the partial rows to their owners, step by step, one owner after another: copies that change from peer to
        peer at each step get in one another's way and reach two thirds of the rate (4 x H200)."""
        workspace = self.workspace
        # Copies follow one another with nothing between them: copy engines take 15 us to start after a kernel, and 7 us
        # for a flag. Each of the three streams has kernels or copies of its own: one that only waited would hand all
        # that it ever waited for to every later call of a graph.
        launch = self.enter
        for peer in range(self.world - 1):
            for word, step in enumerate(self.steps):
                owner, copy, into = self.copies[word][peer]
                launch(self._step_arguments(tiles=self._tiles_of(step, peer)))
                workspace.fork(_COPIES)
                with workspace.beside(_COPIES):
                    trace.copy(copy, into)
                    workspace.fork(_FLAGS)
                with workspace.beside(_FLAGS):
                    self.step(self._step_arguments(word, 1 << owner))
                launch = self.step
        workspace.join(_COPIES)
        workspace.join(_FLAGS)
