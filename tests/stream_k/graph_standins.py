"""A stand-in for CUDA's streams and graphs, which runs commands at once and knows what belongs to a capture."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from pyrocshmem.calls.graphs import Graphs
from pyrocshmem.calls.streams import CALLS

CALLER = -1


def replay_what_was_enqueued(log: list[str], keyed: bool = True) -> None:
    """From now on in this process, on the CPU target too, a graph is the enqueued call that was captured. log: "e" for
    each call that is enqueued, "c" captured, "r" replayed. keyed: whether a graph is looked up by its places."""
    honest = Graphs._find

    def find(self: Any, tensors: Any, enqueue: Any) -> Any:
        captures = self.captures
        graph = honest(self, tensors if keyed else (), enqueue)
        log.append("e" if graph is None else "c" if self.captures > captures else "r")
        return graph

    made = Graphs.__init__

    def asked(self: Graphs, *arguments: Any, **more: Any) -> None:
        made(self, *arguments, **more)
        self.never = False

    Graphs.__init__ = asked  # type: ignore[method-assign]
    Graphs._find = find  # type: ignore[method-assign]
    Graphs._capture = lambda self, enqueue: SimpleNamespace(replay=enqueue)  # type: ignore[method-assign]
    Graphs._may_replay = lambda self: self.allowed  # type: ignore[method-assign]


class Device:
    """Runs commands at once, or gives them to the graph that is being captured, whose streams it looks after."""

    def __init__(self) -> None:
        self.stream = CALLER
        self.forked: dict[int, set[int]] = {}
        self.log: list[tuple[int, str]] = []
        self.capturing: Graph | None = None
        self.graphs: list[Graph] = []
        self.captured_by_the_caller = False
        self.apart = False  # whether stream CALLS has what no other waits for

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
        self.shares: Graph | None = None
        device.graphs.append(self)

    def pool(self) -> "Graph":
        return self

    def capture_begin(self, pool: "Graph | None", capture_error_mode: str) -> None:
        self.shares = pool
        assert capture_error_mode == "thread_local"
        # PyTorch makes the random generator's state here, or writes what an earlier capture made.
        assert not torch.is_inference_mode_enabled()
        assert self.device.stream != CALLER
        assert self.device.capturing is None
        self.device.capturing, self.streams = self, {self.device.stream}

    def capture_end(self) -> None:
        assert self.device.capturing is self
        self.device.capturing = None
        if self.unjoined:
            raise RuntimeError(f"streams {self.unjoined} have not joined")

    def replay(self) -> None:
        assert not self.device.apart
        self.device.enqueue("replay")
        for _, _, command in self.commands:
            command()


class Streams:
    """What `Graphs` and `Pulls` need of a workspace."""

    device = torch.device("cuda")

    def __init__(self, standin: Device) -> None:
        self.standin = standin
        self.captures = SimpleNamespace(first=None)

    @contextmanager
    def beside(self, side: int) -> Iterator[None]:
        before, self.standin.stream = self.standin.stream, side
        try:
            yield
        finally:
            self.standin.stream = before

    def fork(self, side: int) -> None:
        if side == CALLS:
            assert (self.standin.stream, self.standin.capturing) == (CALLER, None)
            self.standin.apart = True
            return
        self.standin.enqueue(f"fork {side}")
        if (graph := self.standin.capturing) is not None:
            graph.streams.add(side)
            graph.unjoined.add(side)

    def join(self, side: int) -> None:
        if side == CALLS:
            assert (self.standin.stream, self.standin.capturing) == (CALLER, None)
            self.standin.apart = False
            return
        self.standin.enqueue(f"join {side}")
        if (graph := self.standin.capturing) is not None:
            assert side in graph.streams
            graph.unjoined.discard(side)
