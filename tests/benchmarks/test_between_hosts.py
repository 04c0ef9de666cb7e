"""The benchmark of made-up hosts: what it measures is right, and its table says what was measured."""

import os
from unittest import mock

import pytest
from typer.testing import CliRunner

from pyrocshmem import options
from pyrocshmem.benchmarks import between_hosts
from pyrocshmem.benchmarks.between_hosts import SOCKETS, Took, measure, table
from pyrocshmem.benchmarks.scale import OPS
from pyrocshmem.benchmarks.shapes import cases_of
from tests.ranks import run_ranks, values

TIER = 3


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_results_are_compared() -> None:
    cases = [cases_of(op, "tiny", 2, "float16", False)[0] for op in OPS]
    for of_rank in values(run_ranks(measure, 2, 2, cases, 2)):
        assert len(of_rank) == len(cases)
        for took in of_rank:
            assert min(took.ours, took.flat) > 0
            # A result that is nowhere off was not compared.
            assert 0 < took.ours_error <= 1
            assert 0 < took.flat_error <= 1


def test_table() -> None:
    cases = cases_of("gemm_all_reduce", "tiny", 2, "float16", False)[:2]
    lines = table(cases, [Took(0.002, 0.004, 0.5, 0.6), Took(0.004, 0.002, 0.75, 0.6)])
    assert lines[2].endswith("| 2.000 | 4.000 | 2.000 | 0.50 |")
    assert lines[-1] == "all: geometric mean 1.000, worst 0.500"


def test_hosts_that_do_not_divide_the_ranks() -> None:
    app = options.app(help="")
    app.command()(between_hosts.main)
    with mock.patch.dict(os.environ):
        found = CliRunner().invoke(app, ["-n", "3", "--hosts", "2"])
        assert found.exit_code == 2
        assert "--hosts is 2" in found.output
        assert not set(SOCKETS) & set(os.environ)
