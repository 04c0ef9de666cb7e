"""`all_reduce`, `all_gather`, `reduce_scatter`, `all_scatter`, `broadcast` and `barrier` of a group of ranks.

    total = collectives.all_reduce(x, group=group)
    collectives.all_reduce_(x, group=group, op="max")           # in place
    rows = collectives.reduce_scatter(x, group=group)           # this rank's rows of the sum
    work = collectives.broadcast_(x, 0, group=group, async_op=True)

x and out are ordinary tensors, anywhere, of any size: the data travel as messages (`collectives.exchange_kernel`)
through slots on the group's heap, and between hosts, where a group spans several, through torch.distributed
(`collectives.over_hosts`). All ranks of the group make the same calls in the same order, with the same shapes
and dtypes. Nothing waits for the device: a fault of a peer shows at the next call, or at `heap.synchronize()`; the
result then holds garbage. All raise TypeError and ValueError before any launch; `CallMismatch` where ranks disagree,
`PeerTimeout`, `PeerAborted`, `HeapOutOfMemory`, `WorkspaceBusy`. All but `barrier` can be differentiated, and traced by
`torch.compile`, where neither `out` nor `async_op` is given: `collectives.library`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _disabled_torch_dispatch_impl

from pyrocshmem import status
from pyrocshmem.calls.call_name import CallName
from pyrocshmem.calls.operators import dispatched, name_of, needs_gradient, ops, refuse
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
from pyrocshmem.collectives import work
from pyrocshmem.collectives.exchange import cheaper_algorithm, exchange
from pyrocshmem.collectives.over_hosts import exchange_over_hosts
from pyrocshmem.collectives.reductions import REDUCTIONS
from pyrocshmem.elements import DTYPES, MOVED, REDUCED, names
from pyrocshmem.heap import Heap
from pyrocshmem.shards import shard_range

ALGORITHMS = ("auto", "one_shot", "two_shot")


def all_reduce(
    x: torch.Tensor,
    *,
    group: Any = None,
    op: Any = "sum",
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    async_op: bool = False,
    workspace: Workspace | None = None,
) -> Any:
    """Sum of `x` over the ranks of `group`, or another reduction, the same bits on every rank.

    x: any shape; float16, bfloat16 or float32, added in fp32 and rounded once; int8 to int64 or uint8, whose sums wrap
    around as PyTorch's do; bool, whose sum is "or", as with NCCL. group: a ProcessGroup, a 1-D DeviceMesh, a Heap;
    None: the default process group. op: "sum", "avg" (floating point alone: the sum divided by R, then rounded), "max"
    or "min", or a `torch.distributed.ReduceOp`. Of the latter two a NaN counts as missing, as with NCCL, and the result
    is NaN where all ranks have one; -0.0 is less than 0.0. They have no gradient. out: like `x`, and may be `x` itself;
    None: a new tensor. algorithm: "one_shot" (everything to everyone: one hop), "two_shot" (parts to their owners, sums
    to everyone: 2 (R-1)/R of the bytes), or "auto" by size; over several hosts always parts of x / L inside, L ranks a
    host, which ranks of one number add over hosts. async_op: make the call on a stream of the workspace.

    Returns out, or with async_op a `collectives.Work` that has it. Raises TypeError, ValueError before any launch;
    `CallMismatch` where ranks disagree, `PeerTimeout`, `PeerAborted`, `HeapOutOfMemory`, `WorkspaceBusy`;
    NotImplementedError for a gradient of "max" or "min".
    """
    check_algorithm(algorithm)
    reduction = reduction_of(op)
    _check_reduced(x, 0, reduction)
    if dispatched(x, whole=out is None and not async_op):
        _check_operator("all_reduce", x, out, async_op, reduction)
        return ops.all_reduce(x, algorithm, name_of(group, workspace), reduction)
    heap, workspace = find_workspace(group, workspace)
    check_place(heap, x)
    if algorithm == "auto":
        algorithm = cheaper_algorithm(x.numel() * x.element_size(), workspace.world_size, alone=True)
    return _exchanged(
        workspace, status.Op.ALL_REDUCE, algorithm, x, x.shape, out, async_op, reduction=reduction
    )


def all_reduce_(
    x: torch.Tensor,
    *,
    group: Any = None,
    op: Any = "sum",
    algorithm: str = "auto",
    async_op: bool = False,
    workspace: Workspace | None = None,
) -> Any:
    """`all_reduce` in place, as torch.distributed's: x holds the result. Arguments and errors as there.

    Returns x, or with async_op a `collectives.Work`. Where a gradient is needed or torch.compile traces it, the result
    is copied into x.
    """
    if dispatched(x) and not async_op:
        return x.copy_(all_reduce(x, group=group, op=op, algorithm=algorithm, workspace=workspace))
    return all_reduce(
        x, group=group, op=op, out=x, algorithm=algorithm, async_op=async_op, workspace=workspace
    )


def all_gather(
    x: torch.Tensor,
    *,
    group: Any = None,
    gather_dim: int = 0,
    out: torch.Tensor | None = None,
    async_op: bool = False,
    workspace: Workspace | None = None,
) -> Any:
    """`x` of every rank of `group`, one behind the other in rank order, on every rank.

    x: [M, ...], the same shape on every rank; of any dtype of real numbers, or bool. Its bits arrive as they are; of
    float16, bfloat16 and float32 but for the payload of one NaN (`x.view(torch.int32)` has none). gather_dim: the
    dimension along which the tensors are joined; another than the first costs no copy. Over several hosts each rank
    sends x to the rank of its number on the other hosts, and gathers what came inside its own. out: [R x M, ...], and x
    may be its part of it; None: a new tensor. async_op: as of `all_reduce`. Returns out, or a `collectives.Work`.
    Raises as `all_reduce`.
    """
    check_kind(x, 1, MOVED)
    dim = _dimension("gather_dim", gather_dim, x)
    if dispatched(x, whole=out is None and not async_op):
        _check_operator("all_gather", x, out, async_op)
        return ops.all_gather(x, name_of(group, workspace), dim)
    heap, workspace = find_workspace(group, workspace)
    check_place(heap, x)
    shape = (*x.shape[:dim], x.shape[dim] * workspace.world_size, *x.shape[dim + 1 :])
    return _exchanged(workspace, status.Op.ALL_GATHER, "all_gather", x, shape, out, async_op, dim=dim)


def reduce_scatter(
    x: torch.Tensor,
    *,
    group: Any = None,
    op: Any = "sum",
    scatter_dim: int = 0,
    out: torch.Tensor | None = None,
    async_op: bool = False,
    workspace: Workspace | None = None,
) -> Any:
    """This rank's rows of the sum of `x` over the ranks of `group`, or of another reduction.

    x: [M, ...]; dtypes and op as of `all_reduce`. Rank r gets block r of `torch.tensor_split(sum, R)`: M / R rows, or
    one more on the first M % R ranks. scatter_dim: the dimension along which the result is divided; for another than
    the first x is copied before. Over several hosts each rank sends the sum of its host of x / R to the rank of its
    number on every other host. out: these rows, which may be x's own; None: a new tensor. async_op: as of
    `all_reduce`. Returns out, or a `collectives.Work`. Raises as `all_reduce`.
    """
    reduction = reduction_of(op)
    _check_reduced(x, 1, reduction)
    dim = _dimension("scatter_dim", scatter_dim, x)
    if dispatched(x, whole=out is None and not async_op):
        _check_operator("reduce_scatter", x, out, async_op, reduction)
        return ops.reduce_scatter(x, name_of(group, workspace), reduction, dim)
    heap, workspace = find_workspace(group, workspace)
    check_place(heap, x)
    first, last = shard_range(x.shape[dim], workspace.rank, workspace.world_size)
    shape = (*x.shape[:dim], last - first, *x.shape[dim + 1 :])
    op = status.Op.REDUCE_SCATTER
    return _exchanged(workspace, op, "reduce_scatter", x, shape, out, async_op, reduction=reduction, dim=dim)


def all_scatter(
    x: torch.Tensor,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    async_op: bool = False,
    workspace: Workspace | None = None,
) -> Any:
    """`x` of every rank of `group`, side by side in rank order, on every rank: `all_gather` of matrices, gather_dim 1.

    x: [M, N], the same shape on every rank; dtypes as of `all_gather`. out: [M, R x N], and x may be its columns of
    it, which are then copied first; None: a new tensor. Over several hosts as `all_gather`. async_op: as of
    `all_reduce`. Returns out, or a
    `collectives.Work`. Raises as `all_reduce`.
    """
    if isinstance(x, torch.Tensor) and x.ndim != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, a matrix is needed")
    check_kind(x, 2, MOVED)
    if dispatched(x, whole=out is None and not async_op):
        _check_operator("all_scatter", x, out, async_op)
        return ops.all_scatter(x, name_of(group, workspace))
    heap, workspace = find_workspace(group, workspace)
    check_place(heap, x)
    shape = (x.shape[0], workspace.world_size * x.shape[1])
    return _exchanged(workspace, status.Op.ALL_SCATTER, "all_scatter", x, shape, out, async_op, dim=1)


def broadcast(
    x: torch.Tensor,
    root: int = 0,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    async_op: bool = False,
    workspace: Workspace | None = None,
) -> Any:
    """`x` of rank `root` of `group`, on every rank.

    x: any shape, the same on every rank; dtypes as of `all_gather`; on the other ranks its values don't matter. root: a
    rank of the group. Over several hosts each rank of its host sends 1 / L of x to the rank of its number on the
    others. out: like `x`, and may be `x` itself; None: a new tensor. async_op: as of `all_reduce`. Returns out, or a
    `collectives.Work`. Raises as `all_reduce`.
    """
    root = as_integer("root", root)
    check_kind(x, 0, MOVED)
    if dispatched(x, whole=out is None and not async_op):
        _check_operator("broadcast", x, out, async_op)
        return ops.broadcast(x, root, name_of(group, workspace))
    heap, workspace = find_workspace(group, workspace)
    check_place(heap, x)
    if not 0 <= root < workspace.world_size:
        raise ValueError(f"root is {root}, the group has ranks 0 to {workspace.world_size - 1}")
    return _exchanged(workspace, status.Op.BROADCAST, "broadcast", x, x.shape, out, async_op, root=root)


def broadcast_(
    x: torch.Tensor,
    root: int = 0,
    *,
    group: Any = None,
    async_op: bool = False,
    workspace: Workspace | None = None,
) -> Any:
    """`broadcast` in place, as torch.distributed's: x holds the root's. Arguments and errors as there; returns x, or
    with async_op a `collectives.Work`. Where a gradient is needed or torch.compile traces it, the result is copied into
    x."""
    if dispatched(x) and not async_op:
        return x.copy_(broadcast(x, root, group=group, workspace=workspace))
    return broadcast(x, root, group=group, out=x, async_op=async_op, workspace=workspace)


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
    if workspace.hosts is not None:
        exchange_over_hosts(workspace.hosts, status.Op.BARRIER, "one_shot", token[:1], token[1:])
    elif heap.world_size > 1:
        exchange(workspace, status.Op.BARRIER, "one_shot", token[:1], token[1:])


def check_algorithm(algorithm: str) -> None:
    """ValueError for what is no algorithm of an all-reduce."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}, allowed are {', '.join(ALGORITHMS)}")


