"""Imports go one way: finegrained_alloc <- pyrocshmem (core and calls) <- collectives <- stream_k <- benchmarks.

What is read is every import of every module, at whatever depth it stands, so that an import inside a function hides
nothing. `reference` stands apart: it may import the core, and its description of problems reads the registry of ops;
nobody in the library may import it. The top layer may import everything, and only commands may import it. No modules
below it form a cycle, in whatever layers they are.
"""

import ast
import functools
from pathlib import Path

import pytest

TIER = 0
pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("finegrained_alloc", "collectives", "stream_k", "reference", "benchmarks")

# Which layers the modules of a layer may import besides their own.
BELOW = {
    "finegrained_alloc": (),
    "pyrocshmem": ("finegrained_alloc",),
    "collectives": ("finegrained_alloc", "pyrocshmem"),
    "stream_k": ("finegrained_alloc", "pyrocshmem", "collectives"),
    "reference": ("finegrained_alloc", "pyrocshmem"),
    "benchmarks": ("finegrained_alloc", "pyrocshmem", "collectives", "stream_k", "reference", "top"),
}
# The top layer: each may import everything, at once or when it is asked for. Not all of them exist yet.
TOP = (
    "pyrocshmem.__init__",
    "pyrocshmem.__main__",
    "pyrocshmem.run_command",
    "pyrocshmem.testing",
    "pyrocshmem.torch_ops",
    "pyrocshmem.warming",
    "pyrocshmem.integrations",
)
# Further layers that some may import: the command line, and the description of all ops, which reads their registry.
FURTHER = {
    "pyrocshmem.stream_k.run": ("reference", "top"),
    "pyrocshmem.reference.problems": ("collectives", "stream_k"),
}
# These load libraries of other projects, by names that a table has.
LOADERS_OF_PEERS = ("pyrocshmem.benchmarks.peer_providers",)
# Only the modules named load some of their names late: DTensor takes longer to import than all of the layers.
LATE_NAMES = ("pyrocshmem.stream_k.nn.__init__",)

LOOK_UPS = ("import_module", "__import__", "find_spec")

Sources = dict[str, str]


@functools.cache
def sources_of_tree() -> Sources:
    """The text of every module by its full name; a package's own is `package.__init__`."""
    found = {}
    for folder in ("pyrocshmem", *FOLDERS):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[0] != "pyrocshmem":
                parts = ("pyrocshmem", *parts)
            elif parts[1] in FOLDERS:  # seen through its link
                continue
            found[".".join(parts)] = path.read_text()
    return found


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def layer_of(module: str) -> str:
    if within(module, TOP):
        return "top"
    folder = module.split(".")[1]
    return folder if folder in FOLDERS else "pyrocshmem"


def may_import(module: str, imported: str) -> bool:
    mine, other = layer_of(module), layer_of(imported)
    if mine in ("top", other) or other in BELOW[mine]:
        return True
    return any(within(module, (name,)) and other in further for name, further in FURTHER.items())


