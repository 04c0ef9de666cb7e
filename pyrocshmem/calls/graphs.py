"""Repeated calls as CUDA graphs: from the second call with tensors at the same addresses on, a call is one launch.

A call that overlaps is dozens of launches, copies and events on several streams. Enqueued one by one they cost the host
110 to 340 us, as one graph 10 to 57 (2 x H200, nine steps at most). Where they read and write depends on the addresses
("places") of the caller's tensors alone, and PyTorch's allocator hands out the same addresses again and again. The
first call is enqueued, the second one captured, and that graph replayed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from pyrocshmem import target, trace
from pyrocshmem.calls.streams import CALLS
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.torch_contexts import normal_tensors

# Sets of places that a plan remembers: layers of one shape differ in their weights.
KEPT = 128
# A capture costs the host 1 to 3 ms: past the first KEPT ones there is one in so many calls, or places that come twice
# and never again would make calls slower, not faster.
CALLS_A_CAPTURE = 50

# The random generator of a device lists its graphs, and is not made for two captures that begin at once.
_one_capture = threading.Lock()

Places = tuple[int, ...]


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """No garbage collection inside: freeing device memory or a graph in this thread would end a capture, and objects in
    reference cycles may die at any time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def graphs_are_wanted() -> bool:
    """Whether calls, or parts of them, may be graphs at all."""
    # ROCm's PyTorch waits for the device when it drops a graph: for peers that wait for this rank.
    return os.environ.get("PYROCSHMEM_GRAPHS") != "0" and target.backend() != "hip"


class Graphs:
    """The graphs of a plan's calls, for the KEPT places of tensors that came last. They go with the plan, when a buffer
    that they name grows or the heap recovers.

    A graph holds the addresses of the caller's tensors, not their memory: it runs only when the caller brings tensors
    that lie there. It takes 0.1 to 0.6 MB of the driver's memory. What calls allocate under capture, all graphs of a
    workspace share: of the vendor's BLAS 32 MB on Hopper.
    replayable: False where no call may have a graph: where operands are copied to new memory each time, and where a
    call returns memory that it allocates. switch: whether the vendor's BLAS multiplies, where switches of the
    process say so at each call; None: they don't.
    by_places: graphs, the latest last; None: these places came once. captures: graphs made so far.
    """

    def __init__(
        self,
        workspace: Workspace,
        replayable: bool = True,
        kept: int = KEPT,
        switch: Callable[[], bool] | None = None,
    ) -> None:
        self.workspace, self.kept, self.switch = workspace, kept, switch
        self.allowed = graphs_are_wanted() and replayable
        # Whoever knows this need not ask: no call will ever have a graph.
        self.never = not self.allowed or workspace.device.type == "cpu"
        self.by_places: dict[Places, torch.cuda.CUDAGraph | None] = {}
        self.calls = self.captures = 0

    def run(self, tensors: Sequence[torch.Tensor | None], enqueue: Callable[[], None]) -> None:
        """Make a call, which `enqueue` would enqueue on the current stream and others that join it again. tensors: all
        of the caller's that it reads and writes, of the kinds that the plan was made for."""
        graph = self._find(tensors, enqueue)
        if graph is None:
            enqueue()
        else:
            graph.replay()

    def _find(
        self, tensors: Sequence[torch.Tensor | None], enqueue: Callable[[], None]
    ) -> torch.cuda.CUDAGraph | None:
        """The graph of a call with these tensors; None: it is to be enqueued."""
        if not self._may_replay():
            return None
        self.calls += 1
        places = tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
        if self.switch is not None:
            places = (*places, self.switch())
        seen = places in self.by_places
        graph = self.by_places.pop(places, None)
        if seen and graph is None and self.captures < self.kept + self.calls // CALLS_A_CAPTURE:
            graph = self._capture(enqueue)
            self.captures += 1
        self.by_places[places] = graph
        if len(self.by_places) > self.kept:
            del self.by_places[next(iter(self.by_places))]
        return graph

    def _may_replay(self) -> bool:
        """Not on the CPU target, nor while a timeline is recorded, nor under capture: all is then part of the caller's
        graph. Nor where PYROCSHMEM_GRAPHS is 0, for tools that run the kernels of a graph one at a time, in any order:
        one that waits for another would come first."""
        if not self.allowed or self.workspace.device.type == "cpu" or trace.recorder() is not None:
            return False
        return not torch.cuda.is_current_stream_capturing()

    def _capture(self, enqueue: Callable[[], None]) -> torch.cuda.CUDAGraph:
        return capture(self.workspace, enqueue)


def capture(workspace: Workspace, enqueue: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The graph of what `enqueue` enqueues. Nothing runs; work that the streams already hold is not part of it."""
    graph = torch.cuda.CUDAGraph()
    # A capture begins with writes to the random generator's state, which a graph of the caller may still read: on
    # stream CALLS, so both ways.
    workspace.fork(CALLS)
    with _one_capture, _no_garbage_collected(), workspace.beside(CALLS):
        # Not torch.cuda.graph, which waits for the device: the call before may wait there for a peer. Its stream is one
        # for all threads, too, whatever their device.
        with normal_tensors():  # the random generator's state, which the next capture writes
            captures = workspace.captures
            assert captures is not None
            pool = None if captures.first is None else captures.first.pool()
            graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            enqueue()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # streams have not joined
                graph.capture_end()
            raise
        graph.capture_end()
    workspace.join(CALLS)
    if captures.first is None:
        captures.first = graph
    return graph
