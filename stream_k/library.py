"""The public ops in `torch.library`: schemas, shapes for tracing, gradients, order.

    torch.ops.stream_k.gemm_all_reduce(a, b, stream_k.library.name_of(group), None, "none", False, None)

A public function comes here where a gradient is needed or `torch.compile` traces it, and launches its kernels without
the dispatcher otherwise (`dispatched`). A schema has no configuration: calls take what `stream_k.choose` gives.

A group travels as a string. Fused ops are registered as effects: a graph keeps each call, and their order, which is the
same on all ranks then. (They could name a workspace as mutated instead, but such ops can't have a gradient.) `gemm` has
no peers that count on it, so its calls may be merged and moved like any product.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._library.effects import EffectType
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn import functional

from pyrocshmem import labels
from pyrocshmem.bootstrap import as_group
from pyrocshmem.heap import Heap, heap_for
from stream_k import autograd
from stream_k.operands import check_product
from stream_k.workspace import Workspace, find_workspace

FUSED = ("all_gather_gemm", "gemm_all_reduce", "gemm_all_scatter", "gemm_reduce_scatter")
SUMS = ("gemm_all_reduce", "gemm_reduce_scatter")

_LIKE_GEMM = "Tensor? bias, str activation, bool allow_tf32"
_ON_RANKS = f"Tensor a, Tensor b, str group, {_LIKE_GEMM}, ScalarType? partial_dtype"
_SCHEMAS = {
    "gemm": f"(Tensor a, Tensor b, {_LIKE_GEMM}, str workspace) -> Tensor",
    "all_gather_gemm": (
        f"(Tensor a, Tensor b, str group, SymInt num_rows, {_LIKE_GEMM}, ScalarType? partial_dtype, "
        "bool save_gathered) -> (Tensor, Tensor)"
    ),
    "gemm_all_reduce": f"({_ON_RANKS}) -> Tensor",
    "gemm_all_scatter": f"({_ON_RANKS}) -> Tensor",
    "gemm_reduce_scatter": f"({_ON_RANKS}) -> Tensor",
}
_ACTIVATIONS = {"relu": torch.relu, "gelu": functional.gelu, "silu": functional.silu}
_PROCESS_GROUP = "process group "


class Options(NamedTuple):
    """Arguments of the public functions, which document them, that a schema has too."""

    activation: str
    allow_tf32: bool
    partial_dtype: torch.dtype | None = None
    num_rows: int | None = None
    save_gathered: bool = False


def dispatched(*operands: Any) -> bool:
    """Whether a call goes through torch.library: where it is traced by torch.compile, or has a gradient."""
    return torch.compiler.is_compiling() or _needs_gradient(operands)


def _needs_gradient(operands: tuple[Any, ...]) -> bool:
    if torch.is_grad_enabled():
        for x in operands:  # a generator would cost a microsecond more, of every call
            if getattr(x, "requires_grad", False):
                return True
    return False


def name_of(group: Any = None, workspace: Workspace | None = None) -> str:
    """What stands for a group, or a workspace on it, in a schema: "<rank>/<ranks>/<label>".

    group, workspace: as the public functions take them. A process group's label is the name it is registered under in
    torch.distributed; heaps and workspaces have one each, good while they live. The rank is in it because
    shapes depend on it: whatever caches compiled graphs tells ranks apart then.
    Raises TypeError for what is no group, ValueError for a workspace of another.
    """
    if workspace is not None and not torch.compiler.is_compiling():
        find_workspace(group, workspace)
    members = group if workspace is None else workspace.heap
    if not isinstance(members, Heap):
        return _name_of_group(group)
    return f"{members.rank}/{members.world_size}/{members.label if workspace is None else workspace.label}"


def _constant(function: Any) -> Any:
    """`torch.compiler.assume_constant_result`, which imports all of torch._dynamo: 2 s of every rank's start."""
    function._dynamo_marked_constant = True
    return function


@_constant
def _name_of_group(group: Any) -> str:
    members = as_group(group)
    if isinstance(group, dist.device_mesh.DeviceMesh):
        group = group.get_group()
    elif group is None and dist.is_initialized():
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return f"{members.rank}/{members.world_size}/{_PROCESS_GROUP}{group.group_name}"
    return name_of(heap_for(members))


def find(name: str) -> tuple[Any, Workspace | None]:
    """(group, workspace) that a name stands for. ValueError when there is none any more."""
    label = name.split("/", 2)[-1]
    if label.startswith(_PROCESS_GROUP):
        return _resolve_process_group(label.removeprefix(_PROCESS_GROUP)), None
    found = labels.find(label)
    if found is None:
        raise ValueError(
            f"the group of this call is called {name!r}, and nothing of that name lives any more"
        )
    return (found.heap, found) if isinstance(found, Workspace) else (found, None)


