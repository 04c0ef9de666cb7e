"""Kernels that consume GEMM tiles (`reduce_tiles`, `scatter_tiles`) or whole symmetric tensors.

    x = heap.randn(1 << 20, dtype=torch.bfloat16)
    total = collectives.all_reduce(x, group=heap)
    wide = collectives.all_scatter(x.view(1024, 1024), group=heap)

Both are collective: all ranks of the group make the same calls in the same order.
"""

from pyrocshmem import target  # isort: skip  # before anything that imports Triton
from collectives.all_reduce import all_reduce
from collectives.all_scatter import all_scatter
from collectives.rms_norm import rms_norm

__all__ = ["all_reduce", "all_scatter", "rms_norm", "target"]
