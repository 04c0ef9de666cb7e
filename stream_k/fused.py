"""What the fused ops share: the way of a call, planning it the first time it is made, running its launches.

The first call of a kind is planned: all ranks compare what they are about to do (`CallMismatch` when it
differs), allocate, compile and load every kernel, and wait for one another. From then on a call looks its
plan up and launches it: no rendezvous, no allocation but the result's.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from pyrocshmem import target
from pyrocshmem.heap import Heap, heap_for
from stream_k.config import Config, choose, num_multiprocessors
from stream_k.gemm import gemm, with_inner_size
from stream_k.kernel import consumer_kernel
from stream_k.launch import Launch
from stream_k.operands import aligned, check_apart, check_product, kind
from stream_k.product import Product, make_product
from stream_k.workspace import Workspace, workspace_for

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """A call that is being planned; every rank brings an equal one, but for the operands.

    operands: a, b, bias, out, checked. direct: peers can write `out` itself. config: chosen. longest_k: the
    largest inner size of all ranks.
    """

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    direct: bool
    activation: str
    squared_partials: bool
    allow_tf32: bool
    config: Config
    workspace: Workspace
    heap: Heap
    longest_k: int

    def product(self, stores_fp32: bool) -> Product:
        """The GEMM of the call."""
        comm = self.config.num_comm_programs if self.config.placement == "beside" else 0
        return make_product(
            self.a,
            self.b,
            self.config,
            self.allow_tf32,
            comm,
            stores_fp32=stores_fp32,
            longest_k=self.longest_k,
        )


class FusedPlan:
    """The launches of an op for operands of one kind, and the buffers that they share. Ops derive from it.

    name: of the op. gathers: the result has the columns of all ranks side by side. launches: in stream order.
    result: on the heap, to be copied out; None: the op writes `out` itself. squares: fp32 [tiles x M], where
    asked for. columns: of the result.
    """

    name: str
    gathers: bool
    launches: list[Launch]
    result: torch.Tensor | None
    squares: torch.Tensor
    columns: int

    def __init__(self, call: Call) -> None:
        raise NotImplementedError

    def arguments(
        self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> tuple[Arguments, Arguments]:
        """Arguments of the GEMM, and of the consumer's launch if there is one."""
        raise NotImplementedError


def fused_gemm(
    kind_of_plan: type[FusedPlan],
    a: torch.Tensor,
    b: torch.Tensor,
    group: Any,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    squared_partials: bool,
    allow_tf32: bool,
    config: Config | None,
    workspace: Workspace | None,
) -> Any:
    """A call of an op: the arguments are those of the public functions, which document them."""
    heap = heap_for(group)
    workspace = _workspace_of(heap, workspace)
    how = (activation, squared_partials, allow_tf32, config)
    key = (kind_of_plan.name, kind(a), kind(b), kind(bias), kind(out), symmetric_offset(heap, out), *how)
    plan = workspace.plans.get(key)
    if plan is None:
        columns = b.shape[1] if isinstance(b, torch.Tensor) and b.ndim == 2 else 0
        shape = check_product(
            a, b, bias, activation, out, columns * (heap.world_size if kind_of_plan.gathers else 1)
        )
        simple = _without_plan(kind_of_plan, a, b, shape, heap, out, bias, *how, workspace)
        if simple is not None:
            return simple
        plan = _make_plan(kind_of_plan, key, a, b, out, bias, *how, workspace)
    elif out is not None:
        check_apart(out, a, b, bias)
    if out is None:
        out = torch.empty(a.shape[0], plan.columns, dtype=a.dtype, device=a.device)
    a, b = with_inner_size(a, b)
    with workspace:
        for launch, args in zip(plan.launches, plan.arguments(a, b, bias, out), strict=False):
            launch(args)
    if plan.result is not None:
        out.copy_(plan.result)
    return (out, plan.squares.view(-1, a.shape[0]).t().clone()) if squared_partials else out


def _workspace_of(heap: Heap, workspace: Workspace | None) -> Workspace:
    if workspace is not None and workspace.heap is not heap:
        raise ValueError(f"the workspace belongs to {workspace.heap!r}, the group's heap is {heap!r}")
    return workspace if workspace is not None else workspace_for(heap)


