"""Calls that are planned and not made: nothing is launched, and what they return is not written.

    with planning.only("plan"):
        stream_k.gemm_all_reduce(a, b, group=group)      # its plan is there, and what it runs is compiled

Whoever makes calls asks `planning.here.mode` before launching, `Launch.compile` before compiling.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

# "plan": all but the launches. "sizes": buffers alone; no plan is kept. "collect": as "sizes", and what is to be
# compiled is noted.
Mode = Literal["plan", "sizes", "collect"]
# (a `Launch`, the arguments to compile it for).
Compilation = tuple[Any, tuple[Any, ...]]


class _Here(threading.local):
    """mode: how this thread plans; None: it makes calls. In mode "collect", collected: what is to be compiled;
    placements: of the calls that were planned, in their order."""

    mode: Mode | None = None
    collected: dict[Any, Compilation]
    placements: list[str]


here = _Here()


def keeps_plans() -> bool:
    """Whether what a call was planned for comes again."""
    return here.mode in (None, "plan")


def collect(key: Any, launch: Any, args: tuple[Any, ...]) -> None:
    """Note, in mode "collect", that `launch` is to be compiled for `args`. key: what the machine code depends on."""
    if key not in here.collected:
        here.collected[key] = launch, _stand_ins(args)


def placed(placement: str) -> None:
    """Note, in mode "collect", that a call is planned in `placement`, which says what its buffers are for."""
    if here.mode == "collect":
        here.placements.append(placement)


def _stand_ins(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`args` as far as machine code depends on them: their tensors may be large."""
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found.append(_small(arg))
        elif isinstance(arg, TensorDescriptor):
            descriptor = copy.copy(arg)
            descriptor.base = _small(arg.base)
            found.append(descriptor)
        elif isinstance(arg, tuple):
            made = _stand_ins(arg)
            found.append(type(arg)(*made) if hasattr(arg, "_fields") else made)
        else:
            found.append(arg)
    return tuple(found)


def _small(x: torch.Tensor) -> torch.Tensor:
    """A tensor of that dtype and alignment."""
    behind = x.data_ptr() % 16 // x.element_size()
    return torch.empty(1 + behind, dtype=x.dtype, device=x.device)[behind:]


@contextmanager
def only(mode: Mode) -> Iterator[dict[Any, Compilation]]:
    """Inside, this thread plans calls in this mode. Gives what was collected."""
    before, here.mode = here.mode, mode
    if mode == "collect":
        here.collected, here.placements = {}, []
    try:
        yield here.collected if mode == "collect" else {}
    finally:
        here.mode = before
