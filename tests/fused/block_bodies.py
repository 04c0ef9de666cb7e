"""Bodies of test_protocol.py: what goes wrong between ranks when a guard or a flag is missing.

The plants work in Triton's interpreter only, where a kernel looks its helpers up each time it calls them.
"""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from pyrocshmem import Heap, message, signal, stream_k
from pyrocshmem.calls.row_copy import RowCopy
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives import block_sums, row_blocks
from pyrocshmem.collectives.order import block_tiles
from pyrocshmem.errors import PeerAborted, PeerTimeout, ShmemError
from pyrocshmem.stream_k.ops.pulls import Programs
from pyrocshmem.stream_k.ops.summed_blocks import SummedBlocksPlan
from tests.fused.bodies import integer_call
from tests.fused.cases import HEAP_BYTES
from tests.stream_k.products import integers, small_config

AHEAD_S, SHORT_S, LONG_S, PAUSE_S = 0.75, 0.5, 20.0, 0.1
CALLS = 3
CANARY = 77.0
PLANTS = KEPT, ONE_SLOT, NEVER_EMPTIED = "kept", "one slot", "never emptied"
Way = tuple[str, str, str]


def wait_until(done: Callable[[], bool], seconds: float) -> None:
    """Or until they are over."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.005)


def without_entering() -> None:
    """From now on no step waits until the peers have entered the call before it writes into their buffers."""
    signal.wait_entered = lambda *args, **more: True


def ahead(
    rank: int, world_size: int, ops: list[str], placement: str, shape: tuple[int, int, int], guarded: bool
) -> int:
    """Rank 1 stalls before it reads what its peers have sent, until rank 0 has sent more in the next call, of the next
    of `ops`, or, where that is guarded against, `AHEAD_S` are over."""
    if not guarded:
        without_entering()
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=LONG_S)

        def wrong(seed: int, op: str) -> bool:
            # Of an all-scatter two tile rows, all that 40 rows have: it is the last step that a peer can overtake.
            config = small_config(placement=placement, chunk=2 if op == "all_scatter" else 1)
            return not integer_call(heap, seed, shape, config, workspace, op)

        count, stalled_in = sum(wrong(50, op) for op in ops), -1
        workspace.plans.clear()  # of which buffers that grew have left the last alone
        count += sum(wrong(60, op) for op in ops)

        def stalling(plan: Any, honest: Callable[..., None]) -> Callable[..., None]:
            # Of the first step of the next call. The call in progress is not counted yet.
            sent = int(signal.word(plan.flags.data_ptr(), 0, 0) - plan.flags.data_ptr())

            def late(*arguments: Any) -> None:
                nonlocal stalled_in
                patience = 0.0 if workspace.epoch() == last else AHEAD_S if guarded else LONG_S / 2
                overtaken = workspace.epoch() + 2
                if stalled_in != workspace.epoch():
                    wait_until(lambda: int(plan.flags[sent]) == overtaken, patience)
                stalled_in = workspace.epoch()
                honest(*arguments)

            return late

        for op, plan in zip(ops, workspace.plans.values(), strict=True):
            place, reader = {
                "all_gather": (plan, "gemm"), "reduce_scatter": (plan, "own_gemm")
            }.get(op, (Programs if placement == "pull" else RowCopy, "__call__"))  # fmt: skip
            if placement == "blas_blocks":
                # Of the peer's rows, or partials.
                place, reader = (plan.blocks[-1][-1], "run") if op == "all_gather" else (plan, "sum")
            honest = getattr(place, reader)
            if rank == 1:
                setattr(place, reader, stalling(plan, honest))
        last = workspace.epoch() + CALLS * len(ops) - 1  # nobody is a call ahead of that one
        count += sum(wrong(call, op) for call in range(CALLS) for op in ops)
        heap.vote("done")
    return count


@triton.jit
def came_at_once(
    tile, epoch, flags, step_tiles, context, problem, OP: tl.constexpr, WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`row_blocks._came` as it must not be: without the wait."""
    return tile >= 0


@triton.jit
def blocks_came_at_once(flags, number, context, epoch, OP: tl.constexpr, WORLD: tl.constexpr):
    """`block_sums._came` as it must not be: without the wait."""
    return epoch > 0


