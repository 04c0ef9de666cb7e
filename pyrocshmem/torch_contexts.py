"""What a call does must not depend on the modes that it is made in: tensors that are kept, not on the autograd mode of
the call that made them; kernels, not on which GPU is the current one."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Tensors that are made inside are none of `torch.inference_mode`, which nobody could write outside of it, and have
    no gradient. Views count too. Around what plans, allocates and grows; a call that is repeated has no need of it."""
    with torch.inference_mode(False), torch.no_grad():  # by itself the first one turns gradients on
        yield


def makes_normal_tensors(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator: `function` inside `normal_tensors`."""

    @functools.wraps(function)
    def inner(*args: P.args, **more: P.kwargs) -> T:
        if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return function(*args, **more)  # so it is, and what plans asks for it several times
        with normal_tensors():
            return function(*args, **more)

    return inner


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, a GPU is the current device, on which Triton compiles, loads and launches, wherever the tensors are."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)