def reduction_of(op: Any) -> str:
    """The name of a reduction, of "sum" or of `torch.distributed.ReduceOp.SUM`. ValueError for one there is not."""
    if type(op) is str and op in REDUCTIONS:
        return op
    name = op.lower() if isinstance(op, str) else ""
    if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        name = next((name for name in REDUCTIONS if op == getattr(dist.ReduceOp, name.upper())), "")
    if name not in REDUCTIONS:
        raise ValueError(
            f"op is {op!r}, allowed are {', '.join(REDUCTIONS)}, or torch.distributed's of these names"
        )
    return name


def _dimension(name: str, dim: Any, x: torch.Tensor) -> int:
    """`dim` counted from the first; ValueError for one that x does not have."""
    number = as_integer(name, dim)
    if not -x.ndim <= number < x.ndim:
        raise ValueError(
            f"{name} is {dim}, x has shape {tuple(x.shape)}: allowed are {-x.ndim} to {x.ndim - 1}"
        )
    return number % x.ndim


def check_kind(x: torch.Tensor, dimensions: int, allowed: tuple[torch.dtype, ...]) -> None:
    """TypeError, ValueError unless `x` is a tensor that can be sent, of at least `dimensions`."""
    if not isinstance(x, torch.Tensor):
        more = "; torch.from_dlpack(x) makes one" if hasattr(x, "__dlpack__") else ""
        raise TypeError(f"x is a {type(x).__name__}, a torch.Tensor is needed{more}")
    if type(x) is not torch.Tensor and hasattr(type(x), "to_local"):
        raise TypeError(f"x is a {type(x).__name__}, which lies on several ranks; give x.to_local()")
    if x.dtype not in allowed:
        raise TypeError(f"x is {x.dtype}, a tensor is needed of {names(allowed)}")
    check_dense(x)
    check_held("x", x)
    if x.ndim < dimensions:
        raise ValueError(f"x has shape {tuple(x.shape)}, {dimensions} dimensions or more are needed")


