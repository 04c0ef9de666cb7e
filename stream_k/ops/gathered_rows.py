"""Plans of `all_gather_gemm`: how the rows of all ranks come, and what multiplies them.

Copy engines push this rank's rows to its peers, first to the one that needs them first, while its own rows are
multiplied; then come the peers' blocks, in the order in which they arrive: piece by piece in one GEMM of ours, or
whole, a product of the BLAS each. Few rows go by messages, before the GEMM.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from pyrocshmem import signal, status, trace
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.tensors import BLOCKS, POINTER, ROW, as_argument, filled, how_to_write, template
from pyrocshmem.collectives.epilogue import PLAIN, Finish, Options, Output, activation_number, store_output
from pyrocshmem.collectives.exchange import Exchange
from pyrocshmem.counts import packed
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.choice.config import Config, changed
from pyrocshmem.stream_k.local_gemm.blas import BlasPlan
from pyrocshmem.stream_k.local_gemm.kernel import Arrived
from pyrocshmem.stream_k.local_gemm.plan import GemmPlan, plan_gemm
from pyrocshmem.stream_k.local_gemm.scales import (
    Operand,
    Scaled,
    data_of,
    operands_of,
    parts_of,
    rows_in,
    scales_a_row,
)
from pyrocshmem.stream_k.ops.op import Call
from pyrocshmem.stream_k.ops.planned import FusedPlan, at_rank, call_number, in_passing
from pyrocshmem.stream_k.ops.scaled_rows import WORD, ScaledRows
from pyrocshmem.stream_k.ops.steps import step_arguments, step_launch

# Streams beside the caller's: of copies to peers, and of those that keep the gathered rows.
_COPIES, _KEPT = range(2)
# Bytes, at multiples of which scales begin.
_ALIGNED = 16


def _in_passing(call: Call) -> Operand:
    """Where the rows of all ranks are gathered; scales behind them, where they have some."""
    shape, scaling = (call.num_rows, call.a.shape[1]), call.request.scaling
    if scaling is None:
        return in_passing(call.workspace, prod(shape), call.a.dtype).view(shape)
    of_scales = (call.num_rows, scales_a_row(scaling.a))
    first = -(-prod(shape) // _ALIGNED) * _ALIGNED
    held = in_passing(call.workspace, first + 4 * prod(of_scales), torch.uint8)
    return Scaled(
        held[: prod(shape)].view(call.a.dtype).view(shape), held[first:].view(torch.float32).view(of_scales)
    )


class PiecesPlan(FusedPlan):
    """Blocks of rows in pieces, which one GEMM of ours takes as they arrive. own_scales: a row for each of this rank's,
    of 8-bit operands."""

    own_scales: torch.Tensor | None = None

    def __init__(self, call: Call) -> None:
        # Split tiles would come first, when only this rank's rows are there.
        call = replace(call, config=changed(call.config, split="none"))
        heap, workspace = call.heap, call.workspace
        world = heap.world_size
        self.workspace, self.rank, self.world = workspace, heap.rank, world
        self.result = None
        M = call.num_rows
        # Every block has as many pieces, on all ranks alike, though blocks may differ by a row.
        most = -(-M // world)
        height = self._piece_rows(call.config, most)
        self.num_pieces = -(-most // height)
        self.flags = workspace.flags(self.num_pieces)
        self.gathered = _in_passing(call)
        self.rows = data_of(self.gathered)
        if isinstance(self.gathered, Scaled):
            shape = len(call.a), self.gathered.scale.shape[1]
            held = workspace.buffer("own scales", prod(shape), torch.float32, local=True)
            self.own_scales = held[: prod(shape)].view(shape)
        self.block = first, last = shard_range(M, heap.rank, world)
        self.pieces = [
            self._copy(piece, slice(begin, min(begin + height, last - first)), (heap.rank - turn) % world)
            for turn in range(1, world)
            for piece, begin in enumerate(range(0, most, height))
        ]
        self.epoch = call_number(workspace)
        op = int(status.Op.ALL_GATHER_GEMM)
        self.enter, self.end = step_launch(workspace, op, enters=True), step_launch(workspace, op, ends=True)
        self.gemm: Launch | None = None
        self.senders = ((1 << world) - 1) ^ (1 << heap.rank)
        if call.b.shape[1] > 0:
            self.senders = 0  # the GEMM waits for the peers' rows
            self._plan_gemm(call)

    def _piece_rows(self, config: Config, most: int) -> int:
        """Of a block of at most so many rows."""
        return min(config.chunk * config.block_m, most)

    def _copy(self, piece: int, rows: slice, peer: int) -> tuple[slice, list[torch.Tensor], torch.Tensor]:
        """(which of the own rows, where each part of them goes, flag) of a piece."""
        word = piece * int(signal.MAX_WORLD.value) + self.rank
        at = partial(at_rank, self.workspace, rank=peer)
        to = [at(x[slice(*self.block)][rows]) for x in parts_of(self.gathered)]
        return rows, to, at(self.flags[word : word + 1])

    def _plan_gemm(self, call: Call) -> None:
        config, world = call.config, self.world
        # A rank without rows multiplies a stand-in and stores nothing of it: no descriptor has 0 rows.
        self.stand_in: Operand | None = None
        if call.a.shape[0] == 0:
            rows = call.a.new_zeros(1, call.a.shape[1])
            self.stand_in = rows
            if isinstance(self.gathered, Scaled):
                self.stand_in = Scaled(rows, self.gathered.scale.new_zeros(1, self.gathered.scale.shape[1]))
            call = replace(call, a=rows, alike=None)
        self.product = product = call.product(ELEMENTS[call.out.dtype].wide, row_blocks=world, keeps_a=True)
        M = product.M
        self.argument = as_argument(self.rows, product.a_how, config.block_m, config.block_k)
        self.c_how = how_to_write(call.out)
        if self.c_how == ROW and M % (world * config.block_m) != 0:
            # Blocks end inside a tile, whose last rows belong to the next block and are left alone.
            self.c_how = BLOCKS if M % world == 0 else POINTER
        out = call.out.unflatten(0, (world, -1)) if self.c_how == BLOCKS else call.out
        self.c_template = template(out, self.c_how, config.block_m, product.part_n)
        self.strides = (call.out.stride(0), call.out.stride(1))
        self.fix_up = product.fix_up(self.workspace)
        op = int(status.Op.ALL_GATHER_GEMM)
        activation = activation_number(call.request.activation)
        options = Options(self.c_how, activation)
        self.gemm = product.launch(op, world, store_output, options, order="GATHERS", once=True)

    def _gemm_arguments(
        self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor
    ) -> tuple[Any, ...]:
        product = self.product
        a = a if self.stand_in is None else self.stand_in
        c = filled(self.c_template, out)
        # Without scales their fields are None.
        theirs = product.strides_of(self.gathered, b)
        scales = (theirs.scale_a, theirs.scale_am, theirs.scale_ak)
        arrived = Arrived(self.flags, packed(product.config.chunk), *scales)
        extra = Output(PLAIN if bias is None else Finish.of(bias), *self.strides)
        context = self.workspace.context
        return product.arguments(a, b, c, self.fix_up, extra, context, self.argument, arrived)

    def _step_arguments(self, senders: int = 0) -> tuple[Any, ...]:
        return step_arguments(self.workspace, self.flags, awaited=self.num_pieces - 1, senders=senders)

    def compile(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        if self.gemm is not None:
            self.gemm.compile_once(partial(self._gemm_arguments, a, b, bias, out))
        for launch in (self.enter, self.end):
            launch.compile_once(self._step_arguments)

    def run(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        workspace = self.workspace
        if self.gemm is not None:
            a, b = self.product.readable(a, b)
        sent = self._sent(a)
        workspace.fork(_COPIES)
        # What runs in order would wait for copies that come after it.
        gemm_last = workspace.runs_in_order()
        if self.gemm is not None and not gemm_last:
            self.gemm(self._gemm_arguments(a, b, bias, out))
        with workspace.beside(_COPIES):
            self.enter(self._step_arguments())
            self._push(sent)
        if self.gemm is not None and gemm_last:
            self.gemm(self._gemm_arguments(a, b, bias, out))
        workspace.join(_COPIES)
        self.end(self._step_arguments(self.senders))

    def _sent(self, a: Operand) -> tuple[torch.Tensor, ...]:
        """The parts of this rank's rows, as they are pushed."""
        if self.own_scales is None:
            return parts_of(a)
        assert isinstance(a, Scaled)
        self.own_scales.copy_(a.scale if a.scale.ndim == 2 else a.scale.view(1, 1))
        return a.data, self.own_scales

    def _push(self, sent: tuple[torch.Tensor, ...]) -> None:
        for rows, to, flag in self.pieces:
            for there, x in zip(to, sent, strict=True):
                trace.copy(there.copy_, x[rows])
            flag.copy_(self.epoch)

    def second(self, a: torch.Tensor) -> Any:
        """The rows of all ranks; of 8-bit ones a `Scaled`."""
        if self.own_scales is None:
            return self._joined(self.rows, a)
        assert isinstance(self.gathered, Scaled)
        data = self._joined(self.rows.view(torch.uint8), a.view(torch.uint8)).view(a.dtype)
        return Scaled(data, self._joined(self.gathered.scale, self.own_scales))

    def _joined(self, gathered: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """A new tensor: what is gathered, and this rank's own among it."""
        first, last = self.block
        return torch.cat((gathered[:first], own, gathered[last:]))


class BlocksPlan(PiecesPlan):
    """Whole blocks of rows, a product each: this rank's, then its peers' in the order in which they arrive.

    blocks: their owners, which rows they are, where a peer's are gathered (None: this rank's), and the product; no
    blocks of a rank without columns. kept: the rows of all ranks, between a call that was asked for them and `second`:
    they are copied while blocks are multiplied.
    """

    blocks: tuple[tuple[int, slice, Operand | None, GemmPlan | BlasPlan], ...] = ()
    kept: torch.Tensor | None = None

    def __init__(self, call: Call) -> None:
        # Of 8-bit operands `second` copies when all is over.
        self.keeps = call.request.save_gathered and call.scheme is None
        super().__init__(call)

    def _piece_rows(self, config: Config, most: int) -> int:
        return most

    def _plan_gemm(self, call: Call) -> None:
        request, world = call.request, self.world
        a, b = operands_of(call.a, call.b, request.scaling)
        self.wait = step_launch(self.workspace, int(status.Op.ALL_GATHER_GEMM))
        for turn in range(world):
            owner = (self.rank + turn) % world
            rows = slice(*shard_range(call.num_rows, owner, world))
            if rows.start == rows.stop:
                self.senders |= 1 << owner  # nothing to multiply, but its flag comes
                continue
            theirs = rows_in(self.gathered, rows) if turn else None
            more = (call.config, request.allow_tf32, request.bias, request.activation)
            block = a if theirs is None else theirs
            gemm = plan_gemm(block, b, *more, call.out[rows], self.workspace, scheme=call.scheme)
            if isinstance(gemm, BlasPlan):
                self.blas = gemm
            self.blocks = (*self.blocks, (owner, rows, theirs, gemm))
        self.senders &= ~(1 << self.rank)

    @property
    def replayable(self) -> bool:
        # A graph would keep the same rows' memory for every call.
        return not self.keeps and all(gemm.replayable for *_, gemm in self.blocks)

    def compile(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        waits = [self.wait] if self.blocks else []
        for launch in (self.enter, *waits, self.end):
            launch.compile_once(self._step_arguments)

    def run(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        # Before the products, not beside the first: while the BLAS has every SM no kernel finds room.
        self.enter(self._step_arguments())
        sent = self._sent(a)
        self.workspace.fork(_COPIES)
        with self.workspace.beside(_COPIES):
            self._push(sent)
        if self.keeps and self.blocks:
            self.kept = data_of(a).new_empty(self.rows.shape)
        for owner, rows, theirs, gemm in self.blocks:
            if theirs is not None:
                self.wait(self._step_arguments(1 << owner))
            block = a if theirs is None else theirs
            if self.kept is not None:
                self.workspace.fork(_KEPT)
            gemm.run(block, b, bias, out[rows])
            if self.kept is not None:
                # Enqueued behind the product: a copy inside one device needs its SMs, and would be first on them.
                with self.workspace.beside(_KEPT):
                    trace.copy(self.kept[rows].copy_, data_of(block))
        self.workspace.join(_COPIES)
        if self.kept is not None:
            self.workspace.join(_KEPT)
        self.end(self._step_arguments(self.senders))

    def second(self, a: torch.Tensor) -> Any:
        kept, self.kept = self.kept, None
        return super().second(a) if kept is None else kept[:, : a.shape[1]]


class MessagesPlan(FusedPlan):
    """All ranks' rows by messages, then the GEMM."""

    def __init__(self, call: Call) -> None:
        config, request, workspace = call.config, call.request, call.workspace
        self.workspace, self.result = workspace, None
        M, N = call.num_rows, call.b.shape[1]
        # Rounded up to whole tiles, so that the GEMM may read rows behind the last.
        rows, K, dtype, x = -(-M // config.block_m) * config.block_m, call.a.shape[1], call.a.dtype, call.a
        scaling = request.scaling
        self.scaled: ScaledRows | None = None
        if scaling is not None:
            self.scaled = ScaledRows.of(x, scaling.a)
            K, dtype = self.scaled.width, WORD
            own = workspace.buffer("own rows", len(x) * K, WORD, local=True)
            self.own = x = own[: len(x) * K].view(len(x), K)
            self.own_operand = self.scaled.operand(x)
            self.put = self.scaled.launch(Scaled(call.a, scaling.a), self.own_operand)
        held = workspace.buffer("own gathered", rows * K, dtype, local=True)
        self.gathered = held[: M * K].view(M, K)
        self.operand: Operand = self.gathered
        if self.scaled is not None:
            self.operand = self.scaled.operand(self.gathered)
        # A rank without columns only sends its rows.
        self.gemm: GemmPlan | BlasPlan | None = None
        if N > 0:
            options = (request.allow_tf32, request.bias, request.activation)
            a, b = self.operand, operands_of(call.a, call.b, scaling)[1]
            self.gemm = plan_gemm(a, b, config, *options, call.out, workspace, scheme=call.scheme)
            if isinstance(self.gemm, BlasPlan):
                self.blas = self.gemm
            else:
                self.product = self.gemm.product
        op = status.Op.ALL_GATHER_GEMM
        self.exchange = Exchange(workspace, op, "all_gather", x, self.gathered, rows=M)

    def compile(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Both parts are compiled when they are planned."""

    def run(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Enqueue the call."""
        if isinstance(a, Scaled):
            assert self.scaled is not None
            if len(self.own) > 0:
                self.put(self.scaled.arguments(a, self.own_operand))
            a = self.own
        self.exchange.run(a, self.gathered)
        if self.gemm is not None:
            self.gemm.run(self.operand, b, bias, out)

    def second(self, a: torch.Tensor) -> Any:
        """The gathered rows, as a new tensor; of 8-bit ones a `Scaled`."""
        if self.scaled is not None:
            return self.scaled.operand(self.gathered.clone())
        return self.gathered[:, : a.shape[1]].clone()
