"""One file owns ordering: a flag is touched, and a barrier placed, nowhere but in `pyrocshmem/signal.py`.

The device API's own atomics are in `device.py`; `message.py` and `note.py`, whose data are their own flags, alone may
push and poll past the caches besides, with the loop of `polls.py`; `write_back.py` has what a release on AMD begins
with. No kernel asks for automatic warp specialization, and none reads one of the tuples that it is given by place:
they have names. What is looked for is code: comments and docstrings may speak of it.
"""

import ast
from pathlib import Path

import pytest

TIER = 0
pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pyrocshmem", "stream_k", "collectives")
SIGNAL, DEVICE = "pyrocshmem/signal.py", "pyrocshmem/device.py"
MESSAGES = ("pyrocshmem/message.py", "pyrocshmem/note.py", "pyrocshmem/polls.py")
WRITE_BACK = "pyrocshmem/write_back.py"
BARRIERS = (
    "bar.sync",
    "bar.arrive",
    "bar.red",
    "barrier.sync",
    "barrier.cta",
    "barrier.cluster",
    "s_barrier",
    "membar",
    "fence.",
)
# Loads and stores that other programs are meant to see, or to be seen by, at once.
STRONG = (".relaxed.", ".acquire.", ".release.", "ld.volatile", "st.volatile", "sc0 sc1", "buffer_wbl2")

# A loop over tiles that asks for it never ends (Triton 3.6, H100: any product, from its first launch on; docs/log.md).
_HANGS = "warp_specialize"

# NamedTuples of kernels.
NAMED = {"problem", "context", "extra", "strides", "arrived", "finish", "after", "OPTIONS"}


def violations(name: str, text: str) -> list[str]:
    """Lines of code that order memory in a file that may not, or read by place, as `file:line: what`."""
    found = []
    tree = ast.parse(text, name)
    comments = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in (each for each in ast.walk(tree) if id(each) not in comments):
        what = _ordering(node) or _by_place(node)
        allowed = name in (SIGNAL, WRITE_BACK) or (name == DEVICE and what.startswith("atomic_"))
        if what and not allowed and not (name in MESSAGES and what in STRONG):
            found.append(f"{name}:{node.lineno}: {what}")  # type: ignore[attr-defined]
    return found


def _ordering(node: ast.AST) -> str:
    """The name of what `node` does to the order of memory, or nothing."""
    if isinstance(node, ast.keyword) and node.arg == _HANGS:
        return _HANGS
    if isinstance(node, ast.Attribute):
        on_triton = isinstance(node.value, ast.Name) and node.value.id in ("tl", "language", "core")
        if (on_triton and node.attr.startswith("atomic_")) or node.attr == "debug_barrier":
            return node.attr
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triton.language"):
        return next(
            (a.name for a in node.names if a.name.startswith("atomic_") or a.name == "debug_barrier"), ""
        )
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return next((word for word in BARRIERS + STRONG if word in node.value), "")
    return ""


def _by_place(node: ast.AST) -> str:
    """The name of the tuple of which `node` reads a place, or nothing."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        name = getattr(node.value, "id", getattr(node.value, "attr", ""))
        return f"{name}[]" if name in NAMED else ""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
        name = getattr(node.value, "id", "")
        return f"{name}[]" if name in NAMED - {"context"} else ""
    return ""


def test_only_the_signals_file_orders_memory() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert {SIGNAL, DEVICE, WRITE_BACK, *MESSAGES} <= {path.relative_to(ROOT).as_posix() for path in files}
    for path in files:
        assert violations(path.relative_to(ROOT).as_posix(), path.read_text()) == []
    assert "tl.atomic_xchg" in (ROOT / SIGNAL).read_text(), "the file that owns ordering has moved"


@pytest.mark.parametrize(
    ("name", "line", "what"),
    [
        ("collectives/exchange_kernel.py", "tl.atomic_xchg(flag, 1)", "atomic_xchg"),
        ("stream_k/local_gemm/kernel.py", "tl.atomic_add(flag, 1, sem='relaxed')", "atomic_add"),
        ("collectives/epilogue.py", "tl.debug_barrier()", "debug_barrier"),
        ("pyrocshmem/device.py", "tl.debug_barrier()", "debug_barrier"),
        ("stream_k/local_gemm/kernel.py", "tl.inline_asm_elementwise('bar.sync 0;', '=r', [], tl.int32, False, 1)",
        "bar.sync"), ("pyrocshmem/message.py", "tl.atomic_xchg(flag, 1)", "atomic_xchg"),
        ("pyrocshmem/message.py", "tl.inline_asm_elementwise('fence.acq_rel.sys;', '=r', [])", "fence."),
        ("collectives/row_sums.py", "tl.inline_asm_elementwise('ld.relaxed.sys.u32 $0, [$1];')", ".relaxed."),
        ("pyrocshmem/polls.py", "_LOADS = ['ld.relaxed.sys.u32 $0, [$1];', 'fence.acq_rel.sys;']", "fence."),
        ("stream_k/local_gemm/kernel.py", "_ASM = 'ld.acquire.gpu.u32 $0, [$1];'", ".acquire."),
        ("collectives/reduce_tiles.py", "first = extra[0]", "extra[]"),
        ("stream_k/local_gemm/kernel.py", "M, N = problem", "problem[]"),
        ("stream_k/local_gemm/plan.py", "first = plan.context[1]", "context[]"),
        ("pyrocshmem/heap.py", "from triton.language import atomic_cas", "atomic_cas"),
        ("pyrocshmem/device.py", "_ASM = 'buffer_wbl2 sc1'", "buffer_wbl2"),
        ("stream_k/local_gemm/kernel.py", "for tile in tl.range(0, 9, warp_specialize=True): pass", "warp_specialize"),
    ],
)  # fmt: skip
def test_a_planted_line_is_found(name: str, line: str, what: str) -> None:
    body = line if line.startswith("from") else f"def planted(flag):\n    {line}"
    found = violations(name, (ROOT / name).read_text() + f"\n\n{body}\n")
    assert len(found) == 1
    assert found[0].startswith(f"{name}:")
    assert found[0].endswith(what)


def test_words_in_comments_are_no_code() -> None:
    name = "stream_k/local_gemm/kernel.py"
    comments = '\n\n# tl.atomic_add and tl.debug_barrier() and bar.sync\n"""tl.atomic_cas"""\n'
    assert violations(name, (ROOT / name).read_text() + comments) == []
