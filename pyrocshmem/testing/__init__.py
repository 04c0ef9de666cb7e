"""Tests of kernels on a machine without their GPUs: compile them for NVIDIA and AMD, and read the assembly.

    # TRITON_INTERPRET=0 PYROCSHMEM_BACKEND=cpu python this_file.py
    from pyrocshmem import Workspace, testing

    workspace = Workspace(testing.PlanningHeap(4))           # plays rank 1 of 4; reaches nobody
    compiled = testing.compile_for("sm_90", put_kernel, (y, x, n, workspace.context), {"WORLD": 4, "BLOCK": 256})
    assert compiled.spills == 0, compiled.text
    kernels = testing.compile_call("gfx942", lambda: put(y, x, workspace))     # all that a call launches

Nothing runs, so this process can't: ranks that run kernels need another one. In those `assert_batch_invariant` tells
whether rows of a result depend on their batch:

    with pyrocshmem.batch_invariant():
        testing.assert_batch_invariant(model, rows=tokens)

It is the top layer, which may import everything, and nothing in the library imports it.
"""

from pyrocshmem.testing.compile import compile_call, compile_for
from pyrocshmem.testing.compiled import Compiled
from pyrocshmem.testing.invariant import assert_batch_invariant
from pyrocshmem.testing.planning_heap import PlanningHeap
from pyrocshmem.testing.targets import TARGETS, Target, pretend

__all__ = [
    "TARGETS",
    "Compiled",
    "PlanningHeap",
    "Target",
    "assert_batch_invariant",
    "compile_call",
    "compile_for",
    "pretend",
]
