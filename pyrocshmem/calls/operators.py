"""The operators: each is in `torch.library`, and an eager call of it goes a shorter way.

    ops.gemm_all_reduce(a, b, name_of(group), None, "none", False, None)        # the schema's arguments, all of them

Whatever traces, transforms or watches PyTorch's operators sees such a call as one operator,
`torch.ops.stream_k.gemm_all_reduce`. But torch.library costs the host more than the launches do, so any other call goes
straight to the kernels, or, where a gradient is needed, through a `torch.autograd.Function` of the same `keep` and
`backward`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import (
    _disabled_torch_dispatch_impl,
    _dispatch_key_parse,
    _dispatch_tls_is_dispatch_key_included,
    _get_dispatch_mode,
    _len_torch_dispatch_stack,
    _TorchDispatchModeKey,
)
from torch._C._functorch import (
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    peek_interpreter_stack,
)
from torch._library.effects import EffectType
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import _resolve_process_group

from pyrocshmem.calls import invariance, labels
from pyrocshmem.calls.workspace import Workspace, find_workspace
from pyrocshmem.groups import as_group, of_mesh
from pyrocshmem.heap import Heap

# By name, those of `collectives` too, once that is loaded.
ops: Any = SimpleNamespace()

# Types of a schema's arguments; another type is a tensor whose class may want to see the calls.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None), str, bool, int, float, torch.dtype))
# Modes that are part of PyTorch's tracing.
_TRACING = tuple(_TorchDispatchModeKey.__members__.values())
# Of make_fx above autograd, and of `torch.autograd.grad(is_grads_batched=True)`.
_EARLY, _BATCHES = map(_dispatch_key_parse, ("PreDispatch", "VmapMode"))


class _Here(threading.local):
    below = False  # the dispatcher has brought a call of this thread to its kernels


_here = _Here()


def is_watched(operands: tuple[Any, ...], whole: bool = True) -> bool:
    """Whether anything but autograd wants to see a call: torch.compile, torch.func, a TorchDispatchMode (fake tensors,
    make_fx, selective checkpoints, counters), an operand's class. NotImplementedError for a forward-mode derivative,
    and for any that torch.func takes.

    whole: a schema has all of the call's arguments. For others count only the modes of PyTorch's tracing, and classes
    that have a `__torch_dispatch__`: others look on, and would be told of an error that is none.
    """
    if torch.compiler.is_compiling():
        return True
    if forward_ad._current_level >= 0:
        _refuse_tangents(operands)
    transformed = peek_interpreter_stack() is not None
    if transformed and torch.is_grad_enabled():
        _refuse_derivatives(operands)
    watched = (
        transformed
        or (_len_torch_dispatch_stack() > 0 and (whole or any(map(_get_dispatch_mode, _TRACING))))
        or _dispatch_tls_is_dispatch_key_included(_EARLY)
        or _dispatch_tls_is_dispatch_key_included(_BATCHES)
    )
    for x in operands:  # a generator would cost a microsecond more, of every call
        if type(x) not in _PLAIN and isinstance(x, torch.Tensor):
            watched |= whole or type(x).__torch_dispatch__ is not _disabled_torch_dispatch_impl
    # What watches may still be there when the kernels run, and public functions that they call ask once more.
    return watched and not _here.below


def _refuse_tangents(operands: tuple[Any, ...]) -> None:
    """Nothing here has them, and they would be dropped without a word."""
    for x in operands:
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError("the ops have no forward-mode derivative; use a backward one")


def _refuse_derivatives(operands: tuple[Any, ...]) -> None:
    """torch.func takes none of what torch.library registers, and says so in words of its own."""
    for x in operands:
        while isinstance(x, torch.Tensor) and is_functorch_wrapped_tensor(x):
            if is_gradtrackingtensor(x) and x.requires_grad:
                raise NotImplementedError(
                    "the ops have no derivative by torch.func (grad, vjp, jacrev, ..); use torch.autograd.grad"
                )
            x = get_unwrapped(x)


def needs_gradient(operands: tuple[Any, ...]) -> bool:
    if torch.is_grad_enabled():
        for x in operands:
            if getattr(x, "requires_grad", False):
                return True
    return False


def _has_negative_bit(operands: tuple[Any, ...]) -> bool:
    """Which kernels don't know: the dispatcher resolves it, say in a gradient."""
    return any(isinstance(x, torch.Tensor) and x.is_neg() for x in operands)


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward` of a `torch.autograd.Function`, whose own derivative raises RuntimeError.

    PyTorch's `once_differentiable` raises only where the gradients that come in can be differentiated. Those of a plain
    sum can't; but what goes out depends on the saved operands, too, which would get nothing of a penalty on it.
    """
    refusing = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            grads = tuple(g if g is None or g.requires_grad else g.detach().requires_grad_() for g in grads)
        return refusing(ctx, *grads)

    return checked


class Operator(NamedTuple):
    """Called with its schema's arguments, in their order.

    seen: the call by the dispatcher. run: by the kernels. function: the same with a gradient, if it has one.
    """

    seen: Any
    run: Callable[..., Any]
    function: type[torch.autograd.Function] | None

    def __call__(self, *args: Any) -> Any:
        if is_watched(args) or _has_negative_bit(args):
            return self.seen(*args)
        if self.function is not None and needs_gradient(args):
            return self.function.apply(*args)
        return self.run(*args)


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    shapes: Callable[..., Any],
    keep: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    *,
    ordered: bool = True,
) -> None:
    """Make an op, "package::op", of torch.library and of `ops`.

    run: makes the call. shapes: its results, for tracing. keep, backward: of its gradient, as
    `torch.library.register_autograd` takes them. ordered: graphs keep each call, and their order: ranks whose graphs
    differ would wait for one another's.
    """
    run, keep, backward = _in_their_mode(schema, run, keep, backward)
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "default", _below(run))
    torch.library.register_fake(name, shapes)
    if ordered:
        torch.library._register_effectful_op(name, EffectType.ORDERED)
    package, op = name.split("::")
    function = None
    if keep is not None and backward is not None:
        torch.library.register_autograd(name, backward, setup_context=keep)
        function = _function(op, run, keep, backward)
    assert not hasattr(ops, op), f"{name}: another package has an op of that name"
    setattr(ops, op, Operator(getattr(getattr(torch.ops, package), op), run, function))


def _in_their_mode(
    schema: str,
    run: Callable[..., Any],
    keep: Callable[..., None] | None,
    backward: Callable[..., Any] | None,
) -> tuple[Any, Any, Any]:
    """The functions of an operator, run in the mode that the name of its group has (`invariance.marked`): a graph may
    be replayed, and a gradient taken, where the mode of the call is over."""
    arguments = schema.partition(")")[0].split(", ")
    found = [number for number, each in enumerate(arguments) if each.endswith(("str group", "str workspace"))]
    if not found:
        return run, keep, backward  # it has the same bits in every mode
    (place,) = found

    def run_so(*args: Any) -> Any:
        with invariance.at_least(invariance.unmarked(args[place])[1]):
            return run(*args)

    def keep_so(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        assert keep is not None
        ctx.invariance = invariance.unmarked(inputs[place])[1]
        keep(ctx, inputs, output)

    def backward_so(ctx: Any, *grads: Any) -> Any:
        assert backward is not None
        with invariance.at_least(ctx.invariance):
            return backward(ctx, *grads)

    return run_so, keep and keep_so, backward and backward_so


def _below(run: Callable[..., Any]) -> Callable[..., Any]:
    def kernels(*args: Any) -> Any:
        above, _here.below = _here.below, True
        try:
            return run(*args)
        finally:
            _here.below = above

    return kernels


def _function(
    op: str, run: Callable[..., Any], keep: Callable[..., None], backward: Callable[..., Any]
) -> type[torch.autograd.Function]:
    # A `setup_context` of its own would make PyTorch bind the arguments by their signature, on every call.
    def forward(ctx: Any, *args: Any) -> Any:
        output = run(*args)
        keep(ctx, args, output)
        return output

    return type(
        op, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )


_PROCESS_GROUP = "process group "


def dispatched(*operands: Any, whole: bool = True) -> bool:
    """Whether a call goes through an operator: it has a gradient, or something watches it. NotImplementedError for a
    forward-mode derivative.

    whole: a schema has all of its arguments. A mode that only looks on, such as a counter, does not see other calls.
    """
    return is_watched(operands, whole) or needs_gradient(operands)


def name_of(group: Any = None, workspace: Workspace | None = None) -> str:
    """The name of a group, or of a workspace on it, in a schema: "<rank>/<ranks>/<label>", and the mode of calls that
    are made now (`invariance`).

    group, workspace: as the public functions take them. A process group's label is the name it is registered under in
    torch.distributed; heaps and workspaces have one each, good while they live. The rank is in it because
    shapes depend on it: whatever caches compiled graphs tells ranks apart then.
    Raises TypeError for what is no group, ValueError for a workspace of another.
    """
    if workspace is not None and not torch.compiler.is_compiling():
        find_workspace(group, workspace)
    members = group if workspace is None else workspace
    if isinstance(members, Heap | Workspace):
        name = f"{members.rank}/{members.world_size}/{members.label}"
    else:
        name = _name_of_group(group)
    return invariance.marked(name, workspace)


def local_name(workspace: Workspace | None = None) -> str:
    """The same of calls without a group: the workspace's label, and their mode."""
    return invariance.marked("" if workspace is None else workspace.label, workspace)


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
        group = of_mesh(group)
    elif group is None and dist.is_initialized():
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return f"{members.rank}/{members.world_size}/{_PROCESS_GROUP}{group.group_name}"
    heap, space = find_workspace(members, None)
    named = heap if space.hosts is None else space
    return f"{named.rank}/{named.world_size}/{named.label}"


def find(name: str) -> tuple[Any, Workspace | None]:
    """(group, workspace) that a name stands for; None for what it doesn't name. ValueError when there is none any
    more."""
    label = invariance.unmarked(name)[0].split("/", 2)[-1]
    if not label:
        return None, None
    if label.startswith(_PROCESS_GROUP):
        return _resolve_process_group(label.removeprefix(_PROCESS_GROUP)), None
    found = labels.find(label)
    if found is None:
        raise ValueError(
            f"the group of this call is called {name!r}, and nothing of that name lives any more"
        )
    if not isinstance(found, Workspace):
        return found, None
    return found.heap if found.hosts is None else found.hosts.group, found


def refuse(name: str, **unsupported: Any) -> None:
    """ValueError where one of these arguments is given, to a call of `name` that goes through an operator."""
    for argument, value in unsupported.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{name} takes no {argument} where a gradient is needed or torch.compile traces it; leave it out, or "
                "call it eagerly under torch.no_grad()"
            )
