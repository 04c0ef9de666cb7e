"""`GemmOp`: an op that begins with a GEMM, as data, and how a call of one is checked, planned the first time, and run.

    OP = register_gemm(GemmOp(name="gemm_all_reduce", a_cut="K", b_cut="K", out_cut="", plan=_make_plan, ...))
    result = call(OP, Request(a, b, out, bias, "none", False, False, config), group, workspace)

How A, B and the result are cut says nearly all: the shapes, what ranks must agree on, whether peers write the result.
The first call of a kind is planned: all ranks compare what they are about to do (`CallMismatch` when it differs),
allocate, compile and load every kernel, and wait for one another. Later calls look the plan up and launch it: no
meeting of the ranks, no allocation but those of the result and of copied operands. A kind is the op, shapes, strides,
dtypes and alignments of the tensors, and all other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from pyrocshmem import trace
from pyrocshmem.calls import invariance, planning
from pyrocshmem.calls.call_name import CallName
from pyrocshmem.calls.invariance import TP
from pyrocshmem.calls.kernel_launch import Launch, kinds
from pyrocshmem.calls.op import Op, Sizes, register
from pyrocshmem.calls.operators import dispatched, find, name_of, needs_gradient, ops, ranks, refuse
from pyrocshmem.calls.tensors import aligned, kind, left_kind
from pyrocshmem.calls.workspace import Workspace, find_workspace
from pyrocshmem.checks import as_integer
from pyrocshmem.collectives.consumer import consumer_kernel, gate_launch
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.heap import Heap
from pyrocshmem.hosts import Hosts
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.choice.config import (
    BY_BLAS,
    BY_BLOCKS,
    BY_MESSAGE,
    BY_ROWS,
    Config,
    changed,
    check_config,
    with_a_free_multiprocessor,
)
from pyrocshmem.stream_k.choice.invariant import in_blocks
from pyrocshmem.stream_k.choice.placement import Placement
from pyrocshmem.stream_k.choice.rules import cost_model
from pyrocshmem.stream_k.choice.scaled import check_scaled, choose_scaled
from pyrocshmem.stream_k.choice.table import check_invariant, choice, choose_together
from pyrocshmem.stream_k.local_gemm.operands import check_output, check_product, claim, in_one
from pyrocshmem.stream_k.local_gemm.plan import run_gemm, with_inner_size
from pyrocshmem.stream_k.local_gemm.product import Product, make_product, schedule_of
from pyrocshmem.stream_k.local_gemm.scales import (
    Scaled,
    Scaling,
    Scheme,
    kind_of,
    operands_of,
    promoted,
    recipe_of,
    result_dtype,
    scales_a_row,
    scaling_of,
    scheme_of,
)
from pyrocshmem.stream_k.ops.batches import by_rows, is_batched, scales_of_rows, scattered
from pyrocshmem.stream_k.ops.planned import FusedPlan
from pyrocshmem.target import num_sms
from pyrocshmem.torch_contexts import makes_normal_tensors, on_device

# Long enough for every rule that splits tiles.
_ENDLESS_K = 1 << 40
# Shares of K that, rounded to multiples of it, are equal have one configuration: ranks' may differ by so little.
_AS_LONG = 64
# Of an sm_90's 65,536 registers, those that a GEMM of 8 warps and 192 a thread leaves; and what a consumer needs.
_BESIDE_A_GEMM, _FEWEST = 16_384, 48
# Where a rank's schedule is its own affair; and there are no squared partials.
_WHOLE = (*BY_ROWS, *BY_BLOCKS, *BY_MESSAGE)


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
    partial_dtype: torch.dtype | None = None
    num_rows: int | None = None
    save_gathered: bool = False
    # What an op has beside these, in an order of its own; all ranks bring the same.
    options: tuple[Hashable, ...] = ()
    # Of an all-reduce without an activation: [M, N], contiguous, checked; added to the sum before that is rounded.
    residual: torch.Tensor | None = None
    # Of 8-bit operands.
    scaling: Scaling | None = None


# Of ops whose calls have no arguments of their own.
SCHEMA = (
    "(Tensor a, Tensor b, str group, Tensor? bias, str activation, bool allow_tf32, "
    "ScalarType? partial_dtype, Tensor? scale_a=None, Tensor? scale_b=None, ScalarType? out_dtype=None, "
    "bool use_fast_accum=False) -> Tensor"
)
# Of the gradients that a backward returns, those of the last four.
NO_SCALES = (None,) * 4


def _arguments(request: Request, group: str) -> tuple[Any, ...]:
    """The arguments of SCHEMA."""
    a, b, bias, activation = request.a, request.b, request.bias, request.activation
    scales = () if request.scaling is None else request.scaling
    return a, b, group, bias, activation, request.allow_tf32, request.partial_dtype, *scales


@dataclass(frozen=True, kw_only=True)
class GemmOp(Op):
    """An op that begins with a GEMM, C [M, N] = A [M, K] x B [K, N], M N K global sizes, on R ranks.

    a_cut, b_cut, out_cut: of A, B and the result, the letter of the size that is shared out among the ranks, in blocks
    as `torch.tensor_split` makes them; "": each rank has the whole. Shares of K are as long as ranks like; where the
    result is cut by columns, so are those of N.
    placements: where finished tiles may be consumed, in the order in which the rules ask them. plan: makes the
    launches of a call that is new. over_hosts: makes a call of a group over several hosts, of M rows, into a result;
    returns what `has_second` asks for. None: there are no such calls.
    arguments: a request and the group's name as the schema's arguments; request: the way back.
    """

    a_cut: str = ""
    b_cut: str = ""
    out_cut: str = ""
    placements: tuple[Placement, ...] = ()
    plan: Callable[[Call], FusedPlan] | None = None
    over_hosts: Callable[[Hosts, Request, int, torch.Tensor], Any] | None = None
    arguments: Callable[[Request, str], tuple[Any, ...]] = _arguments

    @property
    def sums(self) -> bool:
        """Whether partial sums are added over ranks."""
        return self.b_cut == "K"

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has the whole result, so that peers may write it."""
        return self.out_cut == ""

    @property
    def has_own_columns(self) -> bool:
        """Whether ranks may have different numbers of columns, even none."""
        return self.out_cut == "N"

    def result_dtype(self, request: Request) -> torch.dtype:
        """Of the result; an op of another dtype than its operands' default overrides it."""
        return ELEMENTS[request.a.dtype].results[0] if request.scaling is None else request.scaling.result

    def has_second(self, request: Request) -> bool:
        """Whether the call returns (result, `plan.second(a)`)."""
        return request.squared_partials or request.save_gathered

    def result_shape(self, M: Any, N: Any, rank: int, world_size: int) -> tuple[Any, Any]:
        """Of this rank's result, of M rows of the whole GEMM and N columns of its B; sizes may be symbolic."""
        # The blocks of `torch.tensor_split`, without a branch on M.
        rows = (M + world_size - 1 - rank) // world_size if self.out_cut == "M" else M
        return rows, N * world_size if self.b_cut == "N" and self.is_replicated else N

    def num_rows(self, request: Request, workspace: Workspace) -> int:
        """M of the whole GEMM. ValueError where `a` has not the rows of this rank."""
        rows, rank, world = request.a.shape[0], workspace.rank, workspace.world_size
        if self.a_cut != "M":
            return rows
        total = rows * world if request.num_rows is None else as_integer("num_rows", request.num_rows)
        first, last = shard_range(total, rank, world)
        if rows != last - first:
            raise ValueError(
                f"a has {rows} rows, rank {rank} of {world} holds {last - first} of {total}; "
                "give num_rows, the rows of all ranks, and the block that torch.tensor_split gives this one"
            )
        return total


