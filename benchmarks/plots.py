"""Plots made from records, as PNG and SVG, one set of files for each op and set of shapes.

paths = draw(files, folder)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks import stats
from benchmarks.records import File, median
from benchmarks.shapes import LINK_BYTES_PER_S, OPS
from benchmarks.stats import Group

mpl.use("Agg")
from matplotlib import pyplot as plt

_FORMATS = ("png", "svg")
_STYLE: dict[Any, Any] = {
    "figure.figsize": (9, 5),
    "axes.grid": True,
    "grid.alpha": 0.3,
    "svg.hashsalt": "benchmarks",
    "font.size": 9,
}
# The same colour for a provider in every plot.
_COLOURS = {
    name: f"C{i}"
    for i, name in enumerate(
        (
            "ours",
            "ours_16bit",
            "blas",
            "unfused",
            "torch_symm_mem",
            "nccl_window",
            "ours_whole_tiles",
            "kraken",
        )
    )
}


def draw(files: Iterable[File], folder: Path) -> list[Path]:
    """Every plot that the records allow, written into `folder`; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    groups = stats.groups(files)

    def save(name: str, plot: Callable[..., bool], *shown: Any) -> None:
        with mpl.rc_context(_STYLE):
            figure, axes = plt.subplots(layout="constrained")
            if plot(axes, *shown):
                for kind in _FORMATS:
                    path = folder / f"{name}.{kind}"
                    # Without the date: the same records make the same files.
                    figure.savefig(path, dpi=110, metadata={"Date": None} if kind == "svg" else None)
                    paths.append(path)
            plt.close(figure)

    for group in groups:
        device = "" if group.device != "cpu" else "-cpu"
        name = f"{group.op}-{group.shapes}-{group.dtype}-{group.ranks}{device}".replace("_", "-")
        if group.shapes == "stream-k-corpus":
            save(f"{name}-utilisation", utilisation, group)
            continue
        save(f"{name}-time", times, group)
        save(f"{name}-efficiency", efficiency, group)
        save(f"{name}-roofline", roofline, group)
    save("speedup", speedup_bars, groups)
    return paths


def _colour(name: str) -> str | None:
    return _COLOURS.get(name)


def _size(case: dict[str, Any]) -> float:
    """What grows from case to case: M, or the bytes that a collective moves."""
    return case["link_bytes"] if OPS[case["op"]].kind == "collective" else case["M"]


def _size_label(group: Group) -> str:
    return "bytes that each rank sends" if OPS[group.op].kind == "collective" else "M"


def _widths(group: Group) -> list[tuple[int, int]]:
    """The different (N, K) of a group: a line each. Collectives have one."""
    if OPS[group.op].kind == "collective":
        return [(0, 0)]
    return list(dict.fromkeys((case["N"], case["K"]) for case in group.cases))


def _time(provider: str, case: dict[str, Any]) -> float | None:
    return median(case, provider)


def _efficiency(provider: str, case: dict[str, Any]) -> float | None:
    found: float | None = case["efficiency"].get(provider)
    return found


def _lines(group: Group, provider: str, value: Callable[[dict[str, Any]], float | None]) -> list[Any]:
    """[(label, xs, ys)] of a provider, a line for each (N, K)."""
    found = []
    for N, K in _widths(group):
        cases = [case for case in group.cases if not N or (case["N"], case["K"]) == (N, K)]
        points = sorted((_size(case), y) for case in cases if (y := value(case)) is not None)
        if points:
            found.append((f"{provider}, N {N} K {K}" if N else provider, *zip(*points, strict=True)))
    return found


_MARKERS = "osD^vPX*<>h8dpH1234+x|_.,"


def times(axes: Any, group: Group) -> bool:
    """Time against M, a colour for each provider, a marker for each (N, K)."""
    for i, provider in enumerate(group.providers):
        for j, (label, xs, ys) in enumerate(_lines(group, provider, partial(_time, provider))):
            style = "-" if provider == "ours" else "--"
            colour = _colour(provider) or f"C{i % 10}"
            axes.plot(
                xs, ys, style, marker=_MARKERS[j % len(_MARKERS)], ms=4, lw=1, color=colour, label=label
            )
    axes.set(xscale="log", yscale="log", xlabel=_size_label(group), title=group.title)
    axes.set_ylabel("us, median of the slowest rank")
    axes.legend(fontsize=5, ncols=3)
    return True


