"""What ranks run on hosts that are namespaces, or made up, started by torchrun: in_namespaces.py CASE FOLDER HOSTS.

A rank writes what it found into FOLDER/<rank>, as JSON."""

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
from tests.hosts.made_up import cut_small
from tests.hosts.test_ops import FP16, FP32, NAMES, calls, random_calls

CUT_OFF_S = 5.0
# Calls, one every 50 ms: for longer than it takes until the host is cut off.
LOOKS = 60


def ops(hosts: Hosts, folder: Path) -> Any:
    """As `calls`, bits as digests."""
    found = calls(hosts, NAMES, [FP16, FP32], seed=7)
    return [(str(what), wrong, hashlib.sha256(same).hexdigest()) for what, wrong, same in found]


def cut_off(hosts: Hosts, folder: Path) -> Any:
    """[the fault of the first call that had one, how long that took, whether a call is right afterwards]."""
    hosts.barrier()
    if hosts.rank == 0:
        (folder / "down").write_text(str(CUT_OFF_S))
    fault, longest = "", 0.0
    for _ in range(LOOKS):
        start = time.monotonic()
        try:
            assert right(hosts)
        except ShmemError as error:
            fault = type(error).__name__
        longest = max(longest, time.monotonic() - start)
        if fault:
            time.sleep(CUT_OFF_S)
            hosts.recover()
            break
        time.sleep(0.05)
    return fault, longest, right(hosts)


def right(hosts: Hosts) -> bool:
    total = collectives.all_reduce(torch.full((1000,), float(hosts.rank)))
    return bool((total == sum(range(hosts.world_size))).all())


def many(hosts: Hosts, folder: Path) -> Any:
    cut_small()
    return random_calls(hosts, int((folder / "seed").read_text()))


CASES: dict[str, Callable[[Hosts, Path], Any]] = {"ops": ops, "cut_off": cut_off, "many": many}


def main(case: str, folder: str, num_hosts: str) -> None:
    from_torchrun()
    hosts = hosts_for(None)
    assert (hosts.num_hosts, hosts.local_rank) == (int(num_hosts), int(os.environ["LOCAL_RANK"]))
    (Path(folder) / str(hosts.rank)).write_text(json.dumps(CASES[case](hosts, Path(folder))))
    hosts.barrier()
    hosts.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
