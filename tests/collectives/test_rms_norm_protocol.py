"""The protocol of `collectives.rms_norm`: late and missing ranks, graphs, threads on GPUs; each guard's control."""

import threading
import time
from typing import Any

import pytest
import torch

from pyrocshmem import (  # before Triton
    Heap,
    RanksFailed,
    collectives,
    interpreter,
    message,
    note,
    signal,
    spawn_threads,
    target,
)
from pyrocshmem.collectives import row_sums

import triton  # isort: skip
import triton.language as tl

from pyrocshmem.calls.workspace import Workspace
from tests.collectives.norm_rows import BF16, EPS, F32, HEAP_BYTES, TIMEOUT_S, Rows, on_process, run
from tests.ranks import run_ranks, values

TIER = 2
DELAY_S, HESITATION_S = 0.02, 0.2
_this = threading.local()


@pytest.fixture
def hesitant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank hesitates between hearing of its last sums and normalizing. In the interpreter only, whose kernels
    look their helpers up each time."""
    honest = row_sums.receive

    def late(
        block: Any, notes: Any, number: Any, M: Any, deadline: Any, context: Any, rows: Any, *more: Any
    ) -> Any:
        found = honest(block, notes, number, M, deadline, context, rows, *more)
        if getattr(_this, "hesitates", False) and (int(block) + 1) * int(rows) >= int(M):
            interpreter.pass_on(HESITATION_S)
        return found

    if target.interpreted():
        monkeypatch.setattr(row_sums, "receive", late)


def late_ranks(group: Any, calls: int, wait_seconds: float) -> int:
    """Calls with data of their own, in turn a rank that is late; how many came out wrong."""
    wrong = 0
    with Heap(HEAP_BYTES, group) as heap:
        workspace = Workspace(heap, wait_seconds=wait_seconds)
        _this.hesitates = heap.rank == heap.world_size - 1
        out = heap.empty(19, 34)
        for call in range(calls):
            rows = Rows.random(heap, 19 - call % 2, 34, (F32, F32, None, F32), call)
            replicated = call % 3 > 0
            if call % heap.world_size == heap.rank:
                time.sleep(DELAY_S)
            into = out[: rows.x.shape[0]].fill_(float("nan")) if replicated else None
            found, _ = rows.call(replicated, workspace=workspace, out=into)
            wrong += bool(rows.wrong(found, None, replicated))
            # Nobody poisons what peers of this call still write.
            heap.vote("next")
    return wrong


@pytest.mark.num_ranks(2)
@pytest.mark.usefixtures("hesitant")
def test_late_ranks() -> None:
    assert run(late_ranks, 2, 7, 30.0) == [0, 0]


@triton.jit
def any_number(pointer, number, mask):
    """`note._missing` as it must not be: sums of two calls ago look like today's."""
    return tl.where(mask & (signal.load_now(pointer) >> 32 == message.SENTINEL), 1, 0)


@triton.jit
def seen_at_once(flags, mask, epoch, tiles, peers, context, OP: tl.constexpr, WORLD: tl.constexpr):
    """`signal.wait` as it must not be."""
    return True


@pytest.mark.parametrize(
    ("module", "name", "plant"),
    [(note, "_missing", any_number), (signal, "wait", seen_at_once)],
    ids=["numbers", "done"],
)
@pytest.mark.cpu
@pytest.mark.usefixtures("hesitant")
def test_without_a_guard_late_ranks_are_noticed(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, plant: Any
) -> None:
    """The controls of the test above: the plants work in the interpreter, for all threads."""
    monkeypatch.setattr(module, name, plant)
    assert sum(run(late_ranks, 2, 7, 30.0)) > 0


def missing_rank(group: Any) -> None:
    with Heap(HEAP_BYTES, group) as heap:
        workspace = Workspace(heap, wait_seconds=20.0)
        rows = Rows.random(heap, 3, 16, (F32, F32, None, F32), 0)
        rows.call(False, workspace=workspace)
        workspace.control[int(signal.BUDGET_US.value)] = 500_000
        if heap.rank == 0:
            rows.call(False, workspace=workspace)
            heap.synchronize()
        heap.vote("over")


@pytest.mark.cpu
def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(RanksFailed) as caught:
        run(missing_rank, 2)
    assert "rms_norm" in str(caught.value)
    assert "rank 1" in str(caught.value.__cause__)


def overtaken(group: Any) -> list[bool]:
    """Of two calls, one that comes as soon as the other has let the workspace go: whether each was right."""
    with Heap(HEAP_BYTES, group) as heap:
        workspace = Workspace(heap, wait_seconds=30.0)
        both = [Rows.random(heap, 5, 24, (F32, F32, None, F32), seed) for seed in (1, 2)]
        honest, found = Workspace._end, []

        def free(*arguments: Any) -> None:
            honest(*arguments)
            with pytest.MonkeyPatch.context() as plant:
                plant.setattr(Workspace, "_end", honest)
                if not found:
                    found.append(both[1].call(True, workspace=workspace)[0])

        both[0].call(True, workspace=workspace)
        with pytest.MonkeyPatch.context() as plant:
            plant.setattr(Workspace, "_end", free)
            found.append(both[0].call(True, workspace=workspace)[0])
        return [not rows.wrong(out, None, True) for rows, out in zip(reversed(both), found, strict=True)]


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_a_result_is_copied_before_the_workspace_is_free() -> None:
    assert values(run_ranks(on_process, 2, overtaken, timeout=60.0)) == [[True, True]] * 2


def captured(group: Any) -> list[str]:
    """Calls of both kinds in a CUDA graph, replayed with data of their own; what came out wrong."""
    wrong = []
    with Heap(HEAP_BYTES, group) as heap:
        shape, mix = (9, 52), (BF16, BF16, BF16, BF16)
        x, weight, residual = Rows.random(heap, *shape, mix, 0).mine
        options = {"group": heap, "residual": residual, "hidden": 52}

        def norms() -> list[tuple[torch.Tensor, torch.Tensor]]:
            return [
                collectives.rms_norm(x, weight, EPS, replicated=each, **options) for each in (False, True)
            ]

        norms()
        heap.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = norms()
        for seed in range(1, 6):
            rows = Rows.random(heap, *shape, mix, seed)
            for static, fresh in zip((x, weight, residual), rows.mine, strict=True):
                static.copy_(fresh)
            for out, updated in found:
                out.fill_(float("nan"))
                updated.fill_(float("nan"))
            if seed % heap.world_size == heap.rank:
                time.sleep(DELAY_S)
            graph.replay()
            heap.synchronize()
            for replicated, (out, updated) in enumerate(found):
                if problem := rows.wrong(out, updated, bool(replicated)):
                    wrong.append(f"replay {seed}, {replicated}: {problem}")
    return wrong


@pytest.mark.num_gpus(2)
def test_in_a_graph() -> None:
    assert run(captured, 2) == [[], []]


@pytest.mark.num_gpus(2)
def test_threads_on_gpus() -> None:
    """As processes, and the same kernels: each thread's on its GPU."""
    assert spawn_threads(late_ranks, 2, 7, 30.0, timeout=TIMEOUT_S) == [0, 0]
