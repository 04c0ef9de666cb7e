"""The torch-like functions that make tensors on a heap: `empty zeros ones full arange linspace rand randn
randint ...`.

`Heap` inherits them. Each is collective: every rank of the heap calls it with the same shape and dtype, in
the same order, and gets a tensor at the same offset. Contents may differ (seeds, fill values). When one
returns, every rank's tensor has its contents, so a peer may write to it at once.

Each function first makes its tensor on the "meta" device: torch itself checks the arguments and gives shape
and dtype.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import torch

P = ParamSpec("P")
S = TypeVar("S", bound="TensorFactories")
Size: TypeAlias = int | Sequence[int]


@dataclass(frozen=True)
class Plan:
    """What a call wants: shape, dtype, and how to fill the tensor (None: not at all)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[torch.Tensor], Any] | None


def _collective(
    plan: Callable[Concatenate[S, P], Plan],
) -> Callable[Concatenate[S, P], torch.Tensor]:
    """Make the function that plans a tensor into the one that allocates it on all ranks."""

    @functools.wraps(plan)
    def allocate(self: S, /, *args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        return self._allocate(plan.__name__, lambda: plan(self, *args, **kwargs))

    return allocate


def _plan(make: Callable[..., torch.Tensor], *args: Any, dtype: torch.dtype | None, **kwargs: Any) -> Plan:
    """The plan of `make(*args, dtype=dtype, **kwargs)`, a torch function that takes `out`."""
    shape_of = make(*args, dtype=dtype, device="meta")
    found = shape_of.dtype

    def fill(tensor: torch.Tensor) -> None:
        if found.is_floating_point and found.itemsize == 1:  # torch has few kernels for 8-bit floats
            tensor.copy_(make(*args, dtype=torch.float32, device=tensor.device, **kwargs))
        else:
            make(*args, out=tensor, device=tensor.device, **kwargs)

    return Plan(tuple(shape_of.shape), found, fill)


def _unfilled(size: tuple[Any, ...], dtype: torch.dtype | None) -> Plan:
    shape_of = torch.empty(size, dtype=dtype, device="meta")
    return Plan(tuple(shape_of.shape), shape_of.dtype, None)


def _size(size: tuple[Any, ...]) -> tuple[Any, ...]:
    """`(2, 3)` of both `f(2, 3)` and `f((2, 3))`."""
    if len(size) != 1 or isinstance(size[0], bool):
        return size
    try:
        return (operator.index(size[0]),)  # NumPy's integers, too
    except TypeError:
        return tuple(size[0])


class TensorFactories:
    """Mixin of `Heap`. `device` and `_allocate` come from there.

    Every function raises `HeapOutOfMemory`, `CallMismatch` (the ranks asked for different things),
    `PeerTimeout`, `PeerAborted`, what the torch function of the same name raises for its arguments, and
    `RuntimeError` under CUDA graph capture; in each of these cases no rank has allocated anything.
    """

    device: torch.device

    def _allocate(self, name: str, make_plan: Callable[[], Plan]) -> torch.Tensor:
        raise NotImplementedError

    @_collective
    def empty(self, *size: Size, dtype: torch.dtype = torch.float32) -> Plan:
        """Uninitialised (NaN bytes in debug mode)."""
        return _unfilled(_size(size), dtype)

    @_collective
    def empty_like(self, tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> Plan:
        """Uninitialised, of `tensor`'s shape, contiguous."""
        return _unfilled(tuple(tensor.shape), dtype or tensor.dtype)

    @_collective
    def zeros(self, *size: Size, dtype: torch.dtype = torch.float32) -> Plan:
        """All zeros."""
        return _plan(torch.zeros, _size(size), dtype=dtype)

    @_collective
    def zeros_like(self, tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> Plan:
        """All zeros, of `tensor`'s shape, contiguous."""
        return _plan(torch.zeros, tuple(tensor.shape), dtype=dtype or tensor.dtype)

    @_collective
    def ones(self, *size: Size, dtype: torch.dtype = torch.float32) -> Plan:
        """All ones."""
        return _plan(torch.ones, _size(size), dtype=dtype)

    @_collective
    def full(
        self, size: Size, fill_value: bool | int | float | complex, *, dtype: torch.dtype | None = None
    ) -> Plan:
        """All `fill_value`; dtype as `torch.full` infers it when None."""
        return _plan(torch.full, _size((size,)), fill_value, dtype=dtype)

    @_collective
    def arange(
        self, start: float, end: float | None = None, step: float = 1, *, dtype: torch.dtype | None = None
    ) -> Plan:
        """`start`, `start + step`, ... below `end`; `arange(n)` counts from 0."""
        first, last = (0, start) if end is None else (start, end)
        return _plan(torch.arange, first, last, step, dtype=dtype)

    @_collective
    def linspace(self, start: float, end: float, steps: int, *, dtype: torch.dtype = torch.float32) -> Plan:
        """`steps` values from `start` to `end`, both included."""
        return _plan(torch.linspace, start, end, steps, dtype=dtype)

    @_collective
    def rand(
        self,
        *size: Size,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator | None = None,
        seed: int | None = None,
    ) -> Plan:
        """Uniform in [0, 1), from `generator`, or a new one with `seed`, or torch's own."""
        return _plan(torch.rand, _size(size), dtype=dtype, generator=self._generator(generator, seed))

    @_collective
    def randn(
        self,
        *size: Size,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator | None = None,
        seed: int | None = None,
    ) -> Plan:
        """Standard normal, from `generator`, or a new one with `seed`, or torch's own."""
        return _plan(torch.randn, _size(size), dtype=dtype, generator=self._generator(generator, seed))

    @_collective
    def randint(
        self,
        low: int,
        high: int,
        size: Size,
        *,
        dtype: torch.dtype = torch.int64,
        generator: torch.Generator | None = None,
        seed: int | None = None,
    ) -> Plan:
        """Uniform integers in [`low`, `high`), from `generator`, or a new one with `seed`, or torch's own."""
        random = self._generator(generator, seed)
        return _plan(torch.randint, low, high, _size((size,)), dtype=dtype, generator=random)

    def _generator(self, generator: torch.Generator | None, seed: int | None) -> torch.Generator | None:
        if seed is None:
            return generator
        if generator is not None:
            raise ValueError(f"both a generator and seed={seed} given; give one of them")
        return torch.Generator(self.device).manual_seed(seed)
