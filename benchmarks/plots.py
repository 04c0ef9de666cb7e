"""Pictures made from records, as SVG of the width of a page.

paths = draw(files, folder)

Of each op: time, and overlap efficiency or bus bandwidth, against M or bytes. Of all together: rooflines, speed-ups,
the utilisation of the GEMM over the Stream-K corpora, and FRONT, the bars that README.md shows.

A picture has at most four panels. Ours and the strongest peer are drawn in strong lines, all others in pale ones. Ticks
are plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple, TypeVar

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, MultipleLocator, NullLocator

from pyrocshmem.benchmarks import escape, layers, models, stats
from pyrocshmem.benchmarks.headline import README_OPS, Headline, headline
from pyrocshmem.benchmarks.providers import ALL_PROVIDERS
from pyrocshmem.benchmarks.records import File, median
from pyrocshmem.benchmarks.shapes import CORPORA, LINK_BYTES_PER_S, TIMED, baseline, tensor_bytes
from pyrocshmem.benchmarks.stats import Group
from pyrocshmem.benchmarks.tables import size

FRONT = "speedup.svg"
MAX_PANELS = 4
# Of the key's font, in the width of a picture.
_KEY_LETTERS = 98

# Inches, 768 pixels of a browser: letters of 10 points are as large as those of the text around the picture.
_WIDTH = 8.0
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.titlesize": 11,
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    # Words stay words, and the same records make the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "benchmarks",
}
# Colours that stay apart for the colour-blind (Okabe and Ito); the pale ones are mixed with white.
_OURS, _BEST, _VARIANT, _ALONE, _BASE = "#0072b2", "#d55e00", "#8cc4e6", "#b0b0b0", "#c9d6df"
_PALE = ("#b0b0b0", "#ad94d6", "#7fc8b0", "#e6b566", "#d9a9c4", "#c8bf6a")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# A provider that is drawn pale looks the same in every picture.
_MARKS = "sD^vPX*<>d"
_NAMES = dict.fromkeys((*ALL_PROVIDERS, *layers.ALL_PROVIDERS))
_VARIANTS = [name for name in _NAMES if name.startswith("ours")]
_PEERS = [name for name in _NAMES if name not in _VARIANTS]
_MARKERS = {name: _MARKS[i % len(_MARKS)] for names in (_VARIANTS, _PEERS) for i, name in enumerate(names)}
_PALE_OF = {name: _PALE[i % len(_PALE)] for i, name in enumerate(_PEERS)}

_T = TypeVar("_T")
Value = Callable[[str, dict[str, Any]], float | None]


class Panel(NamedTuple):
    """`value` of each provider in these cases; `label` says what it is."""

    title: str
    cases: list[dict[str, Any]]
    value: Value
    label: str


class Bar(NamedTuple):
    """How many times as fast ours is: geometric mean and worst case."""

    label: str
    mean: float
    worst: float


def draw(files: Iterable[File], folder: Path) -> list[Path]:
    """Draw every picture that the records allow into `folder`; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(STYLE):
        for name, figure in figures(files).items():
            paths.append(folder / f"{name}.svg")
            figure.savefig(paths[-1], metadata={"Date": None})
    return paths


def figures(files: Iterable[File]) -> dict[str, Figure]:
    """Every picture that the records allow, by name."""
    groups = stats.groups(files)
    corpora = [group for group in groups if group.shapes in CORPORA]
    # Each of the drawn cases has columns of its own: no line joins them.
    listed = [group for group in groups if not models.seed_of_set(group.shapes)]
    whole = _whole_ops([group for group in listed if group.shapes not in CORPORA])
    found: dict[str, Figure | None] = {}
    with mpl.rc_context(STYLE):
        for op in whole:
            if op.op != "barrier":  # a point, at no bytes
                found |= _of_op(op)
        for group in corpora:
            found[f"{group.shapes}-{group.dtype}-utilisation"] = utilisation(group)
        found |= _numbered("roofline", [rooflines(part) for part in _parts(_machines(whole))])
        found["speedup-over-peers"] = speedup_bars([*whole, *corpora])
        found["price-of-modes"] = prices(groups)
        found[FRONT.removesuffix(".svg")] = front_bars(headline(groups))
    return {name: figure for name, figure in found.items() if figure is not None}


