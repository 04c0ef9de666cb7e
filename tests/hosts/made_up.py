"""Hosts that are made up: ranks of one machine that act as if they shared no memory."""

from typing import Any

import torch

from pyrocshmem import target
from pyrocshmem.collectives import over_hosts as collectives_over_hosts
from pyrocshmem.hosts import Hosts, hosts_for
from pyrocshmem.places import make_up
from pyrocshmem.stream_k.ops import over_hosts as ops_over_hosts


def divide(rank: int, world_size: int, num_hosts: int, group: Any = None) -> Hosts:
    """This rank's place among hosts of equal numbers of ranks, on its device."""
    use_device(rank)
    make_up(rank * num_hosts // world_size)
    return hosts_for(group)


def use_device(rank: int) -> None:
    """Tensors are made on the device of this rank from here on."""
    torch.set_default_device(target.device(rank))


def cut_small() -> None:
    """Small tensors take the ways of large ones: several pieces and GEMMs, two trips."""
    ops_over_hosts.ROWS_OF_A_HOST = 0
    ops_over_hosts.PIECE_BYTES = 256
    collectives_over_hosts.ONE_TRIP_BYTES = 64


def bits(x: torch.Tensor) -> bytes:
    """To be compared between ranks."""
    return x.contiguous().cpu().view(torch.uint8).numpy().tobytes()
