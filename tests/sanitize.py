"""Every kernel once, on one GPU, for compute-sanitizer:

    compute-sanitizer --tool memcheck python -m tests.sanitize

A world of one runs the same kernels as a larger one, against its own heap. Each result is checked, so that a
run which launched nothing can't pass. Prints a line a kernel; exits with 1 when a result is wrong.
The ops on row blocks run the plain GEMM when alone; here their plans are made all the same.
"""

from __future__ import annotations

import dataclasses
import sys
from unittest import mock

from pyrocshmem import Heap, target  # isort: skip  # before Triton
import torch

import collectives
import stream_k
from stream_k import fused

BLOCK_OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
SHAPES = ((256, 512, 1024), (97, 193, 131))


def close(out: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within what rounding to fp16 explains."""
    return bool((out.double() - expected).abs().max() <= 2**-9 * expected.abs().max())


def main() -> int:
    """Run everything; the number of wrong results."""
    device = target.device()
    wrong = 0

    def report(name: str, ok: bool) -> None:
        nonlocal wrong
        wrong += not ok
        print(f"{name}: {'right' if ok else 'WRONG'}", flush=True)

    with Heap(256 << 20) as heap:
        for M, N, K in SHAPES:
            a = torch.randn(M, K, dtype=torch.float16, device=device)
            b = torch.randn(K, N, dtype=torch.float16, device=device)
            expected = a.double() @ b.double()
            squares = expected.square().sum(1)
            for split in ("none", "stream_k"):
                config = dataclasses.replace(
                    stream_k.Config(), split=split, num_programs=5, num_comm_programs=1
                )
                report(f"gemm {M} {N} {K} {split}", close(stream_k.gemm(a, b, config=config), expected))
            for op in ("gemm_all_reduce", "gemm_all_scatter"):
                for placement in ("after", "beside", "own_stream", "inside"):
                    for algorithm in ("one_shot", "two_shot") if op == "gemm_all_reduce" else ("two_shot",):
                        config = stream_k.choose(op, M, N, K, a.dtype, 1, device)
                        config = dataclasses.replace(config, placement=placement, algorithm=algorithm)
                        # Squares asked for: a world of one then takes the kernels of a larger one.
                        out, partials = getattr(stream_k, op)(
                            a, b, group=heap, config=config, squared_partials=True
                        )
                        heap.synchronize()
                        ok = close(out, expected) and close(partials.sum(1), squares)
                        report(f"{op} {M} {N} {K} {placement} {algorithm}", ok)
            for name in BLOCK_OPS:
                for partial in (None, torch.float16) if name != "all_gather_gemm" else (None,):
                    config = stream_k.choose(name, M, N, K, a.dtype, 1, device)
                    config = dataclasses.replace(
                        config, placement="copy_engine", split="none", chunk=1, partial_dtype=partial
                    )
                    with mock.patch.object(fused, "_without_plan", return_value=None):
                        out = getattr(stream_k, name)(a, b, group=heap, config=config)
                    heap.synchronize()
                    report(f"{name} {M} {N} {K} copy_engine {partial}", close(out, expected))
        x = heap.randn(20000, dtype=torch.float32)
        for algorithm in ("one_shot", "two_shot"):
            total = collectives.all_reduce(x, group=heap, algorithm=algorithm)
            report(f"all_reduce {algorithm}", torch.equal(total, x))
        wide = collectives.all_scatter(x.view(100, 200), group=heap)
        report("all_scatter", torch.equal(wide, x.view(100, 200)))
        heap.synchronize()
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
