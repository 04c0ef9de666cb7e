"""Hosts that share neither network nor memory: namespaces of this machine, joined by a bridge.

What is found to be several hosts here is found by the library itself: nothing says so. Ops are held to float64 and to
one another's bits as on made-up hosts, whose place they take where a machine allows it; then a host is cut off the
network for a while.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.in_namespaces import CUT_OFF_S
from tests.hosts.test_ops import check, new_seed

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


WHY_NOT = why_not()
needs_namespaces = pytest.mark.skipif(
    bool(WHY_NOT), reason=f"no namespaces of networks and mounts: {WHY_NOT}"
)


def run(folder: Path, case: str, num_hosts: int, ranks: int, **environment: str) -> list[Any]:
    """What each rank found."""
    command = [str(HERE / "in_namespaces.py"), case, str(folder), str(num_hosts)]
    started(folder, num_hosts, ranks, command, **environment)
    return [json.loads((folder / str(rank)).read_text()) for rank in range(num_hosts * ranks)]


def started(folder: Path, num_hosts: int, ranks: int, command: list[str], **environment: str) -> str:
    """What a command that torchrun starts on each host has printed: on namespaces or, without them, made-up hosts."""
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYROCSHMEM_BACKEND": "cpu"}
    if WHY_NOT:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        environment |= where
        agents = [
            begun(
                torchrun(num_hosts, host, ranks, command, **where),
                PYROCSHMEM_HOST=f"host {host}",
                **environment,
            )
            for host in range(num_hosts)
        ]
    else:
        script = [*UNSHARED, str(HERE / "namespaces.sh"), str(num_hosts), str(ranks), str(folder), *command]
        agents = [begun(script, **environment)]
    said = [agent.communicate(timeout=LIMIT_S)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * len(agents), "\n".join(said)
    return "".join(said)


def begun(command: list[str], **environment: str) -> subprocess.Popen[str]:
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=os.environ | environment, text=True, **both)  # type: ignore[call-overload]


def torchrun(num_hosts: int, host: int, ranks: int, command: list[str], **where: str) -> list[str]:
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(num_hosts),
        "--node-rank",
        str(host),
    ]
    agent += ["--nproc-per-node", str(ranks), "--master-addr", where["MASTER_ADDR"]]
    return [*agent, "--master-port", where["MASTER_PORT"], *command]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize(("num_hosts", "ranks"), [(2, 2), (3, 1)])
def test_every_op(tmp_path: Path, num_hosts: int, ranks: int) -> None:
    check(run(tmp_path, "ops", num_hosts, ranks))


def test_random_calls(tmp_path: Path) -> None:
    (tmp_path / "seed").write_text(str(new_seed()))
    assert run(tmp_path, "many", 2, 2) == [[]] * 4


def test_the_example_trains(tmp_path: Path) -> None:
    """`--compare` trains the whole model on one rank, too, and compares every loss."""
    example = [
        "--steps",
        "3",
        "--layers",
        "1",
        "--width",
        "32",
        "--length",
        "16",
        "--batch",
        "4",
        "--compare",
    ]
    command = [str(ROOT / "examples/training/tensor_parallel.py"), *example, "--out", str(tmp_path / "out")]
    assert "losses, split over 4 and whole, differ by at most" in started(tmp_path, 2, 2, command)


@needs_namespaces
@pytest.mark.alone
def test_a_network_that_is_gone_for_less_than_the_budget(tmp_path: Path) -> None:
    for fault, longest, right in run(tmp_path, "cut_off", 2, 1, PYROCSHMEM_WAIT_SECONDS="10"):
        assert fault == ""
        assert longest > CUT_OFF_S / 2, "the network was never gone"
        assert right


@needs_namespaces
@pytest.mark.alone
def test_a_network_that_is_gone_for_longer(tmp_path: Path) -> None:
    found = run(tmp_path, "cut_off", 2, 1, PYROCSHMEM_WAIT_SECONDS="2")
    assert "PeerTimeout" in [fault for fault, *_ in found]
    for fault, _, right in found:
        assert fault in ("PeerTimeout", "PeerAborted")
        assert right
