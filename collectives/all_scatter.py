"""`all_scatter` of a symmetric or ordinary matrix: every rank's columns, side by side, on every rank.

R ranks, x [M, N] on each, out [M, R x N]. Each rank stores blocks of rows of `x` into its columns of every
rank's `out`, raises arrived[rank][block] everywhere, and, after all its own pushes, waits for the same blocks
of the others. Before the first push a rank waits until its peers have entered the call, hence are done with
what `out` held before.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from collectives.tensors import BLOCK, DTYPES, check_symmetric, run
from pyrocshmem import signal, status, trace
from pyrocshmem.device import others
from stream_k.workspace import Workspace, find_workspace

_OP = tl.constexpr(int(status.Op.ALL_SCATTER))


@triton.jit
def all_scatter_kernel(
    x, out, flags, context, M, N, stride_m, events,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """x [M, N] to columns [rank x N, (rank + 1) x N) of every rank's out. Example, R = 2, N = 4: rank 1
    writes columns 4 to 7 of both."""
    control, abort, record, heap_bases = context
    rank = tl.load(control + signal.RANK)
    columns = tl.cdiv(N, COLUMNS)
    blocks = tl.cdiv(M, ROWS) * columns
    lanes = tl.arange(0, signal.MAX_WORLD)
    epoch = signal.begin(context, True, WORLD)
    trace.mark(events, trace.WAIT, -1)
    if signal.wait_entered(epoch, context, _OP, WORLD):
        places = others(out, rank, heap_bases, WORLD) + (out,)
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            trace.mark(events, trace.PUSH, block)
            i = tl.cast(block // columns * ROWS, tl.int64) + tl.arange(0, ROWS)
            j = block % columns * COLUMNS + tl.arange(0, COLUMNS)
            mask = (i < M)[:, None] & (j < N)[None, :]
            value = tl.load(x + i[:, None] * stride_m + j[None, :], mask=mask)
            for k in tl.static_range(WORLD):
                tl.store(places[k] + i[:, None] * (N * WORLD) + (rank * N + j)[None, :], value, mask=mask)
            trace.mark(events, trace.ANNOUNCE, block)
            signal.publish(signal.word(flags, block, rank), epoch, lanes, heap_bases, lanes < WORLD)
        trace.mark(events, trace.WAIT, -1)
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            signal.wait(
                signal.word(flags, block, lanes), lanes < WORLD, epoch, block, lanes, context, _OP, WORLD
            )
    signal.end(context, epoch)
    trace.mark(events, trace.END, -1)


def all_scatter(
    x: torch.Tensor, *, group: Any = None, out: torch.Tensor | None = None, workspace: Workspace | None = None
) -> torch.Tensor:
    """`x` of every rank of `group`, side by side in rank order, on every rank.

    x: [M, N] with contiguous rows (float16, bfloat16, float32), the same shape on every rank; it need not be
    symmetric. out: [M, R x N]; symmetric and contiguous: peers write it directly; None: a new ordinary
    tensor.

    Returns out. Raises TypeError, ValueError before any launch; `CallMismatch`, `PeerTimeout`, `PeerAborted`.
    """
    heap, workspace = find_workspace(group, workspace)
    if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES:
        raise TypeError(
            f"x is {getattr(x, 'dtype', type(x).__name__)}, a tensor is needed of {', '.join(map(str, DTYPES))}"
        )
    if x.ndim != 2 or x.device != heap.device or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(
            f"x has shape {tuple(x.shape)}, strides {x.stride()}, on {x.device}; "
            f"a matrix with contiguous rows on {heap.device} is needed"
        )
    M, N = x.shape
    shape = (M, heap.world_size * N)
    if out is not None and (out.shape != shape or out.dtype != x.dtype or out.device != x.device):
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, {shape} {x.dtype} on {x.device} is needed"
        )
    given = out if out is not None else torch.empty(shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return given
    target = given
    if not (heap.is_symmetric(given) and given.is_contiguous()):
        target = workspace.buffer("results", given.numel(), x.dtype)[: given.numel()].view(shape)
    check_symmetric(heap, "out", target)
    wide = min(256, triton.next_power_of_2(N))
    rows = BLOCK // wide
    blocks = -(-M // rows) * -(-N // wide)
    flags = workspace.flags(blocks)
    key = ("all_scatter", x.shape, x.stride(0), x.dtype, x.data_ptr() % 16, heap.offset(target))
    call = f"all_scatter(x {tuple(x.shape)} {x.dtype}, out at offset {heap.offset(target)})"
    constants = {"ROWS": rows, "COLUMNS": wide, "WORLD": heap.world_size}
    run(
        workspace,
        key,
        call,
        all_scatter_kernel,
        constants,
        blocks,
        (x, target, flags, workspace.context, M, N, x.stride(0)),
    )
    return given if target is given else given.copy_(target)