def _numbered(name: str, figures: Sequence[Figure]) -> dict[str, Figure]:
    """Numbers are part of the names where there is more than one."""
    return {f"{name}-{i}" if len(figures) > 1 else name: each for i, each in enumerate(figures, 1)}


def _parts(items: Sequence[_T], num: int = 0) -> list[Sequence[_T]]:
    """`num` parts, the longer ones first; of 0 as many as leave no more than MAX_PANELS in any."""
    parts = []
    for left in range(num or math.ceil(len(items) / MAX_PANELS), 0, -1):
        count = math.ceil(len(items) / left)
        parts.append(items[:count])
        items = items[count:]
    return parts


def _whole_ops(groups: Sequence[Group]) -> list[Group]:
    """The sets of shapes of an op joined, each shape once."""
    found: dict[tuple[str, str, int, str], dict[tuple[int, ...], dict[str, Any]]] = {}
    for group in groups:
        cases = found.setdefault((group.op, group.device, group.ranks, group.dtype), {})
        cases |= {(case["M"], case["N"], case["K"]): case for case in group.cases}
    return [Group(*key, "", tuple(cases.values())) for key, cases in found.items()]


def _time(provider: str, case: dict[str, Any]) -> float | None:
    return median(case, provider)


def _milliseconds(provider: str, case: dict[str, Any]) -> float | None:
    us = median(case, provider)
    return None if us is None else us / 1e3


def _efficiency(provider: str, case: dict[str, Any]) -> float | None:
    found: float | None = case["efficiency"].get(provider)
    return found


def _bandwidth(provider: str, case: dict[str, Any]) -> float | None:
    found: float | None = case["bus_gb_per_s"].get(provider)
    return found


def _bytes(case: dict[str, Any]) -> int:
    return tensor_bytes(*(case[name] for name in ("op", "M", "N", "ranks", "dtype")))


def _of_op(group: Group) -> dict[str, Figure]:
    """Figures by name. A collective has one of two panels, others a panel for each (N, K)."""
    cpu = "-cpu" if group.device == "cpu" else ""
    name = f"{group.op}-{group.dtype}-{group.ranks}{cpu}".replace("_", "-")
    title = escape.plot(f"{group.op}, {group.dtype}, {group.machine}")
    kind = TIMED[group.op].kind
    if kind == "collective":
        cases = list(group.cases)
        panels = [_time_panel("", cases), Panel("", cases, _bandwidth, "bus GB/s")]
        return {f"{name}-time": lines(group, panels, f"{title}: time of a call, and bandwidth")}
    by_size: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for case in group.cases:
        by_size.setdefault((case["N"], case["K"]), []).append(case)
    words = "hidden {}, intermediate {}" if kind == "layer" else "N {}, K {}"
    # Panels of similar rows stand in one picture.
    ordered = sorted(by_size.items(), key=lambda item: max(case["M"] for case in item[1]))
    sizes = [(words.format(*size_of), cases) for size_of, cases in ordered]
    times = _numbered(
        f"{name}-time",
        [
            lines(group, [_time_panel(*each) for each in part], f"{title}: time of a call (lower is better)")
            for part in _parts(sizes)
        ],
    )
    if not any(stats.efficiencies(group, provider) for provider in ("ours", *stats.peers(group))):
        return times
    return times | _numbered(
        f"{name}-efficiency",
        [
            lines(
                group,
                [Panel(*each, _efficiency, "floor / time") for each in part],
                f"{title}: overlap efficiency (1.0 = the floor)",
            )
            for part in _parts(sizes)
        ],
    )


def _time_panel(title: str, cases: list[dict[str, Any]]) -> Panel:
    """In milliseconds where none is shorter."""
    times = [us for case in cases for name in case["us"] if (us := median(case, name))]
    slow = min(times, default=0.0) >= 1e3
    return Panel(title, cases, _milliseconds if slow else _time, "ms" if slow else "us")


def _strongest(group: Group) -> str | None:
    """The peer that is the fastest one in most cases; of several, the one that is least behind in all."""
    behind: dict[str, list[float]] = {}
    for case in group.cases:
        times = {peer: us for peer in stats.peers(group) if (us := median(case, peer))}
        for peer, us in times.items():
            behind.setdefault(peer, []).append(us / min(times.values()))
    order = {peer: (-found.count(1.0), geometric_mean(found)) for peer, found in behind.items()}
    return min(order, key=lambda peer: order[peer], default=None)


