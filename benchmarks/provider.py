"""What a provider of a case is, and what providers have in common: the BLAS, somebody's sum over ranks, and a norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from pyrocshmem.benchmarks.operands import Operands
from pyrocshmem.benchmarks.shapes import DECODE_ROWS
from pyrocshmem.reference import timing
from pyrocshmem.reference.problems import EPS

# Up to here it is open which algorithm is faster; beyond, a one-shot only sends more.
ALGORITHM_BYTES = 16 << 20


class Unavailable(Exception):
    """The provider can't run here, or not this case; the message is the reason."""


@dataclass
class Run(timing.Run):
    """A provider, ready for a case.

    what: which truth the output is held to, "result" or "product". roundings: of every rank's partial result, beyond
    the bound of our own ops; library: whether the bound of a library applies, which may round while it adds. config,
    schedule: of ours where it has one; what that chose, as in `chosen`.
    """

    what: str = "result"
    roundings: int = 0
    library: bool = False
    config: Any = None
    schedule: str = ""
    close: Callable[[], None] | None = None


def provided(run: timing.Run, **more: Any) -> Run:
    """A call as a provider's; `more`: fields of `Run`."""
    return Run(**vars(run), **more)


def need_gpus(x: Operands) -> None:
    """Unavailable where a library for several NVIDIA GPUs can't run."""
    if x.device.type != "cuda":
        raise Unavailable("needs GPUs")
    if x.num_ranks < 2:
        raise Unavailable("needs 2 ranks")
    if torch.version.hip:
        raise Unavailable("not tried on AMD GPUs, where multicast can't be ruled out")


def check_bytes(x: Operands) -> None:
    """Unavailable for what only pays for small results."""
    if x.case.M * x.case.N * x.dtype.itemsize > ALGORITHM_BYTES:
        raise Unavailable(f"not timed above {ALGORITHM_BYTES >> 20} MiB")


def check_rows(x: Operands) -> None:
    """Unavailable for what only pays for few rows."""
    most = max(max(rows) for rows in DECODE_ROWS.values())
    if most < x.case.M:
        raise Unavailable(f"not timed above {most} rows")


def group_name() -> str:
    """Of the default process group, as torch.ops wants it."""
    return dist.group.WORLD.group_name


def first_line(error: BaseException) -> str:
    """An error in a few words."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


Sum = tuple[torch.Tensor, torch.Tensor, Callable[[], object]]


def chain(x: Operands, summing: Sum) -> Run:
    """The GEMM by the BLAS, if there is one, the sum over ranks, and what the op has behind it: PyTorch's sum with the
    residual and its RMSNorm. summing: what is summed [M, N], the sum, the call."""
    given, total, call = summing
    norm = _norm(x, total) if x.problem.norm else None
    alone = not x.problem.gemm

    def restore() -> None:
        given.copy_(x.x)

    def run() -> Any:
        if not alone:
            torch.mm(x.a, x.b, out=given)
        call()
        return norm() if norm is not None else None

    if alone:
        restore()
    roundings = x.num_ranks + 2 if norm is not None else x.num_ranks
    out = total if norm is None else None
    in_place = restore if alone and total is given else None
    return Run(run, out, prepare=in_place, returns=norm is not None, roundings=roundings, library=True)


def _norm(x: Operands, total: torch.Tensor) -> Callable[[], torch.Tensor]:
    updated = torch.empty_like(total)

    def norm() -> torch.Tensor:
        torch.add(total, x.residual, out=updated)
        return functional.rms_norm(updated, (x.case.N,), x.weight, EPS)

    return norm
