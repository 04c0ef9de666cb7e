"""Who computes a case: ours in its variants, the library pair, PyTorch's symmetric memory, NCCL windows, Kraken.

    run = prepare("torch_symm_mem", operands)      # raises Unavailable, with the reason
    run.call(); run.out

A provider's `call` allocates as little as its interface lets it, and writes `out`. Here are the products and the
table of all; `collective_providers` and `decode_providers` have the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pyrocshmem import stream_k
from pyrocshmem.benchmarks import collective_providers, decode_providers, norm_providers, peer_providers
from pyrocshmem.benchmarks.collective_providers import check_bytes
from pyrocshmem.benchmarks.operands import Operands
from pyrocshmem.benchmarks.provider import IS_DEFAULT, Run, Unavailable, first_line, need_gpus, public
from pyrocshmem.benchmarks.shapes import COLUMN_NORMS, NORMS, OPS
from pyrocshmem.reference import ops as reference_ops
from pyrocshmem.stream_k.choice.placement import placement_names

SUMS = ("gemm_all_reduce", "gemm_reduce_scatter")


def providers_of(op: str) -> tuple[str, ...]:
    """The providers that compute `op` at all, ours first."""
    return tuple(name for name, (ops, _) in _PROVIDERS.items() if op in ops)


def prepare(name: str, operands: Operands) -> Run:
    """`name`, ready for a case. Collective. Raises Unavailable."""
    return _PROVIDERS[name][1](operands)


def _config(x: Operands, **changes: Any) -> Any:
    case = x.case
    chosen = [changes.pop(name, None) for name in ("partial_dtype", "placement")]
    config = stream_k.choose(case.op, case.M, case.N, case.K, x.dtype, x.ranks, x.device, *chosen)
    return dataclasses.replace(config, **changes)


def _ours(**changes: Any) -> Callable[[Operands], Run]:
    """Ours with these fields of the configuration changed; Unavailable where that changes nothing."""

    def prepare_ours(x: Operands) -> Run:
        if x.case.op in COLUMN_NORMS:
            return norm_providers.ours(x)
        if x.case.op in NORMS:
            return decode_providers.ours_with_norm(x)
        if x.kind == "collective":
            return collective_providers.ours(x)
        function, config = public(stream_k, x.case.op), _config(x, **changes)
        if changes and config == _config(x):
            raise Unavailable(IS_DEFAULT)
        out = x.new(*x.result_shape())
        options = {} if x.case.op == "gemm" else {"group": x.heap}
        if x.case.op == "all_gather_gemm":
            options["num_rows"] = x.case.M

        def call() -> None:
            function(x.a, x.b, out=out, config=config, workspace=x.workspace, **options)

        return Run(call, out, config=config)

    return prepare_ours


def _ours_algorithm(algorithm: str) -> Callable[[Operands], Run]:
    def prepare_algorithm(x: Operands) -> Run:
        check_bytes(x)
        if x.case.op in NORMS:
            return decode_providers.ours_with_norm(x, algorithm=algorithm)
        if x.kind == "collective":
            return collective_providers.ours(x, algorithm=algorithm)
        return _ours(algorithm=algorithm)(x)

    return prepare_algorithm


def _ours_16bit(x: Operands) -> Run:
    if x.dtype.itemsize != 2:
        raise Unavailable(f"{x.case.dtype} has 4 bytes")
    if x.case.op in NORMS:
        made = decode_providers.ours_with_norm(x, partial_dtype=x.dtype)
    else:
        made = _ours(partial_dtype=x.dtype)(x)
    return dataclasses.replace(made, roundings=1)


def _ours_gemm(x: Operands) -> Run:
    a, out = x.whole_a(), x.new(x.case.M, x.case.N)
    return Run(lambda: stream_k.gemm(a, x.b, out=out), out, what="product")


def _blas(x: Operands) -> Run:
    a, out = x.whole_a(), x.new(x.case.M, x.case.N)
    return Run(lambda: torch.mm(a, x.b, out=out), out, what="product", library=True)


def _unfused(x: Operands) -> Run:
    if x.case.op in COLUMN_NORMS:
        return norm_providers.library(x)
    if x.case.op in NORMS:
        return decode_providers.library_with_norm(x)
    if x.kind == "collective":
        return collective_providers.library(x)
    case, op = x.case, x.case.op
    M, N, K = case.M, case.N, case.K
    roundings = x.ranks if op in SUMS else 0
    rows, columns = x.result_shape()
    a = x.new(*x.a.shape).copy_(x.a)
    out = x.new(rows, columns)
    function: Callable[[], Any]
    if op == "gemm_all_reduce":
        function = lambda: reference_ops.gemm_all_reduce(a, x.b, out=out)  # noqa: E731
    elif op == "gemm_reduce_scatter":
        partial = x.new(M, N)
        function = lambda: reference_ops.gemm_reduce_scatter(a, x.b, out=out, partial=partial)  # noqa: E731
    elif op == "all_gather_gemm":
        whole = x.new(M, K)
        function = lambda: reference_ops.all_gather_gemm(  # noqa: E731
            a, x.b, num_rows=M, out=out, gathered=whole
        )
    else:
        block, blocks = x.new(M, N), x.new(x.ranks, M, N)
        function = lambda: reference_ops.gemm_all_gather(  # noqa: E731
            a, x.b, num_columns=columns, out=out, block=block, gathered=blocks
        )
    return Run(function, out, roundings=roundings, library=True)


def _unfused_stacked(x: Operands) -> Run:
    """The ranks' blocks one below the other, which is what a library gives: not the op's result, but faster."""
    M, N = x.case.M, x.case.N
    out = x.new(x.ranks * M, N)
    block = x.new(M, N) if x.kind != "collective" else x.new(M, N).copy_(x.x)

    def gather() -> None:
        if x.kind != "collective":
            torch.mm(x.a, x.b, out=block)
        reference_ops.all_gather(block, out=out)

    def side_by_side(stacked: torch.Tensor) -> torch.Tensor:
        return stacked.view(x.ranks, M, N).transpose(0, 1).reshape(M, x.ranks * N)

    return Run(gather, out, as_result=side_by_side, library=True)


def _nccl_window(x: Operands) -> Run:
    """The unfused pair on buffers that NCCL has registered as symmetric windows."""
    need_gpus(x)
    backend = dist.group.WORLD._get_backend(x.device)
    try:
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            run = _unfused(x)
        # After the buffers are there: not every torch registers those that a pool gets later.
        backend.register_mem_pool(pool, symm=True)
    except (AttributeError, TypeError, RuntimeError) as error:
        raise Unavailable(f"torch {torch.__version__} offers none: {first_line(error)}") from None

    def close() -> None:
        torch.cuda.synchronize(x.device)
        backend.deregister_mem_pool(pool)

    run.close = close
    return run


def _torch_shot(algorithm: str) -> Callable[[Operands], Run]:
    def prepare_shot(x: Operands) -> Run:
        make = (
            decode_providers.torch_shot_with_norm if x.case.op in NORMS else collective_providers.torch_shot
        )
        return make(x, algorithm)

    return prepare_shot


def _flashinfer(x: Operands) -> Run:
    return decode_providers.blas_flashinfer(x) if x.case.op in NORMS else collective_providers.flashinfer(x)


_PRODUCTS = tuple(op.name for op in OPS.values() if op.kind in ("row", "column"))
_FUSED = tuple(name for name in _PRODUCTS if name not in (*NORMS, *COLUMN_NORMS))
_ALONE = tuple(op.name for op in OPS.values() if op.kind == "collective")
_NORMED = ("gemm_all_reduce_rms_norm",)
_DECODED = ("gemm_all_reduce", *_NORMED)
_ROWS_DIVIDED = ("all_gather_gemm", "gemm_reduce_scatter")
_SUMMED = ("all_reduce", "all_reduce_rms_norm")
_PROVIDERS: dict[str, tuple[tuple[str, ...], Callable[[Operands], Run]]] = {
    "ours": (tuple(OPS), _ours()),
    "ours_16bit": ((*SUMS, *_NORMED), _ours_16bit),
    **{
        f"ours_{placement}": (
            tuple(op for op in _FUSED if placement in placement_names(op)),
            _ours(placement=placement),
        )
        for placement in placement_names()
    },
    "ours_one_shot": (("gemm_all_reduce", *_SUMMED), _ours_algorithm("one_shot")),
    "ours_two_shot": (("gemm_all_reduce", *_SUMMED), _ours_algorithm("two_shot")),
    "ours_whole_tiles": (("gemm",), _ours(split="none")),
    "ours_gemm": (_PRODUCTS, _ours_gemm),
    "blas": (("gemm", *_PRODUCTS), _blas),
    "unfused": ((*_PRODUCTS, *_ALONE), _unfused),
    "unfused_stacked": (("gemm_all_scatter", "all_scatter"), _unfused_stacked),
    "nccl_window": ((*_PRODUCTS, *_ALONE), _nccl_window),
    "blas_ours": (_DECODED, decode_providers.blas_ours),
    "blas_torch_two_shot": (_DECODED, decode_providers.blas_torch_two_shot),
    "blas_flashinfer": (_DECODED, decode_providers.blas_flashinfer),
    "torch_symm_mem": ((*_ROWS_DIVIDED, "barrier"), peer_providers.torch_symm_mem),
    "torch_one_shot": (_SUMMED, _torch_shot("one_shot")),
    "torch_two_shot": (_SUMMED, _torch_shot("two_shot")),
    "flashinfer": (_SUMMED, _flashinfer),
    "kraken": (("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"), peer_providers.kraken),
    "blas_torch_one_shot": (_DECODED, decode_providers.blas_torch_one_shot),
    "transformer_engine": (_ROWS_DIVIDED, peer_providers.without_adapter("transformer_engine")),
    "flux": (_ROWS_DIVIDED, peer_providers.without_adapter("flux")),
}
ALL_PROVIDERS = tuple(_PROVIDERS)
# Ours, otherwise configured than by default: for orientation, so timed less often.
VARIANTS = (*(f"ours_{placement}" for placement in placement_names()), "ours_one_shot", "ours_two_shot")
