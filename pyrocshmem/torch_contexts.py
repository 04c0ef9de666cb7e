"""What a call does must not depend on the modes that it is made in: tensors that are kept, not on the autograd mode of
the call that made them; kernels, not on which GPU is the current one."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Tensors that are made inside are none of `torch.inference_mode`, which nobody could write outside of it, and have
    no gradient. Views count too. Around what plans, allocates and grows; a call that is repeated has no need of it.

    As a decorator: @normal_tensors()
    """
    if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        yield  # so it is, and what plans asks for it several times
        return
    with torch.inference_mode(False), torch.no_grad():  # by itself the first one turns gradients on
        yield


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, a GPU is the current device, on which Triton compiles, loads and launches, wherever the tensors are."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)
