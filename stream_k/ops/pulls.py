"""Blocks of a result that a rank fetches from its peers as they finish, straight into the caller's tensor: by copy
engine, or by programs on multiprocessors that the GEMM leaves free. And how tiles are cut into the steps of copies.

Copy engines take nothing from the GEMM and want few large copies: on 4 x H200 a rank that copies alone gets 360 GB/s,
and 220 to 290 when all copy at once. Programs get 320, and move what is there without waiting for more.

With copy engines, waits, copies from peers and a rank's own copies have a stream each: a copy takes 15 us to start
after a kernel, no time after another copy, and an own one before the next wait would hold up what the peers bring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from pyrocshmem import trace
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.row_copy import RowCopy
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives import row_blocks
from pyrocshmem.collectives.consumer import gate_launch
from pyrocshmem.stream_k.choice.completed import STEP_ELEMENTS
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.local_gemm.product import Product

# Streams beside those of `stream_k.ops.rows`.
WAITS, _PULLS, _OWN = 4, 5, 6


# Steps that a large result has at most, about: each costs the host a launch and a copy from every rank.
_STEPS = 16


class Block(NamedTuple):
    """What a step brings. rows: [first, last) of its tile rows; columns: of its tile columns; tiles: of the tiles to
    wait for, by number, which may be more."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    tiles: tuple[int, int]

    def place(self, config: Config, M: int, N: int) -> tuple[int, int, tuple[int, int]]:
        """(row, column, shape) of it in a matrix [M, N], whose last tiles may be cut off, or not be there."""
        (top, bottom), (left, right) = self.rows, self.columns
        top, bottom = min(top * config.block_m, M), min(bottom * config.block_m, M)
        left, right = min(left * config.block_n, N), min(right * config.block_n, N)
        return top, left, (bottom - top, right - left)


def blocks_of(
    tiles_m: int, tiles_n: int, chunk: int, group: int, tile: int, cut: bool = True
) -> Iterator[Block]:
    """The steps in which `tiles_m` x `tiles_n` tiles of `tile` elements are fetched that come in groups of `group` tile
    rows, column by column: `chunk` tile rows each, the columns of which are cut into about equal parts where one group
    has just these rows. cut: False where they are not."""
    most = max(STEP_ELEMENTS // tile, tiles_m * tiles_n // _STEPS, 1)
    for first in range(0, tiles_m, chunk):
        rows = first, min(first + chunk, tiles_m)
        parts = 1
        if cut and _is_group(rows, tiles_m, group):
            fewest = 2 if chunk >= tiles_m else 1  # or nothing would overlap
            parts = max(fewest, round((rows[1] - first) * tiles_n / most))
        width = max(1, -(-tiles_n // parts))
        for left in range(0, tiles_n, width):
            columns = left, min(left + width, tiles_n)
            yield Block(rows, columns, tiles_of(rows, columns, tiles_m, tiles_n, group))


def tiles_of(
    rows: tuple[int, int], columns: tuple[int, int], tiles_m: int, tiles_n: int, group: int
) -> tuple[int, int]:
    """Numbers [first, last) of tiles that a step of these tile rows and columns waits for: all columns of whole groups,
    but where one group has just these rows."""
    begin, end = rows[0] // group * group, min(-(-rows[1] // group) * group, tiles_m)
    left, right = columns if _is_group(rows, tiles_m, group) else (0, tiles_n)
    before, height = begin * tiles_n, end - begin
    return before + height * left, before + height * right


def _is_group(rows: tuple[int, int], tiles_m: int, group: int) -> bool:
    first, last = rows
    return first % group == 0 and last == min(first + group, tiles_m)


class Pull(NamedTuple):
    """A step. arguments: of the launch that announces it and, for copies, waits for the peers'. copies: from the peers.
    own: from this rank."""

    arguments: tuple[Any, ...]
    copies: Sequence[RowCopy] = ()
    own: Sequence[RowCopy] = ()


class Programs:
    """`collectives.row_blocks.pull_kernel` for all steps of a plan, behind a gate that keeps the GEMM's multiprocessors
    for it. columns: of this rank, on the heap; flags: words of the steps, of step_rows each."""

    def __init__(
        self,
        op: int,
        product: Product,
        workspace: Workspace,
        columns: torch.Tensor,
        flags: torch.Tensor,
        step_rows: int,
    ) -> None:
        config, world = product.config, workspace.world_size
        constants = {"OP": op, "WORLD": world, "ROWS": config.comm_rows, "COLS": config.block_n}
        self._gate = gate_launch(op, world)
        self._pull = Launch(row_blocks.pull_kernel, config.num_comm_programs, constants, config.comm_warps, 1)
        self._columns, self._context, self._problem = columns, workspace.context, product.packed_problem
        self._steps = (product.M, product.N, step_rows, flags)

    def _arguments(self, out: torch.Tensor) -> tuple[Any, ...]:
        return (self._columns, out, out.stride(0), *self._steps, self._context)

    def compile(self, out: torch.Tensor) -> None:
        """Compile and load both kernels, for results like `out`."""
        self._gate.compile((self._context, self._problem))
        self._pull.compile(self._arguments(out))

    def __call__(self, out: torch.Tensor) -> None:
        self._gate((self._context, self._problem))
        self._pull(self._arguments(out))


class Pulls:
    """The steps of a plan. launch: what announces one. programs: what pulls; None: copy engines, which take `together`
    steps from one peer before they turn to the next."""

    def __init__(
        self,
        workspace: Workspace,
        launch: Launch,
        steps: Sequence[Pull],
        programs: Programs | None = None,
        together: int = 1,
    ) -> None:
        self.workspace, self.launch, self.steps, self.programs = workspace, launch, steps, programs
        self.together = together

    def compile(self, out: torch.Tensor) -> None:
        if self.programs is not None:
            self.programs.compile(out)

    def fork(self) -> None:
        """What comes next on the current stream is beside the pulls."""
        self.workspace.fork(WAITS)
        if self.programs is not None:
            self.workspace.fork(_PULLS)

    def into(self, out: torch.Tensor) -> None:
        """Enqueue the pulls into `out`, from where `fork` was on, and join the current stream: each step's launch on
        one stream, what the peers bring on another, own copies on a third.

        To be called after all that the peers wait for, which on the CPU target has then run, and on a GPU lies before
        it in every queue that streams may share.
        """
        workspace = self.workspace
        with workspace.beside(WAITS):
            for first in range(0, len(self.steps), self.together):
                steps = self.steps[first : first + self.together]
                for step in steps:
                    self.launch(step.arguments)
                    if self.programs is None:
                        workspace.fork(_PULLS)
                    self._copy(step.copies[:1], out)
                    if step.own:
                        workspace.fork(_OWN)
                        self._copy(step.own, out, _OWN)
                for turn in range(1, max(len(step.copies) for step in steps)):
                    for step in steps:
                        self._copy(step.copies[turn : turn + 1], out)
            if self.programs is not None:
                with workspace.beside(_PULLS):
                    self.programs(out)
            workspace.join(_PULLS)
            if any(step.own for step in self.steps):
                workspace.join(_OWN)
        workspace.join(WAITS)

    def _copy(self, copies: Sequence[RowCopy], out: torch.Tensor, side: int = _PULLS) -> None:
        with self.workspace.beside(side):
            for copy in copies:
                trace.copy(copy, out)
