"""docs/results.md and README's table are what `python -m pyrocshmem bench report` makes of the records."""

from pathlib import Path

import pytest

from pyrocshmem.benchmarks import documents, notes, records
from pyrocshmem.benchmarks.__main__ import RESULTS

TIER = 1
pytestmark = pytest.mark.cpu
ROOT = Path(__file__).resolve().parents[2]


def test_the_pages_are_made_of_the_records() -> None:
    files = records.read_all(sorted(RESULTS.glob("*.jsonl")))
    page = (ROOT / "docs" / "results.md").read_text()
    made = documents.results_page(files, notes.read(RESULTS / "notes.md"), [])
    # Pictures are drawn in an order of their own, which needs matplotlib.
    assert page.startswith(made)
    assert set(page[len(made) :].splitlines()) == {
        f"![{path.stem.replace('-', ' ')}](results/{path.name})"
        for path in (ROOT / "docs" / "results").iterdir()
    }
    readme = (ROOT / "README.md").read_text()
    assert f"{documents.BEGIN}\n{documents.readme_table(files)}{documents.END}" in readme
    assert len(readme.splitlines()) <= 150
