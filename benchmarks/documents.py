"""docs/results.md, and the table of README.md, made of records and benchmarks/results/notes.md."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean

from pyrocshmem.benchmarks import models, seeds, stats
from pyrocshmem.benchmarks.escape import markdown
from pyrocshmem.benchmarks.headline import headline
from pyrocshmem.benchmarks.notes import Notes
from pyrocshmem.benchmarks.records import File
from pyrocshmem.benchmarks.shapes import LINK_BYTES_PER_S, baseline
from pyrocshmem.benchmarks.tables import CHOICES, MODES, document, number, table, versions

BEGIN, END = "<!-- readings: made by benchmarks.report -->", "<!-- end of readings -->"
# And PyTorch's own operators, served by ours.
_SHOWN = (*CHOICES, "ours_symm_mem")
# Of sets in README.
_WORDS_OF_SETS = {"llama3": "nine layers of Llama 3", "decode": "1 to 256 rows"}
_README_OPS = 5

_HEAD = f"""# Results

Made by `python -m pyrocshmem bench report` from the records named and benchmarks/results/notes.md; don't edit. All
cases are shown, losing ones in bold; of the Stream-K corpora the worst ones.

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

`ours`: the default configuration. Partial sums of 16-bit operands travel in 16 bits, as every library's do;
`ours_fp32`: in fp32, the strict mode. Until November 25, 2026 that was the default: records of then are shown under
today's names, their host time is the strict mode's, and other variants of then are `ours_fp32_` and a name. `ours_` and
a placement (after, beside, inside, ...) or an algorithm (one_shot, two_shot): where that is not the default; a third of
the samples. `gemm` may take the vendor's BLAS; `ours_no_blas` is our own kernel where it did, `ours_whole_tiles` our
own kernel with no tile split. A variant that would do what another does is not timed: its cell repeats the other's
time, without a ratio, and that counts in its means. `ours_batch_invariant`, `ours_tp_invariant`: in the modes of
`pyrocshmem.batch_invariant` ([Reproducibility](reproducibility.md)). `ours_rowwise`, `ours_blockwise`: with the norm in
8 bits, and `ours_then_`: by a kernel behind it. `ours_gemm`, `blas`: the product alone, by our own
kernel and by the BLAS. `unfused`: the BLAS, then NCCL (RCCL, gloo), then PyTorch's sum with the residual and RMSNorm
where the op has them; of a standalone collective the library's. `blas_` and a name: the same with another all-reduce:
ours, PyTorch's on symmetric memory, FlashInfer's (with residual and norm in it, and so is `flashinfer`).
`unfused_pinned`: NCCL by one channel and the Simple protocol, whose bits don't depend on the batch; no peer.
`unfused_stacked`: without the copy that brings the ranks' blocks side by side. `nccl_window`: unfused on registered
symmetric windows. Where a norm's result is on all ranks, unfused gathers the columns, which PyTorch then normalizes.
`torch_symm_mem`, `torch_one_shot`, `torch_two_shot`: PyTorch's symmetric-memory ops, then its sum and RMSNorm where the
op has them. Multicast is off for all. Of layers, `torch_tp`: PyTorch's tensor parallelism, `torch_tp_async`: compiled,
with its asynchronous one, `symm_mem`: linears that call `torch.ops.symm_mem`, as torchtitan's do, `ours_symm_mem`: the
same, served by ours; peak: what a step holds beyond weights and inputs, ours with the workspace that it needs.

`chosen` is what the configuration of `ours` chose: a placement, and how the GEMM's tiles are done. `whole`: each by
one program. `split_k`: some in equal parts, which their programs add; `separate`: the same, added by a second kernel.
`stream_k`: shares of iterations. `blas`: by the vendor's BLAS, and what is exchanged travels as messages before or
after it; in brackets what our own kernel chose there. Where nothing stands, the record doesn't say.
"""

_DRAWN = f"""## Drawn shapes

A set `models-SEED` has {models.NUM_CASES} layers of public models (`benchmarks/models.toml`) with drawn numbers of
rows; layers that are drawn twice count once. The seed of a published set is the first eight digits of the hash of the
commit measured, so nobody could choose it or tune to it; any other is a tuning seed. The best peer is the fastest one
of each case, but for `blas_ours`, which is half ours. A floor is clear where it is {stats.CLEAR_FLOOR_US:.0f} us or
more and, of the GEMM and the link, one takes {stats.CLEAR_FLOOR_RATIO:g} times the other's time or more. Means are
geometric. Left out are cases dropped for their clocks, wrong, failed, or without a peer; the op's tables say which.
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


