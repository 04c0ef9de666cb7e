"""PyTorch's own operators, served by this library: a program that calls `torch.ops.symm_mem.*` stays as it is.

    from pyrocshmem import torch_ops

    with torch_ops.install():  # or: installed = torch_ops.install(); ..; installed.uninstall()
        x, (q, k, v) = torch.ops.symm_mem.fused_all_gather_matmul(x, [wq.t(), wk.t(), wv.t()], 0, group.group_name)

    torch.ops.symm_mem.          becomes
    fused_all_gather_matmul      stream_k.all_gather_gemm; along the last dimension collectives.all_scatter and gemm
    fused_matmul_reduce_scatter  stream_k.gemm_reduce_scatter; along the last dimension that of B' A', transposed
    fused_all_gather_scaled_matmul, fused_scaled_matmul_reduce_scatter     the same of 8-bit operands
    one_shot_all_reduce          collectives.all_reduce
    two_shot_all_reduce_         collectives.all_reduce, in place

Schemas, shapes and strides of results are PyTorch's, and so is `Meta`, by which torch.compile traces the operators.
Compiled functions see an install and an uninstall as eager calls do. Like PyTorch's the operators have no gradient:
frameworks put them into a `torch.autograd.Function`. An operand is any tensor of the target's device, float16, bfloat16
or float32: the all-reduces need no symmetric memory. fp32 is multiplied as `torch.backends.cuda.matmul` says.

Partial sums travel in the operands' dtype, as PyTorch's do, and are added in fp32; the sum is rounded once. "avg" is
that sum divided by the number of ranks: exact where that is a power of two and the sum is in the dtype's range, and one
rounding more elsewhere. All-reduces take "avg", too; which algorithm is faster they choose by size, whatever their
name. PyTorch's limits stay: torch.compile can't trace `two_shot_all_reduce_`, whose result is its operand.

What this library can't do goes to PyTorch's kernel, where there is one: none on a CPU. That is another dtype, a group
of more than 8 ranks, or one that was not asked for; of 8-bit operands results that are no bf16, fp16 or fp32, scales of
results, and a gather along the last dimension.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

from pyrocshmem import target  # isort: skip  # before Triton
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from pyrocshmem import signal
from pyrocshmem.calls.tensors import shape_of
from pyrocshmem.calls.workspace import Workspace, find_workspace
from pyrocshmem.collectives import all_reduce, all_scatter
from pyrocshmem.elements import DTYPES, SCALED_RESULTS, float8, names
from pyrocshmem.groups import as_group
from pyrocshmem.heap import Heap
from pyrocshmem.stream_k.local_gemm.operands import check_product
from pyrocshmem.stream_k.local_gemm.plan import run_gemm
from pyrocshmem.stream_k.local_gemm.scales import Scaling, data_of
from pyrocshmem.stream_k.ops.all_gather_gemm import OP as GATHER
from pyrocshmem.stream_k.ops.gemm_reduce_scatter import OP as SCATTER
from pyrocshmem.stream_k.ops.op import Request, run
from pyrocshmem.stream_k.ops.several import Several, run_products

NAMESPACE = "symm_mem"
REDUCTIONS = ("sum", "avg")
_MOST_RANKS = int(signal.MAX_WORLD.value)


class Installed:
    """What `install` returns: `uninstall`, which the end of a `with` block calls, too."""

    def __init__(self, group_name: str | None) -> None:
        self.group_name = group_name
        self._ended = False

    def uninstall(self) -> None:
        """Take this install back. With the last one PyTorch's kernels are there again, in compiled functions too; until
        then the groups of the others are served. A second call does nothing."""
        with _lock:
            if not self._ended:
                self._ended = True
                _served[self.group_name] -= 1
                _forget_unserved()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def install(group: Any = None) -> Installed:
    """Serve `torch.ops.symm_mem.*` (the module lists which) until the result's `uninstall`, or the end of its `with`.

    group: a ProcessGroup or a 1-D DeviceMesh, whose calls are served; None: the calls of every group. Others go to
    PyTorch's kernels. A group gets its heap at its first call, or has the one of `heap_for(group, nbytes)`. Installs
    may be nested and end in any order: each adds its group. All ranks of a group install alike, between the same calls.

    Raises TypeError for what is no group of torch.distributed, ValueError for one that can't be served (more than 8
    ranks, a mesh of several dimensions, one without this rank), and NotImplementedError where this PyTorch's schemas
    are others than those that are served, with both.
    """
    name = None if group is None else _name_of(group)
    with _lock:
        if not _served:
            try:
                _register()
            except BaseException:
                _forget_unserved()
                raise
        _served[name] += 1
    return Installed(name)


def _name_of(group: Any) -> str:
    names_members = isinstance(group, (dist.ProcessGroup, dist.device_mesh.DeviceMesh))
    if not names_members and group is not dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            f"group is a {type(group).__name__}, allowed: None, ProcessGroup, 1-D DeviceMesh; the operators name their "
            "group, and only these have names"
        )
    num_ranks = as_group(group).world_size
    if num_ranks > _MOST_RANKS:
        raise ValueError(f"the group has {num_ranks} ranks, 1 to {_MOST_RANKS} are supported")
    members = group.get_group() if isinstance(group, dist.device_mesh.DeviceMesh) else group
    return str(members.group_name)


_lock = threading.Lock()
_served: Counter[str | None] = Counter()  # installs by the name of their group; None: of every group
_libraries: list[torch.library.Library] = []
_stock: dict[str, Any] = {}  # PyTorch's kernels for the target's device, where there are any


def _forget_unserved() -> None:
    for name in [name for name, count in _served.items() if count == 0]:
        del _served[name]
    if not _served:
        while _libraries:
            _libraries.pop()._destroy()
        _stock.clear()


def _register() -> None:
    """Put the kernels in the place of PyTorch's; nothing where a schema is not the one that they are for."""
    # PyTorch defines two of the operators, and their Meta kernels, in this module.
    import torch.distributed._symmetric_memory

    missing = {
        name: (schema, shapes) for name, (schema, shapes, _) in OPERATORS.items() if not _has(name, schema)
    }
    key = "CPU" if target.device_type() == "cpu" else "CUDA"
    if missing:
        defined = torch.library.Library(NAMESPACE, "FRAGMENT")
        _libraries.append(defined)
        for name, (schema, shapes) in missing.items():
            defined.define(name + schema)
            defined.impl(name, shapes, "Meta")
    kernels = torch.library.Library(NAMESPACE, "IMPL")
    _libraries.append(kernels)
    for name, (_, _, function) in OPERATORS.items():
        operator = f"{NAMESPACE}::{name}"
        if torch._C._dispatch_has_kernel_for_dispatch_key(operator, key):
            _stock[name] = torch.library.get_kernel(operator, key)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there was a kernel before
            kernels.impl(name, _kernel(name, key, function), key, allow_override=True)


