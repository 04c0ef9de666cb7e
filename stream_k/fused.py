"""What the fused ops share: the way of a call, planning it the first time it is made, running its launches.

The first call of a kind is planned: all ranks compare what they are about to do (`CallMismatch` when it
differs), allocate, compile and load every kernel, and wait for one another. From then on a call looks its
plan up and launches it: no rendezvous, no allocation but the result's.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pyrocshmem import target
from pyrocshmem.heap import Heap
from stream_k.config import Config, choose, num_multiprocessors
from stream_k.epilogue import ACTIVATIONS
from stream_k.gemm import gemm, with_inner_size
from stream_k.kernel import consumer_kernel
from stream_k.launch import Launch
from stream_k.operands import aligned, check_apart, check_product, kind
from stream_k.product import Product, make_product
from stream_k.workspace import Workspace, find_workspace

Arguments = tuple[Any, ...]


class Request(NamedTuple):
    """A call as the caller made it: the arguments of the public functions, which document them."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor | None
    bias: torch.Tensor | None
    activation: str
    squared_partials: bool
    allow_tf32: bool
    config: Config | None


@dataclass(frozen=True)
class Call:
    """A call that is being planned; every rank brings an equal one, but for the operands.

    request: checked. a, b: its operands, with an inner size of at least 1. out: its output, or one like it.
    direct: peers can write `out` itself. config: the one to use. longest_k: the largest inner size of all
    ranks.
    """

    request: Request
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    direct: bool
    config: Config
    workspace: Workspace
    heap: Heap
    longest_k: int

    def product(self, stores_fp32: bool) -> Product:
        """The GEMM of the call."""
        comm = self.config.num_comm_programs if self.config.placement == "beside" else 0
        how = (self.config, self.request.allow_tf32, comm)
        return make_product(self.a, self.b, *how, stores_fp32=stores_fp32, longest_k=self.longest_k)

    def epilogue_options(self, c_how: int) -> tuple[int, int, int]:
        """The three first OPTIONS of every epilogue."""
        return ACTIVATIONS.index(self.request.activation), int(self.request.bias is not None), c_how


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
    kind_of_plan: type[FusedPlan], request: Request, group: Any, workspace: Workspace | None
) -> Any:
    """Make a call of an op on the heap of `group`: returns out, or (out, squares) where they are asked for."""
    a, b, out, bias = request[:4]
    heap, workspace = find_workspace(group, workspace)
    key = (
        kind_of_plan.name,
        kind(a),
        kind(b),
        kind(bias),
        kind(out),
        symmetric_offset(heap, out),
        *request[4:],
    )
    plan = workspace.plans.get(key)
    if plan is None:
        columns = b.shape[1] if isinstance(b, torch.Tensor) and b.ndim == 2 else 0
        columns *= heap.world_size if kind_of_plan.gathers else 1
        check_product(a, b, bias, request.activation, out, columns)
        simple = _without_plan(kind_of_plan, request, columns, heap, workspace)
        if simple is not None:
            return simple
        plan = _make_plan(kind_of_plan, key, request, columns, heap, workspace)
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
    return (out, plan.squares.view(-1, a.shape[0]).t().clone()) if request.squared_partials else out


def symmetric_offset(heap: Heap, out: torch.Tensor | None) -> int | None:
    """Byte offset of a contiguous `out` on the heap, where peers can write it directly; None for any other
    tensor."""
    if not isinstance(out, torch.Tensor) or not 0 <= out.data_ptr() - heap.base < heap.nbytes:
        return None
    if not out.is_contiguous() or not aligned(out) or not heap.is_symmetric(out):
        return None
    return heap.offset(out)


def _without_plan(
    kind_of_plan: type[FusedPlan], request: Request, columns: int, heap: Heap, workspace: Workspace
) -> Any:
    """The result of a call that needs no plan of its own: one rank, no elements, bf16 on the CPU target. None
    for any other. `columns`: of the result."""
    a, b, out, bias, activation, squared_partials, allow_tf32, config = request
    if a.device != heap.device:
        raise ValueError(f"a is on {a.device}, the heap of this rank on {heap.device}")
    if a.shape[0] == 0 or columns == 0:
        empty = out if out is not None else a.new_empty(a.shape[0], columns)
        return (empty, torch.zeros(a.shape[0], 0, device=a.device)) if squared_partials else empty
    if heap.world_size == 1 and not squared_partials:
        return gemm(a, b, bias=bias, activation=activation, out=out, allow_tf32=allow_tf32, config=config)
    if target.interpreted() and a.dtype == torch.bfloat16:
        # Triton's interpreter computes bf16 wrongly: the same in fp32, rounded once.
        wide_bias = None if bias is None else bias.float()
        wide = request._replace(a=a.float(), b=b.float(), out=None, bias=wide_bias)
        found = fused_gemm(kind_of_plan, wide, heap, workspace)
        value, squares = found if squared_partials else (found, None)
        value = value.bfloat16() if out is None else out.copy_(value)
        return (value, squares) if squared_partials else value
    return None


def _make_plan(
    kind_of_plan: type[FusedPlan],
    key: Hashable,
    request: Request,
    columns: int,
    heap: Heap,
    workspace: Workspace,
) -> FusedPlan:
    """Plan a call: on all ranks together, the first time that they make it. `columns`: of the result."""
    name, out, bias = kind_of_plan.name, request.out, request.bias
    M, K = request.a.shape
    N, dtype = request.b.shape[1], request.a.dtype
    config = request.config
    if config is None:
        config = choose(name, M, N, K, dtype, heap.world_size, heap.device)
    offset = symmetric_offset(heap, out)
    text = (
        f"{name}({M} x {N} {dtype}, bias={bias is not None}, activation={request.activation}, "
        f"squares={request.squared_partials}, tf32={request.allow_tf32}, out_offset={offset}, {config})"
    )
    # Strides and alignment may differ between ranks: a layout that is new on this one alone is planned here
    # alone. `agreed` has the calls that all ranks have compared; their buffers are there.
    agreement = (text, K)
    new = agreement not in workspace.agreed
    if new:
        workspace.agreed[agreement] = max(int(size) for size in heap.vote(text, str(K).encode()))
    a, b = with_inner_size(request.a, request.b)
    example = out if out is not None else torch.empty(M, columns, dtype=dtype, device=a.device)
    longest_k = max(1, workspace.agreed[agreement])
    call = Call(request, a, b, example, offset is not None, config, workspace, heap, longest_k)
    plan = kind_of_plan(call)
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
