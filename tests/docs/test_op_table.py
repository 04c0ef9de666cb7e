"""What reads the registry of ops has every op of it: the guide's table, the stress runner, the compile cases, the
command lines' help."""

from pathlib import Path

import pytest

from pyrocshmem import collectives, stream_k
from pyrocshmem.benchmarks import documents
from pyrocshmem.calls.op import registered
from pyrocshmem.reference.problems import ALL
from tests.compile import cases
from tests.stress.ops import OPS

TIER = 0
pytestmark = pytest.mark.cpu
ROOT = Path(__file__).resolve().parents[2]
NAMES = {op.name for op in registered() if op.package in ("stream_k", "collectives")}


def test_the_guide_has_every_op() -> None:
    """In the registry's words: `python -m pyrocshmem bench report` puts them there."""
    guide = (ROOT / "docs" / "guide.md").read_text()
    table = guide.partition(documents.OPS_BEGIN)[2].partition(documents.OPS_END)[0]
    assert table.strip() == documents.op_table().strip()
    assert table.count("\n| `") == len(NAMES)


def test_every_op_is_drawn_by_the_stress_runner() -> None:
    # The ops of 8-bit operands are drawn together.
    assert set(OPS) == NAMES | {"float8"}


def test_every_op_is_compiled_for_gpus_and_measured() -> None:
    # A barrier is an exchange, which other cases compile.
    assert {case.op for case in cases.CASES} >= NAMES - {"barrier"}
    assert {problem.op for problem in ALL} == NAMES


def test_every_op_is_a_public_function() -> None:
    for op in registered():
        package = {"stream_k": stream_k, "collectives": collectives}.get(op.package)
        assert package is None or callable(getattr(package, op.name))
