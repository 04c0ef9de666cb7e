"""Stream-K GEMMs in Triton, alone and joined to collectives.

    import stream_k
    c = stream_k.gemm(a, b, bias=bias, activation="gelu")
    c = stream_k.gemm_all_reduce(a_share, b_share, group=group)     # sum over ranks, on every rank
    c = stream_k.gemm_reduce_scatter(a_share, b_share, group=group) # sum over ranks, a block of rows a rank
    c = stream_k.gemm_all_scatter(a, b_columns, group=group)        # every rank's columns, on every rank
    c = stream_k.all_gather_gemm(a_rows, b_columns, group=group)    # all rows times the rank's columns
    y, h = stream_k.gemm_all_reduce_rms_norm(a_share, b_share, h, weight, eps, group=group)  # h += sum; its RMSNorm

Every call returns an ordinary tensor, which is the caller's.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pyrocshmem import target  # isort: skip  # before anything that imports Triton
from stream_k import library  # noqa: F401  registers the operators
from stream_k.config import Config
from stream_k.gemm import gemm
from stream_k.schedule import Schedule, make_schedule
from stream_k.tuned import choose
from stream_k.workspace import Workspace, workspace_for

if TYPE_CHECKING:
    from stream_k import timeline
    from stream_k.fused_all_gather import all_gather_gemm
    from stream_k.fused_all_reduce import gemm_all_reduce
    from stream_k.fused_all_scatter import gemm_all_scatter
    from stream_k.fused_reduce_scatter import gemm_reduce_scatter
    from stream_k.fused_rms_norm import gemm_all_reduce_rms_norm, gemm_rms_norm_all_scatter

__all__ = [
    "Config",
    "Schedule",
    "Workspace",
    "all_gather_gemm",
    "choose",
    "gemm",
    "gemm_all_reduce",
    "gemm_all_reduce_rms_norm",
    "gemm_all_scatter",
    "gemm_reduce_scatter",
    "gemm_rms_norm_all_scatter",
    "make_schedule",
    "target",
    "timeline",
    "workspace_for",
]

# The fused ops and timelines stand on `collectives`, which stands on this package's kernel: loaded when first asked
# for.
_FUSED = {
    "all_gather_gemm": "stream_k.fused_all_gather",
    "gemm_all_reduce": "stream_k.fused_all_reduce",
    "gemm_all_reduce_rms_norm": "stream_k.fused_rms_norm",
    "gemm_all_scatter": "stream_k.fused_all_scatter",
    "gemm_reduce_scatter": "stream_k.fused_reduce_scatter",
    "gemm_rms_norm_all_scatter": "stream_k.fused_rms_norm",
}


def __getattr__(name: str) -> Any:
    if name == "timeline":
        return importlib.import_module("stream_k.timeline")
    if name not in _FUSED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_FUSED[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
