"""What the modes of `pyrocshmem.batch_invariant` cost, as made from records, and as docs/reproducibility.md has it."""

from pathlib import Path
from typing import Any

import pytest

from pyrocshmem.benchmarks import documents, headline, plots, records, stats
from tests.benchmarks import made_up
from tests.docs.test_op_table import ROOT

TIER = 1
pytestmark = pytest.mark.cpu


def of(M: int, **times: float) -> dict[str, Any]:
    return made_up.case("gemm_all_reduce", "decode", M, 64, 64, **times)


def file(*cases: dict[str, Any]) -> records.File:
    return records.File(Path("x.jsonl"), made_up.ENVIRONMENT, list(cases))


TIMED = file(
    of(1, ours=10, ours_batch_invariant=10, ours_tp_invariant=20, unfused=12, unfused_pinned=40),
    of(16, ours=10, ours_batch_invariant=40, ours_tp_invariant=20, unfused=15, unfused_pinned=40),
    of(64, ours=10, unfused=15),
)


def test_a_row_has_the_means_and_the_dearest_case() -> None:
    (row,) = documents.price_table([TIMED]).splitlines()[2:]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        "`gemm_all_reduce`",
        "decode",
        "4 x GPU X",
        "3",
        "2.00 (4.00)",
        "2.00 (2.00)",
        "2.00 (1.00)",
    ]


def test_what_was_not_timed_in_a_mode_has_no_row() -> None:
    assert documents.price_table([file(of(64, ours=10, unfused=15))]).count("\n") == 2


def test_the_picture_has_a_point_for_each_price() -> None:
    figure = plots.figures([TIMED])["price-of-modes"]
    batch, tp = (line.get_xydata() for line in figure.axes[0].lines[:2])
    assert [tuple(point) for point in batch] == [(1, pytest.approx(1.0)), (16, pytest.approx(4.0))]
    assert [tuple(point) for point in tp] == [(1, pytest.approx(2.0)), (16, pytest.approx(2.0))]
    assert "price-of-modes" not in plots.figures([file(of(64, ours=10, unfused=15))])


def test_a_library_held_to_one_way_is_no_peer() -> None:
    (group,) = stats.groups([TIMED])
    assert stats.peers(group) == ["unfused"]
    faster = of(2, ours=10, unfused=30, nccl_window=11) | {"device": "GPU Y"}
    shown = headline.headline(stats.groups([TIMED, file(faster)]))
    assert shown is not None
    assert [group.device for group in shown.fused] == ["GPU Y"]  # the one with a peer besides the pair


def test_the_page_has_the_records_prices() -> None:
    found = records.read_all(sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")))
    page = (ROOT / "docs" / "reproducibility.md").read_text()
    table = page.partition(documents.PRICES_BEGIN)[2].partition(documents.PRICES_END)[0]
    assert table.strip() == documents.price_table(found).strip()