def _has(name: str, schema: str) -> bool:
    """Whether PyTorch has the operator. NotImplementedError where it has another of that name."""
    try:
        found = str(torch._C._get_schema(f"{NAMESPACE}::{name}", ""))
    except RuntimeError:
        return False
    wanted = str(torch._C.parse_schema(f"{NAMESPACE}::{name}{schema}"))
    if found != wanted:
        raise NotImplementedError(
            f"this PyTorch, {torch.__version__}, has {found}; the one that can be served is {wanted}"
        )
    return True


_NO_KERNEL = "PyTorch, which would make the call, has no kernel for this device"


class _NotOurs(Exception):
    """A call is PyTorch's to make. args: the error that says why, for where it has no kernel."""


def _kernel(name: str, key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    stock = _stock.get(name)

    def kernel(*args: Any, **options: Any) -> Any:
        try:
            if torch.is_grad_enabled():
                # Operators without a gradient: what they are made of must not leave a part of one.
                with torch.no_grad():
                    return function(*args, **options)
            return function(*args, **options)
        except _NotOurs as why:
            if stock is None:
                raise why.args[0] from None
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[key])
        return stock.call_boxed(keys, *args, **options)

    return kernel


def _place(
    group_name: str, x: torch.Tensor, allowed: tuple[torch.dtype, ...] = DTYPES
) -> tuple[Heap, Workspace]:
    """Where a call of the group is made, on operands of these dtypes. `_NotOurs` where it isn't."""
    if x.dtype not in allowed:
        raise _NotOurs(TypeError(f"an operand is {x.dtype}, allowed are {names(allowed)}; {_NO_KERNEL}"))
    if None not in _served and group_name not in _served:
        installed = ", ".join(map(repr, _served))
        raise _NotOurs(ValueError(f"group {group_name!r} was not installed, {installed} were; {_NO_KERNEL}"))
    members = as_group(_resolve_process_group(group_name))
    if members.world_size > _MOST_RANKS:
        ranks = f"group {group_name!r} has {members.world_size} ranks, 1 to {_MOST_RANKS} are supported"
        raise _NotOurs(ValueError(f"{ranks}; {_NO_KERNEL}"))
    return find_workspace(members, None)


