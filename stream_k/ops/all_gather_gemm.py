"""`all_gather_gemm`: the rows of all ranks times the columns of this one.

Copy engines push this rank's rows to its peers, first to the one that needs them first, while the GEMM multiplies this
rank's own rows; then the GEMM takes the peers' blocks, piece by piece, in the order in which they arrive. Or the BLAS multiplies
them, a block at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pyrocshmem import signal, status, trace
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.operators import dispatched, find, name_of, needs_gradient, once, ops, ranks
from pyrocshmem.calls.tensors import (
    BLOCKS,
    POINTER,
    ROW,
    as_argument,
    filled,
    how_to_write,
    template,
)
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives.epilogue import PLAIN, Finish, Options, Output, activation_number, store_output
from pyrocshmem.collectives.exchange import Exchange
from pyrocshmem.counts import packed
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.heap import Heap
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.choice import rules, tilings, variants
from pyrocshmem.stream_k.choice.config import BY_MESSAGE, Config
from pyrocshmem.stream_k.choice.placement import Placement
from pyrocshmem.stream_k.local_gemm.blas import BlasPlan
from pyrocshmem.stream_k.local_gemm.kernel import Arrived
from pyrocshmem.stream_k.local_gemm.operands import check_product
from pyrocshmem.stream_k.local_gemm.plan import GemmPlan, plan_gemm
from pyrocshmem.stream_k.ops.batches import by_rows, gathered, is_batched
from pyrocshmem.stream_k.ops.gradients import (
    Gradients,
    b_gradient,
    bias_gradient,
    both_gradients,
    keep,
)
from pyrocshmem.stream_k.ops.op import Call, GemmOp, Request, register_gemm, run, through_operator
from pyrocshmem.stream_k.ops.planned import FusedPlan, in_passing
from pyrocshmem.stream_k.ops.rows import step_launch
from pyrocshmem.stream_k.ops.several import Several, as_list, define_several, whole_rows
from pyrocshmem.stream_k.ops.several import call as call_several

_COPIES = 0


def all_gather_gemm(
    a: torch.Tensor,
    b: torch.Tensor | Sequence[torch.Tensor],
    *,
    num_rows: int | None = None,
    group: Any = None,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    activation: str = "none",
    allow_tf32: bool = False,
    config: Config | None = None,
    partial_dtype: torch.dtype | None = None,
    save_gathered: bool = True,
    workspace: Workspace | None = None,
) -> Any:
    """activation(A @ b + bias), A being all ranks' rows of a, one block below the other: the same bits on every run.

    a: [M/R, K]: this rank's rows, any strides, though rows that aren't contiguous cost a copy. Or [D/R, .., K]: ranks'
    blocks follow one another along the first dimension, and the result is [D, .., N/R]. b: [K, N/R]: its columns, as
    many as it likes, even none; any strides. Both float16, bfloat16 or float32. bias: [N/R], of its columns.
    Several Bs: a list of them, each with as many columns as it likes, for one gather: the result is a list, too, and
    bias and out are None or a list of tensors and Nones (`stream_k.ops.several`).
    num_rows: M. None: R times the rows of `a`. Needed where M is no multiple of R; rank r then holds block r of
    `torch.tensor_split(A, R)`. D is always a multiple of R.
    out: [M, N/R], any strides. None: a new tensor.
    activation, allow_tf32, group, config, workspace, gradients: as in `gemm_all_reduce`. partial_dtype: what partial
    sums of a's gradient travel in, as there. save_gathered: keep A, [M, K], for b's gradient; False: gather it once
    more then.

    Returns out. `a` may be overwritten once the call is done on the caller's stream. Nothing waits for the device: a
    peer's fault shows at the next call, or at `heap.synchronize()`. Raises TypeError, ValueError before any
    launch; `CallMismatch`, `PeerTimeout`, `PeerAborted`, `HeapOutOfMemory`, `WorkspaceBusy`.
    """
    if is_batched(a):
        more: Any = {"bias": bias, "activation": activation, "allow_tf32": allow_tf32, "config": config}
        more |= {"partial_dtype": partial_dtype, "save_gathered": save_gathered}
        more |= {"group": group, "workspace": workspace}
        first = gathered(a, ranks(name_of(group, workspace))[1], num_rows)
        return by_rows(lambda a, out: all_gather_gemm(a, b, out=out, **more), a, out, first)
    if isinstance(b, (list, tuple)):
        lists = ([*b], as_list("bias", bias, len(b)), as_list("out", out, len(b)))
        x = Several(a, *lists, activation, allow_tf32, config, partial_dtype, num_rows)
        return call_several(OP, x, save_gathered, group, workspace)
    request = Request(a, b, out, bias, activation, False, allow_tf32, config, partial_dtype, num_rows)
    if dispatched(a, b, bias, whole=out is None and config is None):
        # Only for a gradient of b.
        saves = save_gathered and needs_gradient((b,))
        return through_operator(OP, request._replace(save_gathered=saves), name_of(group, workspace))
    return run(OP, request._replace(a=whole_rows(a)), group, workspace)


def _run(
    a: torch.Tensor, b: torch.Tensor, group: str, num_rows: int, bias: Any, activation: str, allow_tf32: bool,
    partial_dtype: Any, save_gathered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The call by the schema's arguments; nothing in the gathered A's place where it is not wanted."""
    more = (bias, activation, False, allow_tf32, None, None, num_rows, save_gathered)
    request = Request(whole_rows(a), b, None, *more)
    found = run(OP, request, *find(group))
    return found if save_gathered else (found, a.new_empty(0, a.shape[1]))