@functools.cache
def named(text: str, module: str) -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    """Every import in `text`: (line, module, the names asked of it), relative ones written out."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            found.append((node.lineno, ".".join(base), tuple(alias.name for alias in node.names)))
    return tuple(found)


def imports(sources: Sources, module: str) -> list[tuple[int, str]]:
    """(line, full name) of each of our modules that `module` imports, or of what it names in a way of its own."""
    found = []
    for line, base, names in named(sources[module], module):
        for full in [f"{base}.{name}" for name in names] or [base]:
            options = (full, f"{full}.__init__", base, f"{base}.__init__")
            ours = next((option for option in options if option in sources), None)
            if ours or base.split(".")[0] in FOLDERS:
                found.append((line, ours or base))
    return sorted(set(found))


@functools.cache
def hidden(text: str, module: str) -> tuple[str, ...]:
    """Ways to a module that are no import statement, as `line: what`."""
    tree = ast.parse(text)
    found = []
    if module not in LATE_NAMES:
        found += [
            f"{node.lineno}: a module's __getattr__"
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
        ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            looked_up = node.args[0] if name in LOOK_UPS and node.args else None
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
            name, looked_up = "sys.modules", node.slice
        else:
            continue
        if looked_up is None:
            continue
        if not isinstance(looked_up, ast.Constant):
            if module not in LOADERS_OF_PEERS:
                found.append(f"{node.lineno}: {name} of a name that is not written out")
        elif str(looked_up.value).lstrip(".").split(".")[0] in ("pyrocshmem", *FOLDERS):
            found.append(f"{node.lineno}: {name} of {looked_up.value}")
    return tuple(found)


def violations(sources: Sources) -> list[str]:
    """`module:line: what` of each way against the direction."""
    found = []
    for module in sources:
        for line, imported in imports(sources, module):
            if imported not in sources:
                found.append(f"{module}:{line}: {imported} by another name than pyrocshmem.{imported}")
            elif not may_import(module, imported):
                found.append(f"{module}:{line}: imports {imported}")
        if layer_of(module) != "top":
            found += [f"{module}:{each}" for each in hidden(sources[module], module)]
    return found


def cycles(sources: Sources) -> list[list[str]]:
    """The groups of modules below the top layer that import one another in a circle."""
    graph = {
        module: {other for _, other in imports(sources, module) if other in sources and other != module}
        for module in sources
        if layer_of(module) != "top"
    }
    # Taking away whatever imports nothing, or is imported by nothing, leaves the cycles and the ways between them.
    while True:
        imported = set().union(*graph.values()) if graph else set()
        kept = {module for module, others in graph.items() if module in imported and others & graph.keys()}
        if kept == graph.keys():
            break
        graph = {module: graph[module] & kept for module in kept}
    reached = {module: _reach(graph, module) for module in graph}
    groups = {frozenset(o for o in reached[m] if m in reached[o]) for m in graph if m in reached[m]}
    return sorted(sorted(group) for group in groups)


def _reach(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            ahead += graph.get(module, ())
    return seen


def planted(module: str, line: str) -> Sources:
    sources = sources_of_tree()
    return sources | {module: f"{sources.get(module, '')}\n{line}\n"}


def test_imports_go_one_way() -> None:
    assert violations(sources_of_tree()) == []
    # Whoever is exempt or a layer of its own exists under that name, so that the rules are about something.
    for name in (*FURTHER, *LOADERS_OF_PEERS, *LATE_NAMES, *TOP[:3], *(f"pyrocshmem.{f}" for f in FOLDERS)):
        assert any(within(module, (name,)) for module in sources_of_tree()), name


def test_no_modules_import_one_another() -> None:
    assert cycles(sources_of_tree()) == []


@pytest.mark.parametrize(
    ("module", "line", "what"),
    [
        ("finegrained_alloc.memory", "from pyrocshmem import status", "imports pyrocshmem.status"),
        ("finegrained_alloc.memory", "from .. import status", "imports pyrocshmem.status"),
        ("heap", "def late():\n    from pyrocshmem.collectives import rms_norm", "collectives.rms_norm"),
        ("calls.workspace", "from pyrocshmem import stream_k", "imports pyrocshmem.stream_k.__init__"),
        ("calls.workspace", "from pyrocshmem import Heap", "imports pyrocshmem.__init__"),
        ("calls.workspace", "import pyrocshmem", "imports pyrocshmem.__init__"),
        ("calls.op", "from pyrocshmem.torch_ops import ops", "imports pyrocshmem.torch_ops"),
        ("collectives.order", "import pyrocshmem.stream_k.ops.gemm as g", "imports pyrocshmem.stream_k.ops.gemm"),
        ("collectives.rms_norm", "from pyrocshmem.reference.ops import all_reduce", "pyrocshmem.reference.ops"),
        ("stream_k.ops.gemm", "if TYPE_CHECKING:\n    from pyrocshmem import benchmarks", "benchmarks.__init__"),
        ("stream_k.ops.gemm", "from ...reference import accuracy", "imports pyrocshmem.reference.accuracy"),
        ("stream_k.run.job", "from pyrocshmem.benchmarks import records", "pyrocshmem.benchmarks.records"),
        ("reference.ops", "from pyrocshmem.stream_k.ops.op import GemmOp", "imports pyrocshmem.stream_k.ops.op"),
        ("stream_k.ops.rows", "import collectives", "by another name"),
        ("benchmarks.run", "from stream_k.ops import gemm", "by another name"),
        ("calls.op", "x = importlib.import_module('pyrocshmem.stream_k')", "import_module of pyrocshmem.stream_k"),
        ("calls.op", "x = import_module('..stream_k', __package__)", "import_module of ..stream_k"),
        ("calls.op", "x = __import__(name)", "__import__ of a name that is not written out"),
        ("calls.op", "x = sys.modules['pyrocshmem.collectives']", "sys.modules of pyrocshmem.collectives"),
        ("collectives.__init__", "def __getattr__(name):\n    return 1", "a module's __getattr__"),
    ],
)  # fmt: skip
def test_a_planted_import_is_found(module: str, line: str, what: str) -> None:
    sources = planted(f"pyrocshmem.{module}", line)
    sources |= {"pyrocshmem.torch_ops": ""} if "torch_ops" in line else {}
    found = violations(sources)
    assert len(found) == 1
    assert found[0].startswith(f"pyrocshmem.{module}:")
    assert found[0].endswith(what) or what in found[0]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("__init__", "def __getattr__(name):\n    return importlib.import_module(f'pyrocshmem.{name}')"),
        ("torch_ops", "from pyrocshmem import stream_k, reference"),
        ("integrations.dtensor", "from pyrocshmem.stream_k import nn"),
        ("stream_k.run.job", "from pyrocshmem.reference import report"),
        ("benchmarks.run", "from pyrocshmem.reference import report"),
        ("calls.op", "x = importlib.import_module('kraken.fused')"),
        ("calls.op", "# import pyrocshmem.stream_k\n'''import collectives'''"),
        ("calls.op", "class A:\n    def __getattr__(self, name): return 1"),
    ],
)
def test_what_is_allowed_is_not_found(module: str, line: str) -> None:
    assert violations(planted(f"pyrocshmem.{module}", line)) == []


@pytest.mark.parametrize(
    ("module", "line", "other"),
    [
        ("signal", "def late():\n    from pyrocshmem import message", "message"),
        ("stream_k.ops.op", "from pyrocshmem.stream_k.ops import rows", "stream_k.ops.rows"),
        ("stream_k.ops.op", "from pyrocshmem import stream_k", "stream_k.__init__"),
    ],
)
def test_a_planted_cycle_is_found(module: str, line: str, other: str) -> None:
    (found,) = cycles(planted(f"pyrocshmem.{module}", line))
    assert {f"pyrocshmem.{module}", f"pyrocshmem.{other}"} <= set(found)
