"""Which code a record was made with: a digest of the sources that a measured time depends on.

Kernels, choices, the run time and what measures are in it; documents, tests, records and what makes pages of them are
not, so that these can be committed without making records stale.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_FOLDERS = ("pyrocshmem", "stream_k", "collectives", "reference", "finegrained_alloc", "benchmarks")
_KINDS = (".py", ".toml", ".c", ".h", ".sh")
# What only makes pages of records.
_PAGES = {
    "documents.py", "escape.py", "float8_page.py", "front_page.py", "headline.py", "notes.py", "older_records.py",
    "pages.py", "plots.py", "seeds.py", "sets_page.py", "stats.py", "tables.py",
}  # fmt: skip


@cache
def digest(root: Path = ROOT) -> str:
    """Sixteen hexadecimal digits, the same for the same sources wherever they lie."""
    found = hashlib.sha256()
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            counts = path.suffix in _KINDS and not (folder == "benchmarks" and path.name in _PAGES)
            if counts and "results" not in path.relative_to(root).parts:
                found.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]
