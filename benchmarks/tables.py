"""Markdown made from records: docs/results.md and the table of README.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import stats
from benchmarks.records import File, median
from benchmarks.shapes import LINK_BYTES_PER_S, NORMS, TIMED, tensor_bytes
from benchmarks.stats import Group

BEGIN, END = "<!-- readings: made by benchmarks.report -->", "<!-- end of readings -->"
# A set with more cases than this is shown by its distribution and its worst cases.
_ALL_CASES = 40
_WORST_CASES = 20
_VARIANTS = ("ours", "ours_16bit")

_HEAD = f"""# Results

Made by `python -m benchmarks report` from the records named; don't edit. All cases are shown, losing ones in bold.

M x N x K is one rank's product; of a layer, tokens, hidden and intermediate size. A cell is the median in
microseconds and, in brackets, how many times as fast `ours` is. A sample is the slowest rank's; providers take turns on
the same tensors. Timing `graph`: a replayed CUDA graph of 20 calls (of collectives from 64 MiB on: 5), its share;
`eager`: one call between device events. L2 is flushed before either, and each call of a graph reads another copy of B,
so that B comes from memory, as the weights of successive layers do. `spread`: 10th and 90th percentile of the ratio of
neighbouring samples. `floor` is the larger of the product alone (the faster of the BLAS and our GEMM) and the op's
bytes over {LINK_BYTES_PER_S / 1e9:.0f} GB/s; overlap efficiency is floor over time.

`ours`: the default configuration. `ours_16bit`: partial sums travel in the operands' 16-bit dtype, as every
library's do, not in fp32. `ours_` and a placement (after, beside, inside, ...) or an algorithm (one_shot,
two_shot): where that is not the default; a third of the samples. `ours_whole_tiles`: no tile is split. `ours_gemm`,
`blas`: the product alone. `unfused`: the BLAS, then NCCL (RCCL, gloo), then PyTorch's sum with the residual and RMSNorm
where the op has them; of a standalone collective the library's. `blas_` and a name: the same with another all-reduce:
ours, PyTorch's on symmetric memory, FlashInfer's (with residual and norm in it, and so is `flashinfer`).
`unfused_stacked`: without the copy that brings the ranks' blocks side by side. `nccl_window`: unfused on registered
symmetric windows. `torch_symm_mem`, `torch_one_shot`, `torch_two_shot`: PyTorch's symmetric-memory ops, then its sum
and RMSNorm where the op has them. Multicast is off for all. Of layers, `torch_tp`: PyTorch's tensor parallelism,
`torch_tp_async`: compiled, with its asynchronous one; peak: what a step holds beyond weights and inputs, ours with the
workspace that it needs.
"""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def number(value: float | None, digits: int = 3) -> str:
    """To so many significant digits, nothing for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def ratio(value: float | None, peer: bool) -> str:
    """A speed-up, bold where it is a loss against a peer."""
    if value is None:
        return ""
    return f"**{value:.2f}**" if peer and value < 1 else f"{value:.2f}"


def shape(case: dict[str, Any]) -> str:
    """Of a product, or of rows that are normed; of another collective, the bytes of the whole tensor."""
    if case["op"] in NORMS and not case["K"]:
        return f"{case['M']} x {case['N']}"
    if TIMED[case["op"]].kind != "collective":
        return f"{case['M']} x {case['N']} x {case['K']}"
    nbytes = tensor_bytes(*(case[name] for name in ("op", "M", "N", "ranks", "dtype")))
    step = 2 if nbytes >= 1 << 20 else 1 if nbytes >= 1 << 10 else 0
    return f"{nbytes / 1024**step:.4g} {('B', 'KiB', 'MiB')[step]}"


def cell(case: dict[str, Any], provider: str, peers: Sequence[str]) -> str:
    """Median, and the speed-up of ours over it; what is wrong or was skipped says so."""
    if provider in case["wrong"]:
        return "WRONG"
    if provider in case["failed"]:
        return "failed"
    time = median(case, provider)
    if time is None:
        return "skipped" if provider in case["skipped"] else ""
    speed = stats.speedup(case, provider) if provider != "ours" else None
    if speed is None:
        return number(time)
    return f"{number(time)} ({ratio(speed, provider in peers)})"


