"""The model of scale: what it predicts of a record, its picture, and mistakes on its command line.

What it says of bytes and blocks is held to made-up hosts by tests/hosts/test_network.py.
"""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from pyrocshmem.benchmarks import scale
from pyrocshmem.benchmarks.__main__ import app
from pyrocshmem.benchmarks.sources import ROOT

TIER = 1
pytestmark = pytest.mark.cpu
RECORDS = ROOT / "benchmarks" / "results" / "2026-11-26-8xH200-models.jsonl"


def case(op: str, ours: float = 100.0, unfused: float = 150.0) -> dict[str, Any]:
    return {
        "op": op,
        "M": 8192,
        "N": 4096,
        "K": 1024,
        "ranks": 8,
        "skipped": {},
        "us": {"ours": [ours], "unfused": [unfused]},
    }


@pytest.mark.parametrize("op", scale.OPS)
def test_one_host_is_what_was_measured(op: str) -> None:
    assert scale.predicted(case(op), 1, scale.Network()) == (100.0, 150.0)
    assert scale.traffic(op, 8192, 4096, 1024, 1, 8, 2)[:2] == (0, 0)


@pytest.mark.parametrize("op", scale.OPS)
def test_a_network_that_is_slower_takes_longer(op: str) -> None:
    fast, slow = (scale.predicted(case(op), 4, scale.Network(10.0, speed)) for speed in (50e9, 5e9))
    assert slow[0] > fast[0] >= 100.0
    assert slow[1] > fast[1] > 150.0
    # Nothing is faster than what crosses.
    sent = scale.traffic(op, 8192, 4096, 1024, 4, 8, 2)
    assert slow[0] >= 1e6 * sent.nbytes / 5e9


def test_the_command(tmp_path: Path) -> None:
    picture = tmp_path / "scale.svg"
    done = CliRunner().invoke(app, ["scale", str(RECORDS), "--hosts", "4", "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    words = [node.text for node in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert "gemm_all_reduce" in words
    assert any("400 Gb/s" in (word or "") for word in words)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--hosts", "0"], "hosts is 0, allowed are 1 to 1024"),
        (["--gbit", "0"], "gbit is 0"),
        (["--latency-us", "-1"], "latency_us -1"),
        ([str(ROOT / "benchmarks/results/2026-12-01-H200-corpus.jsonl")], "have no case of all_gather_gemm"),
    ],
)
def test_mistakes(arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(app, ["scale", *arguments])
    assert done.exit_code == 2
    assert text in done.output.replace("\n", " ")
