"""Plots made from records, as PNG and SVG.

paths = draw(files, folder)

Of each op: time and overlap efficiency (collectives: bus bandwidth) against M or bytes, a panel for each (N, K). Of all
together: rooflines, speed-ups, and the utilisation of the GEMM over the Stream-K corpora.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl

from pyrocshmem.benchmarks import escape, layers, stats
from pyrocshmem.benchmarks.provider import IS_DEFAULT
from pyrocshmem.benchmarks.providers import ALL_PROVIDERS
from pyrocshmem.benchmarks.records import File, median
from pyrocshmem.benchmarks.shapes import CORPORA, LINK_BYTES_PER_S, TIMED, tensor_bytes
from pyrocshmem.benchmarks.stats import Group

mpl.use("Agg")
from matplotlib import pyplot as plt

_FORMATS = ("png", "svg")
_STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 8,
    # Words stay words, and the same records make the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "benchmarks",
}
# A provider looks the same in every plot.
_NAMES = dict.fromkeys((*ALL_PROVIDERS, *layers.ALL_PROVIDERS))
_COLOURS = {name: mpl.colormaps["tab20"](i % 20) for i, name in enumerate(_NAMES)}
_MARKERS = {name: "osD^vPX*<>hp8d"[i % 14] for i, name in enumerate(_NAMES)}


def draw(files: Iterable[File], folder: Path) -> list[Path]:
    """Every plot that the records allow, written into `folder`; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = stats.groups(files)
    corpora = [group for group in groups if group.shapes in CORPORA]
    whole = _whole_ops([group for group in groups if group.shapes not in CORPORA])
    paths: list[Path] = []
    with mpl.rc_context(_STYLE):
        for op in whole:
            if op.op == "barrier":  # a point, at no bytes
                continue
            name = f"{op.op}-{op.dtype}-{op.ranks}{'-cpu' if op.device == 'cpu' else ''}".replace("_", "-")
            paths += _save(_panels(op, op.providers, _time, "us"), folder / f"{name}-time")
            if TIMED[op.op].kind == "collective":
                paths += _save(
                    _panels(op, op.providers, _bandwidth, "bus GB/s"), folder / f"{name}-bandwidth"
                )
            elif shown := [p for p in _compared(op) if stats.efficiencies(op, p)]:
                figure = _panels(op, shown, _efficiency, "overlap efficiency: floor / time")
                paths += _save(figure, folder / f"{name}-efficiency")
        for group in corpora:
            if figure := utilisation(group):
                paths += _save(figure, folder / f"{group.shapes}-{group.dtype}-utilisation")
        if roofs := [op for op in whole if _roofline_cases(op)]:
            paths += _save(rooflines(roofs), folder / "roofline")
        if figure := speedup_bars(groups):
            paths += _save(figure, folder / "speedup")
    return paths


def _save(figure: Any, stem: Path) -> list[Path]:
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in _FORMATS]
    for path in paths:
        figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return paths


def _whole_ops(groups: Sequence[Group]) -> list[Group]:
    """The sets of shapes of an op joined, each shape once."""
    found: dict[tuple[str, str, int, str], dict[tuple[int, ...], dict[str, Any]]] = {}
    for group in groups:
        cases = found.setdefault((group.op, group.device, group.ranks, group.dtype), {})
        cases |= {(case["M"], case["N"], case["K"]): case for case in group.cases}
    return [Group(*key, "", tuple(cases.values())) for key, cases in found.items()]


def _title(group: Group) -> str:
    return escape.plot(f"{group.op}, {group.dtype}, {group.ranks} x {group.device}")


def _compared(group: Group) -> list[str]:
    return ["ours", "ours_16bit", *stats.peers(group)]


def _time(provider: str, case: dict[str, Any]) -> float | None:
    return median(case, provider)


def _efficiency(provider: str, case: dict[str, Any]) -> float | None:
    found: float | None = case["efficiency"].get(provider)
    return found


def _bandwidth(provider: str, case: dict[str, Any]) -> float | None:
    found: float | None = case["bus_gb_per_s"].get(provider)
    return found


def _rows(case: dict[str, Any]) -> int:
    return int(case["M"])


def _bytes(case: dict[str, Any]) -> int:
    return tensor_bytes(*(case[name] for name in ("op", "M", "N", "ranks", "dtype")))


