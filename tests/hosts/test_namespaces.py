"""Hosts that share neither network nor memory: namespaces of this machine, joined by a bridge.

What is found to be several hosts here is found by the library itself: nothing says so. Ops are held to float64 and to
one another's bits as on made-up hosts; then a host is cut off the network for a while.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.in_namespaces import CUT_OFF_S
from tests.hosts.test_ops import check

TIER = 3
pytestmark = [pytest.mark.cpu]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
UNSHARED = ["unshare", "--map-root-user", "--net", "--mount", "--propagation", "private"]
LIMIT_S = 240.0


def why_not() -> str:
    """Why this machine has no such namespaces; "" where it has."""
    probe = "mount -t tmpfs none /run && mkdir /run/netns && ip link add name b type bridge && ip netns add h"
    probe += (
        " && ip link add name v type veth peer name w netns h && ip netns exec h mount -t tmpfs none /dev/shm"
    )
    try:
        done = subprocess.run(
            [*UNSHARED, "sh", "-ec", probe], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit status {done.returncode}")


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if why := why_not():
        pytest.skip(f"no namespaces of networks and mounts here: {why}")


def run(folder: Path, case: str, num_hosts: int, ranks: int, **environment: str) -> list[Any]:
    """What each rank found."""
    command = [*UNSHARED, str(HERE / "namespaces.sh"), str(num_hosts), str(ranks), str(folder)]
    command += [str(HERE / "in_namespaces.py"), case, str(folder), str(num_hosts)]
    ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYROCSHMEM_BACKEND": "cpu"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=os.environ | ours | environment,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / str(rank)).read_text()) for rank in range(num_hosts * ranks)]


@pytest.mark.parametrize(("num_hosts", "ranks"), [(2, 2), (3, 1)])
def test_every_op(tmp_path: Path, num_hosts: int, ranks: int) -> None:
    check(run(tmp_path, "ops", num_hosts, ranks))


def test_a_network_that_is_gone_for_less_than_the_budget(tmp_path: Path) -> None:
    for fault, longest, right in run(tmp_path, "cut_off", 2, 1, PYROCSHMEM_WAIT_SECONDS="10"):
        assert fault == ""
        assert longest > CUT_OFF_S / 2, "the network was never gone"
        assert right


def test_a_network_that_is_gone_for_longer(tmp_path: Path) -> None:
    found = run(tmp_path, "cut_off", 2, 1, PYROCSHMEM_WAIT_SECONDS="2")
    assert "PeerTimeout" in [fault for fault, *_ in found]
    for fault, _, right in found:
        assert fault in ("PeerTimeout", "PeerAborted")
        assert right
