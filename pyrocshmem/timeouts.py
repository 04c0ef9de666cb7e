"""How long things may take, in seconds: what is given, what the environment says, what is allowed."""

import math
import os

# Kernels hold it as an int32 of microseconds.
LONGEST_WAIT_S = 2147
# torch's stores and process groups count it in milliseconds, and fail beyond.
LONGEST_INIT_S = 1_000_000


def init_seconds() -> float:
    """How long forming a group or heap may take: `PYROCSHMEM_INIT_SECONDS`, 30 by default. ValueError for what is no
    number greater than 0, up to LONGEST_INIT_S."""
    text = os.environ.get("PYROCSHMEM_INIT_SECONDS", "30")
    seconds = _number(text)
    if not 0 < seconds <= LONGEST_INIT_S:
        raise ValueError(
            f"PYROCSHMEM_INIT_SECONDS={text!r}, allowed are numbers greater than 0, at most {LONGEST_INIT_S}"
        )
    return seconds


def wait_seconds(given: float | None = None) -> float:
    """How long a device-side wait may last: `given`, or `PYROCSHMEM_WAIT_SECONDS`, 10 by default. ValueError for what
    is no number greater than 0, up to LONGEST_WAIT_S."""
    text = os.environ.get("PYROCSHMEM_WAIT_SECONDS", "10")
    seconds = _number(text) if given is None else given
    if not 0 < seconds <= LONGEST_WAIT_S:
        what = f"PYROCSHMEM_WAIT_SECONDS={text!r}" if given is None else f"wait_seconds is {given}"
        raise ValueError(f"{what}, allowed are numbers greater than 0, at most {LONGEST_WAIT_S}")
    return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
