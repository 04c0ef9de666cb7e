"""docs/results.md, the pages behind it and README's table are what the records make of them."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from pyrocshmem.benchmarks import documents, notes, pages, records, searches, tables
from pyrocshmem.benchmarks.__main__ import RESULTS

TIER = 1
pytestmark = pytest.mark.cpu
ROOT = Path(__file__).resolve().parents[2]


def test_the_pages_are_made_of_the_records() -> None:
    files = records.read_all(sorted(RESULTS.glob("*.jsonl")))
    docs = ROOT / "docs"
    pictures = sorted(path.name for path in (docs / "results").glob("*.svg"))
    made = pages.pages_of(files, notes.read(RESULTS / "notes.md"), pictures, searches.read(RESULTS))
    assert {path for path in made if path != "results.md"} == {
        f"results/{path.name}" for path in (docs / "results").glob("*.md")
    }
    for path, text in made.items():
        # Pictures are drawn in an order of their own, which needs matplotlib.
        assert sorted((docs / path).read_text().splitlines()) == sorted(text.splitlines()), path
    readme = (ROOT / "README.md").read_text()
    assert f"{documents.BEGIN}\n{documents.readme_table(files)}{documents.END}" in readme
    assert len(readme.splitlines()) <= 150


def test_the_first_page_is_one() -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert 6 <= len(rows) <= 12
    assert len(page.splitlines()) <= 80


def test_every_reason_is_of_a_case() -> None:
    """Of records that are gone nothing is left behind."""
    shapes: dict[str, set[str]] = {}
    for case in (case for file in records.read_all(sorted(RESULTS.glob("*.jsonl"))) for case in file.cases):
        shapes.setdefault(case["op"], set()).add(tables.shape(case))
    for op, reasons in notes.read(RESULTS / "notes.md").reasons.items():
        for pattern in (pattern for reason in reasons for pattern in reason.shapes):
            assert any(fnmatchcase(shape, pattern) for shape in shapes[op]), (op, pattern)
