"""Tensors that are kept from call to call must not depend on the autograd mode of the call that made them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Tensors that are made inside are none of `torch.inference_mode`, which nobody could write outside of it, and have
    no gradient. Views count too. Around what plans, allocates and grows; a call that is repeated has no need of it.

    As a decorator: @normal_tensors()
    """
    with torch.inference_mode(False), torch.no_grad():  # by itself the first one turns gradients on
        yield
