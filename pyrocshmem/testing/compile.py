"""Compile a kernel, or every kernel of a call, for a GPU that need not be here."""

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.testing.compiled import Compiled
from pyrocshmem.testing.targets import pretend

# The driver, and what `pretend` replaces, belong to the process.
_one = threading.Lock()


def compile_for(
    target: str,
    kernel: Any,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    *,
    num_warps: int = 4,
    num_stages: int = 1,
) -> Compiled:
    """What `kernel` becomes on `target`: "sm_90", "gfx942" or "gfx950". Nothing runs.

        testing.compile_for("gfx950", put_kernel, (y, x, n, workspace.context), {"WORLD": 4, "BLOCK": 256})

    kernel: a `@triton.jit` function. arguments: of its run-time parameters, in order; tensors lie on the CPU, and only
    their dtypes and alignments matter. constants: of its `tl.constexpr` parameters, by name. num_warps, num_stages: as
    Triton takes them.

    The process needs TRITON_INTERPRET=0 and PYROCSHMEM_BACKEND=cpu in its environment before it imports pyrocshmem, and
    RuntimeError says so. ValueError for another target; TypeError for what is no jit function.
    """
    if not hasattr(kernel, "warmup"):
        raise TypeError(f"kernel is a {type(kernel).__name__}, a @triton.jit function is needed")
    with _one, pretend(target):
        compiled = kernel.warmup(
            *arguments, grid=(1,), num_warps=num_warps, num_stages=num_stages, **constants
        )
        return Compiled.of(target, constants, compiled, 1)


def compile_call(target: str, call: Callable[[], object]) -> list[Compiled]:
    """What the kernels become that `call()` launches on `target`, in the order of their first launches. Nothing runs.

        workspace = pyrocshmem.Workspace(testing.PlanningHeap(4))       # of rank 1 of 4
        testing.compile_call("sm_90", lambda: put(y, x, workspace))

    call: makes calls of ops, or launches by `pyrocshmem.launch`, on tensors on the CPU. Make heap and workspace for one
    target: plans are kept there. Raises as `compile_for`; what `call` raises; ValueError if it compiles nothing.
    """
    found: list[Compiled] = []
    real = Launch.compile

    def recording(self: Launch, args: tuple[Any, ...]) -> Any:
        compiled = real(self, args)
        found.append(Compiled.of(target, self.constants, compiled, self.grid[0]))
        return compiled

    with _one, pretend(target), mock.patch.object(Launch, "compile", recording):
        call()
    if not found:
        raise ValueError(
            f"the call compiled nothing for {target}: it launches nothing, or nothing that is new"
        )
    return found
