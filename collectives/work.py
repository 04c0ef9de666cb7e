"""Collectives that run beside the caller's stream: `async_op=True`, and the handle that it returns.

    work = collectives.all_reduce(x, group=group, out=x, async_op=True)
    ...                                                  # what doesn't need x
    work.wait()                                          # x is the sum for what follows on this stream

The call runs on a stream of the workspace, after all that the caller's stream holds. Calls on one workspace keep their
order, whatever their streams: a later one, asynchronous or not, runs after it. On a CPU it is done when it returns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pyrocshmem.calls.workspace import Workspace


class Work:
    """What `async_op=True` returns, with the methods of a `torch.distributed.Work` that programs call."""

    def __init__(self, workspace: Workspace, tensor: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        self._workspace, self._tensor, self._stream = workspace, tensor, stream
        self._done = stream.record_event() if stream is not None else None

    def wait(self) -> bool:
        """The current stream waits for the call; the host doesn't. True. Raises a fault that is recorded by now, as the
        next call would."""
        if self._done is not None:
            current = torch.cuda.current_stream(self._workspace.device)
            current.wait_event(self._done)
            self._tensor.record_stream(current)
        self._workspace.check()
        return True

    def is_completed(self) -> bool:
        """Whether the device has done it. The host does not wait."""
        return self._done is None or self._done.query()

    def result(self) -> list[torch.Tensor]:
        """The call's result, alone in a list; a stream may use it after `wait`."""
        return [self._tensor]

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of `result`, which is done at once: its `wait` and `then` wait as `wait` here does."""
        if self._stream is None:
            future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            future.set_result([self._tensor])
            return future
        future = torch.futures.Future(devices=[self._workspace.device])
        self._stream.wait_event(self._done)
        with torch.cuda.stream(self._stream):
            future.set_result([self._tensor])
        return future


def started(workspace: Workspace, call: Callable[[], torch.Tensor], *tensors: torch.Tensor | None) -> Work:
    """Make `call`, which reads and writes `tensors`, on the workspace's stream for calls beside the caller's."""
    if workspace.device.type == "cpu":
        return Work(workspace, call(), None)
    callers, stream = torch.cuda.current_stream(workspace.device), workspace.apart()
    stream.wait_stream(callers)
    with torch.cuda.stream(stream):
        result = call()
    # The allocator hands no memory out again that one of the two streams still uses.
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)
    result.record_stream(callers)
    return Work(workspace, result, stream)
