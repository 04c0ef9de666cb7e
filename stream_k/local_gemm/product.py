"""The GEMM part of every op: its schedule, its constants and its arguments, prepared once for operands of one
kind."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch

from pyrocshmem import counts, target
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.tensors import (
    COLUMN,
    MASKED,
    POINTER,
    ROW,
    as_argument,
    filled,
    how_to_read,
    of_rows,
    rows_held,
    strides_by_pointer,
    template,
)
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives.order import Problem
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.signal import Context
from pyrocshmem.stream_k.choice.config import Config, changed, of_kernels
from pyrocshmem.stream_k.local_gemm.aligned_copies import Copies, rows_cost_more, worth_a_copy
from pyrocshmem.stream_k.local_gemm.gemm_kernel import gemm_kernel
from pyrocshmem.stream_k.local_gemm.kernel import Arrived, nothing, stream_k_kernel
from pyrocshmem.stream_k.local_gemm.mainloop import Along, Strides
from pyrocshmem.stream_k.local_gemm.scales import (
    BLOCKS,
    TILES,
    Operand,
    Scaled,
    Scheme,
    data_of,
    placed,
    promoted,
    with_data,
)
from pyrocshmem.stream_k.local_gemm.schedule import Schedule, make_schedule
from pyrocshmem.target import num_sms

Order = Literal["", "PEERS", "GATHERS", "SUMS"]

# Peers' terms of an element, in bytes, up to which quarters of a tile leave registers for its sum (docs/log.md).
_QUARTERS_BYTES = 8
# Registers of a thread for the sums of a tree of blocks of K: of `gemm_kernel`, whose epilogue needs others, and of
# `stream_k_kernel`. With more, the assembler runs the wgmmas of a step one by one: a GEMM took 3 to 5 times as long.
TREE_REGISTERS_ALONE, TREE_REGISTERS = 128, 192
# What loops over several blocks of K stage in shared memory, which has room for an epilogue beside it.
_STAGED_BYTES, _MOST_STAGES = 192 << 10, 8
# Of an sm_90 multiprocessor's 65,536 registers, those that a helper of 4 warps and 32 registers a thread leaves.
_BESIDE_A_HELPER = 65_536 - 4_096


@dataclass(frozen=True)
class Product:
    """a [M, K] x b [K, N] under `config`, on the programs that `schedule` says.

    a_how, b_how: how the operands are read, a_template, b_template: their arguments but for the tensors.
    strides: as `strides_by_pointer` gives them. copies: of operands that are read elsewhere; None:
    both are read where they are.
    comm_programs: programs beside those of the schedule. subtiles: column parts of a tile. element_size: of the
    operands, in bytes. scheme: of their scales; None: they have none. shared, alike: what plans share, where products
    of this key differ in rows and schedules alone; None: they share nothing.
    """

    M: int
    N: int
    K: int
    config: Config
    schedule: Schedule
    a_how: int
    b_how: int
    a_template: Any
    b_template: Any
    strides: Strides
    precision: str
    comm_programs: int
    subtiles: int
    copies: Copies | None
    element_size: int
    scheme: Scheme | None = None
    shared: dict[Hashable, Any] | None = None
    alike: Hashable = None

    @property
    def split(self) -> bool:
        """Whether any tile is shared between programs, so that the fix-up is compiled in."""
        return self.schedule.has_shared_tiles

    @property
    def separate(self) -> bool:
        """Whether the parts of its tiles are for a second kernel to add, where the op has one."""
        return self.split and self.config.split == "separate"

    @property
    def replayable(self) -> bool:
        """Whether a graph of a call can be replayed: not where operands are copied to new memory each time."""
        return self.copies is None or self.copies.kept

    @cached_property
    def packed_problem(self) -> Problem:
        """The `problem` argument of all kernels but `gemm_kernel`, which has its numbers one by one."""
        return self.problem.packed()

    @cached_property
    def problem(self) -> Problem:
        """The sizes and the schedule."""
        plan = self.schedule
        split = (plan.num_split_tiles, plan.num_split_programs, plan.cohort) if self.split else (0, 0, 1)
        return Problem(
            self.M, self.N, self.K, plan.iters_per_tile, *split, plan.num_programs, self.config.group_m
        )

    def of_rows(self, M: int, a: torch.Tensor) -> Product:
        """That of so many rows in as many tiles, where A lies in rows and is not copied. a: the operand."""
        problem = self.packed_problem._replace(M=counts.packed(M))
        made = changed(self, M=M, a_template=of_rows(self.a_template, a, self.a_how), packed_problem=problem)
        made.__dict__.pop("problem", None)
        return made

    @property
    def part_n(self) -> int:
        """Columns of one part of a tile."""
        return self.config.block_n // self.subtiles

    @property
    def _scaled(self) -> tuple[int, bool]:
        """`scaled` and `promoted` of `Along`."""
        if self.scheme is None:
            return 0, False
        return BLOCKS if self.scheme.recipe == "blockwise" else TILES, promoted(self.scheme)

    def launch(
        self,
        op: int,
        world_size: int,
        epilogue: Any,
        options: Any,
        *,
        announce: Any = None,
        consumer: Any = None,
        lag: int = -1,
        order: Order = "",
        alone: bool = False,
        flatten: bool = True,
        once: bool = False,
    ) -> Launch:
        """The launch of `stream_k_kernel` for this product; the arguments are `stream_k.local_gemm.kernel`'s. order:
        of rows, one of the three there; "": from top to bottom. alone: of `gemm_kernel` instead, which may be made
        ready while the launch before it ends: nothing communicates, and parts for a second kernel are left to it.
        flatten: whether tiles overlap, where the configuration says so. The call ends with it where it consumes; or
        alone, if a fix-up counts the calls. once: for `Launch.compile_once`: the same one for all products that are
        alike, with arguments of the same kinds."""
        grid = self.schedule.num_programs + self.comm_programs
        chained = order == "SUMS" or (alone and not self._wants_neighbours)
        key = op, world_size, epilogue, options, announce, consumer, lag, order, alone, flatten, grid, chained
        shared = self.shared if once else None
        if shared is not None and (self.alike, key) in shared:
            return shared[self.alike, key]
        config, separate = self.config, alone and self.separate
        together, stages = self._side_by_side(TREE_REGISTERS_ALONE if alone else TREE_REGISTERS)
        constants = {
            "EPILOGUE": epilogue,
            "ANNOUNCE": announce,
            "CONSUMER": consumer if consumer is not None else nothing,
            "OPTIONS": options,
            "OP": op,
            "WORLD": world_size,
            "LAG": lag,
            "ENDS": consumer is not None or (alone and self.split and not separate),
            "PEERS": order == "PEERS",
            "GATHERS": order == "GATHERS",
            "SUMS": order == "SUMS",
            "SPLIT": self.split,
            "SEPARATE": separate,
            "A_HOW": self.a_how,
            "B_HOW": self.b_how,
            "ALONG": Along(self.precision, config.k_blocks, together, *self._scaled),
            # Flattened, Triton reads the last promoted product of a tile while it is being made.
            "FLATTEN": config.flatten and flatten and config.k_blocks == 1 and not self._scaled[1],
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "SUBTILES": self.subtiles,
        }
        kernel = gemm_kernel if alone else stream_k_kernel
        # Of 8 warps 240: Triton 3.8 and 3.9 take up to 255 for sums, where 3.6 takes 184.
        most = _BESIDE_A_HELPER // (32 * config.num_warps) if order == "SUMS" else 0
        made = Launch(kernel, grid, constants, config.num_warps, stages, chained, most)
        if shared is not None:
            shared[self.alike, key] = made
        return made

    def _side_by_side(self, registers: int) -> tuple[int, int]:
        """(blocks of K that grow in one loop, its stages): as many as there are registers of a thread for their sums,
        and for those that wait, and room for three stages."""
        config, together = self.config, 1
        staged = (config.block_m + config.block_n) * config.block_k * self.element_size
        each = config.block_m * config.block_n // (32 * config.num_warps)
        while together < config.k_blocks and self.element_size < 4:
            more = 2 * together
            waiting = (config.k_blocks // more).bit_length() - 1
            if (more + waiting) * each > registers or 3 * more * staged > _STAGED_BYTES:
                break
            together = more
        if together == 1:
            # A turn of promoted products has two steps.
            return 1, max(2, config.num_stages // 2) if self._scaled[1] else config.num_stages
        return together, min(_MOST_STAGES, _STAGED_BYTES // (together * staged))

    @property
    def _wants_neighbours(self) -> bool:
        """Whether programs that follow one another should run side by side: they read the same columns of B, which
        neighbours get from L2 at once. In an early launch each takes the place of whichever program ends. Where tiles
        are small and K is long that costs up to a third of the time, elsewhere less than a late launch (H200); behind a
        copy places are free."""
        config = self.config
        small = config.block_m * config.block_n < 128 * 128
        return small and self.schedule.tiles_m > 1 and self.K >= 2048 and self.copies is None

    def fix_up(self, workspace: Workspace) -> tuple[Any, torch.Tensor]:
        """(fix-up tiles, their flags) of `workspace`, one a program; dummies where no tile is split, which are no
        descriptors: each of those costs a launch some 2 us of host time."""
        config = self.config
        programs = self.schedule.workspace_tiles if self.split else 0
        rows = max(programs, 1) * config.block_m
        tiles = workspace.buffer("fix-up", rows * config.block_n, torch.float32, local=True)
        flags = workspace.buffer("fix-up flags", max(programs, 1), torch.int32, local=True)
        if not self.split:
            return tiles, flags
        tiles = tiles[: rows * config.block_n].view(rows, config.block_n)
        return as_argument(tiles, how_to_read(tiles), config.block_m, self.part_n), flags

    def readable(self, a: Operand, b: Operand) -> tuple[Operand, Operand]:
        """Before the launch of a call, on its stream: `a` and `b`, or copies, which are enqueued, for `operands`."""
        if self.copies is None:
            return a, b
        x, y = self.copies.run(data_of(a), data_of(b))
        return with_data(a, x), with_data(b, y)

    def operands(self, a: Operand, b: Operand) -> tuple[Any, Any, Strides]:
        """`a` and `b`, of the kind that this was planned for, or what `readable` made of them, and how they are read,
        as the kernel gets them."""
        if isinstance(a, Scaled):
            strides = self.strides_of(a, b)
            return filled(self.a_template, a.data), filled(self.b_template, data_of(b)), strides
        return filled(self.a_template, a), filled(self.b_template, b), self.strides

    def strides_of(self, a: Operand, b: Operand) -> Strides:
        """How operands of these kinds are read, and where the scales of these are."""
        if self.scheme is None:
            return self.strides
        return self.strides._replace(**placed(a, b, self.scheme.recipe))

    def arguments(
        self,
        a: Operand,
        b: Operand,
        c: Any,
        fix_up: tuple[Any, torch.Tensor],
        extra: Any,
        context: Context,
        gathered: Any = None,
        arrived: Arrived | None = None,
    ) -> tuple[Any, ...]:
        """Those of `stream_k_kernel`. a, b: as for `operands`; fix_up: as `fix_up` gives it; the others are the
        kernel's."""
        x, y, strides = self.operands(a, b)
        return x, gathered, y, c, *fix_up, arrived, extra, context, self.packed_problem, strides


