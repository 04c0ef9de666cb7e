"""What goes between hosts: no more bytes than two levels need, beside the GEMMs, and nothing at all on one host."""

import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pyrocshmem import collectives, heap_for, hosts, network, stream_k
from pyrocshmem.benchmarks.scale import OPS, Traffic, traffic
from pyrocshmem.calls import kernel_launch
from pyrocshmem.stream_k.ops import over_hosts
from tests.hosts.made_up import cut_small, divide, use_device
from tests.ranks import run_ranks, values

TIER = 2
M, N, K = 24, 16, 32
ITEM = 2
# Of the call's number and digest.
GREETING_BYTES = 16


def sent_by_each(rank: int, world_size: int, num_hosts: int) -> dict[str, tuple[int, int]]:
    """(bytes that this rank gave to torch.distributed, those that two levels need) by op; large tensors."""
    cut_small()
    found = divide(rank, world_size, num_hosts)
    L, H, R = found.local_size, found.num_hosts, world_size
    x = torch.ones(M, N, dtype=torch.float16)
    a, b = torch.ones(M, K, dtype=torch.float16), torch.ones(K, N, dtype=torch.float16)
    size = x.numel() * ITEM
    # Of two hosts either way sends as much in one trip.
    everywhere = size // L * (2 * (H - 1)) // H
    model: dict[str, Traffic] = {}
    ops: dict[str, tuple[Callable[[], Any], int]] = {
        "all_gather": (lambda: collectives.all_gather(x), (H - 1) * size),
        "all_scatter": (lambda: collectives.all_scatter(x), (H - 1) * size),
        "reduce_scatter": (lambda: collectives.reduce_scatter(x), (H - 1) * size // R),
        "all_reduce": (lambda: collectives.all_reduce(x), everywhere),
        "broadcast": (lambda: collectives.broadcast(x, 0), (H - 1) * size // L if found.host == 0 else 0),
    }
    for name in OPS:
        # What the model of scale says of them.
        rows = R * M if name == "all_gather_gemm" else M
        by_share = name == "gemm_all_reduce"
        pieces = len(over_hosts._pieces(M, size // L if by_share else size, L if by_share else 1))
        model[name] = traffic(name, rows, N, K, H, L, ITEM, pieces)
        ops[name] = functools.partial(getattr(stream_k, name), a, b), round(model[name].nbytes)
    sizes: list[int] = []

    def counting(send: Any) -> Any:
        def counted(block: torch.Tensor, *more: Any) -> Any:
            sizes.append(block.nbytes)
            return send(block, *more)

        return counted

    results = {}
    with mock.patch.object(dist, "isend", counting(dist.isend)):
        for name, (call, needed) in ops.items():
            call()  # what is new is compared through the store
            sizes.clear()
            before = found.network.bytes_sent
            call()
            total = sum(sizes) - (H - 1) * GREETING_BYTES
            assert found.network.bytes_sent - before == total
            assert name not in model or len(sizes) - (H - 1) == model[name].blocks, (name, sizes, model)
            results[name] = total, needed
    return results


def of_all_ranks(found: list[dict[str, tuple[int, int]]], which: int) -> dict[str, int]:
    """Shares of a sum may differ by an element."""
    return {name: sum(of_rank[name][which] for of_rank in found) for name in found[0]}


@pytest.mark.num_ranks(4)
def test_bytes_between_two_hosts() -> None:
    found = values(run_ranks(sent_by_each, 4, 2))
    assert of_all_ranks(found, 0) == of_all_ranks(found, 1)


@pytest.mark.num_ranks(3)
def test_bytes_between_three_hosts() -> None:
    found = values(run_ranks(sent_by_each, 3, 3))
    assert of_all_ranks(found, 0) == of_all_ranks(found, 1)


Span = tuple[float, float]


def timeline(rank: int, world_size: int, name: str) -> tuple[list[Span], list[Span]]:
    """(when GEMMs ran, from when until when blocks were on their way, as far as this rank knows) in one call."""
    cut_small()
    over_hosts.PIECE_BYTES = 512
    divide(rank, world_size, 2)
    a, b = torch.ones(M, K), torch.ones(K, 4 * N)
    call = getattr(stream_k, name)
    call(a, b)
    gemms: list[Span] = []
    begun: dict[network.Leg, float] = {}
    legs: list[Span] = []
    inside, swap, wait = over_hosts._inside, network.Network.swap, hosts.Hosts.wait

    def timed_inside(*args: Any) -> Any:
        begin = time.monotonic()
        found = inside(*args)
        gemms.append((begin, time.monotonic()))
        return found

    def timed_swap(*args: Any) -> network.Leg:
        leg = swap(*args)
        begun[leg] = time.monotonic()
        return leg

    def timed_wait(self: hosts.Hosts, leg: network.Leg) -> None:
        wait(self, leg)
        legs.append((begun[leg], time.monotonic()))

    with (
        mock.patch.object(over_hosts, "_inside", timed_inside),
        mock.patch.object(network.Network, "swap", timed_swap),
        mock.patch.object(hosts.Hosts, "wait", timed_wait),
    ):
        call(a, b)
    return gemms, legs


@pytest.mark.num_ranks(4)
@pytest.mark.parametrize(
    "name", ["gemm_all_reduce", "gemm_all_scatter", "gemm_reduce_scatter", "all_gather_gemm"]
)
def test_blocks_travel_beside_gemms(name: str) -> None:
    """All but those of the last piece: between their sending and the wait for them a GEMM runs from end to end."""
    for gemms, legs in values(run_ranks(timeline, 4, name)):
        assert len(gemms) > 1
        beside = [any(begin < a and b < end for a, b in gemms) for begin, end in legs]
        # The own host's rows are multiplied last, while the others' are on their way; else the last piece's wait.
        assert all(beside if len(legs) < len(gemms) else beside[:-1]), (gemms, legs)


def on_one_host(rank: int, world_size: int) -> Any:
    """What a planned call does, of groups and of heaps, if it does anything for hosts."""
    use_device(rank)
    x = torch.ones(8, 4)
    collectives.all_reduce(x)
    rounds = heap_for(None).group.rounds
    launches = itertools.count()
    launch = kernel_launch.Launch.__call__

    def counted(self: Any, args: Any) -> None:
        next(launches)
        launch(self, args)

    refused = mock.Mock(side_effect=AssertionError("this is for several hosts"))
    with (
        mock.patch.object(hosts.Hosts, "__init__", refused),
        mock.patch.object(network.Network, "__init__", refused),
        mock.patch.object(dist, "new_group", refused),
        mock.patch.object(kernel_launch.Launch, "__call__", counted),
    ):
        collectives.all_reduce(x)
    return (
        next(launches),
        heap_for(None).group.rounds - rounds,
        math.prod(heap_for(None).group.host_numbers()),
    )


@pytest.mark.num_ranks(2)
def test_one_host_has_none_of_it() -> None:
    assert values(run_ranks(on_one_host, 2)) == [(1, 0, 0)] * 2
