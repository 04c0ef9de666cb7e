"""Collectives on whole tensors, and the kernels that consume GEMM tiles (`reduce_tiles`, `scatter_tiles`).

    total = collectives.all_reduce(x, group=group)
    wide = collectives.all_scatter(x.view(1024, 1024), group=group)

All ranks of the group make the same calls in the same order.
"""

if __name__ != "pyrocshmem.collectives":
    raise ImportError(
        "this is pyrocshmem.collectives: import it by that name, since modules of two names would be two modules"
    )


from pyrocshmem import target  # isort: skip  # before anything that imports Triton
from pyrocshmem.collectives import library  # noqa: F401  registers the operators
from pyrocshmem.collectives.all_reduce_rms_norm import all_reduce_rms_norm
from pyrocshmem.collectives.quantized_norm import QuantizedNorm
from pyrocshmem.collectives.rms_norm import rms_norm
from pyrocshmem.collectives.rms_norm_pair import rms_norm_pair
from pyrocshmem.collectives.whole_tensors import (
    all_gather,
    all_reduce,
    all_reduce_,
    all_scatter,
    barrier,
    broadcast,
    broadcast_,
    reduce_scatter,
)
from pyrocshmem.collectives.work import Work

__all__ = [
    "QuantizedNorm",
    "Work",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "all_reduce_rms_norm",
    "all_scatter",
    "barrier",
    "broadcast",
    "broadcast_",
    "reduce_scatter",
    "rms_norm",
    "rms_norm_pair",
    "target",
]
