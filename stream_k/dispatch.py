"""How a public function makes its call through an operator (`stream_k.operators`).

It does so where a gradient is needed or anything watches the call, as `torch.compile` does, and launches its kernels
right away otherwise (`dispatched`). Schemas have no configuration: such calls use what `stream_k.choose` gives. In a
schema a group is a string, its name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn import functional

from pyrocshmem import labels
from pyrocshmem.bootstrap import as_group
from pyrocshmem.heap import Heap, heap_for
from stream_k.operands import check_product
from stream_k.operators import is_watched, needs_gradient, ops
from stream_k.workspace import Workspace, find_workspace

_ACTIVATIONS = {"relu": torch.relu, "gelu": functional.gelu, "silu": functional.silu}
_PROCESS_GROUP = "process group "


class Options(NamedTuple):
    """Arguments of the public functions, which document them, that a schema has too."""

    activation: str
    allow_tf32: bool
    partial_dtype: torch.dtype | None = None
    num_rows: int | None = None
    save_gathered: bool = False


def dispatched(*operands: Any, whole: bool = True) -> bool:
    """Whether a call goes through an operator: it has a gradient, or something watches it. NotImplementedError for a
    forward-mode derivative.

    whole: a schema has all of its arguments. A mode that only looks on, such as a counter, does not see other calls.
    """
    return is_watched(operands, whole) or needs_gradient(operands)


def name_of(group: Any = None, workspace: Workspace | None = None) -> str:
    """The name of a group, or of a workspace on it, in a schema: "<rank>/<ranks>/<label>".

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


def ranks(name: str) -> tuple[int, int]:
    """(rank, number of ranks) of a group, from its name in the schemas: see `name_of`."""
    rank, world_size, _ = name.split("/", 2)
    return int(rank), int(world_size)


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


def refuse(name: str, **unsupported: Any) -> None:
    """ValueError where one of these arguments is given, to a call of `name` that goes through an operator."""
    for argument, value in unsupported.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{name} takes no {argument} where a gradient is needed or torch.compile traces it; leave it out, or "
                "call it eagerly under torch.no_grad()"
            )


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
    """Make a call of the op `name` that has a gradient or that something watches.

    unsupported: arguments that such a call can't have; ValueError where one is given. The others are the public
    functions'. Where there is a gradient, an activation is PyTorch's own, on what the op computes without it: that is
    kept for the backward pass, in the dtype of the result, and rounded to it before the activation, not after.
    """
    check_product(a, b, bias, options.activation)
    refuse(name, **unsupported)
    late = options.activation if needs_gradient((a, b, bias)) else "none"
    common = (bias, "none" if late in _ACTIVATIONS else options.activation, options.allow_tf32)
    op = getattr(ops, name)
    if name == "gemm":
        value = op(a, b, *common, "" if workspace is None else workspace.label)
    elif name == "all_gather_gemm":
        where = name_of(group, workspace)
        num_rows = options.num_rows if options.num_rows is not None else a.shape[0] * ranks(where)[1]
        # Only for a gradient of b.
        save = options.save_gathered and needs_gradient((b,))
        value, _ = op(a, b, where, num_rows, *common, options.partial_dtype, save)
    else:
        value = op(a, b, name_of(group, workspace), *common, options.partial_dtype)
    return _ACTIVATIONS[late](value) if late in _ACTIVATIONS else value
