"""`python -m pyrocshmem`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyrocshmem.machine import parse_links

TIER = 1
ROOT = Path(__file__).resolve().parents[2]

TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0
GPU1\tNV18\t X \tPHB\tSYS\t0-31\t0
GPU2\tSYS\tPHB\t X \tSYS\t32-63\t1
NIC0\tPIX\tSYS\tSYS\t X \t\t

Legend:
  X    = Self
"""


@pytest.mark.cpu
def test_links_are_read_from_the_topology():
    links = parse_links(TOPOLOGY)
    assert links[0, 1] == links[1, 0] == "NV18"
    assert links[2, 0] == "SYS"
    assert links[1, 2] == "PHB"
    assert {row for row, _ in links} == {0, 1, 2}
    assert parse_links("") == parse_links("NVIDIA-SMI has failed") == {}


def test_report_names_target_heap_and_versions():
    done = subprocess.run(
        [sys.executable, "-m", "pyrocshmem", "--plain"],
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for word in (
        "Ranks run on:",
        "host",
        "cuda",
        "hip",
        "used",
        "torch",
        "triton",
        "numpy",
        "/dev/shm",
        "because",
    ):
        assert word in done.stdout
    assert "\x1b" not in done.stdout
