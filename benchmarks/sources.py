"""Which code a record was made with: a digest of the sources that a measured time depends on.

Kernels, choices, the run time and what measures are in it; documents, tests, records and what makes pages of them are
not, so that these can be committed without making records stale.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pyrocshmem

ROOT = Path(__file__).resolve().parents[1]

_PACKAGE = Path(pyrocshmem.__file__).parent
_KINDS = (".py", ".toml", ".c", ".h", ".sh")
_LEFT_OUT = {"results", "__pycache__"}
# Of benchmarks: what only makes pages of records, and what asks for them.
_PAGES = {
    "documents.py", "escape.py", "float8_page.py", "front_page.py", "headline.py", "notes.py", "older_records.py",
    "pages.py", "plots.py", "records.sh", "seeds.py", "sets_page.py", "stats.py", "tables.py",
}  # fmt: skip


@cache
def digest(package: Path = _PACKAGE) -> str:
    """Sixteen hexadecimal digits, the same for the same sources wherever they lie."""
    found = hashlib.sha256()
    for path in sorted(_counted(package)):
        found.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _counted(package: Path) -> Iterator[Path]:
    # In the project's tree parts of the package are links to folders beside it.
    for folder, folders, names in os.walk(package, followlinks=True):
        folders[:] = set(folders) - _LEFT_OUT
        pages = _PAGES if Path(folder).name == "benchmarks" else set()
        yield from (Path(folder, name) for name in names if name.endswith(_KINDS) and name not in pages)
