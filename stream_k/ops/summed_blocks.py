"""Placement `blas_blocks` of `gemm_reduce_scatter` and `gemm_all_reduce`: the BLAS multiplies a block of rows for each
owner, this rank's last, and copy engines bring them while the next one is multiplied. The protocol is that of
`collectives.block_sums`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from pyrocshmem import status, trace
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.collectives.block_sums import FIRST, ROUNDS, SUMS, sum_blocks_kernel
from pyrocshmem.collectives.epilogue import PLAIN, Finish, activation_number
from pyrocshmem.collectives.float8 import UNIT
from pyrocshmem.shards import shard_range
from pyrocshmem.signal import MAX_WORLD
from pyrocshmem.stream_k.local_gemm.blas import BlasPlan
from pyrocshmem.stream_k.local_gemm.plan import GemmPlan, plan_gemm
from pyrocshmem.stream_k.local_gemm.scales import Operand, operands_of, rows_in
from pyrocshmem.stream_k.ops.op import Call
from pyrocshmem.stream_k.ops.planned import FusedPlan, at_rank, call_number, in_passing
from pyrocshmem.stream_k.ops.steps import step_arguments, step_launch
from pyrocshmem.target import num_sms

# The stream of copies, beside the caller's.
_COPIES = 0
# What a program of `sum_blocks_kernel` does at a time, of rows a multiple of UNIT; its warps, and programs on a
# multiprocessor.
_ROWS, _COLS, _WARPS, _SHARE = 8, 512, 4, 8


class _Copy(NamedTuple):
    """What a peer gets: `to` is its memory, and then its flag is raised."""

    to: torch.Tensor
    what: torch.Tensor
    flag: torch.Tensor


class _Block(NamedTuple):
    """A product of some rows of A into memory; None: of no rows. summed: rows of this rank's block whose sums are made
    behind it; None: these are a peer's. sent: what copy engines bring to peers then."""

    rows: slice
    place: torch.Tensor
    gemm: GemmPlan | BlasPlan | None
    summed: tuple[int, int] | None = None
    sent: Sequence[_Copy] = ()


