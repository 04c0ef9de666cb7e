"""Collectives on whole tensors, and the kernels that consume GEMM tiles (`reduce_tiles`, `scatter_tiles`).

    total = collectives.all_reduce(x, group=group)
    wide = collectives.all_scatter(x.view(1024, 1024), group=group)

All ranks of the group make the same calls in the same order.
"""

from pyrocshmem import target  # isort: skip  # before anything that imports Triton
from collectives import library  # noqa: F401  registers the operators
from collectives.all_reduce_rms_norm import all_reduce_rms_norm
from collectives.by_message import all_gather, all_reduce, all_scatter, barrier, broadcast, reduce_scatter
from collectives.rms_norm import rms_norm

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_rms_norm",
    "all_scatter",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "rms_norm",
    "target",
]
