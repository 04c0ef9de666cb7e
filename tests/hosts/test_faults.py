"""Faults over made-up hosts: waits end, the host and rank are named, and calls work again after `recover`."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pyrocshmem import (
    CallMismatch,
    PeerAborted,
    PeerTimeout,
    as_group,
    collectives,
    heap_for,
    hosts,
    network,
    stream_k,
    target,
)
from pyrocshmem.hosts import Hosts, hosts_for
from pyrocshmem.places import make_up
from tests.hosts.made_up import divide
from tests.ranks import run_ranks, values

TIER = 3
# Waits of 2 s must not run out because other tests have the cores.
pytestmark = [pytest.mark.cpu, pytest.mark.alone]
WAIT_S = 2.0


def formed(rank: int, world_size: int, num_hosts: int = 2) -> Hosts:
    if not target.interpreted():  # where first calls compile
        compiling = divide(rank, world_size, num_hosts)
        assert right(rank, world_size)
        compiling.barrier()
        compiling.close()
    os.environ["PYROCSHMEM_WAIT_SECONDS"] = str(WAIT_S)
    made = divide(rank, world_size, num_hosts)
    assert right(rank, world_size)
    made.barrier()
    return made


def right(rank: int, world_size: int) -> bool:
    """Whether a call of each kind of op works: on whole tensors, and with a GEMM."""
    total = collectives.all_reduce(torch.full((5,), float(rank)))
    a = torch.full((3, 4), 1.0 + rank)
    sums = stream_k.gemm_all_reduce(a, torch.ones(4, 2))
    expected = sum(range(world_size))
    as_group(None).hosts.synchronize()
    return bool((total == expected).all() and (sums == 4 * (expected + world_size)).all())


def fault_of(call: Callable[[], Any]) -> tuple[BaseException | None, float]:
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def killed(rank: int, world_size: int, victims: list[int]) -> Any:
    formed(rank, world_size)
    if rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    return fault_of(lambda: right(rank, world_size))


@pytest.mark.num_ranks(4)
@pytest.mark.parametrize("victims", [[3], [2, 3]], ids=["a rank", "a host"])
def test_a_rank_or_a_host_is_killed(victims: list[int]) -> None:
    ends = run_ranks(killed, 4, victims)
    for rank, end in enumerate(ends):
        if rank in victims:
            continue
        error, seconds = end.value
        assert isinstance(error, PeerTimeout | PeerAborted), error
        assert seconds < WAIT_S + 2, seconds
    named = [end.value[0] for rank, end in enumerate(ends) if rank not in victims]
    lost = [error for error in named if isinstance(error, PeerTimeout)]
    assert lost, named
    assert {error.peer for error in lost} <= set(victims)
    if victims == [2, 3]:
        assert all("host 1" in str(error) for error in lost)


def closed(rank: int, world_size: int) -> Any:
    over = formed(rank, world_size)
    if over.host == 1:
        over.close()
        return None
    return fault_of(lambda: right(rank, world_size))


@pytest.mark.num_ranks(4)
def test_a_host_that_has_left() -> None:
    for error, seconds in values(run_ranks(closed, 4))[:2]:
        assert isinstance(error, PeerAborted), error
        # Who hears it from its own host hears whom that heard it from, too.
        assert re.search("rank [23] has left the group", error.message), error
        assert seconds < WAIT_S


def late(rank: int, world_size: int) -> bool:
    formed(rank, world_size)
    if rank == world_size - 1:
        time.sleep(0.8 * WAIT_S)
    return right(rank, world_size)


@pytest.mark.num_ranks(4)
def test_a_late_rank_is_waited_for() -> None:
    assert values(run_ranks(late, 4)) == [True] * 4


def gives_up(rank: int, world_size: int) -> Any:
    formed(rank, world_size)
    if rank == world_size - 1:
        raise LookupError("no such weights")
    return fault_of(lambda: right(rank, world_size))


@pytest.mark.num_ranks(4)
def test_a_rank_that_raises_is_heard_on_all_hosts() -> None:
    *ends, failed = run_ranks(gives_up, 4)
    assert isinstance(failed.exception, LookupError)
    for error, seconds in (end.value for end in ends):
        assert isinstance(error, PeerAborted), error
        assert (error.peer, "no such weights" in str(error)) == (3, True)
        assert seconds < WAIT_S / 2


def other_calls(rank: int, world_size: int, known: bool) -> Any:
    over = formed(rank, world_size)
    x = torch.full((4,), float(rank))

    def first() -> Any:
        return collectives.all_reduce(x)

    def second() -> Any:
        return collectives.all_gather(x)

    if known:
        first(), second()
    error, _ = fault_of(first if over.host == 0 else second)
    over.recover()
    return error, right(rank, world_size)


@pytest.mark.num_ranks(4)
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_hosts_make_different_calls(known: bool) -> None:
    for error, recovered in values(run_ranks(other_calls, 4, known)):
        assert isinstance(error, CallMismatch), error
        assert ["all_reduce" in call for call in error.calls] == [True, True, False, False]
        assert recovered


def uncompared(rank: int, world_size: int) -> None:
    """Hosts make different calls, and send what belongs to them all the same."""
    over = formed(rank, world_size)
    with mock.patch.object(network.Network, "_require_same"), mock.patch.object(hosts.Hosts, "_compare"):
        for size in (4, 400) if over.host == 0 else (400, 4):
            collectives.all_gather(torch.ones(size))


@pytest.mark.num_ranks(4)
def test_without_the_comparison_a_process_ends() -> None:
    ends = run_ranks(uncompared, 4)
    assert -signal.SIGABRT in [end.exitcode for end in ends], ends


def stopped(rank: int, world_size: int) -> Any:
    """The last rank is away for longer than anybody waits."""
    over = formed(rank, world_size)
    if rank == world_size - 1:
        time.sleep(WAIT_S + 2)
    error, seconds = fault_of(lambda: right(rank, world_size))
    again, _ = fault_of(lambda: right(rank, world_size))
    over.recover()
    return error, seconds, type(again) is type(error), right(rank, world_size)


@pytest.mark.num_ranks(4)
def test_recovery_after_a_wait_in_vain() -> None:
    found = values(run_ranks(stopped, 4))
    assert any(isinstance(error, PeerTimeout) for error, *_ in found)
    check_stopped(found)


def check_stopped(found: list[Any]) -> None:
    for error, seconds, stays_broken, recovered in found:
        assert isinstance(error, PeerTimeout | PeerAborted), error
        assert seconds < WAIT_S + 2
        assert stays_broken
        assert recovered


def alone(rank: int, world_size: int, unsure: bool) -> Any:
    """Of three hosts the last makes no call. unsure: it isn't known of which host a block is missing, as by NCCL."""
    over = formed(rank, world_size, 3)
    fault: BaseException | None = None
    others, named = over.network.others, network.Lost
    lost = (lambda _, *more: named(others, *more)) if unsure else named
    if rank < 2:
        with mock.patch.object(network, "Lost", lost):
            fault, _ = fault_of(lambda: right(rank, world_size))
    else:
        time.sleep(WAIT_S + 2)
    over.recover()
    return fault, right(rank, world_size)


