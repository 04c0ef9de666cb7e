"""Ops of others: PyTorch's on symmetric memory and FlashInfer's, alone or behind the BLAS, Kraken's; and libraries that
are looked for but not called.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pyrocshmem.benchmarks.operands import Operands
from pyrocshmem.benchmarks.provider import (
    Run,
    Sum,
    Unavailable,
    chain,
    check_bytes,
    check_rows,
    group_name,
    need_gpus,
    provided,
)
from pyrocshmem.reference.problems import EPS
from pyrocshmem.stream_k.run.calls import meeting

# FlashInfer's kernel gives a token's elements to the threads of one block, 8 to each.
_FLASHINFER_HIDDEN = 8192
# Kraken's kernels signal each rank for each tile of a result, of so many rows and columns: by default PyTorch has room
# for 1152 tiles of two ranks (2.11), and nothing looks whether that is enough.
_KRAKEN_TILE, _SIGNAL_BYTES = 64, 1 << 20


@functools.cache
def _symmetric_memory() -> Any:
    """PyTorch's module, whose import registers its ops. Before anything is allocated there, its signals get the room
    that all peers need."""
    module = importlib.import_module("torch.distributed._symmetric_memory")
    module.set_signal_pad_size(_SIGNAL_BYTES)
    return module


def torch_symm_mem(x: Operands) -> Run:
    """PyTorch's fused op on symmetric memory, or its barrier."""
    need_gpus(x)
    symmetric_memory, group = _symmetric_memory(), group_name()
    if x.case.op == "barrier":
        handle = symmetric_memory.rendezvous(symmetric_memory.empty(1, device=x.device), group)
        return provided(meeting(x.heap, lambda: handle.barrier(channel=0)))
    _equal_rows(x)
    if x.case.op == "all_gather_gemm":
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        call = lambda: fused(x.a, [x.b], 0, group, return_A=False)[1][0]  # noqa: E731
        return Run(call, None, returns=True, library=True)
    scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter
    call = lambda: scatter(x.a, x.b, "sum", 0, group)  # noqa: E731
    return Run(call, None, returns=True, roundings=1, library=True)


def torch_shot(x: Operands, algorithm: str) -> Run:
    """PyTorch's all-reduce on symmetric memory; where the op has a norm, PyTorch's sum and norm behind it."""
    return chain(x, torch_sum(x, algorithm))


def blas_torch_two_shot(x: Operands) -> Run:
    """The BLAS, then PyTorch's two-shot on symmetric memory."""
    check_rows(x)
    return chain(x, torch_sum(x, "two_shot"))


def blas_torch_one_shot(x: Operands) -> Run:
    """The BLAS, then PyTorch's one-shot on symmetric memory, where that may pay."""
    check_bytes(x)
    check_rows(x)
    return chain(x, torch_sum(x, "one_shot"))


def torch_sum(x: Operands, algorithm: str) -> Sum:
    """(what is summed [M, N], the sum, the call) of PyTorch's one-shot, or two-shot in place."""
    need_gpus(x)
    M, N = x.case.M, x.case.N
    if M * N * x.dtype.itemsize % (16 * x.num_ranks):
        raise Unavailable(f"size is no multiple of {16 * x.num_ranks} bytes")
    symmetric_memory, group = _symmetric_memory(), group_name()
    given = symmetric_memory.empty(M, N, dtype=x.dtype, device=x.device)
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
    return Run(
        call, out.view(x.case.M, x.case.N), roundings=x.num_ranks, library=True, close=workspace.destroy
    )


def blas_flashinfer(x: Operands) -> Run:
    """The BLAS where there is a product, then FlashInfer's all-reduce, with residual and norm in it where the op has
    them."""
    check_rows(x)
    M, N = x.case.M, x.case.N
    comm, workspace = flashinfer_workspace(x, M, N)
    alone = not x.problem.gemm
    given, out = x.x if alone else x.new(M, N), x.new(M, N)
    patterns, fuse = comm.AllReduceFusionPattern, partial(comm.allreduce_fusion, launch_with_pdl=True)
    if x.problem.norm:
        norm = {"residual_in": x.residual, "residual_out": x.new(M, N), "norm_out": out}
        norm |= {"rms_gamma": x.weight, "rms_eps": EPS}
        call = partial(fuse, given, workspace, patterns.kARResidualRMSNorm, **norm)
    else:
        call = partial(fuse, given, workspace, patterns.kAllReduce, output=out)

    def both() -> None:
        torch.mm(x.a, x.b, out=given)
        call()

    # Of partials, of their sums, of the sum with the residual.
    return Run(call if alone else both, out, roundings=x.num_ranks + 2, library=True, close=workspace.destroy)