def make_product(
    a: torch.Tensor,
    b: torch.Tensor,
    config: Config,
    allow_tf32: bool,
    comm_programs: int = 0,
    *,
    stores_fp32: bool = False,
    peer_bytes: int = 0,
    longest_k: int = 0,
    num_rows: int | None = None,
    row_blocks: int = 0,
    num_blocks: int | None = None,
    keeps_a: bool = False,
    workspace: Workspace | None = None,
    scheme: Scheme | None = None,
    alike: Hashable = None,
) -> Product:
    """Plan a [M, K] x b [K, N], none of them 0, both checked.

    comm_programs: how many of the device's programs are left to a consumer. stores_fp32: the epilogue stores
    fp32 tiles. peer_bytes: what all peers' terms take that it adds to an element.
    longest_k: K of the rank that has most of it: all run that rank's schedule, and what they have less of
    reads as zeros. num_rows: M, where `a` has only some of the rows. row_blocks: how many blocks the rows are cut
    into, of whole tiles each; 0: one matrix. num_blocks: how many of them are computed; None: all.
    keeps_a: A is not copied, whatever its layout. workspace: of the calls; None: they may overlap. scheme: of
    8-bit operands, as `Product` has it. alike: the same for calls of the workspace that differ in rows and
    configurations alone, whose products share what depends on neither; None: nothing is shared. Raises ValueError when
    no program is left for the GEMM.
    """
    M, K, N = a.shape[0] if num_rows is None else num_rows, a.shape[1], b.shape[1]
    rows = _rows_of_tiles(M, row_blocks, num_blocks, config.block_m)
    schedule = schedule_of(config, rows, N, max(K, longest_k), a.device, comm_programs)
    # Parts of fp32, of a fix-up too, are made narrow enough to fit beside the stages in shared memory.
    fp32_parts = stores_fp32 or schedule.has_shared_tiles
    subtiles = config.subtiles
    if fp32_parts and config.block_n >= 256:
        subtiles = 8 if peer_bytes > _QUARTERS_BYTES else 4
    # Where there is no tf32 (16-bit operands; gfx950) compilers refuse the word: full precision is always right.
    tf32 = allow_tf32 and ELEMENTS[a.dtype].tf32 and target.backend() != "hip"
    precision = "tf32" if tf32 else "ieee"
    if K % config.k_blocks:
        raise ValueError(f"Config.k_blocks is {config.k_blocks}, which K = {K} is no multiple of")
    a, b, a_how, b_how, copies = _as_read(a, b, config, schedule, M, row_blocks, keeps_a, workspace)
    if config.k_blocks > 1 and K // config.k_blocks % config.block_k:
        # A block of K ends inside a step, where descriptors would go on reading.
        a_how, b_how = POINTER, POINTER
    shared = None if alike is None or workspace is None or copies is not None else workspace.plans.shared
    # All of a product that depends on neither rows nor schedule.
    key = alike, of_kernels(config), a_how, b_how, schedule.has_shared_tiles, subtiles, comm_programs
    found = None if shared is None else shared.get(key)
    if found is not None:
        a_template = of_rows(found.a_template, a, a_how)
        return changed(found, M=M, config=config, schedule=schedule, a_template=a_template)
    strides = Strides(*strides_by_pointer(a, a_how), *strides_by_pointer(b, b_how))
    made = Product(
        M,
        N,
        K,
        config,
        schedule,
        a_how,
        b_how,
        template(a, a_how, config.block_m, config.block_k),
        template(b, b_how, config.block_k, config.block_n),
        strides,
        precision,
        comm_programs,
        subtiles,
        copies,
        a.element_size(),
        scheme,
        shared,
        key,
    )
    if shared is not None:
        shared[key] = changed(made)  # a copy: it is given to no plan, whose products know more
    return made


