"""Products with RMSNorm across ranks: `gemm_all_reduce_rms_norm` (row-parallel, with residual) and
`gemm_rms_norm_all_scatter` (column-parallel).

The squares are always those of reduced, rounded values: of the sum over ranks (plus residual), never of partial sums.
Whoever sums an element, in fp32, adds the residual, and rounds once.
A product of a wave or less is one GEMM and one exchange by messages, in which whoever stores a row normalizes it: two
launches, and one trip of the links or two. Larger ones overlap the all-reduce with the GEMM, and normalize afterwards.
Column-parallel, each tile of our GEMM leaves one float a row, the sum of the squares of what it stores. The norm's
kernel adds up those of a row, exchanges the sums, and reads the product once, when it normalizes it. Where the BLAS
multiplies, which is as in `gemm`, it reads the product twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch

from pyrocshmem import status, trace
from pyrocshmem.calls import invariance, planning
from pyrocshmem.calls.call_name import CallName
from pyrocshmem.calls.graphs import Graphs
from pyrocshmem.calls.op import Op, Sizes, register
from pyrocshmem.calls.operators import dispatched, find, name_of, once, ops, ranks, refuse
from pyrocshmem.calls.planned import agree
from pyrocshmem.calls.tensors import kind, left_kind, new_like, shape_of
from pyrocshmem.calls.workspace import Workspace, find_workspace
from pyrocshmem.collectives.all_reduce_rms_norm import check_norm, normalized, results
from pyrocshmem.collectives.all_reduce_rms_norm import gradients as norm_gradients
from pyrocshmem.collectives.quantized_norm import Quantization, QuantizedNorm, Recipe, quantization, quantized
from pyrocshmem.collectives.rms_norm import all_columns
from pyrocshmem.collectives.rms_norm_plan import Norm, NormPlan, new_results
from pyrocshmem.collectives.rms_norm_plan import forward as norm_of_columns
from pyrocshmem.collectives.row_norm import is_apart
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.stream_k.choice.config import BY_BLAS, BY_MESSAGE, Config, check_config
from pyrocshmem.stream_k.choice.scaled import check_scaled, choose_scaled
from pyrocshmem.stream_k.choice.table import check_invariant, choose, choose_together
from pyrocshmem.stream_k.local_gemm.blas import BlasPlan
from pyrocshmem.stream_k.local_gemm.operands import check_product
from pyrocshmem.stream_k.local_gemm.plan import GemmPlan, plan_gemm, run_gemm, with_inner_size
from pyrocshmem.stream_k.local_gemm.scales import (
    Operand,
    Scaling,
    Scheme,
    data_of,
    kind_of,
    operands_of,
    parts_of,
    result_dtype,
    scaling_of,
    scheme_of,
    with_data,
)
from pyrocshmem.stream_k.ops.batches import by_rows, is_batched, rows_of, scales_of_rows
from pyrocshmem.stream_k.ops.by_message import SentProduct
from pyrocshmem.stream_k.ops.gemm_all_reduce import OP as ALL_REDUCE
from pyrocshmem.stream_k.ops.gradients import Gradients, bias_gradient, keep, of_columns, of_replicated
from pyrocshmem.stream_k.ops.op import (
    NO_SCALES,
    Request,
    check_no_gradient,
    longest_k,
    run,
    scales_described,
)


@overload
def gemm_all_reduce_rms_norm(
    a: torch.Tensor,
    b: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    group: Any = None,
    bias: torch.Tensor | None = None,
    allow_tf32: bool = False,
    partial_dtype: torch.dtype | None = None,
    config: Config | None = None,
    workspace: Workspace | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    quantize: None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def gemm_all_reduce_rms_norm(
    a: torch.Tensor,
    b: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    group: Any = None,
    bias: torch.Tensor | None = None,
    allow_tf32: bool = False,
    partial_dtype: torch.dtype | None = None,
    config: Config | None = None,
    workspace: Workspace | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    quantize: Recipe,
    quantize_scale: torch.Tensor | None = None,
    keep_norm: bool = False,
) -> QuantizedNorm: ...


def gemm_all_reduce_rms_norm(
    a: torch.Tensor,
    b: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    group: Any = None,
    bias: torch.Tensor | None = None,
    allow_tf32: bool = False,
    partial_dtype: torch.dtype | None = None,
    config: Config | None = None,
    workspace: Workspace | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    quantize: Recipe | None = None,
    quantize_scale: torch.Tensor | None = None,
    keep_norm: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | QuantizedNorm:
    """(RMSNorm of the total, the total), total = sum over ranks of a @ b + bias + residual, rounded to a's dtype: on
    every rank, the same bits on all of them.

    a: [M, K/R], b: [K/R, N]: this rank's shares, any strides; float16, bfloat16 or float32. residual: [M, N], the same
    on every rank; None: none. Or a [.., M, K/R] and residual [.., M, N], whose dimensions the results have then.
    weight: [N], contiguous, of any of these dtypes. eps: added to the mean of squares, 0 or more. bias: [N], added
    once, to the sum.
    group, allow_tf32, partial_dtype, config, workspace, scale_a, scale_b, out_dtype, use_fast_accum: as in
    `gemm_all_reduce`; a config whose placement is neither "messages" nor "unfused" makes the all-reduce that way, and
    PyTorch normalizes afterwards. Of 8-bit operands the total, and the residual, have out_dtype, and there is no
    gradient. quantize, quantize_scale, keep_norm: as in `collectives.all_reduce_rms_norm`: then it returns a
    `QuantizedNorm`.

    The total is rounded once, from its sum in fp32, and its norm is that of the rounded total. On one rank it is `gemm`
    with a residual, and PyTorch's own norm. Over several hosts what travels is `gemm_all_reduce`'s, and every rank
    normalizes. Has a gradient, with PyTorch's derivative of the norm, and is traced by
    torch.compile, then without a config: ValueError.
    Raises TypeError, ValueError before any launch; `CallMismatch`, `PeerTimeout`, `PeerAborted`, `HeapOutOfMemory`,
    `WorkspaceBusy`.
    """
    if is_batched(a):
        more: Any = {"group": group, "bias": bias, "allow_tf32": allow_tf32, "partial_dtype": partial_dtype}
        more |= {
            "config": config,
            "workspace": workspace,
            "out_dtype": out_dtype,
            "use_fast_accum": use_fast_accum,
        }
        more |= {"scale_a": scales_of_rows(scale_a, a), "scale_b": scale_b}
        flat = rows_of("residual", residual, a.shape[:-1])
        if quantize is not None or quantize_scale is not None or keep_norm:
            more |= {"quantize": quantize, "quantize_scale": quantize_scale, "keep_norm": keep_norm}
            found = gemm_all_reduce_rms_norm(a.flatten(0, -2), b, flat, weight, eps, **more)
            found = found.in_rows_of(a.shape[:-1])
            return found if quantize_scale is None else found._replace(scale=quantize_scale)
        return by_rows(lambda a, _: gemm_all_reduce_rms_norm(a, b, flat, weight, eps, **more), a, None)
    scaling, how = scaling_of(scale_a, scale_b, out_dtype, use_fast_accum), None
    if quantize is not None or quantize_scale is not None or keep_norm:
        asked = quantize, quantize_scale, keep_norm
        how = quantization("gemm_all_reduce_rms_norm", *asked, a, b, bias, residual, weight)
    check_no_gradient("gemm_all_reduce_rms_norm", scaling, a, b, bias, residual, weight)
    by_hand = not dispatched(a, b, bias, residual, weight, whole=config is None)
    if by_hand:
        heap, space = find_workspace(group, workspace)
        given = (left_kind(a), *(kind(x) for x in (b, residual, weight, bias)), kind_of(scaling))
        recorded, mode = trace.current.get() is not None, invariance.current(space)
        given = (*given, eps, allow_tf32, partial_dtype, config, how and how.kind)
        key = ("gemm_all_reduce_rms_norm", *given, recorded, mode)
        plan: _Plan | None = space.plans.get(key)
        if plan is not None:
            return plan.run(*operands_of(a, b, scaling), residual, weight, eps, bias, how)
    M, N, K = check_product(a, b, bias, "none", scaling)
    check_config(config)
    # What the total is like.
    like = a if scaling is None else a.new_empty(0, dtype=scaling.result)
    check_norm(like, (M, N), residual, weight, eps)
    if config is not None and partial_dtype is not None:
        raise ValueError(f"partial_dtype is {partial_dtype} beside a config, which says that itself")
    if not by_hand:
        refuse("gemm_all_reduce_rms_norm", config=config)
        op, name = ops.gemm_all_reduce_rms_norm, name_of(group, workspace)
        scales = () if scaling is None else scaling
        return quantized(
            how, *op(a, b, residual, weight, eps, name, bias, allow_tf32, partial_dtype, *scales)
        )
    if a.device != heap.device:
        raise ValueError(f"a is on {a.device}, the heap of this rank on {heap.device}")
    if space.hosts is not None:
        added = None if residual is None else residual.contiguous()
        request = Request(a, b, None, bias, "none", False, allow_tf32, config, partial_dtype, residual=added)
        with invariance.at_least(mode):
            total = run(ALL_REDUCE, request._replace(scaling=scaling), heap, space)
            return quantized(how, *normalized(total, None, weight, eps, space.world_size))
    by_caller, scheme = config, scheme_of(scaling, a, b)
    if config is None or scheme is not None:
        kind_of_sum = f"gemm_all_reduce_rms_norm(# x {N} {a.dtype}, partials {partial_dtype})"
        K = longest_k(space, CallName.of(kind_of_sum, M), K)
    sizes = (max(M, 1), max(N, 1), K)
    if scaling is not None and scheme is not None:
        if mode == invariance.TP:
            raise ValueError(f"gemm_all_reduce_rms_norm of 8-bit operands is not {mode}")
        facts = (*sizes, heap.world_size, heap.device, scheme, mode, scaling.result, partial_dtype)
        rules = choose_scaled("gemm_all_reduce", *facts)
        if config is not None:
            check_scaled("gemm_all_reduce", config, rules, scheme, mode)
        config = config or rules
    elif config is None:
        config = choose_together(
            heap, "gemm_all_reduce", *sizes, a.dtype, partial_dtype, allow_tf32, mode
        ).config
    else:
        check_invariant("gemm_all_reduce", config, M, N, K, a.dtype, heap.world_size, heap.device, mode)
    by_message = config.placement in BY_MESSAGE and heap.world_size > 1 and min(M, N) > 0
    if by_message and not is_apart(mode, like, N, weight):
        wire, by_hand_too = config.wire_dtype(like.dtype), "" if by_caller is None else f", {by_caller}"
        added = f"residual={residual is not None}, bias={bias is not None}, weight={weight.dtype}, eps={eps}"
        text = f"gemm_all_reduce_rms_norm(# x {N} {a.dtype}, {added}, tf32={allow_tf32}, partials={wire}, {recorded=}"
        text += f", {scales_described(a, b, scaling)}, quantize={how}"
        call = CallName.of(f"{text}{by_hand_too}{invariance.of_call(space)})", M)
        x, y = operands_of(a, b, scaling)
        operands = (x, y, residual, weight, eps, bias, allow_tf32, config, space, scheme, like.dtype, how)

        def again(rows: int) -> object:
            added = residual if residual is None else residual.new_empty(rows, N)
            more: Any = {"bias": bias, "allow_tf32": allow_tf32, "partial_dtype": partial_dtype}
            more |= {"config": by_caller, "quantize": quantize, "quantize_scale": quantize_scale}
            more |= {"keep_norm": keep_norm}
            if scaling is not None:
                of_a = scaling.a if scaling.a.numel() == 1 else scaling.a.new_empty(rows, scaling.a.shape[1])
                more |= {"scale_a": of_a, "scale_b": scaling.b, "out_dtype": scaling.result}
                more |= {"use_fast_accum": scaling.fast}
            x = a.new_empty(rows, a.shape[1])
            return gemm_all_reduce_rms_norm(x, b, added, weight, eps, group=heap, workspace=space, **more)

        space.make_room(call, again)
        plan = space.planned_together(call, lambda _: _Plan(call, *operands))
        if planning.keeps_plans():
            space.plans[key] = plan
        return plan.run(x, y, residual, weight, eps, bias, how)
    residual = None if residual is None else residual.contiguous()
    request = Request(a, b, None, bias, "none", False, allow_tf32, config, residual=residual, scaling=scaling)
    with invariance.at_least(mode):
        total = run(ALL_REDUCE, request, heap, space)
        return quantized(how, *normalized(total, None, weight, eps, heap.world_size))


def gemm_rms_norm_all_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    hidden: int | None = None,
    group: Any = None,
    bias: torch.Tensor | None = None,
    allow_tf32: bool = False,
    config: Config | None = None,
    workspace: Workspace | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """RMSNorm over all columns of [a @ b + bias of rank 0, of rank 1, ..], [M, hidden], on every rank.

    a: [M, K] or [.., M, K], whose dimensions the result has then, the same on every rank. b: [K, N]: this rank's
    columns, any strides; float16, bfloat16 or float32.
    bias, weight: [N], of these columns. eps: added to the mean of squares, 0 or more. hidden: the columns of all ranks,
    R x N unless given; rank r holds those of `torch.tensor_split(..., R)`. config: of the GEMM. group, workspace: as in
    `gemm_all_reduce`. scale_a, scale_b, out_dtype, use_fast_accum: of 8-bit operands, as in `gemm`: what is normalized,
    and the result, has out_dtype, and there is no gradient. Ranks exchange one float a row, the sum of squares of their
    columns; then each normalizes its columns and pushes them to all (`collectives.rms_norm`). Over several hosts these
    two are an `all_reduce` and an `all_scatter`.

    Has a gradient, a's being summed over ranks; that of the result must be the same on all ranks. Then, and where
    torch.compile traces it, it takes no config: ValueError. Raises as `gemm_all_reduce_rms_norm` does.
    """
    if is_batched(a):
        more: Any = {"hidden": hidden, "group": group, "bias": bias, "allow_tf32": allow_tf32}
        more |= {"config": config, "workspace": workspace, "scale_a": scales_of_rows(scale_a, a)}
        more |= {"scale_b": scale_b, "out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
        return by_rows(lambda a, _: gemm_rms_norm_all_scatter(a, b, weight, eps, **more), a, None)
    scaling = scaling_of(scale_a, scale_b, out_dtype, use_fast_accum)
    check_no_gradient("gemm_rms_norm_all_scatter", scaling, a, b, bias, weight)
    by_hand = not dispatched(a, b, bias, weight, whole=config is None)
    if by_hand:
        heap, space = find_workspace(group, workspace)
        key = _scattered_key(a, b, weight, eps, hidden, bias, allow_tf32, config, space, scaling)
        plan: _ScatteredPlan | None = space.plans.get(key)
        if plan is not None:
            return plan.run(*operands_of(a, b, scaling), weight, bias)[0]
    M, N, _ = check_product(a, b, bias, "none", scaling)
    check_config(config)
    if config is not None and config.placement != "after":
        raise ValueError(
            f"Config.placement is {config.placement!r}, gemm_rms_norm_all_scatter has after: its GEMM leaves squares; "
            "start from stream_k.choose('gemm', .., placement='after')"
        )
    check_norm(a if scaling is None else a.new_empty(0, dtype=scaling.result), (M, N), None, weight, eps)
    if by_hand and config is not None and scaling is None:
        sizes = (M, N, a.shape[1], a.dtype, 1, heap.device)
        check_invariant("gemm", config, *sizes, invariance.current(space))
    if not by_hand:
        refuse("gemm_rms_norm_all_scatter", config=config)
        op, name = ops.gemm_rms_norm_all_scatter, name_of(group, workspace)
        hidden = all_columns(N, hidden, *ranks(name))
        scales = () if scaling is None else scaling
        return op(a, b, weight, eps, hidden, name, bias, allow_tf32, *scales)[0]
    return scattered(a, b, weight, eps, hidden, bias, allow_tf32, config, space, scaling)[0]


def _scattered_key(
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    hidden: int | None,
    bias: torch.Tensor | None,
    allow_tf32: bool,
    config: Config | None,
    workspace: Workspace,
    scaling: Scaling | None,
) -> Any:
    given = (left_kind(a), kind(b), kind(weight), kind(bias), kind_of(scaling))
    recorded, mode = trace.current.get() is not None, invariance.current(workspace)
    return "gemm_rms_norm_all_scatter", *given, eps, hidden, allow_tf32, config, recorded, mode


def scattered(
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    hidden: int | None,
    bias: torch.Tensor | None,
    allow_tf32: bool,
    config: Config | None,
    workspace: Workspace,
    scaling: Scaling | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the result, and what its gradient needs: this rank's columns of the product, the scales of all rows [M]), of
    arguments that are checked, but for `hidden`."""
    if workspace.hosts is not None:
        return _scattered_over_hosts(a, b, weight, eps, hidden, bias, allow_tf32, config, workspace, scaling)
    key = _scattered_key(a, b, weight, eps, hidden, bias, allow_tf32, config, workspace, scaling)
    plan: _ScatteredPlan | None = workspace.plans.get(key)
    if plan is None:
        heap = workspace.heap
        assert heap is not None
        if a.device != heap.device:
            raise ValueError(f"a is on {a.device}, the heap of this rank on {heap.device}")
        dtype = result_dtype(a, scaling)
        norm = Norm(eps, all_columns(b.shape[1], hidden, heap.rank, heap.world_size), True, dtype)
        M = a.shape[0]
        call = CallName.of(
            f"gemm_rms_norm_all_scatter(# x {norm.hidden} {dtype}, weight={weight.dtype}, eps={eps}, "
            f"recorded={trace.current.get() is not None}{invariance.of_call(workspace)})",
            M,
        )
        if M == 0 or norm.hidden == 0:
            agree(workspace, call)
            block = a.new_empty(M, b.shape[1], dtype=dtype)
            result, _, scales = new_results(norm.templates(block, None), block, None, None)
            return result, block, scales
        # What is wrong with them is said before the ranks plan together.
        scheme = scheme_of(scaling, a, b)
        chosen = _scattered_config(config, a, b, allow_tf32, workspace, scaling, scheme)

        def again(rows: int) -> object:
            more, larger = a.new_empty(rows, a.shape[1]), scaling
            if scaling is not None and scaling.a.numel() > 1:
                larger = scaling._replace(a=scaling.a.new_empty(rows, scaling.a.shape[1]))
            return scattered(more, b, weight, eps, hidden, bias, allow_tf32, config, workspace, larger)

        workspace.make_room(call, again)
        x, y = operands_of(a, b, scaling)
        plan = workspace.planned_together(
            call, lambda _: _ScatteredPlan(x, y, weight, norm, bias, allow_tf32, chosen, workspace, scheme)
        )
        plan.norm.called = call
        if planning.keeps_plans():
            workspace.plans[key] = plan
    return plan.run(*operands_of(a, b, scaling), weight, bias)


