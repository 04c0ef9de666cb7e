"""Timed outputs against float64.

For each sampled element of our own ops, with ref64 the exact result:

    |out - ref64| <= |rounded ref64 - ref64| + sqrt(K) 2^-23 (|A| |B|) + one rounding

which is `reference.accuracy`'s bound with the best baseline there can be. Where partials travel in 16 bits, a rounding
of every rank's takes the place of the baseline's error; a norm adds one of the value that is normalized. Libraries may
round while they add, within a rank too (split-K in 16 bits), so theirs are allowed several roundings of the partials,
and a few of a value of typical size, |A| |B| / sqrt(K).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pyrocshmem.benchmarks.operands import Sample
from pyrocshmem.benchmarks.provider import Run
from pyrocshmem.reference.operands import LIBRARY_ROUNDINGS


def error_of(run: Run, sample: Sample, ranks: int) -> dict[str, Any]:
    """{max_error, bound_at_max, worst_ratio, num_bad, num_elements} of a provider's output on this rank."""
    library = LIBRARY_ROUNDINGS * ranks if run.library else 0
    found = sample.truth.check(sample.of(run.result()), roundings=run.roundings, library=library)
    error = asdict(found)
    del error["first_bad"]
    return error


def worst(errors: list[dict[str, Any]]) -> dict[str, Any]:
    """The error of the rank that is nearest to, or farthest over, its bound; counts are of all ranks."""
    found = dict(max(errors, key=lambda error: error["worst_ratio"]))
    for name in ("num_bad", "num_elements"):
        found[name] = sum(error[name] for error in errors)
    return found
