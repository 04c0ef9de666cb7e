"""Which functions of the packages tell other programs something, and which of them a launch reaches.

calls = call_graph(ROOT)
reached(calls, {"stream_k_kernel", "push_output"})       # all functions that these call, by name
"""

import ast
from pathlib import Path
from typing import Any

PACKAGES = ("pyrocshmem", "stream_k", "collectives")
# What publishing is done with, and the files that define it.
TELLS = {"publish", "raise_flag", "barrier", "push"}
DEFINE = {"pyrocshmem/signal.py", "pyrocshmem/message.py", "pyrocshmem/note.py"}


def _is_jit(node: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(each) for each in node.decorator_list)


def _calls(node: ast.AST) -> set[str]:
    named = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return {str(getattr(func, "attr", getattr(func, "id", ""))) for func in named}


def call_graph(root: Path) -> dict[str, set[str]]:
    """Of every jit function, the names that it calls; functions of one name count as one."""
    graph: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and _is_jit(node):
                    graph.setdefault(node.name, set()).update(_calls(node))
    return graph


def publishers(root: Path) -> set[str]:
    """Names of the jit functions that publish, of all files but those that define how."""
    found = set()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if path.relative_to(root).as_posix() not in DEFINE:
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.FunctionDef) and _is_jit(node) and _calls(node) & TELLS:
                        found.add(node.name)
    return found


def reached(graph: dict[str, set[str]], roots: set[str]) -> set[str]:
    found, pending = set(), list(roots)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += graph.get(name, ())
    return found


def planned(cases: list[Any], target_name: str) -> set[str]:
    """Names of the kernels that `cases` would compile, and of the functions that they are given. In a prepared process
    (`worker.prepare`)."""
    from unittest import mock

    from pyrocshmem.calls import kernel_launch
    from pyrocshmem.testing import pretend
    from tests.compile import worker

    names: set[str] = set()

    def note(self: Any, args: tuple[Any, ...]) -> None:
        functions = [value.__name__ for value in self.constants.values() if hasattr(value, "__name__")]
        names.update([self.kernel.__name__, *functions])

    with (
        pretend(target_name),
        mock.patch.multiple(kernel_launch.Launch, compile=note, __call__=lambda self, args: None),
    ):
        for case in cases:
            worker._call(case)
    return names


def compile_rest(case: None, target_name: str) -> list[Any]:
    """What no case compiles: `rms_norm`, and kernels that tools launch. In a prepared process."""
    from unittest import mock

    import torch

    from pyrocshmem import doctor, signal
    from pyrocshmem.calls import timeline
    from pyrocshmem.testing import compile_for
    from tests.compile import worker
    from tests.pyrocshmem.kernels import count_kernel

    words = torch.zeros(1024, dtype=torch.int32)
    record, bases = torch.zeros(16, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
    context = signal.Context(words[:64], words[:1], record, bases)
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (count_kernel, (words, words, words, 1, bases), {"BLOCK": 1024}),
        (timeline.meet_kernel, (context, None), {"WORLD": 4}),
        (doctor.ring_kernel, (words, words[:1], context), {"WORLD": 4, "BLOCK": 256}),
    ]
    with mock.patch.object(worker, "_call", _normalize):
        found = worker.compile_case(case, target_name)  # type: ignore[arg-type]
    return found + [compile_for(target_name, *launch) for launch in launches]


def _normalize(case: None) -> None:
    import torch

    from pyrocshmem import collectives
    from pyrocshmem.testing import PlanningHeap

    x, weight = torch.empty(512, 1024, dtype=torch.bfloat16), torch.empty(1024, dtype=torch.bfloat16)
    heap = PlanningHeap(4)
    collectives.rms_norm(x, weight, 1e-6, group=heap, replicated=True)
