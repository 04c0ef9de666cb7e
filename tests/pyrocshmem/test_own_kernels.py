"""Kernels of one's own: `pyrocshmem.launch`, what it refuses, what ranks compare, and numbers of ops."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import pyrocshmem
from pyrocshmem import CallMismatch, Heap, Workspace, signal, target, trace
from tests.ranks import run_ranks, values

TIER = 1
OP = tl.constexpr(pyrocshmem.op_number("own kernel"))


@triton.jit
def scale_kernel(y, factor, context, WORLD: tl.constexpr, SIGN: tl.constexpr, CLOSES: tl.constexpr):
    """y[p] = SIGN * factor * (p + epoch), p the number of the program; then the ranks meet."""
    epoch = signal.begin(context, True, WORLD)
    tl.store(y + tl.program_id(0), SIGN * factor * (tl.program_id(0) + epoch))
    if CLOSES:
        if signal.end(context, epoch):
            signal.barrier(epoch, context, OP, WORLD)


@triton.jit
def marked_kernel(y, context, events, WORLD: tl.constexpr):
    epoch = signal.begin(context, True, WORLD)
    trace.mark(events, trace.STORE, 0)
    tl.store(y, epoch)
    signal.end(context, epoch)


def scale(workspace: Workspace, y: torch.Tensor, factor: int, **changes: Any) -> None:
    given = {
        "kernel": scale_kernel,
        "grid": 3,
        # In another order than the kernel's parameters.
        "constants": {"CLOSES": True, "WORLD": workspace.world_size, "SIGN": -1},
        "args": (y, factor, workspace.context),
        "name": "scale",
    }
    pyrocshmem.launch(workspace, **{**given, **changes})


def calls_body(rank: int, world: int) -> tuple[list[list[int]], int]:
    """(y after each call, plans)."""
    found = []
    with Heap(1 << 20) as heap:
        workspace = Workspace(heap)
        y = heap.zeros(3, dtype=torch.int32)
        for factor in (1, 2, 3, 2):
            scale(workspace, y, factor)
            found.append(y.tolist())
        plans = len(workspace.plans)
        pyrocshmem.launch(
            workspace, marked_kernel, 1, {"WORLD": world}, (y, workspace.context), name="marked", num_warps=1
        )
        found.append(y.tolist()[:1])
        heap.barrier()
    return found, plans


@pytest.mark.num_ranks(2)
def test_calls_are_counted_and_planned_by_kind() -> None:
    """1 is compiled for; 2 and 3 are numbers as any other."""
    for found, plans in values(run_ranks(calls_body, 2)):
        assert found == [[-1, -2, -3], [-4, -6, -8], [-9, -12, -15], [-8, -10, -12], [5]]
        assert plans == 2


def different_body(rank: int, world: int) -> None:
    with Heap(1 << 20) as heap:
        workspace = Workspace(heap)
        scale(workspace, heap.zeros(3, dtype=torch.int32), 1, name="scale" if rank == 0 else "another")


@pytest.mark.num_ranks(2)
def test_ranks_that_launch_different_kernels_are_told() -> None:
    for end in run_ranks(different_body, 2):
        assert isinstance(end.exception, CallMismatch), end.describe()
        assert [call.split(":")[0] for call in end.exception.calls] == ["scale", "another"]
        assert "scale_kernel of 3 programs of 4 warps (WORLD=2, SIGN=-1, CLOSES=True)" in str(end.exception)


def refused_body(rank: int, world: int) -> list[str]:
    """What is said of each mistake."""
    said = []
    with Heap(1 << 20) as heap:
        workspace = Workspace(heap)
        y = heap.zeros(3, dtype=torch.int32)
        constants = {"WORLD": 1, "SIGN": 1, "CLOSES": True}
        for changes in (
            {"args": (y, workspace.context)},
            {"constants": {"WORLD": 1, "SIGN": 1}},
            {"constants": {**constants, "BLOCK": 4}},
            {"grid": 0},
            {"kernel": calls_body},
            {"args": (y, "2", workspace.context)},
            {"constants": {**constants, "CLOSES": False}},
        ):
            try:
                scale(workspace, y, 2, **changes)
            except (TypeError, ValueError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
            else:
                said.append("nothing")
        for other in (Workspace(device=heap.device), heap):
            with pytest.raises((TypeError, ValueError), match="workspace"):
                pyrocshmem.launch(other, scale_kernel, 3, constants, (y, 2, None), name="scale")  # type: ignore[arg-type]
    return said


@pytest.mark.num_ranks(1)
def test_mistakes_are_refused() -> None:
    (said,) = values(run_ranks(refused_body, 1))
    kernel = "ValueError: scale_kernel(y, factor, context, WORLD, SIGN, CLOSES) was given"
    assert said[0].startswith(f"{kernel} 2 arguments and the constants CLOSES, WORLD, SIGN")
    assert said[1].startswith(f"{kernel} 3 arguments and the constants WORLD, SIGN")
    assert said[2].startswith(f"{kernel} 3 arguments and the constants WORLD, SIGN, CLOSES, BLOCK")
    assert said[3] == "ValueError: grid is 0, a number of programs is needed, 1 or more"
    assert said[4] == "TypeError: kernel is a function, a @triton.jit function is needed"
    assert said[5].startswith("TypeError: an argument is a str, allowed are tensors")
    # The device is not waited for on a GPU.
    if target.interpreted():
        assert said[6].startswith("RuntimeError: scale_kernel did not close its call")


@pytest.mark.cpu
def test_numbers_of_ops() -> None:
    first = pyrocshmem.op_number("an op of this test")
    assert (
        pyrocshmem.op_number("another op of this test") != first == pyrocshmem.op_number("an op of this test")
    )
    assert pyrocshmem.op_number("all_reduce") == pyrocshmem.status.Op.ALL_REDUCE
    assert pyrocshmem.status.op_name(first) == "an op of this test"
    with pytest.raises(TypeError, match="a string is needed"):
        pyrocshmem.op_number(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty"):
        pyrocshmem.op_number("")


@pytest.mark.cpu
def test_importing_the_package_imports_no_calls() -> None:
    code = """
import sys, pyrocshmem
assert "pyrocshmem.signal" not in sys.modules
assert pyrocshmem.Workspace and callable(pyrocshmem.launch) and "pyrocshmem.signal" in sys.modules
try:
    pyrocshmem.lunch
except AttributeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.stdout == "module 'pyrocshmem' has no attribute 'lunch'\n", done.stderr


@pytest.mark.cpu
def test_a_process_that_runs_kernels_compiles_none() -> None:
    from pyrocshmem import testing

    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=0 and PYROCSHMEM_BACKEND=cpu"):
        testing.compile_call("sm_90", lambda: None)
    with pytest.raises(ValueError, match="target is 'sm_70', allowed are sm_90, gfx942, gfx950"):
        testing.compile_call("sm_70", lambda: None)
