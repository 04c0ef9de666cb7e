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