def register_gemm(op: GemmOp) -> GemmOp:
    """Register `op`; where it has no run and no shapes of its own, those of SCHEMA."""

    def run_call(
        a: torch.Tensor, b: torch.Tensor, group: str, bias: Any, activation: str, allow_tf32: bool, partial_dtype: Any,
        *scales: Any,
    ) -> Any:  # fmt: skip
        scaling = scaling_of(*scales)
        request = Request(
            a, b, None, bias, activation, False, allow_tf32, None, partial_dtype, scaling=scaling
        )
        return run(op, request, *find(group))

    def shapes(
        a: torch.Tensor, b: torch.Tensor, group: str, bias: Any, activation: str, allow_tf32: bool, partial_dtype: Any,
        *scales: Any,
    ) -> torch.Tensor:  # fmt: skip
        scaling = scaling_of(*scales)
        M, N, _ = check_product(a, b, bias, activation, scaling)
        shape = op.result_shape(M, N, *ranks(group))
        return a.new_empty(shape, dtype=result_dtype(a, scaling))

    def sized(sizes: Sizes) -> Callable[[int], object]:
        heap = sizes.workspace.heap
        assert heap is not None
        # As layers hold it.
        b = sizes.empty(sizes.N, sizes.K).t()
        request = Request(sizes.empty(1, sizes.K), b, None, None, "none", False, False, None)
        return lambda rows: run(op, of_rows(op, request, rows, heap), heap, sizes.workspace)

    return register(
        replace(
            op,
            run=op.run or run_call,
            shapes=op.shapes or shapes,
            schema=op.schema or SCHEMA,
            sized=op.sized or sized,
        )
    )


