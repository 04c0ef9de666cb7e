"""Who computes a product of few rows and its sum over ranks: the BLAS, then somebody's all-reduce; for ops with a norm
then PyTorch's sum with the residual and its RMSNorm, or FlashInfer's all three in one. all_reduce_rms_norm is that
without the product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from pyrocshmem import collectives, stream_k
from pyrocshmem.benchmarks.collective_providers import Sum, check_bytes, flashinfer_workspace, torch_sum
from pyrocshmem.benchmarks.operands import EPS, Operands
from pyrocshmem.benchmarks.provider import Run, Unavailable, public
from pyrocshmem.benchmarks.shapes import DECODE_ROWS, NORMS


def ours_with_norm(x: Operands, **options: Any) -> Run:
    """Our op, which returns (its result, the sum with the residual)."""
    more = (x.residual, x.gain, EPS)
    options["group"] = x.heap
    call: Callable[[], Any]
    if x.kind == "collective":
        function = public(collectives, x.case.op)
        call = lambda: function(x.x, *more, workspace=x.workspace, **options)[0]  # noqa: E731
    else:
        function = public(stream_k, x.case.op)
        call = lambda: function(x.a, x.b, *more, workspace=x.workspace, **options)[0]  # noqa: E731
    return Run(call, None, returns=True)


def library_with_norm(x: Operands) -> Run:
    """The BLAS where there is a product, NCCL (RCCL, gloo), PyTorch's norm."""
    total = x.new(x.case.M, x.case.N)
    return _chain(x, (total, total, lambda: dist.all_reduce(total)))


def blas_ours(x: Operands) -> Run:
    """The BLAS, then `collectives.all_reduce`."""
    _check_rows(x)
    given, total = (x.new(x.case.M, x.case.N) for _ in "gt")
    return _chain(x, (given, total, lambda: collectives.all_reduce(given, group=x.heap, out=total)))


def blas_torch_two_shot(x: Operands) -> Run:
    """The BLAS, then PyTorch's two-shot on symmetric memory."""
    _check_rows(x)
    return _chain(x, torch_sum(x, "two_shot"))


def blas_torch_one_shot(x: Operands) -> Run:
    """The BLAS, then PyTorch's one-shot on symmetric memory, where that may pay."""
    check_bytes(x)
    _check_rows(x)
    return _chain(x, torch_sum(x, "one_shot"))


def torch_shot_with_norm(x: Operands, algorithm: str) -> Run:
    """PyTorch's all-reduce on symmetric memory, its sum and norm."""
    return _chain(x, torch_sum(x, algorithm))


def blas_flashinfer(x: Operands) -> Run:
    """The BLAS where there is a product, then FlashInfer's all-reduce, with residual and norm in it where the op has
    them."""
    _check_rows(x)
    M, N = x.case.M, x.case.N
    comm, workspace = flashinfer_workspace(x, M, N)
    alone = x.kind == "collective"
    given, out = x.x if alone else x.new(M, N), x.new(M, N)
    patterns, fuse = comm.AllReduceFusionPattern, partial(comm.allreduce_fusion, launch_with_pdl=True)
    if x.case.op in NORMS:
        norm = {
            "residual_in": x.residual, "residual_out": x.new(M, N), "norm_out": out, "rms_gamma": x.gain, "rms_eps": EPS
        }  # fmt: skip
        call = partial(fuse, given, workspace, patterns.kARResidualRMSNorm, **norm)
    else:
        call = partial(fuse, given, workspace, patterns.kAllReduce, output=out)

    def both() -> None:
        torch.mm(x.a, x.b, out=given)
        call()

    # Of partials, of their sums, of the sum with the residual.
    return Run(call if alone else both, out, roundings=x.ranks + 2, library=True, close=workspace.destroy)


def _chain(x: Operands, summing: Sum) -> Run:
    """The product, if there is one, the sum, and what the op has behind it."""
    given, total, call = summing
    norm = _norm(x, total) if x.case.op in NORMS else None
    alone = x.kind == "collective"

    def restore() -> None:
        given.copy_(x.x)

    def chain() -> Any:
        if not alone:
            torch.mm(x.a, x.b, out=given)
        call()
        return norm() if norm is not None else None

    if alone:
        restore()
    roundings = x.ranks + 2 if norm is not None else x.ranks
    out = total if norm is None else None
    in_place = restore if alone and total is given else None
    return Run(chain, out, prepare=in_place, returns=norm is not None, roundings=roundings, library=True)


def _norm(x: Operands, total: torch.Tensor) -> Callable[[], torch.Tensor]:
    updated = torch.empty_like(total)

    def norm() -> torch.Tensor:
        torch.add(total, x.residual, out=updated)
        return functional.rms_norm(updated, (x.case.N,), x.gain, EPS)

    return norm


def _check_rows(x: Operands) -> None:
    most = max(max(rows) for rows in DECODE_ROWS.values())
    if most < x.case.M:
        raise Unavailable(f"not timed above {most} rows")
