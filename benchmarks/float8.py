"""GEMMs of 8-bit operands, alone and fused, beside `torch._scaled_mm` with NCCL, PyTorch's fused ops, DeepGEMM where it
can be imported, and ours in 16 bits.

    python -m pyrocshmem.benchmarks.float8 --ops gemm --recipe blockwise --shapes models:5
    python -m pyrocshmem.benchmarks.float8 -n 2 --recipe rowwise --shapes llama3

Operands are quantized before anything is timed, and no cache holds them. Prints a table in Markdown of microseconds of
the slowest rank, medians, "wrong" behind that of a wrong result, an empty cell where a provider can't run a case, and
below it geometric means of right ones and the versions. Results are held to float64 of what is quantized, in the bound
of docs/float8.md.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer

from pyrocshmem import Heap, launching, options, stream_k, target
from pyrocshmem.benchmarks import models, records
from pyrocshmem.benchmarks.operands import Operands
from pyrocshmem.benchmarks.provider import Unavailable, first_line, group_name, need_gpus
from pyrocshmem.benchmarks.shapes import Case, cases_of
from pyrocshmem.calls import invariance, planning
from pyrocshmem.reference.accuracy import of_matrix_unit
from pyrocshmem.reference.timing import Meter, Run
from pyrocshmem.stream_k.choice.scaled import choose_scaled
from pyrocshmem.stream_k.local_gemm.scales import Recipe, Scheme
from pyrocshmem.warming import compile_shared_out

OPS = ("gemm", "all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "gemm_all_scatter")
RECIPES = ("tensorwise", "rowwise", "blockwise")
_HEAP_BYTES = {"gpu": 3 << 30, "cpu": 64 << 20}
_LIMIT_S = 1800.0
# Cases whose kernels are compiled before the first of them is timed.
_COMPILED_AT_ONCE = 64
# Columns of the table, and what stands behind the time of a wrong result.
SIZES, ERROR, WRONG = "M N K of a rank's GEMM", "error / bound", " wrong"

Call = Callable[[], torch.Tensor]


class Took(NamedTuple):
    """Of a case: median seconds of each provider that can run it, and the largest error of each over its bound."""

    seconds: dict[str, float]
    errors: dict[str, float]


class Quantized(Operands):
    """Operands of which a and b are what 8-bit ones stand for, and those: a8, b8 (transposed) and their scales."""

    def __init__(self, case: Case, heap: Any, device: torch.device, recipe: Recipe) -> None:
        self.recipe, self.of_b = recipe, "blockwise_weight" if recipe == "blockwise" else recipe
        super().__init__(case, heap, device)
        self.a8, self.scale_a = stream_k.quantize(self.a, recipe)
        weight, scale = stream_k.quantize(self.b.t(), self.of_b)
        self.b8, self.scale_b = weight.t(), scale.t() if scale.ndim else scale

    def _random(self, shape: tuple[int, ...], tag: str, rank: int) -> torch.Tensor:
        found = super()._random(shape, tag, rank)
        if tag == "b":
            return stream_k.dequantize(*stream_k.quantize(found.t(), self.of_b)).t()
        return stream_k.dequantize(*stream_k.quantize(found, self.recipe))

    def _magnitude(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """As matrix units have it: the root of the sum of the squared terms."""
        return (a.square_() @ b.square_()).sqrt_()


def providers(x: Quantized) -> dict[str, Call]:
    """What computes a case, ours first."""
    # Of ours all can run: what one of them raises ends the measurement, or ranks would be out of step in the next.
    found = our_calls(x)
    for name, prepare in (
        ("scaled_mm", lambda: _vendor(x, fast=False)),
        ("scaled_mm, fast", lambda: _vendor(x, fast=True)),
        ("PyTorch's fused, fast", lambda: _fused(x)),
        ("DeepGEMM", lambda: _deep_gemm(x)),
    ):
        try:
            call = prepare()
            call()
            found[name] = call
        except (Unavailable, RuntimeError, ValueError, NotImplementedError) as error:
            if isinstance(error, RuntimeError) and "CUDA error" in str(error) and "CUBLAS" not in str(error):
                raise
            if x.rank == 0:
                print(
                    f"{x.case.op} {x.case.M} {x.case.N} {x.case.K}: no {name}: {first_line(error)}",
                    file=sys.stderr,
                )
    return found


def our_calls(x: Quantized) -> dict[str, Call]:
    """Ours in 8 bits, and in 16."""
    found = {"ours": _ours(x, fast=False)}
    if x.recipe != "blockwise":
        found["ours, fast"] = _ours(x, fast=True)
    if x.case.op == "gemm":
        M, N, K = x.shape
        facts = (M, N, K, 1, x.device, Scheme(x.recipe, fast=False), invariance.NONE)
        own = choose_scaled("gemm", *facts, placement="after")
        found["ours, no BLAS"] = _ours(x, fast=False, config=own)
    found["ours, 16 bits"] = _in_16_bits(x)
    return found


def _compile(cases: list[Case], recipe: Recipe, heap: Heap | None, device: torch.device) -> None:
    """Compile what ours need for all of these at once: one after another would take longer than what is timed. heap: as
    of `Quantized`."""
    needed: dict[Any, planning.Compilation] = {}
    for case in cases:
        x = Quantized(case, heap, device, recipe)
        with planning.only("collect") as more:
            for call in our_calls(x).values():
                call()
        needed |= more
    compile_shared_out([*needed.values()], heap)


def _ours(x: Quantized, fast: bool, **given: Any) -> Call:
    given |= {"scale_a": x.scale_a, "scale_b": x.scale_b, "out_dtype": x.dtype, "use_fast_accum": fast}
    return _call_of_ours(x, x.a8, x.b8, **given)


def _in_16_bits(x: Quantized) -> Call:
    return _call_of_ours(x, x.a.to(x.dtype), x.b.to(x.dtype))


def _call_of_ours(x: Quantized, a: torch.Tensor, b: torch.Tensor, **given: Any) -> Call:
    """Of fused ops into one result for all calls, as a layer's come to lie: elsewhere most samples would be those in
    which a graph is captured. A GEMM alone is no graph, and makes its results, as its peers do."""
    op, more = getattr(stream_k, x.case.op), x.keywords() | ({} if x.heap is None else {"group": x.heap})
    out = op(a, b, **more, **given) if x.num_ranks > 1 else None
    return lambda: op(a, b, **more, **given, out=out)


def _vendor(x: Quantized, fast: bool) -> Call:
    """`torch._scaled_mm`, with a collective of NCCL before or behind it."""
    need_gpus(x) if x.num_ranks > 1 else _need_gpu(x)
    if fast and x.recipe == "blockwise":
        raise Unavailable("blocks are added in fp32")
    scale_b = x.scale_b
    if x.recipe == "blockwise":
        # Along K those of B lie in a multiple of four places.
        scale_b = F.pad(scale_b.t(), (0, -len(scale_b) % 4)).contiguous().t()

    def laid_out(scales: torch.Tensor) -> torch.Tensor:
        """Of blocks, those of one K one behind another."""
        return scales.t().contiguous().t() if x.recipe == "blockwise" else scales

    scale_a = laid_out(x.scale_a)

    def multiply(a: torch.Tensor, of_a: torch.Tensor) -> torch.Tensor:
        if x.recipe == "blockwise":
            scales = (of_a, F.ScalingType.BlockWise1x128, scale_b, F.ScalingType.BlockWise128x128)
            return F.scaled_mm(a, x.b8, *scales, output_dtype=x.dtype)
        return torch._scaled_mm(a, x.b8, of_a, scale_b, out_dtype=x.dtype, use_fast_accum=fast)

    op, M, N, ranks = x.case.op, x.case.M, x.case.N, x.num_ranks
    if op in ("all_gather_gemm", "gemm_reduce_scatter") and M % ranks:
        raise Unavailable("rows don't divide by the ranks")
    if op == "all_gather_gemm":
        if x.recipe == "tensorwise":
            raise Unavailable("each rank's rows have a scale of their own")
        rows, scales = x.a8.new_empty(M, x.a8.shape[1]), x.scale_a.new_empty(M, x.scale_a.shape[1])
        # NCCL takes what lies row by row.
        own_scales = x.scale_a.contiguous()

        def gathers() -> torch.Tensor:
            dist.all_gather_into_tensor(rows.view(torch.uint8), x.a8.view(torch.uint8))
            dist.all_gather_into_tensor(scales, own_scales)
            return multiply(rows, laid_out(scales))

        return gathers
    if op == "gemm_reduce_scatter":
        own = torch.empty(M // ranks, N, dtype=x.dtype, device=x.device)

        def scatters() -> torch.Tensor:
            dist.reduce_scatter_tensor(own, multiply(x.a8, scale_a))
            return own

        return scatters
    if op == "gemm_all_reduce":

        def sums() -> torch.Tensor:
            product = multiply(x.a8, scale_a)
            dist.all_reduce(product)
            return product

        return sums
    if op == "gemm_all_scatter":
        columns = torch.empty(ranks * M, N, dtype=x.dtype, device=x.device)

        def joins() -> torch.Tensor:
            dist.all_gather_into_tensor(columns, multiply(x.a8, scale_a))
            return columns.view(ranks, M, N).transpose(0, 1).reshape(M, ranks * N)

        return joins
    return lambda: multiply(x.a8, scale_a)


def _fused(x: Quantized) -> Call:
    """PyTorch's op on symmetric memory, which has scales of rows."""
    if x.recipe == "blockwise" or x.case.M % x.num_ranks:
        raise Unavailable("takes scales of tensors and rows, and equally many rows")
    if x.recipe == "rowwise" and x.case.M // x.num_ranks % 4:
        # As those of the second rank's rows do: some ranks raise, for which the others wait for ever.
        raise Unavailable("torch._scaled_mm refuses scales that begin between multiples of 16 bytes")
    need_gpus(x)
    # Registers the ops.
    importlib.import_module("torch.distributed._symmetric_memory")
    group, operands = group_name(), (x.a8, x.b8, x.scale_a, x.scale_b)
    if x.case.op == "all_gather_gemm":
        gather = torch.ops.symm_mem.fused_all_gather_scaled_matmul
        more = (0, group, [None], [None], [x.dtype], [True])
        return lambda: gather(x.a8, [x.b8], x.scale_a, [x.scale_b], *more)[1][0]
    if x.case.op == "gemm_reduce_scatter":
        scatter, shape = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter, [x.case.M, x.case.N]
        return lambda: scatter(*operands, "sum", 0, 0, group, shape, None, None, x.dtype, True)
    raise Unavailable("no such op")