@dataclass(frozen=True)
class Call:
    """A call that is being planned, equal on every rank but for the operands.

    request: checked; its bias has the residual in it, as `in_one` says. a, b: its operands, with an inner size of at
    least 1. out: its output, or a tensor like it. direct: peers can write `out` itself. config: the one to use.
    num_rows: M of the whole product. longest_k: the largest inner size of all ranks, where their schedules depend on
    it, else 0. alike: the same for calls that differ in nothing but rows and configurations, or None.
    """

    request: Request
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    direct: bool
    config: Config
    workspace: Workspace
    heap: Heap
    num_rows: int
    longest_k: int
    alike: Hashable

    @property
    def wire(self) -> torch.dtype:
        """What partial sums travel in. One rank has none: its sums are rounded once, at the end."""
        if self.heap.world_size == 1:
            return torch.float32
        return self.config.wire_dtype(self.out.dtype)

    @property
    def scheme(self) -> Scheme | None:
        """Of the scales of 8-bit operands."""
        return scheme_of(self.request.scaling, self.request.a, self.request.b)

    def product(
        self,
        stores_fp32: bool,
        row_blocks: int = 0,
        keeps_a: bool = False,
        num_blocks: int | None = None,
        peer_bytes: int = 0,
    ) -> Product:
        """The GEMM of the call; the arguments are `make_product`'s."""
        comm = _comm_programs(self.config)
        return make_product(
            self.a,
            self.b,
            self.config,
            self.request.allow_tf32,
            comm,
            stores_fp32=stores_fp32,
            peer_bytes=peer_bytes,
            longest_k=self.longest_k,
            num_rows=self.num_rows,
            row_blocks=row_blocks,
            num_blocks=num_blocks,
            keeps_a=keeps_a,
            workspace=self.workspace,
            scheme=self.scheme,
            alike=self.alike,
        )


def check_no_gradient(name: str, scaling: Scaling | None, *operands: Any) -> None:
    """ValueError for a call of 8-bit operands that needs a gradient."""
    if scaling is not None and needs_gradient((*operands, scaling.a, scaling.b)):
        raise ValueError(f"{name} of 8-bit operands has no gradient; call it under torch.no_grad()")


def call(op: GemmOp, request: Request, group: Any, workspace: Workspace | None) -> Any:
    """Make a call of an op on the heap of `group`: through its operator where it has a gradient or something watches
    it, straight to its kernels otherwise."""
    scaling = request.scaling
    check_no_gradient(op.name, scaling, request.a, request.b, request.bias)
    if is_batched(request.a):
        divided = op.out_cut == "M"
        first = scattered(request.a, ranks(name_of(group, workspace))[1]) if divided else None
        if scaling is not None:
            request = request._replace(scaling=scaling._replace(a=scales_of_rows(scaling.a, request.a)))
        return by_rows(
            lambda a, out: call(op, request._replace(a=a, out=out), group, workspace),
            request.a,
            request.out,
            first,
        )
    whole = request.out is None and request.config is None and not request.squared_partials
    if dispatched(request.a, request.b, request.bias, whole=whole):
        return through_operator(op, request, name_of(group, workspace))
    return run(op, request, group, workspace)


ACTIVATIONS = {"relu": torch.relu, "gelu": functional.gelu, "silu": functional.silu}


