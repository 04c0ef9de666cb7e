"""Who computes RMSNorm over the columns of all ranks, alone (the result sharded or replicated) or behind a product."""

from __future__ import annotations

import torch
from torch.nn import functional

from pyrocshmem import collectives, stream_k
from pyrocshmem.benchmarks.operands import EPS, Operands
from pyrocshmem.benchmarks.provider import Run, public
from pyrocshmem.reference import ops as reference_ops
from pyrocshmem.reference import rms_norm as reference_norms

# Of the value that is normalized, and before the weight: what PyTorch's norm may round.
_ROUNDINGS = 2


def ours(x: Operands) -> Run:
    """`collectives.rms_norm`, or `stream_k.gemm_rms_norm_all_scatter`, whose result is its own."""
    if x.kind != "collective":
        fused = public(stream_k, x.case.op)
        call = lambda: fused(x.a, x.b, x.gain, EPS, group=x.heap, workspace=x.workspace)  # noqa: E731
        return Run(call, None, returns=True)
    norm, out = public(collectives, "rms_norm"), x.new(*x.result_shape())
    replicated = x.case.op == "rms_norm_replicated"

    def normalize() -> None:
        norm(x.x, x.gain, EPS, group=x.heap, replicated=replicated, out=out, workspace=x.workspace)

    return Run(normalize, out)


def library(x: Operands) -> Run:
    """Where the result stays sharded: squares, the library's all-reduce, PyTorch's arithmetic. Elsewhere the BLAS where
    there is a product, the library's all-gather, the columns side by side, PyTorch's norm of them."""
    M, N = x.case.M, x.case.N
    if x.case.op == "rms_norm":
        given, out = x.new(M, N).copy_(x.x), x.new(M, N)
        return Run(lambda: reference_norms.rms_norm(given, x.gain, EPS, out=out), out, library=True)
    columns, gain = x.ranks * N, x.whole_gain()
    whole, blocks, block = x.new(M, columns), x.new(x.ranks, M, N), x.new(M, N)
    if x.kind == "collective":
        block.copy_(x.x)

    def chain() -> torch.Tensor:
        if x.kind != "collective":
            torch.mm(x.a, x.b, out=block)
        reference_ops.gather_columns(block, columns, out=whole, gathered=blocks)
        return functional.rms_norm(whole, (columns,), gain, EPS)

    return Run(chain, None, returns=True, roundings=_ROUNDINGS, library=True)