def _check_reduced(x: torch.Tensor, dimensions: int, reduction: str) -> None:
    """As `check_kind`; integers have no average."""
    if reduction == "avg" and isinstance(x, torch.Tensor) and x.dtype in REDUCED and x.dtype not in DTYPES:
        raise TypeError(
            f"op is 'avg' of {x.dtype}, allowed are {names()}: sum integers, and divide as you mean it"
        )
    check_kind(x, dimensions, REDUCED)


def check_place(heap: Heap, x: torch.Tensor) -> None:
    """ValueError unless `x` is on the heap's device."""
    if x.device != heap.device:
        raise ValueError(f"x is on {x.device}, the group's heap on {heap.device}; both must be one device")


def check_differentiable(name: str, reduction: str) -> None:
    """NotImplementedError for a reduction without a gradient."""
    if reduction in ("max", "min"):
        raise NotImplementedError(
            f"{name} with op {reduction!r} has no gradient; give x.detach(), or call it under torch.no_grad()"
        )


def _check_operator(
    name: str, x: torch.Tensor, out: torch.Tensor | None, async_op: bool, reduction: str = ""
) -> None:
    """ValueError, NotImplementedError for a call that can't go through its operator."""
    refuse(name, async_op=async_op, out=out)
    if needs_gradient((x,)):
        check_differentiable(name, reduction)