def efficiency(axes: Any, group: Group) -> bool:
    """Overlap efficiency against M, our variants and whole-op peers."""
    shown = [p for p in ("ours", "ours_16bit", *stats.peers(group)) if stats.efficiencies(group, p)]
    if not shown:
        return False
    for i, provider in enumerate(shown):
        for j, (label, xs, ys) in enumerate(_lines(group, provider, partial(_efficiency, provider))):
            marker = _MARKERS[j % len(_MARKERS)]
            axes.plot(xs, ys, marker=marker, ms=4, lw=1, color=_colour(provider) or f"C{i % 10}", label=label)
    axes.axhline(1.0, color="black", lw=0.8)
    axes.set(xscale="log", xlabel=_size_label(group), ylabel="floor / time", ylim=(0, 1.15))
    axes.set_title(f"{group.title}: overlap efficiency")
    axes.legend(fontsize=5, ncols=3)
    return True


def roofline(axes: Any, group: Group) -> bool:
    """Rate against work for each byte sent. Roofs: the best rate of a product alone, and the link."""
    cases = [case for case in group.cases if case["link_bytes"] and case["K"] and case["floor_us"]]
    if not cases:
        return False

    def flops(case: dict[str, Any]) -> float:
        return 2.0 * case["M"] * case["N"] * case["K"]

    alone = [flops(case) / us for case in cases for p in ("blas", "ours_gemm") if (us := median(case, p))]
    if not alone:
        return False
    peak = max(alone) / 1e6
    intensities = [flops(case) / case["link_bytes"] for case in cases]
    low, high = min(intensities) / 2, max(intensities) * 2
    ridge = peak * 1e12 / LINK_BYTES_PER_S
    xs = sorted({low, min(max(ridge, low), high), high})
    axes.plot(xs, [min(peak, x * LINK_BYTES_PER_S / 1e12) for x in xs], color="black", lw=1)
    for provider in ("ours", "ours_16bit", *stats.peers(group)):
        points = [
            (flops(c) / c["link_bytes"], flops(c) / us / 1e6) for c in cases if (us := median(c, provider))
        ]
        if points:
            axes.scatter(*zip(*points, strict=True), s=14, color=_colour(provider), label=provider)
    title = f"{group.title}: roofs are {peak:.0f} TFLOP/s (best product here) and {LINK_BYTES_PER_S / 1e9:.0f} GB/s"
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte sent", ylabel="TFLOP/s a GPU", title=title)
    axes.legend(fontsize=7)
    return True


def utilisation(axes: Any, group: Group) -> bool:
    """Rate over the best of the set, against arithmetic intensity, as the Stream-K paper shows it."""
    width = 4 if group.dtype == "float32" else 2

    def point(case: dict[str, Any], us: float) -> tuple[float, float]:
        M, N, K = case["M"], case["N"], case["K"]
        return 2.0 * M * N * K / (width * (M * K + K * N + M * N)), 2.0 * M * N * K / us / 1e6

    clouds = {}
    for provider in ("blas", "ours_whole_tiles", "ours"):
        points = [point(case, us) for case in group.cases if (us := median(case, provider))]
        if points:
            clouds[provider] = points
    if not clouds:
        return False
    best = max(rate for points in clouds.values() for _, rate in points)
    for provider, points in clouds.items():
        xs, rates = zip(*points, strict=True)
        shares = [100 * rate / best for rate in rates]
        axes.scatter(xs, shares, s=5, alpha=0.6, color=_colour(provider), label=provider)
    axes.set(
        xscale="log", xlabel="FLOP a byte of A, B and C", ylabel=f"% of {best:.0f} TFLOP/s, the best here"
    )
    axes.set_title(group.title)
    axes.legend(fontsize=8)
    return True


def speedup_bars(axes: Any, groups: list[Group]) -> bool:
    """Geometric mean of the speed-up of ours over each peer, and the worst case as a tick."""
    bars = []
    for group in groups:
        for peer in stats.peers(group):
            if found := stats.speedups(group, peer):
                bars.append(
                    (f"{group.op}, {group.shapes}: {peer}", stats.geometric_mean(found), min(found), peer)
                )
    if not bars:
        return False
    bars.reverse()
    axes.figure.set_size_inches(9, 1.2 + 0.22 * len(bars))
    places = range(len(bars))
    axes.barh(places, [bar[1] for bar in bars], color=[_colour(bar[3]) or "C9" for bar in bars], height=0.7)
    axes.plot([bar[2] for bar in bars], places, "|", color="black", ms=9, label="worst case")
    axes.axvline(1.0, color="black", lw=0.8)
    axes.set_yticks(places, [bar[0] for bar in bars], fontsize=7)
    axes.set(xlabel="times as fast, geometric mean", title="Speed-up of ours")
    axes.legend(fontsize=7)
    return True
