"""Launches of kernels that need nothing but a call's tensors, made once for each kind of call.

    remembered.launch(("swiglu", kind(x)), x.device, args, lambda: Launch(kernel, grid, constants, num_warps, 1))

What needs a workspace has its launches in that workspace's plans.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from pyrocshmem import trace
from pyrocshmem.calls import planning
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.torch_contexts import on_device

# Kinds of calls that are remembered: sequences that grow bring a new one each time.
_KEPT = 4096
_launches: dict[Hashable, Launch] = {}


def launch(key: Hashable, device: torch.device, args: tuple[Any, ...], make: Callable[[], Launch]) -> None:
    """Launch for `args` on `device` what `make` makes. key: all that it depends on, but for whether a timeline is
    recorded."""
    key = key, trace.recorder() is not None
    with on_device(device):
        found = _launches.get(key)
        if found is None:
            if len(_launches) == _KEPT:
                _launches.clear()
            found = make()
            found.compile(args)
            if planning.keeps_plans():
                _launches[key] = found
        if planning.here.mode is None:
            found(args)


def forget() -> None:
    """All of them: the next call of each kind makes its launch anew."""
    _launches.clear()
