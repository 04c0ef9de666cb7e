"""`stream_k.pulls`: which calls are enqueued, captured and replayed; what is captured; what becomes of the graphs.

A stand-in for CUDA's streams and graphs. On GPUs: tests/fused/test_repeated_pulls.py.
"""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pyrocshmem import trace
from stream_k import pulls
from stream_k.pulls import CALLS_A_CAPTURE, KEPT, PULLS, WAITS, Pull, Pulls
from stream_k.workspace import Workspace

TIER = 0
pytestmark = pytest.mark.cpu
CALLER = -1
STEPS = 3


class Device:
    """Runs commands at once, or gives them to the graph that is being captured, whose streams it looks after."""

    def __init__(self) -> None:
        self.stream = CALLER
        self.forked: dict[int, set[int]] = {}
        self.log: list[tuple[int, str]] = []
        self.capturing: Graph | None = None
        self.graphs: list[Graph] = []
        self.captured_by_the_caller = False

    def enqueue(self, what: str, command: Callable[[], object] = lambda: None) -> None:
        if self.capturing is None:
            self.log.append((self.stream, what))
            command()
            return
        assert self.stream in self.capturing.streams, f"stream {self.stream} is no part of the capture"
        self.capturing.commands.append((self.stream, what, command))


class Graph:
    """Of the commands between `capture_begin` and `capture_end`, which end on one stream."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.commands: list[tuple[int, str, Callable[[], object]]] = []
        self.streams: set[int] = set()
        self.unjoined: set[int] = set()
        device.graphs.append(self)

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert self.device.stream != CALLER
        assert self.device.capturing is None
        self.device.capturing, self.streams = self, {self.device.stream}

    def capture_end(self) -> None:
        assert self.device.capturing is self
        self.device.capturing = None
        assert not self.unjoined

    def replay(self) -> None:
        self.device.enqueue("replay")
        for _, _, command in self.commands:
            command()


class Streams:
    """What `Pulls` needs of a workspace."""

    device = torch.device("cuda")

    def __init__(self, standin: Device) -> None:
        self.standin = standin

    @contextmanager
    def beside(self, side: int) -> Iterator[None]:
        before, self.standin.stream = self.standin.stream, side
        try:
            yield
        finally:
            self.standin.stream = before

    def fork(self, side: int) -> None:
        self.standin.enqueue(f"fork {side}")
        if (graph := self.standin.capturing) is not None:
            graph.streams.add(side)
            graph.unjoined.add(side)

    def join(self, side: int) -> None:
        self.standin.enqueue(f"join {side}")
        if (graph := self.standin.capturing) is not None:
            assert side in graph.streams
            graph.unjoined.discard(side)


class Source:
    """Copies what it holds when the copy runs."""

    def __init__(self, device: Device, row: int) -> None:
        self.device, self.row, self.value = device, row, 0.0

    def __call__(self, out: torch.Tensor) -> None:
        self.device.enqueue(f"copy {self.row}", lambda: out[self.row].fill_(self.value))


class Call:
    """Pulls of STEPS steps, one row from a peer and one from this rank in each."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.sources = [Source(device, row) for row in range(2 * STEPS)]
        pairs: Any = zip(self.sources[:STEPS], self.sources[STEPS:], strict=True)
        steps = [Pull((step,), [peer], [own]) for step, (peer, own) in enumerate(pairs)]
        launch: Any = lambda arguments: device.enqueue(f"wait {arguments[0]}")  # noqa: E731
        streams: Any = Streams(device)
        self.pulls = Pulls(streams, launch, steps)

    def run(self, out: torch.Tensor, value: float) -> str:
        """Pull `value` into `out`, which must then hold it: "e" enqueued, "c" captured and replayed, "r" replayed."""
        for source in self.sources:
            source.value = value
        out.fill_(torch.nan)
        del self.device.log[:]
        captures = len(self.device.graphs)
        enqueue = self.pulls.into(out)
        assert self.device.log == [(CALLER, f"fork {WAITS}")]
        enqueue()
        assert self.device.log[-1] == (CALLER, f"join {WAITS}")
        assert torch.equal(out, torch.full_like(out, value))
        if self.device.log[1:-1] == [(WAITS, "replay")]:
            return "c" if len(self.device.graphs) > captures else "r"
        assert self.device.log[1:-1] == COMMANDS
        assert len(self.device.graphs) == captures
        return "e"


COMMANDS = [
    command
    for step in range(STEPS)
    for command in (
        (WAITS, f"wait {step}"),
        (WAITS, f"fork {PULLS}"),
        (PULLS, f"copy {step}"),
        (WAITS, f"copy {STEPS + step}"),
    )
] + [(WAITS, f"join {PULLS}")]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(made))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.captured_by_the_caller)
    return made


def places(number: int) -> list[torch.Tensor]:
    return [torch.empty(2 * STEPS, 4) for _ in range(number)]


