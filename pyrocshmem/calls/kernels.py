"""Kernels of one's own: launched on a workspace, with the order, the comparison and the faults of any other call.

    pyrocshmem.launch(workspace, put_kernel, 4, {"WORLD": 2, "BLOCK": 256}, (y, x, n, workspace.context), name="put")

docs/device-kernels.md tells what such a kernel does, and examples/device has three.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from pyrocshmem import target, trace
from pyrocshmem.calls.call_name import CallName
from pyrocshmem.calls.kernel_launch import Launch, kinds
from pyrocshmem.calls.workspace import Workspace, check_workspace


def launch(
    workspace: Workspace,
    kernel: Any,
    grid: int,
    constants: dict[str, Any],
    args: tuple[Any, ...],
    *,
    name: str,
    num_warps: int = 4,
    num_stages: int = 1,
) -> None:
    """Launch `kernel` as one call on `workspace`, on the current stream. All ranks of its heap launch the same.

    kernel: a `@triton.jit` function whose run-time parameters come first, then its constants; it closes the call by
    `signal.end` in every program. grid: number of programs. constants: value of each `tl.constexpr` parameter.
    args: the run-time arguments: tensors, numbers, None, and tuples of them, as `workspace.context` is. A kernel whose
    last run-time parameter is named `events` gets it from here, for `pyrocshmem.trace.mark`; timelines then show it.
    name: in `CallMismatch`. The ranks compare it, the kernel's name, grid and constants when they are new, then all
    compile, then all go on; put into it what else must be equal on all ranks, such as shapes. num_warps, num_stages: as
    Triton takes them.

    Raises TypeError, ValueError for bad arguments, before anything is launched; `CallMismatch` where ranks launch
    different kernels; `PeerTimeout`, `PeerAborted` for a fault of this call (on the CPU target) or of an earlier one
    (on a GPU, for whose kernels the host doesn't wait: `Heap.synchronize` does); `WorkspaceBusy`. RuntimeError on the
    CPU target for a kernel that takes the workspace's context and doesn't close its call.
    """
    check_workspace(workspace)
    recorded = trace.recorder() is not None
    _check_types(args)
    # Compiled for what is known of the arguments: one more plan where that is new.
    key: Hashable = (
        kernel, grid, name, num_warps, num_stages, recorded, tuple(constants.items()), kinds(args)
    )  # fmt: skip
    found: tuple[CallName, Launch] | None = workspace.plans.get(key)
    if found is None:
        constants = _checked(workspace, kernel, grid, constants, args)
        shown = ", ".join(f"{each}={getattr(value, '__name__', value)}" for each, value in constants.items())
        call = f"{name}: {kernel.__name__} of {grid} programs of {num_warps} warps ({shown})"
        planned = Launch(kernel, grid, constants, num_warps, num_stages)
        new = CallName(f"{call}, recorded" if recorded else call)
        workspace.planned_together(new, lambda _: planned.compile(args))
        workspace.plans[key] = found = new, planned
    name_of_call, planned = found
    counts = target.interpreted() and any(each is workspace.context for each in args)
    before = workspace.epoch() if counts else 0
    with workspace.begin(name_of_call):
        planned(args)
    if counts and workspace.epoch() == before:
        raise RuntimeError(
            f"{kernel.__name__} did not close its call: every program must come to signal.end(context, epoch), once"
        )


def _check_types(args: tuple[Any, ...]) -> None:
    """TypeError for what is no argument of a kernel."""
    for argument in args:
        if isinstance(argument, tuple):
            _check_types(argument)
        elif argument is not None and not isinstance(argument, torch.Tensor | bool | int | float):
            raise TypeError(
                f"an argument is a {type(argument).__name__}, allowed are tensors, numbers, None and tuples of them"
            )


def _checked(
    workspace: Workspace, kernel: Any, grid: int, constants: dict[str, Any], args: tuple[Any, ...]
) -> dict[str, Any]:
    """`constants` in the order of the kernel's parameters. Raises as `launch`."""
    if workspace.heap is None:
        raise ValueError("the workspace has no heap: make one with pyrocshmem.Workspace(heap)")
    names = getattr(kernel, "arg_names", None)
    if names is None:
        raise TypeError(f"kernel is a {type(kernel).__name__}, a @triton.jit function is needed")
    if isinstance(grid, bool) or not isinstance(grid, int) or grid < 1:
        raise ValueError(f"grid is {grid!r}, a number of programs is needed, 1 or more")
    runtime = [each for each in names if each not in constants and each != "events"]
    ordered = {each: constants[each] for each in names if each in constants}
    events = ["events"] if "events" in names else []
    if len(args) != len(runtime) or [*runtime, *events, *ordered] != names or len(ordered) != len(constants):
        raise ValueError(
            f"{kernel.__name__}({', '.join(names)}) was given {len(args)} arguments and the constants "
            f"{', '.join(constants) or 'none'}; needed are the run-time parameters' values in order, then a constant "
            "for each of the rest"
        )
    return ordered
