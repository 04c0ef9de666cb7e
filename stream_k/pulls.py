"""Blocks of a result that a rank's copy engine fetches as they finish at its peers, straight into the caller's tensor.

Waits and copies have a stream each: a copy engine takes 15 us to start after a kernel, and none after another copy.

Enqueued one by one, every step costs the host a launch, a fork and a copy from each peer. They depend on the place of
the caller's tensor alone, and PyTorch's allocator hands out the same places again and again: from the second call with
a place on they are a CUDA graph, one launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pyrocshmem import trace
from pyrocshmem.copies import RowCopy
from stream_k.launch import Launch
from stream_k.workspace import Workspace

# Streams beside those of `stream_k.row_plan`.
WAITS, PULLS = 4, 5

# Places that a plan remembers.
KEPT = 4
# A capture costs the host more than a call without a graph: past the first KEPT ones there is one in so many calls, or
# places that come twice and never again would make calls slower, not faster.
CALLS_A_CAPTURE = 50

# The random generator of a device lists its graphs, and is not made for two captures that begin at once.
_one_capture = threading.Lock()


class Pull(NamedTuple):
    """A step. arguments: of the launch that waits for it. copies: from the peers. own: from this rank."""

    arguments: tuple[Any, ...]
    copies: Sequence[RowCopy]
    own: Sequence[RowCopy] = ()


class Graphs:
    """The graphs of commands that differ in one address alone, for the KEPT addresses that came last.

    A graph keeps addresses and holds no memory: it runs only when the caller brings a tensor that lies there.
    by_address: the address that came last is the last one; None: it came once. captures: graphs made so far.
    """

    def __init__(self) -> None:
        self.by_address: dict[int, torch.cuda.CUDAGraph | None] = {}
        self.calls = self.captures = 0

    def find(self, address: int, capture: Callable[[], torch.cuda.CUDAGraph]) -> torch.cuda.CUDAGraph | None:
        """The graph for `address`, which `capture` makes if need be; None: the commands are to be enqueued."""
        self.calls += 1
        seen = address in self.by_address
        graph = self.by_address.pop(address, None)
        if seen and graph is None and self.captures < KEPT + self.calls // CALLS_A_CAPTURE:
            graph = capture()
            self.captures += 1
        self.by_address[address] = graph
        if len(self.by_address) > KEPT:
            del self.by_address[next(iter(self.by_address))]
        return graph


class Pulls:
    """The steps of a plan. launch: what waits for one. The buffers that they name are the plan's, and so are the
    graphs: they go with it when a buffer grows or the heap recovers."""

    def __init__(self, workspace: Workspace, launch: Launch, steps: Sequence[Pull]) -> None:
        self.workspace, self.launch, self.steps = workspace, launch, steps
        self.graphs = Graphs()

    def into(self, out: torch.Tensor) -> Callable[[], None]:
        """Fork stream WAITS from the current one, and return what enqueues the pulls into `out` and joins it again.

        To be called after all that the peers wait for, which on the CPU target has then run, and on a GPU lies before
        it in every queue that streams may share.
        """
        workspace = self.workspace
        workspace.fork(WAITS)
        # Before the GEMM: were the host held up here, no peer would wait for the rest of the call. After the fork: a
        # capture begins with writes to the random generator's state, which a graph of the caller may still read.
        graph = self._graph(out)

        def enqueue() -> None:
            with workspace.beside(WAITS):
                if graph is None:
                    self._enqueue(out)
                else:
                    graph.replay()
            workspace.join(WAITS)

        return enqueue

    def _graph(self, out: torch.Tensor) -> torch.cuda.CUDAGraph | None:
        """None on the CPU target, while a timeline is recorded, and under capture: all is then part of the caller's
        graph."""
        if self.workspace.device.type == "cpu" or trace.recorder() is not None:
            return None
        if torch.cuda.is_current_stream_capturing():
            return None
        return self.graphs.find(out.data_ptr(), lambda: self._capture(out))

    def _capture(self, out: torch.Tensor) -> torch.cuda.CUDAGraph:
        """The graph of the pulls into `out`. Nothing runs, and what the streams still hold is no part of it."""
        graph = torch.cuda.CUDAGraph()
        with _one_capture, self.workspace.beside(WAITS):
            # Not torch.cuda.graph, which waits for the device: the call before may wait there for a peer.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._enqueue(out)
            finally:
                graph.capture_end()
        return graph

    def _enqueue(self, out: torch.Tensor) -> None:
        """Each step's wait on the current stream, WAITS, then its copies on stream PULLS, own ones on WAITS."""
        workspace = self.workspace
        for step in self.steps:
            self.launch(step.arguments)
            workspace.fork(PULLS)
            with workspace.beside(PULLS):
                for copy in step.copies:
                    trace.copy(copy, out)
            for copy in step.own:
                trace.copy(copy, out)
        workspace.join(PULLS)
