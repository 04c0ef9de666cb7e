"""Who computes a case: ours in its variants, the library pair, PyTorch's symmetric memory, NCCL windows, Kraken.

    run = prepare("torch_symm_mem", operands)      # raises Unavailable, with the reason
    run.call(); run.out

A provider's `call` allocates as little as its interface lets it, and writes `out`. Here are ours, the libraries that
come with PyTorch, and the table of all; `peer_providers` has the others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from pyrocshmem import collectives, stream_k
from pyrocshmem.benchmarks import chosen, peer_providers
from pyrocshmem.benchmarks.operands import Operands
from pyrocshmem.benchmarks.provider import (
    Run,
    Unavailable,
    chain,
    check_bytes,
    check_rows,
    first_line,
    need_gpus,
    provided,
)
from pyrocshmem.benchmarks.schema import IS_DEFAULT, same_as
from pyrocshmem.calls.invariance import BATCH, TP, Invariance, batch_invariant
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.environment import changed_environment
from pyrocshmem.reference import ops as reference_ops
from pyrocshmem.reference.operands import first
from pyrocshmem.reference.problems import ALL, EPS
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.choice.placement import placement_names
from pyrocshmem.stream_k.run.calls import meeting, our_run

# Of the value that is normalized, and before the weight: what PyTorch's norm may round.
_NORM_ROUNDINGS = 2


def providers_of(op: str) -> tuple[str, ...]:
    """The providers that compute `op` at all, ours first."""
    return tuple(name for name, (ops, _) in _PROVIDERS.items() if op in ops)


def prepare(name: str, operands: Operands) -> Run:
    """`name`, ready for a case. Collective. Raises Unavailable."""
    return _PROVIDERS[name][1](operands)


def _ours(**changes: Any) -> Callable[[Operands], Run]:
    """Ours as a user calls it; with changes, given a configuration with these fields changed, or these options where
    the op takes no configuration: Unavailable where that changes nothing."""
    # What the configuration is chosen for; the others are changed in it.
    asked = (changes.get("partial_dtype"), changes.get("placement"))
    changed = {name: value for name, value in changes.items() if name not in ("partial_dtype", "placement")}

    def prepare_ours(x: Operands) -> Run:
        ours, roundings = partial(our_run, x, x.heap, lambda: x.workspace), _roundings(x, asked[0])
        if not x.problem.configured:
            return provided(ours(**changes), roundings=roundings)
        case = x.case
        call = (case.op, case.M, case.N, case.K, x.dtype, x.num_ranks, x.device)
        default = _default(x)
        if not changes:
            # By hand it would be another call: a `gemm` that asks for the BLAS gets it where it is slow, too.
            schedule = chosen.schedule(default, *call)
            return provided(ours(), config=default, schedule=schedule, roundings=roundings)
        config = dataclasses.replace(stream_k.choose(*call, *asked), **changed)
        if config == default:
            raise Unavailable(IS_DEFAULT)
        schedule = chosen.schedule(config, *call, *asked)
        return provided(ours(config=config), config=config, schedule=schedule, roundings=roundings)

    return prepare_ours


def _default(x: Operands) -> Config:
    """What a call does that is given no configuration."""
    if x.case.op == "gemm":
        return chosen.default_gemm(x.a, x.b, x.device)
    return stream_k.choose(x.case.op, x.case.M, x.case.N, x.case.K, x.dtype, x.num_ranks, x.device)


def _roundings(x: Operands, partial_dtype: torch.dtype | None) -> int:
    """Of each rank's partial sum, on its way to where it is added."""
    sums = x.problem.gemm and x.problem.sums
    return int(sums and ELEMENTS[x.dtype].wire_dtype(partial_dtype).itemsize < 4)


def _ours_algorithm(algorithm: str) -> Callable[[Operands], Run]:
    def prepare_algorithm(x: Operands) -> Run:
        check_bytes(x)
        return _ours(algorithm=algorithm)(x)

    return prepare_algorithm


def _ours_fp32(x: Operands) -> Run:
    """With partial sums in fp32, the strict mode."""
    if x.dtype.itemsize != 2:
        raise Unavailable(IS_DEFAULT)
    return _ours(partial_dtype=torch.float32)(x)


def _ours_invariant(mode: Invariance) -> Callable[[Operands], Run]:
    """Ours in a mode of `pyrocshmem.batch_invariant`, whose price is its time over that of `ours`."""

    def prepare_invariant(x: Operands) -> Run:
        case, config = x.case, None
        if x.problem.configured:
            config = stream_k.choose(
                case.op, case.M, case.N, case.K, x.dtype, x.num_ranks, x.device, invariance=mode
            )
        roundings = 0 if mode == TP else _roundings(x, None)
        run = provided(our_run(x, x.heap, lambda: x.workspace), config=config, roundings=roundings)

        def inside() -> Any:
            with batch_invariant(tp_invariant=mode == TP):
                return run.function()

        return dataclasses.replace(run, function=inside)

    return prepare_invariant