def symmetric_offset(heap: Heap, out: torch.Tensor | None) -> int | None:
    """Byte offset of a contiguous `out` on the heap, where peers can write it directly; None for any other
    tensor."""
    if not isinstance(out, torch.Tensor) or not 0 <= out.data_ptr() - heap.base < heap.nbytes:
        return None
    if not out.is_contiguous() or not aligned(out) or not heap.is_symmetric(out):
        return None
    return heap.offset(out)


def _without_plan(
    kind_of_plan: type[FusedPlan],
    a: torch.Tensor,
    b: torch.Tensor,
    shape: tuple[int, int, int],
    heap: Heap,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    squared_partials: bool,
    allow_tf32: bool,
    config: Config | None,
    workspace: Workspace,
) -> Any:
    """The result of a call that needs no plan of its own: one rank, no elements, bf16 on the CPU target. None
    for any other."""
    M, N, _ = shape
    if a.device != heap.device:
        raise ValueError(f"a is on {a.device}, the heap of this rank on {heap.device}")
    if min(M, N) == 0:
        columns = N * (heap.world_size if kind_of_plan.gathers else 1)
        empty = out if out is not None else a.new_empty(M, columns)
        return (empty, torch.zeros(M, 0, device=a.device)) if squared_partials else empty
    if heap.world_size == 1 and not squared_partials:
        return gemm(a, b, bias=bias, activation=activation, out=out, allow_tf32=allow_tf32, config=config)
    if target.interpreted() and a.dtype == torch.bfloat16:
        # Triton's interpreter computes bf16 wrongly: the same in fp32, rounded once.
        wide_bias = None if bias is None else bias.float()
        wide = fused_gemm(
            kind_of_plan,
            a.float(),
            b.float(),
            heap,
            None,
            wide_bias,
            activation,
            squared_partials,
            allow_tf32,
            config,
            workspace,
        )
        value, squares = wide if squared_partials else (wide, None)
        value = value.bfloat16() if out is None else out.copy_(value)
        return (value, squares) if squared_partials else value
    return None


def _make_plan(
    kind_of_plan: type[FusedPlan],
    key: Hashable,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    squared_partials: bool,
    allow_tf32: bool,
    config: Config | None,
    workspace: Workspace,
) -> FusedPlan:
    """Plan a call: on all ranks together, the first time that they make it."""
    heap = workspace.heap
    assert heap is not None
    name, M, N = kind_of_plan.name, a.shape[0], b.shape[1]
    offset = symmetric_offset(heap, out)
    chosen = (
        config
        if config is not None
        else choose(name, M, N, a.shape[1], a.dtype, heap.world_size, heap.device)
    )
    text = (
        f"{name}({M} x {N} {a.dtype}, bias={bias is not None}, {activation=}, squares={squared_partials}, "
        f"tf32={allow_tf32}, out_offset={offset}, {chosen})"
    )
    a, b = with_inner_size(a, b)
    columns = N * (heap.world_size if kind_of_plan.gathers else 1)
    example = out if out is not None else torch.empty(M, columns, dtype=a.dtype, device=a.device)
    # Strides and alignment may differ between ranks: a layout that is new on this one alone is planned here
    # alone. `agreed` has the calls that all ranks have compared; their buffers are there.
    agreement = (text, a.shape[1])
    new = agreement not in workspace.agreed
    if new:
        sizes = heap.vote(text, str(a.shape[1]).encode())
        workspace.agreed[agreement] = max(int(size) for size in sizes)
    options = (activation, squared_partials, allow_tf32, chosen, workspace, heap, workspace.agreed[agreement])
    plan = kind_of_plan(Call(a, b, bias, example, offset is not None, *options))
    plan.columns = columns
    for launch, args in zip(plan.launches, plan.arguments(a, b, bias, example), strict=False):
        launch.compile(args)
    if new:
        # A rank that compiles longer than the others must not eat into their kernels' wait budget.
        heap.vote(f"{text}: ready")
    workspace.plans[key] = plan
    return plan


def consumer_launch(
    product: Product, consumer: Any, options: tuple[int, ...], world_size: int, device: torch.device
) -> Launch:
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