def _rows_of_tiles(M: int, row_blocks: int, num_blocks: int | None, block_m: int) -> int:
    """M; of blocks, the rows of all their tiles, which begin anew in each."""
    if not row_blocks:
        return M
    blocks = row_blocks if num_blocks is None else num_blocks
    return blocks * tiles_of_block(M, row_blocks, block_m) * block_m


def _as_read(
    a: torch.Tensor,
    b: torch.Tensor,
    config: Config,
    schedule: Schedule,
    num_rows: int,
    row_blocks: int,
    keeps_a: bool,
    workspace: Workspace | None,
) -> tuple[torch.Tensor, torch.Tensor, int, int, Copies | None]:
    """(a, b, how each is read, copies): the operands, or what is read in their place. The arguments are
    `make_product`'s."""
    a_how, b_how = how_to_read(a), how_to_read(b)
    # Whether no descriptor reads columns of A, whose blocks begin anywhere.
    by_rows = a_how != ROW and not _blocks_are_aligned(num_rows, row_blocks, a.element_size())
    if a_how == COLUMN and by_rows:
        a_how = POINTER
    copies_a, copies_b = worth_a_copy(a, a_how) and not keeps_a, worth_a_copy(b, b_how)
    # Blocks of rows end where the next ones begin.
    tile_rows = 0 if row_blocks or keeps_a else schedule.tiles_m * config.block_m
    keep: Callable[[int], torch.Tensor] | None = None
    if a_how == ROW and tile_rows > a.shape[0]:
        if rows_held(a) >= tile_rows:
            a = a.as_strided((tile_rows, a.shape[1]), a.stride())
        elif _better_masked(a, config, schedule):
            a_how = MASKED
        else:
            copies_a = rows_cost_more(a, b, tile_rows, schedule.tiles_n)
            if workspace is not None and not copies_b:
                # A workspace of a fixed size has none to spare, and none grows under capture.
                captured = a.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
                copies_a &= workspace.nbytes is None and not captured
                keep = partial(_rows_in, workspace, a.dtype)
    if not (copies_a or copies_b):
        return a, b, a_how, b_how, None
    room = (tile_rows, schedule.tiles_n * config.block_n)
    copies = Copies(a if copies_a else None, b if copies_b else None, by_rows, room, keep)
    a, b = copies.examples(a, b)
    return a, b, how_to_read(a) if copies_a else a_how, how_to_read(b), copies


