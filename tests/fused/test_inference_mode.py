"""Calls under `torch.inference_mode` leave nothing behind that calls outside of it can't write: an evaluation may come
first, and may be what makes a workspace grow."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

from pyrocshmem import Heap, collectives, stream_k
from pyrocshmem.calls.workspace import Workspace, workspace_for
from pyrocshmem.reference.problems import PROBLEMS
from pyrocshmem.stream_k.choice.placement import placement_names
from tests.fused.cases import HEAP_BYTES, Case, run_case
from tests.ranks import run_ranks, values
from tests.stream_k.products import device, random

TIER = 3
TIMEOUT_S = 100.0
F32 = torch.float32

CASES = [
    Case(op, 34, 24, 16, F32).with_config(placement=placement, chunk=1)
    for op, problem in PROBLEMS.items()
    for placement in placement_names(problem.op)
]
GROWING = [case for case in CASES if case.small_config().placement == "copy_engine"]


def kept(root: object) -> Iterator[torch.Tensor]:
    """The tensors that `root` refers to, however far. Functions are left out, which refer to their modules."""
    seen: set[int] = set()
    left = [root]
    while left:
        x = left.pop()
        if id(x) in seen or isinstance(x, FunctionType | ModuleType | type):
            continue
        seen.add(id(x))
        if type(x).__module__.startswith("triton.runtime"):
            continue
        if isinstance(x, torch.Tensor):
            yield x
        left += gc.get_referents(x)


def whole_tensors(heap: Heap) -> None:
    """The calls of whole tensors, and those with a norm."""
    x, weight = torch.ones(8, 8, device=device()), torch.ones(8, device=device())
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_scatter", "broadcast"):
        getattr(collectives, name)(x, group=heap)
    collectives.barrier(group=heap)
    collectives.rms_norm(x, weight, 1e-6, group=heap)
    collectives.all_reduce_rms_norm(x, x, weight, 1e-6, group=heap)
    stream_k.gemm_rms_norm_all_scatter(x, x, weight, 1e-6, group=heap)
    stream_k.gemm_all_reduce_rms_norm(x, x, None, weight, 1e-6, group=heap)


def evaluation_first(rank: int, world_size: int) -> tuple[list[str], int]:
    """(errors, tensors that are kept)."""
    with torch.inference_mode():
        heap = Heap(HEAP_BYTES)
        found = [run_case(case, heap, 1) for case in CASES]
        whole_tensors(heap)
        mine = heap.ones(3)
    tensors = list(kept(workspace_for(heap)))
    errors = [f"kept: {x.shape} {x.dtype}" for x in (*tensors, mine) if x.is_inference()]
    mine += heap.peer_view(mine, rank)
    found += [run_case(case, heap, 2) for case in CASES]
    with torch.inference_mode():  # grows
        found += [run_case(replace(case, M=130), heap, 3) for case in GROWING]
    found += [run_case(replace(case, M=190), heap, 4) for case in GROWING]
    heap.barrier()
    heap.recover()
    found += [run_case(case, heap, 5) for case in GROWING]
    heap.close()
    return errors + [each.error for each in found if each.error], len(tensors)


@pytest.mark.num_ranks(2)
def test_evaluation_first() -> None:
    for errors, tensors in values(run_ranks(evaluation_first, 2, timeout=TIMEOUT_S)):
        assert errors == []
        assert tensors > len(CASES)


@pytest.mark.num_ranks(1)
def test_a_product_alone() -> None:
    workspace = Workspace(device=device())
    with torch.inference_mode():
        a = random(40, 304, F32)
        for given in (workspace, made := Workspace(device=device())):
            stream_k.gemm(a, a.t(), workspace=given)
    tensors: list[Any] = [*kept(workspace), *kept(made)]
    assert len(tensors) > 8
    assert not any(x.is_inference() for x in tensors)
