"""The table of first calls: its rows, and that the calls which it times after `warm_up` agree on nothing any more."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

from pyrocshmem import Heap
from pyrocshmem.benchmarks import first_calls
from tests import commands
from tests.ranks import run_ranks, values

TIER = 2
pytestmark = [pytest.mark.cpu, pytest.mark.num_ranks(2)]

ROWS, N, K = 4, 16, 16


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_calls, "NO_MULTICAST", {})  # it would stay in this process
    app = typer.Typer()
    app.command()(first_calls.main)
    done = commands.invoke(app, "-n", "2", "--shape", f"{ROWS},{N},{K}", "--ops", "gemm_all_reduce")
    assert done.returncode == 0, done.stdout + done.stderr
    heads, line, *rows, _, blas = (
        [cell.strip() for cell in text.strip("|").split("|")] for text in done.stdout.splitlines()
    )
    assert len(heads) == len(line) == 9
    assert [row[0] for row in rows] == ["gemm_all_reduce"]
    figures = dict(zip(heads[1:], map(float, rows[0][1:]), strict=True))
    # Triton's interpreter compiles nothing.
    assert figures.pop("kernels") == 0
    assert all(figure > 0 for figure in figures.values()), figures
    assert len([float(word) for word in blas[0].split() if word.isdigit()]) == 2


def agreed(rank: int, world_size: int, case: first_calls.Case) -> tuple[list[str], first_calls.Took]:
    """What the ranks voted on while a case was measured, in order, barriers left out; and what was measured."""
    names: list[str] = []
    real = Heap.vote

    def vote(heap: Heap, name: str, *more: Any) -> list[bytes]:
        if name != "barrier":
            names.append(name)
        return real(heap, name, *more)

    with mock.patch.object(Heap, "vote", vote):
        return names, first_calls.measure(rank, world_size, case)


@pytest.mark.parametrize("warms_up", [True, False])
def test_nothing_is_voted_on_after_warming_up(warms_up: bool, tmp_path: Path) -> None:
    """Neither in the first call nor in those of other rows. Without `warm_up` the first call is voted on."""
    case = first_calls.Case("gemm_all_reduce", ROWS, N, K, "float16", warms_up, str(tmp_path))
    for names, took in values(run_ranks(agreed, 2, case)):
        assert any(name.startswith("gemm_all_reduce(") for name in names), names
        assert (names[-1] == "warm_up: ready") == warms_up, names
        assert (took.warm_up_s > 0) == (took.new_us > 0) == (took.again_us > 0) == warms_up
        assert took.first_s > 0
