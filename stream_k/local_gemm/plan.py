"""`gemm`: one product on one GPU, by the Stream-K kernel or by the vendor's BLAS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from pyrocshmem import signal, status, trace
from pyrocshmem.calls import invariance, planning
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.tensors import (
    COLUMN,
    POINTER,
    ROW,
    check_device,
    filled,
    how_to_write,
    kind,
    left_kind,
    strides_by_pointer,
    template,
)
from pyrocshmem.calls.workspace import Workspace, local_workspace
from pyrocshmem.collectives.epilogue import (
    PLAIN,
    Finish,
    Options,
    Output,
    OutputWithSquares,
    activation_number,
    store_output,
    store_with_squares,
)
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.stream_k.choice.config import BY_BLAS, Config, check_config
from pyrocshmem.stream_k.choice.placement import find_placement
from pyrocshmem.stream_k.choice.scaled import check_scaled, choose_scaled
from pyrocshmem.stream_k.choice.table import check_invariant, choose
from pyrocshmem.stream_k.local_gemm.blas import BlasPlan, is_slow, new_result, takes, why_not
from pyrocshmem.stream_k.local_gemm.operands import check_output, check_product, claim, in_one
from pyrocshmem.stream_k.local_gemm.product import Product, make_product
from pyrocshmem.stream_k.local_gemm.scales import (
    Operand,
    Scaled,
    Scaling,
    Scheme,
    data_of,
    kind_of,
    operands_of,
    promoted,
    result_dtype,
    scheme_of,
)
from pyrocshmem.stream_k.local_gemm.sum_of_parts import SumOfParts
from pyrocshmem.torch_contexts import on_device


def with_inner_size(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands; where K is 0, zeros of K = 1, which have the same product and can be read."""
    if a.shape[1] > 0:
        return a, b
    return a.new_zeros(a.shape[0], 1), b.new_zeros(1, b.shape[1])


def _counted_apart(workspace: Workspace) -> Workspace:
    """A workspace for this rank's products alone, beside the one of a heap. A product whose tiles are split counts as a
    call, and may be split on some ranks only: counted on the heap's workspace, it would put ranks out of step. Its
    faults are the heap's."""
    if workspace.heap is None:
        return workspace
    if workspace.own is None:
        workspace.own = own = Workspace(device=workspace.device)
        for word in (int(signal.RANK.value), int(signal.BUDGET_US.value)):
            own.control[word] = workspace.control[word]
        own.context = workspace.context._replace(control=own.control)
        own._captured = True  # graphs are captured on the heap's: nothing that grows is given back
    return workspace.own


# What a program fetches of B ahead (H200, 16-bit operands, 32 products of up to 256 rows and one wave, B in rows and in
# columns: 1.05 times as fast in a row, 1.02 behind 4 us of something else; twice as much 1.04 and 1.04, 0.95 at worst).
_AHEAD_BYTES = 32 << 10
# Shared memory of an sm_90's multiprocessor.
_SHARED_BYTES = 228 << 10


def _blocks_ahead(product: Product, b: torch.Tensor) -> int:
    """How many blocks of B each program asks L2 for while the launch before still runs. None where B is not read by a
    descriptor or has just been copied, beyond one wave, for tiles in parts, and where a multiprocessor has room for two
    programs: they are there early enough to read it."""
    config, schedule = product.config, product.schedule
    staged = (config.block_m + config.block_n) * config.block_k * b.element_size() * config.num_stages
    copied = product.copies is not None and product.copies.of_b
    read = not ELEMENTS[b.dtype].wide and product.b_how in (ROW, COLUMN) and not copied
    if not read or product.split or schedule.num_tiles > schedule.num_programs or 2 * staged <= _SHARED_BYTES:
        return 0
    blocks = _AHEAD_BYTES // (config.block_n * config.block_k * b.element_size())
    return min(max(blocks, 1), schedule.iters_per_tile)