def norm_scale(x: Operands) -> torch.Tensor:
    """One scale of all elements of the norms of `x` in 8 bits: a power of two that leaves few of them beyond range."""
    return torch.full((), 2.0**-5, device=x.device)


def flashinfer_tensorwise(x: Operands) -> Run:
    """FlashInfer's all-reduce with residual and norm, in 8 bits by one scale that is given."""
    check_rows(x)
    M, N = x.case.M, x.case.N
    comm, workspace = flashinfer_workspace(x, M, N)
    out, scale = x.new(M, N), norm_scale(x)
    in_8_bits = torch.empty(M, N, dtype=torch.float8_e4m3fn, device=x.device)
    fuse = partial(
        comm.allreduce_fusion, x.x, workspace, residual_in=x.residual, residual_out=x.new(M, N),
        rms_gamma=x.weight, rms_eps=EPS, launch_with_pdl=True,
    )  # fmt: skip
    patterns = comm.AllReduceFusionPattern
    given = {"quant_out": in_8_bits, "scale_factor": scale.view(1)}

    def norm_of(found: torch.Tensor) -> torch.Tensor:
        """The norm, where these 8 bits are what it rounds to: it is rounded to the dtype of `out` once less."""
        fuse(pattern=patterns.kARResidualRMSNorm, norm_out=out)
        norm, largest = out.float(), 448 * scale
        off = (found.float() * scale - norm.clamp(-largest, largest)).abs()
        fits = bool((off <= norm.abs() * 2.0**-4 + scale * 2.0**-10 + norm.abs() * 2.0**-8).all())
        return out if fits else torch.full_like(out, torch.nan)

    return Run(
        lambda: fuse(pattern=patterns.kARResidualRMSNormFP8Quant, **given),
        in_8_bits,
        as_result=norm_of,
        roundings=x.num_ranks + 2,
        library=True,
        close=workspace.destroy,
    )


def flashinfer_workspace(x: Operands, tokens: int, hidden: int) -> tuple[Any, Any]:
    """(the module, its workspace for so many tokens)."""
    need_gpus(x)
    try:
        comm = importlib.import_module("flashinfer.comm")
    except ImportError as error:
        raise Unavailable(f"not importable: {error}") from None
    sizes = {"max_token_num": tokens, "hidden_dim": hidden, "dtype": x.dtype}
    return comm, comm.create_allreduce_fusion_workspace(
        backend="trtllm", world_size=x.num_ranks, rank=x.rank, **sizes
    )


def kraken(x: Operands, copies: bool = False) -> Run:
    """Kraken's fused op. copies: its reduce-scatter of what copy engines bring."""
    try:
        fused = importlib.import_module("kraken.fused")
    except ImportError as error:
        raise Unavailable(f"not importable: {error}") from None
    need_gpus(x)
    _equal_rows(x)
    symmetric_memory = _symmetric_memory()
    signals = x.num_ranks * math.prod(-(-size // _KRAKEN_TILE) for size in (x.case.M, x.case.N))
    if 4 * signals > symmetric_memory.get_signal_pad_size():
        raise Unavailable(f"{signals} signals have no room in those of PyTorch's symmetric memory")
    # Its kernels read B by columns, and A's shares from symmetric memory.
    b = x.b.T.contiguous().T
    if x.case.op == "all_gather_gemm":
        a = symmetric_memory.empty(x.a.shape, dtype=x.dtype, device=x.device)
        symmetric_memory.rendezvous(a, group_name())
        a.copy_(x.a)
        return Run(lambda: fused.all_gather_matmul(a, b)[1], None, returns=True, library=True)
    names = {
        "gemm_reduce_scatter": "gemm_reduce_scatter_ce_persistent" if copies else "gemm_reduce_scatter",
        "gemm_all_reduce": "gemm_one_shot_all_reduce_fused",
    }
    function = getattr(fused, names[x.case.op])
    return Run(lambda: function(x.a, b), None, returns=True, roundings=x.num_ranks, library=True)


def _equal_rows(x: Operands) -> None:
    if x.case.M % x.num_ranks:
        raise Unavailable(f"M is not divisible by the {x.num_ranks} ranks")


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
