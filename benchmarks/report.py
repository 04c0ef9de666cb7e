"""Tables of docs/results.md, made from the records of `benchmarks.readings`.

python -m benchmarks.report benchmarks/results/*.jsonl        # rewrites docs/results.md, README's table
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- readings: made by benchmarks.report -->", "<!-- end of readings -->"
BASELINES = ("blas", "unfused")


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def median(record: dict[str, Any], provider: str) -> float:
    """Median of a provider's samples, in microseconds."""
    return statistics.median(record["us"][provider])


def gemm_table(records: list[dict[str, Any]]) -> str:
    """Our GEMM beside the vendor's, with the geometric mean of the ratios."""
    rows, ratios = [], []
    for record in records:
        ours, blas = median(record, "ours"), median(record, "blas")
        ratios.append(blas / ours)
        rows.append(
            [
                f"{record['M']} x {record['N']} x {record['K']}",
                f"{ours:.1f}",
                f"{blas:.1f}",
                f"{blas / ours:.3f}",
            ]
        )
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    rows.append(["**geometric mean**", "", "", f"**{mean:.3f}**"])
    return table(["M x N x K", "ours, us", "cuBLAS, us", "speed over cuBLAS"], rows)


def fused_table(records: list[dict[str, Any]]) -> str:
    """Every provider of the fused ops, and its speed over the unfused pair."""
    rows = []
    for record in records:
        base = median(record, "unfused")
        for provider in record["us"]:
            time = median(record, provider)
            host = record["host_us"].get(provider)
            rows.append(
                [
                    record["op"],
                    f"{record['M']} x {record['N']} x {record['K']}",
                    record["dtype"],
                    provider,
                    f"{time:.0f}",
                    f"{base / time:.2f}",
                    f"{host:.0f}" if host is not None else "",
                ]
            )
    header = ["op", "M x N x K of a rank", "dtype", "provider", "us", "speed over unfused", "host us a call"]
    return table(header, rows)


def section(path: Path) -> str:
    """What one file of records says."""
    environment, *records = [json.loads(line) for line in path.read_text().splitlines()]
    gemms = [record for record in records if record["op"] == "gemm"]
    fused = [record for record in records if record["op"] != "gemm"]
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "nccl", "python"))
    parts = [
        f"## {environment['num_ranks']} x {environment['gpus'][0].split(',')[0]}\n",
        f"`{environment['command']}` at commit `{environment['commit'][:10]}`; {versions}; NVLink multicast off. "
        f"Records: `{path.relative_to(ROOT)}`. Medians; a sample is the slowest rank's.\n",
    ]
    if gemms:
        parts += ["### GEMM alone, bfloat16\n", gemm_table(gemms)]
    if fused:
        parts += ["### Fused ops\n", fused_table(fused)]
    return "\n".join(parts)


def summary(path: Path) -> str:
    """The table of README.md: the first case of each fused op, and the GEMM alone."""
    environment, *records = [json.loads(line) for line in path.read_text().splitlines()]
    ratios = [median(r, "blas") / median(r, "ours") for r in records if r["op"] == "gemm"]
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    gpus = f"{environment['num_ranks']} x {environment['gpus'][0].split(',')[0]}"
    rows = [["`gemm`, 18 Llama products", "cuBLAS", "", "", f"{mean:.3f} (geometric mean)"]]
    for op in ("gemm_all_reduce", "gemm_all_scatter"):
        record = next(r for r in records if r["op"] == op)
        base = median(record, "unfused")
        shape = f"{record['M']} x {record['N']} x {record['K']}"
        for provider in record["us"]:
            if provider.startswith("ours") and provider.split()[-1] not in ("after", "inside"):
                name = f"`{op}` {shape}{provider.removeprefix('ours')}"
                time = median(record, provider)
                rows.append([name, "cuBLAS + NCCL", f"{time:.0f}", f"{base:.0f}", f"{base / time:.2f}"])
    header = ["op, local product", "against", "us", "theirs, us", "speed-up"]
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "nccl"))
    return f"{gpus}, bfloat16, {versions}, multicast off:\n\n{table(header, rows)}"


def main(files: Annotated[list[Path], typer.Argument(help="Records of benchmarks.readings.")]) -> None:
    """Write docs/results.md and the table of README.md."""
    head = (
        "# Results\n\nMade by `python -m benchmarks.report` from the records named; don't edit. Losing cases stay "
        "in the tables.\n\n"
        "`ours` returns an ordinary tensor; `to heap` writes a symmetric one with no copy; `after`, `inside`: that "
        "placement, otherwise the default (beside); `partials`: sums travel in that dtype instead of fp32. `unfused`: "
        "cuBLAS, then NCCL, and for the scatter a copy into place, which `not in place` leaves out.\n\n"
    )
    DOCUMENT.write_text(head + "\n".join(section(path.resolve()) for path in files))
    before, rest = README.read_text().split(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{summary(files[-1])}{END}{rest.split(END)[1]}")
    typer.echo(f"wrote {DOCUMENT.name} and the table of {README.name}")


if __name__ == "__main__":
    typer.run(main)
