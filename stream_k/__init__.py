"""Stream-K GEMMs in Triton, alone and joined to collectives.

    from pyrocshmem import stream_k
    c = stream_k.gemm(a, b, bias=bias, activation="gelu")
    c = stream_k.gemm_all_reduce(a_share, b_share, group=group)     # sum over ranks, on every rank
    c = stream_k.gemm_reduce_scatter(a_share, b_share, group=group) # sum over ranks, a block of rows a rank
    c = stream_k.gemm_all_scatter(a, b_columns, group=group)        # every rank's columns, on every rank
    c = stream_k.all_gather_gemm(a_rows, b_columns, group=group)    # all rows times the rank's columns
    y, h = stream_k.gemm_all_reduce_rms_norm(a_share, b_share, h, weight, eps, group=group)  # h += sum; its RMSNorm

Every call returns an ordinary tensor, which is the caller's.
"""

if __name__ != "pyrocshmem.stream_k":
    raise ImportError(
        "this is pyrocshmem.stream_k: import it by that name, since modules of two names would be two modules"
    )


from pyrocshmem import target  # isort: skip  # before anything that imports Triton
from pyrocshmem.calls import timeline
from pyrocshmem.calls.workspace import Workspace, workspace_for
from pyrocshmem.collectives.quantize import dequantize, quantize, quantize_swiglu
from pyrocshmem.collectives.quantize_rms_norm import quantize_rms_norm
from pyrocshmem.collectives.saturation import count_saturated
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.choice.explain import Explanation, explain
from pyrocshmem.stream_k.choice.table import choose
from pyrocshmem.stream_k.local_gemm.schedule import Schedule, make_schedule
from pyrocshmem.stream_k.ops.all_gather_gemm import all_gather_gemm
from pyrocshmem.stream_k.ops.gemm import gemm
from pyrocshmem.stream_k.ops.gemm_all_reduce import gemm_all_reduce
from pyrocshmem.stream_k.ops.gemm_all_scatter import gemm_all_scatter
from pyrocshmem.stream_k.ops.gemm_reduce_scatter import gemm_reduce_scatter
from pyrocshmem.stream_k.ops.gemm_rms_norm import gemm_all_reduce_rms_norm, gemm_rms_norm_all_scatter

__all__ = [
    "Config",
    "Explanation",
    "Schedule",
    "Workspace",
    "all_gather_gemm",
    "choose",
    "count_saturated",
    "dequantize",
    "explain",
    "gemm",
    "gemm_all_reduce",
    "gemm_all_reduce_rms_norm",
    "gemm_all_scatter",
    "gemm_reduce_scatter",
    "gemm_rms_norm_all_scatter",
    "make_schedule",
    "quantize",
    "quantize_rms_norm",
    "quantize_swiglu",
    "target",
    "timeline",
    "workspace_for",
]
