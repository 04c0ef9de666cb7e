"""Files of a timeline: Chrome's trace format, which Perfetto (ui.perfetto.dev) opens, and a Gantt chart.

python -m pyrocshmem.calls.timeline_files FILE...    # draws the charts of such files anew
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from pyrocshmem import trace
from pyrocshmem.calls.timeline import COPY, MMA, Span, Timeline
from pyrocshmem.text import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that stay apart for the colour-blind (Okabe and Ito), by stage; waiting is pale.
_COLOURS = {
    MMA: "#0072b2",
    "fix-up": "#cc79a7",
    "store": "#56b4e9",
    "announce": "#000000",
    "wait": "#d0d0d0",
    "push": "#e69f00",
    "reduce": "#009e73",
    "pull": "#f0e442",
    COPY: "#d55e00",
}
assert set(_COLOURS) == {*trace.STAGES[1:], COPY}

# Of about 100 bytes each: a trace below a megabyte. Kernels of up to _FEW programs are always whole.
_MAX_SPANS = 9_000
_FEW = 8

Lane = tuple[str, int]


def write(timeline: Timeline, path: Path, title: str = "timeline") -> list[Path]:
    """Write `path` (.json or .json.gz, Chrome's trace format) and beside it a picture, .png; without matplotlib no
    picture. Returns what was written. ValueError for another suffix."""
    picture = _picture(path)
    traced = chrome_trace(timeline, title)
    text = json.dumps(traced, separators=(",", ":"))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        return [path]
    draw(timeline.spans, traced["otherData"], picture)
    return [path, picture]


def redraw(path: Path) -> Path:
    """Draw the picture beside `path`, a file that `write` wrote; returns where. Of a large trace, the programs that
    were left out of the file are left out of the picture."""
    picture = _picture(path)
    content = path.read_bytes()
    traced = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    threads: dict[tuple[int, int], Lane] = {}
    spans = []
    for event in traced["traceEvents"]:
        where = event["pid"], event["tid"]
        if event["name"] == "thread_name":
            kernel, _, lane = event["args"]["name"].rpartition(" ")
            threads[where] = kernel, int(lane)
        elif event["ph"] == "X":
            tile = event.get("args", {}).get("tile", -1)
            begin = event["ts"]
            spans.append(Span(where[0], *threads[where], event["name"], tile, begin, begin + event["dur"]))
    draw(spans, traced["otherData"], picture)
    return picture


def report(console: Console, timeline: Timeline, path: Path, title: str) -> None:
    """`write`, and say what was written, and how long no program multiplied."""
    exposed, total, error = (
        format_seconds(us / 1e6) for us in (timeline.exposed_us, timeline.total_us, timeline.clock_error_us)
    )
    console.print(f"exposed communication: {exposed} of {total}, clocks within {error}")
    for written in write(timeline, path, title):
        console.print(f"timeline: {escape(str(written))}", soft_wrap=True)
    if timeline.dropped:
        console.print(f"[yellow]{timeline.dropped} stages did not fit[/yellow]")


def check_path(path: Path) -> None:
    """ValueError for a file that `write` doesn't write."""
    _picture(path)


def _picture(path: Path) -> Path:
    """Beside a trace. ValueError for what is no file of a trace."""
    name = path.name.removesuffix(".gz")
    if not name.endswith(".json"):
        raise ValueError(f"a timeline is written to a .json or .json.gz file, got {path}")
    return path.with_name(name.removesuffix(".json") + ".png")


def chrome_trace(timeline: Timeline, title: str, max_spans: int = _MAX_SPANS) -> dict[str, Any]:
    """The trace as an object for JSON: one process a rank, one thread a program. Of more than `max_spans`, whole
    programs are left out, evenly; times of the whole are given beside it."""
    kept, every = thinned(timeline.spans, max_spans)
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, Lane], int] = {}
    for rank in sorted({span.rank for span in kept}):
        name = {"name": f"rank {rank}"}
        events.append({"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": name})
        for tid, lane in enumerate(_lanes([span for span in kept if span.rank == rank]), 1):
            threads[rank, lane] = tid
            where = {"ph": "M", "pid": rank, "tid": tid}
            events.append({**where, "name": "thread_name", "args": {"name": f"{lane[0]} {lane[1]}"}})
            events.append({**where, "name": "thread_sort_index", "args": {"sort_index": tid}})
    for span in kept:
        events.append(
            {
                "ph": "X",
                "pid": span.rank,
                "tid": threads[span.rank, (span.kernel, span.lane)],
                "name": span.stage,
                "ts": round(span.begin_us, 3),
                "dur": round(span.end_us - span.begin_us, 3),
                **({"args": {"tile": span.tile}} if span.tile >= 0 else {}),
            }
        )
    facts = {
        "title": title,
        "total_us": round(timeline.total_us, 3),
        "exposed_communication_us": round(timeline.exposed_us, 3),
        "clock_error_us": round(timeline.clock_error_us, 3),
        "programs": "all" if every == 1 else f"one in {every}",
        "dropped": timeline.dropped,
    }
    return {"displayTimeUnit": "ns", "otherData": facts, "traceEvents": events}


