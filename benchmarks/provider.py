"""What a provider of a case is, and what providers have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pyrocshmem.benchmarks.operands import Operands

# Why a variant of ours is not timed.
IS_DEFAULT = "it is the default"
_WORDS = {2: torch.int16, 4: torch.int32}
_CHECKSUM_COLUMNS = 1024


class Unavailable(Exception):
    """The provider can't run here, or not this case; the message is the reason."""


@dataclass
class Run:
    """A provider, ready for a case.

    function: the call; what it returns is the output where `out` is None. what: which truth the output is held
    to, "result" or "product". roundings: of every rank's partial result, beyond the bound of our own ops;
    library: whether the bound of a library applies, which may round while it adds. prepare: before each
    call, instead of poisoning `out`: for calls that work in place. as_result: makes the output the result.
    """

    function: Callable[[], Any]
    out: torch.Tensor | None
    what: str = "result"
    roundings: int = 0
    library: bool = False
    prepare: Callable[[], None] | None = None
    as_result: Callable[[torch.Tensor], torch.Tensor] | None = None
    config: Any = None
    returns: bool = False
    close: Callable[[], None] | None = None

    def call(self) -> None:
        """One call."""
        made = self.function()
        if self.returns:
            self.out = made

    def reset(self) -> None:
        """Poison the output, or bring the input of a call in place back."""
        if self.prepare is not None:
            self.prepare()
        elif self.out is not None:
            self.out.fill_(float("nan"))

    def result(self) -> torch.Tensor:
        """The output, in the layout of the op's result."""
        assert self.out is not None
        return self.as_result(self.out) if self.as_result is not None else self.out

    def checksum(self) -> torch.Tensor | None:
        """An int64 on the device, alike for equal bits of the output; None where nothing is written here, or what
        is there depends on the calls before (`prepare`).

        Words are summed by rows and by columns of a grid, weighted by their place: two errors that make up for one
        another would have to share both.
        """
        if self.out is None or self.prepare is not None:
            return None
        words = self.out.reshape(-1).view(_WORDS[self.out.element_size()])
        width = math.gcd(words.numel(), _CHECKSUM_COLUMNS)
        grid = words.view(words.numel() // width, width)
        found = torch.zeros((), dtype=torch.int64, device=words.device)
        for sums in (grid.sum(dim, dtype=torch.int64) for dim in (0, 1)):
            found += (sums * torch.arange(1, sums.numel() + 1, device=words.device)).sum()
        return found


def public(module: Any, name: str) -> Callable[..., Any]:
    """A function of ours; Unavailable where it doesn't exist."""
    function = getattr(module, name, None)
    if function is None:
        raise Unavailable(f"{module.__name__}.{name} is not there yet")
    return function


def need_gpus(x: Operands) -> None:
    """Unavailable where a library for several NVIDIA GPUs can't run."""
    if x.device.type != "cuda":
        raise Unavailable("needs GPUs")
    if x.ranks < 2:
        raise Unavailable("needs 2 ranks")
    if torch.version.hip:
        raise Unavailable("not tried on AMD GPUs, where multicast can't be ruled out")


def group_name() -> str:
    """Of the default process group, as torch.ops wants it."""
    return dist.group.WORLD.group_name


def first_line(error: BaseException) -> str:
    """An error in a few words."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
