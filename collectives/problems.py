"""The collectives on whole tensors as data, for the command line: how each is called, beside what, checked how.

    problem = STANDALONE["rms_norm"]
    calls = problem.prepare(Setting(heap, (M, N), dtype, seed))
    calls.ours(); calls.reference(); calls.check().ok

M x N are the sizes of the whole; what a rank holds of it is for `prepare` to say. One more collective is one more
entry of `STANDALONE`, and a line in stream_k/usage.txt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from collectives.rms_norm import rms_norm
from pyrocshmem.heap import Heap
from reference import rms_norm as reference
from reference.accuracy import Accuracy, make_operand
from reference.ops import shard_range

EPS = 1e-6


@dataclass(frozen=True)
class Setting:
    """Where and on what a collective is run."""

    heap: Heap
    shape: tuple[int, int]
    dtype: torch.dtype
    seed: int


@dataclass(frozen=True)
class Calls:
    """A collective and its reference on one rank: calls, the tensors that they write, and the check of the first."""

    ours: Callable[[], object]
    result: torch.Tensor
    reference: Callable[[], object]
    expected: torch.Tensor
    check: Callable[[], Accuracy]


@dataclass(frozen=True)
class Standalone:
    """steps: what the reference does; holds: what a rank brings and gets; bound: what the error is held to; in words.
    gpu_shape, cpu_shape: M, N where none are asked for."""

    collective: str
    steps: str
    holds: str
    bound: str
    prepare: Callable[[Setting], Calls]
    gpu_shape: tuple[int, int]
    cpu_shape: tuple[int, int]


def _rms_norm(setting: Setting, replicated: bool) -> Calls:
    """x + residual, rows of N columns spread over ranks."""
    heap, (M, N), device = setting.heap, setting.shape, setting.heap.device
    whole = [
        make_operand((M, N), setting.dtype, setting.seed, 0, tag=tag, device=device)
        for tag in ("x", "residual")
    ]
    weights = make_operand((N,), torch.float32, setting.seed, 0, tag="weight", device=device)
    mine = slice(*shard_range(N, heap.rank, heap.world_size))
    x, residual = (tensor[:, mine].contiguous() for tensor in whole)
    weight = weights[mine].contiguous()
    h = (whole[0].float() + whole[1].float()).to(setting.dtype)
    shape = (M, N) if replicated else tuple(x.shape)
    make = heap.empty if replicated else partial(torch.empty, device=device)
    result, expected = (
        make(shape, dtype=setting.dtype),
        torch.empty(shape, dtype=setting.dtype, device=device),
    )
    options = {"residual": residual, "hidden": N, "replicated": replicated}
    return Calls(
        lambda: rms_norm(x, weight, EPS, group=heap, out=result, **options),
        result,
        lambda: reference.rms_norm(x, weight, EPS, out=expected, **options),
        expected,
        lambda: reference.check(result, h, weights, EPS, expected, slice(None) if replicated else mine),
    )


_RMS_STEPS = "add the residual, square, all_reduce of the sums, scale"
_RMS_BOUND = "error of the reference + sqrt(N + 16) 2^-23 |result| + one rounding"
_ALL = (
    Standalone(
        "rms_norm",
        _RMS_STEPS,
        "its columns of x and of the residual; its columns of the result",
        _RMS_BOUND,
        partial(_rms_norm, replicated=False),
        (8192, 8192),
        (64, 512),
    ),
    Standalone(
        "rms_norm_replicated",
        f"{_RMS_STEPS}, all_gather of the columns",
        "its columns of x and of the residual; all columns of the result",
        _RMS_BOUND,
        partial(_rms_norm, replicated=True),
        (8192, 8192),
        (64, 512),
    ),
)
STANDALONE: Mapping[str, Standalone] = {problem.collective: problem for problem in _ALL}
