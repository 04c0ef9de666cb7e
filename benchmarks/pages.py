"""docs/results.md and the pages behind it in docs/results, made of records and benchmarks/results/notes.md.

texts = pages_of(files, notes, pictures, searches.read(RESULTS))      # by their path below docs/, "results.md" first
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path

from pyrocshmem.benchmarks import front_page, sets_page, stats
from pyrocshmem.benchmarks.notes import Notes
from pyrocshmem.benchmarks.records import File
from pyrocshmem.benchmarks.searches import Search
from pyrocshmem.benchmarks.shapes import COLUMN_NORMS, CORPORA, NORMS, TIMED
from pyrocshmem.benchmarks.tables import document

_MADE = "Made by `python -m pyrocshmem bench report` from the records in benchmarks/results; don't edit this page.\n"
_TITLES = {"collectives": "Collectives alone", "norms": "RMSNorm across ranks", "layers": "Whole layers"}


def page_of(op: str) -> str:
    """The name of the page in docs/results that has an op's tables."""
    kind = TIMED[op].kind
    if kind == "layer":
        return "layers"
    if kind != "collective":
        return op
    return "norms" if op in (*NORMS, *COLUMN_NORMS) else "collectives"


def pages_of(
    files: Sequence[File], notes: Notes, pictures: Sequence[str], searched: Sequence[Search]
) -> dict[str, str]:
    """The text of every page, by its path below docs/. pictures: names of files in docs/results. searched: what
    choices are compared with."""
    names = tuple(dict.fromkeys(page_of(group.op) for group in stats.groups(files)))
    by_page: dict[str, list[str]] = {}
    for picture in pictures:
        by_page.setdefault(_page_of_picture(picture, names), []).append(picture)
    found = {
        "results.md": front_page.text(files, notes, {name: title(name) for name in names}),
        "results/sets.md": _page("All sets", sets_page.sections(files, searched), by_page.get("", [])),
    }
    for name in names:
        ops = [op for op in TIMED if page_of(op) == name]
        found[f"results/{name}.md"] = _page(title(name), [document(files, notes, ops)], by_page.get(name, []))
    return found


def title(page: str) -> str:
    """Of a page, in words."""
    return _TITLES.get(page, page)


def _page(heading: str, parts: Sequence[str], pictures: Sequence[str]) -> str:
    shown = "".join(f"![{Path(name).stem.replace('-', ' ')}]({name})\n" for name in pictures)
    head = f"# {heading}\n\n{_MADE}\n[How to read the tables](../reading-results.md)\n"
    return "\n".join(part for part in (head, *parts, f"## Pictures\n\n{shown}" if shown else "") if part)


def _page_of_picture(picture: str, pages: Container[str]) -> str:
    """That of the op whose name it begins with; "" of several ops."""
    if picture.startswith(tuple(CORPORA)):
        return page_of("gemm")
    fits = [op for op in TIMED if picture.startswith(f"{op.replace('_', '-')}-")]
    page = page_of(max(fits, key=len)) if fits else ""
    return page if page in pages else ""
