"""What the fused ops share: finding heap and workspace, agreeing on a call the first time it is made, running its launches.

The first call of a kind is planned: all ranks compare what they are about to do (`CallMismatch` when it differs), allocate, compile and load every
kernel, and wait for one another. From then on a call does none of that: no rendezvous, no allocation but the result's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pyrocshmem import target
from pyrocshmem.heap import Heap, heap_for
from stream_k.config import Config, num_multiprocessors
from stream_k.kernel import consumer_kernel
from stream_k.launch import Launch
from stream_k.operands import aligned
from stream_k.product import Product
from stream_k.workspace import Workspace, workspace_for

Arguments = tuple[Any, ...]


class FusedPlan(Protocol):
    """The launches of an op for operands of one kind, in stream order."""

    launches: list[Launch]
    result: torch.Tensor | None  # on the heap, to be copied out; None: the op writes `out` itself

    def arguments(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> list[Arguments]:
        """Arguments of each launch."""
        ...


@dataclass(frozen=True)
class Place:
    """Where a call runs."""

    heap: Heap
    workspace: Workspace


def place_of(group: Any, workspace: Workspace | None, a: torch.Tensor) -> Place:
    """The heap of `group` and the workspace to use. Raises ValueError when they or `a`'s device don't fit together."""
    heap = heap_for(group)
    if workspace is not None and workspace.heap is not heap:
        raise ValueError(f"the workspace belongs to {workspace.heap!r}, the group's heap is {heap!r}")
    if a.device != heap.device:
        raise ValueError(f"a is on {a.device}, the heap of this rank on {heap.device}")
    return Place(heap, workspace if workspace is not None else workspace_for(heap))


def kind(x: torch.Tensor | None) -> Hashable:
    """All of a tensor that code is specialized for."""
    return None if x is None else (x.shape, x.stride(), x.dtype, aligned(x))


def symmetric_offset(heap: Heap, out: torch.Tensor | None) -> int | None:
    """Byte offset of a contiguous `out` on the heap, where peers can write it directly; None for any other tensor."""
    if out is None or not out.is_contiguous() or not aligned(out) or not heap.is_symmetric(out):
        return None
    return heap.offset(out)


def find_plan(
    place: Place, key: Hashable, k: int, call: Callable[[], str], make: Callable[[int], FusedPlan], arguments: Arguments
) -> FusedPlan:
    """The plan of a call of this kind: made, on all ranks together, the first time.

    k: the inner size of this rank's product; `make` gets the largest of all ranks. call(): what must be the same on all of them.
    """
    plan = place.workspace.plans.get(key)
    if plan is None:
        sizes = place.heap.vote(call(), str(k).encode())
        plan = make(max(int(size) for size in sizes))
        for launch, args in zip(plan.launches, plan.arguments(*arguments), strict=True):
            launch.compile(args)
        # A rank that compiles longer than the others must not eat into their kernels' wait budget.
        place.heap.vote(f"{call()}: ready")
        place.workspace.plans[key] = plan
    return plan


def run(place: Place, plan: FusedPlan, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Launch the plan and return `out`, filled."""
    with place.workspace.call():
        for launch, args in zip(plan.launches, plan.arguments(a, b, bias, out), strict=True):
            launch(args)
    if plan.result is not None:
        out.copy_(plan.result)
    return out


def consumer_launch(product: Product, consumer: Any, options: tuple[int, ...], world_size: int, device: torch.device) -> Launch:
    """The launch of a consumer after the GEMM, on all multiprocessors."""
    config = product.config
    constants = {
        "CONSUMER": consumer,
        "OPTIONS": options,
        "WORLD": world_size,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "GROUP_M": config.group_m,
    }
    grid = min(product.schedule.num_tiles, config.num_programs or num_multiprocessors(device))
    return Launch(consumer_kernel, grid, constants, config.num_warps, 1)


def describe(op: str, M: int, N: int, dtype: torch.dtype, **facts: Any) -> str:
    """The call as ranks compare it, and as `CallMismatch` shows it."""
    more = "".join(f", {name}={value}" for name, value in facts.items())
    return f"{op}({M} x {N} {dtype}{more})"


def interpreted_bf16(a: torch.Tensor) -> bool:
    """Whether `a` must be widened first: Triton's interpreter computes bf16 wrongly."""
    return target.interpreted() and a.dtype == torch.bfloat16


def comm_programs(config: Config) -> int:
    """Programs that consume beside the GEMM."""
    return config.num_comm_programs if config.placement == "beside" else 0
