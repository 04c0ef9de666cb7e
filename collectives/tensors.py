"""What the collectives on whole tensors share: dtypes, rows, new tensors, agreeing, launching."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch

from pyrocshmem import trace
from stream_k.launch import Launch
from stream_k.workspace import Workspace

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

NUM_WARPS = 8


def run(
    workspace: Workspace,
    key: Hashable,
    call: str,
    kernel: Any,
    constants: dict[str, Any],
    programs: int,
    args: tuple[Any, ...],
) -> None:
    """Launch `kernel`. The first call of a kind is compared between ranks, compiled and loaded by all."""
    # A kernel that marks its stages is another one; all ranks record, or none.
    recorded = trace.recorder() is not None
    key, call = (key, recorded), f"{call}, recorded" if recorded else call
    launch: Launch | None = workspace.plans.get(key)
    if launch is None:
        launch = Launch(kernel, programs, constants, NUM_WARPS, 1)
        workspace.planned_together(call, lambda: launch.compile(args))
        workspace.plans[key] = launch
    with workspace.begin(call):
        launch(args)


def agree(workspace: Workspace, call: str) -> None:
    """Compare a call that launches nothing between ranks, the first time it is made."""
    if call not in workspace.agreed:
        workspace.compare(call)
        workspace.agreed[call] = 0


def check_eps(eps: float) -> None:
    """TypeError for what is no number, ValueError for one that no norm adds to its mean of squares."""
    if eps is None or isinstance(eps, str | torch.Tensor):
        raise TypeError(f"eps is a {type(eps).__name__}, a number is needed")
    if not 0 <= eps < math.inf:  # math.isfinite is nothing that torch.compile could ask of a number it traces
        raise ValueError(f"eps is {eps}, allowed are finite numbers of 0 or more")


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., N] as [M, N] with contiguous rows: a view where memory holds them so."""
    if x.ndim == 2 and x.is_contiguous() and not x.is_neg():
        return x
    M, N = math.prod(x.shape[:-1]), x.shape[-1]
    rows = x.resolve_neg().reshape(M, N)
    return rows if N <= 1 or rows.stride(1) == 1 else rows.contiguous()


def template(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """All of a tensor on x's device but its memory, for `new_like`. dtype: x's unless given."""
    return x.new_empty(1, dtype=dtype).expand(shape)


def new_like(x: torch.Tensor) -> torch.Tensor:
    """A new contiguous tensor like `x`, of any strides: microseconds less of the host than by its shape."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
