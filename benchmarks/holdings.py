"""What an op holds of a GPU's memory between its calls, beside what NCCL and PyTorch's symmetric memory hold for it.

    python -m pyrocshmem.benchmarks.holdings -n 2 --shape 8192,8192,3584      # M,N,K of a rank's product

Prints a table in Markdown, MiB a rank. Each figure is of ranks that were started for it, which have done a product
before, so that no library's own start counts twice. "a + b": a taken from the driver (memory that peers reach,
communicators, kernels), b kept by PyTorch's allocator, operands and results left out. Ours also by holder. On a CPU
only ours, of which b isn't counted.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
import typer

from pyrocshmem import Heap, options, target
from pyrocshmem.benchmarks.operands import Operands
from pyrocshmem.benchmarks.provider import Run, Unavailable
from pyrocshmem.benchmarks.providers import prepare
from pyrocshmem.benchmarks.records import NO_MULTICAST
from pyrocshmem.benchmarks.shapes import Case
from pyrocshmem.launching import run_ranks

# By op: who computes it with PyTorch's symmetric memory.
_SYMMETRIC = {
    "all_gather_gemm": "torch_symm_mem",
    "gemm_reduce_scatter": "torch_symm_mem",
    "gemm_all_reduce": "blas_torch_two_shot",
    "all_reduce": "torch_two_shot",
}
_SUMS = ("gemm_reduce_scatter", "gemm_all_reduce")
_WORKSPACE = re.compile(r"^Workspace \d+[:,] ")
_CALLS = 3
_LIMIT_S = 300.0


class Held(NamedTuple):
    """Bytes of a rank: from the driver, from PyTorch's allocator, on the heap by holder. why_not: instead of these."""

    driver: int = 0
    pytorch: int = 0
    by: dict[str, int] | None = None
    why_not: str = ""


def measure(rank: int, world_size: int, case: Case, name: str) -> Held:
    """What calls of a provider keep. In a rank."""
    device = target.device(rank)
    with Heap() as heap:
        operands = Operands(case, heap, device)
        warm = torch.randn(256, 256, device=device, dtype=torch.float32)
        torch.mm(warm, warm)
        before = _taken(device)
        used = heap.usage().used
        try:
            run = _nccl(operands) if name == "nccl" else prepare(name, operands)
            call: Callable[[], object] = run.call
            for _ in range(_CALLS):
                result = call()
            heap.synchronize()
        except Unavailable as error:
            return Held(why_not=str(error))
        results = {id(x): x.nbytes for x in (result, run.out) if isinstance(x, torch.Tensor)}
        driver, pytorch = (now - then for now, then in zip(_taken(device), before, strict=True))
        usage = heap.usage()
        if device.type == "cpu":
            driver = usage.used - used
        return Held(driver, max(0, pytorch - sum(results.values())), usage.held_by)


def _nccl(x: Operands) -> Run:
    """NCCL's collective, and the BLAS, on a communicator of its own: the default group's was there before."""
    group = dist.new_group(backend="nccl")
    M, N = x.case.M, x.case.N
    if x.case.op == "all_gather_gemm":
        rows = x.new(M, x.case.K)

        def gather_first() -> torch.Tensor:
            dist.all_gather_into_tensor(rows, x.a, group=group)
            return torch.mm(rows, x.b)

        return Run(gather_first, None, returns=True)
    product = x.new(M, N)
    out = x.new(M // x.num_ranks, N) if x.case.op == "gemm_reduce_scatter" else product

    def multiply_first() -> None:
        if x.problem.gemm:
            torch.mm(x.a, x.b, out=product)
        if out is product:
            dist.all_reduce(product, group=group)
        else:
            dist.reduce_scatter_tensor(out, product, group=group)

    return Run(multiply_first, out)


def _taken(device: torch.device) -> tuple[int, int]:
    """Bytes (from the driver by anybody but PyTorch's allocator, of tensors)."""
    if device.type == "cpu":
        return 0, 0
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)


def table(cases: list[Case]) -> list[str]:
    """The lines of the table."""
    on_gpu = target.num_devices() > 0
    others = ("NCCL", "PyTorch's symmetric memory") if on_gpu else ()
    heads = ["op", "M x N x K", "ours", "ours, fp32 sums", *others]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    holders = []
    for case in cases:
        names = ["ours", "ours_fp32" if case.op in _SUMS else ""]
        names += ["nccl", _SYMMETRIC[case.op]] if on_gpu else []
        cells = [case.op, f"{case.M} x {case.N} x {case.K}"]
        for name in names:
            held = Held(why_not="-") if not name else _of_fresh_ranks(case, name)
            cells.append(held.why_not or f"{_mib(held.driver)} + {_mib(held.pytorch)}")
            if name == "ours" and held.by:
                parts = (f"{_WORKSPACE.sub('', who)} {_mib(size)}" for who, size in held.by.items())
                holders.append(f"- {case.op}: {', '.join(parts)}")
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", "On the heap, by holder (MiB):", "", *holders]


def _of_fresh_ranks(case: Case, name: str) -> Held:
    """Of the rank that holds most."""
    ends = run_ranks(measure, case.ranks, case, name, timeout=_LIMIT_S)
    failed = [end for end in ends if not end.ok]
    if failed:
        return Held(why_not=f"failed: {failed[0].exception!r}")
    return max((end.value for end in ends), key=lambda held: held.driver + held.pytorch)


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f}"


def main(
    num_ranks: Annotated[int, typer.Option("-n", "--num-gpus")] = 2,
    shape: Annotated[str, typer.Option(help="M,N,K of a rank's product.")] = "8192,8192,3584",
    ops: Annotated[str, typer.Option(help="Names with commas between them.")] = ",".join(_SYMMETRIC),
    dtype: Annotated[str | None, typer.Option(help="Default: bfloat16, on a CPU float16.")] = None,
) -> None:
    """Print what ops hold of a GPU's memory, beside what others hold for the same work."""
    options.check_ranks(num_ranks)
    os.environ.update(NO_MULTICAST)
    M, N, K = map(int, shape.split(","))
    name = options.check_dtype(dtype) or ("bfloat16" if target.num_devices() else "float16")
    cases = [
        Case(op, "", M, N, 0 if op == "all_reduce" else K, name, num_ranks, "single") for op in ops.split(",")
    ]
    for line in table(cases):
        print(line)


if __name__ == "__main__":
    typer.run(main)
