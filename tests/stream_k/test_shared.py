"""What the plans of a workspace share: launches of steps, and where peers have its buffers."""

import gc
from unittest import mock

import pytest
import torch

from pyrocshmem import Heap, blocks, stream_k
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.workspace import Workspace, workspace_for
from pyrocshmem.stream_k.ops.planned import on_all_ranks
from pyrocshmem.stream_k.ops.steps import step_launch
from pyrocshmem.testing.planning_heap import PlanningHeap
from tests.ranks import run_ranks, values
from tests.stream_k.products import integers, small_config

TIER = 1
pytestmark = pytest.mark.cpu

HEAP_BYTES = 16 << 20
N, K = 48, 40


def test_steps_of_a_workspace_are_compiled_once() -> None:
    space, other = (Workspace(PlanningHeap(2)) for _ in range(2))
    compiled = mock.Mock(return_value="machine code")
    with mock.patch.object(Launch, "compile", compiled):
        first, again = (step_launch(space, 3, ends=True) for _ in range(2))
        assert [launch.compile_once(()) for launch in (first, again)] == ["machine code"] * 2
        assert compiled.call_count == 1
    assert first is again
    different = [step_launch(space, 4, ends=True), step_launch(space, 3), step_launch(other, 3, ends=True)]
    assert all(launch is not first for launch in different)
    with mock.patch("pyrocshmem.trace.recorder", return_value=object()):
        assert step_launch(space, 3, ends=True) is not first


def test_places_on_all_ranks_are_those_of_each_tensor() -> None:
    """Of any shape in a buffer, whichever was asked for first."""
    heap = PlanningHeap(3)
    space = Workspace(heap)
    buffer = space.buffer("some", 24, torch.float16)
    with mock.patch.object(heap, "peer_view", wraps=heap.peer_view) as views:
        for tensor in (buffer[2:8].view(2, 3), buffer.view(4, 6)[:, 2:5]):
            for there in on_all_ranks(space, tensor):
                assert (there.data_ptr(), there.shape, there.stride()) == (
                    tensor.data_ptr(),
                    tensor.shape,
                    tensor.stride(),
                )
        assert views.call_count == heap.world_size


def grown(rank: int, world_size: int) -> tuple[bool, bool, int]:
    """(whether all results are right, whether plans had something to share, freed blocks of the heap that something
    still refers to) after a call of more rows than the one before."""
    config = small_config(placement="copy_engine", split="none")
    right = True
    with Heap(HEAP_BYTES) as heap:
        for rows in (64, 640):
            a, b = integers(rows, K, torch.float16, 1), integers(K, N, torch.float16, 2 + rank)
            out = stream_k.gemm_all_scatter(a, b, group=heap, config=config)
            every = [integers(K, N, torch.float16, 2 + peer) for peer in range(world_size)]
            right &= torch.equal(out.double(), torch.cat([a.double() @ x.double() for x in every], 1))
        gc.collect()
        return right, bool(workspace_for(heap).plans.shared), len(blocks.retired)


@pytest.mark.num_ranks(2)
def test_a_buffer_that_was_outgrown_is_let_go() -> None:
    """Views of it at peers are not kept for plans that are gone: a heap would keep its memory."""
    assert values(run_ranks(grown, 2)) == [(True, True, 0)] * 2
