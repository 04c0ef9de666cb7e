"""Checks of arguments that are plain numbers."""

import operator
from typing import Any


def as_integer(name: str, value: Any) -> int:
    """`value`, which may be NumPy's, as an int; TypeError, with the value got, for what is none."""
    if type(value) is int:
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
