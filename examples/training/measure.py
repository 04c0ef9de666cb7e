"""What a pipeline costs, measured on every rank: the time in passes, the time of whole steps, the peak memory."""

import os
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from pyrocshmem.json_objects import all_gather_json

# The first step sets the pipeline up, and in the second memory is measured, which takes time on a CPU.
MEMORY_STEP, FIRST_TIMED_STEP = 1, 2


class Clock:
    """Adds up spans of time: between events of a GPU's stream, which don't make it wait, or of the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.spans = list[tuple[Any, Any]]()

    def now(self) -> Any:
        """This point of the stream, or this moment."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self) -> Iterator[None]:
        """Adds the time of what is inside."""
        start = self.now()
        yield
        self.spans.append((start, self.now()))

    def seconds(self) -> float:
        """Of all spans; waits for the GPU."""
        if not self.on_gpu:
            return sum(end - start for start, end in self.spans)
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in self.spans) / 1e3


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of `tensors` and of those that operations make while it is active; `peak` is the most so far.

    For a CPU, whose allocator keeps no such count.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.seen = WeakIdKeyDictionary()
        self.live = self.peak = 0
        for tensor in tensors:
            self._see(tensor)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()  # views share it, and it lives as long as the memory
        if storage not in self.seen:
            self.seen[storage] = None
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, storage.nbytes())

    def _forget(self, num_bytes: int) -> None:
        self.live -= num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return out


class Costs:
    """Of this rank's part of a pipeline. `passes` is to be put around each pass, `step` around a step's passes."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.passes, self.steps = Clock(device), Clock(device)
        self.num_steps = self.peak_bytes = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measures memory or time, as it is the step's turn."""
        if self.num_steps == MEMORY_STEP:
            with self._memory():
                yield
        elif self.num_steps < FIRST_TIMED_STEP:
            yield
        else:
            with self.steps.span():
                yield
        self.num_steps += 1
        if self.num_steps == FIRST_TIMED_STEP:
            self.passes.spans.clear()

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """The most bytes in tensors at one time: weights, gradients, activations; on a GPU AdamW's moments, too."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            yield
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        else:
            with LiveBytes(self.model.parameters()) as counted:
                yield
            self.peak_bytes = counted.peak

    def report(self, console: Console, equal_stages: str, expected_bubble: float) -> list[dict[str, float]]:
        """Gather and print what all ranks measured; every rank's seconds in passes and in steps, and peak bytes.

        The bubble is the share of all ranks' time in steps in which they had no pass to run. A step lasts as long as
        on the slowest rank.
        """
        own = {
            "passes": self.passes.seconds(),
            "steps": self.steps.seconds(),
            "peak_bytes": float(self.peak_bytes),
        }
        found = all_gather_json(own, "costs of a pipeline")
        num_timed = self.num_steps - FIRST_TIMED_STEP
        if num_timed < 1:
            console.print(f"bubble and memory are measured in runs of more than {FIRST_TIMED_STEP} steps")
            return found
        whole = max(each["steps"] for each in found)
        table = Table("rank", "passes, ms a step", "idle", "peak memory, MiB")
        for rank, each in enumerate(found):
            busy = each["passes"]
            peak = f"{each['peak_bytes'] / 2**20:.1f}"
            table.add_row(str(rank), f"{busy / num_timed * 1e3:.2f}", f"{1 - busy / whole:.0%}", peak)
        console.print(table)
        bubble = 1 - sum(each["passes"] for each in found) / len(found) / whole
        console.print(
            f"bubble: {bubble:.0%} of {whole / num_timed * 1e3:.1f} ms a step; {equal_stages} {expected_bubble:.0%}"
        )
        cores = len(os.sched_getaffinity(0))
        if self.device.type == "cpu" and cores < len(found):
            console.print(
                f"{len(found)} ranks share {cores} cores: a pass that waits for a core counts as busy"
            )
        return found