@pytest.mark.parametrize(
    ("letters", "found"),
    [
        ("AAAAA", "ecrrr"),
        ("ABCABCABC", "eeecccrrr"),
        ("ABCDABCDDCBA", "eeeeccccrrrr"),
        # More in turn than are kept: never captured.
        ("ABCDEABCDEABCDE", "eeeeeeeeeeeeeee"),
        # A goes with E, the fourth place after it, and is captured again.
        ("AABCDEAABCD", "eceeeeeceee"),
        ("AABACADAEAFA", "ecererererer"),
    ],
)
def test_which_calls_are_replayed(device: Device, letters: str, found: str) -> None:
    """With other data in every call, into places that are poisoned before it."""
    call, outs = Call(device), dict(zip("ABCDEF", places(6), strict=True))
    assert "".join(call.run(outs[letter], float(n)) for n, letter in enumerate(letters)) == found
    assert call.pulls.graphs.captures == found.count("c")
    assert len(call.pulls.graphs.by_address) == min(KEPT, len(set(letters)))


def test_what_is_captured(device: Device) -> None:
    """The commands of an enqueued call, on the same streams; the tensor that comes again may be another one."""
    call, (out,) = Call(device), places(1)
    assert [call.run(out, 1.0), call.run(out.view(-1, 4), 2.0), call.run(out[:], 3.0)] == ["e", "c", "r"]
    (graph,) = device.graphs
    assert [(stream, what) for stream, what, _ in graph.commands] == COMMANDS


def test_places_that_come_twice_and_never_again(device: Device) -> None:
    """Cost a capture in so many calls."""
    call, number = Call(device), 4 * CALLS_A_CAPTURE
    found = "".join(call.run(out, 1.0) for out in places(number // 2) for _ in range(2))
    assert found.count("c") == KEPT + number // CALLS_A_CAPTURE
    assert found.count("r") == 0


def test_under_capture_all_is_the_callers(device: Device) -> None:
    """And is not counted among the calls with a place."""
    call, (out, other) = Call(device), places(2)
    assert [call.run(out, 1.0), call.run(out, 2.0)] == ["e", "c"]
    device.captured_by_the_caller = True
    assert [call.run(each, 3.0) for each in (out, other, other)] == ["e", "e", "e"]
    device.captured_by_the_caller = False
    assert list(call.pulls.graphs.by_address) == [out.data_ptr()]
    assert [call.run(out, 4.0), call.run(other, 5.0)] == ["r", "e"]


def test_while_a_timeline_is_recorded(device: Device) -> None:
    """Each copy is the recorder's, in every call."""
    call, (out,) = Call(device), places(1)
    copied: list[Any] = []

    class Recorder:
        def copy(self, copy: Callable[[torch.Tensor], object], argument: torch.Tensor) -> None:
            copied.append(copy)
            copy(argument)

    recorder: Any = Recorder()
    with trace.recording(recorder):
        assert [call.run(out, float(n)) for n in range(3)] == ["e", "e", "e"]
    assert len(copied) == 3 * len(call.sources)


def test_on_the_cpu_target(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streams, "device", torch.device("cpu"))
    call, (out,) = Call(device), places(1)
    assert [call.run(out, float(n)) for n in range(3)] == ["e", "e", "e"]


def test_a_capture_that_fails(device: Device) -> None:
    """Ends, raises what went wrong, and leaves the place to be enqueued again."""
    call, (out,) = Call(device), places(1)
    assert call.run(out, 1.0) == "e"
    honest = call.pulls.launch

    def fails(arguments: tuple[Any, ...]) -> None:
        raise RuntimeError("planted")

    call.pulls.launch = fails  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="planted"):
        call.pulls.into(out)
    assert (device.capturing, device.stream) == (None, CALLER)
    call.pulls.launch = honest
    assert [call.run(out, float(n)) for n in range(3)] == ["e", "c", "r"]


def test_graphs_go_with_their_plan(device: Device) -> None:
    """At once: nothing refers to it in a circle. A buffer that grows takes all plans along."""
    workspace = Workspace(device=torch.device("cpu"))
    workspace.buffer("place", 8, torch.float32, local=True)
    call, (out,) = Call(device), places(1)
    assert [call.run(out, 1.0), call.run(out, 2.0)] == ["e", "c"]
    graph = weakref.ref(device.graphs.pop())
    workspace.plans["call"] = call.pulls
    del call
    assert graph() is not None
    gc.disable()
    try:
        workspace.buffer("place", 16, torch.float32, local=True)
        assert graph() is None
    finally:
        gc.enable()


class Crowd:
    """Graphs whose captures wait for another one, for a while; most: how many there were at once."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s, self.met = patience_s, threading.Event()
        self.now = self.most = 0

    def capture_begin(self, capture_error_mode: str) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now == 2:
            self.met.set()
        self.met.wait(self.patience_s)

    def capture_end(self) -> None:
        self.now -= 1

    def replay(self) -> None:
        pass


@pytest.mark.parametrize("locked", [True, False])
def test_one_capture_at_a_time(device: Device, monkeypatch: pytest.MonkeyPatch, locked: bool) -> None:
    """In two threads, each with a plan of its own; without the lock, both at once."""
    crowd, both = Crowd(0.1 if locked else 30.0), threading.Barrier(2)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: crowd)
    if not locked:
        monkeypatch.setattr(pulls, "_one_capture", threading.Semaphore(2))
    calls, outs = [Call(Device()) for _ in range(2)], places(2)

    def twice(number: int) -> None:
        for _ in range(2):
            both.wait(30)
            calls[number].pulls.into(outs[number])()

    threads = [threading.Thread(target=twice, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [call.pulls.graphs.captures for call in calls] == [1, 1]
    assert crowd.most == (1 if locked else 2)
