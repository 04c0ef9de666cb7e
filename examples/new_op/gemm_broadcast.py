"""An op from outside the library: C = A x B, computed by one rank, on every rank.

    from examples.new_op.gemm_broadcast import gemm_broadcast
    c = gemm_broadcast(a, b, root=0, group=heap)        # a [M, K], b [K, N]: of the root; C [M, N] on every rank

docs/adding-an-op.md goes through this file: the kernel part, a plan for each placement, the gradient, the reference,
and `OP`, by which everything else learns of it.

Protocol of placement "push". The root's GEMM begins once all ranks have entered the call, hence are done with what the
result held before; its epilogue stores each tile R times, into every rank's result. When it has ended, one small
program raises a flag at every rank, and the others wait for it:

    root   GEMM, tiles into all results --> announce --flag--> end
    other  enter ...................................... wait  end
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from pyrocshmem import signal
from pyrocshmem.calls.operators import find, once, ops, ranks
from pyrocshmem.calls.tensors import POINTER
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives.epilogue import Finish, Options, activation_number, finished, store_block
from pyrocshmem.collectives.exchange import Exchange
from pyrocshmem.device import others
from pyrocshmem.stream_k.choice import verdicts
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.choice.placement import Placement
from pyrocshmem.stream_k.local_gemm.operands import check_product
from pyrocshmem.stream_k.local_gemm.plan import GemmPlan
from pyrocshmem.stream_k.ops.gradients import Gradients, b_gradient, bias_gradient, keep
from pyrocshmem.stream_k.ops.op import Call, GemmOp, Request, call, register_gemm, run
from pyrocshmem.stream_k.ops.planned import FusedPlan
from pyrocshmem.stream_k.ops.steps import step_arguments, step_launch

_POINTER = tl.constexpr(POINTER)


def gemm_broadcast(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    root: int = 0,
    group: Any = None,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    out: torch.Tensor | None = None,
    config: Config | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """activation(a @ b + bias) of rank `root` of `group`, [M, N], on every rank.

    a: [M, K], b: [K, N], bias: [N], of the same shapes and dtypes on all ranks; on others than the root their values
    don't matter. Raises ValueError for a root that is none, and as `stream_k.gemm_all_reduce` does.
    """
    request = Request(a, b, out, bias, activation, False, False, config, options=(root,))
    return call(OP, request, group, workspace)


class Extra(NamedTuple):
    """What `push_tile` has beside its tile."""

    finish: Any


@triton.jit
def push_tile(
    parts, tile, row, row_end, tile_n, epoch, c, extra, context, problem,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Epilogue: the tile into every rank's result, at the same place of each heap. `c` is this rank's."""
    N = problem.N
    PART_N: tl.constexpr = BLOCK_N // len(parts)
    places = others(c, tl.load(context.control + signal.RANK), context.heap_bases, WORLD) + (c,)
    for i in tl.static_range(len(parts)):
        col = tile_n * BLOCK_N + i * PART_N
        value = finished(parts[i], extra.finish, col, N, PART_N, OPTIONS.activation)
        for k in tl.static_range(WORLD):
            store_block(places[k], row, col, value, row_end, N, N, 1, _POINTER, BLOCK_M, PART_N)