def _panels(
    group: Group,
    providers: Sequence[str],
    value: Callable[[str, dict[str, Any]], float | None],
    label: str,
) -> Any:
    """`value` of each provider against M, a panel for each (N, K); of a collective against bytes."""
    collective = TIMED[group.op].kind == "collective"
    panels: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for case in group.cases:
        panels.setdefault((0, 0) if collective else (case["N"], case["K"]), []).append(case)
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = (3.4 * columns + 1.8, 2.8 * rows + 0.6) if len(panels) > 1 else (8, 4.5)
    figure, axes = plt.subplots(rows, columns, squeeze=False, figsize=size, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    lines: dict[str, Any] = {}
    for axis, ((N, K), cases) in zip(axes.flat, panels.items(), strict=False):
        for provider in providers:
            of_case = partial(value, provider)
            x_of = _bytes if collective else _rows
            points = sorted((x_of(case), y) for case in cases if (y := of_case(case)) is not None)
            if points:
                look = {"color": _COLOURS.get(provider), "marker": _MARKERS.get(provider), "ms": 3, "lw": 1}
                style = "-" if provider.startswith("ours") else "--"
                (lines[provider],) = axis.plot(*zip(*points, strict=True), style, **look)
        axis.set_xscale("log", base=2)
        axis.set(xlabel="bytes of the whole tensor" if collective else "M", ylabel=label)
        if value is _efficiency:
            axis.axhline(1.0, color="black", lw=0.8)
            axis.set_ylim(0, 1.15)
        else:
            axis.set_yscale("log")
        if N:
            axis.set_title(f"N {N}, K {K}")
    figure.suptitle(f"{_title(group)}, medians of the slowest rank")
    figure.legend(list(lines.values()), list(lines), loc="outside right upper")
    return figure


def _flops(case: dict[str, Any]) -> float:
    return 2.0 * case["M"] * case["N"] * case["K"]


def _roofline_cases(group: Group) -> list[dict[str, Any]]:
    """Those that send anything, on GPUs; none where no product alone was timed, whose best rate is a roof."""
    fused = TIMED[group.op].kind in ("row", "column")
    cases = [case for case in group.cases if fused and case["link_bytes"] and case["floor_us"]]
    return cases if _rates_alone(cases) else []


def _rates_alone(cases: Sequence[dict[str, Any]]) -> list[float]:
    """TFLOP/s of products alone."""
    return [_flops(c) / us / 1e6 for c in cases for p in ("blas", "ours_gemm") if (us := median(c, p))]


def rooflines(groups: Sequence[Group]) -> Any:
    """Rate against work for each byte sent, a panel for each op.

    Roofs: the best rate of a product alone among the cases shown, and the link.
    """
    columns = min(2, len(groups))
    rows = math.ceil(len(groups) / columns)
    figure, axes = plt.subplots(
        rows, columns, squeeze=False, figsize=(5 * columns, 3.6 * rows), layout="constrained"
    )
    for axis in axes.flat[len(groups) :]:
        axis.set_visible(False)
    for axis, group in zip(axes.flat, groups, strict=False):
        cases = _roofline_cases(group)
        peak = max(_rates_alone(cases))
        intensities = [_flops(case) / case["link_bytes"] for case in cases]
        low, high = min(intensities) / 1.5, max(intensities) * 1.5
        ridge = min(max(peak * 1e12 / LINK_BYTES_PER_S, low), high)
        xs = [low, ridge, high]
        axis.plot(xs, [min(peak, x * LINK_BYTES_PER_S / 1e12) for x in xs], color="black", lw=1)
        for provider in _compared(group):
            points = [
                (_flops(c) / c["link_bytes"], _flops(c) / us / 1e6)
                for c in cases
                if (us := median(c, provider))
            ]
            if points:
                look = {"color": _COLOURS.get(provider), "marker": _MARKERS.get(provider)}
                axis.scatter(*zip(*points, strict=True), s=14, label=provider, **look)
        roofs = f"roofs: {peak:.0f} TFLOP/s, {LINK_BYTES_PER_S / 1e9:.0f} GB/s"
        axis.set_title(f"{_title(group)}\n{roofs}")
        axis.set(xscale="log", yscale="log", xlabel="FLOP a byte sent", ylabel="TFLOP/s a GPU")
        axis.legend(fontsize=6)
    return figure


def _of_tiles(case: dict[str, Any], provider: str) -> float | None:
    """The median; of whole tiles ours' own, where these are what it chose."""
    if provider in case["skipped"] and case["skipped"][provider] == IS_DEFAULT:
        provider = "ours"
    return median(case, provider)


def utilisation(group: Group) -> Any:
    """Rate over the best of the set, against arithmetic intensity, as the Stream-K paper shows it. None where
    nothing was timed."""
    width = 4 if group.dtype == "float32" else 2
    clouds: dict[str, tuple[list[float], list[float]]] = {}
    for provider in ("blas", "ours_whole_tiles", "ours"):
        timed = [(case, us) for case in group.cases if (us := _of_tiles(case, provider))]
        sizes = [(case["M"], case["N"], case["K"]) for case, _ in timed]
        xs = [2.0 * M * N * K / (width * (M * K + K * N + M * N)) for M, N, K in sizes]
        clouds[provider] = xs, [_flops(case) / us / 1e6 for case, us in timed]
    best = max((rate for _, rates in clouds.values() for rate in rates), default=None)
    if best is None:
        return None
    figure, axes = plt.subplots(
        1, len(clouds), sharex=True, sharey=True, figsize=(11, 4), layout="constrained"
    )
    for axis, (provider, (xs, rates)) in zip(axes, clouds.items(), strict=True):
        axis.scatter(xs, [100 * rate / best for rate in rates], s=4, color=_COLOURS[provider])
        axis.set(xscale="log", xlabel="FLOP a byte of A, B and C", title=provider, ylim=(0, 103))
    axes[0].set_ylabel(f"% of {best:.0f} TFLOP/s, the best rate here")
    figure.suptitle(escape.plot(group.title))
    return figure


def speedup_bars(groups: Sequence[Group]) -> Any:
    """Geometric mean of the speed-up of ours over each peer, and the worst case as a tick; None of nothing."""
    bars = []
    for group in groups:
        for peer in stats.peers(group):
            if found := stats.speedups(group, peer):
                name = escape.plot(f"{group.title}: {peer}")
                bars.append((name, statistics.geometric_mean(found), min(found), peer))
    if not bars:
        return None
    bars.reverse()
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.22 * len(bars)), layout="constrained")
    places = range(len(bars))
    axis.barh(places, [bar[1] for bar in bars], color=[_COLOURS.get(bar[3]) for bar in bars], height=0.7)
    axis.plot([bar[2] for bar in bars], places, "|", color="black", ms=9, label="worst case")
    axis.axvline(1.0, color="black", lw=0.8)
    axis.set_yticks(places, [bar[0] for bar in bars], fontsize=7)
    axis.margins(y=0.01)
    axis.set(xlabel="times as fast: geometric mean", title="Speed-up of ours")
    axis.legend(fontsize=7)
    return figure
