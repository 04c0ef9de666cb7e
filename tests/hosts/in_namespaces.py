"""What ranks run on hosts that are namespaces: `python -m torch.distributed.run .. tests/hosts/in_namespaces.py CASE
FOLDER HOSTS`. A rank writes what it found into FOLDER/<rank>, as JSON."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyrocshmem import collectives, from_torchrun
from pyrocshmem.errors import ShmemError
from pyrocshmem.hosts import Hosts, hosts_for
from tests.hosts.test_ops import FP16, FP32, NAMES, calls

CUT_OFF_S = 5.0


def ops(hosts: Hosts, folder: Path) -> Any:
    """As `calls`, bits as digests."""
    found = calls(hosts, NAMES, [FP16, FP32], seed=7)
    return [(str(what), wrong, hashlib.sha256(same).hexdigest()) for what, wrong, same in found]


def cut_off(hosts: Hosts, folder: Path) -> Any:
    """[the fault of the first call that had one, how long that took, whether a call is right afterwards]."""
    hosts.barrier()
    if hosts.rank == 0:
        (folder / "down").write_text(str(CUT_OFF_S))
    end, fault, longest = time.monotonic() + CUT_OFF_S + 4, "", 0.0
    while time.monotonic() < end and not fault:
        start = time.monotonic()
        try:
            assert right(hosts)
        except ShmemError as error:
            fault = type(error).__name__
        longest = max(longest, time.monotonic() - start)
    time.sleep(max(0.0, end - time.monotonic()))
    if fault:
        hosts.recover()
    return fault, longest, right(hosts)


def right(hosts: Hosts) -> bool:
    total = collectives.all_reduce(torch.full((1000,), float(hosts.rank)))
    return bool((total == sum(range(hosts.world_size))).all())


CASES: dict[str, Callable[[Hosts, Path], Any]] = {"ops": ops, "cut_off": cut_off}


def main(case: str, folder: str, num_hosts: str) -> None:
    os.environ.pop("PYROCSHMEM_HOST", None)
    from_torchrun()
    hosts = hosts_for(None)
    assert (hosts.num_hosts, hosts.local_rank) == (int(num_hosts), int(os.environ["LOCAL_RANK"]))
    (Path(folder) / str(hosts.rank)).write_text(json.dumps(CASES[case](hosts, Path(folder))))
    hosts.barrier()
    hosts.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
