"""What the examples of device kernels become, as a user would ask for it. In a prepared process (`worker.prepare`)."""

import contextlib
import io
import re
import sys
from typing import Any

from tests.conftest import ROOT

N = 1000


def compile_examples(target_name: str) -> dict[str, list[Any]]:
    """The kernels that each example launches, by its name."""
    import torch

    from pyrocshmem import Workspace, testing

    sys.path.insert(0, str(ROOT / "examples" / "device"))
    import put  # type: ignore[import-not-found]
    import put_signal_wait  # type: ignore[import-not-found]
    import ring_all_gather  # type: ignore[import-not-found]

    heap = testing.PlanningHeap(4)
    workspace = Workspace(heap)
    x, y, slots, rows = torch.empty(N), heap.empty(N), heap.empty(2, N), heap.empty(4, N)
    calls = {
        "put": lambda: put.put(y, x, workspace),
        "put_signal_wait": lambda: put_signal_wait.send(y, slots, x, workspace),
        "ring_all_gather": lambda: ring_all_gather.all_gather(rows, workspace),
    }
    return {name: testing.compile_call(target_name, call) for name, call in calls.items()}


def compile_again(target_name: str) -> tuple[int, str, int]:
    """(kernels of two calls with tensors that are 16-byte aligned, what is said when nothing is new, kernels of a call
    with one that isn't)."""
    import torch

    from pyrocshmem import Workspace, testing

    sys.path.insert(0, str(ROOT / "examples" / "device"))
    import put  # type: ignore[import-not-found]

    heap = testing.PlanningHeap(4)
    workspace, x, y = Workspace(heap), torch.empty(N + 1), heap.empty(N)

    def call(first: int) -> None:
        put.put(y, x[first : first + N], workspace)

    aligned = testing.compile_call(target_name, lambda: (call(0), call(0)))
    try:
        testing.compile_call(target_name, lambda: call(0))
    except ValueError as error:
        said = str(error)
    return len(aligned), said, len(testing.compile_call(target_name, lambda: call(1)))


def compile_one(target_name: str) -> list[Any]:
    """The put, by its kernel: with 4 warps, with 8, and what is said of a function that Triton doesn't know."""
    import torch

    from pyrocshmem import Workspace, testing

    sys.path.insert(0, str(ROOT / "examples" / "device"))
    import put  # type: ignore[import-not-found]

    heap = testing.PlanningHeap(4)
    arguments = heap.empty(N), torch.empty(N), N, 1, heap.heap_bases, Workspace(heap).context
    constants = {"WORLD": 4, "BLOCK": 256}
    found: list[Any] = [
        testing.compile_for(target_name, put.put_kernel, arguments, constants, num_warps=warps)
        for warps in (4, 8)
    ]
    try:
        testing.compile_for(target_name, compile_one, (), {})
    except TypeError as error:
        found.append(str(error))
    return found


def run_page() -> list[str]:
    """What the code of docs/device-kernels.md that compiles the put prints, but for assembly."""
    sys.path.insert(0, str(ROOT / "examples" / "device"))
    import put  # type: ignore[import-not-found]

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/device-kernels.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "compile_for" in block]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code.replace("print(compiled.text)\n", ""), {"put": put.put, "put_kernel": put.put_kernel})
    return printed.getvalue().splitlines()