def _deep_gemm(x: Quantized) -> Call:
    """DeepGEMM's product of blocks, by its present name or the one before."""
    _need_gpu(x)
    if x.case.op != "gemm" or x.recipe != "blockwise":
        raise Unavailable("multiplies with scales of blocks")
    try:
        module = importlib.import_module("deep_gemm")
    except ImportError as error:
        raise Unavailable(f"not importable: {error}") from None
    scale_a = x.scale_a
    if hasattr(module, "fp8_gemm_nt"):
        # Laid out as it would otherwise do in each call.
        multiply, scale_a = module.fp8_gemm_nt, module.get_mn_major_tma_aligned_tensor(scale_a)
    else:
        multiply, scale_a = module.gemm_fp8_fp8_bf16_nt, module.get_col_major_tma_aligned_tensor(scale_a)
    a, b = (x.a8, scale_a), (x.b8.t(), x.scale_b.t().contiguous())

    def product() -> torch.Tensor:
        out = torch.empty(x.case.M, x.shape[1], dtype=torch.bfloat16, device=x.device)
        multiply(a, b, out)
        return out

    return product


def _need_gpu(x: Quantized) -> None:
    if x.device.type != "cuda":
        raise Unavailable("needs a GPU")


def error_over_bound(x: Quantized, found: torch.Tensor, fast: bool) -> float:
    """The largest, of a sample; 0 on a rank without rows. Each rank's term is rounded, a library's as often as there
    are ranks."""
    if found.numel() == 0:
        return 0.0
    sample, K = x.sampled("result"), x.shape[2]
    truth, info = sample.truth, torch.finfo(x.dtype)
    bound = of_matrix_unit(math.sqrt(K) * truth.typical, K, fast) + info.tiny
    bound += info.eps * (truth.value.abs() + x.num_ranks * truth.partials)
    return float(((sample.of(found).double() - truth.value).abs() / bound).max())


