"""What `python -m pyrocshmem tune` tries: the rules' choice, and a handful of others around it, which the placements
of the op name (`stream_k.choice.variants`)."""

from __future__ import annotations

import torch

from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.choice.placement import Variant, placements_of
from pyrocshmem.stream_k.choice.rules import decide
from pyrocshmem.stream_k.choice.table import Shape, check
from pyrocshmem.stream_k.choice.variants import itself


def candidates(
    op: str,
    shape: Shape,
    dtype: torch.dtype,
    ranks: int,
    device: torch.device,
    partial_dtype: torch.dtype | None = None,
) -> dict[Config, Variant]:
    """Configurations to try for a local GEMM of `shape`, (M, N, K), the rules' first; each with the variant that it
    comes from."""
    M, N, K = shape
    base = decide(op, M, N, K, dtype, ranks, device, partial_dtype)
    found = {base.config: Variant(base.config)}
    for placement in placements_of(op):
        try:
            config = decide(op, M, N, K, dtype, ranks, device, partial_dtype, placement.name).config
        except ValueError:
            continue  # not on a device as small as this one
        for variant in (placement.variants or itself)(config, base.facts):
            try:
                other = variant.fitted(M, N, base.facts.num_sms)
                check(op, other, device)
            except ValueError:
                continue
            found.setdefault(other, variant)
    return found