def through_operator(op: GemmOp, request: Request, group: str) -> torch.Tensor:
    """Make a call that has a gradient or that something watches; group: the name of one, see `name_of`.

    Where there is a gradient, an activation is PyTorch's own, on what the op computes without it: that is kept for the
    backward pass, in the dtype of the result, and rounded to it before the activation, not after. ValueError where the
    request has what an operator has not.
    """
    check_product(request.a, request.b, request.bias, request.activation, request.scaling)
    refuse(op.name, out=request.out, config=request.config, squared_partials=request.squared_partials)
    late = request.activation if needs_gradient((request.a, request.b, request.bias)) else "none"
    if late != "none":
        request = request._replace(activation="none")
    found = getattr(ops, op.name)(*op.arguments(request, group))
    value = found[0] if isinstance(found, tuple) else found
    return ACTIVATIONS[late](value) if late != "none" else value


def run(op: GemmOp, request: Request, group: Any, workspace: Workspace | None) -> Any:
    """Make a call, whatever becomes of its gradient: returns out, or (out, squares) or (out, gathered) where they are
    asked for."""
    if request.partial_dtype is not None and not op.sums:
        request = request._replace(partial_dtype=None)  # of its gradient's sums
    a, b, out, bias = request[:4]
    heap, workspace = find_workspace(group, workspace)
    if workspace.hosts is not None:
        return _run_over_hosts(op, request, workspace.hosts, workspace)
    offset = None if out is None or not op.is_replicated else symmetric_offset(heap, out)
    residual = request.residual
    more = None if residual is None else kind(residual)
    recorded = trace.current.get() is not None
    mode = invariance.current(workspace)
    key = (
        op.name,
        left_kind(a),
        kind(b),
        kind(bias),
        kind(out),
        more,
        offset,
        *request[4:-2],
        recorded,
        mode,
        None if request.scaling is None else kind_of(request.scaling),
    )
    plan = workspace.plans.get(key)
    if plan is None:
        check_product(a, b, bias, request.activation, request.scaling)
        check_config(request.config)
        M = op.num_rows(request, workspace)
        shape = op.result_shape(M, b.shape[1], heap.rank, heap.world_size)
        check_output(out, shape, (op.result_dtype(request),), a, b, bias)
        if request.config is not None and request.partial_dtype is not None:
            raise ValueError(
                f"partial_dtype is {request.partial_dtype} beside a config, which says that itself"
            )
        if mode and request.squared_partials:
            raise ValueError(
                f"squared_partials of {op.name} are sums over the columns of a tile, whose width depends on M, and the "
                f"call is {mode}"
            )
        simple = _without_plan(op, request, M, shape, heap, workspace)
        if simple is not None:
            return simple
        with on_device(heap.device):
            plan = _make_plan(op, key, request, offset, M, shape, heap, workspace)
    elif out is not None:
        claim(out, a, b, bias)
    if out is None:
        out = torch.empty(plan.shape, dtype=plan.dtype, device=a.device)
    if a.shape[1] == 0:
        a, b = with_inner_size(a, b)
    if planning.here.mode is not None:
        planning.placed(plan.placement)
        return (out, plan.second(request.a)) if op.has_second(request) else out
    added = bias if residual is None else in_one(bias, residual)
    x, y = (a, b) if request.scaling is None else operands_of(a, b, request.scaling)
    # What the call leaves in the workspace is read before another stream may write there.
    with workspace.begin(plan.called):
        if plan.graphs.never:
            plan.run(x, y, added, out)
        else:
            scales = () if request.scaling is None else request.scaling[:2]
            plan.graphs.run((a, b, added, out, *scales), partial(plan.run, x, y, added, out))
        if plan.result is not None:
            out.copy_(plan.result)
        return (out, plan.second(request.a)) if op.has_second(request) else out


