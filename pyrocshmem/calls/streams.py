"""The streams of a workspace's calls: the callers', one after another, and helpers beside them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from pyrocshmem import target

# Streams beside the caller's without the priority that helpers have: where calls are captured, and for what a caller
# computes beside a call.
CALLS, LOCAL = 7, 8
# Of cuda.h.
_STREAM_NON_BLOCKING = 1


class _Side(NamedTuple):
    """A stream beside the caller's, and what orders the two."""

    stream: torch.cuda.Stream
    forked: torch.cuda.Event
    joined: torch.cuda.Event


class Captures:
    """What graphs are captured with: a stream, and the first one of them, None so far, whose memory all others share.

    Memory in which the BLAS adds up parts of a product belongs to a stream, and a graph that was captured there has its
    address. So PyTorch must give the stream to nobody else, whose products may run beside a replay; and the memory is
    there as long as the first graph is, even where PyTorch is told to drop what the BLAS has.
    last: the stream of the call that came last, which may still replay one.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.first: torch.cuda.CUDAGraph | None = None
        self.last: torch.cuda.Stream | None = None


# Those whose owner is gone, by device.
_spare: dict[int, list[Captures]] = {}


class Streams:
    """Orders calls that come on several streams of a device, and forks others from the current one.

    A call under capture becomes part of a graph, which runs whenever its owner says: it is ordered after those of the
    same capture, and no other call is ordered after it.

    captures: those on stream CALLS, from the first fork to it on.
    """

    captures: Captures | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._captured = False
        self._outside = -1  # the device that was the current one
        self._stream: torch.cuda.Stream | None = None
        self._handle: int | None = None
        self._callers: int | None = None  # handle of the stream of the call that came last
        self._capturing: torch.cuda.Stream | None = None
        self._sides: dict[int, _Side] = {}
        self._inside: torch.cuda.Stream | None = None  # of the innermost `beside`
        self._apart: torch.cuda.Stream | None = None

    def note_capture(self) -> None:
        """The call that begins becomes part of a graph."""
        self._captured = True

    def apart(self) -> torch.cuda.Stream:
        """The stream of calls that a caller doesn't wait for on its own."""
        if self._apart is None:
            self._apart = torch.cuda.Stream(self.device)
        return self._apart

    def enter(self) -> None:
        """The device is the current one, until `leave`; its current stream waits for the call before."""
        self._outside = torch.cuda._exchange_device(self.device.index)
        try:
            self.order()
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """The caller's device is the current one again."""
        if self._outside >= 0:
            torch.cuda._maybe_exchange_device(self._outside)

    def order(self) -> None:
        """The current stream waits for the call before."""
        # The handle first: a stream object costs more than all the rest. The default stream is never captured.
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        captures = handle != 0 and torch.cuda.is_current_stream_capturing()
        self._callers = handle
        if handle == self._handle and not captures:
            return
        self._sides = {n: side for n, side in self._sides.items() if side.stream.cuda_stream != handle}
        stream = torch.cuda.current_stream(self.device)
        if captures:
            self.note_capture()
            last, self._capturing = self._capturing, stream
            if last is not None and last != stream and _is_capturing(last):
                stream.wait_stream(last)
            return
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._handle, self._stream = handle, stream
        if self.captures is not None:
            self.captures.last = stream

    @contextmanager
    def beside(self, side: int) -> Iterator[None]:
        """What is enqueued inside runs on stream number `side`, beside the caller's. On a CPU it runs at once."""
        if self.device.type == "cpu":
            yield
            return
        before, stream = self._inside, self._side(side).stream
        callers = self._current()
        torch.cuda.set_stream(stream)
        self._inside = stream
        try:
            yield
        finally:
            self._inside = before
            torch.cuda.set_stream(callers)

    def _current(self) -> torch.cuda.Stream:
        """The current stream. PyTorch looks for the device first, at every step of a call."""
        return torch.cuda.current_stream(self.device) if self._inside is None else self._inside

    def runs_in_order(self) -> bool:
        """Whether commands of helpers may run only after what the current stream holds already. AMD's runtime has four
        hardware queues for all streams of a priority, and each runs one command after another."""
        if self.device.type == "cpu":
            return True
        return target.backend() == "hip" and torch.cuda.current_stream(self.device).priority < 0

    def fork(self, side: int) -> None:
        """Stream number `side` waits for what the current stream holds so far."""
        if self.device.type == "cuda":
            beside = self._side(side)
            beside.forked.record(self._current())
            beside.stream.wait_event(beside.forked)

    def join(self, side: int) -> None:
        """The current stream waits for what stream number `side` holds so far."""
        if self.device.type == "cuda":
            beside = self._side(side)
            beside.joined.record(beside.stream)
            beside.joined.wait(self._current())

    def _side(self, number: int) -> _Side:
        """A stream that is not the caller's: PyTorch has 32 of a priority, and hands them out again and again. On the
        caller's own the rows that an all-gather sends would lie behind the GEMM that waits for the peers' rows."""
        if number not in self._sides:
            if number == CALLS:
                self.captures = captures = _nobody_elses(self)
                if captures.last is not None:
                    torch.cuda.current_stream(self.device).wait_stream(captures.last)
                stream, captures.last = captures.stream, self._stream
            else:
                priority = 0 if number == LOCAL else -1
                stream = torch.cuda.Stream(self.device, priority=priority)
                if stream.cuda_stream == self._callers:
                    stream = torch.cuda.Stream(self.device, priority=priority)
            self._sides[number] = _Side(stream, torch.cuda.Event(), torch.cuda.Event())
        return self._sides[number]


def _nobody_elses(owner: Streams) -> Captures:
    # On NVIDIA: nothing is captured on AMD (`pyrocshmem.calls.graphs`).
    spare = _spare.setdefault(owner.device.index, [])
    try:
        captures = spare.pop()
    except IndexError:
        captures = Captures(_made(owner.device))
    weakref.finalize(owner, spare.append, captures)
    return captures


def _made(device: torch.device) -> torch.cuda.Stream:
    """By the driver, whatever context this thread has."""
    torch.cuda.init()
    cuda, context, stream = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    codes = (
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index),
        cuda.cuCtxPushCurrent_v2(context),
        cuda.cuStreamCreate(ctypes.byref(stream), _STREAM_NON_BLOCKING),
        cuda.cuCtxPopCurrent_v2(ctypes.byref(context)),
    )
    if any(codes) or stream.value is None:
        raise RuntimeError(f"no stream on {device}: the driver's calls returned {codes}")
    return torch.cuda.ExternalStream(stream.value, device)


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
