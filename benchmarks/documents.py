"""docs/results.md, and the table of README.md, made of records and benchmarks/results/notes.md."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean

from pyrocshmem.benchmarks import stats
from pyrocshmem.benchmarks.escape import markdown
from pyrocshmem.benchmarks.notes import Notes
from pyrocshmem.benchmarks.records import File
from pyrocshmem.benchmarks.shapes import LINK_BYTES_PER_S, TIMED, baseline
from pyrocshmem.benchmarks.tables import document, number, table, versions

BEGIN, END = "<!-- readings: made by benchmarks.report -->", "<!-- end of readings -->"
_VARIANTS = ("ours", "ours_16bit")
# And PyTorch's own operators, served by ours.
_SHOWN = (*_VARIANTS, "ours_symm_mem")
# Of an op that was measured with several sets of shapes README shows the first one here.
_README_SHAPES = ("llama3", "decode")

_HEAD = f"""# Results

Made by `python -m pyrocshmem bench report` from the records named and benchmarks/results/notes.md; don't edit. All
cases are shown, losing ones in bold.

M x N x K is one rank's product; of a layer, tokens, hidden and intermediate size. A cell is the median in
microseconds and, in brackets, how many times as fast `ours` is. A sample is the slowest rank's; providers take turns on
the same tensors. Timing `graph`: a replayed CUDA graph of 20 calls (of collectives from 64 MiB on: 5), its share;
`eager`: one call between device events. L2 is flushed before either, and each call of a graph reads another copy of B,
so that B comes from memory, as the weights of successive layers do. `spread`: 10th and 90th percentile of the ratio of
neighbouring samples. The SM clock is read after every third sample of each provider, by NVML: where they differ by more
than 2% the case is dropped, that is, shown without ratios and in no mean. `host us`: what a repeated eager call of ours
takes the host, with the same operands (in records before November 23, 2026, graphs' cases read another B each time).
`workspace`: what a call of ours alone keeps beyond inputs and output; the figure in brackets is what the project allows
itself, an fp32 tile a program included. Bits of ours are compared over all runs, at least 20. `-`: not in the record.
`floor` is the larger of the product alone (the faster of the BLAS and our GEMM) and the op's
bytes over {LINK_BYTES_PER_S / 1e9:.0f} GB/s; overlap efficiency is floor over time.

`ours`: the default configuration. `ours_16bit`: partial sums travel in the operands' 16-bit dtype, as every
library's do, not in fp32. `ours_` and a placement (after, beside, inside, ...) or an algorithm (one_shot,
two_shot): where that is not the default; a third of the samples. `ours_whole_tiles`: no tile is split. `ours_gemm`,
`blas`: the product alone. `unfused`: the BLAS, then NCCL (RCCL, gloo), then PyTorch's sum with the residual and RMSNorm
where the op has them; of a standalone collective the library's. `blas_` and a name: the same with another all-reduce:
ours, PyTorch's on symmetric memory, FlashInfer's (with residual and norm in it, and so is `flashinfer`).
`unfused_stacked`: without the copy that brings the ranks' blocks side by side. `nccl_window`: unfused on registered
symmetric windows. Where a norm's result is on all ranks, unfused gathers the columns, which PyTorch then normalizes.
`torch_symm_mem`, `torch_one_shot`, `torch_two_shot`: PyTorch's symmetric-memory ops, then its sum
and RMSNorm where the op has them. Multicast is off for all. Of layers, `torch_tp`: PyTorch's tensor parallelism,
`torch_tp_async`: compiled, with its asynchronous one, `symm_mem`: linears that call `torch.ops.symm_mem`, as
torchtitan's do, `ours_symm_mem`: the same, served by ours; peak: what a step holds beyond weights and inputs, ours with
the workspace that it needs.
"""

_PICTURES = """Strong lines are ours (blue) and the best peer (red), which is the fastest one in most cases of the
picture; all others are pale. Dotted lines are the GEMM alone.
"""


def all_variants(files: Sequence[File]) -> str:
    """For each op on GPUs and each set of shapes: ours, and its faster variant, over each of its peers."""
    rows = []
    for group, name, over in _measured(files):
        texts = [f"{peer} {_mean_and_worst(found)}" for peer, found in over.items()]
        efficiency = number(stats.geometric_mean(stats.efficiencies(group, name)), 2)
        count = max(len(found) for found in over.values())
        rows.append([*_what(group), name, str(count), efficiency, "; ".join(texts)])
    speed = "speed over: geometric mean (worst case)"
    return table(["op", "shapes", "on", "variant", "cases", "overlap efficiency", speed], rows)


def readme_table(files: Sequence[File]) -> str:
    """A row for each fused op, five at most, all of one machine, of two GPUs if there is one: ours, and its faster
    variant, over cuBLAS + NCCL and over the strongest of the others."""
    fused = [
        found
        for found in _measured(files)
        if found[0].ranks > 1 and TIMED[found[0].op].kind in ("row", "column")
    ]
    machines = [(group.ranks, group.device) for group, *_ in fused]
    machine = max(machines, key=lambda each: (each[0] == 2, machines.count(each)), default=(0, ""))
    shown: dict[str, stats.Group] = {}
    for group, *_ in sorted(fused, key=lambda found: [found[0].shapes != name for name in _README_SHAPES]):
        if (group.ranks, group.device) == machine:
            shown.setdefault(group.op, group)
    rows: dict[str, list[str]] = {}
    peers: dict[str, str] = {}
    for group, name, over in fused:
        if group is not shown.get(group.op):
            continue
        first = baseline(group.op)
        best = min(over.keys() - {first}, key=lambda peer: geometric_mean(over[peer]), default="")
        best = peers.setdefault(f"`{group.op}`", best)
        cells = rows.setdefault(group.op, [f"`{group.op}`", group.shapes, "", "", "", ""])
        for column, peer in ((2, first), (4, best)):
            cells[column + _VARIANTS.index(name)] = _mean_and_worst(over.get(peer, []))
    header = ["op", "shapes", "over cuBLAS + NCCL", "16-bit sums", "over the best peer", "16-bit sums"]
    found = (file.environment for file in files if file.environment["gpus"])
    environments = [env for env in found if (env["num_ranks"], env["gpus"][0].split(",")[0]) == machine]
    dates = sorted(env["started"][:10] for env in environments)
    facts = [f"{machine[0]} x {markdown(machine[1].removeprefix('NVIDIA '))}"] if rows else []
    facts += [f"{dates[0]} to {dates[-1]}"] if dates else []
    facts += sorted({versions(env, ("torch", "triton", "nccl")) for env in environments})
    peers = dict(list(peers.items())[:5])
    names = {peer: [op for op, best in peers.items() if best == peer] for peer in peers.values() if peer}
    of = "; ".join(f"`{peer}` for {', '.join(ops)}" for peer, ops in names.items())
    shown_rows = table(header, list(rows.values())[:5])
    return f"{'; '.join(facts)}. Multicast is off for all.\n\n{shown_rows}\nBest peers: {of or 'none'}.\n"


def _measured(files: Sequence[File]) -> Iterator[tuple[stats.Group, str, dict[str, list[float]]]]:
    """(cases, variant of ours, its speeds over each peer) of all that was measured on GPUs."""
    for group in stats.groups(files):
        for name in _SHOWN if group.device != "cpu" else ():
            over = {peer: stats.speedups(group, peer, name) for peer in stats.peers(group)}
            if over := {peer: found for peer, found in over.items() if found}:
                yield group, name, over


def _what(group: stats.Group) -> tuple[str, str, str]:
    return f"`{group.op}`", group.shapes, f"{group.ranks} x {markdown(group.device.removeprefix('NVIDIA '))}"


def _mean_and_worst(found: Sequence[float]) -> str:
    return f"{geometric_mean(found):.2f} ({min(found):.2f})" if found else ""


OPS_BEGIN, OPS_END = "<!-- ops: made by benchmarks.report -->", "<!-- end of ops -->"


def op_table() -> str:
    """A row for each op of the registry, in its words: docs/guide.md has it between OPS_BEGIN and OPS_END."""
    from pyrocshmem import collectives, stream_k
    from pyrocshmem.calls.op import registered

    packages = (stream_k.__name__, collectives.__name__)
    rows = ["| op | a rank gives | a rank gets |", "|---|---|---|"]
    for package in (name.rpartition(".")[2] for name in packages):
        ours = (op for op in registered() if op.package == package)
        rows += [f"| `{package}.{op.name}` | {op.holds} | {op.result} |" for op in ours]
    return "\n".join(rows) + "\n"


def write(files: Sequence[File], plots: Sequence[Path], root: Path, notes: Notes, front: str) -> None:
    """docs/results.md with the `notes`, the `plots`, which are copied to docs/results (that named `front` to docs/img)
    and are all that stays there, and the table between its marks in README.md. ValueError, before anything is written,
    where the marks are missing."""
    shown = [path for path in plots if path.name != front]
    pictures = "".join(f"![{path.stem.replace('-', ' ')}](results/{path.name})\n" for path in shown)
    summary = f"## Summary\n\n{all_variants(files)}"
    text = f"{_HEAD}\n{summary}\n{document(files, notes)}\n## Pictures\n\n{_PICTURES}\n{pictures}"
    readme = root / "README.md"
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{readme} has no table to put in place, allowed is one between {BEGIN} and {END}")
    readme.write_text(f"{before}{BEGIN}\n{readme_table(files)}{END}{after}")
    (root / "docs" / "results.md").write_text(text)
    guide = root / "docs" / "guide.md"
    if guide.exists():
        before, _, rest = guide.read_text().partition(OPS_BEGIN)
        guide.write_text(f"{before}{OPS_BEGIN}\n{op_table()}{OPS_END}{rest.partition(OPS_END)[2]}")
    folders = {name: root / "docs" / name for name in ("results", "img")}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    for path in folders["results"].glob("*.svg"):
        path.unlink()
    for path in plots:
        shutil.copyfile(path, folders["img" if path.name == front else "results"] / path.name)
