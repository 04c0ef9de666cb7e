"""The public ops as operators: schemas, shapes for tracing, gradients, order. `pyrocshmem.calls.operators` calls them.

    torch.ops.stream_k.gemm_all_reduce(a, b, pyrocshmem.calls.operators.name_of(group), None, "none", False, None)

Fused ops are registered as effects: a graph keeps each call, and their order, which is the same on all ranks then.
(They could name a workspace as mutated instead, but such ops can't have a gradient.) `gemm` has no peers that count on
it, so its calls may be merged and moved like any product.
"""

from __future__ import annotations

from typing import Any

import torch

from pyrocshmem.calls.operators import define, find, ranks
from pyrocshmem.calls.workspace import find_workspace
from pyrocshmem.stream_k.local_gemm.operands import check_product
from pyrocshmem.stream_k.ops import (
    all_gather_gemm,
    gemm_all_reduce,
    gemm_all_scatter,
    gemm_reduce_scatter,
    gemm_rms_norm,
    gradients,
)
from pyrocshmem.stream_k.ops.gemm import run as run_gemm
from pyrocshmem.stream_k.ops.op import Request

FUSED = ("all_gather_gemm", "gemm_all_reduce", "gemm_all_scatter", "gemm_reduce_scatter")
SUMS = ("gemm_all_reduce", "gemm_reduce_scatter")

_LIKE_GEMM = "Tensor? bias, str activation, bool allow_tf32"
_ON_RANKS = f"Tensor a, Tensor b, str group, {_LIKE_GEMM}, ScalarType? partial_dtype"
_SCHEMAS = {
    "gemm": f"(Tensor a, Tensor b, {_LIKE_GEMM}, str workspace) -> Tensor",
    "all_gather_gemm": (
        f"(Tensor a, Tensor b, str group, SymInt num_rows, {_LIKE_GEMM}, ScalarType? partial_dtype, "
        "bool save_gathered) -> (Tensor, Tensor)"
    ),
    "gemm_all_reduce": f"({_ON_RANKS}) -> Tensor",
    "gemm_all_scatter": f"({_ON_RANKS}) -> Tensor",
    "gemm_reduce_scatter": f"({_ON_RANKS}) -> Tensor",
    "gemm_all_reduce_rms_norm": (
        "(Tensor a, Tensor b, Tensor? residual, Tensor weight, float eps, str group, Tensor? bias, bool allow_tf32, "
        "ScalarType? partial_dtype) -> (Tensor, Tensor)"
    ),
    "gemm_rms_norm_all_scatter": (
        "(Tensor a, Tensor b, Tensor weight, float eps, SymInt hidden, str group, Tensor? bias, bool allow_tf32) "
        "-> (Tensor, Tensor, Tensor)"
    ),
}


def _run_gemm(
    a: torch.Tensor, b: torch.Tensor, bias: Any, activation: str, allow_tf32: bool, workspace: str
) -> torch.Tensor:
    own = find(workspace)[1] if workspace else None
    return run_gemm(a, b, bias, activation, None, allow_tf32, None, own)


MODULES = {
    "all_gather_gemm": all_gather_gemm,
    "gemm_all_reduce": gemm_all_reduce,
    "gemm_all_scatter": gemm_all_scatter,
    "gemm_reduce_scatter": gemm_reduce_scatter,
}


def _run_fused(name: str) -> Any:
    """The kernels of a fused op, by the schema's arguments."""

    def run(a: torch.Tensor, b: torch.Tensor, group: str, *more: Any) -> Any:
        gathers = name == "all_gather_gemm"
        num_rows, *rest, save = more if gathers else (None, *more, False)
        bias, activation, allow_tf32, partial_dtype = rest
        if name not in SUMS:
            partial_dtype = None  # of its gradient's sums
        request = Request(
            a,
            b,
            None,
            bias,
            activation,
            False,
            allow_tf32,
            None,
            partial_dtype,
            num_rows,
            save,
        )
        found = MODULES[name].run(request, *find(group))
        return (found, a.new_empty(0, a.shape[1])) if gathers and not save else found

    return run