def _ours_in_8_bits(recipe: Any, fused: bool) -> Callable[[Operands], Run]:
    """Ours with the norm in 8 bits: as part of the call, or by `quantize` behind it."""

    def prepare_in_8_bits(x: Operands) -> Run:
        function = getattr(stream_k if x.problem.gemm else collectives, x.problem.op)
        operands = (x.a, x.b) if x.problem.gemm else (x.x,)
        # One scale of all is known before.
        scale = peer_providers.norm_scale(x) if recipe == "tensorwise" else None

        def call(**more: Any) -> Any:
            return function(*operands, *x.arguments(), group=x.heap, workspace=x.workspace, **more)

        def quantized() -> torch.Tensor:
            if fused:
                return first(call(quantize=recipe, quantize_scale=scale))
            return first(stream_k.quantize(first(call()), recipe, scale=scale))

        def norm_of(found: torch.Tensor) -> torch.Tensor:
            """The norm, where it has these bits in 8 bits."""
            norm = first(call())
            wanted = first(stream_k.quantize(norm, recipe, scale=scale))
            same = torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
            return norm if same else torch.full_like(norm, torch.nan)

        return Run(quantized, None, returns=True, as_result=norm_of, roundings=_roundings(x, None))

    return prepare_in_8_bits


def _own_gemm(x: Operands) -> Config:
    return chosen.own_gemm(x.case.M, x.case.N, x.case.K, x.dtype, x.device)


def _ours_no_blas(x: Operands) -> Run:
    """`gemm` by our kernel, where the default is the BLAS."""
    if not chosen.takes_blas("gemm", _default(x).placement):
        raise Unavailable(IS_DEFAULT)
    return _ours(placement=chosen.own_placement("gemm"))(x)


def _ours_whole_tiles(x: Operands) -> Run:
    """`gemm` by our kernel without split tiles."""
    own = _own_gemm(x)
    if own.split == "none":
        raise Unavailable(IS_DEFAULT if own == _default(x) else same_as("ours_no_blas"))
    config = dataclasses.replace(own, split="none")
    return provided(our_run(x, x.heap, lambda: x.workspace, config=config), config=config, schedule="whole")


def _ours_gemm(x: Operands) -> Run:
    """The product of a fused op by our kernel alone: the BLAS is `blas`."""
    a, out, config = x.whole_a(), x.new(x.case.M, x.case.N), _own_gemm(x)
    return Run(lambda: stream_k.gemm(a, x.b, out=out, config=config), out, what="product")


def _blas(x: Operands) -> Run:
    a, out = x.whole_a(), x.new(x.case.M, x.case.N)
    return Run(lambda: torch.mm(a, x.b, out=out), out, what="product", library=True)


def _unfused(x: Operands) -> Run:
    """torch.distributed's, on buffers of its own, behind the BLAS where there is a GEMM."""
    problem = x.problem
    if problem.joins == "meet":
        # Not dist.barrier, for which the host waits.
        token = torch.zeros(1, device=x.device)
        return provided(meeting(x.heap, lambda: dist.all_reduce(token)))
    if problem.norm == "sum":
        total = x.new(x.case.M, x.case.N)
        return chain(x, (total, total, lambda: dist.all_reduce(total)))
    if problem.norm and problem.out_cut != "N":
        return _gathered_norm(x)
    return provided(x.reference(), roundings=x.num_ranks if problem.sums else 0, library=True)


@functools.cache
def _pinned_group() -> dist.ProcessGroup:
    """All ranks, by one channel and the Simple protocol: what engines pin NCCL to for the same bits in every batch."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = 1
    group = dist.new_group(pg_options=options)
    assert group is not None
    with changed_environment({"NCCL_PROTO": "Simple"}):
        # Which is when it is read.
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    return group


def _unfused_pinned(x: Operands) -> Run:
    """The BLAS, then NCCL's all-reduce by one channel and one protocol, then what the op has behind it."""
    need_gpus(x)
    group, total = _pinned_group(), x.new(x.case.M, x.case.N)
    return chain(x, (total, total, lambda: dist.all_reduce(total, group=group)))


def _gathered_norm(x: Operands) -> Run:
    """The BLAS where there is a GEMM, the library's all-gather, the columns side by side, PyTorch's norm of them."""
    M, N = x.case.M, x.case.N
    columns, weight = x.num_ranks * N, x.whole_weight()
    whole, blocks, block = x.new(M, columns), x.new(x.num_ranks, M, N), x.new(M, N)
    if not x.problem.gemm:
        block.copy_(x.x)

    def run() -> torch.Tensor:
        if x.problem.gemm:
            torch.mm(x.a, x.b, out=block)
        reference_ops.gather_columns(block, columns, out=whole, gathered=blocks)
        return functional.rms_norm(whole, (columns,), weight, EPS)

    return Run(run, None, returns=True, roundings=_NORM_ROUNDINGS, library=True)


def _blas_ours(x: Operands) -> Run:
    """The BLAS, then `collectives.all_reduce`."""
    check_rows(x)
    given, total = (x.new(x.case.M, x.case.N) for _ in "gt")
    return chain(x, (given, total, lambda: collectives.all_reduce(given, group=x.heap, out=total)))


