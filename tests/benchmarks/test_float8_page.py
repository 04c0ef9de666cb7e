"""The page of 8-bit operands: what it says is in the records, and wrong results are in no mean."""

from pathlib import Path

import pytest

from pyrocshmem.benchmarks import float8, float8_page
from pyrocshmem.benchmarks.float8 import Took
from pyrocshmem.benchmarks.float8_page import BEGIN, END, ROOT, records, table, write
from pyrocshmem.benchmarks.shapes import cases_of

RESULTS = ROOT / "benchmarks" / "results"


def printed(path: Path) -> None:
    """What the benchmark prints of two cases, of which one is wrong by the vendor."""
    cases = cases_of("gemm", "tiny", 1, "float16", False)[:2]
    right = Took({"ours": 2e-6, "ours, no BLAS": 3e-6, "scaled_mm": 4e-6}, {"ours": 0.5, "scaled_mm": 0.5})
    wrong = Took({"ours": 2e-6, "ours, no BLAS": 3e-6, "scaled_mm": 1e-6}, {"ours": 0.5, "scaled_mm": 9.0})
    about = [
        "",
        "8-bit operands, blockwise",
        "shapes: models:1, the first 2",
        "target: 1 x GPU (cuda), because",
        "commit: 0123456789abcdef",
    ]
    path.write_text("\n".join([*float8.table(cases, [right, wrong]), *about]))


def test_wrong_results_are_in_no_mean(tmp_path: Path) -> None:
    printed(tmp_path / "2026-01-01-GPU-float8-gemm.txt")
    printed(tmp_path / "2026-01-02-GPU-float8-gemm.txt")
    found = records(tmp_path)
    assert [each.name for each in found] == ["2026-01-02-GPU-float8-gemm.txt"]
    rows = table(found).splitlines()[2:-2]
    assert [row.split(" | ")[2:] for row in rows] == [
        ["drawn", "ours, no BLAS", "2", "1.50", "1.50 |"],
        ["drawn", "scaled_mm", "1", "2.00", "2.00 |"],
    ]
    assert table(found).endswith(f"`{found[0].name}` (`models:1, the first 2`, commit `0123456789`).\n")


def test_what_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "2026-01-01-GPU-float8-x.txt").write_text("| op |\n")
    with pytest.raises(ValueError, match=r"is not what benchmarks\.float8 prints"):
        records(tmp_path)


def test_the_page_is_of_the_records(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "float8.md").read_text()
    found = records(RESULTS)
    assert f"{BEGIN}\n{table(found)}{END}" in page
    (tmp_path / "docs" / "img").mkdir(parents=True)
    (tmp_path / "docs" / "float8.md").write_text(f"before {BEGIN} old {END} behind")
    write(found, tmp_path)
    assert (tmp_path / "docs" / "float8.md").read_text() == f"before {BEGIN}\n{table(found)}{END} behind"
    assert (tmp_path / "docs" / "img" / float8_page.PICTURE).stat().st_size > 1000
    (tmp_path / "docs" / "float8.md").write_text("nothing")
    with pytest.raises(ValueError, match="has no table to put in place"):
        write(found, tmp_path)
