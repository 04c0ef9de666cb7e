"""`pyrocshmem.calls.graphs`: which calls are enqueued, captured and replayed; what is captured; what becomes of the
graphs.

Calls that pull (`stream_k.ops.pulls`), on a stand-in for CUDA's streams and graphs. On GPUs:
tests/fused/test_repeated_calls.py.
"""

import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyrocshmem import target, trace
from pyrocshmem.calls import graphs
from pyrocshmem.calls.graphs import CALLS_A_CAPTURE, Graphs
from pyrocshmem.calls.streams import CALLS
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.stream_k.local_gemm.product import Product
from pyrocshmem.stream_k.ops import rows
from pyrocshmem.stream_k.ops.pulls import _OWN, _PULLS, WAITS, Pull, Pulls
from pyrocshmem.stream_k.ops.rows import RowsPlan
from tests.stream_k.graph_standins import CALLER, Device, Graph, Streams

TIER = 0
pytestmark = pytest.mark.cpu
STEPS = 3
KEPT = 4


class Source:
    """Copies what it holds when the copy runs."""

    def __init__(self, device: Device, row: int) -> None:
        self.device, self.row, self.value = device, row, 0.0

    def __call__(self, out: torch.Tensor) -> None:
        self.device.enqueue(f"copy {self.row}", lambda: out[self.row].fill_(self.value))


class Call:
    """A call that pulls STEPS steps, one row from a peer and one from this rank in each."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.sources = [Source(device, row) for row in range(2 * STEPS)]
        pairs: Any = zip(self.sources[:STEPS], self.sources[STEPS:], strict=True)
        steps = [Pull((step,), [peer], [own]) for step, (peer, own) in enumerate(pairs)]
        launch: Any = lambda arguments: device.enqueue(f"wait {arguments[0]}")  # noqa: E731
        streams: Any = Streams(device)
        self.pulls, self.graphs = Pulls(streams, launch, steps), Graphs(streams, kept=KEPT)

    def enqueue(self, out: torch.Tensor) -> None:
        self.pulls.fork()
        self.pulls.into(out)

    def make(self, out: torch.Tensor) -> None:
        self.graphs.run((None, out), lambda: self.enqueue(out))

    def run(self, out: torch.Tensor, value: float) -> str:
        """Pull `value` into `out`, which must then hold it: "e" enqueued, "c" captured and replayed, "r" replayed."""
        for source in self.sources:
            source.value = value
        out.fill_(torch.nan)
        del self.device.log[:]
        captures = len(self.device.graphs)
        self.make(out)
        assert torch.equal(out, torch.full_like(out, value))
        if self.device.log == [(CALLER, "replay")]:
            return "c" if len(self.device.graphs) > captures else "r"
        assert self.device.log == commands(CALLER)
        assert len(self.device.graphs) == captures
        return "e"


def commands(stream: int) -> list[tuple[int, str]]:
    """Of a call that is enqueued on `stream`."""
    found = [(stream, f"fork {WAITS}")]
    for step in range(STEPS):
        found += [
            (WAITS, f"wait {step}"),
            (WAITS, f"fork {_PULLS}"),
            (_PULLS, f"copy {step}"),
            (WAITS, f"fork {_OWN}"),
            (_OWN, f"copy {STEPS + step}"),
        ]
    return [*found, (WAITS, f"join {_PULLS}"), (WAITS, f"join {_OWN}"), (stream, f"join {WAITS}")]


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
    assert call.graphs.captures == found.count("c")
    assert len(call.graphs.by_places) == min(KEPT, len(set(letters)))


def test_what_is_captured(device: Device) -> None:
    """The commands of an enqueued call, on a stream of its own and the same ones beside it; the tensor that comes again
    may be another one."""
    call, (out,) = Call(device), places(1)
    assert [call.run(out, 1.0), call.run(out.view(-1, 4), 2.0), call.run(out[:], 3.0)] == ["e", "c", "r"]
    (graph,) = device.graphs
    assert [(stream, what) for stream, what, _ in graph.commands] == commands(CALLS)


def test_every_tensor_counts(device: Device) -> None:
    """A call with one of them elsewhere is another call; None is a place."""
    call, (x, y) = Call(device), places(2)
    for tensors in ((x, y), (y, x), (x, None), (None, x), (x, y)):
        call.graphs.run(tensors, lambda: None)
    assert (len(call.graphs.by_places), call.graphs.captures) == (4, 1)


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
    assert list(call.graphs.by_places) == [(0, out.data_ptr())]
    assert [call.run(out, 4.0), call.run(other, 5.0)] == ["r", "e"]


@pytest.mark.parametrize(
    ("backend", "captured", "wanted"),
    [("cuda", True, "1"), ("cuda", False, "1"), ("cuda", False, "0"), ("hip", False, "1")],
)
def test_the_second_call_captures_what_is_the_same_for_every_call(
    device: Device, backend: str, captured: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the first, of rows that may never come again; not under capture: the streams are the caller's graph's; not
    where no graphs are wanted; nor on AMD, where PyTorch waits for the device when a graph is dropped."""
    monkeypatch.setattr(target, "backend", lambda: backend)
    monkeypatch.setenv("PYROCSHMEM_GRAPHS", wanted)
    done: list[str] = []
    plan: Any = object.__new__(RowsPlan)
    plan.everywhere, plan.was_called, plan.sending = False, False, None
    plan.workspace = Streams(device)
    plan.product = SimpleNamespace(readable=lambda a, b: (a, b))
    for name in ("peers_gemm", "own_gemm", "end"):
        setattr(plan, name, lambda arguments, name=name: done.append(name))
    plan._peers_arguments = plan._own_arguments = plan._step_arguments = lambda *operands: ()
    plan._send = lambda: done.append("sent")

    def capture(workspace: Streams, enqueue: Callable[[], None]) -> SimpleNamespace:
        enqueue()
        assert done.pop() == "sent"
        done.append("captured")
        return SimpleNamespace(replay=lambda: done.append("replayed"))

    monkeypatch.setattr(rows, "capture", capture)
    by_graph = backend == "cuda" and not captured and wanted == "1"
    device.captured_by_the_caller = captured
    for call in range(3):
        plan.run(None, None, None, None)
        way = "replayed" if call and by_graph else "sent"
        first = ["captured"] if by_graph and call == 1 else []
        assert done == [*first, "peers_gemm", way, "own_gemm", "end"], call
        done.clear()


