"""Placement `blas_blocks` of `gemm_reduce_scatter` and `gemm_all_reduce`: the BLAS multiplies a block of rows for each
owner, this rank's last, and copy engines bring them while the next one is multiplied. The protocol is that of
`collectives.block_sums`.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from pyrocshmem import status, trace
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.collectives.block_sums import ROUNDS, sum_blocks_kernel
from pyrocshmem.collectives.epilogue import PLAIN, Finish, activation_number
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.local_gemm.blas import BlasPlan
from pyrocshmem.stream_k.local_gemm.plan import GemmPlan, plan_gemm
from pyrocshmem.stream_k.local_gemm.scales import UNIT, Operand, operands_of, rows_in
from pyrocshmem.stream_k.ops.op import Call
from pyrocshmem.stream_k.ops.planned import FusedPlan, call_number, in_passing
from pyrocshmem.stream_k.ops.rows import step_arguments, step_launch
from pyrocshmem.target import num_sms

# The stream of copies, beside the caller's.
_COPIES = 0
# What a program of `sum_blocks_kernel` does at a time, of rows a multiple of UNIT; its warps, and programs on a
# multiprocessor.
_ROWS, _COLS, _WARPS, _SHARE = 8, 512, 4, 8


class _Block(NamedTuple):
    """A product of some rows of A into memory; None: of no rows. sent: where it goes, what goes there, and the flag
    that says so; None: these are this rank's own rows."""

    rows: slice
    place: torch.Tensor
    gemm: GemmPlan | BlasPlan | None
    sent: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


class SummedBlocksPlan(FusedPlan):
    """The products, launches and copies of a call of at least two ranks. everywhere: every rank gets all rows, not its
    own block alone.

    Partials, in blocks of `height` rows: sending: for the peers, the next rank first; received: from them, the previous
    rank first; own: this rank's. sums: [rows, N], this rank's rows of an all-reduce, on the heap.
    """

    def __init__(self, call: Call, everywhere: bool) -> None:
        heap, workspace = call.heap, call.workspace
        self.workspace, self.result, self.sums = workspace, None, None
        self.rank, self.world = heap.rank, heap.world_size
        self.M, self.N = call.num_rows, call.out.shape[1]
        most = -(-self.M // self.world)
        # Whole blocks of rows are read of them.
        self.height = -(-most // _ROWS) * _ROWS
        peers = self.world - 1
        shape = 2 * peers + 1, self.height, self.N
        partials = in_passing(workspace, prod(shape), call.wire).view(shape)
        self.sending, self.received, (self.own,) = partials.split((peers, peers, 1))
        if everywhere:
            # Not in passing: peers may still pull them when this rank has ended the call. The next ones are made when
            # peers have sent their partials for them.
            held = workspace.buffer("row sums", most * self.N, call.out.dtype)
            self.sums = held[: most * self.N].view(most, self.N)
        programs = min(self.height // _ROWS * -(-self.N // _COLS), _SHARE * num_sms(heap.device))
        self.flags = workspace.flags(1 + int(ROUNDS.value) * programs if everywhere else 1)
        self.epoch = call_number(workspace)
        op = int(status.Op.GEMM_ALL_REDUCE if everywhere else status.Op.GEMM_REDUCE_SCATTER)
        self.enter = step_launch(op, self.world, enters=True)
        activation = activation_number(call.request.activation)
        constants = {"OP": op, "WORLD": self.world, "ROWS": _ROWS, "COLS": _COLS, "ACTIVATION": activation}
        self.sum = Launch(sum_blocks_kernel, programs, constants, _WARPS, 1)
        self.blocks = [self._block(call, turn % self.world) for turn in range(1, self.world + 1)]
        self.blas = next((block.gemm for block in self.blocks if isinstance(block.gemm, BlasPlan)), None)

    def _block(self, call: Call, turn: int) -> _Block:
        """Of the rank so many behind this one."""
        owner = (self.rank + turn) % self.world
        first, last = shard_range(self.M, owner, self.world)
        # The BLAS may take rows in fours: up to three of the next block are multiplied for nothing.
        rows = slice(first, min(first + -(-(last - first) // UNIT) * UNIT, self.M))
        place = (self.sending[turn - 1] if turn else self.own)[: rows.stop - rows.start]
        a, b = operands_of(call.a, call.b, call.request.scaling)
        given = (call.config, call.request.allow_tf32, None, "none", place, call.workspace)
        gemm = plan_gemm(rows_in(a, rows), b, *given, scheme=call.scheme) if first < last else None
        block = _Block(rows, place, gemm)
        if turn == 0:
            return block
        to = call.heap.peer_view(self.received[turn - 1, : last - first], owner)
        flag = call.heap.peer_view(self.flags[self.rank : self.rank + 1], owner)
        return block._replace(sent=(to, place[: last - first], flag))

    @property
    def replayable(self) -> bool:
        """Whether a graph of a call can be replayed."""
        return all(block.gemm is None or block.gemm.replayable for block in self.blocks)

    def _sum_arguments(self, bias: torch.Tensor | None, out: torch.Tensor) -> tuple[Any, ...]:
        return (
            self.own, self.received, self.height, self.sums, out, *out.stride(),
            PLAIN if bias is None else Finish.of(bias), self.M, self.N, self.flags, self.workspace.context,
        )  # fmt: skip

    def compile(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Compile and load all but the products, which are when they are planned."""
        self.enter.compile(step_arguments(self.workspace, self.flags))
        self.sum.compile(self._sum_arguments(bias, out))

    def run(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Enqueue the call."""
        workspace = self.workspace
        # Before the products, not beside the first: while the BLAS has every SM no kernel finds room.
        self.enter(step_arguments(workspace, self.flags))
        for block in self.blocks:
            if block.gemm is not None:
                block.gemm.run(rows_in(a, block.rows), b, None, block.place)
            if block.sent is not None:
                to, partials, flag = block.sent
                workspace.fork(_COPIES)
                with workspace.beside(_COPIES):
                    trace.copy(to.copy_, partials)
                    flag.copy_(self.epoch)
        self.sum(self._sum_arguments(bias, out))
        workspace.join(_COPIES)
