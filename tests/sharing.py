"""More ranks than GPUs: rank r on GPU r modulo their number, where the ranks of a GPU take its time in turns.

    with shared(2):                            # inside, pyrocshmem.spawn and run_ranks start up to two ranks a GPU
        ends = run_ranks(body, 4)              # `body` finds its GPU as ever: target.device(rank)

For tests alone; users' ranks have a GPU each. No wait can deadlock: ranks are processes, each with a context of its
own, and a context that spins loses the GPU after milliseconds. Groups are formed without NCCL, which refuses ranks
that share a GPU. On the CPU target ranks share the processor anyway, and nothing changes but the budgets.
"""

import contextlib
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch

from pyrocshmem import launching, rank_process, target
from tests import ranks

# A wait lasts several turns of milliseconds each, under a sanitizer of many.
WAIT_SECONDS = "60"
# How much more time ranks get until they are ended.
SLOWER = 3.0

_device_of_its_own = target.device
_init_process_group = rank_process.init_process_group
_check_num_ranks = launching._check_num_ranks


def device(local_rank: int = 0) -> torch.device:
    """`target.device` for ranks that share GPUs."""
    return _device_of_its_own(local_rank % max(1, target.num_devices()))


def describe(ranks_a_gpu: int) -> str:
    """`target.describe()`, and how many ranks may share a GPU: what ran so has not run with a GPU a rank."""
    plain = target.describe()
    return plain if ranks_a_gpu == 1 or target.interpreted() else f"{ranks_a_gpu} ranks a GPU of {plain}"


def init_process_group(
    store: Any, rank: int, world_size: int, device: torch.device, shared: bytes | None
) -> None:
    """`rank_process.init_process_group` with gloo alone."""
    if device.type != "cpu":
        torch.cuda.set_device(device)
    _init_process_group(store, rank, world_size, torch.device("cpu"), shared)


def rank_main(job: rank_process.Job, pipe: Connection) -> None:
    """`rank_process.rank_main` of a rank that may share its GPU. Doesn't return."""
    with (
        mock.patch.object(target, "device", device),
        mock.patch.object(rank_process, "init_process_group", init_process_group),
    ):
        rank_process.rank_main(job, pipe)


@contextlib.contextmanager
def shared(ranks_a_gpu: int) -> Iterator[None]:
    """Inside, up to `ranks_a_gpu` ranks share a GPU, and have longer for what they wait for. 1: nothing changes."""
    if ranks_a_gpu == 1:
        yield
        return

    def check_num_ranks(num_ranks: int, on_gpu: bool, num_gpus: int) -> None:
        _check_num_ranks(num_ranks, on_gpu, ranks_a_gpu * num_gpus)

    budget = {"PYROCSHMEM_WAIT_SECONDS": os.environ.get("PYROCSHMEM_WAIT_SECONDS", WAIT_SECONDS)}
    with (
        mock.patch.multiple(launching, rank_main=rank_main, _check_num_ranks=check_num_ranks),
        mock.patch.object(ranks, "slower", SLOWER),
        mock.patch.dict(os.environ, budget),
    ):
        yield
