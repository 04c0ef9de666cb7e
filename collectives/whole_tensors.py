"""`all_reduce`, `all_gather`, `reduce_scatter`, `all_scatter`, `broadcast` and `barrier` of a group of ranks.

    total = collectives.all_reduce(x, group=group)
    collectives.all_reduce(x, group=group, out=x)               # in place
    rows = collectives.reduce_scatter(x, group=group)           # this rank's rows of the sum

x and out are ordinary tensors, anywhere, of any size: the data travel as messages (`collectives.exchange_kernel`)
through slots on the group's heap. All ranks of the group make the same calls in the same order, with the same shapes
and dtypes. Nothing waits for the device: a fault of a peer shows at the next call, or at `heap.synchronize()`; the
result then holds garbage. All raise TypeError and ValueError before any launch; `CallMismatch` where ranks disagree,
`PeerTimeout`, `PeerAborted`, `HeapOutOfMemory`, `WorkspaceBusy`. All but `barrier` can be differentiated, and traced by
`torch.compile`, where `out` is not given: `collectives.library`.
"""

from __future__ import annotations

from typing import Any

import torch

from pyrocshmem import status
from pyrocshmem.calls.operators import dispatched, name_of, ops
from pyrocshmem.calls.planned import agree
from pyrocshmem.calls.tensors import (
    check_dense,
    check_held,
    check_plain,
    check_writable,
    new_like,
    share_memory,
    tell_autograd,
)
from pyrocshmem.calls.workspace import Workspace, find_workspace
from pyrocshmem.checks import as_integer
from pyrocshmem.collectives.exchange import cheaper_algorithm, exchange
from pyrocshmem.elements import DTYPES, names
from pyrocshmem.heap import Heap
from pyrocshmem.shards import shard_range

ALGORITHMS = ("auto", "one_shot", "two_shot")


def all_reduce(
    x: torch.Tensor,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Sum of `x` over the ranks of `group`, added in fp32 and rounded once, the same bits on every rank.

    x: any shape; float16, bfloat16 or float32. group: a ProcessGroup, a 1-D DeviceMesh, a Heap; None: the default
    process group. out: like `x`, and may be `x` itself; None: a new tensor. algorithm: "one_shot" (everything to
    everyone: one hop), "two_shot" (parts to their owners, sums to everyone: 2 (R-1)/R of the bytes), or "auto" by
    size.

    Returns out. Raises TypeError, ValueError before any launch; `CallMismatch` where ranks disagree, `PeerTimeout`,
    `PeerAborted`, `HeapOutOfMemory`, `WorkspaceBusy`.
    """
    check_algorithm(algorithm)
    if dispatched(x, whole=out is None):
        return _operator("all_reduce", x, 0, out, algorithm, name_of(group, workspace))
    heap, workspace = find_workspace(group, workspace)
    check(heap, x)
    if algorithm == "auto":
        algorithm = cheaper_algorithm(x.numel() * x.element_size(), heap.world_size)
    return _exchanged(heap, workspace, status.Op.ALL_REDUCE, algorithm, x, x.shape, out)


def all_gather(
    x: torch.Tensor, *, group: Any = None, out: torch.Tensor | None = None, workspace: Workspace | None = None
) -> torch.Tensor:
    """`x` of every rank of `group`, one below the other in rank order, on every rank.

    x: [M, ...], the same shape on every rank; float16, bfloat16 or float32; the values arrive bit by bit, but for the
    payload of one NaN. out: [R x M, ...], and x may be its part of it; None: a new tensor. Returns out. Raises as
    `all_reduce`.
    """
    if dispatched(x, whole=out is None):
        return _operator("all_gather", x, 1, out, name_of(group, workspace))
    heap, workspace = find_workspace(group, workspace)
    check(heap, x, dimensions=1)
    shape = (x.shape[0] * heap.world_size, *x.shape[1:])
    return _exchanged(heap, workspace, status.Op.ALL_GATHER, "all_gather", x, shape, out)


def reduce_scatter(
    x: torch.Tensor, *, group: Any = None, out: torch.Tensor | None = None, workspace: Workspace | None = None
) -> torch.Tensor:
    """This rank's rows of the sum of `x` over the ranks of `group`, added in fp32 and rounded once.

    x: [M, ...]; float16, bfloat16 or float32. Rank r gets block r of `torch.tensor_split(sum, R)`: M / R rows, or
    one more on the first M % R ranks. out: these rows, which may be x's own; None: a new tensor. Returns out.
    Raises as `all_reduce`.
    """
    if dispatched(x, whole=out is None):
        return _operator("reduce_scatter", x, 1, out, name_of(group, workspace))
    heap, workspace = find_workspace(group, workspace)
    check(heap, x, dimensions=1)
    first, last = shard_range(x.shape[0], heap.rank, heap.world_size)
    shape = (last - first, *x.shape[1:])
    return _exchanged(heap, workspace, status.Op.REDUCE_SCATTER, "reduce_scatter", x, shape, out)


def all_scatter(
    x: torch.Tensor, *, group: Any = None, out: torch.Tensor | None = None, workspace: Workspace | None = None
) -> torch.Tensor:
    """`x` of every rank of `group`, side by side in rank order, on every rank.

    x: [M, N], the same shape on every rank; float16, bfloat16 or float32. out: [M, R x N], and x may be its columns of
    it, which are then copied first; None: a new tensor. Returns out. Raises as `all_reduce`.
    """
    if isinstance(x, torch.Tensor) and x.ndim != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, a matrix is needed")
    if dispatched(x, whole=out is None):
        return _operator("all_scatter", x, 2, out, name_of(group, workspace))
    heap, workspace = find_workspace(group, workspace)
    check(heap, x)
    shape = (x.shape[0], heap.world_size * x.shape[1])
    return _exchanged(heap, workspace, status.Op.ALL_SCATTER, "all_scatter", x, shape, out)


def broadcast(
    x: torch.Tensor,
    root: int = 0,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """`x` of rank `root` of `group`, on every rank.

    x: any shape, the same on every rank; float16, bfloat16 or float32; on the others its values don't matter. root: a
    rank of the group. out: like `x`, and may be `x` itself; None: a new tensor. Returns out. Raises as `all_reduce`.
    """
    root = as_integer("root", root)
    if dispatched(x, whole=out is None):
        return _operator("broadcast", x, 0, out, root, name_of(group, workspace))
    heap, workspace = find_workspace(group, workspace)
    check(heap, x)
    if not 0 <= root < heap.world_size:
        raise ValueError(f"root is {root}, the group has ranks 0 to {heap.world_size - 1}")
    return _exchanged(heap, workspace, status.Op.BROADCAST, "broadcast", x, x.shape, out, root)


def barrier(*, group: Any = None, workspace: Workspace | None = None) -> None:
    """What is enqueued after it on this rank's stream runs after all that was enqueued before it on any rank's.

    The host does not wait; `Heap.barrier` is the one that does. NotImplementedError where torch.compile traces it: a
    graph makes the writes of its inputs at its end, past a barrier. Call it between compiled functions.
    """
    if dispatched(whole=False):
        raise NotImplementedError(
            "barrier is no part of a graph, which would move writes past it; call it between compiled functions"
        )
    heap, workspace = find_workspace(group, workspace)
    token = workspace.buffer("barrier", 2, torch.float32, local=True)
    if heap.world_size > 1:
        exchange(workspace, status.Op.BARRIER, "one_shot", token[:1], token[1:])


def check_algorithm(algorithm: str) -> None:
    """ValueError for what is no algorithm of an all-reduce."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}, allowed are {', '.join(ALGORITHMS)}")


