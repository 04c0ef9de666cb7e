"""What a call waits for, by the stream that it comes on: stand-ins for streams note it."""

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyrocshmem import target
from pyrocshmem.calls import streams
from pyrocshmem.calls.streams import CALLS, Streams
from pyrocshmem.stream_k.ops import gathered_rows

TIER = 0
pytestmark = pytest.mark.cpu


class Stream:
    def __init__(self, handle: int, capture: int, waits: list[str]) -> None:
        """capture: number of the capture that it is part of; 0: none."""
        self.handle, self.capture, self.waits = handle, capture, waits
        self.cuda_stream, self.priority = handle, 0

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append(f"{self.handle} for {other.handle}")

    def wait_event(self, event: "Event") -> None:
        event.wait(self)


class Calls:
    """Calls on streams of one workspace, and what each of them waits for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[str] = []
        self.now = self.stream(0)
        self.made = itertools.count()
        for name, value in {
            "current_stream": lambda device=None: self.now,
            "is_current_stream_capturing": lambda: self.now.capture != 0,
            "stream": self.on,
            "Stream": lambda device, priority: self.stream(32 + next(self.made) % 32),
            "Event": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda index: self.now.handle, raising=False
        )
        self.streams = Streams(torch.device("cuda", 0))

    def stream(self, handle: int, capture: int = 0) -> Stream:
        return Stream(handle, capture, self.waits)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def make(self, *streams: Stream) -> list[str]:
        for stream in streams:
            with self.on(stream):
                self.streams.order()
        return self.waits


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_one_stream_after_another(calls: Calls) -> None:
    a, b = calls.stream(0), calls.stream(5)
    assert calls.make(a, a, b, b, a) == ["5 for 0", "0 for 5"]


def test_streams_of_one_capture(calls: Calls) -> None:
    """Two branches of a captured model."""
    c, d = calls.stream(6, capture=1), calls.stream(7, capture=1)
    assert calls.make(c, c, d, c) == ["7 for 6", "6 for 7"]


def test_a_capture_between_calls(calls: Calls) -> None:
    """The next call waits for the last one that ran; what was captured has not."""
    a, b, c = calls.stream(0), calls.stream(5), calls.stream(6, capture=1)
    assert calls.make(a, c, b) == ["5 for 0"]


def test_a_capture_that_has_ended(calls: Calls) -> None:
    """The next capture is ordered after nothing of it, nor is a call on its stream."""
    c, d = calls.stream(6, capture=1), calls.stream(7, capture=2)
    calls.make(c)
    c.capture = 0
    assert calls.make(d, c) == []


@pytest.mark.parametrize("capture", [0, 1])
def test_no_helper_is_the_callers_own_stream(calls: Calls, capture: int) -> None:
    """PyTorch hands out 32 streams in turn: the 33rd one that a program asks for is the first again."""
    own = calls.stream(0)
    calls.make(own)
    first = calls.streams._side(1).stream.cuda_stream
    assert calls.streams._side(1).stream.cuda_stream == first
    calls.make(calls.stream(first, capture))
    second = calls.streams._side(1).stream.cuda_stream
    assert second != first
    # A helper that is made where its turn has come to be the caller's.
    calls.make(calls.stream(second + 1, capture))
    assert calls.streams._side(2).stream.cuda_stream not in (second, second + 1)


class Event:
    """Notes what it is recorded on, and who waits for it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self, stream: Stream) -> None:
        self.log.append(f"of {stream.handle}")

    def wait(self, stream: Stream) -> None:
        self.log.append(f"by {stream.handle}")


def test_forks_inside_helpers_are_of_these(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """One inside another, and outside again, after an error, too; PyTorch tells the callers' streams alone."""
    log, asked = list[str](), list[int]()

    def current_stream(device: Any = None) -> Stream:
        asked.append(calls.now.handle)
        return calls.now

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(calls, "now", stream))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(log))
    workspace, own = calls.streams, calls.stream(5)

    def fail() -> None:
        with workspace.beside(1):
            assert calls.now.handle == 33
            workspace.fork(2)  # stream 34
            raise KeyError

    with calls.on(own):
        workspace.fork(0)  # stream 32
        with workspace.beside(0):
            workspace.fork(1)  # stream 33
            with pytest.raises(KeyError):
                fail()
            assert calls.now.handle == 32
            workspace.join(1)
        assert calls.now is own
        workspace.join(0)
    assert log == ["of 5", "by 32", "of 32", "by 33", "of 33", "by 34", "of 33", "by 32", "of 32", "by 5"]
    assert set(asked) == {5}


def test_nobody_else_has_the_stream_of_captures(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """While anybody has it; then it is another's, with the graph whose memory is the BLAS'."""
    monkeypatch.setattr(streams, "_made", lambda device: calls.stream(64 + next(calls.made)))
    monkeypatch.setattr(streams, "_spare", {})
    several: list[Any] = [calls.streams, *(Streams(calls.streams.device) for _ in range(40))]
    handles = [each._side(CALLS).stream.cuda_stream for each in several]
    assert len({*handles, several[0]._side(CALLS).stream.cuda_stream}) == 41
    assert min(handles) >= 64  # not of those that PyTorch hands out in turn
    calls.streams, own = several[20], several[20].captures
    own.first = first = object()
    calls.make(calls.stream(5), calls.stream(7))
    del calls.waits[:], several[20]
    calls.streams = heir = Streams(calls.streams.device)  # type: ignore[assignment]
    gc.collect()
    with calls.on(calls.stream(9)):
        heir.order()
        assert heir._side(CALLS).stream.cuda_stream == handles[20]
    # Of the one before a graph may still run.
    assert calls.waits == ["9 for 7"]
    assert heir.captures is own
    assert own.first is first
    assert own.last.handle == 9


@pytest.mark.parametrize(
    ("backend", "priority", "last"), [("cuda", -1, False), ("hip", 0, False), ("hip", -1, True)]
)
def test_a_gemm_that_waits_for_copies_of_its_own_queue_comes_last(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, backend: str, priority: int, last: bool
) -> None:
    """Helpers have the high priority: on AMD they may share the hardware queue of a caller's stream that has it, too,
    where its peers would wait for the copies behind its GEMM, as it waits for theirs."""
    monkeypatch.setattr(target, "backend", lambda: backend)
    calls.now.priority = priority
    done: list[str] = []
    plan: Any = object.__new__(gathered_rows.PiecesPlan)
    plan.workspace = SimpleNamespace(
        runs_in_order=calls.streams.runs_in_order,
        fork=lambda side: None,
        join=lambda side: None,
        beside=lambda side: nullcontext(),
    )
    plan.product = SimpleNamespace(readable=lambda a, b: (a, b))
    plan.pieces, plan.senders = [], 0
    plan._gemm_arguments = plan._step_arguments = lambda *arguments: ()
    for name in ("gemm", "enter", "end"):
        setattr(plan, name, lambda arguments, name=name: done.append(name))
    plan.run(None, None, None, None)
    assert done == (["enter", "gemm", "end"] if last else ["gemm", "enter", "end"])