def measure(
    rank: int, world_size: int, cases: list[Case], recipe: Recipe, iters: int, seconds: float = math.inf
) -> list[Took]:
    """In a rank; the first cases, as many as begin within so many seconds."""
    device, begin = target.device(rank), time.monotonic()
    took: list[Took] = []
    meter = Meter(device, world_size > 1)
    with Heap(_HEAP_BYTES["gpu" if device.type == "cuda" else "cpu"]) as heap:
        together = heap if world_size > 1 else None
        for number, case in enumerate(cases):
            if took and b"late" in heap.vote("time", b"late" * (time.monotonic() - begin > seconds)):
                break
            if number % _COMPILED_AT_ONCE == 0:
                _compile(cases[number : number + _COMPILED_AT_ONCE], recipe, together, device)
            x = Quantized(case, together, device, recipe)
            runs = {name: Run(call, None, returns=True) for name, call in providers(x).items()}
            spent = meter.in_turn(runs, iters).seconds
            heap.synchronize()
            errors = {
                name: error_over_bound(x, run.result(), "fast" in name)
                for name, run in runs.items()
                if name != "ours, 16 bits"  # of operands that are rounded
            }
            took.append(Took({name: statistics.median(each) for name, each in spent.items()}, errors))
            heap.barrier()
    return took


