"""Timed outputs against float64.

For each sampled element of our own ops, with ref64 the exact result:

    |out - ref64| <= |rounded ref64 - ref64| + sqrt(K) 2^-23 (|A| |B|) + one rounding + roundings x partials

which is `reference.accuracy`'s bound with the best baseline there can be. Partials that travel in 16 bits add a
rounding of every rank's partial, a norm one of the value that is normalized. Libraries may round while they add,
within a rank too (split-K in 16 bits), so theirs are also allowed a few roundings of a value of typical size,
|A| |B| / sqrt(K).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pyrocshmem.benchmarks.operands import Truth
from pyrocshmem.benchmarks.provider import Run
from pyrocshmem.reference.accuracy import bound, compare

_LIBRARY_ROUNDINGS = 16


def error_of(run: Run, truth: Truth, ranks: int) -> dict[str, Any]:
    """{max_error, bound_at_max, worst_ratio, num_bad, num_elements} of a provider's output on this rank."""
    result = run.result()
    out = (
        result[0, truth.rows][:, None] if truth.ref64.shape[1] == 1 != result.shape[1] else result[truth.rows]
    )
    dtype = out.dtype
    allowed = bound(truth.ref64, truth.ref64.to(dtype), truth.magnitude, truth.K, dtype)
    unit = torch.finfo(dtype).eps / 2
    allowed += run.roundings * unit * truth.partials + truth.steps * unit * truth.ref64.abs()
    if run.library:
        allowed += _LIBRARY_ROUNDINGS * ranks * unit * truth.magnitude / math.sqrt(max(truth.K, 1))
    found = compare(out, truth.ref64, truth.ref64, allowed)
    return {
        "max_error": found.max_error,
        "bound_at_max": found.bound_at_max,
        "worst_ratio": found.worst_ratio,
        "num_bad": found.num_bad,
        "num_elements": found.num_elements,
    }


def worst(errors: list[dict[str, Any]]) -> dict[str, Any]:
    """The error of the rank that is nearest to, or farthest over, its bound; counts are of all ranks."""
    found = dict(max(errors, key=lambda error: error["worst_ratio"]))
    for name in ("num_bad", "num_elements"):
        found[name] = sum(error[name] for error in errors)
    return found
