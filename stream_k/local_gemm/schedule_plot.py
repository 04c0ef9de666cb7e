"""Draws a schedule: programs down, K-iterations across; above it the same product in whole tiles.

Usage: python -m pyrocshmem.stream_k.local_gemm.schedule_plot --shape 2432,256,1088 --programs 8 --out schedule.svg
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyrocshmem.stream_k.local_gemm.schedule import SPLITS, Schedule, Segment, make_schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that stay apart for the colour-blind (Okabe and Ito).
_COLOURS = {
    "whole tile": "#56b4e9",
    "contributes its partial": "#e69f00",
    "finishes, adds partials": "#009e73",
}

# Labels and arrows are readable up to here; beyond, they only blow the file up.
_MAX_LABELLED_PROGRAMS = 24


def draw(schedule: Schedule, path: Path, title: str) -> None:
    """Write the picture of `schedule` to `path`, in the format of its suffix (.svg, .png, .pdf).

    Raises ImportError without matplotlib, ValueError for a suffix that it can't write or an empty schedule, OSError for
    a file that it can't.
    """
    if schedule.num_programs == 0:
        raise ValueError("nothing to draw: the product is empty, so the schedule has no programs")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    whole = Schedule(
        schedule.tiles_m,
        schedule.tiles_n,
        schedule.iters_per_tile,
        min(schedule.num_programs, schedule.num_tiles),
    )
    panels = [(f"whole tiles: {whole.max_iters} iterations", whole)]
    if schedule != whole:
        panels.append((f"{title}: {schedule.max_iters} iterations", schedule))
    # Readable at 800 pixels, the width of a page.
    height = min(0.27 * schedule.num_programs + 0.8, 9.0)
    longest = max(shown.max_iters for _, shown in panels)
    # A fixed salt and no date: the same schedule gives the same file.
    with mpl.rc_context({"svg.hashsalt": "schedule", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(
            len(panels),
            1,
            sharex=True,
            squeeze=False,
            figsize=(8, height * len(panels)),
            layout="constrained",
        )
        for axis, (name, shown) in zip(axes.flat, panels, strict=True):
            _draw_panel(axis, shown, name, longest)
        axes.flat[-1].set_xlabel("K-iterations done by a program")
        patches = [
            Patch(facecolor=colour, edgecolor="black", label=name) for name, colour in _COLOURS.items()
        ]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def kind_of(segment: Segment) -> str:
    """The name in the legend for `segment`."""
    if not segment.finishing:
        return "contributes its partial"
    return "finishes, adds partials" if segment.contributors else "whole tile"


def _placed(schedule: Schedule) -> Iterator[tuple[int, int, Segment]]:
    """(program, iterations done before it, segment) of all segments."""
    for program in range(schedule.num_programs):
        at = 0
        for segment in schedule.segments(program):
            yield program, at, segment
            at += segment.k_end - segment.k_begin


def _draw_panel(axis: Axes, schedule: Schedule, name: str, longest: int) -> None:
    from matplotlib.ticker import MaxNLocator

    labelled = schedule.num_programs <= _MAX_LABELLED_PROGRAMS
    finishing = {}
    for program, at, segment in _placed(schedule):
        length = segment.k_end - segment.k_begin
        axis.barh(program, length, left=at, height=0.8, color=_COLOURS[kind_of(segment)], edgecolor="black")
        label = f"tile {segment.tile}"
        # Some 90 letters of any font are as wide as the `longest` row.
        if labelled and len(label) * longest <= 90 * length:
            axis.text(at + length / 2, program, label, ha="center", va="center", fontsize=8.5)
        if segment.contributors:
            finishing[segment.tile] = (program, at)
    if labelled:
        for program, at, segment in _placed(schedule):
            if not segment.finishing:
                row, begin = finishing[segment.tile]
                end = at + segment.k_end - segment.k_begin
                axis.annotate("", (begin, row), (end, program), arrowprops={"arrowstyle": "->", "lw": 0.8})
    axis.set_title(name, loc="left", fontsize=11)
    axis.set_ylabel("program")
    axis.set_ylim(schedule.num_programs - 0.5, -0.5)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))


def main(
    shape: Annotated[str, typer.Option("--shape", help="Sizes M,N,K of the product.")],
    out: Annotated[Path, typer.Option("--out", help="File to write: .svg, .png or .pdf.")],
    tile: Annotated[str, typer.Option("--tile", help="Block sizes M,N,K.")] = "128,256,64",
    programs: Annotated[int, typer.Option("--programs", help="Programs that may run.")] = 132,
    split: Annotated[
        str,
        typer.Option(
            "--split",
            help=f"{', '.join(SPLITS)}. Of separate, what a second kernel adds is drawn as if finishers did.",
        ),
    ] = "auto",
) -> None:
    """Draw the schedule of a product."""
    try:
        M, N, K = (int(size) for size in shape.split(","))
        block_m, block_n, block_k = (int(size) for size in tile.split(","))
        schedule = make_schedule(M, N, K, block_m, block_n, block_k, programs, split=split)
        draw(schedule, out, schedule.kind)
    except ValueError as error:
        typer.echo(f"error: {error} (--shape and --tile are three integers, M,N,K)", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(
        f"{out}: {schedule.kind}, {schedule.whole_tiles} whole and {schedule.num_split_tiles} split tiles of "
        f"{schedule.iters_per_tile} iterations on {schedule.num_programs} programs"
    )


if __name__ == "__main__":
    typer.run(main)
