"""Start ranks in a test, and look at how each of them ended.

    ends = run_ranks(body, 4, some_argument)       # body(rank, world_size, some_argument) at the top of the
    test's module assert ends[0].value == 3
    assert isinstance(ends[1].exception, PeerTimeout)

A rank that fails leaves the others alone, so that each one's fault can be asserted; all are gone after
`timeout` seconds, of an idle machine (`slower`).
"""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from typing import Any

import torch.distributed as dist

from pyrocshmem import RankResult, launching, target

# How much longer than on an idle machine that has a GPU for each rank: others may use this one, and only what hangs
# must be ended. `sharing` changes it.
slower = 2.0


def load_server() -> None:
    """On the CPU target: the server of all ranks to come loads what each of them would load again."""
    if target.interpreted():
        multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.preload"])
        forkserver.ensure_running()


def run_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 60.0) -> list[RankResult]:
    """Every rank's end, in rank order; see `pyrocshmem.launching.run_ranks`."""
    load_server()
    return launching.run_ranks(fn, num_ranks, *args, timeout=slower * timeout)


def wait_until_formed(rank: int, world_size: int) -> None:
    """In a rank: all have joined the process group. One that dies or destroys it before breaks those that are still
    connecting."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"formed {rank}", "")
    store.wait([f"formed {peer}" for peer in range(world_size)])


def values(ends: Sequence[RankResult]) -> list[Any]:
    """Every rank's value; fails with the text of those that have none."""
    assert all(end.ok for end in ends), "\n".join(end.describe() for end in ends if not end.ok)
    return [end.value for end in ends]
