"""The table of what ops hold: ours is what the workspace says, named by holder."""

import pytest

from pyrocshmem import target
from pyrocshmem.benchmarks import holdings
from pyrocshmem.benchmarks.shapes import Case
from tests.ranks import run_ranks, values

TIER = 2


def _case(op: str, M: int, N: int, K: int) -> Case:
    return Case(op, "", M, N, K, "float16", 2, "single")


@pytest.mark.num_ranks(2)
def test_ours_is_what_the_op_s_design_needs():
    """Messages in two slots of whole MiB, and the words of a workspace; twice the rows take twice the gathered ones."""
    for held in values(run_ranks(holdings.measure, 2, _case("gemm_all_reduce", 128, 128, 64), "ours")):
        assert held.by is not None
        assert {name.rpartition(": ")[2] for name in held.by} >= {"control words", "messages"}
        assert held.driver >= sum(held.by.values()) >= 2 << 20


@pytest.mark.num_ranks(2)
def test_the_table():
    lines = holdings.table([_case("gemm_reduce_scatter", 128, 128, 64), _case("all_reduce", 128, 128, 0)])
    rows = [line for line in lines if line.startswith("| gemm_reduce_scatter | 128 x 128 x 64 |")]
    assert len(rows) == 1
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert len(cells) == (4 if target.backend() == "host" else 6)
    assert all(" + " in cell for cell in cells[2:4])
    assert "failed" not in "".join(lines)
    assert any(line.startswith("- all_reduce: ") and "messages 2.0" in line for line in lines)