def _run_all_reduce_norm(
    a: torch.Tensor, b: torch.Tensor, residual: Any, weight: torch.Tensor, eps: float, group: str, bias: Any,
    allow_tf32: bool, partial_dtype: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The public function. Below the dispatcher nothing needs a gradient."""
    members, workspace = find(group)
    more = {"allow_tf32": allow_tf32, "partial_dtype": partial_dtype, "workspace": workspace}
    with torch.no_grad():
        return gemm_rms_norm.gemm_all_reduce_rms_norm(
            a, b, residual, weight, eps, group=members, bias=bias, **more
        )


def _run_norm_all_scatter(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, eps: float, hidden: int, group: str, bias: Any,
    allow_tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(result, what its backward needs: this rank's columns of the product, the scales of all rows)."""
    workspace = find_workspace(*find(group))[1]
    with torch.no_grad():
        return gemm_rms_norm.scattered(a, b, weight, eps, hidden, bias, allow_tf32, None, workspace)


def _all_reduce_norm_shapes(
    a: torch.Tensor, b: torch.Tensor, residual: Any, weight: torch.Tensor, eps: float, group: str, bias: Any,
    allow_tf32: bool, partial_dtype: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    M, N, _ = check_product(a, b, bias, "none")
    return a.new_empty(M, N), a.new_empty(M, N)


def _norm_all_scatter_shapes(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, eps: float, hidden: int, group: str, bias: Any,
    allow_tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    M, N, _ = check_product(a, b, bias, "none")
    return a.new_empty(M, hidden), a.new_empty(M, N), a.new_empty(M, dtype=torch.float32)


def _gemm_shape(
    a: torch.Tensor, b: torch.Tensor, bias: Any, activation: str, allow_tf32: bool, workspace: str
) -> torch.Tensor:
    M, N, _ = check_product(a, b, bias, activation)
    return a.new_empty(M, N)


def _all_gather_gemm_shape(
    a: torch.Tensor, b: torch.Tensor, group: str, num_rows: int, bias: Any, activation: str,
    allow_tf32: bool, partial_dtype: Any, save_gathered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _, N, K = check_product(a, b, bias, activation)
    return a.new_empty(num_rows, N), a.new_empty(num_rows if save_gathered else 0, K)


def _shape(name: str) -> Any:
    """The result's shape of an op whose schema is that of a sum."""

    def make(
        a: torch.Tensor, b: torch.Tensor, group: str, bias: Any, activation: str, allow_tf32: bool, partial_dtype: Any
    ) -> torch.Tensor:  # fmt: skip
        M, N, _ = check_product(a, b, bias, activation)
        rank, world_size = ranks(group)
        if name == "gemm_all_scatter":
            return a.new_empty(M, N * world_size)
        # The blocks of `torch.tensor_split`, without a branch on M, which may be symbolic.
        return a.new_empty(
            (M + world_size - 1 - rank) // world_size if name == "gemm_reduce_scatter" else M, N
        )

    return make


def _define() -> None:
    runs: dict[str, Any] = {
        "gemm": _run_gemm,
        "gemm_all_reduce_rms_norm": _run_all_reduce_norm,
        "gemm_rms_norm_all_scatter": _run_norm_all_scatter,
    }
    shapes: dict[str, Any] = {
        "gemm": _gemm_shape,
        "all_gather_gemm": _all_gather_gemm_shape,
        "gemm_all_reduce_rms_norm": _all_reduce_norm_shapes,
        "gemm_rms_norm_all_scatter": _norm_all_scatter_shapes,
    }
    keep = {
        "gemm": gradients.keep_gemm,
        "all_gather_gemm": gradients.keep_all_gather_gemm,
        "gemm_all_reduce_rms_norm": gradients.keep_gemm_all_reduce_rms_norm,
        "gemm_rms_norm_all_scatter": gradients.keep_gemm_rms_norm_all_scatter,
    }
    for name, schema in _SCHEMAS.items():
        define(
            f"stream_k::{name}",
            schema,
            runs.get(name) or _run_fused(name),
            shapes.get(name) or _shape(name),
            keep.get(name, gradients.keep_sum),
            getattr(gradients, name),
            ordered=name != "gemm",
        )


_define()
