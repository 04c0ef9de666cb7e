"""Operands of `collectives.rms_norm` for its tests, and how its ranks are started.

    def body(group):                                     # on every rank
        rows = Rows.random(heap, 5, 37, MIXES[0], seed)  # whole rows, the same on all ranks
        out, updated = rows.call(replicated=False)       # of this rank's columns
        assert not rows.wrong(out, updated, False)

    run(body, 3)

On a CPU the ranks are threads, which start at once; `tests/examples/test_rms.py` has processes.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from pyrocshmem import Heap, collectives, spawn_threads, target
from pyrocshmem.reference import rms_norm as reference
from pyrocshmem.shards import shard_range
from tests.ranks import run_ranks, values

TIMEOUT_S = 100.0
HEAP_BYTES = 16 << 20
EPS = 1e-5
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# Of x, the weight, the residual, the result.
MIXES = (
    (F32, F32, None, F32),
    (F16, F32, F16, F16),
    (BF16, BF16, None, BF16),
    (F16, BF16, F32, BF16),
    (F32, F16, BF16, F16),
)
# Columns that no number of ranks here divides, fewer columns than ranks, more than a program holds at a time.
SIZES = ((1, 37), (5, 2), (70, 37), (0, 8), (3, 4611))
# Every mix of types on one size, every size with one mix.
CASES = [*itertools.product(SIZES[:1], MIXES), *zip(SIZES[1:], MIXES[1:], strict=True)]


def on_process(rank: int, world_size: int, body: Callable[..., Any], *args: Any) -> Any:
    return body(None, *args)


def run(body: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """What `body(group, *args)` returns on every rank."""
    if target.interpreted():
        return spawn_threads(body, num_ranks, *args, timeout=TIMEOUT_S)
    return values(run_ranks(on_process, num_ranks, body, *args, timeout=TIMEOUT_S))


@dataclass
class Rows:
    """The whole of a call's operands, and what a rank has of them."""

    heap: Heap
    x: torch.Tensor
    weight: torch.Tensor
    residual: torch.Tensor | None

    @classmethod
    def random(cls, heap: Heap, M: int, H: int, mix: tuple[Any, ...], seed: int) -> "Rows":
        # Not the generator of the process, which ranks that are threads share.
        generator = torch.Generator().manual_seed(seed)
        x, weight, residual = (torch.randn(shape, generator=generator) for shape in ((M, H), (H,), (M, H)))
        residual = None if mix[2] is None else residual.to(mix[2]).to(heap.device)
        return cls(heap, x.to(mix[0]).to(heap.device), weight.to(mix[1]).to(heap.device), residual)

    @property
    def columns(self) -> slice:
        return slice(*shard_range(self.x.shape[1], self.heap.rank, self.heap.world_size))

    @property
    def mine(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Copies of x, weight and residual of this rank."""
        residual = None if self.residual is None else self.residual[:, self.columns].clone()
        return self.x[:, self.columns].clone(), self.weight[self.columns].clone(), residual

    @property
    def h(self) -> torch.Tensor:
        return (
            self.x
            if self.residual is None
            else (self.x.float() + self.residual.float()).to(self.residual.dtype)
        )

    def call(
        self, replicated: bool, eps: float = EPS, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight, residual = self.mine
        found = collectives.rms_norm(
            x,
            weight,
            eps,
            group=self.heap,
            residual=residual,
            replicated=replicated,
            hidden=self.x.shape[1],
            **options,
        )
        return found if residual is not None else (found, None)

    def in_torch(self, dtype: torch.dtype, eps: float = EPS) -> torch.Tensor:
        """PyTorch's result of whole rows."""
        return functional.rms_norm(self.h.float(), self.x.shape[1:], self.weight.float(), eps).to(dtype)

    def wrong(
        self, out: torch.Tensor, updated: torch.Tensor | None, replicated: bool, eps: float = EPS
    ) -> str:
        """What is wrong with a result, or nothing."""
        columns = slice(None) if replicated else self.columns
        expected = self.in_torch(out.dtype, eps)[:, columns]
        found = reference.check(out, self.h, self.weight, eps, expected, columns)
        if self.residual is not None and not torch.equal(updated, self.h[:, self.columns]):
            return "x + residual differs"
        return "" if found.ok else str(found)