def _look(provider: str, best: str | None) -> dict[str, Any]:
    """Of a line."""
    pale = {"lw": 1.3, "ms": 4, "marker": _MARKERS.get(provider), "zorder": 2}
    if provider == "ours":
        return {"color": _OURS, "lw": 2.6, "ms": 6, "marker": "o", "zorder": 5}
    if provider == best:
        return {"color": _BEST, "lw": 2.6, "ms": 6, "marker": _MARKERS.get(provider), "zorder": 4}
    if provider.startswith("ours"):
        return pale | {"color": _VARIANT, "zorder": 3}
    return pale | {"color": _PALE_OF.get(provider, _ALONE), "ls": "--"}


def lines(group: Group, panels: Sequence[Panel], title: str) -> Figure:
    """A line for each provider, a panel each of `panels`, which are cases of `group`."""
    collective = TIMED[group.op].kind == "collective"
    x_label = {"collective": "bytes of the whole tensor", "layer": "tokens"}.get(TIMED[group.op].kind, "M")
    shown = {id(case): case for panel in panels for case in panel.cases}
    best = _strongest(replace(group, cases=tuple(shown.values())))
    parts = () if group.op == "gemm" else ("blas", "ours_gemm")
    columns = len(panels) if len(panels) < MAX_PANELS else 2
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(_WIDTH, 2.6 * rows + 1.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, panels, strict=True):
        xs: set[int] = set()
        for provider in group.providers:
            x_of = _bytes if collective else _rows
            found = [(x_of(case), panel.value(provider, case)) for case in panel.cases]
            points = sorted((x, y) for x, y in found if y is not None)
            if not points or (panel.value is _efficiency and provider in parts):
                continue
            look = _look(provider, best)
            if provider in parts:
                look |= {"color": _ALONE, "ls": ":"}
            (handles[provider],) = axis.plot(*zip(*points, strict=True), **look)
            xs.update(x for x, _ in points)
        axis.set_title(panel.title)
        axis.set(xlabel=x_label, ylabel=panel.label)
        _x_ticks(axis, xs, collective)
        if panel.value is _efficiency:
            axis.axhline(1.0, color="black", lw=1)
            axis.set_ylim(0, 1.15)
        elif panel.value is _bandwidth:
            axis.set_ylim(0, None)
        else:
            axis.set_yscale("log")
            _plain_ticks(axis.yaxis, *axis.get_ylim())
    figure.suptitle(title)
    names = {
        name: f"{name} (GEMM alone)" if name in parts else f"{name} (best peer)" if name == best else name
        for name in sorted(handles, key=lambda name: (name != "ours", name != best))
    }
    _key(figure, [handles[name] for name in names], list(names.values()))
    return figure


def _rows(case: dict[str, Any]) -> int:
    return int(case["M"])