@pytest.mark.num_ranks(3)
@pytest.mark.parametrize("unsure", [False, True], ids=["named by gloo", "not named"])
def test_recovery_where_a_host_made_fewer_calls(unsure: bool) -> None:
    found = values(run_ranks(alone, 3, unsure))
    assert [recovered for _, recovered in found] == [True] * 3
    named = [fault for fault, _ in found[:2] if isinstance(fault, PeerTimeout)]
    assert named, found
    assert {fault.peer for fault in named} == {2}


def refused(rank: int, world_size: int, places: list[int]) -> str:
    make_up(places[rank])
    error, _ = fault_of(lambda: collectives.all_reduce(torch.ones(1)))
    return f"{type(error).__name__}: {error}"


@pytest.mark.num_ranks(3)
def test_different_numbers_of_ranks() -> None:
    for text in values(run_ranks(refused, 3, [0, 0, 1])):
        assert text.startswith(
            "ValueError: all hosts must have as many ranks of the group: host 0 has 2, host 1 has 1"
        )


@pytest.mark.num_ranks(4)
def test_ranks_of_a_host_that_do_not_follow_one_another() -> None:
    for text in values(run_ranks(refused, 4, [0, 1, 0, 1])):
        assert text.endswith("ranks 0, 1, .. are on hosts [0, 1, 0, 1]")


def of_two_versions(rank: int, world_size: int) -> str:
    with mock.patch.object(hosts, "version", return_value=f"1.{rank // 2}"):
        return refused(rank, world_size, [0, 0, 1, 1])


@pytest.mark.num_ranks(4)
def test_hosts_of_two_versions() -> None:
    expected = "host 0 runs pyrocshmem 1.0 on a CPU, host 1 runs pyrocshmem 1.1 on a CPU"
    for text in values(run_ranks(of_two_versions, 4)):
        assert text == f"ValueError: all hosts must run the same: {expected}"


def two_threads(rank: int, world_size: int) -> str:
    """What a second thread hears while a call is under way."""
    over = formed(rank, world_size)
    said: list[BaseException | None] = []
    look = over._look

    def in_another_thread() -> None:
        thread = threading.Thread(target=lambda: said.append(fault_of(lambda: right(rank, world_size))[0]))
        thread.start()
        thread.join()
        over._look = look  # type: ignore[method-assign]  # once

    over._look = in_another_thread  # type: ignore[method-assign]
    if rank < 2:
        time.sleep(0.5)  # so that the other host looks
    assert right(rank, world_size)
    return repr(said[0]) if said else ""


@pytest.mark.num_ranks(4)
def test_a_second_thread_is_told() -> None:
    found = values(run_ranks(two_threads, 4))
    assert all("WorkspaceBusy" in text for text in found[2:])


def some_ranks(rank: int, world_size: int) -> Any:
    """The last rank is no member of the group, and makes no call."""
    make_up(rank // 2)
    members = list(range(world_size - 1))
    group = dist.new_group(members)
    if rank not in members:
        return None
    mesh = dist.device_mesh.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("hosts", "ranks"))
    x = torch.full((3,), float(rank))
    over = hosts_for(group)
    wrong, _ = fault_of(lambda: heap_for(group))
    on_one, _ = fault_of(lambda: hosts_for(as_group(over.heap.group)))
    totals = [collectives.all_reduce(x, group=each).tolist() for each in (group, mesh, mesh["ranks"])]
    return str(wrong), str(on_one), totals


@pytest.mark.num_ranks(5)
def test_groups_of_some_ranks_and_meshes() -> None:
    *found, outside = values(run_ranks(some_ranks, 5))
    assert outside is None
    for rank, (wrong, on_one, totals) in enumerate(found):
        assert "on 2 hosts" in wrong
        assert "on one host" in on_one
        assert totals == [[6.0] * 3] * 2 + [[1.0 if rank < 2 else 5.0] * 3]
