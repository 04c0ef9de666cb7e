"""The products with RMSNorm as data, for the command line: see `stream_k.run.collective_problems`. M N K are global
sizes."""

from __future__ import annotations

from collections.abc import Mapping

from pyrocshmem.reference import norm_problems
from pyrocshmem.stream_k.ops.gemm_rms_norm import gemm_all_reduce_rms_norm, gemm_rms_norm_all_scatter
from pyrocshmem.stream_k.run.collective_problems import (
    Calls,
    Setting,
    Standalone,
    calls_that_make,
    norm_setting,
    normed,
)


def _all_reduce(setting: Setting) -> Calls:
    op = norm_problems.RowProduct(norm_setting(setting))
    return calls_that_make(setting, lambda: gemm_all_reduce_rms_norm(*op.operands, group=setting.heap)[0], op)


def _all_scatter(setting: Setting) -> Calls:
    op = norm_problems.ColumnProduct(norm_setting(setting))
    return calls_that_make(setting, lambda: gemm_rms_norm_all_scatter(*op.operands, group=setting.heap), op)


_ALL = (
    normed("gemm_rms_norm", _all_reduce, "stream_k.gemm_all_reduce_rms_norm"),
    normed("gemm_rms_norm_all_scatter", _all_scatter, "stream_k.gemm_rms_norm_all_scatter"),
)
NORMS: Mapping[str, Standalone] = {problem.collective: problem for problem in _ALL}