def _key(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Below the panels, in as many columns as the picture is wide enough for."""
    columns = len(labels)
    # matplotlib fills columns as `_parts` does; a line and its gap are as wide as 8 letters.
    while columns > 1 and sum(max(map(len, part)) + 8 for part in _parts(labels, columns)) > _KEY_LETTERS:
        columns -= 1
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9.5)


def prices(groups: Sequence[Group]) -> Figure | None:
    """The times of the modes of `pyrocshmem.batch_invariant` over the default's, against M, a panel an op. None of
    nothing."""
    by_op: dict[str, list[Group]] = {}
    for group in groups:
        if any(stats.prices(group, mode) for mode in stats.INVARIANT):
            by_op.setdefault(group.op, []).append(group)
    if not by_op:
        return None
    columns = min(2, len(by_op))
    rows = math.ceil(len(by_op) / columns)
    figure = Figure(figsize=(_WIDTH, 2.6 * rows + 1.0), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    looks = dict(zip(stats.INVARIANT, (_OURS, _BEST), strict=True))
    for axis in axes.flat[len(by_op) :]:
        axis.set_visible(False)
    for axis, (op, found) in zip(axes.flat, by_op.items(), strict=False):
        cases = [case for group in found for case in group.cases]
        for mode, colour in looks.items():
            points = [
                (_rows(case), 1 / ratio)
                for case in cases
                if (ratio := stats.speedup(case, "ours", mode)) is not None
            ]
            axis.plot(*zip(*points, strict=True), ls="", marker="o", ms=3.5, mew=0, color=colour)
        axis.axhline(1.0, color="black", lw=1)
        machines = ", ".join(dict.fromkeys(group.machine for group in found))
        axis.set(
            title=escape.plot(f"{op}, {machines}"), xlabel="M", ylabel="time / default's", ylim=(0, None)
        )
        _x_ticks(axis, {_rows(case) for case in cases}, False)
    figure.suptitle("Price of the invariant modes (1.0 = none)")
    handles = [Line2D([], [], color=colour, marker="o", ls="") for colour in looks.values()]
    _key(figure, handles, [name.removeprefix("ours_") for name in looks])
    return figure


def _x_ticks(axis: Any, xs: Iterable[int], nbytes: bool) -> None:
    """Powers of two, at most five of them."""
    axis.set_xscale("log", base=2)
    found = sorted(xs) or [1]
    powers = range(math.ceil(math.log2(found[0])), math.floor(math.log2(found[-1])) + 1)
    ticks = [1 << power for power in powers[:: math.ceil(len(powers) / 5) or 1]] or found[:1]
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(int(x)) if nbytes else f"{x:.0f}"))


def _plain_ticks(axis: Any, low: float, high: float) -> None:
    """Three round numbers or more on a logarithmic axis, written out."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = [x for decade in decades for step in steps if low <= (x := step * 10.0**decade) <= high]
        if len(ticks) >= 3:
            break
    else:
        ticks = [
            x for x in MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if low <= x <= high
        ]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.10g}"))


def _flops(case: dict[str, Any]) -> float:
    return 2.0 * case["M"] * case["N"] * case["K"]


def _roofline_cases(group: Group) -> list[dict[str, Any]]:
    """Those that send anything, on GPUs; none where no GEMM alone was timed, whose best rate is a roof."""
    fused = TIMED[group.op].kind in ("row", "column")
    cases = [case for case in group.cases if fused and case["link_bytes"] and case["floor_us"]]
    return cases if _rates_alone(cases) else []


def _rates_alone(cases: Sequence[dict[str, Any]]) -> list[float]:
    """TFLOP/s of GEMMs alone."""
    return [_flops(c) / us / 1e6 for c in cases for p in ("blas", "ours_gemm") if (us := median(c, p))]


def _machines(groups: Sequence[Group]) -> list[list[Group]]:
    """The ops that have a roofline, by what they ran on and in."""
    found: dict[tuple[str, int, str], list[Group]] = {}
    for group in groups:
        if _roofline_cases(group):
            found.setdefault((group.device, group.ranks, group.dtype), []).append(group)
    return list(found.values())


