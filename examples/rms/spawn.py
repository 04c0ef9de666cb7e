"""RMSNorm over processes that torch.multiprocessing.spawn starts: python examples/rms/spawn.py -n 4

Exits with 1 when any rank's result is wrong.
"""

import socket

import torch
import torch.distributed as dist
from common import Hidden, Ranks, Rows, check_rank, default_ranks, finish

from pyrocshmem import options, target


def rank_main(rank: int, ranks: int, port: int, rows: int, hidden: int) -> None:
    """One process, with the process group that the heap is formed over."""
    device = target.device(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    finish(check_rank(None, rows, hidden))


def main(ranks: Ranks = None, rows: Rows = 16, hidden: Hidden = 1001) -> None:
    """Check mixed-precision RMSNorm on spawned processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = default_ranks(ranks)
    torch.multiprocessing.spawn(rank_main, (ranks, port, rows, hidden), nprocs=ranks)


if __name__ == "__main__":
    options.run(main)
