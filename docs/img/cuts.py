"""Draws cuts.svg: how A, B and C = A x B are divided over four ranks, in each fused op.

    python docs/img/cuts.py [FILE]         # default: cuts.svg beside this file

The cuts are those of `reference.problems`, which the tests cut operands by. Needs matplotlib.
"""

import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from pyrocshmem.reference.problems import PROBLEMS

RANKS = 4
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")  # colour-blind safe: Okabe and Ito
WHOLE = "#dddddd"
# The letters of the sizes down and across.
SIDES = {"A": "MK", "B": "KN", "C": "MN"}
SIZE, GAP = 1.0, 0.45
NORMS = {"all_reduce": "gemm_all_reduce_rms_norm", "all_scatter": "gemm_rms_norm_all_scatter"}


def draw_matrix(axes: Axes, name: str, cut: str, x: float) -> None:
    """A matrix in stripes, a rank's each, along the size that is cut; grey where every rank has the whole."""
    down, across = SIDES[name]
    for rank in range(RANKS if cut in (down, across) and cut else 1):
        share = SIZE / RANKS
        if cut == down:
            place, width, height = (x, SIZE - (rank + 1) * share), SIZE, share
        elif cut == across:
            place, width, height = (x + rank * share, 0.0), share, SIZE
        else:
            place, width, height = (x, 0.0), SIZE, SIZE
        colour = COLOURS[rank] if cut in (down, across) else WHOLE
        axes.add_patch(Rectangle(place, width, height, facecolor=colour, edgecolor="white"))
    sizes = " x ".join(f"{letter}/R" if letter == cut else letter for letter in (down, across))
    axes.text(x + SIZE / 2, -0.05, f"{name}: {sizes}", ha="center", va="top", fontsize=10)


def draw(path: Path) -> None:
    """Column-parallel ops to the left, row-parallel ones to the right."""
    figure = Figure(figsize=(8, 6.3), layout="constrained")
    panels = figure.subplots(3, 2)
    for column, letter in enumerate("NK"):
        problems = [problem for problem in PROBLEMS.values() if problem.b_cut == letter]
        ops = [(problem.op, problem, problem.words) for problem in problems]
        normed = [(NORMS[each.command], each) for each in problems if each.command in NORMS]
        ops += [(op, each, f"RMSNorm of {each.words}") for op, each in normed]
        for axes, (op, problem, result) in zip(panels[:, column], ops, strict=True):
            cuts = (problem.a_cut, problem.b_cut, problem.out_cut)
            for i, (name, cut) in enumerate(zip(SIDES, cuts, strict=True)):
                draw_matrix(axes, name, cut, i * (SIZE + GAP))
            for i, sign in enumerate("×="):
                axes.text(
                    (i + 1) * (SIZE + GAP) - GAP / 2, SIZE / 2, sign, ha="center", va="center", fontsize=14
                )
            axes.set_title(f"{op}\n{result}", fontsize=10)
            axes.set_xlim(-0.1, 3 * SIZE + 2 * GAP + 0.1)
            axes.set_ylim(-0.3, SIZE + 0.05)
            axes.set_aspect("equal")
            axes.set_axis_off()
    named = [Patch(facecolor=colour, label=f"rank {rank}'s") for rank, colour in enumerate(COLOURS)]
    named.append(Patch(facecolor=WHOLE, label="whole on every rank"))
    figure.legend(handles=named, loc="outside lower center", ncols=len(named), frameon=False, fontsize=9.5)
    # Text stays text, and the same picture is the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "cuts"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("cuts.svg"))
