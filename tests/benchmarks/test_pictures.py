"""Pictures that a person can read: what is drawn of records, and the drawings of docs."""

import re
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pyrocshmem.benchmarks import records
from tests.benchmarks import made_up

TIER = 2
pytestmark = pytest.mark.cpu
matplotlib = pytest.importorskip("matplotlib")
plots = pytest.importorskip("pyrocshmem.benchmarks.plots")

DOCS = Path(__file__).parents[2] / "docs"
# Of an em, a letter of a wide font; of the fonts that browsers have for sans-serif, none is wider on average.
WIDE = 0.62


def unreadable(figure: Any) -> list[str]:
    """Texts that leave the picture, and pairs of texts that overlap."""
    figure.draw_without_rendering()
    whole = figure.bbox
    found = []
    # Ticks beyond the ends of an axis are there, but not drawn.
    beyond = {
        id(tick.label1)
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    boxes = []
    for text in figure.findobj(matplotlib.text.Text):
        if text.get_text().strip() and text.get_visible() and id(text) not in beyond:
            box = text.get_window_extent()
            boxes.append((text.get_text(), box))
            # Half a pixel is rounding.
            if (
                box.x0 < whole.x0 - 0.5
                or box.x1 > whole.x1 + 0.5
                or box.y0 < whole.y0 - 0.5
                or box.y1 > whole.y1 + 0.5
            ):
                found.append(f"{text.get_text()!r} is cut off")
    for (one, a), (other, b) in combinations(boxes, 2):
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1:
            found.append(f"{one!r} overlaps {other!r}")
    return found


def drawn(*cases: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = plots.figures([records.File(Path("x.jsonl"), made_up.ENVIRONMENT, list(cases))])
    return found


def many() -> list[dict[str, Any]]:
    """As many panels, rows, sizes and providers as there are anywhere."""
    peers = (
        "unfused",
        "nccl_window",
        "blas_ours",
        "blas_torch_two_shot",
        "blas_torch_one_shot",
        "ours_fp32",
    )
    times = {name: 40.0 + 7 * i for i, name in enumerate(("blas", "ours_gemm", "ours", *peers))}
    shots = (
        "ours",
        "ours_one_shot",
        "ours_two_shot",
        "unfused",
        "nccl_window",
        "torch_one_shot",
        "torch_two_shot",
    )
    found = []
    for op in ("gemm_all_reduce", "gemm_all_reduce_rms_norm"):
        for N, K in ((4096, 1024), (4096, 3584), (8192, 2048), (8192, 7168), (16384, 6656)):
            for M in (1, 3, 16, 100, 256) if N < 16384 else (4096, 8192, 16384):
                grown = {name: us * (1 + M / 90) for name, us in times.items()}
                found.append(made_up.case(op, "llama3", M, N, K, **grown))
    for power in range(9, 29):
        grown = {name: 2.0 + i + 2**power / 1e5 for i, name in enumerate(shots)}
        found.append(made_up.case("all_reduce", "sizes", 1, 1 << power, 0, **grown))
    for M in (2048, 8192):
        found.append(
            made_up.case("layer_forward", "llama3-8b", M, 4096, 14336, ours=2.0 * M, torch_tp=3.0 * M)
        )
    for i in range(9):
        found.append(
            made_up.case(
                "gemm",
                "stream-k-corpus",
                300 << i % 4,
                200,
                100 + i,
                ours=10 + i,
                blas=9,
                ours_no_blas=10 + i,
                ours_whole_tiles=12,
            )
        )
    found.append(made_up.case("gemm", "llama3", 4096, 1792, 4096, ours=90, blas=92))
    return found


def test_every_text_can_be_read() -> None:
    found = drawn(*many())
    assert {re.sub(r"-\d$", "", name).rsplit("-", 1)[-1] for name in found} == {
        "time", "efficiency", "utilisation", "roofline", "peers", "speedup",
    }  # fmt: skip
    for name, figure in found.items():
        assert unreadable(figure) == [], name
        assert len(figure.axes) <= plots.MAX_PANELS, name
        # 768 pixels of a browser.
        assert figure.get_figwidth() == 8.0
        # No power of ten, which matplotlib would write as a formula.
        assert not any("$" in text.get_text() for text in figure.findobj(matplotlib.text.Text)), name


def test_the_reader_of_pictures_sees_what_is_wrong() -> None:
    figure = matplotlib.figure.Figure(figsize=(4, 3))
    figure.text(0.5, 0.5, "one")
    figure.text(0.5, 0.5, "other")
    figure.text(0.9, 0.1, "a text that is too long")
    assert unreadable(figure) == ["'a text that is too long' is cut off", "'one' overlaps 'other'"]


def test_panels_are_divided_evenly_and_those_of_few_rows_come_first() -> None:
    found = drawn(*many())
    titles = {name: [axis.get_title() for axis in figure.axes] for name, figure in found.items()}
    assert titles["gemm-all-reduce-bfloat16-4-time-1"] == [
        "N 4096, K 1024",
        "N 4096, K 3584",
        "N 8192, K 2048",
    ]
    assert titles["gemm-all-reduce-bfloat16-4-time-2"] == ["N 8192, K 7168", "N 16384, K 6656"]


def test_ticks_are_plain_numbers_with_units() -> None:
    time, bandwidth = drawn(*many())["all-reduce-bfloat16-4-time"].axes
    time.get_figure().draw_without_rendering()
    ticks = [label.get_text() for label in time.get_xticklabels()]
    assert ticks == ["1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB"]
    assert time.get_ylabel() == "us"
    assert {"10", "100", "1000"} <= {label.get_text() for label in time.get_yticklabels()}
    assert bandwidth.get_ylabel() == "bus GB/s"
    (layer,) = drawn(*many())["layer-forward-bfloat16-4-time"].axes
    assert (layer.get_ylabel(), layer.get_xlabel()) == ("ms", "tokens")


def test_ours_and_the_best_peer_are_strong() -> None:
    cases = [
        made_up.case(
            "gemm_all_reduce", "llama3", M, 64, 64, ours=90, blas=50, unfused=100, nccl_window=window
        )
        for M, window in ((1, 99), (2, 98), (4, 300))
    ]
    (axis,) = drawn(*cases)["gemm-all-reduce-bfloat16-4-time"].axes
    widths = [line.get_linewidth() for line in axis.lines]
    assert [width > 2 for width in widths] == [True, False, False, True]
    (legend,) = axis.get_figure().legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "ours", "nccl_window (best peer)", "blas (GEMM alone)", "unfused",
    ]  # fmt: skip


def test_the_bars_of_the_readme() -> None:
    """Sorted, of the machine that most was measured on; a dropped case has no part in them."""
    other = made_up.case("gemm_all_scatter", "llama3", 64, 64, 64, ours=10, unfused=90) | {"ranks": 8}
    dropped = made_up.case("gemm_all_scatter", "llama3", 65, 64, 64, ours=10, unfused=1) | {
        "dropped": "clocks"
    }
    cases = [
        made_up.case("gemm_all_reduce", "llama3", 64, 64, 64, ours=10, unfused=20),
        made_up.case("gemm_all_reduce", "llama3", 65, 64, 64, ours=10, unfused=5),
        made_up.case("gemm_all_scatter", "llama3", 64, 64, 64, ours=10, unfused=30),
        made_up.case("gemm", "llama3", 64, 64, 64, ours=10, ours_no_blas=10, blas=20),
        made_up.case("all_reduce", "sizes", 1, 64, 0, ours=10, unfused=90),
    ]
    (axis,) = drawn(other, *cases, dropped)["speedup"].axes
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        "gemm_all_scatter, llama3", "our GEMM kernel, llama3", "gemm_all_reduce, llama3",
    ]  # fmt: skip
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([3.0, 2.0, 1.0])
    worst = [line.get_xdata()[0] for line in axis.lines]
    assert worst == pytest.approx([3.0, 2.0, 0.5, 1.0])  # the last is "1.0 = equal"
    assert "4 x GPU X" in axis.get_title(loc="left")
    assert "speedup" not in drawn(cases[-1])


