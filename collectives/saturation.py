"""How many elements a given scale is too small for: they become the largest number of the 8-bit type, without a word.

    with stream_k.count_saturated() as found:
        q, scale = stream_k.quantize(x, "tensorwise", scale=scale)
        q, scale, h, _ = collectives.all_reduce_rms_norm(.., quantize="tensorwise", quantize_scale=scale)
    found.elements                                  # of this rank, in both; waits for them

For finding mistakes: it takes PyTorch's kernels, and norms are quantized by a kernel of their own meanwhile, so all
ranks of a group are inside, or none. A scale that is made of the elements themselves saturates none. NaN is no number
and is not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Saturated:
    """What `count_saturated` counts."""

    def __init__(self) -> None:
        self._counts: list[torch.Tensor] = []

    @property
    def elements(self) -> int:
        """Of all calls so far. The host waits for their kernels."""
        return sum(int(count) for count in self._counts)

    def add(self, x: torch.Tensor, scale: torch.Tensor, to: torch.dtype) -> None:
        """Those of x that are beyond what `scale` can hold in dtype `to`."""
        self._counts.append((x.float().abs() > torch.finfo(to).max * scale).sum())


class _Here(threading.local):
    counts: tuple[Saturated, ...] = ()  # of the contexts that this thread is in


here = _Here()


@contextmanager
def count_saturated() -> Iterator[Saturated]:
    """Count, in eager calls of this thread, elements that a given scale saturates; inner contexts count for outer ones,
    too."""
    outer, found = here.counts, Saturated()
    here.counts = (*outer, found)
    try:
        yield found
    finally:
        here.counts = outer
