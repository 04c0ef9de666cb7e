"""tests/sharing.py: which GPU a rank has when there are more ranks than GPUs, and that ranks are started so."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyrocshmem import Heap, launching, target
from tests import sharing
from tests.faults import report
from tests.ranks import run_ranks, values
from tests.stress.runner import Options

TIER = 1
pytestmark = pytest.mark.cpu


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_on_cpu", False)
    monkeypatch.setattr(target, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_ranks_go_round_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "describe", lambda: "2 x H (cuda), because")
    names = [report.short(sharing.describe(ranks_a_gpu)) for ranks_a_gpu in (1, 2)]
    assert names == ["2 x H", "2 ranks a GPU of 2 x H"]
    assert [str(sharing.device(rank)) for rank in range(5)] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
        "cuda:1",
        "cuda:0",
    ]
    with pytest.raises(ValueError, match="local rank 2 has no GPU of its own"):
        target.device(2)
    chosen: list[torch.device] = []
    formed: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(sharing, "_init_process_group", lambda *arguments: formed.append(arguments))
    sharing.init_process_group("store", 3, 4, sharing.device(3), b"secret")
    assert chosen == [torch.device("cuda", 1)]
    # What forms groups for a CPU asks for no NCCL.
    assert formed == [("store", 3, 4, torch.device("cpu"), b"secret")]


@pytest.mark.usefixtures("two_gpus")
def test_no_more_than_there_is_room_for() -> None:
    with sharing.shared(2):
        launching._check_num_ranks(4, True, 2)
        with pytest.raises(ValueError, match="5 ranks asked"):
            launching._check_num_ranks(5, True, 2)
    with pytest.raises(ValueError, match="3 ranks asked"):  # nothing of it stays
        launching._check_num_ranks(3, True, 2)
    Options(ranks=4, ranks_a_gpu=2)
    for options in ({"ranks": 5, "ranks_a_gpu": 2}, {"ranks": 3}):
        with pytest.raises(ValueError, match=r"ranks, allowed are . on each of this machine's 2 GPUs"):
            Options(**options)
    with pytest.raises(ValueError, match="ranks_a_gpu is 0"):
        Options(ranks_a_gpu=0)


def started(rank: int, world_size: int) -> tuple[str, str, str, float]:
    """(who tells the device, how the group was formed, the budget of waits, what peers put here)."""
    with Heap(1 << 16) as heap:
        x = heap.zeros(1)
        heap.peer_view(x, (rank + 1) % world_size).fill_(rank)
        heap.barrier()
        found = float(x)
    return target.device.__module__, dist.get_backend(), os.environ["PYROCSHMEM_WAIT_SECONDS"], found


def test_ranks_are_started_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYROCSHMEM_WAIT_SECONDS", raising=False)
    with sharing.shared(2):
        found = values(run_ranks(started, 3))
    assert found == [
        ("tests.sharing", "gloo", sharing.WAIT_SECONDS, float((rank - 1) % 3)) for rank in range(3)
    ]
    assert "PYROCSHMEM_WAIT_SECONDS" not in os.environ