def check(heap: Heap, x: torch.Tensor, dimensions: int = 0) -> None:
    """TypeError, ValueError unless `x` is a tensor that can be sent, on the heap's device, of at least `dimensions`."""
    check_kind(x, dimensions)
    if x.device != heap.device:
        raise ValueError(f"x is on {x.device}, the group's heap on {heap.device}; both must be one device")


def check_kind(x: torch.Tensor, dimensions: int) -> None:
    """As `check`, on any device."""
    if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES:
        raise TypeError(f"x is {getattr(x, 'dtype', type(x).__name__)}, a tensor is needed of {names()}")
    check_dense(x)
    check_held("x", x)
    if x.ndim < dimensions:
        raise ValueError(f"x has shape {tuple(x.shape)}, {dimensions} dimensions or more are needed")


def _operator(
    name: str, x: torch.Tensor, dimensions: int, out: torch.Tensor | None, *more: Any
) -> torch.Tensor:
    """The call through its operator."""
    if out is not None:
        raise ValueError(
            f"{name} takes no out where a gradient is needed or torch.compile traces it; leave it out, or call it "
            "eagerly under torch.no_grad()"
        )
    check_kind(x, dimensions)
    return getattr(ops, name)(x, *more)


def _exchanged(
    heap: Heap,
    workspace: Workspace,
    op: int,
    kind: str,
    x: torch.Tensor,
    shape: tuple[int, ...],
    out: torch.Tensor | None,
    root: int = 0,
) -> torch.Tensor:
    if out is not None:
        _check_out(kind, x, shape, out, heap)
        tell_autograd(out)
    given = out if out is not None else torch.empty(shape, dtype=x.dtype, device=x.device)
    if heap.world_size == 1:
        return given.copy_(x)
    if x.numel() == 0:
        agree(workspace, f"{kind} of {tuple(x.shape)} {x.dtype}, root {root}")
        return given
    written = given if given.is_contiguous() else new_like(given)
    exchange(workspace, op, kind, x.resolve_neg().contiguous(), written, root)
    return given if written is given else given.copy_(written)


def _check_out(kind: str, x: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor, heap: Heap) -> None:
    """TypeError, ValueError unless `out` can take a result of `shape` from checked `x`."""
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is a {type(out).__name__}, a torch.Tensor or None is needed")
    if out.dtype != x.dtype:
        raise TypeError(f"out has dtype {out.dtype}, allowed is {x.dtype}, that of x")
    if out.shape != shape or out.device != x.device:
        raise ValueError(f"out is {tuple(out.shape)} on {out.device}, {tuple(shape)} on {x.device} is needed")
    check_plain("out", out)
    check_writable("out", out)
    if _clash(kind, x, out, heap):
        raise ValueError("x and out overlap, and are not in place: give another out")


def _clash(kind: str, x: torch.Tensor, out: torch.Tensor, heap: Heap) -> bool:
    """Whether x and out share memory in another way than in place, which is safe.

    In place a program of the exchange writes only elements that it has read itself and has received back as messages.
    Tensors that are not contiguous are copied, x before the exchange and out after it.
    """
    if x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr() or not share_memory(x, out):
        return False
    if kind == "all_gather":
        out = out.narrow(0, heap.rank * x.shape[0], x.shape[0])
    elif kind == "all_scatter":
        out = out.narrow(1, heap.rank * x.shape[1], x.shape[1])
    elif kind == "reduce_scatter":
        x = x.tensor_split(heap.world_size)[heap.rank]
    alike = x.stride() == out.stride() or (x.is_contiguous() and out.is_contiguous())
    return x.data_ptr() != out.data_ptr() or not alike
