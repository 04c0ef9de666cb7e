"""Fused ops of others: PyTorch's on symmetric memory, Kraken's; and libraries that are looked for but not called."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from pyrocshmem.benchmarks.collective_providers import meeting
from pyrocshmem.benchmarks.operands import Operands
from pyrocshmem.benchmarks.provider import Run, Unavailable, group_name, need_gpus, public


def torch_symm_mem(x: Operands) -> Run:
    """PyTorch's fused op on symmetric memory, or its barrier."""
    need_gpus(x)
    # Registers the ops.
    symmetric_memory = importlib.import_module("torch.distributed._symmetric_memory")
    group = group_name()
    if x.case.op == "barrier":
        handle = symmetric_memory.rendezvous(symmetric_memory.empty(1, device=x.device), group)
        return meeting(x, lambda: handle.barrier(channel=0))
    _equal_rows(x)
    if x.case.op == "all_gather_gemm":
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        call = lambda: fused(x.a, [x.b], 0, group, return_A=False)[1][0]  # noqa: E731
        return Run(call, None, returns=True, library=True)
    scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter
    call = lambda: scatter(x.a, x.b, "sum", 0, group)  # noqa: E731
    return Run(call, None, returns=True, roundings=1, library=True)


def kraken(x: Operands) -> Run:
    """Kraken's fused op."""
    try:
        fused = importlib.import_module("kraken.fused")
    except ImportError as error:
        raise Unavailable(f"not importable: {error}") from None
    need_gpus(x)
    _equal_rows(x)
    # Its kernels read B by columns, and A's shares from symmetric memory.
    b = x.b.T.contiguous().T
    if x.case.op == "all_gather_gemm":
        symmetric_memory = importlib.import_module("torch.distributed._symmetric_memory")
        a = symmetric_memory.empty(x.a.shape, dtype=x.dtype, device=x.device)
        symmetric_memory.rendezvous(a, group_name())
        a.copy_(x.a)
        return Run(lambda: fused.all_gather_matmul(a, b)[1], None, returns=True, library=True)
    names = {
        "gemm_reduce_scatter": "gemm_reduce_scatter",
        "gemm_all_reduce": "gemm_one_shot_all_reduce_fused",
    }
    function = public(fused, names[x.case.op])
    return Run(lambda: function(x.a, b), None, returns=True, roundings=x.ranks, library=True)


def _equal_rows(x: Operands) -> None:
    if x.case.M % x.ranks:
        raise Unavailable(f"M = {x.case.M} is not divisible by the {x.ranks} ranks")


def without_adapter(module: str) -> Callable[[Operands], Run]:
    """A library whose fused ops are called otherwise in each version, none of which could be tried here: says which
    version is there, so that its numbers are known to be missing."""

    def prepare(x: Operands) -> Run:
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise Unavailable(f"not importable: {error}") from None
        version = getattr(found, "__version__", "of no number")
        raise Unavailable(f"no adapter for version {version}")

    return prepare
