"""Figures of a command: a row a case, as a table and as JSON with what made them."""

import json
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table

from pyrocshmem import target


def report(columns: dict[str, str], rows: list[dict[str, Any]], path: Path | None, **options: int) -> None:
    """Print `rows`; write them to `path`, if there is one, with the machine, the versions and `options`.

    columns: title of each column that is printed, by the key in a row.
    """
    table = Table(*columns.values())
    for row in rows:
        table.add_row(*("" if row[key] is None else str(row[key]) for key in columns))
    Console(soft_wrap=True).print(table)
    if path is not None:
        facts = {"target": target.describe(), "torch": torch.__version__, "triton": triton.__version__}
        path.write_text(json.dumps({**facts, **options, "cases": rows}, indent=1) + "\n")