class SummedBlocksPlan(FusedPlan):
    """The products, launches and copies of a call of at least two ranks. everywhere: every rank gets all rows, not its
    own block alone.

    Partials, in blocks of `height` rows: sending: for the peers, the next rank first; received: from them, the previous
    rank first; own: this rank's. sums: [rows, N], this rank's rows of an all-reduce, on the heap. first: so many rows
    of each block of an all-reduce are multiplied and summed before the others; brought: [R - 1, first, N], the sums of
    the peers', the previous rank's first.
    """

    def __init__(self, call: Call, everywhere: bool) -> None:
        heap, workspace = call.heap, call.workspace
        self.workspace, self.result, self.sums = workspace, None, None
        self.rank, self.world = heap.rank, heap.world_size
        self.M, self.N = call.num_rows, call.out.shape[1]
        most = -(-self.M // self.world)
        # Whole blocks of rows are read of them.
        self.height = -(-most // _ROWS) * _ROWS
        first = call.config.chunk * call.config.block_m
        self.first = first if everywhere and first < self.M // self.world else 0
        peers = self.world - 1
        shape, of_first = (2 * peers + 1, self.height, self.N), (peers, self.first, self.N)
        size = prod(shape) * call.wire.itemsize
        held = in_passing(workspace, size + prod(of_first) * call.out.dtype.itemsize, torch.uint8)
        partials = held[:size].view(call.wire).view(shape)
        self.sending, self.received, (self.own,) = partials.split((peers, peers, 1))
        self.brought = held[size:].view(call.out.dtype).view(of_first) if self.first else None
        if everywhere:
            # Not in passing: peers may still pull them when this rank has ended the call. The next ones are made when
            # peers have sent their partials for them.
            held = workspace.buffer("row sums", most * self.N, call.out.dtype)
            self.sums = held[: most * self.N].view(most, self.N)
        programs = min(self.height // _ROWS * -(-self.N // _COLS), _SHARE * num_sms(heap.device))
        words = int(SUMS.value) + int(ROUNDS.value) * programs
        self.flags = workspace.flags(words if everywhere else 1)
        self.epoch = call_number(workspace)
        op = int(status.Op.GEMM_ALL_REDUCE if everywhere else status.Op.GEMM_REDUCE_SCATTER)
        self.enter = step_launch(workspace, op, enters=True)
        activation = activation_number(call.request.activation)
        constants = {"OP": op, "WORLD": self.world, "ROWS": _ROWS, "COLS": _COLS, "ACTIVATION": activation}
        self.sum, self.sum_first = (
            Launch(sum_blocks_kernel, programs, constants | {"ENDS": ends}, _WARPS, 1)
            for ends in (True, False)
        )
        self.blocks = [self._for_peer(call, turn) for turn in range(1, self.world)]
        if self.first:
            self.blocks.append(self._of_own(call, 0, self.first))
        self.blocks.append(self._of_own(call, self.first, self.height))
        self.blas = next((block.gemm for block in self.blocks if isinstance(block.gemm, BlasPlan)), None)

    def _block(self, call: Call, first: int, last: int, place: torch.Tensor) -> _Block:
        """The product of rows [first, last)."""
        # The BLAS may take rows in fours: up to three of the next block are multiplied for nothing.
        rows = slice(first, min(first + -(-(last - first) // UNIT) * UNIT, self.M))
        place = place[: rows.stop - rows.start]
        a, b = operands_of(call.a, call.b, call.request.scaling)
        given = (call.config, call.request.allow_tf32, None, "none", place, call.workspace)
        gemm = plan_gemm(rows_in(a, rows), b, *given, scheme=call.scheme) if first < last else None
        return _Block(rows, place, gemm)

    def _for_peer(self, call: Call, turn: int) -> _Block:
        """Of the rank so many behind this one."""
        owner = (self.rank + turn) % self.world
        first, last = shard_range(self.M, owner, self.world)
        block = self._block(call, first, last, self.sending[turn - 1])
        to = at_rank(self.workspace, self.received[turn - 1, : last - first], owner)
        return block._replace(sent=[_Copy(to, block.place[: last - first], self._flag(0, owner))])

    def _of_own(self, call: Call, begin: int, end: int) -> _Block:
        """Of rows [begin, end) of this rank's."""
        first, last = shard_range(self.M, self.rank, self.world)
        block = self._block(call, first + begin, min(first + end, last), self.own[begin:])
        if end == self.height:
            return block._replace(summed=(begin, end))
        assert self.sums is not None
        assert self.brought is not None
        sent = []
        for turn in range(1, self.world):
            owner = (self.rank + turn) % self.world
            to = at_rank(self.workspace, self.brought[turn - 1], owner)
            sent.append(_Copy(to, self.sums[begin:end], self._flag(int(FIRST.value), owner)))
        return block._replace(summed=(begin, end), sent=sent)

    def _flag(self, number: int, owner: int) -> torch.Tensor:
        """Word `number` of flags, this rank's, at `owner`."""
        word = number * int(MAX_WORLD.value) + self.rank
        return at_rank(self.workspace, self.flags[word : word + 1], owner)

    @property
    def replayable(self) -> bool:
        """Whether a graph of a call can be replayed."""
        return all(block.gemm is None or block.gemm.replayable for block in self.blocks)

    def _sum_arguments(
        self, rows: tuple[int, int], bias: torch.Tensor | None, out: torch.Tensor
    ) -> tuple[Any, ...]:
        return (
            self.own, self.received, self.height, *rows, self.sums, self.brought if rows[0] else None, out,
            *out.stride(), PLAIN if bias is None else Finish.of(bias), self.M, self.N, self.flags,
            self.workspace.context,
        )  # fmt: skip

    def _launch_of(self, rows: tuple[int, int]) -> Launch:
        """What sums these rows of this rank's."""
        return self.sum if rows[1] == self.height else self.sum_first

    def compile(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Compile and load all but the products, which are when they are planned."""
        self.enter.compile_once(partial(step_arguments, self.workspace, self.flags))
        for block in self.blocks:
            if block.summed is not None:
                self._launch_of(block.summed).compile(self._sum_arguments(block.summed, bias, out))

    def run(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Enqueue the call."""
        workspace = self.workspace
        # Before the products, not beside the first: while the BLAS has every SM no kernel finds room.
        self.enter(step_arguments(workspace, self.flags))
        for block in self.blocks:
            if block.gemm is not None:
                block.gemm.run(rows_in(a, block.rows), b, None, block.place)
            if block.summed is not None:
                self._launch_of(block.summed)(self._sum_arguments(block.summed, bias, out))
            if block.sent:
                workspace.fork(_COPIES)
                with workspace.beside(_COPIES):
                    for to, what, flag in block.sent:
                        trace.copy(to.copy_, what)
                        flag.copy_(self.epoch)
        workspace.join(_COPIES)