def case_table(group: Group, cases: Sequence[dict[str, Any]]) -> str:
    """A row a case, a column a provider, and the geometric mean and worst case of the group."""
    peers, base = stats.peers(group), stats.baseline(group.op)
    fused = TIMED[group.op].kind in ("row", "column")
    bandwidth = TIMED[group.op].kind == "collective"
    header = ["size" if bandwidth else "M x N x K", "timing", *group.providers, f"spread over {base}"]
    header += ["floor", "efficiency"] * fused + ["bus GB/s"] * bandwidth
    memory = any(case.get("peak_mib") for case in cases)
    header += ["peak MiB"] * memory
    rows = []
    for case in cases:
        between = stats.spread(case, base)
        row = [shape(case), case["timing"], *(cell(case, name, peers) for name in group.providers)]
        row.append(f"{between[0]:.2f} to {between[1]:.2f}" if between else "")
        if fused:
            row += [number(case["floor_us"]), number(case["efficiency"].get("ours"), 2)]
        if bandwidth:
            row.append(number(case["bus_gb_per_s"].get("ours")))
        if memory:
            peaks = case.get("peak_mib") or {}
            row.append(
                ", ".join(f"{name} {number(peaks[name])}" for name in group.providers if name in peaks)
            )
        rows.append(row)
    empty = [""] * (1 + bandwidth + memory)
    means = {name: stats.speedups(group, name) for name in group.providers if name != "ours"}
    efficiency = number(stats.geometric_mean(stats.efficiencies(group)), 2) if fused else ""
    tail = ["", efficiency] if fused else empty[: bandwidth + memory]
    for title, value in (("**geometric mean**", stats.geometric_mean), ("**worst**", min)):
        found = [ratio(value(means[p]), p in peers) if means.get(p) else "" for p in group.providers]
        end = tail if value is stats.geometric_mean else [""] * len(tail)
        rows.append([title, "", *found, "", *end])
    return table(header, rows)


def distribution(group: Group) -> str:
    """Percentiles of the speed-up of every variant of ours over the baseline, and how many cases lose."""
    base = stats.baseline(group.op)
    rows = []
    for name in group.providers:
        found = stats.speedups(group, base, name) if name.startswith("ours") else []
        if found:
            percents = [
                f"{stats.percentile(found, share):.2f}" for share in (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)
            ]
            losing = sum(value < 1 for value in found)
            rows.append([name, f"{stats.geometric_mean(found):.3f}", *percents, f"{losing} of {len(found)}"])
    header = [
        f"speed over {base}",
        "geometric mean",
        "worst",
        "5%",
        "25%",
        "median",
        "75%",
        "95%",
        "best",
        "losing",
    ]
    return table(header, rows)


def behind(group: Group) -> str:
    """Where each peer is faster than ours, and by what ratio; "" where none is."""
    texts = []
    for peer in stats.peers(group):
        speeds = {shape(case): stats.speedup(case, peer) for case in group.cases}
        lost = [f"{name} ({speed:.3f})" for name, speed in speeds.items() if speed is not None and speed < 1]
        texts += [f"`{peer}` at {', '.join(lost)}"] if lost else []
    return f"Ours is behind {'; '.join(texts)}.\n" if texts else ""


def group_text(group: Group) -> str:
    """Heading, tables, losing cases, clocks, and who was skipped why."""
    parts = [f"### {group.title}\n"]
    cases: Sequence[dict[str, Any]] = group.cases
    if len(cases) > _ALL_CASES:
        base = stats.baseline(group.op)
        cases = sorted(cases, key=lambda case: stats.speedup(case, base) or 0)[:_WORST_CASES]
        parts += [distribution(group), f"The {len(cases)} worst of {len(group.cases)} cases:\n"]
    parts.append(case_table(group, cases))
    if len(group.cases) <= _ALL_CASES and (lost := behind(group)):
        parts.append(lost)
    clocks = [clock for case in group.cases for clock in case.get("clock_mhz") or ()]
    if clocks:
        watts = max(case["power_w"] for case in group.cases if case.get("power_w"))
        parts.append(f"SM clock {min(clocks):.0f} to {max(clocks):.0f} MHz, at most {watts:.0f} W.\n")
    for kind in ("skipped", "failed"):
        reasons: dict[tuple[str, str], int] = {}
        for case in group.cases:
            for each in case[kind].items():
                reasons[each] = reasons.get(each, 0) + 1
        if reasons:
            texts = [f"`{name}` ({reason}; {count} cases)" for (name, reason), count in reasons.items()]
            parts.append(f"{kind.capitalize()}: {', '.join(texts)}.\n")
    return "\n".join(parts)


