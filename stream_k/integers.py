"""Arguments that are counts, sizes or places: integers, of NumPy too, and not numbers that happen to be whole."""

from __future__ import annotations

import operator
from typing import Any

import torch


def as_integer(name: str, value: Any) -> int:
    """`value` as an int, or the symbol of one that a trace has. TypeError, with the value got, for what is none."""
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
