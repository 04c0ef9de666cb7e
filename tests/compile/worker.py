"""The processes that compile: a pool of them, each for all targets.

Importing this module imports no Triton: `preload`, in the server that forks these processes, or `prepare` first
settles that kernels are compiled and not interpreted, GPUs present or not.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyrocshmem.testing import Compiled
    from tests.compile.cases import Case


def prepare(without: str, cache: str) -> None:
    """Once a process. without: "settle" or "marks", which then do nothing in all that is compiled, or "stores", for
    flags that are raised by atomics; "": none of these.

    cache: Triton's cache folder, the test session's own: what an older run compiled must not count.
    """
    os.environ.update(PYROCSHMEM_BACKEND="cpu", TRITON_INTERPRET="0", TRITON_CACHE_DIR=cache)
    if without:
        from pyrocshmem import signal, trace
        from tests.compile import planted

        if without == "settle":
            signal.settle = planted.settle_nothing
        elif without == "stores":
            signal.raise_flag = planted.raise_by_atomic
        else:
            trace.mark = planted.mark_nothing


class _Recorder:
    """Kernels get their events from here when they are compiled; nothing runs."""

    def __init__(self) -> None:
        import torch

        self.sample = torch.zeros(1 << 20, dtype=torch.int64)

    def events(self, launch: object) -> Any:
        return self.sample

    def copy(self, copy: object, argument: object) -> None:
        pass


def compile_recorded(case: "Case", target_name: str) -> "list[Compiled]":
    """As `compile_case`, of a call that a timeline records."""
    from pyrocshmem import trace

    with trace.recording(_Recorder()):
        return compile_case(case, target_name)


def compile_case(case: "Case", target_name: str) -> "list[Compiled]":
    """Make the call of `case` on `target_name`, and return what its kernels became, in stream order."""
    import torch

    from pyrocshmem import testing

    def call() -> None:
        with torch.no_grad():
            _call(case)

    return testing.compile_call(target_name, call)


def _call(case: "Case") -> None:
    """The op of `case` through its public function."""
    import torch

    from pyrocshmem import collectives, stream_k
    from pyrocshmem.calls.workspace import Workspace
    from pyrocshmem.shards import shard_range
    from pyrocshmem.testing import PlanningHeap

    M, N, K = case.shape
    dtype = getattr(torch, case.dtype)
    arguments: dict[str, Any] = dict(case.arguments)
    if case.op in ("swiglu", "rotate"):
        _pointwise(torch.empty(M, N, dtype=dtype), **arguments)
        return
    if case.op.startswith("quantize"):
        _quantize(case.op, torch.empty(M, N, dtype=dtype), **arguments)
        return
    heap = PlanningHeap(case.world_size)
    if case.op == "rms_norm":
        _norm(torch.empty(M, N, dtype=dtype), heap, arguments)
        return
    if case.op == "all_reduce_rms_norm":
        x, weight = torch.empty(M, N, dtype=dtype), torch.empty(N, dtype=dtype)
        collectives.all_reduce_rms_norm(x, torch.empty_like(x), weight, 1e-6, group=heap, **arguments)
        return
    if case.op == "rms_norm_pair":
        q, k = torch.empty(M, N + N // 4, dtype=dtype).split((N, N // 4), 1)
        weights = (torch.empty(arguments.get("head_dim", x.shape[1]), dtype=dtype) for x in (q, k))
        collectives.rms_norm_pair(q, k, *weights, 1e-6, group=heap, **arguments)
        return
    if hasattr(collectives, case.op):
        getattr(collectives, case.op)(torch.empty(M, N, dtype=dtype), group=heap, **arguments)
        return
    if case.op == "all_gather_gemm":
        arguments["num_rows"] = M
        first, last = shard_range(M, heap.rank, case.world_size)
        M = last - first
    if case.recipe:
        from pyrocshmem.elements import float8

        dtype = float8()[0]
        arguments |= _scales(case.recipe, M, N, K)
    a = _operand(M, K, dtype, case.layouts[0])
    b = _operand(K, N, dtype, case.layouts[1])
    if arguments.get("bias"):
        arguments["bias"] = torch.empty(N, dtype=dtype)
    config = _config(case, dtype, heap.device)
    if case.op == "gemm":
        # A workspace of its own: plans are kept there, and the next target must make its own.
        stream_k.gemm(a, b, config=config, workspace=Workspace(device=heap.device), **arguments)
    elif case.op == "gemm_all_reduce_rms_norm":
        weight = torch.empty(N, dtype=getattr(torch, arguments.get("weight", case.dtype)))
        arguments.pop("weight", None)
        residual = torch.empty(M, N, dtype=getattr(torch, case.dtype))
        stream_k.gemm_all_reduce_rms_norm(
            a, b, residual, weight, 1e-6, group=heap, config=config, **arguments
        )
    elif case.op == "gemm_rms_norm_all_scatter":
        weight = torch.empty(N, dtype=getattr(torch, case.dtype))
        stream_k.gemm_rms_norm_all_scatter(a, b, weight, 1e-6, group=heap, config=config, **arguments)
    else:
        getattr(stream_k, case.op)(a, b, group=heap, config=config, **arguments)


def _scales(recipe: str, M: int, N: int, K: int) -> dict[str, Any]:
    """Of 8-bit operands."""
    import torch

    blocks, columns = -(-K // 128), -(-N // 128)
    shapes = {"rowwise": ((M, 1), (1, N)), "blockwise": ((M, blocks), (blocks, columns))}[recipe]
    # Both as `quantize` lays them out.
    found = (torch.empty(shape[::-1]).t() for shape in shapes)
    return dict(zip(("scale_a", "scale_b"), found, strict=True))


def _operand(rows: int, cols: int, dtype: Any, layout: str) -> Any:
    """A matrix [rows, cols]: "row", "column" (a transposed view), or "odd" (strides that TMA can't address)."""
    import torch

    if layout == "row":
        return torch.empty(rows, cols, dtype=dtype)
    if layout == "column":
        return torch.empty(cols, rows, dtype=dtype).t()
    if layout == "odd":
        return torch.empty(rows, cols + 1, dtype=dtype)[:, :cols]
    raise ValueError(f"layout {layout!r}, allowed are row, column, odd")


def _quantize(op: str, x: Any, **arguments: Any) -> None:
    """Of recipes with scales of their own."""
    from pyrocshmem import stream_k

    if op == "quantize_rms_norm":
        stream_k.quantize_rms_norm(x, x.new_empty(x.shape[1]), 1e-6, residual=x, **arguments)
    else:
        getattr(stream_k, op)(x, **arguments)


def _pointwise(product: Any, kv_heads: int = 0, head_dim: int = 0) -> None:
    """Forward and backward: of two halves, or of heads, two sequences of them."""
    import torch

    from pyrocshmem.stream_k.nn import pointwise

    with torch.enable_grad():
        product.requires_grad_()
        if not kv_heads:
            pointwise._SwiGLU.apply(product).sum().backward()
            return
        heads = product.view(2, product.shape[0] // 2, -1, head_dim)
        turn = (torch.empty(heads.shape[1], head_dim // 2) for _ in range(2))
        made = pointwise._Rotated.apply(heads, *turn, kv_heads)
        torch.autograd.backward(made, [torch.empty_like(x) for x in made])


def _norm(x: Any, heap: Any, arguments: dict[str, Any]) -> None:
    """RMSNorm of x, the columns of one rank, and its derivative; with a residual, unless the result is replicated."""
    import torch

    from pyrocshmem.calls.workspace import workspace_for
    from pyrocshmem.collectives import rms_norm_plan as plan

    hidden, replicated = heap.world_size * x.shape[1], arguments.get("replicated", False)
    weight, residual = torch.empty(x.shape[1], dtype=x.dtype), None if replicated else torch.empty_like(x)
    workspace = workspace_for(heap)
    norm = plan.Norm(1e-6, hidden, replicated, x.dtype)
    y, h, scales = plan.forward(workspace, x, weight, residual, norm)
    more = None if replicated else torch.empty_like(x)
    plan.backward(workspace, torch.empty_like(y), more, h, weight, scales, hidden, x.dtype)


def _config(case: "Case", dtype: Any, device: Any) -> Any:
    import dataclasses

    import torch

    from pyrocshmem import stream_k
    from pyrocshmem.calls.invariance import NONE
    from pyrocshmem.stream_k.choice.config import BY_ROWS
    from pyrocshmem.stream_k.choice.scaled import choose_scaled
    from pyrocshmem.stream_k.local_gemm.scales import Scheme

    changes = dict(case.changes)
    partial = changes.pop("partial_dtype", None)
    partial_dtype = None if partial is None else getattr(torch, str(partial))
    # The latter chooses as a product alone does.
    alone = case.op in ("gemm", "gemm_rms_norm_all_scatter")
    op, world = ("gemm", 1) if alone else (case.op.removesuffix("_rms_norm"), case.world_size)
    if case.recipe:
        scheme = Scheme(case.recipe, fast=False)  # type: ignore[arg-type]
        placement = "after" if alone else changes.pop("placement", None)
        config = choose_scaled(op, *case.shape, world, device, scheme, NONE, placement=placement)
        return dataclasses.replace(config, **changes)
    facts = (op, *case.shape, dtype, world, device, partial_dtype)
    # Of GEMMs alone our own.
    config = stream_k.choose(*facts, placement="after" if alone else None)
    placement = changes.get("placement", config.placement)
    if dict(case.arguments).get("squared_partials") and placement in BY_ROWS:
        placement = "own_stream"
    if placement != config.placement:
        # Programs, rows and chunks were chosen for the other one.
        config = stream_k.choose(*facts, placement=placement)
    return dataclasses.replace(config, **changes)