def drawn_table(files: Sequence[File]) -> str:
    """For each op and drawn set: ours and its variants over the best peer, and their efficiencies; "" where no set is
    drawn."""
    rows = []
    for group in [group for group in stats.groups(files) if models.seed_of_set(group.shapes)]:
        for name in [name for name in CHOICES if name in group.providers]:
            speeds = stats.speedups_over_best(group, name)
            clear, others = (stats.efficiencies(group, name, clear=each) for each in (True, False))
            row = [*_what(group), name, str(len(group.cases)), str(len(group.cases) - len(speeds) or "")]
            row += [_mean(speeds), f"{stats.percentile(speeds, 0.05):.2f}" if speeds else "", _worst(speeds)]
            rows.append([*row, str(len(clear) or ""), _mean(clear), _worst(clear), _worst(others)])
    over, efficiency = "over the best peer", "efficiency, clear floors"
    header = ["op", "shapes", "on", "variant", "cases", "left out", f"{over}: mean", "5%", "worst"]
    header += [f"{efficiency}: cases", "mean", "worst", "other floors: worst"]
    return table(header, rows) if rows else ""


def _mean(values: Sequence[float]) -> str:
    return f"{geometric_mean(values):.2f}" if values else ""


def _worst(values: Sequence[float]) -> str:
    return f"{min(values):.2f}" if values else ""


def readme_table(files: Sequence[File]) -> str:
    """A row for each fused op, five at most, of the cases that `headline` names: the default and the strict mode, over
    cuBLAS + NCCL and over the strongest of the others."""
    shown = headline(stats.groups(files))
    if shown is None:
        return "Nothing was measured on GPUs yet.\n"
    groups, rows = shown.fused[:_README_OPS], []
    sets: dict[str, dict[str, None]] = {}
    peers: dict[str, list[str]] = {}
    for group in groups:
        base = [stats.speedups(group, baseline(group.op), name) for name in MODES]
        best, speeds = _over_the_best(group)
        if best:
            peers.setdefault(best, []).append(f"`{group.op}`")
        rows.append([f"`{group.op}`", markdown(shown.set_of(group)), *map(_mean_and_worst, [*base, *speeds])])
        if text := _words_of_set(group):
            sets.setdefault(text, {})[f"`{group.shapes}`"] = None
    header = ["op", "shapes", "over cuBLAS + NCCL", "fp32 sums", "over the best peer", "fp32 sums"]
    runs = [case["run"] for group in groups for case in group.cases]
    dates = sorted(run["started"][:10] for run in runs)
    facts = [markdown(shown.machine), " to ".join(sorted({dates[0], dates[-1]}))]
    facts += sorted({versions(run, ("torch", "triton", "nccl")) for run in runs})
    of = "; ".join(f"{peer} for {', '.join(ops)}" for peer, ops in peers.items())
    words = "; ".join(f"{', '.join(names)}: {text}" for text, names in sets.items())
    return (
        f"{'; '.join(facts)}. Multicast is off for all.\n\n{table(header, rows)}\nBest peers: {of or 'none'}.\n"
        f"Shapes: {words or 'see docs/results.md'}.\n"
    )


def _over_the_best(group: stats.Group) -> tuple[str, list[list[float]]]:
    """The best peer other than the baseline, in words, and the speeds of both modes over it; ("", nothing) where there
    is none."""
    over = {peer: found for peer in stats.peers(group) if (found := stats.speedups(group, peer))}
    over.pop(baseline(group.op), None)
    if models.seed_of_set(group.shapes):
        # Few peers take all drawn shapes: their means would be of other cases each.
        if over.keys() - set(stats.OURS_IN_PART):
            return "the fastest of each case", [stats.speedups_over_best(group, name) for name in MODES]
    elif over:
        best = min(over, key=lambda peer: geometric_mean(over[peer]))
        return f"`{best}`", [stats.speedups(group, best, name) for name in MODES]
    return "", [[] for _ in MODES]


def _words_of_set(group: stats.Group) -> str:
    if models.seed_of_set(group.shapes):
        return f"{models.NUM_CASES} layers of public models, drawn by the hash of the commit measured"
    return _WORDS_OF_SETS.get(group.shapes, "")