def test_in_inference_mode(device: Device) -> None:
    """What is captured writes the caller's tensors, which only that mode may."""
    with torch.inference_mode():
        call, (out,) = Call(device), places(1)
        modes: list[bool] = []
        for _ in range(2):
            call.graphs.run((out,), lambda: modes.append(torch.is_inference_mode_enabled()))
        assert [call.run(out, float(n)) for n in range(3)] == ["e", "c", "r"]
    assert modes == [True, True]


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


def test_where_graphs_are_not_wanted(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYROCSHMEM_GRAPHS", "0")
    call, (out,) = Call(device), places(1)
    assert [call.run(out, float(n)) for n in range(3)] == ["e", "e", "e"]


def test_calls_that_copy_operands(device: Device) -> None:
    """Have no graph, which would keep the copies' memory, but where that is the same for all; those of a product that
    doesn't have."""
    anew, kept = SimpleNamespace(kept=False), SimpleNamespace(kept=True)
    for copies, found in ((anew, ["e", "e", "e"]), (kept, ["e", "c", "r"]), (None, ["e", "c", "r"])):
        call, (out,) = Call(device), places(1)
        product: Any = SimpleNamespace(copies=copies)
        call.graphs = Graphs(call.graphs.workspace, Product.replayable.fget(product), KEPT)
        assert [call.run(out, float(n)) for n in range(3)] == found


def test_what_graphs_share(device: Device) -> None:
    """All of a workspace's the memory of the first, which outlives its plan."""
    calls = [Call(device), Call(device)]
    calls[1].graphs.workspace = calls[0].graphs.workspace
    for call, (out,) in zip(calls, (places(1), places(1)), strict=True):
        assert [call.run(out, float(n)) for n in range(3)] == ["e", "c", "r"]
    first, second = device.graphs
    assert (first.shares, second.shares) == (None, first)
    del calls[0]
    assert calls[0].graphs.workspace.captures.first is first


def test_a_switch_that_is_turned(device: Device) -> None:
    """What the BLAS may do differs: calls as they were captured come back with it."""
    call, (out,), allowed = Call(device), places(1), [True]
    call.graphs = Graphs(call.graphs.workspace, kept=KEPT, switch=lambda: allowed[0])
    turns = ((True, "ecr"), (False, "ecr"), (True, "r"), (False, "r"))
    for allowed[0], found in turns:
        assert "".join(call.run(out, float(n)) for n in range(len(found))) == found


def test_a_capture_that_fails(device: Device) -> None:
    """Ends, raises what went wrong, and leaves the place to be enqueued again."""
    call, (out,) = Call(device), places(1)
    assert call.run(out, 1.0) == "e"
    honest = call.pulls.launch

    def fails(arguments: tuple[Any, ...]) -> None:
        raise RuntimeError("planted")

    call.pulls.launch = fails  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="planted"):
        call.make(out)
    assert (device.capturing, device.stream) == (None, CALLER)
    call.pulls.launch = honest
    assert [call.run(out, float(n)) for n in range(3)] == ["e", "c", "r"]


def test_no_garbage_is_collected_during_a_capture(device: Device) -> None:
    """Its memory, freed there, would end the capture."""
    call, (out,) = Call(device), places(1)
    died: list[bool] = []

    class Garbage:
        def __init__(self) -> None:
            self.itself = self
            weakref.finalize(self, lambda: died.append(device.capturing is not None))

    def enqueue() -> None:
        call.enqueue(out)
        for _ in range(100):
            Garbage()

    before = gc.get_threshold()
    gc.set_threshold(10)
    try:
        for _ in range(2):
            call.graphs.run((None, out), enqueue)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert (call.graphs.captures, gc.isenabled()) == (1, True)
    assert died == [False] * 200


def test_graphs_go_with_their_plan(device: Device) -> None:
    """At once: nothing refers to it in a circle. A buffer that grows takes all plans along."""
    workspace = Workspace(device=torch.device("cpu"))
    workspace.buffer("place", 8, torch.float32, local=True)
    call, (out,) = Call(device), places(1)
    assert [call.run(out, 1.0), call.run(out, 2.0)] == ["e", "c"]
    graph = weakref.ref(device.graphs.pop())
    workspace.plans["call"] = call.graphs
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

    def pool(self) -> None: ...

    def capture_begin(self, pool: None, capture_error_mode: str) -> None:
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
        monkeypatch.setattr(graphs, "_one_capture", threading.Semaphore(2))
    calls, outs = [Call(Device()) for _ in range(2)], places(2)

    def twice(number: int) -> None:
        for _ in range(2):
            both.wait(30)
            calls[number].make(outs[number])

    threads = [threading.Thread(target=twice, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [call.graphs.captures for call in calls] == [1, 1]
    assert crowd.most == (1 if locked else 2)