def test_the_pictures_of_the_results_are_those_that_the_pages_show() -> None:
    pages = (DOCS / "results").glob("*.md")
    shown = [name for page in pages for name in re.findall(r"\((.*?\.svg)\)", page.read_text())]
    assert sorted(shown) == sorted(path.name for path in (DOCS / "results").glob("*.svg"))
    assert (DOCS / "img" / plots.FRONT).exists()


def test_the_texts_of_the_tile_s_way_are_inside_their_boxes() -> None:
    """In any font: a letter is taken to be as wide as those of wide fonts."""
    tree = ElementTree.parse(DOCS / "img" / "tile.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    size = float(tree.attrib["font-size"])
    boxes = [
        [float(rect.attrib[key]) for key in ("x", "y", "width", "height")]
        for rect in tree.iter(f"{name}rect")
        if "x" in rect.attrib
    ]
    inside = 0
    for text in tree.iter(f"{name}text"):
        x, y = float(text.attrib["x"]), float(text.attrib["y"])
        around = [box for box in boxes if box[0] < x < box[0] + box[2] and box[1] < y < box[1] + box[3]]
        left, top, width, height = min(around, key=lambda box: box[2] * box[3], default=(0, 0, 886, 410))
        if width == 180:
            inside += 1
            assert x + WIDE * size * len(text.text or "") < left + width, text.text
            assert top + size < y < top + height - size / 4, text.text
    assert inside == 25