def _exchanged(
    workspace: Workspace,
    op: int,
    kind: str,
    x: torch.Tensor,
    shape: tuple[int, ...],
    out: torch.Tensor | None,
    async_op: bool,
    root: int = 0,
    reduction: str = "",
    dim: int = 0,
) -> Any:
    """Make a call: its result, of `shape`, or the work that has it. kind: of the exchange. dim: along which tensors are
    joined or divided."""
    if out is not None:
        _check_out(kind, x, shape, out, workspace, dim)
        tell_autograd(out)

    def call() -> torch.Tensor:
        given = out if out is not None else torch.empty(shape, dtype=x.dtype, device=x.device)
        if workspace.world_size == 1:
            return given.copy_(x)
        if x.numel() == 0 and workspace.hosts is None:
            how = f"{reduction or 'moved'} along {dim}, root {root}"
            agree(workspace, CallName(f"{kind} of {tuple(x.shape)} {x.dtype}: {how}"))
            return given
        written = given if given.is_contiguous() else new_like(given)
        way, sent, received = _as_sent(kind, x.resolve_neg().contiguous(), written, workspace.world_size, dim)
        # The sum of bools is "or".
        reduced = "max" if x.dtype == torch.bool and reduction == "sum" else reduction
        if workspace.hosts is not None:
            exchange_over_hosts(workspace.hosts, op, way, sent, received, root, reduced, dim, x.shape)
        else:
            exchange(workspace, op, way, sent, received, root, reduced, dim, x.shape)
        return given if written is given else given.copy_(written)

    return work.started(workspace, call, x, out) if async_op else call()


def _as_sent(
    kind: str, x: torch.Tensor, out: torch.Tensor, world_size: int, dim: int
) -> tuple[str, torch.Tensor, torch.Tensor]:
    """(kind, x, out) of the exchange of contiguous tensors that are joined or divided along `dim`."""
    if dim and kind == "all_gather":
        # As matrices, whose rows are joined side by side.
        rows = math.prod(x.shape[:dim])
        return "all_scatter", x.view(rows, -1), out.view(rows, -1)
    if dim and kind == "reduce_scatter":
        # What a rank sums lies together.
        blocks = [block.reshape(-1) for block in x.tensor_split(world_size, dim)]
        return kind, torch.cat(blocks).view(x.shape[dim], -1), out
    return kind, x, out


def _check_out(
    kind: str, x: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor, workspace: Workspace, dim: int
) -> None:
    """TypeError, ValueError unless `out` can take a result of `shape` from checked `x`."""
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is a {type(out).__name__}, a torch.Tensor or None is needed")
    if type(out).__torch_dispatch__ is not _disabled_torch_dispatch_impl:
        raise TypeError(f"out is a {type(out).__name__}, which has no memory of its own; give a torch.Tensor")
    if out.dtype != x.dtype:
        raise TypeError(f"out has dtype {out.dtype}, allowed is {x.dtype}, that of x")
    if out.shape != shape or out.device != x.device:
        raise ValueError(f"out is {tuple(out.shape)} on {out.device}, {tuple(shape)} on {x.device} is needed")
    check_plain("out", out)
    check_writable("out", out)
    if _clash(kind, x, out, workspace, dim):
        raise ValueError("x and out overlap, and are not in place: give another out")


def _clash(kind: str, x: torch.Tensor, out: torch.Tensor, workspace: Workspace, dim: int) -> bool:
    """Whether x and out share memory in another way than in place, which is safe.

    In place a program of the exchange writes only elements that it has read itself and has received back as messages.
    Tensors that are not contiguous are copied, x before the exchange and out after it.
    """
    if x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr() or not share_memory(x, out):
        return False
    if kind in ("all_gather", "all_scatter"):
        out = out.narrow(dim, workspace.rank * x.shape[dim], x.shape[dim])
    elif kind == "reduce_scatter":
        x = x.tensor_split(workspace.world_size, dim)[workspace.rank]
    alike = x.stride() == out.stride() or (x.is_contiguous() and out.is_contiguous())
    return x.data_ptr() != out.data_ptr() or not alike
