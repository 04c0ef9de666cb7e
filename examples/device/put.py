"""A put: every rank stores into its right neighbour's tensor, and a barrier in the kernel makes that visible.

python examples/device/put.py -n 4
"""

import pyrocshmem  # isort: skip  # before Triton
import torch
import triton
import triton.language as tl
from common import run

from pyrocshmem import device, signal

OP = tl.constexpr(pyrocshmem.op_number("put"))
NUM_ELEMENTS, BLOCK, CALLS = 1000, 256, 3


@triton.jit
def put_kernel(y, x, n, rank, heap_bases, context, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Program p copies elements [p * BLOCK, (p + 1) * BLOCK) of x [n] to the right neighbour's y [n]."""
    epoch = signal.begin(context, True, WORLD)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # A neighbour that has entered this call has read what the last one brought.
    if signal.wait_entered(epoch, context, OP, WORLD):
        device.put(y + offsets, x + offsets, (rank + 1) % WORLD, heap_bases, offsets < n)
    if signal.end(context, epoch):  # in the last program of the rank, when all others are done
        signal.barrier(epoch, context, OP, WORLD)


def put(y: torch.Tensor, x: torch.Tensor, workspace: pyrocshmem.Workspace) -> None:
    """Copy x [n] of every rank to its right neighbour's y [n], which is on the workspace's heap."""
    heap, n = workspace.heap, x.numel()
    args = (y, x, n, heap.rank, heap.heap_bases, workspace.context)
    constants = {"WORLD": heap.world_size, "BLOCK": BLOCK}
    pyrocshmem.launch(
        workspace, put_kernel, triton.cdiv(n, BLOCK), constants, args, name=f"put of {n} {x.dtype}"
    )


def rank_main(rank: int, world_size: int) -> None:
    with pyrocshmem.Heap(1 << 20) as heap:
        workspace = pyrocshmem.Workspace(heap)
        x, y = torch.arange(NUM_ELEMENTS, device=heap.device), heap.zeros(NUM_ELEMENTS, dtype=torch.int64)
        for call in range(CALLS):
            put(y, x + 1000 * rank + call, workspace)
            assert torch.equal(y, x + 1000 * ((rank - 1) % world_size) + call), f"rank {rank}, call {call}"
        heap.barrier()


if __name__ == "__main__":
    run(rank_main)
