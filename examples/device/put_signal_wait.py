"""Put, signal, wait: a flag for every tile; a wait for a peer that never comes (--late) ends with PeerTimeout.

python examples/device/put_signal_wait.py -n 4
"""

import time

import pyrocshmem  # isort: skip  # before Triton
import torch
import triton
import triton.language as tl
from common import run

from pyrocshmem import device, signal

OP = tl.constexpr(pyrocshmem.op_number("put_signal_wait"))
NUM_ELEMENTS, BLOCK, WAIT_S = 1000, 256, 3.0


@triton.jit
def send_kernel(out, slots, x, n, flags, rank, heap_bases, context, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Program p sends tile p of x [n] to the right; out [n] gets twice tile p of the left neighbour's."""
    epoch = signal.begin(context, True, WORLD)
    tile, one = tl.program_id(0), tl.arange(0, 1)
    offsets = tile * BLOCK + tl.arange(0, BLOCK)
    left, right = (rank + WORLD - 1) % WORLD, (rank + 1) % WORLD
    place, mask = slots + (epoch & 1) * n + offsets, offsets < n
    # Of two slots: a neighbour that has entered the call before has read what the one before that brought.
    if signal.wait_entered(epoch - 1, context, OP, WORLD):
        device.put(place, x + offsets, right, heap_bases, mask)
        signal.publish(signal.word(flags, tile, rank), epoch, right, heap_bases)
        if signal.wait(signal.word(flags, tile, left) + one, one == 0, epoch, tile, left, context, OP, WORLD):
            tl.store(out + offsets, 2 * tl.load(place, mask=mask), mask=mask)
    signal.end(context, epoch)


def send(out: torch.Tensor, slots: torch.Tensor, x: torch.Tensor, workspace: pyrocshmem.Workspace) -> None:
    """out [n]: twice x [n] of the left neighbour. slots [2, n]: on the workspace's heap."""
    heap, n, tiles = workspace.heap, x.numel(), triton.cdiv(x.numel(), BLOCK)
    args = (out, slots, x, n, workspace.flags(tiles), heap.rank, heap.heap_bases, workspace.context)
    constants = {"WORLD": heap.world_size, "BLOCK": BLOCK}
    pyrocshmem.launch(workspace, send_kernel, tiles, constants, args, name=f"send {n} {x.dtype}")


def rank_main(rank: int, world_size: int, late: bool) -> None:
    with pyrocshmem.Heap(1 << 20) as heap:
        workspace, slots = pyrocshmem.Workspace(heap, wait_seconds=WAIT_S), heap.zeros(2, NUM_ELEMENTS)
        x = torch.full((NUM_ELEMENTS,), 1.0 + rank, device=heap.device)
        for call in range(1 if late and rank == world_size - 1 else 2):
            out = torch.zeros_like(x)
            send(out, slots, x, workspace)
            heap.synchronize()  # raises the fault that the kernel recorded
            assert bool((out == 2 + 2 * ((rank - 1) % world_size)).all()), f"rank {rank}, call {call}"
        time.sleep(2 * WAIT_S if late else 0)  # a rank that is late is still there


if __name__ == "__main__":
    run(rank_main, "late")
