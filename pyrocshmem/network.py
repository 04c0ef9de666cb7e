"""Blocks between hosts, moved by an engine of torch.distributed: NCCL or RCCL between GPUs, gloo elsewhere.

    network = Network(peers, host, device, seconds)     # collective: peers[k] is the rank of host k
    leg = network.swap({1: mine}, {1: theirs})          # on its way; what follows runs beside it
    leg.wait()                                          # `theirs` is there, for what this rank launches next

The engine only moves bytes: sums are made here, in an order that doesn't depend on sizes. It has a process group of its
own for each number that a rank has on its host, made by its members alone. gloo's waits are made by a thread of the
network, one swap after the other, so that they run beside what this rank computes; GPU tensors pass through host
memory there. NCCL's are put into its stream, and a thread looks at how long they take: the process group is aborted
when a wait has lasted `seconds`, long before NCCL's own watchdog would end the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from pyrocshmem.groups import new_process_group
from pyrocshmem.timeouts import init_seconds

# By the number of the host that they go to or come from.
Blocks = Mapping[int, torch.Tensor]

# How often a rank that waits looks whether a peer gave up, and NCCL's watcher at its works.
_LOOK_S = 0.05
# NCCL's own watchdog must not be the first to notice.
_NEVER = timedelta(days=30)


class Lost(Exception):
    """`host` did not send or take a block: `late` where time ran out, else its connection ended."""

    def __init__(self, host: int, late: bool, waited_s: float, why: str) -> None:
        self.host, self.late, self.waited_s, self.why = host, late, waited_s, why
        super().__init__(why)


class Differs(Exception):
    """Other hosts make another call."""


class Leg:
    """Blocks on their way."""

    def __init__(self, done: Future[Callable[[], object]]) -> None:
        self._done = done

    def wait(self, look: Callable[[], None]) -> None:
        """Return once the blocks are there for what this rank launches next. look: called again and again while the
        host waits; what it raises ends the wait. Raises `Lost`."""
        while True:
            try:
                arrive = self._done.result(_LOOK_S)
                break
            except NotYet:
                look()
        arrive()


class Network:
    """This rank's peers on the other hosts. `bytes_sent` counts what swaps gave to the engine."""

    def __init__(self, peers: Sequence[int], host: int, device: torch.device, seconds: float) -> None:
        self.peers, self.host, self.device, self.seconds = list(peers), host, device, seconds
        self.bytes_sent = 0
        self._words = new_process_group(self.peers, timedelta(seconds=init_seconds()), "gloo")
        by_nccl = device.type == "cuda" and "nccl" in dist.get_backend_config()
        self._data = new_process_group(self.peers, _NEVER, "nccl") if by_nccl else self._words
        self._differs = False
        self.lost: Lost | None = None  # what the watcher of a stream found
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._watched: SimpleQueue[tuple[Any, Any, int] | None] = SimpleQueue()
        loops = (self._work, self._watch) if by_nccl else (self._work,)
        self._threads = [
            threading.Thread(target=loop, name="pyrocshmem network", daemon=True) for loop in loops
        ]
        for thread in self._threads:
            thread.start()

    def swap(self, send: Blocks, receive: Blocks) -> Leg:
        """Send contiguous blocks to hosts, and receive such from hosts. Every rank of `peers` makes the same swaps in
        the same order; a block that is sent must stay as it is until the wait."""
        send, receive = _filled(send), _filled(receive)
        self.bytes_sent += sum(block.numel() * block.element_size() for block in send.values())
        return (
            self._by_stream(send, receive)
            if self._data is not self._words
            else self._by_thread(send, receive)
        )

    def greet(self, number: int, words: str) -> Leg:
        """Compare a call with those of the peers: 16 bytes to each, which are not counted. Its wait raises `Differs`
        where theirs is another; then what else was given to the thread is not sent: gloo ends the process to which more
        comes than it asked for."""
        digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
        mine = torch.tensor([number, int.from_bytes(digest, "little", signed=True)], device="cpu")
        others = [host for host in range(len(self.peers)) if host != self.host]
        theirs = torch.empty(len(self.peers), 2, dtype=torch.int64, device="cpu")

        def compare() -> None:
            self._differs = not bool((theirs[others] == mine).all())

        return self._by_thread(dict.fromkeys(others, mine), {host: theirs[host] for host in others}, compare)

    def close(self) -> None:
        """End what is under way, the threads and the process groups. Local; nothing is said to the peers."""
        self._jobs.put(None)
        self._watched.put(None)
        for group in {self._words, self._data}:
            with contextlib.suppress(RuntimeError):
                group.abort()
        for thread in self._threads:
            thread.join(_LOOK_S + self.seconds)

    def _work(self) -> None:
        if self._side is not None:
            torch.cuda.set_stream(self._side)
        while (job := self._jobs.get()) is not None:
            job()

    def _by_thread(self, send: Blocks, receive: Blocks, then: Callable[[], None] | None = None) -> Leg:
        done: Future[Callable[[], object]] = Future()
        on_gpu = any(block.is_cuda for block in (*send.values(), *receive.values()))
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("gloo's blocks between hosts can't be captured in a CUDA graph; NCCL's can")
        ready = torch.cuda.current_stream(self.device).record_event() if on_gpu else None

        def job() -> None:
            try:
                if ready is None:
                    self._meet(send, receive)
                    if then is not None:
                        then()
                    self._require_same()
                    done.set_result(_nothing)
                    return
                ready.wait()
                found = {host: torch.empty_like(block, device="cpu") for host, block in receive.items()}
                self._meet({host: block.cpu() for host, block in send.items()}, found)
                for host, block in receive.items():
                    block.copy_(found[host])
                arrived = torch.cuda.current_stream(self.device).record_event()
                done.set_result(lambda: torch.cuda.current_stream(self.device).wait_event(arrived))
            except BaseException as error:
                done.set_exception(error)

        self._jobs.put(job)
        return Leg(done)

    def _require_same(self) -> None:
        if self._differs:
            raise Differs

    def _meet(self, send: Blocks, receive: Blocks) -> None:
        """Send and receive by gloo, and wait."""
        self._require_same()
        start = time.monotonic()

        def with_host(host: int, do: Callable[..., Any], *args: Any) -> Any:
            try:
                return do(*args)
            except RuntimeError as error:
                waited = time.monotonic() - start
                raise Lost(host, waited >= self.seconds, waited, str(error)) from None

        works = [
            (host, with_host(host, way, block, self.peers[host], self._words))
            for way, blocks in ((dist.isend, send), (dist.irecv, receive))
            for host, block in blocks.items()
        ]
        for host, work in works:
            left = max(start + self.seconds - time.monotonic(), 0.001)
            with_host(host, work.wait, timedelta(seconds=left))

    def _by_stream(self, send: Blocks, receive: Blocks) -> Leg:
        ready = torch.cuda.current_stream(self.device).record_event()
        ways = ((dist.isend, send), (dist.irecv, receive))
        both = [
            dist.P2POp(way, block, self.peers[host], self._data)
            for way, blocks in ways
            for host, block in blocks.items()
        ]
        works = dist.batch_isend_irecv(both) if both else []
        hosts = [*send, *receive]
        if hosts:
            self._watched.put((ready, works[-1], hosts[0]))
        done: Future[Callable[[], object]] = Future()
        done.set_result(lambda: [work.wait() for work in works])
        return Leg(done)

    def _watch(self) -> None:
        """End what NCCL waits for in vain, from when the device came to it."""
        while (job := self._watched.get()) is not None:
            ready, work, host = job
            begin: float | None = None
            while self.lost is None and not work.is_completed():
                time.sleep(_LOOK_S)
                begin = time.monotonic() if begin is None and ready.query() else begin
                waited = 0.0 if begin is None else time.monotonic() - begin
                if waited >= self.seconds:
                    self.lost = Lost(host, True, waited, "NCCL waited in vain")
                    self._data.abort()


def _filled(blocks: Blocks) -> dict[int, torch.Tensor]:
    """Those that have elements: their sizes are known on both sides."""
    return {host: block for host, block in blocks.items() if block.numel() > 0}


def _nothing() -> None:
    """What a caller's stream waits for where there are none."""
