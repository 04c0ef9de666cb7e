"""`all_reduce` of a symmetric tensor.

R ranks, n elements in blocks. One-shot: every rank reads all R copies of every block and sums them itself,
one hop, for small tensors. Two-shot: rank r reads and sums only the blocks it owns (block mod R), pushes each
sum to all ranks and raises done[block]; two hops, 2 (R-1)/R of the bytes, for large ones. Sums are fp32 in
rank order, rounded once, so all ranks get the same bits on every run.

    entered[peer] >= epoch    the peer's tensor may be read
    done[block] >= epoch      the owner's sum of the block has arrived

Nobody returns while a peer may still read its tensor: in a two-shot every owner has read a rank's blocks by
the time its sums have arrived; a one-shot, and a two-shot with fewer blocks than ranks, end by
`signal.barrier`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from collectives.tensors import BLOCK, check_symmetric, run
from pyrocshmem import signal, status, trace
from pyrocshmem.device import others, remote
from stream_k.workspace import Workspace, find_workspace

ALGORITHMS = ("auto", "one_shot", "two_shot")

# Up to here the second hop costs more than the bytes it saves (4 x H200: 8.6 against 9.1 us at 64 KiB, 13.3
# against 9.6 at 512 KiB).
ONE_SHOT_BYTES = 128 << 10

_OP = tl.constexpr(int(status.Op.ALL_REDUCE))


@triton.jit
def all_reduce_kernel(
    x, out, flags, context, n, events, ONE_SHOT: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum x [n] over ranks into out [n]. Example, R = 2, two-shot, three blocks: rank 0 sums blocks 0 and 2
    for both, rank 1 block 1."""
    control, abort, record, heap_bases = context
    rank = tl.load(control + signal.RANK)
    program = tl.program_id(0)
    blocks = tl.cdiv(n, BLOCK)
    lanes = tl.arange(0, signal.MAX_WORLD)
    epoch = signal.begin(context, True, WORLD)
    trace.mark(events, trace.WAIT, -1)
    if signal.wait_entered(epoch, context, _OP, WORLD):
        for block in range(program, blocks, tl.num_programs(0)):
            if ONE_SHOT or block % WORLD == rank:
                trace.mark(events, trace.REDUCE, block)
                offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
                mask = offsets < n
                total = tl.load(remote(x, 0, heap_bases) + offsets, mask=mask, other=0.0).to(tl.float32)
                for peer in tl.static_range(1, WORLD):
                    total += tl.load(remote(x, peer, heap_bases) + offsets, mask=mask, other=0.0).to(
                        tl.float32
                    )
                value = total.to(out.dtype.element_ty)
                tl.store(out + offsets, value, mask=mask)
                if not ONE_SHOT:
                    places = others(out, rank, heap_bases, WORLD)
                    for k in tl.static_range(WORLD - 1):
                        tl.store(places[k] + offsets, value, mask=mask)
                    trace.mark(events, trace.ANNOUNCE, block)
                    signal.publish(signal.word(flags, block, rank), epoch, lanes, heap_bases, lanes < WORLD)
        if not ONE_SHOT:
            trace.mark(events, trace.WAIT, -1)
            one = tl.arange(0, 1)
            for block in range(program, blocks, tl.num_programs(0)):
                done = signal.word(flags, block, block % WORLD + one)
                signal.wait(done, one == 0, epoch, block, block % WORLD, context, _OP, WORLD)
    if signal.end(context, epoch):
        if ONE_SHOT or blocks < WORLD:
            signal.barrier(epoch, context, _OP, WORLD)
    trace.mark(events, trace.END, -1)


def all_reduce(
    x: torch.Tensor,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Sum of `x` over the ranks of `group`, on every rank; the same bits on all.

    x: a contiguous symmetric tensor (float16, bfloat16, float32) of the same shape and place on every rank.
    out: like `x`; two-shot: symmetric too, and may be `x` itself; one-shot: any contiguous tensor but `x`.
    None: a new ordinary tensor. algorithm: "one_shot", "two_shot", or "auto" by size.

    Returns out. Raises TypeError, ValueError before any launch; `CallMismatch`, `PeerTimeout`, `PeerAborted`.
    """
    heap, workspace = find_workspace(group, workspace)
    check_symmetric(heap, "x", x)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}, allowed are {', '.join(ALGORITHMS)}")
    in_place = out is not None and out.data_ptr() == x.data_ptr()
    if algorithm == "auto":
        algorithm = (
            "one_shot" if x.numel() * x.element_size() <= ONE_SHOT_BYTES and not in_place else "two_shot"
        )
    one_shot = algorithm == "one_shot"
    if one_shot and in_place:
        raise ValueError(
            "a one-shot all-reduce reads every rank's x to the end: out must be another tensor, or use two_shot"
        )
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype or out.device != x.device):
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, {tuple(x.shape)} {x.dtype} on {x.device} is needed"
        )
    given = out if out is not None else torch.empty_like(x)
    if x.numel() == 0:
        return given
    target = given
    if one_shot and not given.is_contiguous():
        raise ValueError(f"out has strides {given.stride()}; contiguous is needed")
    if not one_shot and not (heap.is_symmetric(given) and given.is_contiguous()):
        target = workspace.buffer("results", x.numel(), x.dtype)[: x.numel()].view(x.shape)
    blocks = -(-x.numel() // BLOCK)
    flags = workspace.flags(blocks)
    offset = heap.offset(target) if not one_shot else None
    # With the offsets: ranks that bring tensors from different places must be told, not read one another's others.
    key = ("all_reduce", x.shape, x.dtype, one_shot, heap.offset(x), offset, target.data_ptr() % 16)
    call = f"all_reduce(x {tuple(x.shape)} {x.dtype} at offset {heap.offset(x)}, {algorithm}, out at offset {offset})"
    constants = {"ONE_SHOT": one_shot, "WORLD": heap.world_size, "BLOCK": BLOCK}
    run(
        workspace,
        key,
        call,
        all_reduce_kernel,
        constants,
        blocks,
        (x, target, flags, workspace.context, x.numel()),
    )
    return given if target is given else given.copy_(target)
