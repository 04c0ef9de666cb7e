"""`all_gather_gemm`: the rows of all ranks times the columns of this one.

How they come and are multiplied is said by its plans, in `stream_k.ops.gathered_rows`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from pyrocshmem.calls.operators import dispatched, find, name_of, needs_gradient, once, ops, ranks
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.stream_k.choice import completed, tilings, variants, verdicts
from pyrocshmem.stream_k.choice.config import BY_MESSAGE, Config
from pyrocshmem.stream_k.choice.placement import Placement
from pyrocshmem.stream_k.local_gemm.operands import check_product
from pyrocshmem.stream_k.local_gemm.scales import result_dtype, scaling_of
from pyrocshmem.stream_k.ops import over_hosts
from pyrocshmem.stream_k.ops.batches import by_rows, gathered, is_batched, scales_of_rows
from pyrocshmem.stream_k.ops.gathered_rows import BlocksPlan, MessagesPlan, PiecesPlan
from pyrocshmem.stream_k.ops.gradients import (
    Gradients,
    b_gradient,
    bias_gradient,
    both_gradients,
    keep,
)
from pyrocshmem.stream_k.ops.op import (
    NO_SCALES,
    Call,
    GemmOp,
    Request,
    check_no_gradient,
    register_gemm,
    run,
    through_operator,
)
from pyrocshmem.stream_k.ops.planned import FusedPlan
from pyrocshmem.stream_k.ops.several import Several, as_list, define_several, whole_rows
from pyrocshmem.stream_k.ops.several import call as call_several


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
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
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

    Inside a host A's rows go through the heap, while they are multiplied; over several hosts each rank sends its rows
    to the rank of its number on the other hosts, beside the GEMM of its own host's.

    Returns out. `a` may be overwritten once the call is done on the caller's stream. Nothing waits for the device: a
    peer's fault shows at the next call, or at `heap.synchronize()`. Raises TypeError, ValueError before any
    launch; `CallMismatch`, `PeerTimeout`, `PeerAborted`, `HeapOutOfMemory`, `WorkspaceBusy`.
    """
    if is_batched(a):
        more: Any = {"bias": bias, "activation": activation, "allow_tf32": allow_tf32, "config": config}
        more |= {"partial_dtype": partial_dtype, "save_gathered": save_gathered}
        more |= {"group": group, "workspace": workspace}
        more |= {
            "scale_a": scales_of_rows(scale_a, a),
            "scale_b": scale_b,
            "out_dtype": out_dtype,
            "use_fast_accum": use_fast_accum,
        }
        first = gathered(a, ranks(name_of(group, workspace))[1], num_rows)
        return by_rows(lambda a, out: all_gather_gemm(a, b, out=out, **more), a, out, first)
    several = isinstance(b, (list, tuple))
    of_bs = as_list("scale_b", scale_b, len(b)) if several else [scale_b]
    found = [scaling_of(scale_a, each, out_dtype, use_fast_accum) for each in of_bs]
    scalings, scaling = [each for each in found if each is not None], None if several else found[0]
    bs, biases = ([*b], as_list("bias", bias, len(b))) if several else ([b], [bias])
    for each in found:
        check_no_gradient("all_gather_gemm", each, a, *bs, *biases)
    if several:
        lists = (bs, biases, as_list("out", out, len(b)))
        x = Several(a, *lists, activation, allow_tf32, config, partial_dtype, num_rows, scalings)
        return call_several(OP, x, save_gathered, group, workspace)
    request = Request(a, b, out, bias, activation, False, allow_tf32, config, partial_dtype, num_rows)
    request = request._replace(scaling=scaling)
    if dispatched(a, b, bias, whole=out is None and config is None):
        # Only for a gradient of b.
        saves = save_gathered and needs_gradient((b,))
        return through_operator(OP, request._replace(save_gathered=saves), name_of(group, workspace))
    return run(OP, request._replace(a=whole_rows(a)), group, workspace)


def _run(
    a: torch.Tensor, b: torch.Tensor, group: str, num_rows: int, bias: Any, activation: str, allow_tf32: bool,
    partial_dtype: Any, save_gathered: bool, *scales: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The call by the schema's arguments; nothing in the gathered A's place where it is not wanted."""
    more = (bias, activation, False, allow_tf32, None, None, num_rows, save_gathered)
    request = Request(whole_rows(a), b, None, *more, scaling=scaling_of(*scales))
    found = run(OP, request, *find(group))
    return found if save_gathered else (found, a.new_empty(0, a.shape[1]))


def _shapes(
    a: torch.Tensor, b: torch.Tensor, group: str, num_rows: int, bias: Any, activation: str, allow_tf32: bool,
    partial_dtype: Any, save_gathered: bool, *scales: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    scaling = scaling_of(*scales)
    _, N, K = check_product(a, b, bias, activation, scaling)
    product = a.new_empty(num_rows, N, dtype=result_dtype(a, scaling))
    return product, a.new_empty(num_rows if save_gathered else 0, K)


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
    scales = () if request.scaling is None else request.scaling
    return a, b, group, num_rows, bias, activation, *more, *scales


def _make_plan(call: Call) -> FusedPlan:
    if call.config.placement in BY_MESSAGE:
        return MessagesPlan(call)
    return BlocksPlan(call) if call.config.placement == "blas_blocks" else PiecesPlan(call)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """`setup_context` of `all_gather_gemm`: keeps the gathered A in the place of A where the call made it."""
    a, b, ctx.group, ctx.num_rows, bias, activation, ctx.allow_tf32, ctx.partial_dtype, ctx.saved = inputs[:9]
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
    return grad_a, grad_b, None, None, bias_gradient(ctx, grad), None, None, None, None, *NO_SCALES


# In the order in which they are asked; those behind the first that suits any sizes are had by name.
_PLACEMENTS = (
    Placement("blas_blocks", verdicts.blocks_for_blas),
    Placement("unfused", verdicts.few_gathered_bytes_for_blas),
    Placement("messages", verdicts.few_gathered_bytes, tile=tilings.sent, variants=variants.nothing),
    Placement(
        "copy_engine",
        verdicts.otherwise,
        completed.gathered_pieces,
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
        over_hosts=over_hosts.gathered,
        schema="(Tensor a, Tensor b, str group, SymInt num_rows, Tensor? bias, str activation, bool allow_tf32, "
        "ScalarType? partial_dtype, bool save_gathered, Tensor? scale_a=None, Tensor? scale_b=None, "
        "ScalarType? out_dtype=None, bool use_fast_accum=False) -> (Tensor, Tensor)",
        arguments=_arguments,
        run=_run,
        shapes=_shapes,
        keep=_keep,
        backward=_backward,
    )
)
define_several(OP)
