"""`gemm_all_scatter`: the column-parallel product, every rank's columns on every rank. The protocol is
`collectives.scatter_tiles`'s."""

from __future__ import annotations

from typing import Any

import torch

from pyrocshmem import status
from pyrocshmem.calls.operators import once, ranks
from pyrocshmem.calls.tensors import POINTER, filled, how_to_write, template
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives import scatter_tiles as tiles
from pyrocshmem.collectives.epilogue import PLAIN, Finish, activation_number
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.stream_k.choice import completed, tilings, variants, verdicts
from pyrocshmem.stream_k.choice.config import BY_MESSAGE, BY_ROWS, Config
from pyrocshmem.stream_k.choice.placement import Placement
from pyrocshmem.stream_k.local_gemm.scales import Operand, scaling_of
from pyrocshmem.stream_k.ops import over_hosts
from pyrocshmem.stream_k.ops.by_message import MessagePlan
from pyrocshmem.stream_k.ops.columns import ColumnsPlan
from pyrocshmem.stream_k.ops.gradients import (
    Gradients,
    bias_gradient,
    keep_sum,
    of_columns,
)
from pyrocshmem.stream_k.ops.op import (
    NO_SCALES,
    Call,
    GemmOp,
    Request,
    call,
    consumer_launches,
    register_gemm,
)
from pyrocshmem.stream_k.ops.planned import ByRole, FusedPlan


def gemm_all_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    squared_partials: bool = False,
    allow_tf32: bool = False,
    config: Config | None = None,
    partial_dtype: torch.dtype | None = None,
    workspace: Workspace | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Any:
    """activation(a @ b + bias) of every rank, side by side, on every rank: the same bits on all of them and
    on every run.

    a: [M, K] or [.., M, K], whose dimensions the results have then, b: [K, N/R]: this rank's columns, the same shapes
    on all ranks, any strides; float16, bfloat16 or float32. bias: [N/R], of its columns.
    out: [M, N]. None: a new tensor, the caller's own like any other. A contiguous tensor on the group's heap
    (the same one on every rank): peers write it directly, with no copy; it must not be read on another stream
    while a later call writes it. In placements "copy_engine" and "pull" any with contiguous rows needs no copy.
    squared_partials: also return fp32 [M, R x tiles_n]: for each tile column and row, the sum of the squares of the
    result before it is rounded. Not in placements "copy_engine", "pull", "messages" and "unfused".
    activation, allow_tf32, group, config, workspace, gradients: as in `gemm_all_reduce`. partial_dtype: what partial
    sums of a's gradient travel in, as there.

    Inside a host columns go through the heap; over several hosts each rank sends its columns to the rank of its number
    on every other host, piece by piece beside the GEMM of the next rows.

    Returns out, or (out, squares). Nothing waits for the device: a peer's fault shows at the next call, or
    at `heap.synchronize()`. Raises TypeError, ValueError before any launch; `CallMismatch`, `PeerTimeout`,
    `PeerAborted`, `HeapOutOfMemory`, `WorkspaceBusy`.
    """
    # Partial sums are those of a's gradient.
    scaling = scaling_of(scale_a, scale_b, out_dtype, use_fast_accum)
    request = Request(
        a, b, out, bias, activation, squared_partials, allow_tf32, config, partial_dtype, scaling=scaling
    )
    return call(OP, request, group, workspace)