def thinned(spans: Sequence[Span], max_spans: int) -> tuple[Sequence[Span], int]:
    """(the spans of every n-th program, n): the smallest n that leaves no more than `max_spans`, if any does."""
    programs: dict[str, int] = defaultdict(int)
    for span in spans:
        programs[span.kernel] = max(programs[span.kernel], span.lane + 1)
    most = max(programs.values(), default=1)
    for every in range(1, most + 1):
        kept = [span for span in spans if programs[span.kernel] <= _FEW or span.lane % every == 0]
        if len(kept) <= max_spans:
            break
    return kept if spans else [], every


def _lanes(spans: Sequence[Span]) -> list[Lane]:
    """The lanes of one rank: kernels in the order in which they first appear, their programs in a row."""
    order = {kernel: i for i, kernel in enumerate(dict.fromkeys(span.kernel for span in spans))}
    return sorted({(span.kernel, span.lane) for span in spans}, key=lambda lane: (order[lane[0]], lane[1]))


def draw(spans: Sequence[Span], facts: dict[str, Any], path: Path) -> None:
    """A Gantt chart, a panel a rank, a row a kernel, a line a program, to `path`, in the format of its suffix. facts:
    what `chrome_trace` says of the whole."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = sorted({span.rank for span in spans})
    if not ranks:
        raise ValueError("nothing to draw: no stage was recorded")
    # Readable at 800 pixels, the width of a page; twice as many are drawn.
    figure = Figure(figsize=(8, 1.9 * len(ranks) + 1.5), layout="constrained")
    axes = figure.subplots(len(ranks), 1, sharex=True, squeeze=False)
    for axis, rank in zip(axes.flat, ranks, strict=True):
        _draw_rank(axis, [span for span in spans if span.rank == rank])
        axis.set_title(f"rank {rank}", loc="left", fontsize=11)
    total, exposed = (format_seconds(facts[name] / 1e6) for name in ("total_us", "exposed_communication_us"))
    op, _, sizes = facts["title"].partition(", ")
    figure.suptitle(f"{op}: {total}, {exposed} of it exposed", fontsize=14)
    clocks = f"clocks agree within {facts['clock_error_us']:.1f}"
    axes.flat[-1].set_xlabel(f"microseconds; {clocks}" + (f"\n{sizes}" if sizes else ""), fontsize=11)
    axes.flat[-1].tick_params(axis="x", labelsize=11)
    seen = {span.stage for span in spans}
    patches = [Patch(color=colour, label=stage) for stage, colour in _COLOURS.items() if stage in seen]
    columns = min(len(patches), 6)
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=11,
        handlelength=1.2,
        columnspacing=1.4,
    )
    figure.savefig(path, dpi=200)


def _draw_rank(axis: Axes, spans: Sequence[Span]) -> None:
    from matplotlib.collections import PolyCollection

    lanes = _lanes(spans)
    programs: dict[str, int] = defaultdict(int)
    for kernel, _ in lanes:
        programs[kernel] += 1
    # A stream among a hundred programs would be too thin to see.
    thick = max(1.0, len(lanes) / 20)
    places: dict[Lane, tuple[float, float]] = {}
    middles, top = {}, 0.0
    for kernel, count in programs.items():
        height = thick if count <= _FEW else 1.0
        middles[kernel] = top + count * height / 2
        for lane in (lane for lane in lanes if lane[0] == kernel):
            places[lane] = (top, top + height)
            top += height
        axis.axhline(top, color="black", linewidth=0.4)
    boxes = defaultdict(list)
    for span in spans:
        y0, y1 = places[span.kernel, span.lane]
        x0, x1 = span.begin_us, span.end_us
        boxes[span.stage].append([(x0, y0), (x0, y1), (x1, y1), (x1, y0)])
    for stage, corners in boxes.items():
        axis.add_collection(PolyCollection(corners, facecolors=_COLOURS[stage], linewidths=0))
    axis.set_xlim(0, None)
    axis.autoscale_view(scaley=False)
    axis.set_ylim(top, 0)
    axis.set_yticks(list(middles.values()), list(middles), fontsize=11)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(redraw(Path(name)))