def _run_over_hosts(op: GemmOp, request: Request, hosts: Hosts, workspace: Workspace) -> Any:
    """As `run`, of a group over several hosts."""
    a, b, out, bias = request[:4]
    N, asked = check_product(a, b, bias, request.activation, request.scaling)[1], request.partial_dtype
    if op.over_hosts is None:
        raise ValueError(f"{op.name} has no calls of a group over several hosts")
    if request.config is not None or request.squared_partials:
        raise ValueError(f"{op.name} takes no config and has no squared_partials over several hosts")
    result = op.result_dtype(request)
    if asked is not None and ELEMENTS[asked].wide and not ELEMENTS[result].wide:
        raise ValueError(
            f"partial_dtype is {asked}; between hosts sums travel in the result's dtype, {result}"
        )
    if (mode := invariance.current(workspace)) == TP:
        raise ValueError(f"{op.name} is not {mode} over several hosts: each host's sum is rounded")
    if planning.here.mode is not None:
        raise ValueError(f"{op.name} can't be made ready over several hosts before it is called")
    if a.device != hosts.device:
        raise ValueError(f"a is on {a.device}, the heap of this rank on {hosts.device}")
    M = op.num_rows(request, workspace)
    shape = op.result_shape(M, N, hosts.rank, hosts.world_size)
    check_output(out, shape, (result,), a, b, bias)
    if out is None:
        out = torch.empty(shape, dtype=result, device=a.device)
    words = f"{op.name} of {M} x {'own columns' if op.has_own_columns else N} {a.dtype}, {request.activation}"
    residual = request.residual is not None
    words += f", {bias is not None=}, {residual=}, tf32={request.allow_tf32}{invariance.of_call(workspace)}"
    words += f", {scales_described(a, b, request.scaling, op.has_own_columns)}"
    with hosts.call(words), invariance.at_least(mode):
        second = op.over_hosts(hosts, request, M, out)
    return (out, second) if op.has_second(request) else out


def symmetric_offset(heap: Heap, out: torch.Tensor | None) -> int | None:
    """Byte offset of a contiguous `out` on the heap, where peers can write it directly; None for any other
    tensor."""
    if not isinstance(out, torch.Tensor) or not 0 <= out.data_ptr() - heap.base < heap.nbytes:
        return None
    if not out.is_contiguous() or not aligned(out) or not heap.is_symmetric(out):
        return None
    return heap.offset(out)


def _without_plan(
    op: GemmOp, request: Request, num_rows: int, shape: tuple[int, int], heap: Heap, workspace: Workspace
) -> Any:
    """The result of a call that needs no plan of its own: one rank, no elements, bf16 on the CPU target. None
    for any other. `shape`: of the result."""
    a, b, out, bias, activation, squared_partials, allow_tf32, config = request[:8]
    residual = request.residual
    has_second = op.has_second(request)
    if a.device != heap.device:
        raise ValueError(f"a is on {a.device}, the heap of this rank on {heap.device}")
    if num_rows == 0 or (shape[1] == 0 and not op.has_own_columns):
        empty = out if out is not None else a.new_empty(shape, dtype=op.result_dtype(request))
        second = (
            a.new_empty(a.shape) if request.save_gathered else torch.zeros(a.shape[0], 0, device=a.device)
        )
        return (empty, second) if has_second else empty
    if heap.world_size == 1 and not squared_partials:
        with invariance.at_least(invariance.current(workspace)):
            alone = _of_one_rank(op, config, num_rows, b, allow_tf32)
            product = run_gemm(
                a, b, bias, activation, out, allow_tf32, alone, None, residual, request.scaling
            )
        second = a.clone() if request.scaling is None else Scaled(a.clone(), request.scaling.a.clone())
        return (product, second) if has_second else product
    scaling = request.scaling
    if ELEMENTS[result_dtype(a, scaling)].widened:
        # The same in fp32, rounded once.
        wide_bias = None if bias is None else bias.float()
        wide = request._replace(out=None, bias=wide_bias)
        if scaling is None:
            wide = wide._replace(a=a.float(), b=b.float())
        else:
            wide = wide._replace(scaling=scaling._replace(result=torch.float32))
        if residual is not None:
            wide = wide._replace(residual=residual.float())
        found = run(op, wide, heap, workspace)
        value, second = found if has_second else (found, None)
        value = value.to(op.result_dtype(request)) if out is None else out.copy_(value)
        if second is not None and request.save_gathered and scaling is None:
            second = second.to(a.dtype)
        return (value, second) if has_second else value
    return None


