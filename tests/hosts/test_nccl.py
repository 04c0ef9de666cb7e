"""NCCL between made-up hosts of one rank each: waits that end, which its own watchdog would not let a process survive,
and CUDA graphs."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from pyrocshmem import CallMismatch, PeerAborted, PeerTimeout, collectives, stream_k
from pyrocshmem.benchmarks.scale import OPS
from pyrocshmem.network import Network
from tests.hosts.made_up import divide
from tests.hosts.test_faults import (
    WAIT_S,
    check_stopped,
    closed,
    fault_of,
    formed,
    gives_up,
    killed,
    late,
    other_calls,
    right,
    stopped,
)
from tests.ranks import run_ranks, values

TIER = 3
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.num_ranks(2),
    pytest.mark.gpu_a_rank("NCCL refuses ranks that share a GPU"),
]


def test_a_host_is_killed_between_calls() -> None:
    survivor, _ = run_ranks(killed, 2, [1])
    error, seconds = survivor.value
    assert isinstance(error, PeerTimeout), error
    assert (error.peer, "host 1" in str(error)) == (1, True)
    assert seconds < WAIT_S + 2


def in_a_swap(rank: int, world_size: int, do: Callable[[], None]) -> tuple[BaseException | None, float, bool]:
    """(the fault of a call in which the last rank does that before it sends anything, how long it took, whether calls
    work again after `recover`)."""
    over = formed(rank, world_size)
    swap = Network.swap

    def swap_late(*args: Any) -> Any:
        time.sleep(0.2)  # in which the other host hears that the calls are the same
        do()
        return swap(*args)

    with mock.patch.object(Network, "swap", swap_late if rank == world_size - 1 else swap):
        error, seconds = fault_of(lambda: right(rank, world_size))
    if do is kill_self:
        return error, seconds, False
    over.recover()
    return error, seconds, right(rank, world_size)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_long() -> None:
    time.sleep(WAIT_S + 2)


def test_a_host_is_killed_in_a_call() -> None:
    """After the calls have been compared: NCCL alone can notice, and ends nobody's process."""
    survivor, victim = run_ranks(in_a_swap, 2, kill_self)
    assert victim.exitcode == -signal.SIGKILL
    error, seconds, _ = values([survivor])[0]
    assert isinstance(error, PeerTimeout), error
    assert (error.peer, "host 1" in str(error)) == (1, True)
    assert seconds < WAIT_S + 2


def test_a_host_is_late_in_a_call() -> None:
    (first, seconds, recovered), (_, _, too) = values(run_ranks(in_a_swap, 2, sleep_long))
    assert isinstance(first, PeerTimeout), first
    assert WAIT_S <= seconds < WAIT_S + 2
    assert recovered
    assert too


def test_a_host_that_has_left() -> None:
    error, seconds = values(run_ranks(closed, 2))[0]
    assert isinstance(error, PeerAborted), error
    assert "rank 1 has left the group" in error.message
    assert seconds < WAIT_S


def test_a_late_rank_is_waited_for() -> None:
    assert values(run_ranks(late, 2)) == [True] * 2


def test_a_rank_that_raises_is_heard_on_all_hosts() -> None:
    heard, failed = run_ranks(gives_up, 2)
    assert isinstance(failed.exception, LookupError)
    error, seconds = heard.value
    assert isinstance(error, PeerAborted), error
    assert "no such weights" in str(error)
    assert seconds < WAIT_S


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_hosts_make_different_calls(known: bool) -> None:
    for error, recovered in values(run_ranks(other_calls, 2, known)):
        assert isinstance(error, CallMismatch), error
        assert ["all_reduce" in call for call in error.calls] == [True, False]
        assert recovered


def test_recovery_after_a_wait_in_vain() -> None:
    check_stopped(values(run_ranks(stopped, 2)))


def without_the_wait(rank: int, world_size: int, waits: bool) -> bool:
    """Whether a result is right, of a host whose block comes late."""
    over = divide(rank, world_size, 2)
    x = torch.full((1 << 20,), 8.0)
    collectives.all_gather(x)
    over.barrier()
    x.fill_(1.0 + rank)  # what a block holds whose memory is taken again is another
    with mock.patch.object(type(over), "wait", type(over).wait if waits else mock.Mock()):
        if rank == 1:
            torch.cuda._sleep(200_000_000)  # a tenth of a second
        found = collectives.all_gather(x).clone()
    over.synchronize()
    return bool((found.view(2, -1) == torch.tensor([[1.0], [2.0]])).all())


def test_without_the_wait_results_are_wrong() -> None:
    assert values(run_ranks(without_the_wait, 2, True)) == [True, True]
    assert values(run_ranks(without_the_wait, 2, False))[0] is False


def captured(rank: int, world_size: int) -> list[str]:
    """What replays of a graph of all fused ops give that calls don't, with inputs that change under it."""
    over = divide(rank, world_size, 2)
    a, b = torch.randn(256, 128, dtype=torch.bfloat16), torch.randn(128, 192, dtype=torch.bfloat16)

    def all_ops() -> dict[str, torch.Tensor]:
        return {name: getattr(stream_k, name)(a, b) for name in OPS}

    all_ops()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = all_ops()
    wrong = []
    for turn in range(4):
        a.normal_()
        for out in replayed.values():
            out.fill_(float("nan"))
        graph.replay()
        found = {name: out.clone() for name, out in replayed.items()}
        expected = all_ops()
        over.synchronize()
        wrong += [f"{name}, replay {turn}" for name in OPS if not torch.equal(found[name], expected[name])]
    return wrong


def test_graphs() -> None:
    assert values(run_ranks(captured, 2, timeout=150.0)) == [[], []]


def replayed_alone(rank: int, world_size: int) -> tuple[BaseException | None, float, bool]:
    """What a host hears that replays a graph which the other one doesn't."""
    over = formed(rank, world_size)
    x = torch.full((1000,), 1.0 + rank)
    collectives.all_gather(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        collectives.all_gather(x)
    error, seconds = None, 0.0
    if rank == 0:
        graph.replay()
        error, seconds = fault_of(over.synchronize)
    else:
        time.sleep(WAIT_S + 1)
        fault_of(lambda: right(rank, world_size))
    over.recover()
    return error, seconds, right(rank, world_size)


def test_a_graph_that_one_host_replays() -> None:
    (error, seconds, recovered), (_, _, too) = values(run_ranks(replayed_alone, 2))
    assert isinstance(error, PeerTimeout), error
    assert WAIT_S <= seconds < WAIT_S + 2
    assert recovered
    assert too
