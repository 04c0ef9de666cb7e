"""A Triton whose private names nobody has looked at: its interpreter runs as it is, and one line says so."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyrocshmem import heap_for, interpreter, spawn, spawn_threads, stream_k, versions  # before Triton

import triton  # isort: skip
from triton.language import core, semantic
from triton.runtime import interpreter as inner

from tests.commands import TIMEOUT_S
from tests.conftest import ROOT

TIER = 1
pytestmark = pytest.mark.cpu
NUM_RANKS = 2
UNKNOWN = "3.99.0"


def plant(what: str) -> None:
    """In a process of its own."""
    if what == "version":
        triton.__version__ = UNKNOWN
    elif what == "name":
        del inner._convert_float  # which kernels in fp32 don't need


def product(rank: int, world_size: int, what: str) -> tuple[bool, bool]:
    """(whether two calls of a fused op were right, whether parts of the interpreter were replaced)."""
    plant(what)
    replaced, replace = [], interpreter._replace
    interpreter._replace = lambda: replaced.append(1) or replace()
    a, b = torch.full((40, 24), 1.0 + rank), torch.ones(24, 33)
    expected = torch.full((40, 33), 24.0 * sum(range(1, world_size + 1)))
    right = all(torch.equal(stream_k.gemm_all_reduce(a, b), expected) for _ in range(2))
    heap_for(None).close()
    return right, bool(replaced)


def threads(group: object) -> None:
    pass


def main(what: str) -> None:
    print(spawn(product, NUM_RANKS, what))
    plant(what)
    try:
        print(spawn_threads(threads, 1), spawn_threads(threads, NUM_RANKS))
    except RuntimeError as error:
        print(type(error).__name__, error)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("version", f"Triton {UNKNOWN} is not one of {versions.window('triton')}"),
        ("name", f"Triton {triton.__version__} lacks _convert_float"),
        ("nothing", ""),
    ],
)
def test_an_unknown_triton_runs_as_it_is_and_rank_0_says_so(what: str, why: str) -> None:
    code = f"from tests.pyrocshmem import test_unknown_triton as test; test.main({what!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    ranks, in_threads = done.stdout.splitlines()
    assert ranks == str([(True, not why)] * NUM_RANKS)
    if why:
        (said,) = done.stderr.splitlines()
        assert said == (
            f"pyrocshmem: {why}, so its interpreter runs unchanged: slowly, bf16 is cut off, not rounded, and 8-bit "
            "subnormal numbers and NaNs are misread"
        )
        assert in_threads.startswith(
            f"RuntimeError {why}, so its interpreter runs unchanged, which ranks that are threads"
        )
    else:
        assert not done.stderr
        assert in_threads == "[None] [None, None]"


def test_every_private_name_is_looked_for() -> None:
    """One that the module uses and `_NAMES` forgets would be an AttributeError with a Triton that lacks it."""
    places = {"interpreter": inner, "core": core, "semantic.TritonSemantic": semantic.TritonSemantic}
    listed = {(place, name) for place, names in interpreter._NAMES for name in names.split()}
    source = ast.parse(Path(interpreter.__file__).read_text())
    used = {
        (places[ast.unparse(node.value)], node.attr)
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in places
    }
    assert used == listed
