"""First readings: the GEMM alone on the Llama products, the fused ops at one large layer, host overhead.

    python -m benchmarks.readings -n 4 --out benchmarks/results/NAME.jsonl

One JSON object a line: first the environment (command, versions, commit, devices, clocks), then a record a
case with every provider's samples in microseconds, each the slowest rank's. Providers run in turn on the same
tensors (`reference.timing`); every timed output is compared with the baseline's.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

# Llama layers as (N, K) of one rank's column-parallel product; row-parallel products have them swapped.
LLAMA = ((1792, 4096), (3584, 8192), (6656, 16384))
ROWS = (4096, 8192, 16384)
LAYER_ROWS, LAYER_HIDDEN, LAYER_SHARE = 8192, 8192, 3584
HOST_CALLS = 100


@dataclass(frozen=True)
class Case:
    """One op at one local shape [M, K] x [K, N]. providers: names understood by `_calls`."""

    op: str
    M: int
    N: int
    K: int
    dtype: str
    providers: tuple[str, ...]


def cases(num_ranks: int) -> list[Case]:
    """What is measured with so many ranks."""
    found = []
    for n, k in LLAMA:
        for m in ROWS:
            for shape in ((m, n, k), (m, k, n)):
                found.append(Case("gemm", *shape, "bfloat16", ("ours", "blas")))
    if num_ranks == 1:
        return found
    for dtype in ("bfloat16", "float16"):
        reduce = ("ours", "ours to heap", "ours after", "ours inside", f"ours, {dtype} partials", "unfused")
        scatter = ("ours", "ours to heap", "ours after", "ours inside", "unfused", "unfused, not in place")
        shape = (LAYER_ROWS, LAYER_HIDDEN, LAYER_SHARE)
        found.append(Case("gemm_all_reduce", *shape, dtype, reduce))
        found.append(Case("gemm_all_scatter", LAYER_ROWS, LAYER_SHARE, LAYER_HIDDEN, dtype, scatter))
    for m, n, k in ((4096, 4096, 1792), (16384, 8192, 3584), (8192, 16384, 6656)):
        providers = ("ours", "ours, bfloat16 partials", "unfused")
        found.append(Case("gemm_all_reduce", m, n, k, "bfloat16", providers))
        found.append(Case("gemm_all_scatter", m, k, n, "bfloat16", ("ours", "unfused")))
    return found


def measure(rank: int, world_size: int, todo: list[Case], iters: int) -> list[dict[str, Any]]:
    """Records of this rank: samples in microseconds by provider, whether the outputs are right, host time."""
    import torch

    from pyrocshmem.heap import Heap
    from reference.timing import host_seconds, time_in_turn

    device = torch.device("cuda", rank)
    torch.manual_seed(1 + rank)
    records = []
    with Heap(8 << 30) as heap:
        for case in todo:
            calls, on_heap = _calls(case, heap, device)
            samples = time_in_turn(calls, iters, device)
            heap.synchronize()
            outputs = {name: out for name, (_, out) in calls.items()}
            record: dict[str, Any] = {
                **asdict(case),
                "us": {k: [1e6 * s for s in v] for k, v in samples.items()},
            }
            record["max_difference"] = _differences(outputs)
            record["host_us"] = {
                name: 1e6 * host_seconds(call, HOST_CALLS, device)
                for name, (call, _) in calls.items()
                if name in ("ours", "ours to heap")
            }
            records.append(record)
            for tensor in on_heap:
                heap.free(tensor)
    return records


def _calls(case: Case, heap: Any, device: Any) -> tuple[dict[str, tuple[Any, Any]], list[Any]]:
    """(call and output by provider, tensors to free from the heap)."""
    import dataclasses

    import torch

    import stream_k

    dtype = getattr(torch, case.dtype)
    M, N, K, R = case.M, case.N, case.K, heap.world_size
    a = torch.randn(M, K, device=device, dtype=torch.float32).to(dtype)
    b = torch.randn(K, N, device=device, dtype=torch.float32).to(dtype)
    columns = N * R if case.op == "gemm_all_scatter" else N
    on_heap = []
    calls: dict[str, tuple[Any, Any]] = {}
    for provider in case.providers:
        out = torch.empty(M, columns, device=device, dtype=dtype)
        if provider == "ours to heap":
            out = heap.empty(M, columns, dtype=dtype)
            on_heap.append(out)
        if provider == "blas":
            calls[provider] = (lambda out=out: torch.mm(a, b, out=out), out)
        elif provider.startswith("unfused"):
            calls[provider] = (_unfused(case, provider, a, b, out, R), out)
        elif case.op == "gemm":
            calls[provider] = (lambda out=out: stream_k.gemm(a, b, out=out), out)
        else:
            wire = dtype if provider.endswith("partials") else None
            config = stream_k.choose(case.op, M, N, K, dtype, R, device, wire)
            if provider in ("ours after", "ours inside"):
                config = dataclasses.replace(config, placement=provider.split()[1])
            op = getattr(stream_k, case.op)
            calls[provider] = (lambda out=out, c=config, op=op: op(a, b, group=heap, out=out, config=c), out)
    return calls, on_heap


def _unfused(case: Case, provider: str, a: Any, b: Any, out: Any, world_size: int) -> Any:
    import torch
    import torch.distributed as dist

    from reference import ops

    if case.op == "gemm_all_reduce":
        return lambda: ops.gemm_all_reduce(a, b, out=out)
    M, N = a.shape[0], b.shape[1]
    block, gathered = a.new_empty(M, N), a.new_empty(world_size, M, N)
    if provider == "unfused":
        return lambda: ops.gemm_all_gather(
            a, b, num_columns=N * world_size, out=out, block=block, gathered=gathered
        )

    def gather() -> None:
        # The blocks one below the other, which is what NCCL gives: the op's result takes one more copy.
        torch.mm(a, b, out=block)
        dist.all_gather_into_tensor(out.view(world_size * M, N), block)

    return gather


def _differences(outputs: dict[str, Any]) -> dict[str, float]:
    """Largest difference of each provider's last timed output from the baseline's, over its largest element."""
    baseline = outputs["blas"] if "blas" in outputs else outputs["unfused"]
    scale = float(baseline.abs().max())
    return {
        name: float((out.float() - baseline.float()).abs().max()) / scale
        for name, out in outputs.items()
        if name != "unfused, not in place"
    }


def environment(num_ranks: int) -> dict[str, Any]:
    """What the records depend on."""
    import torch
    import triton

    def output(*command: str) -> str:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return found.stdout.strip() if found.returncode == 0 else ""

    query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "command": " ".join(["python -m benchmarks.readings", *sys.argv[1:]]),
        "commit": output("git", "rev-parse", "HEAD"),
        "num_ranks": num_ranks,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nccl": nccl,
        "nvlink_multicast": False,
        "gpus": output("nvidia-smi", query, "--format=csv,noheader").splitlines(),
    }


def main(
    num_gpus: Annotated[int, typer.Option("-n", "--num-gpus")] = 4,
    out: Annotated[Path, typer.Option("--out")] = Path("readings.jsonl"),
    iters: Annotated[int, typer.Option("--iters")] = 30,
    commit: Annotated[str, typer.Option("--commit", help="Where git can't tell it.")] = "",
) -> None:
    """Measure and write the records."""
    from pyrocshmem.launch import spawn

    gemms = cases(1)
    fused = [case for case in cases(num_gpus) if case.op != "gemm"]
    lines = [environment(num_gpus)]
    if commit:
        lines[0]["commit"] = commit
    for todo, ranks in ((gemms, 1), (fused, num_gpus)):
        per_rank = spawn(measure, ranks, todo, iters)
        for records in zip(*per_rank, strict=True):
            merged = dict(records[0])
            merged["ranks"] = ranks
            for field, worst in (("us", True), ("host_us", False), ("max_difference", False)):
                merged[field] = {
                    name: [max(sample) for sample in zip(*(r[field][name] for r in records), strict=True)]
                    if worst
                    else max(r[field][name] for r in records)
                    for name in records[0][field]
                }
            lines.append(merged)
    lines[0]["gpus_after"] = environment(num_gpus)["gpus"]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    typer.echo(f"{len(lines) - 1} records in {out}")


if __name__ == "__main__":
    typer.run(main)