def differentiable(
    name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    options: Options,
    group: Any = None,
    workspace: Workspace | None = None,
    **unsupported: Any,
) -> torch.Tensor:
    """Make a call of the op `name` that torch.compile traces or that has a gradient.

    unsupported: arguments that such a call can't have; ValueError where one is given. The others are the public
    functions'. Where there is a gradient, an activation is PyTorch's own, on what the op computes without it: that is
    kept for the backward pass, in the dtype of the result, and rounded to it before the activation, not after.
    """
    check_product(a, b, bias, options.activation)
    for argument, value in unsupported.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{name} takes no {argument} where a gradient is needed or torch.compile traces it; leave it out, or "
                "call it eagerly under torch.no_grad()"
            )
    late = options.activation if _needs_gradient((a, b, bias)) else "none"
    common = (bias, "none" if late in _ACTIVATIONS else options.activation, options.allow_tf32)
    op = getattr(torch.ops.stream_k, name)
    if name == "gemm":
        value = op(a, b, *common, "" if workspace is None else workspace.label)
    elif name == "all_gather_gemm":
        where = name_of(group, workspace)
        num_rows = options.num_rows if options.num_rows is not None else a.shape[0] * autograd.ranks(where)[1]
        # Only for a gradient of b.
        save = options.save_gathered and _needs_gradient((b,))
        value, _ = op(a, b, where, num_rows, *common, options.partial_dtype, save)
    else:
        value = op(a, b, name_of(group, workspace), *common, options.partial_dtype)
    return _ACTIVATIONS[late](value) if late in _ACTIVATIONS else value


def _run_gemm(
    a: torch.Tensor, b: torch.Tensor, bias: Any, activation: str, allow_tf32: bool, workspace: str
) -> torch.Tensor:
    from stream_k.gemm import run

    own = find(workspace)[1] if workspace else None
    return run(a, b, bias, activation, None, allow_tf32, None, own)


def module_of(name: str) -> str:
    """The module of a fused op, which stands on `collectives`, which stands on this package: loaded when asked for."""
    return f"stream_k.fused_{name.removeprefix('gemm_').removesuffix('_gemm')}"


def _run_fused(name: str) -> Any:
    """The kernels of a fused op, by the schema's arguments."""

    def run(a: torch.Tensor, b: torch.Tensor, group: str, *more: Any) -> Any:
        from stream_k.fused import Request

        gathers = name == "all_gather_gemm"
        num_rows, *rest, save = more if gathers else (None, *more, False)
        bias, activation, allow_tf32, partial_dtype = rest
        if name not in SUMS:
            partial_dtype = None  # of its gradient's sums
        request = Request(
            a,
            b,
            None,
            bias,
            activation,
            False,
            allow_tf32,
            None,
            partial_dtype,
            num_rows,
            save,
        )
        found = importlib.import_module(module_of(name)).run(request, *find(group))
        return (found, a.new_empty(0, a.shape[1])) if gathers and not save else found

    return run


def _gemm_shape(
    a: torch.Tensor, b: torch.Tensor, bias: Any, activation: str, allow_tf32: bool, workspace: str
) -> torch.Tensor:
    M, N, _ = check_product(a, b, bias, activation)
    return a.new_empty(M, N)


def _all_gather_gemm_shape(
    a: torch.Tensor, b: torch.Tensor, group: str, num_rows: int, bias: Any, activation: str,
    allow_tf32: bool, partial_dtype: Any, save_gathered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _, N, K = check_product(a, b, bias, activation)
    return a.new_empty(num_rows, N), a.new_empty(num_rows if save_gathered else 0, K)


def _shape(name: str) -> Any:
    """The result's shape of an op whose schema is that of a sum."""

    def make(
        a: torch.Tensor, b: torch.Tensor, group: str, bias: Any, activation: str, allow_tf32: bool, partial_dtype: Any
    ) -> torch.Tensor:  # fmt: skip
        M, N, _ = check_product(a, b, bias, activation)
        rank, world_size = autograd.ranks(group)
        if name == "gemm_all_scatter":
            return a.new_empty(M, N * world_size)
        # The blocks of `torch.tensor_split`, without a branch on M, which may be symbolic.
        return a.new_empty(
            (M + world_size - 1 - rank) // world_size if name == "gemm_reduce_scatter" else M, N
        )

    return make


def _register() -> None:
    shapes = {"gemm": _gemm_shape, "all_gather_gemm": _all_gather_gemm_shape}
    keep = {"gemm": autograd.keep_gemm, "all_gather_gemm": autograd.keep_all_gather_gemm}
    for name, schema in _SCHEMAS.items():
        op = f"stream_k::{name}"
        torch.library.define(op, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(op, "default", _run_gemm if name == "gemm" else _run_fused(name))
        torch.library.register_fake(op, shapes.get(name) or _shape(name))
        torch.library.register_autograd(
            op, getattr(autograd, name), setup_context=keep.get(name, autograd.keep_sum)
        )
        if name in FUSED:
            torch.library._register_effectful_op(op, EffectType.ORDERED)


_register()