def _of_one_rank(
    op: GemmOp, config: Config | None, M: int, b: torch.Tensor, allow_tf32: bool
) -> Config | None:
    """A configuration by hand for the GEMM alone that an op is on one rank, where no placement makes a difference."""
    if config is None and op.sums and invariance.current() == TP and b.shape[1] > 0:
        K, N = b.shape
        found = choice("gemm", M, N, K, b.dtype, 1, b.device, allow_tf32=allow_tf32, invariance=TP)
        config = in_blocks(found.config, found.rules.facts)
    if config is None or config.placement in BY_BLAS:  # `gemm` knows where the BLAS can
        return None
    return replace(config, placement="after")


def longest_k(workspace: Workspace, call: CallName, K: int) -> int:
    """The inner size by which all ranks choose the configurations of a sum, since their shares may differ: the largest
    of those that they had when they first asked with one as long as K, whatever the rows."""
    assert workspace.heap is not None
    mode = invariance.of_call(workspace)
    equal = invariance.current(workspace) == TP

    def asked(size: int) -> Hashable:
        return f"{call.text}: configuration{mode}", size if equal else round(size / _AS_LONG)

    mine = asked(K)
    if mine not in workspace.agreed:
        votes = workspace.heap.vote(f"{call}: configuration{mode}", str(K).encode())
        sizes = [int(size) for size in votes]
        if equal and len(set(sizes)) > 1:
            raise ValueError(f"calls are tp-invariant here, of equal shares of K; the ranks' are {sizes}")
        workspace.agreed |= {asked(size): max(sizes) for size in sizes}
    return workspace.agreed[mine]


def _chosen(op: GemmOp, request: Request, M: int, workspace: Workspace) -> Config:
    """The configuration of a call that names none."""
    heap = workspace.heap
    assert heap is not None
    K, N = request.b.shape
    dtype, partial_dtype = request.a.dtype, request.partial_dtype
    mode = invariance.current(workspace)
    if op.sums:
        K = longest_k(workspace, CallName.of(f"{op.name}(# x {N} {dtype}, partials {partial_dtype})", M), K)
    # A rank without columns multiplies nothing: any N will do.
    sizes = (op.name, M, max(N, 1), K, dtype)
    if request.scaling is not None:
        scheme = Scheme(recipe_of(request.scaling, request.a, request.b), request.scaling.fast)
        size = (op.name, M, max(N, 1), K, heap.world_size, heap.device)
        more = (scheme, mode, request.scaling.result, partial_dtype)
        config = choose_scaled(*size, *more)
        if request.squared_partials and config.placement in _WHOLE:
            config = choose_scaled(*size, *more, placement=_with_squares(config))
        return config
    if request.squared_partials:
        # They have fewer placements than the table was made with.
        facts = (*sizes, heap.world_size, heap.device, partial_dtype)
        config = cost_model(*facts, allow_tf32=request.allow_tf32)
        if config.placement not in _WHOLE:
            return config
        return cost_model(*facts, placement=_with_squares(config), allow_tf32=request.allow_tf32)
    found = choose_together(heap, *sizes, partial_dtype, request.allow_tf32, mode)
    return _gathering_as(found.rules.config, found.config) if op.has_own_columns else found.config


def _with_squares(config: Config) -> str:
    """The placement that has squared partials, in the place of this one's."""
    return "after" if config.placement in BY_MESSAGE else "own_stream"


def _gathering_as(config: Config, found: Config) -> Config:
    """`found`, from the table, if it can gather pieces of as many rows as `config`, as all ranks do; else `config`."""
    alike = found.placement == config.placement
    if not alike or found.placement != "copy_engine":
        return found if alike else config
    chunk, rest = divmod(config.chunk * config.block_m, found.block_m)
    return config if rest else replace(found, chunk=chunk)


def _by_hand(config: Config, op: GemmOp) -> str:
    """What ranks must have in common of a configuration that the caller gave. Where they have columns of their own,
    their products may differ: the placement, and how many rows a copy has."""
    if not op.has_own_columns:
        return str(config)
    if config.placement != "copy_engine":
        return config.placement
    return f"copy_engine, {config.chunk * config.block_m} rows at a time"


