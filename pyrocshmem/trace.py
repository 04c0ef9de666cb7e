"""Traces: what each program of a kernel does when, by the device's clock.

    trace.mark(events, trace.MMA, tile)     # from here on this program multiplies for `tile`
    ...
    trace.mark(events, trace.END, -1)       # from here on it does nothing more

A mark ends the stage before it, so that stages need one mark each. `events` is int64 [programs, ROW_WORDS] on the
device, zeros before the launch: of each program the number of its marks, then (nanoseconds, stage + 256 (tile + 1))
of each. None: no tracing, and the code compiled for None is that of a kernel without marks.

On the host a `Recorder` hands out these buffers, to the launches of the thread that is `recording`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from triton.language import target_info

from pyrocshmem import target

# Stages by number: STAGES[MMA] is the name of the one that MMA marks.
STAGES = ("end", "load + MMA", "fix-up", "store", "announce", "wait", "push", "reduce", "pull")
END = tl.constexpr(0)
MMA = tl.constexpr(1)
FIX_UP = tl.constexpr(2)
STORE = tl.constexpr(3)
ANNOUNCE = tl.constexpr(4)  # settle what was stored, raise flags
WAIT = tl.constexpr(5)
PUSH = tl.constexpr(6)
REDUCE = tl.constexpr(7)
PULL = tl.constexpr(8)

# Marks of a program that are kept; later ones are only counted.
MAX_EVENTS = tl.constexpr(1024)
ROW_WORDS = tl.constexpr(1 + 2 * 1024)

_STAGE_LIMIT = tl.constexpr(256)
_INTERPRETED = tl.constexpr(target.interpreted())


def _host_nanoseconds():
    return time.monotonic_ns()


# Triton's dependency scan refuses plain functions; this one runs in the interpreter only.
setattr(_host_nanoseconds, "__triton_builtin__", True)  # noqa: B010 mypy knows no such attribute


@triton.jit
def _ticks():
    """The clock of all of a GPU's multiprocessors: int64, nanoseconds, on AMD 10 of them."""
    if _INTERPRETED:
        ticks = _host_nanoseconds()
    elif target_info.is_hip():
        # 100 MHz, constant, the same on all of a GPU's dies.
        ticks = tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        ticks = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    return ticks


@triton.jit
def now_us():
    """Microseconds of a clock that starts anywhere."""
    ticks = _ticks()
    if not _INTERPRETED and target_info.is_hip():
        now = ticks // 100
    else:
        now = ticks // 1000
    return now


@triton.jit
def now_ns():
    """Nanoseconds of the same clock."""
    ticks = _ticks()
    if not _INTERPRETED and target_info.is_hip():
        ticks = ticks * 10
    return ticks


@triton.jit
def mark(events, stage: tl.constexpr, tile, when=1):
    """From now on this program is in `stage` for `tile` (-1: none), where `when` is not 0.

    One thread of the program counts and writes, so nothing has to wait for anything.
    """
    if events is not None:
        row = events + tl.program_id(0) * ROW_WORDS
        # From the L1 cache, mostly: a volatile load would hold the program up for 0.7 us.
        count = tl.load(row)
        place = row + 1 + 2 * count
        fits = (count < MAX_EVENTS) & (when != 0)
        what = stage + _STAGE_LIMIT * (tl.cast(tile, tl.int64) + 1)
        tl.store(place, now_ns(), mask=fits)
        tl.store(place + 1, what, mask=fits)
        tl.store(row, count + when)


class Recorder(Protocol):
    """Where the launches of a thread get their `events` from. sample: such a buffer, to compile with."""

    sample: torch.Tensor

    def events(self, launch: Any) -> torch.Tensor:
        """A buffer for one launch, a `pyrocshmem.calls.kernel_launch.Launch`."""

    def copy(self, copy: Callable[[torch.Tensor], object], argument: torch.Tensor) -> None:
        """`copy(argument)`, timed."""

    def product(self, multiply: Callable[[], object]) -> None:
        """`multiply()`, timed."""


# What `recorder` gives: where host time counts it is asked itself.
current: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def recorder() -> Recorder | None:
    """The recorder of this thread; None while nothing is recorded."""
    return current.get()


def copy(copy: Callable[[torch.Tensor], object], argument: torch.Tensor) -> None:
    """`copy(argument)`, which enqueues a copy on the current stream, as one that timelines show."""
    recorder = current.get()
    if recorder is None:
        copy(argument)
    else:
        recorder.copy(copy, argument)


def product(multiply: Callable[[], object]) -> None:
    """`multiply()`, which enqueues a library's product on the current stream, as one that timelines show."""
    recorder = current.get()
    if recorder is None:
        multiply()
    else:
        recorder.product(multiply)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Inside, `recorder` is this thread's. ValueError inside another one."""
    if current.get() is not None:
        raise ValueError("a timeline is being recorded already, by this thread")
    token = current.set(recorder)
    try:
        yield
    finally:
        current.reset(token)
