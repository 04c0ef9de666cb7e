"""Where a GEMM leaves no room for what waits beside it, its plan has fewer programs."""

import pytest
import torch

from pyrocshmem import Workspace, stream_k, testing
from pyrocshmem.stream_k.ops import planned

TIER = 3

M, N, K = 4096, 4096, 2048
RANKS, PROCESSORS = 2, 132


def of_a_plan() -> tuple[int, int]:
    """(programs of an all-scatter beside copies, multiprocessors that its GEMM must leave free)."""
    workspace = Workspace(testing.PlanningHeap(RANKS))
    a, b = torch.empty(M, K, dtype=torch.bfloat16), torch.empty(K, N, dtype=torch.bfloat16)
    testing.compile_call(
        "sm_90", lambda: stream_k.gemm_all_scatter(a, b, group=workspace.heap, workspace=workspace)
    )
    (plan,) = workspace.plans.values()
    assert plan.placement == "copy_engine"
    assert all(launch.waits for launch in (plan.step, plan.end)), "no shared memory is left to the GEMM"
    return plan.product.config.num_programs, plan.least_free


def test_all_programs_where_there_is_room() -> None:
    assert of_a_plan() == (PROCESSORS, 0)


def test_fewer_programs_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "rooms_beside", lambda gemm, wait: 0)
    assert of_a_plan() == (PROCESSORS - 1, 1)