def _shapes(
    a: torch.Tensor, b: torch.Tensor, group: str, num_rows: int, bias: Any, activation: str, allow_tf32: bool,
    partial_dtype: Any, save_gathered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _, N, K = check_product(a, b, bias, activation)
    return a.new_empty(num_rows, N), a.new_empty(num_rows if save_gathered else 0, K)


def _arguments(request: Request, group: str) -> tuple[Any, ...]:
    """The schema's arguments."""
    a, b, bias, activation, num_rows = (
        request.a,
        request.b,
        request.bias,
        request.activation,
        request.num_rows,
    )
    num_rows = a.shape[0] * ranks(group)[1] if num_rows is None else num_rows
    more = (request.allow_tf32, request.partial_dtype, request.save_gathered)
    return a, b, group, num_rows, bias, activation, *more


class _CopyPlan(FusedPlan):
    def __init__(self, call: Call) -> None:
        # Split tiles would come first, when only this rank's rows are there.
        call = replace(call, config=replace(call.config, split="none"))
        heap, workspace = call.heap, call.workspace
        world = heap.world_size
        self.workspace, self.rank, self.world = workspace, heap.rank, world
        self.result = None
        M, K = call.num_rows, call.a.shape[1]
        # Every block has as many pieces, on all ranks alike, though blocks may differ by a row.
        most = -(-M // world)
        height = self._piece_rows(call.config, most)
        self.num_pieces = -(-most // height)
        self.flags = workspace.flags(self.num_pieces)
        self.rows = in_passing(workspace, M * K, call.a.dtype).view(M, K)
        self.block = first, last = shard_range(M, heap.rank, world)
        self.pieces = [
            self._copy(
                heap, piece, slice(begin, min(begin + height, last - first)), (heap.rank - turn) % world
            )
            for turn in range(1, world)
            for piece, begin in enumerate(range(0, most, height))
        ]
        self.epoch = workspace.control[int(signal.CURRENT.value) :][:1]
        op = int(status.Op.ALL_GATHER_GEMM)
        self.enter, self.end = step_launch(op, world, enters=True), step_launch(op, world, ends=True)
        self.gemm: Launch | None = None
        self.senders = ((1 << world) - 1) ^ (1 << heap.rank)
        if call.b.shape[1] > 0:
            self.senders = 0  # the GEMM waits for the peers' rows
            self._plan_gemm(call)

    def _piece_rows(self, config: Config, most: int) -> int:
        """Of a block of at most so many rows."""
        return min(config.chunk * config.block_m, most)

    def _copy(
        self, heap: Heap, piece: int, rows: slice, peer: int
    ) -> tuple[torch.Tensor, slice, torch.Tensor]:
        """(to, which of the own rows, flag) of a piece."""
        word = piece * int(signal.MAX_WORLD.value) + self.rank
        to = heap.peer_view(self.rows[self.block[0] : self.block[1]][rows], peer)
        return to, rows, heap.peer_view(self.flags[word : word + 1], peer)

    def _plan_gemm(self, call: Call) -> None:
        config, world = call.config, self.world
        # A rank without rows multiplies a stand-in and stores nothing of it: no descriptor has 0 rows.
        self.stand_in = call.a.new_zeros(1, call.a.shape[1]) if call.a.shape[0] == 0 else None
        if self.stand_in is not None:
            call = replace(call, a=self.stand_in)
        self.product = product = call.product(ELEMENTS[call.out.dtype].wide, row_blocks=world, keeps_a=True)
        M = product.M
        self.gathered = as_argument(self.rows, product.a_how, config.block_m, config.block_k)
        self.c_how = how_to_write(call.out)
        if self.c_how == ROW and M % (world * config.block_m) != 0:
            # Blocks end inside a tile, whose last rows belong to the next block and are left alone.
            self.c_how = BLOCKS if M % world == 0 else POINTER
        out = call.out.unflatten(0, (world, -1)) if self.c_how == BLOCKS else call.out
        self.c_template = template(out, self.c_how, config.block_m, product.part_n)
        self.strides = (call.out.stride(0), call.out.stride(1))
        self.fix_up = product.fix_up(self.workspace)
        op = int(status.Op.ALL_GATHER_GEMM)
        activation = activation_number(call.request.activation)
        self.gemm = product.launch(op, world, store_output, Options(self.c_how, activation), order="GATHERS")

    def _gemm_arguments(
        self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> tuple[Any, ...]:
        product = self.product
        a = a if self.stand_in is None else self.stand_in
        c, arrived = filled(self.c_template, out), Arrived(self.flags, packed(product.config.chunk))
        extra = Output(PLAIN if bias is None else Finish.of(bias), *self.strides)
        context = self.workspace.context
        return product.arguments(a, b, c, self.fix_up, extra, context, self.gathered, arrived)

    def _step_arguments(self, senders: int = 0) -> tuple[Any, ...]:
        return (self.flags, self.flags, 0, 0, 0, 0, self.num_pieces - 1, senders, self.workspace.context)

    def compile(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        if self.gemm is not None:
            self.gemm.compile(self._gemm_arguments(a, b, bias, out))
        for launch in (self.enter, self.end):
            launch.compile(self._step_arguments())

    def run(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        workspace = self.workspace
        if self.gemm is not None:
            a, b = self.product.readable(a, b)
        workspace.fork(_COPIES)
        # What runs in order would wait for copies that come after it.
        gemm_last = workspace.runs_in_order()
        if self.gemm is not None and not gemm_last:
            self.gemm(self._gemm_arguments(a, b, bias, out))
        with workspace.beside(_COPIES):
            self.enter(self._step_arguments())
            self._push(a)
        if self.gemm is not None and gemm_last:
            self.gemm(self._gemm_arguments(a, b, bias, out))
        workspace.join(_COPIES)
        self.end(self._step_arguments(self.senders))

    def _push(self, a: torch.Tensor) -> None:
        for to, rows, flag in self.pieces:
            trace.copy(to.copy_, a[rows])
            flag.copy_(self.epoch)

    def second(self, a: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks."""
        first, last = self.block
        K = a.shape[1]
        return torch.cat((self.rows[:first, :K], a, self.rows[last:, :K]))


class _BlocksPlan(_CopyPlan):
    """Whole blocks of rows, a product each: this rank's, then its peers' in the order in which they arrive. blocks: their
    owners, which rows they are, and the product; none of a rank without columns."""

    blocks: tuple[tuple[int, slice, GemmPlan | BlasPlan], ...] = ()

    def _piece_rows(self, config: Config, most: int) -> int:
        return most

    def _plan_gemm(self, call: Call) -> None:
        request, world = call.request, self.world
        self.wait = step_launch(int(status.Op.ALL_GATHER_GEMM), world)
        for turn in range(world):
            owner = (self.rank + turn) % world
            rows = slice(*shard_range(call.num_rows, owner, world))
            if rows.start == rows.stop:
                self.senders |= 1 << owner  # nothing to multiply, but its flag comes
                continue
            a = self.rows[rows] if turn else call.a
            more = (call.config, request.allow_tf32, request.bias, request.activation)
            gemm = plan_gemm(a, call.b, *more, call.out[rows], self.workspace)
            self.blas |= isinstance(gemm, BlasPlan)
            self.blocks = (*self.blocks, (owner, rows, gemm))
        self.senders &= ~(1 << self.rank)

    @property
    def replayable(self) -> bool:
        return not self.blas and all(gemm.replayable for *_, gemm in self.blocks)

    def compile(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        waits = [self.wait] if self.blocks else []
        for launch in (self.enter, *waits, self.end):
            launch.compile(self._step_arguments())

    def run(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        # Before the products, not beside the first: while the BLAS has every SM no kernel finds room.
        self.enter(self._step_arguments())
        self.workspace.fork(_COPIES)
        with self.workspace.beside(_COPIES):
            self._push(a)
        for owner, rows, gemm in self.blocks:
            if owner != self.rank:
                self.wait(self._step_arguments(1 << owner))
            gemm.run(a if owner == self.rank else self.rows[rows], b, bias, out[rows])
        self.workspace.join(_COPIES)
        self.end(self._step_arguments(self.senders))


class _MessagePlan(FusedPlan):
    """All ranks' rows by messages, then the GEMM."""

    def __init__(self, call: Call) -> None:
        config, request, workspace = call.config, call.request, call.workspace
        self.workspace, self.result = workspace, None
        M, N = call.num_rows, call.b.shape[1]
        # Rounded up to whole tiles, so that the GEMM may read rows behind the last.
        rows, K = -(-M // config.block_m) * config.block_m, call.a.shape[1]
        held = workspace.buffer("own gathered", rows * K, call.a.dtype, local=True)
        self.gathered = held[: M * K].view(M, K)
        # A rank without columns only sends its rows.
        self.gemm: GemmPlan | BlasPlan | None = None
        if N > 0:
            options = (request.allow_tf32, request.bias, request.activation)
            self.gemm = plan_gemm(self.gathered, call.b, config, *options, call.out, workspace)
            if isinstance(self.gemm, BlasPlan):
                self.blas = True
            else:
                self.product = self.gemm.product
        op = status.Op.ALL_GATHER_GEMM
        self.exchange = Exchange(workspace, op, "all_gather", call.a, self.gathered, rows=M)

    def compile(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Both parts are compiled when they are planned."""

    def run(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Enqueue the call."""
        self.exchange.run(a, self.gathered)
        if self.gemm is not None:
            self.gemm.run(self.gathered, b, bias, out)

    def second(self, a: torch.Tensor) -> torch.Tensor:
        """The gathered rows, as a new tensor."""
        return self.gathered[:, : a.shape[1]].clone()


def _make_plan(call: Call) -> FusedPlan:
    if call.config.placement in BY_MESSAGE:
        return _MessagePlan(call)
    return _BlocksPlan(call) if call.config.placement == "blas_blocks" else _CopyPlan(call)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """`setup_context` of `all_gather_gemm`: keeps the gathered A in the place of A where the call made it."""
    a, b, ctx.group, ctx.num_rows, bias, activation, ctx.allow_tf32, ctx.partial_dtype, ctx.saved = inputs
    ctx.needs = (*ctx.needs_input_grad[:2], ctx.needs_input_grad[4])
    # Zeros in the gathered A's place would be made for nothing.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.zeros = functools.partial(torch.zeros, output[0].shape, dtype=a.dtype, device=a.device)
    keep(ctx, output[1] if ctx.saved else a, b, bias, activation)


@once
def _backward(ctx: Any, grad: torch.Tensor | None, _: Any) -> Gradients:
    """Backward of `all_gather_gemm`. Without a gradient it communicates too: the peers may have one."""
    a, b = ctx.saved_tensors
    grad = ctx.zeros() if grad is None else grad
    if a is not None and not ctx.saved:
        none = a.new_empty(a.shape[1], 0)
        more = (ctx.num_rows, None, "none", ctx.allow_tf32, None, True)
        _, a = ops.all_gather_gemm(a, none, ctx.group, *more)

    def for_a() -> torch.Tensor:
        more = (None, "none", ctx.allow_tf32, ctx.partial_dtype)
        return ops.gemm_reduce_scatter(grad, b.t(), ctx.group, *more)

    def for_b() -> torch.Tensor:
        return b_gradient(ctx, a, grad)

    grad_a, grad_b = both_gradients(ctx, for_a, for_b, grad)
    return grad_a, grad_b, None, None, bias_gradient(ctx, grad), None, None, None, None


# In the order in which they are asked; those behind the first that suits any sizes are had by name.
_PLACEMENTS = (
    Placement("blas_blocks", rules.blocks_for_blas),
    Placement("unfused", rules.few_gathered_bytes_for_blas),
    Placement("messages", rules.few_gathered_bytes, variants=variants.nothing),
    Placement(
        "copy_engine",
        rules.otherwise,
        rules.gathered_pieces,
        tilings.gathered,
        variants.gathered,
        blocks=True,
        whole_tiles=True,
    ),
)

OP = register_gemm(
    GemmOp(
        name="all_gather_gemm",
        package="stream_k",
        holds="M/R x K, K x N/R",
        result="all rows, its own columns, M x N/R",
        command="all_gather",
        steps="all_gather, then matmul",
        reference="all_gather_gemm",
        a_cut="M",
        b_cut="N",
        out_cut="N",
        placements=_PLACEMENTS,
        plan=_make_plan,
        schema="(Tensor a, Tensor b, str group, SymInt num_rows, Tensor? bias, str activation, bool allow_tf32, "
        "ScalarType? partial_dtype, bool save_gathered) -> (Tensor, Tensor)",
        arguments=_arguments,
        run=_run,
        shapes=_shapes,
        keep=_keep,
        backward=_backward,
    )
)
define_several(OP)