def _unfused_stacked(x: Operands) -> Run:
    """The ranks' blocks one below the other, which is what a library gives: not the op's result, but faster."""
    M, N = x.case.M, x.case.N
    out = x.new(x.num_ranks * M, N)
    block = x.new(M, N) if x.problem.gemm else x.new(M, N).copy_(x.x)

    def gather() -> None:
        if x.problem.gemm:
            torch.mm(x.a, x.b, out=block)
        reference_ops.all_gather(block, out=out)

    def side_by_side(stacked: torch.Tensor) -> torch.Tensor:
        return stacked.view(x.num_ranks, M, N).transpose(0, 1).reshape(M, x.num_ranks * N)

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
    return partial(peer_providers.torch_shot, algorithm=algorithm)


def _flashinfer(x: Operands) -> Run:
    return peer_providers.blas_flashinfer(x) if x.problem.norm else peer_providers.flashinfer(x)


_PRODUCTS = tuple(each.name for each in ALL if each.gemm and each.command)
_FUSED = tuple(each.name for each in ALL if each.configured and each.command)
_PLACEMENTS = tuple(dict.fromkeys(name for op in _FUSED for name in placement_names(op)))
_ALONE = tuple(each.name for each in ALL if not each.gemm)
_SUMS = tuple(each.name for each in ALL if each.configured and each.sums)
_NORMED = ("gemm_all_reduce_rms_norm",)
_DECODED = ("gemm_all_reduce", *_NORMED)
_ROWS_DIVIDED = ("all_gather_gemm", "gemm_reduce_scatter")
_SUMMED = ("all_reduce", "all_reduce_rms_norm")
# By the device's rows and by ranks': a mode may have another kernel.
_NORMS = tuple(each.name for each in ALL if each.norm and not each.gemm)
_PROVIDERS: dict[str, tuple[tuple[str, ...], Callable[[Operands], Run]]] = {
    "ours": (tuple(each.name for each in ALL), _ours()),
    "ours_fp32": ((*_SUMS, *_NORMED), _ours_fp32),
    "ours_batch_invariant": (("gemm", *_PRODUCTS, *_NORMS), _ours_invariant(BATCH)),
    "ours_tp_invariant": ((*_SUMS, *_NORMED, *_NORMS, "gemm_rms_norm_all_scatter"), _ours_invariant(TP)),
    "ours_no_blas": (("gemm",), _ours_no_blas),
    **{
        f"ours_{placement}": (
            tuple(op for op in _FUSED if placement in placement_names(op)),
            _ours(placement=placement),
        )
        for placement in _PLACEMENTS
    },
    "ours_one_shot": (("gemm_all_reduce", *_SUMMED), _ours_algorithm("one_shot")),
    "ours_two_shot": (("gemm_all_reduce", *_SUMMED), _ours_algorithm("two_shot")),
    "ours_whole_tiles": (("gemm",), _ours_whole_tiles),
    "ours_gemm": (_PRODUCTS, _ours_gemm),
    "blas": (("gemm", *_PRODUCTS), _blas),
    "unfused": ((*_PRODUCTS, *_ALONE), _unfused),
    "unfused_pinned": ((*_DECODED, *_SUMMED), _unfused_pinned),
    "unfused_stacked": (("gemm_all_scatter", "all_scatter"), _unfused_stacked),
    "nccl_window": ((*_PRODUCTS, *_ALONE), _nccl_window),
    "blas_ours": (_DECODED, _blas_ours),
    "blas_torch_two_shot": (_DECODED, peer_providers.blas_torch_two_shot),
    "blas_flashinfer": (_DECODED, peer_providers.blas_flashinfer),
    "torch_symm_mem": ((*_ROWS_DIVIDED, "barrier"), peer_providers.torch_symm_mem),
    "torch_one_shot": (_SUMMED, _torch_shot("one_shot")),
    "torch_two_shot": (_SUMMED, _torch_shot("two_shot")),
    "flashinfer": (_SUMMED, _flashinfer),
    "kraken": (("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"), peer_providers.kraken),
    "kraken_copies": (("gemm_reduce_scatter",), partial(peer_providers.kraken, copies=True)),
    "blas_torch_one_shot": (_DECODED, peer_providers.blas_torch_one_shot),
    "transformer_engine": (_ROWS_DIVIDED, peer_providers.without_adapter("transformer_engine")),
    "flux": (_ROWS_DIVIDED, peer_providers.without_adapter("flux")),
    **{
        f"ours_{way}{recipe}": (("all_reduce_rms_norm", *_NORMED), _ours_in_8_bits(recipe, fused=not way))
        for recipe in ("rowwise", "blockwise", "tensorwise")
        for way in ("", "then_")
    },
    "flashinfer_tensorwise": (("all_reduce_rms_norm",), peer_providers.flashinfer_tensorwise),
}
ALL_PROVIDERS = tuple(_PROVIDERS)
# Ours, otherwise configured than by default: for orientation, so timed less often.
VARIANTS = (*(f"ours_{placement}" for placement in _PLACEMENTS), "ours_one_shot", "ours_two_shot")