class Sent(NamedTuple):
    """How tiles leave a GEMM. epilogue, options: EPILOGUE and OPTIONS of `stream_k.local_gemm.kernel`. extra: the type
    of its `extra`, whose first field is a `Finish`. rest: the other fields."""

    epilogue: Any
    options: Any
    extra: Any
    rest: tuple[Any, ...]


class GemmPlan:
    """The launch of a GEMM for operands of one kind, or two where the parts of its tiles are added separately. Its
    tiles are stored to results like `out`; with `sent`, as that says, into `out`, which then is no matrix but has the
    dtype.
    bias: [N], or a residual [M, N], which follows the activation, not with either of these two.
    squares: fp32 [tiles_n, M], gets of each row of each tile the sum of the squares of what is stored.
    scheme: of 8-bit operands' scales. switch: as of a `BlasPlan`."""

    switch: Callable[[], bool] | None = None

    def __init__(
        self,
        a: Operand,
        b: Operand,
        config: Config,
        allow_tf32: bool,
        bias: torch.Tensor | None,
        activation: str,
        out: torch.Tensor,
        workspace: Workspace,
        sent: Sent | None = None,
        squares: torch.Tensor | None = None,
        scheme: Scheme | None = None,
    ) -> None:
        if config.split == "separate" and not (sent is None and squares is None):
            # Finishers add the parts, which costs more than a second kernel.
            config = replace(config, split="auto")
        # Loads of a residual take room in shared memory, as fp32 parts do; descriptors' stores would not share it.
        adds_residual = bias is not None and bias.ndim == 2
        self.product = product = make_product(
            data_of(a), data_of(b), config, allow_tf32, stores_fp32=ELEMENTS[out.dtype].wide or adds_residual,
            workspace=workspace if workspace.heap is not None else None,
            scheme=scheme,
        )  # fmt: skip
        # Where a program has one tile, nothing can overlap, and a loop that only stores it is shorter unflattened.
        flatten = sent is not None or product.schedule.num_tiles > product.schedule.num_programs
        how = how_to_write(out) if sent is None and not adds_residual else POINTER
        if sent is None:
            strides = strides_by_pointer(out, how)
            options = Options(how, activation_number(activation))
            sent = Sent(store_output, options, Output, strides)
            if squares is not None:
                sent = Sent(store_with_squares, options, OutputWithSquares, (*strides, squares))
        self.c_template = template(out, how, config.block_m, product.part_n)
        own = _counted_apart(workspace)
        self.context = own.context
        self.fix_up = product.fix_up(own)
        self.sent = sent
        self.sum: SumOfParts | None = None
        if product.separate:
            self.sum = SumOfParts(product, self.fix_up[0].base, out, activation_number(activation))
        # Without a fix-up nothing counts the calls: such GEMMs share the workspace's words without writing
        # them.
        self.launch: Launch = product.launch(
            int(status.Op.FIX_UP),
            1,
            sent.epilogue,
            sent.options,
            alone=True,
            flatten=flatten,
        )
        self.blocks_ahead = _blocks_ahead(product, data_of(b)) if self.launch.chained else 0
        finish = Finish.of(bias)
        self.launch.compile(self._arguments(a, b, finish, out))
        if self.sum is not None:
            self.sum.compile(finish, out)

    @property
    def replayable(self) -> bool:
        """Whether a graph of a call can be replayed."""
        return self.product.replayable

    def run(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Enqueue a call on operands of this kind."""
        a, b = self.product.readable(a, b)
        finish = PLAIN if bias is None else Finish.of(bias)
        self.launch(self._arguments(a, b, finish, out))
        if self.sum is not None:
            self.sum.run(finish, out)

    def _arguments(self, a: Operand, b: Operand, finish: Finish, out: torch.Tensor) -> tuple[Any, ...]:
        """Those of `gemm_kernel` for tensors of this kind."""
        x, y, strides = self.product.operands(a, b)
        extra = self.sent.extra(finish, *self.sent.rest)
        c = filled(self.c_template, out)
        problem = self.product.problem
        ahead: tuple[Any, ...] = (None, 0, 0)
        if self.blocks_ahead > 0:
            rows = data_of(b)
            ahead = (rows, rows.stride(0 if self.product.b_how == ROW else 1), self.blocks_ahead)
        return x, y, c, *self.fix_up, extra, self.context, *problem, strides, *ahead


def is_by_blas(
    a: Operand,
    b: Operand,
    config: Config,
    allow_tf32: bool,
    bias: torch.Tensor | None,
    activation: str,
    out: torch.Tensor,
    by_hand: bool = False,
    scheme: Scheme | None = None,
) -> bool:
    """Whether the BLAS multiplies: where the placement asks for that, it can, and it isn't slow or the caller's own
    choice (by_hand)."""
    if config.placement not in BY_BLAS or why_not(a, b, bias, activation, out, allow_tf32):
        return False
    if scheme is not None:
        assert isinstance(a, Scaled)
        assert isinstance(b, Scaled)
        return takes(a, b, not promoted(scheme), out)
    return by_hand or not is_slow(data_of(a), data_of(b), out)


def plan_gemm(
    a: Operand,
    b: Operand,
    config: Config,
    allow_tf32: bool,
    bias: torch.Tensor | None,
    activation: str,
    out: torch.Tensor,
    workspace: Workspace,
    sent: Sent | None = None,
    by_hand: bool = False,
    scheme: Scheme | None = None,
    roomy: bool = False,
    squares: torch.Tensor | None = None,
) -> GemmPlan | BlasPlan:
    """As for `GemmPlan`, but by the BLAS, which leaves no squares, where `is_by_blas`. roomy: as for `BlasPlan`."""
    given = (config, allow_tf32, bias, activation, out)
    own = partial(GemmPlan, a, b, *given, workspace, sent, squares=squares, scheme=scheme)
    if not is_by_blas(a, b, *given, by_hand, scheme):
        return own()
    fast = scheme is not None and not promoted(scheme)
    # Where ranks don't wait for one another the call follows at once, and loads as well: each new number of rows would
    # be multiplied twice.
    loads = workspace.heap is not None and workspace.is_voted_on
    return BlasPlan(a, b, bias, out, own, loads=loads, fast=fast, roomy=roomy)


def _check_by_hand(
    config: Config, a: Operand, b: Operand, bias: torch.Tensor | None, activation: str, out: torch.Tensor,
    allow_tf32: bool,
) -> None:  # fmt: skip
    """ValueError for a caller's configuration that a GEMM alone can't run with."""
    try:
        find_placement("gemm", config.placement)
    except ValueError as error:
        raise ValueError(f"{error}; start from stream_k.choose('gemm', ..)") from None
    reason = why_not(a, b, bias, activation, out, allow_tf32) if config.placement == "blas" else ""
    if reason:
        raise ValueError(f"Config.placement is 'blas', but {reason}; leave config out, or take 'after'")


def _planned(
    a: torch.Tensor, b: torch.Tensor, config: Config | None, allow_tf32: bool, added: torch.Tensor | None,
    activation: str, out: torch.Tensor, workspace: Workspace, mode: invariance.Invariance,
) -> GemmPlan | BlasPlan:  # fmt: skip
    """The plan of a call; config: the caller's own."""
    sizes = (a.shape[0], b.shape[1], a.shape[1], a.dtype, 1, a.device)
    if config is not None:
        check_invariant("gemm", config, *sizes, mode)
    chosen = config or choose("gemm", *sizes, allow_tf32=allow_tf32, invariance=mode)
    x, y = with_inner_size(a, b)
    by_hand = config is not None
    return plan_gemm(x, y, chosen, allow_tf32, added, activation, out, workspace, by_hand=by_hand)


def _planned_scaled(
    a: torch.Tensor, b: torch.Tensor, config: Config | None, scaling: Scaling, added: torch.Tensor | None,
    activation: str, out: torch.Tensor, workspace: Workspace, mode: invariance.Invariance, roomy: bool,
) -> GemmPlan | BlasPlan:  # fmt: skip
    """`_planned` of 8-bit operands. roomy: as for `BlasPlan`."""
    (M, K), N = a.shape, b.shape[1]
    scheme = scheme_of(scaling, a, b)
    assert scheme is not None
    rules = choose_scaled("gemm", M, N, K, 1, a.device, scheme, mode)
    if config is not None:
        check_scaled("gemm", config, rules, scheme, mode)
    x, y = operands_of(*with_inner_size(a, b), scaling)
    given = (config or rules, False, added, activation, out, workspace)
    return plan_gemm(x, y, *given, scheme=scheme, roomy=roomy)


def run_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out: torch.Tensor | None,
    allow_tf32: bool,
    config: Config | None,
    workspace: Workspace | None,
    residual: torch.Tensor | None = None,
    scaling: Scaling | None = None,
) -> torch.Tensor:
    """Make a call of `gemm`, planned the first time, whatever becomes of its gradient.

    residual: [M, N], like the result, contiguous, checked; added to the GEMM's result before that is rounded, where
    there is no activation. scaling: of 8-bit operands.
    """
    in_turn = workspace is not None
    if workspace is None and isinstance(a, torch.Tensor):
        workspace = local_workspace(a.device)
    recorded = trace.current.get() is not None
    mode = invariance.current(workspace)
    more = None if residual is None else kind(residual)
    key = (
        "gemm",
        left_kind(a),
        kind(b),
        kind(bias),
        kind(out),
        more,
        activation,
        allow_tf32,
        config,
        recorded,
        mode,
        kind_of(scaling),
    )
    plan = workspace.plans.get(key) if workspace is not None else None
    if plan is None:
        M, N, K = check_product(a, b, bias, activation, scaling)
        check_config(config)
        results = ELEMENTS[a.dtype].results if scaling is None else (scaling.result,)
        check_output(out, (M, N), results, a, b, bias)
        assert workspace is not None
        check_device(a, workspace.device)
        workspace.check()
        roomy = out is None
        if out is None:
            out = new_result(M, N, results[0], a.device, scaling)
        if min(M, N) == 0:
            return out
        if ELEMENTS[result_dtype(a, scaling)].widened:
            # The same product in fp32, rounded once.
            operands = (a.float(), b.float()) if scaling is None else (a, b)
            wide_scaling = None if scaling is None else scaling._replace(result=torch.float32)
            wide_bias = None if bias is None else bias.float()
            wide_residual = None if residual is None else residual.float()
            wide = (*operands, wide_bias, activation, None, allow_tf32, config, workspace)
            return out.copy_(run_gemm(*wide, wide_residual, wide_scaling))
        added = in_one(bias, residual)
        if config is not None:
            _check_by_hand(config, *operands_of(a, b, scaling), added, activation, out, allow_tf32)
        with on_device(workspace.device):
            if scaling is None:
                plan = _planned(a, b, config, allow_tf32, added, activation, out, workspace, mode)
            else:
                given = (config, scaling, added, activation, out, workspace, mode)
                plan = _planned_scaled(a, b, *given, roomy)
        if planning.keeps_plans():
            workspace.plans[key] = plan
    elif out is not None:
        claim(out, a, b, bias)
    else:
        dtype = ELEMENTS[a.dtype].results[0] if scaling is None else scaling.result
        out = new_result(a.shape[0], b.shape[1], dtype, a.device, scaling)
    if planning.here.mode is not None:
        return out
    a, b = with_inner_size(a, b)
    added = bias if residual is None else in_one(bias, residual)
    if not in_turn and isinstance(plan, BlasPlan) and plan.multiplies():
        # It takes nothing of the device's workspace, so it waits for no other call there.
        plan.run(*operands_of(a, b, scaling), added, out)
        return out
    with workspace.begin(None):  # type: ignore[union-attr]
        plan.run(*operands_of(a, b, scaling), added, out)
    return out