@makes_normal_tensors
def _make_plan(
    op: GemmOp,
    key: Hashable,
    request: Request,
    offset: int | None,
    num_rows: int,
    shape: tuple[int, int],
    heap: Heap,
    workspace: Workspace,
) -> FusedPlan:
    """Plan a call: on all ranks together, the first time that they make it. `shape`: of the result."""
    name, out, residual, asked = op.name, request.out, request.residual, request
    M, dtype = num_rows, request.a.dtype
    K, N = request.b.shape
    mode = invariance.current(workspace)
    config = request.config or _chosen(op, request, M, workspace)
    names = [placement.name for placement in op.placements]
    if config.placement not in names:
        raise ValueError(
            f"Config.placement is {config.placement!r}, {name} has {', '.join(names)}; "
            f"start from stream_k.choose({name!r}, ..)"
        )
    if mode == TP and request.scaling is not None:
        raise ValueError(f"{name} of 8-bit operands is not {mode}")
    scheme = scheme_of(request.scaling, request.a, request.b)
    if request.config is not None and scheme is not None:
        rules = _chosen(op, request, M, workspace) if mode else config
        check_scaled(op.name, config, rules, scheme, mode)
    elif request.config is not None:
        check_invariant(op.name, config, M, N, K, dtype, heap.world_size, heap.device, mode)
    config = with_a_free_multiprocessor(config, heap.device)
    if request.squared_partials and config.placement in _WHOLE:
        raise ValueError(
            f"Config.placement is {config.placement!r}, which has no squared partials; use another"
        )
    # Strides and alignment may differ between ranks: a layout that is new on this one alone is planned here alone.
    a, b = with_inner_size(request.a, request.b)
    example = out if out is not None else torch.empty(shape, dtype=op.result_dtype(request), device=a.device)
    alike = _alike(op, request, a, b, example, offset, mode, workspace)
    # What follows from these, the configuration above all, is the same on all ranks, whatever M.
    share_counts = not op.has_own_columns and _depends_on_k(config, M, N, heap.device)
    shared, known = workspace.plans.shared, ("text", alike, config.partial_dtype, request.config)
    text = shared.get(known)
    if text is None:
        text = shared[known] = _text(op, request, config, offset, workspace)
    call = CallName.of(text, M)
    request = request._replace(bias=in_one(request.bias, residual))

    def make(longest_k: int) -> FusedPlan:
        direct = offset is not None
        # Elsewhere a rank's schedule has its own.
        longest_k = longest_k if share_counts else 0
        made = Call(request, a, b, example, direct, config, workspace, heap, num_rows, longest_k, alike)
        plan = planned(made)
        most = num_sms(heap.device) - plan.least_free
        if not plan.least_free or config.num_programs <= most:
            return plan
        # Known only now that its kernels are compiled; those of fewer programs are the same.
        return planned(replace(made, config=changed(config, num_programs=most)))

    def planned(made: Call) -> FusedPlan:
        assert op.plan is not None
        plan = op.plan(made)
        plan.called, plan.placement = call, config.placement
        plan.shape, plan.dtype = shape, example.dtype
        plan.make_graphs()
        plan.compile(*operands_of(a, b, request.scaling), request.bias, example)
        return plan

    def again(rows: int) -> object:
        return run(op, of_rows(op, asked, rows, heap), heap, workspace)

    workspace.make_room(call, again)
    plan: FusedPlan = workspace.planned_together(call, make, K, share_counts)
    if planning.keeps_plans():
        workspace.plans[key] = plan
    return plan


def _text(op: GemmOp, request: Request, config: Config, offset: int | None, workspace: Workspace) -> str:
    """What ranks compare of a call, as `CallName` has it."""
    a, b = request.a, request.b
    K, N = b.shape
    partials = f"partials={config.wire_dtype(op.result_dtype(request))}, " if op.sums else ""
    return (
        f"{op.name}(# x {K if op.has_own_columns else N} {a.dtype}, bias={request.bias is not None}, "
        f"residual={request.residual is not None}, activation={request.activation}, "
        f"squares={request.squared_partials}, tf32={request.allow_tf32}, {partials}"
        f"{scales_described(a, b, request.scaling, op.has_own_columns)}"
        f"{f'options={request.options}, ' if request.options else ''}"
        f"out_offset={offset}, recorded={trace.current.get() is not None}, {num_sms(a.device)} SMs"
        f"{'' if request.config is None else f', {_by_hand(request.config, op)}'}{invariance.of_call(workspace)})"
    )