def rooflines(machines: Sequence[Sequence[Group]]) -> Figure:
    """Rate against work for each byte sent, a panel for each machine: ours by op, and the unfused ops.

    Roofs: the best rate of a GEMM alone among the cases shown, and the link.
    """
    columns = min(2, len(machines))
    rows = math.ceil(len(machines) / columns)
    figure = Figure(figsize=(_WIDTH, 3.2 * rows + 1.2), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    names = list(dict.fromkeys(group.op for groups in machines for group in groups))
    colours = {op: COLOURS[i % len(COLOURS)] for i, op in enumerate(names)}
    for axis in axes.flat[len(machines) :]:
        axis.set_visible(False)
    for axis, groups in zip(axes.flat, machines, strict=False):
        cases = [case for group in groups for case in _roofline_cases(group)]
        peak = max(_rates_alone(cases))
        intensities = [_flops(case) / case["link_bytes"] for case in cases]
        low, high = min(intensities) / 1.5, max(intensities) * 1.5
        ridge = min(max(peak * 1e12 / LINK_BYTES_PER_S, low), high)
        xs = [low, ridge, high]
        axis.plot(xs, [min(peak, x * LINK_BYTES_PER_S / 1e12) for x in xs], color="black", lw=1.2)
        for provider in ("unfused", "ours"):
            for group in groups:
                points = [
                    (_flops(c) / c["link_bytes"], _flops(c) / us / 1e6)
                    for c in _roofline_cases(group)
                    if (us := median(c, provider))
                ]
                look = {"color": colours[group.op], "marker": "o", "ms": 5} if provider == "ours" else {}
                pale = {"color": "#c0c0c0", "marker": "_", "ms": 9}
                axis.plot(*zip(*points, strict=True), ls="", **(look or pale)) if points else None
        roofs = f"roofs: {peak:.0f} TFLOP/s, {LINK_BYTES_PER_S / 1e9:.0f} GB/s"
        axis.set_title(f"{escape.plot(f'{groups[0].machine}, {groups[0].dtype}')}\n{roofs}")
        axis.set(xscale="log", yscale="log", xlabel="FLOP a byte sent", ylabel="TFLOP/s a GPU")
        _plain_ticks(axis.xaxis, *axis.get_xlim())
        _plain_ticks(axis.yaxis, *axis.get_ylim())
    marks = [Line2D([], [], color=colour, marker="o", ls="") for colour in colours.values()]
    marks.append(Line2D([], [], color="#c0c0c0", marker="_", ms=9, ls=""))
    _key(figure, marks, [*(f"ours: {op}" for op in colours), "unfused, all ops"])
    return figure


def utilisation(group: Group) -> Figure | None:
    """Rate over the best of the set, against arithmetic intensity, as the Stream-K paper shows it. None where
    nothing was timed."""
    width = 4 if group.dtype == "float32" else 2
    clouds: dict[str, tuple[list[float], list[float]]] = {}
    for provider in ("blas", "ours_whole_tiles", "ours_no_blas"):
        timed = [(case, us) for case in group.cases if (us := median(case, provider))]
        sizes = [(case["M"], case["N"], case["K"]) for case, _ in timed]
        xs = [2.0 * M * N * K / (width * (M * K + K * N + M * N)) for M, N, K in sizes]
        clouds[provider] = xs, [_flops(case) / us / 1e6 for case, us in timed]
    best = max((rate for _, rates in clouds.values() for rate in rates), default=None)
    if best is None:
        return None
    figure = Figure(figsize=(_WIDTH, 3.6), layout="constrained")
    axes = figure.subplots(1, len(clouds), sharex=True, sharey=True)
    looks = {"blas": _BEST, "ours_whole_tiles": _VARIANT, "ours_no_blas": _OURS}
    for axis, (provider, (xs, rates)) in zip(axes, clouds.items(), strict=True):
        shares = [100 * rate / best for rate in rates]
        axis.plot(xs, shares, ls="", marker="o", ms=2, mew=0, color=looks[provider])
        axis.set(xscale="log", title=provider, ylim=(0, 103))
        _plain_ticks(axis.xaxis, *axis.get_xlim())
    axes[1].set_xlabel("FLOP a byte of A, B and C")
    axes[0].set_ylabel(f"% of {best:.0f} TFLOP/s")
    figure.suptitle(escape.plot(f"{group.title}: share of the best rate here"))
    return figure


def _bar(label: str, found: Sequence[float]) -> Bar:
    return Bar(escape.plot(label), geometric_mean(found), min(found))


def speedup_bars(groups: Sequence[Group]) -> Figure | None:
    """Speed over the strongest peer of each op, and over what most people use where that is another: a panel for fused
    ops, collectives alone, and layers, sorted. None of nothing."""
    panels: dict[str, list[tuple[Bar, Bar | None, str]]] = {}
    for group in groups:
        best = _strongest(group)
        if best is None or not (over := stats.speedups(group, best)):
            continue
        kind = {"collective": "collectives alone", "layer": "transformer layers"}.get(
            TIMED[group.op].kind, "GEMMs and fused ops"
        )
        shapes = f", {group.shapes}" if group.shapes else ""
        label = f"{group.op}{shapes}, {group.machine}"
        base = stats.speedups(group, baseline(group.op)) if best != baseline(group.op) else []
        strong = _bar(label, over)
        panels.setdefault(kind, []).append((strong, _bar(label, base) if base else None, best))
    if not panels:
        return None
    heights = [len(bars) for bars in panels.values()]
    figure = Figure(figsize=(_WIDTH, 0.36 * sum(heights) + 0.8 * len(panels) + 0.8), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[count + 1 for count in heights])
    for axis, (title, bars) in zip(axes.flat, panels.items(), strict=True):
        bars.sort(key=lambda found: found[0].mean, reverse=True)
        for place, (strong, pale, peer) in enumerate(bars):
            middle = place - 0.2 if pale is not None else place
            for bar, at, colour in ((strong, middle, _OURS), (pale, place + 0.2, _BASE)):
                if bar is not None:
                    axis.barh(at, bar.mean, height=0.4, color=colour)
                    axis.plot([bar.worst] * 2, [at - 0.2, at + 0.2], color="black", lw=1.8)
            text = f"{strong.mean:.2f} over {peer}"
            _beside(axis, max(strong.mean, 1.0), middle, text, fontsize=8.5)
        _equal(
            axis,
            [strong.label for strong, _, _ in bars],
            max(bar.mean for row in bars for bar in row[:2] if bar),
        )
        axis.set_title(title, loc="left")
    figure.suptitle("Times as fast: ours over the strongest peer, and over what most people use")
    handles = [
        Patch(color=_OURS),
        Patch(color=_BASE),
        Line2D([], [], color="black", marker="|", ms=10, mew=1.8, ls=""),
        Line2D([], [], color="black", lw=1, ls="--"),
    ]
    names = ["over the strongest peer", "over blas, unfused, torch_tp", "worst case", "1.0 = equal"]
    _key(figure, handles, names)
    return figure


def _beside(axis: Any, x: float, y: float, text: str, **font: Any) -> None:
    """Text behind the end of a bar."""
    axis.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", **font)


def _equal(axis: Any, labels: Sequence[str], longest: float) -> None:
    """Labels of bars, the line at 1.0, and room for the text behind the longest bar."""
    axis.axvline(1.0, color="black", lw=1, ls="--")
    axis.set_yticks(range(len(labels)), labels, fontsize=9)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.set_xlim(0, 1.45 * max(longest, 1.0))
    axis.grid(visible=False, axis="y")
    axis.tick_params(axis="y", length=0)


def front_bars(shown: Headline | None) -> Figure | None:
    """Speed over the BLAS and the library's collective, a bar for each of the fused ops that README's table has; and of
    our own kernel over the BLAS. None of nothing."""
    if shown is None:
        return None
    bars = [
        _bar(f"{group.op}, {shown.set_of(_without_seed(group))}", stats.speedups(group, baseline(group.op)))
        for group in shown.fused[:README_OPS]
    ]
    if shown.gemm is not None and (found := stats.speedups(shown.gemm, "blas", "ours_no_blas")):
        bars.append(_bar(f"our GEMM kernel, {_without_seed(shown.gemm).shapes}", found))
    bars.sort(key=lambda bar: bar.mean, reverse=True)
    figure = Figure(figsize=(_WIDTH, 0.42 * len(bars) + 1.3), layout="constrained")
    axis = figure.subplots()
    for place, bar in enumerate(bars):
        axis.barh(place, bar.mean, height=0.66, color=_OURS)
        axis.plot([bar.worst] * 2, [place - 0.33, place + 0.33], color="black", lw=2.4)
        _beside(axis, bar.mean, place, f"{bar.mean:.2f}", fontsize=12, weight="bold")
    _equal(axis, [bar.label for bar in bars], max(bar.mean for bar in bars))
    axis.set_xlim(0, 1.15 * max(1.0, *(bar.mean for bar in bars)))
    axis.tick_params(labelsize=11)
    axis.xaxis.set_major_locator(MultipleLocator(0.5))
    libraries = "cuBLAS + NCCL" if shown.fused[0].device.startswith("NVIDIA") else "the libraries"
    dtypes = ", ".join(dict.fromkeys(group.dtype for group in shown.fused))
    where = escape.plot(f"{shown.machine}, {dtypes}")
    axis.set_title(f"Times as fast as {libraries} on {where}", fontsize=12, loc="left")
    handles = [
        Patch(color=_OURS),
        Line2D([], [], color="black", marker="|", ms=12, mew=2.4, ls=""),
        Line2D([], [], color="black", lw=1, ls="--"),
    ]
    _key(figure, handles, ["geometric mean of the set", "worst shape", "1.0 = equal"])
    return figure


def _without_seed(group: Group) -> Group:
    """README's table has the seed, a bar has no room for it."""
    return replace(group, shapes=models.NAME) if models.seed_of_set(group.shapes) else group