def _rows_in(workspace: Workspace, dtype: torch.dtype, size: int) -> torch.Tensor:
    return workspace.buffer(f"{size} elements of A", size, dtype, local=True)


# Columns of tiles times K from which zeros cost more than pointers do: 0.3 us less at 262,144, 1.5 us more at 917,504.
_MASKED_FROM = 1 << 19


def _better_masked(a: torch.Tensor, config: Config, schedule: Schedule) -> bool:
    """Whether `a`, whose rows fill no tile, is read faster as MASKED, on H200 (docs/log.md): where many tiles, of 16
    rows, ask for zeros, if it is read 16 bytes at a time."""
    K = a.shape[1]
    fits = config.block_m == 16 and config.block_n >= 64 and target.backend() == "cuda"
    # Of each of whose blocks pointers would fetch a short piece: 1.84 of the default's time, where TMA takes 1.13.
    tree = config.k_blocks > 1
    return (
        fits
        and not tree
        and schedule.tiles_n * K >= _MASKED_FROM
        and not ELEMENTS[a.dtype].wide
        and a.stride(0) % 16 == 0
        and schedule.iters_per_tile * config.block_k == K
    )


def _blocks_are_aligned(num_rows: int, row_blocks: int, element_size: int) -> bool:
    """Whether all blocks of rows start at multiples of 16 bytes of a column, where a descriptor may read from."""
    starts = (
        block * (num_rows // row_blocks) + min(block, num_rows % row_blocks) for block in range(row_blocks)
    )
    return all(start * element_size % 16 == 0 for start in starts)


def tiles_of_block(num_rows: int, row_blocks: int, block_m: int) -> int:
    """Tile rows of the largest of `row_blocks` blocks of rows: `collectives.order.block_tiles` on the host."""
    largest = -(-num_rows // row_blocks)
    return -(-largest // block_m)


def schedule_of(
    config: Config, M: int, N: int, K: int, device: torch.device, comm_programs: int = 0
) -> Schedule:
    """The schedule under `config` on `device`, `comm_programs` of whose programs are left to a consumer.
    ValueError when none is left."""
    programs = (config.num_programs or num_sms(device)) - comm_programs
    if programs < 1:
        raise ValueError(
            f"{programs + comm_programs} programs, of which {comm_programs} consume beside the GEMM: "
            "none is left for it"
        )
    blocks = (config.block_m, config.block_n, config.block_k)
    return make_schedule(M, N, K, *blocks, programs, split=config.split, group_m=config.group_m)
