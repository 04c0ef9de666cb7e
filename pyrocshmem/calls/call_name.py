"""What ranks compare of a call."""

from __future__ import annotations

from typing import NamedTuple

from pyrocshmem.lifecycle import MOST_ROWS


class CallName(NamedTuple):
    """What the ranks compare of a call. text: all but the number of its rows, in whose place it has a "#"; calls that
    differ in these alone are voted on once. rows: that number."""

    text: str
    rows: int = 0

    @classmethod
    def of(cls, text: str, rows: int) -> CallName:
        """That name; where ranks have no room to write so many rows down, one whose text has them."""
        return cls(text, rows) if rows <= MOST_ROWS else cls(text.replace("#", str(rows), 1))

    def __str__(self) -> str:
        return self.text.replace("#", str(self.rows), 1)