def _tf32(x: torch.Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"


def _check_dim(name: str, dim: int, x: torch.Tensor) -> None:
    if x.ndim < 2 or not 0 <= dim < x.ndim:
        raise ValueError(
            f"{name} is {dim} and A has shape {tuple(x.shape)}; it must have 2 dimensions or more, and be one of them"
        )


def _check_reduction(reduce_op: str) -> None:
    if reduce_op not in REDUCTIONS:
        raise ValueError(f"reduce_op is {reduce_op!r}, allowed are {', '.join(REDUCTIONS)}")


def _all_gather_matmul(
    a: torch.Tensor, bs: list[torch.Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    heap, workspace = _place(group_name, a)
    _check_dim("gather_dim", gather_dim, a)
    allow_tf32 = _tf32(a)
    if gather_dim == a.ndim - 1:
        rows = a.flatten(0, -2)
        sizes, K = a.shape[:-1], a.shape[-1] * workspace.world_size
        for b in bs:
            check_product(shape_of(rows, (rows.shape[0], K)), b, None, "none")
        whole = all_scatter(rows, group=heap, workspace=workspace)
        products = [run_gemm(whole, b, None, "none", None, allow_tf32, None, None) for b in bs]
        return whole.view(*sizes, K) if return_A else None, [c.view(*sizes, c.shape[1]) for c in products]
    moved = a.movedim(gather_dim, 0) if gather_dim else a
    rows = moved.flatten(0, -2) if a.ndim > 2 else moved
    nothing = [None] * len(bs)
    x = Several(rows, bs, nothing, nothing, allow_tf32=allow_tf32)
    products, gathered = run_products(GATHER, x, return_A, heap, workspace)
    if a.ndim == 2:
        return gathered, products
    sizes = (workspace.world_size * moved.shape[0], *moved.shape[1:-1])

    def unflattened(x: torch.Tensor) -> torch.Tensor:
        return x.view(*sizes, x.shape[1]).movedim(0, gather_dim)

    return None if gathered is None else unflattened(gathered), [unflattened(c) for c in products]


def _matmul_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    heap, workspace = _place(group_name, a)
    _check_dim("scatter_dim", scatter_dim, a)
    _check_reduction(reduce_op)
    by_columns = scatter_dim == a.ndim - 1
    moved = a.movedim(scatter_dim, 0) if scatter_dim and not by_columns else a
    rows = moved.flatten(0, -2) if a.ndim > 2 else moved
    world = workspace.world_size
    divided = check_product(rows, b, None, "none")[1] if by_columns else moved.shape[0]
    if divided % world != 0:
        raise ValueError(
            f"A is {tuple(a.shape)}, B {tuple(b.shape)}: dimension {scatter_dim} of the product is {divided}, and must "
            f"be a multiple of the group's {world} ranks"
        )
    # Rows of the transposed product are columns of this one.
    left, right = (b.t(), rows.t()) if by_columns else (rows, b)
    request = Request(left, right, None, None, "none", False, _tf32(a), None)
    found = run(SCATTER, request, heap, workspace)
    if reduce_op == "avg":
        found.div_(world)
    if by_columns:
        return found.t().contiguous().view(*a.shape[:-1], divided // world)
    if a.ndim == 2:
        return found
    return (
        found.view(divided // world, *moved.shape[1:-1], found.shape[1]).movedim(0, scatter_dim).contiguous()
    )


def _scaling(
    scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: Any, fast: bool, of_result: Any
) -> Scaling:
    """Of a product of 8-bit operands. `_NotOurs` for results that are PyTorch's alone."""
    if of_result is not None or out_dtype not in SCALED_RESULTS:
        what = "a scale" if of_result is not None else f"dtype {out_dtype}"
        allowed = f"allowed is none, and a dtype of {names(SCALED_RESULTS)}"
        raise _NotOurs(TypeError(f"a result of 8-bit operands has {what}, {allowed}; {_NO_KERNEL}"))
    return Scaling(scale_a, scale_b, out_dtype, fast)


def _rows_scale(scale: torch.Tensor, a: torch.Tensor, dim: int, rank: int, world: int) -> torch.Tensor:
    """The scales of this rank's rows of `a`, which are gathered along `dim`, in the order in which they are: given for
    these rows, for those of all ranks, or one for all."""
    whole = [*a.shape]
    whole[dim] *= world
    if scale.ndim == a.ndim and scale.shape[-1] == 1:
        if list(scale.shape[:-1]) == whole[:-1] and world > 1:
            scale = scale.narrow(dim, rank * a.shape[dim], a.shape[dim])
        if scale.shape[:-1] == a.shape[:-1]:
            return scale.movedim(dim, 0).flatten(0, -2)
    if scale.numel() == 1:
        return scale.view(1, 1)
    own, all_ranks = (*a.shape[:-1], 1), (*whole[:-1], 1)
    raise ValueError(
        f"A_scale has shape {tuple(scale.shape)} and A {tuple(a.shape)}; allowed are one element, {own}, "
        f"and {all_ranks} of all ranks' rows"
    )


def _all_gather_scaled_matmul(
    a: torch.Tensor, bs: list[torch.Tensor], scale_a: torch.Tensor, scale_bs: list[torch.Tensor], gather_dim: int,
    group_name: str, biases: list[Any], result_scales: list[Any], out_dtypes: list[Any], use_fast_accum: list[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    heap, workspace = _place(group_name, a, float8())
    _check_dim("gather_dim", gather_dim, a)
    if gather_dim == a.ndim - 1:
        raise _NotOurs(ValueError(f"gather_dim is {gather_dim}, the last one; {_NO_KERNEL}"))
    moved = a.movedim(gather_dim, 0)
    of_rows = _rows_scale(scale_a, a, gather_dim, workspace.rank, workspace.world_size)
    of_each = zip(scale_bs, _dtypes(out_dtypes), use_fast_accum, result_scales, strict=True)
    scalings = [_scaling(of_rows, *each) for each in of_each]
    x = Several(moved.flatten(0, -2), bs, biases, [None] * len(bs), scalings=scalings)
    products, gathered = run_products(GATHER, x, True, heap, workspace)
    sizes = (workspace.world_size * moved.shape[0], *moved.shape[1:-1])
    unflattened = [
        c.reshape(*sizes, c.shape[1]).movedim(0, gather_dim)
        for c in (data_of(gathered).contiguous(), *products)
    ]
    return unflattened[0], unflattened[1:]


def _dtypes(given: list[Any]) -> list[Any]:
    """A list of dtypes as PyTorch's dispatcher hands it on: as such, or as numbers."""
    from torch.distributed import _symmetric_memory

    return list(_symmetric_memory._maybe_convert_scalar_types_to_dtypes(given))


def _scaled_matmul_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, reduce_op: str,
    orig_scatter_dim: int, scatter_dim_after_maybe_reshape: int, group_name: str, output_shape: list[int] | None,
    bias: Any = None, result_scale: Any = None, out_dtype: Any = None, use_fast_accum: bool = False,
) -> torch.Tensor:  # fmt: skip
    heap, workspace = _place(group_name, a, float8())
    _check_dim("scatter_dim_after_maybe_reshape", scatter_dim_after_maybe_reshape, a)
    _check_reduction(reduce_op)
    N, world, dim = b.shape[1], workspace.world_size, orig_scatter_dim
    sizes = [*a.shape[:-1], N] if output_shape is None else [*output_shape[:-1], N]
    if not 0 <= dim < len(sizes) or sizes[dim] % world != 0:
        raise ValueError(
            f"orig_scatter_dim is {dim} of a product of {tuple(sizes)}; that dimension must be a multiple of the "
            f"group's {world} ranks"
        )
    if bias is not None:
        raise _NotOurs(ValueError(f"a bias would be added on every rank; {_NO_KERNEL}"))
    rows, of_rows = a.view(*sizes[:-1], a.shape[-1]), scale_a
    if scale_a.numel() > 1:
        of_rows = scale_a.view(*sizes[:-1], 1)
    by_columns = dim == len(sizes) - 1
    if not by_columns:
        rows = rows.movedim(dim, 0)
        of_rows = of_rows.movedim(dim, 0) if scale_a.numel() > 1 else of_rows
    order = rows.shape[:-1]
    left, of_left = rows.flatten(0, -2), of_rows.flatten(0, -2) if scale_a.numel() > 1 else of_rows
    right, of_right = b, scale_b
    if by_columns:  # rows of the transposed product
        left, right, of_left, of_right = b.t(), left.t(), _turned(scale_b), _turned(of_left)
    scaling = _scaling(of_left, of_right, out_dtype, use_fast_accum, result_scale)
    found = run(
        SCATTER,
        Request(left, right, None, None, "none", False, False, None, scaling=scaling),
        heap,
        workspace,
    )
    if reduce_op == "avg":
        found.div_(world)
    if by_columns:
        return found.t().contiguous().view(*sizes[:-1], N // world)
    return found.view(order[0] // world, *order[1:], N).movedim(0, dim).contiguous()


def _turned(scale: torch.Tensor) -> torch.Tensor:
    return scale.t() if scale.ndim == 2 else scale


def _one_shot_all_reduce(x: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    heap, workspace = _place(group_name, x)
    _check_reduction(reduce_op)
    total = all_reduce(x, group=heap, workspace=workspace)
    return total.div_(workspace.world_size) if reduce_op == "avg" else total


def _two_shot_all_reduce(x: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    heap, workspace = _place(group_name, x)
    _check_reduction(reduce_op)
    all_reduce(x, group=heap, out=x, workspace=workspace)
    return x.div_(workspace.world_size) if reduce_op == "avg" else x


def _shapes_of_gather(
    a: torch.Tensor, bs: list[torch.Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    sizes = [*a.shape]
    sizes[gather_dim] *= _resolve_process_group(group_name).size()
    last = gather_dim == a.ndim - 1
    # Rows lie in the order in which they were gathered.
    order = sizes if last else [sizes.pop(gather_dim), *sizes]

    def laid_out(columns: int) -> torch.Tensor:
        x = a.new_empty(*order[:-1], columns)
        return x if last else x.movedim(0, gather_dim)

    return laid_out(order[-1]) if return_A else None, [laid_out(b.shape[1]) for b in bs]


def _shapes_of_scatter(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    sizes = [*a.shape[:-1], b.shape[1]]
    sizes[scatter_dim] //= _resolve_process_group(group_name).size()
    return a.new_empty(sizes)


def _shapes_of_scaled_gather(
    a: torch.Tensor, bs: list[torch.Tensor], scale_a: torch.Tensor, scale_bs: list[torch.Tensor], gather_dim: int,
    group_name: str, biases: list[Any], result_scales: list[Any], out_dtypes: list[Any], use_fast_accum: list[bool],
) -> tuple[Any, list[torch.Tensor]]:  # fmt: skip
    whole, products = _shapes_of_gather(a, bs, gather_dim, group_name)
    dtypes = zip(products, bs, _dtypes(out_dtypes), strict=True)
    return whole, [c.to(b.dtype if dtype is None else dtype) for c, b, dtype in dtypes]


def _shapes_of_scaled_scatter(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, reduce_op: str,
    orig_scatter_dim: int, scatter_dim_after_maybe_reshape: int, group_name: str, output_shape: list[int] | None,
    bias: Any = None, result_scale: Any = None, out_dtype: Any = None, use_fast_accum: bool = False,
) -> torch.Tensor:  # fmt: skip
    sizes = [*(a.shape[:-1] if output_shape is None else output_shape[:-1]), b.shape[1]]
    sizes[orig_scatter_dim] //= _resolve_process_group(group_name).size()
    return a.new_empty(sizes, dtype=a.dtype if out_dtype is None else out_dtype)


def _shapes_of_all_reduce(x: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    return torch.empty_like(x)


# By its name: an operator's schema; for a PyTorch that has no such operator its results, for tracing; what makes its
# calls.
OPERATORS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "fused_all_gather_matmul": (
        "(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True) -> (Tensor?, Tensor[])",
        _shapes_of_gather,
        _all_gather_matmul,
    ),
    "fused_matmul_reduce_scatter": (
        "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor",
        _shapes_of_scatter,
        _matmul_reduce_scatter,
    ),
    "fused_all_gather_scaled_matmul": (
        "(Tensor A, Tensor[] Bs, Tensor A_scale, Tensor[] B_scales, int gather_dim, str group_name, Tensor?[] biases, "
        "Tensor?[] result_scales, ScalarType?[] out_dtypes, bool[] use_fast_accum) -> (Tensor, Tensor[])",
        _shapes_of_scaled_gather,
        _all_gather_scaled_matmul,
    ),
    "fused_scaled_matmul_reduce_scatter": (
        "(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, int orig_scatter_dim, "
        "int scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape, Tensor? bias=None, "
        "Tensor? result_scale=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor",
        _shapes_of_scaled_scatter,
        _scaled_matmul_reduce_scatter,
    ),
    "one_shot_all_reduce": (
        "(Tensor input, str reduce_op, str group_name) -> Tensor",
        _shapes_of_all_reduce,
        _one_shot_all_reduce,
    ),
    "two_shot_all_reduce_": (
        "(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)",
        lambda x, reduce_op, group_name: x,
        _two_shot_all_reduce,
    ),
}