def _alike(
    op: GemmOp,
    request: Request,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    offset: int | None,
    mode: invariance.Invariance,
    workspace: Workspace,
) -> Hashable:
    """`Call.alike`: of all of it but its rows and its configuration. One object, since plans ask by it often."""
    scaling = request.scaling
    scales, rest = ((), ()) if scaling is None else (scaling[:2], scaling[2:])
    tensors = (a, b, out, request.bias, request.residual, *scales)
    facts = (
        op.name,
        kinds(tensors),
        tuple(None if x is None else (x.stride(), x.shape[1:]) for x in tensors),
        b.shape,
        scheme_of(scaling, request.a, request.b),
        request.activation,
        request.squared_partials,
        request.allow_tf32,
        request.save_gathered,
        request.options,
        rest,
        offset,
        trace.recorder() is not None,
        mode,
    )
    return workspace.plans.shared.setdefault(("alike", facts), object())


def scales_described(
    a: torch.Tensor, b: torch.Tensor, scaling: Scaling | None, own_columns: bool = False
) -> str:
    """What ranks must have in common of the scales: what a configuration follows, and what travels with A's rows, where
    ranks have columns of their own."""
    scheme = scheme_of(scaling, a, b)
    if scaling is None or scheme is None:
        return ""
    numbers = f"{scales_a_row(scaling.a)} scales a row, " if own_columns else ""
    return f"b={b.dtype}, {numbers}result={scaling.result}, use_fast_accum={not promoted(scheme)}, "


def of_rows(op: GemmOp, request: Request, rows: int, heap: Heap) -> Request:
    """A call like `request`, of another number of rows of all ranks, to be planned."""
    a, out, residual = request.a, request.out, request.residual
    first, last = shard_range(rows, heap.rank, heap.world_size) if op.a_cut == "M" else (0, rows)
    if out is not None:
        shape = op.result_shape(rows, request.b.shape[1], heap.rank, heap.world_size)
        out = out.new_empty(shape)
    scaling = request.scaling
    if scaling is not None and scaling.a.numel() > 1:
        scaling = scaling._replace(a=scaling.a.new_empty(last - first, scaling.a.shape[1]))
    return request._replace(
        scaling=scaling,
        a=a.new_empty(last - first, a.shape[1]),
        out=out,
        residual=None if residual is None else residual.new_empty(rows, residual.shape[1]),
        num_rows=rows if op.a_cut == "M" else None,
    )


def _comm_programs(config: Config) -> int:
    """Programs of the GEMM's launch that consume."""
    return config.num_comm_programs if config.placement == "beside" else 0


def _depends_on_k(config: Config, M: int, N: int, device: torch.device) -> bool:
    """Whether ranks must agree on the longest of their inner sizes: where tiles may be split, it says which program
    finishes which tile, and who waits for whom. Whole tiles have one order, and what consumes row blocks and whole
    products waits for the own rank's tiles alone: there a share of K is its rank's own affair."""
    if config.placement in _WHOLE:
        return False
    return schedule_of(config, M, N, _ENDLESS_K, device, _comm_programs(config)).has_shared_tiles


def consumer_launches(
    product: Product, op: int, consumer: Any, options: tuple[int, ...], world_size: int, device: torch.device
) -> tuple[Launch | None, Launch]:
    """(gate, launch) of a consumer that isn't part of the GEMM's launch: after it, on all multiprocessors, without a
    gate, or on a stream of its own behind one."""
    config = product.config
    constants = {
        "CONSUMER": consumer,
        "OPTIONS": options,
        "WORLD": world_size,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
    }
    processors = num_sms(device)
    if config.placement == "after":
        grid = min(product.schedule.num_tiles, config.num_programs or processors)
        return None, Launch(consumer_kernel, grid, constants, config.num_warps, 1)
    grid = min(product.schedule.num_tiles, config.num_comm_programs)
    # Those that share an SM with a program of the GEMM; more of them have SMs for themselves.
    most = _BESIDE_A_GEMM // (32 * config.comm_warps * -(-grid // processors)) // 8 * 8
    consumes = Launch(
        consumer_kernel, grid, constants, config.comm_warps, 1, max_registers=most if most >= _FEWEST else 0
    )
    return gate_launch(op, world_size), consumes
