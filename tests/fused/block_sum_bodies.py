"""What ranks do in the tests of sums of blocks that the BLAS multiplies (`collectives.block_sums`)."""

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

from pyrocshmem import Heap, signal, stream_k
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives import block_sums
from pyrocshmem.errors import ShmemError
from tests.fused.block_bodies import (
    CANARY,
    LONG_S,
    SHORT_S,
    blocks_came_at_once,
    keep_back,
    keep_back_copies,
    wait_until,
)
from tests.fused.cases import HEAP_BYTES
from tests.stream_k.products import integers, small_config

CONFIG = small_config(placement="blas_blocks")


@triton.jit
def came_but_for_aborts(flags, number, context, epoch, OP: tl.constexpr, WORLD: tl.constexpr):
    """`block_sums._came` as it must not be: it heeds no abort."""
    lanes = tl.arange(0, signal.MAX_WORLD)
    peers = (lanes < WORLD) & (lanes != tl.load(context.control + signal.RANK))
    return signal.wait(signal.word(flags, number, lanes), peers, epoch, number, lanes, context, OP, WORLD)


def sums_without_partials(rank: int, world_size: int, op: str, sent: bool, heeds: bool) -> int:
    """Elements of rank 0's result that are written though rank 1 has not announced its partials, or, sent, announced
    them after it had given up; -1: no fault, though it heeds them."""
    if not heeds:
        block_sums._came = came_but_for_aborts if sent else blocks_came_at_once
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=LONG_S)
        a, b = integers(151, 24, torch.float32, rank), integers(24, 70, torch.float32, 2 + rank)
        out = torch.zeros(76 - rank if op == "gemm_reduce_scatter" else 151, 70)
        options: dict[str, Any] = {"group": heap, "config": CONFIG, "workspace": workspace, "out": out}
        getattr(stream_k, op)(a, b, **options)
        heap.vote("planned")
        (plan,) = workspace.plans.values()
        if rank == 1 and not sent:
            keep_back_copies(plan)
        if rank == sent:
            workspace.control[int(signal.BUDGET_US.value)] = int(SHORT_S * 1e6)
        if rank == 0 and sent:
            # Rank 1 waits in vain for this one to enter the call, and sends what it has.
            wait_until(lambda: int(plan.flags[1]) == workspace.epoch() + 1, LONG_S / 2)
        out.fill_(CANARY)
        try:
            if rank == 0 and sent:
                # As if it had entered before that gave up: a call that begins later is refused.
                plan.run(a, b, None, out)
            else:
                getattr(stream_k, op)(a, b, **options)
            heap.vote("done")
        except ShmemError:
            pass
        else:
            if heeds:
                return -1
        return int((out != CANARY).sum())


def rows_without_word(rank: int, world_size: int, waits: bool, first: bool) -> list[int]:
    """Elements of rank 1's rows that rank 0 has written though rank 1 has not announced its sums, or, first, those of
    its first rows: of its first rows, and of the others."""
    config = small_config(placement="blas_blocks", chunk=1)
    M, height = (151, config.block_m) if first else (40, 20)
    top = M - M // 2
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=LONG_S)
        a, b = integers(M, 24, torch.float32, rank), integers(24, 33, torch.float32, 2 + rank)
        out = torch.zeros(M, 33)
        options: dict[str, Any] = {"group": heap, "config": config, "workspace": workspace, "out": out}
        stream_k.gemm_all_reduce(a, b, **options)
        heap.vote("planned")
        if rank == 0:
            workspace.control[int(signal.BUDGET_US.value)] = int(SHORT_S * 1e6)
            if not waits:
                signal.wait = lambda *args, **more: True
        else:
            (plan,) = workspace.plans.values()
            keep_back_copies(plan, of_sums=True)
            if not first:
                keep_back(plan.flags[int(signal.MAX_WORLD.value) :])
        out.fill_(CANARY)
        with contextlib.suppress(ShmemError):
            stream_k.gemm_all_reduce(a, b, **options)
            heap.vote("done")
        return [int((rows != CANARY).sum()) for rows in (out[top : top + height], out[top + height :])]