def _scattered_over_hosts(
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    hidden: int | None,
    bias: torch.Tensor | None,
    allow_tf32: bool,
    config: Config | None,
    workspace: Workspace,
    scaling: Scaling | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `scattered`, of a group over several hosts: the GEMM, then its norm."""
    hidden = all_columns(b.shape[1], hidden, workspace.rank, workspace.world_size)
    norm = Norm(eps, hidden, True, result_dtype(a, scaling))
    block = run_gemm(a, b, bias, "none", None, allow_tf32, config, None, None, scaling)
    result, _, scales = norm_of_columns(workspace, block, weight, None, norm)
    return result, block, scales


class _ScatteredPlan:
    """This rank's columns of a product, and their norm, which is sent to all, for operands of one kind."""

    def __init__(
        self,
        a: Operand,
        b: Operand,
        weight: torch.Tensor,
        norm: Norm,
        bias: torch.Tensor | None,
        allow_tf32: bool,
        config: Config,
        workspace: Workspace,
        scheme: Scheme | None,
    ) -> None:
        M, N = data_of(a).shape[0], data_of(b).shape[1]
        block = data_of(a).new_empty(M, N, dtype=norm.out_dtype)
        gemm: GemmPlan | BlasPlan | None = None
        squares: torch.Tensor | None = None
        if block.numel() > 0:
            # In the modes the width of its tiles may depend on M.
            if config.placement not in BY_BLAS and not invariance.current(workspace):
                tiles_n = -(-N // config.block_n)
                sums = workspace.buffer("squares of tiles", tiles_n * M, torch.float32, local=True)
                squares = sums[: tiles_n * M].view(tiles_n, M)
            a, b, bias = _computed(a, b, bias)
            given = (config, allow_tf32, bias, "none", block, workspace)
            gemm = plan_gemm(a, b, *given, squares=squares, scheme=scheme)
        self.norm = NormPlan(workspace, block, weight, None, norm, gemm=gemm, squares=squares)
        self.like = shape_of(block, block.shape)

    def run(
        self, a: Operand, b: Operand, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Enqueue the call; returns what `scattered` does."""
        block = new_like(self.like)
        result, _, scales = self.norm.run(block, weight, None, operands=_computed(a, b, bias))
        return result, block, scales


def _scattered_config(
    config: Config | None,
    a: torch.Tensor,
    b: torch.Tensor,
    allow_tf32: bool,
    workspace: Workspace,
    scaling: Scaling | None,
    scheme: Scheme | None,
) -> Config:
    """That of the GEMM; config: the caller's own."""
    (M, K), N, mode = a.shape, max(b.shape[1], 1), invariance.current(workspace)
    if scaling is None or scheme is None:
        if config is not None:
            return config
        return choose("gemm", M, N, K, a.dtype, 1, a.device, allow_tf32=allow_tf32, invariance=mode)
    if mode == invariance.TP:
        raise ValueError(f"gemm_rms_norm_all_scatter of 8-bit operands is not {mode}")
    rules = choose_scaled("gemm", M, N, K, 1, a.device, scheme, mode, scaling.result)
    if config is not None:
        check_scaled("gemm", config, rules, scheme, mode)
    return config or rules


def _computed(
    a: Operand, b: Operand, bias: torch.Tensor | None
) -> tuple[Operand, Operand, torch.Tensor | None]:
    """The operands as a GEMM gets them: bf16 as fp32 in Triton's interpreter, which multiplies it wrongly, as in
    `gemm`."""
    x, y = data_of(a), data_of(b)
    if ELEMENTS[x.dtype].widened:
        x, y, bias = x.float(), y.float(), None if bias is None else bias.float()
    x, y = with_inner_size(x, y)
    return with_data(a, x), with_data(b, y), bias


class _Plan:
    """A product that is sent to all, summed there, added to and normalized, for operands of one kind.

    called: as the ranks compared it. scheme: of 8-bit operands; dtype: of the total, None: that of the operands. how:
    whether the norm is quantized."""

    def __init__(
        self,
        called: CallName,
        a: Operand,
        b: Operand,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        allow_tf32: bool,
        config: Config,
        workspace: Workspace,
        scheme: Scheme | None = None,
        dtype: torch.dtype | None = None,
        how: Quantization | None = None,
    ) -> None:
        self.called, self.workspace, rows = called, workspace, data_of(a)
        like = rows if dtype is None else rows.new_empty(0, dtype=dtype)
        # Of a result, but for its memory.
        self.like = shape_of(like, (rows.shape[0], data_of(b).shape[1]))
        self.alike = invariance.current(workspace) > invariance.NONE
        self.fuses = how is not None and how.is_fused(self.like.shape[1], like.dtype, workspace.world_size)
        out, after = results(self.like, residual, weight, eps, bias, how if self.fuses else None, self.alike)
        self.sent = SentProduct(
            workspace,
            status.Op.GEMM_ALL_REDUCE_RMS_NORM,
            config.algorithm,
            *_computed(a, b, None)[:2],
            config,
            allow_tf32,
            config.wire_dtype(like.dtype),
            out,
            after,
            scheme=scheme,
        )
        self.graphs = Graphs(workspace, self.sent.gemm.replayable, switch=self.sent.gemm.switch)

    def run(
        self,
        a: Operand,
        b: Operand,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        how: Quantization | None = None,
    ) -> Any:
        """Enqueue the call; returns what `gemm_all_reduce_rms_norm` does."""
        a, b, _ = _computed(a, b, None)
        out, after = results(self.like, residual, weight, eps, bias, how if self.fuses else None, self.alike)
        if planning.here.mode is None:
            with self.workspace.begin(self.called):
                tensors = (*parts_of(a), *parts_of(b), out, *after.tensors())
                self.graphs.run(tensors, lambda: self.sent.run(a, b, None, out, after))
        if how is not None and self.fuses:
            return how.results(out, after)
        return quantized(how, out, after.total)


def _run_sum(
    a: torch.Tensor, b: torch.Tensor, residual: Any, weight: torch.Tensor, eps: float, group: str, bias: Any,
    allow_tf32: bool, partial_dtype: Any, *scales: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The public function. Below the dispatcher nothing needs a gradient."""
    members, workspace = find(group)
    more = {"allow_tf32": allow_tf32, "partial_dtype": partial_dtype, "workspace": workspace}
    more |= dict(zip(("scale_a", "scale_b", "out_dtype", "use_fast_accum"), scales, strict=False))
    with torch.no_grad():
        return gemm_all_reduce_rms_norm(a, b, residual, weight, eps, group=members, bias=bias, **more)


def _sum_shapes(
    a: torch.Tensor, b: torch.Tensor, residual: Any, weight: torch.Tensor, eps: float, group: str, bias: Any,
    allow_tf32: bool, partial_dtype: Any, *scales: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    scaling = scaling_of(*scales)
    M, N, _ = check_product(a, b, bias, "none", scaling)
    dtype = result_dtype(a, scaling)
    return a.new_empty(M, N, dtype=dtype), a.new_empty(M, N, dtype=dtype)


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """`setup_context` of `gemm_all_reduce_rms_norm`."""
    a, b, residual, weight, ctx.eps, ctx.group, bias, ctx.allow_tf32 = inputs[:8]
    ctx.needs = (*ctx.needs_input_grad[:2], ctx.needs_input_grad[6])
    ctx.set_materialize_grads(False)
    keep(ctx, a, b, bias, "none", output[1], weight)


@once
def _backward_of_sum(ctx: Any, g: torch.Tensor | None, more: torch.Tensor | None) -> Gradients:
    """Backward of `gemm_all_reduce_rms_norm`: nothing is sent, as in that of `gemm_all_reduce`."""
    a, b, total, weight = ctx.saved_tensors
    wants_weight, world_size = ctx.needs_input_grad[3], ranks(ctx.group)[1]
    grad, of_weight = norm_gradients(g, more, total, weight, ctx.eps, wants_weight, world_size)
    grad_a, grad_b = of_replicated(ctx, a, b, grad)
    of_residual = grad if ctx.needs_input_grad[2] else None
    return (
        grad_a,
        grad_b,
        of_residual,
        of_weight,
        None,
        None,
        bias_gradient(ctx, grad),
        None,
        None,
        *NO_SCALES,
    )


def _run_scattered(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, eps: float, hidden: int, group: str, bias: Any,
    allow_tf32: bool, *scales: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(result, what its backward needs: this rank's columns of the product, the scales of all rows)."""
    workspace = find_workspace(*find(group))[1]
    with torch.no_grad():
        return scattered(a, b, weight, eps, hidden, bias, allow_tf32, None, workspace, scaling_of(*scales))


def _scattered_shapes(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, eps: float, hidden: int, group: str, bias: Any,
    allow_tf32: bool, *scales: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    scaling = scaling_of(*scales)
    M, N, _ = check_product(a, b, bias, "none", scaling)
    result, block = (a.new_empty(M, columns, dtype=result_dtype(a, scaling)) for columns in (hidden, N))
    return result, block, a.new_empty(M, dtype=torch.float32)


def _keep_scattered(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """`setup_context` of `gemm_rms_norm_all_scatter`."""
    a, b, weight, _, _, ctx.group, bias, ctx.allow_tf32 = inputs[:8]
    ctx.needs = (*ctx.needs_input_grad[:2], ctx.needs_input_grad[6])
    ctx.partial_dtype = None
    ctx.mark_non_differentiable(*output[1:])
    keep(ctx, a, b, bias, "none", *output[1:], weight)


@once
def _backward_of_scattered(ctx: Any, grad: torch.Tensor, *_: Any) -> Gradients:
    """Backward of `gemm_rms_norm_all_scatter`: one exchange of a float a row, then as that of `gemm_all_scatter`."""
    a, b, block, scales, weight = ctx.saved_tensors
    columns, of_weight = ops.rms_norm_backward(
        grad, None, block, weight, scales, grad.shape[1], block.dtype, ctx.group
    )
    grad_a, grad_b = of_columns(ctx, a, b, columns)
    return grad_a, grad_b, of_weight, None, None, None, bias_gradient(ctx, columns), None, *NO_SCALES


def _sized_sum(sizes: Sizes) -> Callable[[int], object]:
    b, weight, space = sizes.empty(sizes.N, sizes.K).t(), sizes.empty(sizes.N), sizes.workspace

    def call(rows: int) -> object:
        a = sizes.empty(rows, sizes.K)
        more: Any = {"group": space.heap, "workspace": space}
        for residual in (None, sizes.empty(rows, sizes.N)):
            gemm_all_reduce_rms_norm(a, b, residual, weight, 1e-6, **more)
        return None

    return call


def _sized_scattered(sizes: Sizes) -> Callable[[int], object]:
    b, weight, space = sizes.empty(sizes.N, sizes.K).t(), sizes.empty(sizes.N), sizes.workspace

    def call(rows: int) -> object:
        a = sizes.empty(rows, sizes.K)
        return gemm_rms_norm_all_scatter(a, b, weight, 1e-6, group=space.heap, workspace=space)

    return call


register(
    Op(
        name="gemm_all_reduce_rms_norm",
        package="stream_k",
        holds="M x K/R, K/R x N, residual M x N",
        result="RMSNorm of the sum over ranks + residual, and that total, M x N",
        sized=_sized_sum,
        command="gemm_rms_norm",
        steps="matmul, all_reduce, add, rms_norm",
        reference="gemm_all_reduce_rms_norm",
        schema="(Tensor a, Tensor b, Tensor? residual, Tensor weight, float eps, str group, Tensor? bias, "
        "bool allow_tf32, ScalarType? partial_dtype, Tensor? scale_a=None, Tensor? scale_b=None, "
        "ScalarType? out_dtype=None, bool use_fast_accum=False) -> (Tensor, Tensor)",
        run=_run_sum,
        shapes=_sum_shapes,
        keep=_keep_sum,
        backward=_backward_of_sum,
    )
)
register(
    Op(
        name="gemm_rms_norm_all_scatter",
        package="stream_k",
        holds="M x K, K x N/R",
        result="RMSNorm over the columns of all ranks, M x N",
        sized=_sized_scattered,
        command="gemm_rms_norm_all_scatter",
        steps="matmul, square, all_reduce of the sums, scale, all_gather of the columns",
        reference="gemm_rms_norm_all_gather",
        schema="(Tensor a, Tensor b, Tensor weight, float eps, SymInt hidden, str group, Tensor? bias, "
        "bool allow_tf32, Tensor? scale_a=None, Tensor? scale_b=None, ScalarType? out_dtype=None, "
        "bool use_fast_accum=False) -> (Tensor, Tensor, Tensor)",
        run=_run_scattered,
        shapes=_scattered_shapes,
        keep=_keep_scattered,
        backward=_backward_of_scattered,
    )
)