@triton.jit
def came_but_for_aborts(
    tile, epoch, flags, step_tiles, context, problem, OP: tl.constexpr, WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`row_blocks._came` as it must not be: only the tile that waits heeds a wait that gave up, and none an abort."""
    number = tile - (WORLD - 1) * block_tiles(problem.M, WORLD, BLOCK_M) * tl.cdiv(problem.N, BLOCK_N)
    came = number >= 0
    if number % step_tiles == 0:
        lanes = tl.arange(0, signal.MAX_WORLD)
        peers = (lanes < WORLD) & (lanes != tl.load(context.control + signal.RANK))
        words = signal.word(flags, number // step_tiles, lanes)
        came = signal.wait(words, peers, epoch, tile, lanes, context, OP, WORLD)
    return came


def late_partials(rank: int, world_size: int, op: str, placement: str, waits: bool) -> int:
    """Rank 1 is in the call, but sends its partials, or each step's, when rank 0 has made its sums, or, where these
    wait, can't."""
    if not waits:
        row_blocks._came, block_sums._came = came_at_once, blocks_came_at_once
    # By copy engines three steps of two tiles, one after another; groups of tile rows, left as they are, would mix two
    # steps.
    config = small_config(placement=placement, chunk=1, group_m=2, num_programs=1)
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=LONG_S)
        shape = (151, 40, 24)
        wrong = not integer_call(heap, 50, shape, config, workspace, op)
        (plan,) = workspace.plans.values()
        summed = heap.zeros(1, dtype=torch.int32)
        at_1 = heap.peer_view(summed, 1)
        by_blas = placement == "blas_blocks"
        sums = "sum" if by_blas else "own_gemm"
        sends = [(plan.blocks[0].gemm, "run")] if by_blas else [(plan, "enter"), (plan, "step")]
        honest = getattr(plan, sums)

        def telling(arguments: Any) -> None:
            number = workspace.epoch() + 1  # the sums may end the call
            honest(arguments)
            at_1.fill_(number)

        def late(send: Callable[..., None], *arguments: Any) -> None:
            number = workspace.epoch() + 1
            wait_until(lambda: int(summed) == number, PAUSE_S if waits else LONG_S / 2)
            send(*arguments)

        if rank == 0:
            setattr(plan, sums, telling)
        else:
            for place, name in sends:
                setattr(place, name, partial(late, getattr(place, name)))
        for call in range(CALLS if waits else 1):
            wrong += not integer_call(heap, call, shape, config, workspace, op)
        heap.vote("done")
    return wrong


def sums_without_partials(rank: int, world_size: int, sent: bool, heeds: bool) -> int:
    """Elements of rank 0's block that are written though rank 1 has not announced its partials, or, sent, has announced
    them after it had given up; -1: no fault. A single program does all tiles of a step: one waits, the others must know
    how that ended."""
    if not heeds:
        row_blocks._came = came_but_for_aborts
    config = small_config(placement="copy_engine", chunk=2, num_programs=1)
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=LONG_S)
        a, b = integers(151, 24, torch.float32, rank), integers(24, 70, torch.float32, 2 + rank)
        out = torch.zeros(76 - rank, 70)
        options: dict[str, Any] = {"group": heap, "config": config, "workspace": workspace, "out": out}
        stream_k.gemm_reduce_scatter(a, b, **options)
        heap.vote("planned")
        (plan,) = workspace.plans.values()
        own_gemm, last = plan.own_gemm, plan.flags[(len(plan.steps) - 1) * int(signal.MAX_WORLD.value) + 1 :]

        def when_sent(*arguments: Any) -> None:
            wait_until(lambda: int(last[0]) == workspace.epoch() + 1, LONG_S / 2)
            own_gemm(*arguments)

        if rank == 0 and sent:
            plan.own_gemm = when_sent
        elif rank == 1 and sent:
            keep_back(plan.tile_flags)
        elif rank == 1:
            keep_back(plan.flags)
        if rank == sent:
            workspace.control[int(signal.BUDGET_US.value)] = int(SHORT_S * 1e6)
        out.fill_(CANARY)
        try:
            stream_k.gemm_reduce_scatter(a, b, **options)
            heap.vote("done")
        except ShmemError:
            return int((out != CANARY).sum())
    return -1


def columns_without_word(rank: int, world_size: int, waits: bool) -> int:
    """Elements of rank 1's columns that a rank has pulled though rank 1 has not announced them."""
    config = small_config(placement="pull", chunk=1)
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=LONG_S)
        a, b = integers(40, 24, torch.float32, 1), integers(24, 33, torch.float32, 2 + rank)
        out = torch.zeros(40, 66)
        options: dict[str, Any] = {"group": heap, "config": config, "workspace": workspace, "out": out}
        stream_k.gemm_all_scatter(a, b, **options)
        heap.vote("planned")
        workspace.control[int(signal.BUDGET_US.value)] = int(SHORT_S * 1e6)
        if rank == 1:
            keep_back(workspace.flags(1))
        elif not waits:
            signal.wait = lambda *args, **more: True
        out.fill_(CANARY)
        with contextlib.suppress(ShmemError):
            stream_k.gemm_all_scatter(a, b, **options)
            heap.vote("done")
        return int((out[:, 33:] != CANARY).sum())