def _measured(files: Sequence[File]) -> Iterator[tuple[stats.Group, str, dict[str, list[float]]]]:
    """(cases, variant of ours, its speeds over each peer) of all that was measured on GPUs."""
    for group in stats.groups(files):
        for name in [name for name in _SHOWN if name in group.providers]:
            over = {peer: stats.speedups(group, peer, name) for peer in stats.peers(group)}
            if over := {peer: found for peer, found in over.items() if found}:
                yield group, name, over


def _what(group: stats.Group) -> tuple[str, str, str]:
    drawn = models.seed_of_set(group.shapes)
    kind = "" if not drawn else " (tuning seed)" if seeds.objection(group) else " (published)"
    dtype = "" if group.dtype == "bfloat16" else f", {group.dtype}"
    return f"`{group.op}`", f"{group.shapes}{kind}{dtype}", markdown(group.machine)


def _mean_and_worst(found: Sequence[float]) -> str:
    return f"{geometric_mean(found):.2f} ({min(found):.2f})" if found else ""


PRICES_BEGIN, PRICES_END = "<!-- prices: made by benchmarks.report -->", "<!-- end of prices -->"


def price_table(files: Sequence[File]) -> str:
    """A row for each op and set on GPUs that was timed in the modes of `pyrocshmem.batch_invariant`: their times over
    the default's, and how many times as fast the first one is as the BLAS and NCCL pinned to one channel and protocol.
    docs/reproducibility.md has it between PRICES_BEGIN and PRICES_END."""
    rows = []
    for group in stats.groups(files):
        prices = [stats.prices(group, name) for name in stats.INVARIANT]
        if any(prices):
            texts = [f"{geometric_mean(each):.2f} ({max(each):.2f})" if each else "" for each in prices]
            pinned = stats.speedups(group, "unfused_pinned", stats.INVARIANT[0])
            rows.append([*_what(group), str(len(group.cases)), *texts, _mean_and_worst(pinned)])
    header = ["op", "shapes", "on", "cases", "batch-invariant / default", "tp-invariant / default"]
    return table([*header, "batch-invariant over pinned NCCL"], rows)


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


def results_page(files: Sequence[File], notes: Notes, pictures: Sequence[str]) -> str:
    """docs/results.md, with the `notes`. pictures: names of files in docs/results."""
    drawn = drawn_table(files)
    parts = [_HEAD, f"{_DRAWN}\n{drawn}" if drawn else "", f"## Summary\n\n{all_variants(files)}"]
    shown = "".join(f"![{Path(name).stem.replace('-', ' ')}](results/{name})\n" for name in pictures)
    parts += [document(files, notes), f"## Pictures\n\n{_PICTURES}\n{shown}"]
    return "\n".join(part for part in parts if part)


def between(page: Path, begin: str, made: str, end: str) -> str:
    """The text of `page` with what is `made` between two marks. ValueError where they are missing."""
    before, first, rest = page.read_text().partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last):
        raise ValueError(f"{page} has no table to put in place, allowed is one between {begin} and {end}")
    return f"{before}{begin}\n{made}{end}{after}"


def write(files: Sequence[File], plots: Sequence[Path], root: Path, notes: Notes, front: str) -> None:
    """docs/results.md with the `notes`, the `plots`, which are copied to docs/results (that named `front` to docs/img)
    and are all that stays there, and the table between its marks in README.md. ValueError, before anything is written,
    where the marks are missing."""
    text = results_page(files, notes, [path.name for path in plots if path.name != front])
    docs = root / "docs"
    made = {root / "README.md": (BEGIN, readme_table(files), END)}
    for page, table_of_page in (
        (docs / "guide.md", (OPS_BEGIN, op_table(), OPS_END)),
        (docs / "reproducibility.md", (PRICES_BEGIN, price_table(files), PRICES_END)),
    ):
        if page.exists():
            made[page] = table_of_page
    texts = {page: between(page, *marked) for page, marked in made.items()}
    for page, whole in {**texts, docs / "results.md": text}.items():
        page.write_text(whole)
    folders = {name: root / "docs" / name for name in ("results", "img")}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    for path in folders["results"].glob("*.svg"):
        path.unlink()
    for path in plots:
        shutil.copyfile(path, folders["img" if path.name == front else "results"] / path.name)