def main(
    num_ranks: Annotated[int, typer.Option("-n", "--num-gpus")] = 1,
    recipe: Annotated[str, typer.Option(help=f"One of {', '.join(RECIPES)}.")] = "rowwise",
    shapes: Annotated[str, typer.Option(help="As those of `python -m pyrocshmem bench`.")] = "llama3",
    ops: Annotated[
        str, typer.Option(help="Names with commas between; default: gemm on one rank, else all.")
    ] = "",
    iters: Annotated[int, typer.Option(help="Samples of each.")] = 10,
    seconds: Annotated[float, typer.Option(help="Begin no further case after so long.")] = math.inf,
    commit: Annotated[str, typer.Option(help="The commit's hash, where git can't tell it.")] = "",
) -> None:
    """Print how long GEMMs of 8-bit operands take, beside the vendor's and PyTorch's."""
    try:
        options.check_ranks(num_ranks)
        if recipe not in RECIPES:
            raise ValueError(f"--recipe is {recipe!r}, allowed are {', '.join(RECIPES)}")
        if models.is_drawn(shapes):
            shapes = models.with_seed(shapes, records.commit_measured(commit))
        names = ops.split(",") if ops else OPS[:1] if num_ranks == 1 else OPS[1:]
        for name in names:
            if name not in OPS or (name == "gemm") != (num_ranks == 1):
                raise ValueError(
                    f"--ops has {name!r}, allowed are gemm on one rank and {', '.join(OPS[1:])} on more"
                )
        on_gpu = target.num_devices() > 0
        dtype = "bfloat16" if on_gpu else "float16"
        of_ops = [cases_of(name, shapes, num_ranks, dtype, on_gpu) for name in names]
        # In turn: the first ones are some of each op.
        cases = [case for nth in itertools.zip_longest(*of_ops) for case in nth if case is not None]
    except ValueError as error:
        options.refuse(error)
    os.environ.update(records.NO_MULTICAST)
    of_ranks = launching.spawn(measure, num_ranks, cases, recipe, iters, seconds, timeout=_LIMIT_S)
    took = [slowest(list(of_case)) for of_case in zip(*of_ranks, strict=True)]
    about = [
        "",
        f"8-bit operands, {recipe}",
        f"shapes: {shapes}" if len(took) == len(cases) else f"shapes: {shapes}, the first {len(took)}",
        *records.in_words("float8", num_ranks, commit),
    ]
    for line in (*table(cases[: len(took)], took), *about):
        print(line)
    raise typer.Exit(
        int(any(is_wrong(each, name) for each in took for name in each.errors if "ours" in name))
    )


def slowest(of_ranks: list[Took]) -> Took:
    """Of all ranks: the longest times, the largest errors."""
    first = of_ranks[0]
    seconds = {name: max(took.seconds[name] for took in of_ranks) for name in first.seconds}
    return Took(seconds, {name: max(took.errors[name] for took in of_ranks) for name in first.errors})


def is_wrong(took: Took, name: str) -> bool:
    """Whether a provider's result is beyond the bound, as `torch._scaled_mm`'s is of 42 blocks of K."""
    return not took.errors.get(name, 0.0) <= 1  # nor is a NaN


def ours_like(provider: str) -> str:
    """Of ours, what adds as a provider does."""
    return "ours, fast" if "fast" in provider else "ours"


def table(cases: list[Case], took: list[Took]) -> list[str]:
    """The lines of the table, and geometric means of each provider's time over ours that adds as it does, of results
    that are right."""
    names = list(dict.fromkeys(name for each in took for name in each.seconds))
    heads = ("op", SIZES, *names, ERROR)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case, each in zip(cases, took, strict=True):
        times = [
            f"{1e6 * each.seconds[name]:.1f}{WRONG * is_wrong(each, name)}" if name in each.seconds else ""
            for name in names
        ]
        worst = max(error for name, error in each.errors.items() if "ours" in name)
        lines.append(f"| {' | '.join((case.op, f'{case.M} {case.N} {case.K}', *times, f'{worst:.2f}'))} |")
    lines.append("")
    for op in dict.fromkeys(case.op for case in cases):
        for name in names:
            ours = ours_like(name)
            both = [
                each.seconds
                for case, each in zip(cases, took, strict=True)
                if case.op == op and {name, ours} <= each.seconds.keys() and not is_wrong(each, name)
            ]
            if name != ours and both:
                ratios = [seconds[name] / seconds[ours] for seconds in both]
                mean = f"{statistics.geometric_mean(ratios):.3f}, worst {min(ratios):.3f}"
                lines.append(f"{op}, {name} over {ours}: {mean} ({len(ratios)} cases)")
    return lines


if __name__ == "__main__":
    typer.run(main)