class _Plan(FusedPlan):
    def __init__(self, call: Call) -> None:
        config, heap, workspace = call.config, call.heap, call.workspace
        world = heap.world_size
        inside = config.placement == "inside"
        product = call.product(stores_fp32=ELEMENTS[call.out.dtype].wide)
        self.product = product
        self.rank = heap.rank
        num_tiles = product.schedule.num_tiles
        self.flags = workspace.flags(num_tiles)
        self.local = workspace.buffer("local flags", num_tiles, torch.int32, local=True)
        self.result: torch.Tensor | None = None
        if not call.direct:
            size = product.M * product.N * world
            self.result = workspace.buffer("results", size, call.out.dtype)[:size].view(
                product.M, product.N * world
            )
        squares = world * product.schedule.tiles_n * product.M if call.request.squared_partials else 1
        self.squares = workspace.buffer("squares", squares, torch.float32)[:squares]
        self.workspace, self.context = workspace, workspace.context
        self.fix_up = product.fix_up(workspace)
        # The peers' places are known as pointers only.
        self.c_how = POINTER if inside else how_to_write(self._columns(call.out))
        self.c_template = template(self._columns(call.out), self.c_how, config.block_m, product.part_n)
        activation = activation_number(call.request.activation)
        beside = config.placement == "beside"
        options = tiles.Options(
            self.c_how, activation, call.request.squared_partials, config.comm_rows, beside
        )
        op = int(status.Op.GEMM_ALL_SCATTER)
        epilogue = tiles.push_output if inside else tiles.publish_output
        announce = None if inside else tiles.announce_output
        consumer = {
            "after": None,
            "own_stream": None,
            "beside": tiles.push_tiles,
            "inside": tiles.await_own_tiles,
        }[config.placement]
        # A gate counts the programs of a rank alone only where they have a LAG (`stream_k.local_gemm.kernel`).
        lag = 0 if inside or world == 1 else -1
        gemm = product.launch(op, world, epilogue, options, announce=announce, consumer=consumer, lag=lag)
        self.launches = ByRole(gemm)
        if consumer is None:
            apart = consumer_launches(product, op, tiles.push_tiles, options, world, heap.device)
            self.launches = ByRole(gemm, *apart)

    def _columns(self, out: torch.Tensor) -> torch.Tensor:
        """This rank's block of columns of the result."""
        result = out if self.result is None else self.result
        return result[:, self.rank * self.product.N : (self.rank + 1) * self.product.N]

    def arguments(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> ByRole:
        c = filled(self.c_template, self._columns(out))
        results, finish = (
            out if self.result is None else self.result,
            PLAIN if bias is None else Finish.of(bias),
        )
        extra = tiles.Columns(results, self.flags, self.local, self.squares, finish, 1)
        of_gemm = self.product.arguments(a, b, c, self.fix_up, extra, self.context)
        sizes = self.context, self.product.packed_problem
        return ByRole(of_gemm, sizes, (extra, *sizes))


def _make_plan(call: Call) -> FusedPlan:
    if call.config.placement in BY_MESSAGE:
        return MessagePlan(call, OP, "all_scatter")
    return ColumnsPlan(call) if call.config.placement in BY_ROWS else _Plan(call)


@once
def _backward(ctx: Any, grad: torch.Tensor) -> Gradients:
    """Backward of `gemm_all_scatter`: this rank's columns of the gradient are its own, A's is a sum over ranks."""
    a, b = ctx.saved_tensors
    rank, world_size = ranks(ctx.group)
    width = grad.shape[1] // world_size
    columns = grad[:, rank * width : (rank + 1) * width]
    grad_a, grad_b = of_columns(ctx, a, b, columns)
    return grad_a, grad_b, None, bias_gradient(ctx, columns), None, None, None, *NO_SCALES


# In the order in which they are asked; those behind the first that suits any sizes are had by name.
_PLACEMENTS = (
    Placement("unfused", verdicts.low_for_blas),
    Placement("messages", verdicts.few_tiles, tile=tilings.sent, variants=variants.half_tiles),
    Placement(
        "pull",
        verdicts.busy_links,
        completed.pulled_columns,
        variants=variants.of_several_waves(variants.pulled),
    ),
    Placement(
        "copy_engine",
        verdicts.on_sm_90,
        completed.columns_in_parts,
        variants=variants.of_several_waves(variants.longer_steps),
    ),
    Placement(
        "beside",
        verdicts.otherwise,
        completed.pushed_within,
        variants=variants.of_several_waves(variants.itself),
    ),
    Placement(
        "own_stream",
        verdicts.by_name,
        completed.pushed_beside,
        variants=variants.of_several_waves(variants.pushed_beside),
    ),
    Placement("inside", verdicts.by_name, completed.pushed_within),
    Placement("after", verdicts.by_name, completed.pushed_within, variants=variants.of_one_wave),
)

OP = register_gemm(
    GemmOp(
        name="gemm_all_scatter",
        package="stream_k",
        holds="M x K, K x N/R",
        result="the columns of all ranks, M x N",
        command="all_scatter",
        steps="matmul, then all_gather of the column blocks",
        reference="gemm_all_gather",
        b_cut="N",
        placements=_PLACEMENTS,
        plan=_make_plan,
        over_hosts=over_hosts.scattered,
        keep=keep_sum,
        backward=_backward,
    )
)