class _Push(FusedPlan):
    """The root: its GEMM, then the announcement. Others: one launch that enters the call, waits and ends it."""

    def __init__(self, call: Call) -> None:
        heap, self.workspace = call.heap, call.workspace
        (root,), self.rank, self.world = call.request.options, heap.rank, heap.world_size
        self.is_root, self.flags = heap.rank == root, self.workspace.flags(1)
        M, N = call.out.shape
        self.result: torch.Tensor | None = None
        if not call.direct:
            self.result = self.workspace.buffer("results", M * N, call.out.dtype)[: M * N].view(M, N)
        # Word number 0, raised by the root at all others.
        others = ((1 << self.world) - 1) ^ (1 << root)
        receivers, senders = (others, 0) if self.is_root else (0, 1 << root)
        self.step_arguments = step_arguments(self.workspace, self.flags, receivers=receivers, senders=senders)
        self.step = step_launch(self.workspace, OP.number, enters=not self.is_root, ends=True)
        if self.is_root:
            self.product = call.product(stores_fp32=call.out.dtype == torch.float32)
            self.fix_up = self.product.fix_up(self.workspace)
            options = Options(POINTER, activation_number(call.request.activation))
            # LAG 0: no tile is stored before every rank has entered this call.
            self.gemm = self.product.launch(OP.number, self.world, push_tile, options, lag=0)

    def _arguments(self, a: Any, b: Any, bias: Any, out: torch.Tensor) -> Any:
        c = out if self.result is None else self.result
        extra = Extra(Finish.of(bias))
        return self.product.arguments(a, b, c, self.fix_up, extra, self.workspace.context)

    def compile(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        if self.is_root:
            self.gemm.compile(self._arguments(a, b, bias, out))
        self.step.compile_once(lambda: self.step_arguments)

    def run(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        if self.is_root:
            a, b = self.product.readable(a, b)
            self.gemm(self._arguments(a, b, bias, out))
        self.step(self.step_arguments)


class _Messages(FusedPlan):
    """The root's GEMM into memory, and a broadcast of that by messages, which all ranks take part in."""

    def __init__(self, call: Call) -> None:
        request, self.workspace = call.request, call.workspace
        (root,), (M, N), dtype = request.options, call.out.shape, call.out.dtype
        self.result: torch.Tensor | None = None
        if not call.out.is_contiguous():
            self.result = self.workspace.buffer("own results", M * N, dtype, local=True)[: M * N].view(M, N)
        self.made = self.workspace.buffer("own product", M * N, dtype, local=True)[: M * N].view(M, N)
        self.gemm: GemmPlan | None = None
        if call.heap.rank == root:
            more = (request.bias, request.activation, self.made, self.workspace)
            self.gemm = GemmPlan(call.a, call.b, call.config, request.allow_tf32, *more)
            self.product = self.gemm.product
        written = call.out if self.result is None else self.result
        self.exchange = Exchange(self.workspace, OP.number, "broadcast", self.made, written, root)

    def compile(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Nothing: both parts are compiled when they are planned."""

    def run(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        if self.gemm is not None:
            self.gemm.run(a, b, bias, self.made)
        self.exchange.run(self.made, out if self.result is None else self.result)


def _make_plan(call: Call) -> FusedPlan:
    (root,), world = call.request.options, call.heap.world_size
    if not isinstance(root, int) or not 0 <= root < world:
        raise ValueError(f"root is {root!r}, the group has ranks 0 to {world - 1}")
    return _Push(call) if call.config.placement == "push" else _Messages(call)


def _arguments(request: Request, group: str) -> tuple[Any, ...]:
    """The schema's arguments."""
    a, b, bias, activation = request.a, request.b, request.bias, request.activation
    return a, b, request.options[0], group, bias, activation


def _run(a: torch.Tensor, b: torch.Tensor, root: int, group: str, bias: Any, activation: str) -> torch.Tensor:
    """The call by the schema's arguments."""
    request = Request(a, b, None, bias, activation, False, False, None, options=(root,))
    return run(OP, request, *find(group))


def _shapes(
    a: torch.Tensor, b: torch.Tensor, root: int, group: str, bias: Any, activation: str
) -> torch.Tensor:
    M, N, _ = check_product(a, b, bias, activation)
    return a.new_empty(M, N)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, ctx.root, ctx.group, bias, activation = inputs
    ctx.needs, ctx.allow_tf32 = (*ctx.needs_input_grad[:2], ctx.needs_input_grad[4]), False
    keep(ctx, a, b, bias, activation)


@once
def _backward(ctx: Any, grad: torch.Tensor) -> Gradients:
    """Every rank has the whole gradient of C, the same on all: A's and B's are the root's alone, zeros elsewhere."""
    a, b = ctx.saved_tensors
    if ranks(ctx.group)[0] != ctx.root:
        grad = torch.zeros_like(grad)
    grad_a = ops.gemm(grad, b.t(), None, "none", False, "") if b is not None else None
    grad_b = b_gradient(ctx, a, grad) if a is not None else None
    return grad_a, grad_b, None, None, bias_gradient(ctx, grad), None


def reference(a: torch.Tensor, b: torch.Tensor, root: int = 0, group: Any = None) -> torch.Tensor:
    """The same with torch.distributed: matmul, then broadcast."""
    c = a @ b
    dist.broadcast(c, dist.get_global_rank(group, root) if group is not None else root, group)
    return c


OP = register_gemm(
    GemmOp(
        name="gemm_broadcast",
        package="new_op",
        holds="M x K, K x N; the root's count",
        result="the root's A x B, M x N",
        steps="matmul, then broadcast",
        reference=reference,
        # Asked in this order; the first that suits a call's sizes is taken where no config is given.
        placements=(Placement("messages", verdicts.few_tiles), Placement("push", verdicts.otherwise)),
        plan=_make_plan,
        schema="(Tensor a, Tensor b, int root, str group, Tensor? bias, str activation) -> Tensor",
        arguments=_arguments,
        run=_run,
        shapes=_shapes,
        keep=_keep,
        backward=_backward,
    )
)
