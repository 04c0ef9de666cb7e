"""What products of 8-bit operands may be off by: docs/float8.md."""

import torch

from pyrocshmem import target
from pyrocshmem.reference.accuracy import of_matrix_unit


def may_be_off(a: torch.Tensor, b: torch.Tensor, fast: bool = False) -> torch.Tensor:
    """Of each element of a @ b, before it is rounded: [M, N]. a [M, K], b [K, N], float64: what operands stand for,
    with either sign. fast: summed with `use_fast_accum`."""
    K = a.shape[1]
    if target.interpreted():
        return K**0.5 * 2.0**-23 * (a.abs() @ b.abs())
    return of_matrix_unit((a.square() @ b.square()).sqrt(), K, fast)
