"""Draws hosts.svg: what each fused op does when on two hosts of two ranks, on one rank of the first host.

    python docs/img/hosts.py [FILE]         # default: hosts.svg beside this file

A bar is a call inside the host or a block on its way between hosts; lengths mean nothing. Needs matplotlib.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

INSIDE, BETWEEN, SUM = "#0072b2", "#e69f00", "#009e73"  # colour-blind safe: Okabe and Ito
HOST, NETWORK = 1.0, 0.0


class Bar(NamedTuple):
    """What runs from `begin` for `length`, in a row."""

    row: float
    begin: float
    length: float
    colour: str
    text: str


OPS = {
    "all_gather_gemm": (
        Bar(NETWORK, 0.0, 4.0, BETWEEN, "own rows of A to host 1, its rows here"),
        Bar(HOST, 0.0, 4.6, INSIDE, "all_gather_gemm of host 0's rows"),
        Bar(HOST, 4.6, 4.6, INSIDE, "all_gather_gemm of host 1's rows"),
    ),
    "gemm_reduce_scatter": (
        Bar(HOST, 0.0, 4.2, INSIDE, "reduce-scatter of host 1's rows"),
        Bar(NETWORK, 4.2, 3.4, BETWEEN, "their host sum to host 1, ours here"),
        Bar(HOST, 4.2, 4.2, INSIDE, "reduce-scatter of host 0's rows"),
        Bar(HOST, 8.4, 0.8, SUM, "add"),
    ),
    "gemm_all_reduce, three pieces": (
        Bar(HOST, 0.0, 2.2, INSIDE, "reduce-scatter 1"),
        Bar(NETWORK, 2.2, 1.8, BETWEEN, "host sums 1"),
        Bar(HOST, 2.2, 2.2, INSIDE, "reduce-scatter 2"),
        Bar(HOST, 4.4, 0.8, SUM, "add,\ngather 1"),
        Bar(NETWORK, 4.4, 1.8, BETWEEN, "host sums 2"),
        Bar(HOST, 5.2, 2.2, INSIDE, "reduce-scatter 3"),
        Bar(HOST, 7.4, 0.8, SUM, "add,\ngather 2"),
        Bar(NETWORK, 7.4, 1.8, BETWEEN, "host sums 3"),
        Bar(HOST, 9.2, 0.8, SUM, "add,\ngather 3"),
    ),
    "gemm_all_scatter, three pieces": (
        Bar(HOST, 0.0, 2.2, INSIDE, "all-scatter 1"),
        Bar(NETWORK, 2.2, 1.8, BETWEEN, "own columns 1"),
        Bar(HOST, 2.2, 2.2, INSIDE, "all-scatter 2"),
        Bar(HOST, 4.4, 0.8, SUM, "host 1's\ncolumns 1"),
        Bar(NETWORK, 4.4, 1.8, BETWEEN, "own columns 2"),
        Bar(HOST, 5.2, 2.2, INSIDE, "all-scatter 3"),
        Bar(HOST, 7.4, 0.8, SUM, "host 1's\ncolumns 2"),
        Bar(NETWORK, 7.4, 1.8, BETWEEN, "own columns 3"),
        Bar(HOST, 9.2, 0.8, SUM, "host 1's\ncolumns 3"),
    ),
}


def draw(path: Path) -> None:
    """A panel for each op."""
    figure = Figure(figsize=(8, 6.6), layout="constrained")
    for axes, (op, bars) in zip(figure.subplots(len(OPS), 1), OPS.items(), strict=True):
        for bar in bars:
            axes.barh(bar.row, bar.length, 0.8, bar.begin, color=bar.colour, edgecolor="white")
            middle = bar.begin + bar.length / 2
            axes.text(middle, bar.row, bar.text, ha="center", va="center", fontsize=7.5, color="white")
        axes.set_title(op, fontsize=10, loc="left")
        axes.set_yticks((HOST, NETWORK), ("inside the host", "between hosts"), fontsize=9)
        axes.set_xlim(0, 10.1)
        axes.set_xticks(())
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    named = (
        (INSIDE, "a fused op of the host's ranks"),
        (BETWEEN, "torch.distributed"),
        (SUM, "sums of hosts, and what they are gathered by"),
    )
    figure.legend(
        handles=[Patch(facecolor=colour, label=label) for colour, label in named],
        loc="outside lower center",
        ncols=len(named),
        frameon=False,
        fontsize=9.5,
    )
    # Text stays text, and the same picture is the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hosts"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("hosts.svg"))