def rows_without_word(rank: int, world_size: int, waits: bool) -> list[int]:
    """Elements of rank 0's result that are written, by pieces of rank 1's rows, of which it announces the first one."""
    config = small_config(placement="copy_engine", chunk=1)
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=LONG_S)
        height = config.block_m
        a, b = integers(3 * height, 24, torch.float32, 1), integers(24, 33, torch.float32, 2)
        out = torch.zeros(6 * height, 33)
        options: dict[str, Any] = {"group": heap, "config": config, "workspace": workspace, "out": out}
        stream_k.all_gather_gemm(a, b, **options)
        heap.vote("planned")
        (plan,) = workspace.plans.values()
        workspace.control[int(signal.BUDGET_US.value)] = int(SHORT_S * 1e6)
        if rank == 1:
            plan.pieces[1:] = [(to, rows, torch.empty_like(flag)) for to, rows, flag in plan.pieces[1:]]
        elif not waits:
            signal.wait = lambda *args, **more: True
        out.fill_(CANARY)
        with contextlib.suppress(ShmemError):
            stream_k.all_gather_gemm(a, b, **options)
            heap.vote("done")
        return [int((rows != CANARY).sum()) for rows in out[3 * height :].split(height)]


def keep_back(words: torch.Tensor) -> None:
    """From now on flags that lie in `words` of this rank, or in its peers' at the same place, stay as they are."""
    honest = signal.publish
    first, last = words.data_ptr(), words.data_ptr() + 4 * words.numel()

    def silent(flag: Any, *args: Any, **more: Any) -> Any:
        places = flag.handle.data
        return None if ((places >= first) & (places < last)).all() else honest(flag, *args, **more)

    signal.publish = silent


def keep_back_copies(plan: Any, of_sums: bool = False) -> None:
    """From now on the flags that copy engines raise are raised nowhere; of_sums: those of sums alone."""
    if hasattr(plan, "pieces"):
        plan.pieces = [(to, rows, torch.empty_like(flag)) for to, rows, flag in plan.pieces]
    elif isinstance(plan, SummedBlocksPlan):
        plan.blocks = [
            block
            if of_sums and block.summed is None
            else block._replace(sent=[copy._replace(flag=torch.empty_like(copy.flag)) for copy in block.sent])
            for block in plan.blocks
        ]


def kept_back(rank: int, world_size: int, op: str, placement: str, name: str) -> tuple[str, str, int | None]:
    """Rank 1 announces nothing through the flags `name`: (error, op, peer) of this rank."""
    config = small_config(placement=placement)
    shape = (40, 33, 24)
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=LONG_S)
        assert integer_call(heap, 50, shape, config, workspace, op)
        if rank == 1 and name == "messages":
            message.push = lambda *args: None
        elif rank == 1:
            keep_back(workspace.buffer(name, 1, torch.int32, local=name == "local flags"))
            if name == "flags":
                keep_back_copies(*workspace.plans.values())
        # The local ones only rank 1 itself waits for.
        if rank == (1 if name == "local flags" else 0):
            workspace.control[int(signal.BUDGET_US.value)] = int(SHORT_S * 1e6)
        deadline = time.monotonic() + LONG_S / 2
        try:
            integer_call(heap, 1, shape, config, workspace, op)
            # A rank that got all it needed hears of it afterwards.
            while time.monotonic() < deadline:
                heap.check()
                time.sleep(0.01)
        except (PeerTimeout, PeerAborted) as error:
            return type(error).__name__, getattr(error, "op", ""), error.peer
        return "", "", None


@triton.jit
def only_slot(messages, slot_quads, number):
    """`message.slot_of` as it must not be."""
    return messages + message._HEAD


def messages_ahead(rank: int, world_size: int, ways: list[Way]) -> dict[str, dict[Way, int]]:
    """By plant and way (op, placement, algorithm): calls that were wrong or ended in a fault."""
    honest = message.restore, message.slot_of
    found: dict[str, dict[Way, int]] = {}
    for plant in PLANTS:
        message.slot_of = only_slot if plant == ONE_SLOT else honest[1]
        found[plant] = {way: _wrong_behind(way, plant, honest[0]) for way in ways}
    return found


def _wrong_behind(way: Way, plant: str, restore: Any) -> int:
    """Rank 1 empties its slot only when rank 0 has sent it what it has for the next call, or can't. Numbers of calls
    begin again meanwhile."""
    op, placement, algorithm = way
    config = small_config(placement=placement, algorithm=algorithm)
    message.restore = restore
    wrong = 0
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=LONG_S if plant == KEPT else SHORT_S)
        messages, _ = workspace.messages(0)
        own = messages[:1].fill_(int(message._LAST_NUMBER.value) - 2)
        ahead = heap.peer_view(own, 0)
        late = heap.rank == 1

        def behind(*quads: Any) -> None:
            if late:
                wait_until(lambda: bool(ahead != own), SHORT_S / 2)
            time.sleep(PAUSE_S if late else 0.0)
            restore(*quads)

        message.restore = behind if plant != NEVER_EMPTIED else lambda *args: None
        try:
            for call in range(2 + CALLS):
                time.sleep(PAUSE_S if late and plant == NEVER_EMPTIED else 0.0)
                wrong += not integer_call(heap, call, (40, 24, 24), config, workspace, op)
                heap.synchronize()
            heap.vote("done")
        except ShmemError:
            wrong += 1
    return wrong
