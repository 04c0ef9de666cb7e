"""A ring all-gather: in each of R - 1 steps every rank hands the block on that the step before brought.

python examples/device/ring_all_gather.py -n 4
"""

import pyrocshmem  # isort: skip  # before Triton
import torch
import triton
import triton.language as tl
from common import run

from pyrocshmem import device, signal

OP = tl.constexpr(pyrocshmem.op_number("ring_all_gather"))
NUM_ELEMENTS, BLOCK, CALLS = 1000, 256, 3


@triton.jit
def ring_kernel(y, n, flags, rank, heap_bases, context, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """y [WORLD, n], row r from rank r. Program p moves columns [p * BLOCK, (p + 1) * BLOCK) of every row."""
    epoch = signal.begin(context, True, WORLD)
    program, one = tl.program_id(0), tl.arange(0, 1)
    columns = program * BLOCK + tl.arange(0, BLOCK)
    left, right = (rank + WORLD - 1) % WORLD, (rank + 1) % WORLD
    # A neighbour that has entered this call has read what the last one brought.
    going = signal.wait_entered(epoch, context, OP, WORLD)
    for step in range(WORLD - 1):
        if going:
            place = y + (rank + WORLD - step) % WORLD * n + columns
            flag = step * tl.num_programs(0) + program
            device.put(place, place, right, heap_bases, columns < n)
            signal.publish(signal.word(flags, flag, rank), epoch, right, heap_bases)
            arrives = signal.word(flags, flag, left) + one
            going = signal.wait(arrives, one == 0, epoch, flag, left, context, OP, WORLD)
    signal.end(context, epoch)


def all_gather(y: torch.Tensor, workspace: pyrocshmem.Workspace) -> None:
    """Fill y [R, n], on the workspace's heap, of which each rank has written its own row."""
    heap, n, programs = workspace.heap, y.shape[1], triton.cdiv(y.shape[1], BLOCK)
    flags = workspace.flags((heap.world_size - 1) * programs)
    args = (y, n, flags, heap.rank, heap.heap_bases, workspace.context)
    constants = {"WORLD": heap.world_size, "BLOCK": BLOCK}
    pyrocshmem.launch(workspace, ring_kernel, programs, constants, args, name=f"ring of {n} {y.dtype}")


def rank_main(rank: int, world_size: int) -> None:
    with pyrocshmem.Heap(1 << 20) as heap:
        workspace, y = pyrocshmem.Workspace(heap), heap.zeros(world_size, NUM_ELEMENTS)
        ranks = torch.arange(world_size, device=heap.device)[:, None]
        for call in range(CALLS):
            y[rank] = 10 * call + rank
            all_gather(y, workspace)
            assert bool((y == 10 * call + ranks).all()), f"rank {rank}, call {call}"
        heap.barrier()


if __name__ == "__main__":
    run(rank_main)
