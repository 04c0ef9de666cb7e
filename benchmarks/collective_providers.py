"""Who computes a collective alone: ours, the library (NCCL, RCCL, gloo), PyTorch's symmetric memory, FlashInfer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pyrocshmem import collectives
from pyrocshmem.benchmarks.operands import ROOT, Operands
from pyrocshmem.benchmarks.provider import Run, Unavailable, group_name, need_gpus, public
from pyrocshmem.reference import ops as reference_ops

SUMS = ("all_reduce", "reduce_scatter")
# Up to here it is open which algorithm is faster; beyond, a one-shot only sends more.
ALGORITHM_BYTES = 16 << 20
# FlashInfer's kernel gives a token's elements to the threads of one block, 8 to each.
_FLASHINFER_HIDDEN = 8192


def check_bytes(x: Operands) -> None:
    """Unavailable for what only pays for small results."""
    if x.case.M * x.case.N * x.dtype.itemsize > ALGORITHM_BYTES:
        raise Unavailable(f"not timed above {ALGORITHM_BYTES >> 20} MiB")


def ours(x: Operands, **options: Any) -> Run:
    """`collectives`' function."""
    function = public(collectives, x.case.op)
    if x.case.op == "barrier":
        return meeting(x, lambda: function(group=x.heap, workspace=x.workspace))
    out = x.new(*x.result_shape())
    return Run(lambda: function(x.x, group=x.heap, out=out, workspace=x.workspace, **options), out)


def library(x: Operands) -> Run:
    """torch.distributed's, on buffers of its own."""
    op, (M, N) = x.case.op, (x.case.M, x.case.N)
    if op == "barrier":
        # Not dist.barrier, for which the host waits.
        token = torch.zeros(1, device=x.device)
        return meeting(x, lambda: dist.all_reduce(token))
    roundings = x.ranks if op in SUMS else 0
    given = x.new(M, N).copy_(x.x)
    if op in ("all_reduce", "broadcast"):
        call = partial(dist.all_reduce, given) if op == "all_reduce" else partial(dist.broadcast, given, ROOT)

        def restore() -> None:
            if op == "broadcast" and x.rank != ROOT:
                given.fill_(float("nan"))
            else:
                given.copy_(x.x)

        return Run(call, given, prepare=restore, roundings=roundings, library=True)
    out = x.new(*x.result_shape())
    if op == "all_scatter":
        gathered = x.new(x.ranks, M, N)

        def gather() -> None:
            reference_ops.all_gather(given, out=gathered.view(x.ranks * M, N))
            out.view(M, x.ranks, N).copy_(gathered.transpose(0, 1))

        return Run(gather, out, library=True)
    function = getattr(reference_ops, op)
    return Run(lambda: function(given, out=out), out, roundings=roundings, library=True)


def meeting(x: Operands, wait: Callable[[], object]) -> Run:
    """A barrier, which has no result of its own: before it every rank writes its number of calls to all others, and the
    result is 1 for each rank whose last write can be read after it."""
    seen = x.heap.zeros(x.ranks, dtype=torch.float32)
    places = [x.heap.peer_view(seen, peer)[x.rank : x.rank + 1] for peer in range(x.ranks)]
    calls = 0

    def announce() -> None:
        nonlocal calls
        calls += 1
        for place in places:
            place.fill_(calls)

    return Run(wait, seen, prepare=announce, as_result=lambda found: (found == calls).to(x.dtype)[None])


def torch_shot(x: Operands, algorithm: str) -> Run:
    """PyTorch's all-reduce on symmetric memory."""
    given, total, call = torch_sum(x, algorithm)
    restore = lambda: given.copy_(x.x)  # noqa: E731
    restore()
    in_place = restore if total is given else None
    return Run(call, total, prepare=in_place, roundings=x.ranks, library=True)


Sum = tuple[torch.Tensor, torch.Tensor, Callable[[], object]]


def torch_sum(x: Operands, algorithm: str) -> Sum:
    """(what is summed [M, N], the sum, the call) of PyTorch's one-shot, or two-shot in place."""
    need_gpus(x)
    M, N = x.case.M, x.case.N
    if M * N * x.dtype.itemsize % (16 * x.ranks):
        raise Unavailable(f"size is no multiple of {16 * x.ranks} bytes")
    # Registers the ops.
    symmetric_memory = importlib.import_module("torch.distributed._symmetric_memory")
    given, group = symmetric_memory.empty(M, N, dtype=x.dtype, device=x.device), group_name()
    symmetric_memory.rendezvous(given, group)
    if algorithm == "two_shot":
        return given, given, lambda: torch.ops.symm_mem.two_shot_all_reduce_(given, "sum", group)
    out = x.new(M, N)
    return given, out, lambda: torch.ops.symm_mem.one_shot_all_reduce_out(given, "sum", group, out)


def flashinfer(x: Operands) -> Run:
    """FlashInfer's all-reduce of small tensors."""
    check_bytes(x)
    hidden = min(x.case.N, _FLASHINFER_HIDDEN)
    tokens = x.case.M * x.case.N // hidden
    if tokens * hidden != x.case.M * x.case.N or hidden % 8:
        raise Unavailable(f"{x.case.M} x {x.case.N} are no tokens of {hidden} elements, in eights")
    comm, workspace = flashinfer_workspace(x, tokens, hidden)
    given, out = x.x.view(tokens, hidden), x.new(tokens, hidden)
    call = lambda: comm.allreduce_fusion(  # noqa: E731
        input=given,
        workspace=workspace,
        pattern=comm.AllReduceFusionPattern.kAllReduce,
        launch_with_pdl=True,
        output=out,
    )
    return Run(call, out.view(x.case.M, x.case.N), roundings=x.ranks, library=True, close=workspace.destroy)


def flashinfer_workspace(x: Operands, tokens: int, hidden: int) -> tuple[Any, Any]:
    """(the module, its workspace for so many tokens)."""
    need_gpus(x)
    try:
        comm = importlib.import_module("flashinfer.comm")
    except ImportError as error:
        raise Unavailable(f"not importable: {error}") from None
    sizes = {"max_token_num": tokens, "hidden_dim": hidden, "dtype": x.dtype}
    return comm, comm.create_allreduce_fusion_workspace(
        backend="trtllm", world_size=x.ranks, rank=x.rank, **sizes
    )