def file_text(file: File) -> str:
    """What made the records."""
    env = file.environment
    gpu = env["gpus"][0].split(",")[0] if env["gpus"] else "CPU"
    versions = ", ".join(f"{name} {env[name]}" for name in ("torch", "triton", "nccl", "python") if env[name])
    commands = ", ".join(f"`{command}`" for command in env.get("commands", [env["command"]]))
    return (
        f"- {commands} on {env['num_ranks']} x {gpu}, at commit `{env['commit'][:10]}`{_changed(env)}, "
        f"{env['started']}; {versions}. Records: `{file.path.name}`.\n"
    )


def document(files: Sequence[File]) -> str:
    """Everything that the records say, but for the introduction."""
    found = stats.groups(files)
    return "".join(file_text(file) for file in files) + "\n" + "\n".join(group_text(group) for group in found)


def summary_table(found: Sequence[dict[str, Any]]) -> str:
    """A row for each op, set and provider."""
    rows = []
    for item in found:
        for name, speed in item["speedup"].items():
            what = [item["op"], item["shapes"], item["dtype"], f"{item['ranks']} x {item['device']}"]
            worst = f"{item['worst_speedup'][name]:.2f}"
            rows.append(
                [
                    *what,
                    str(item["cases"]),
                    number(item["overlap_efficiency"], 2),
                    name,
                    f"{speed:.2f}",
                    worst,
                ]
            )
    header = ["op", "shapes", "dtype", "on", "cases", "efficiency", "against", "speed-up", "worst"]
    return table(header, rows)


def readme_table(files: Sequence[File]) -> str:
    """For each op on GPUs and each set of shapes: ours, and its faster variants, over its peers."""
    rows = []
    for group in stats.groups(files):
        if group.device == "cpu":
            continue
        for name in _VARIANTS:
            peers = {peer: stats.speedups(group, peer, name) for peer in stats.peers(group)}
            peers = {peer: found for peer, found in peers.items() if found}
            if not peers:
                continue
            texts = [
                f"{peer} {stats.geometric_mean(found):.2f} (worst {min(found):.2f})"
                for peer, found in peers.items()
            ]
            efficiency = number(stats.geometric_mean(stats.efficiencies(group, name)), 2)
            count = max(len(found) for found in peers.values())
            where = f"{group.ranks} x {group.device.removeprefix('NVIDIA ')}"
            rows.append(
                [f"`{group.op}`", group.shapes, where, name, str(count), efficiency, "; ".join(texts)]
            )
    header = [
        "op",
        "shapes",
        "on",
        "variant",
        "cases",
        "overlap efficiency",
        "speed over: geometric mean (worst case)",
    ]
    runs = {_run(file.environment): None for file in files if file.environment["gpus"]}
    return f"Multicast is off for all. {'; '.join(runs)}.\n\n{table(header, rows)}"


def _changed(env: dict[str, Any]) -> str:
    """What is not of the commit that a run names."""
    return f" with {len(env['uncommitted'])} files changed since" if env["uncommitted"] else ""


def _run(env: dict[str, Any]) -> str:
    """Where and of what a run was made, in a few words; docs/results.md has its command."""
    gpu = env["gpus"][0].split(",")[0]
    versions = ", ".join(f"{name} {env[name]}" for name in ("torch", "triton", "nccl") if env[name])
    return f"{env['num_ranks']} x {gpu}: {versions}, commit `{env['commit'][:7]}`{_changed(env)}"


def write(files: Sequence[File], plots: Sequence[Path], root: Path) -> None:
    """docs/results.md with the `plots` below docs/, and the table between its marks in README.md."""
    docs = root / "docs"
    drawn = [path.relative_to(docs) for path in plots if path.suffix == ".png"]
    pictures = "".join(f"![{path.stem.replace('-', ' ')}]({path.as_posix()})\n" for path in drawn)
    text = f"{_HEAD}\n{document(files)}\n## Plots\n\n{pictures}"
    (docs / "results.md").write_text(text)
    readme = root / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n{readme_table(files)}{END}{rest.split(END)[1]}")
