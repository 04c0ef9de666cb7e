"""Blocks between hosts, moved by an engine of torch.distributed: NCCL or RCCL between GPUs, gloo elsewhere.

    network = Network(peers, host, device, seconds)     # collective: peers[k] is the rank of host k
    leg = network.swap({1: mine}, {1: theirs})          # on its way; what follows runs beside it
    leg.wait()                                          # `theirs` is there, for what this rank launches next

The engine only moves bytes: sums are made here, in an order that doesn't depend on sizes. It has process groups of its
own for each number that a rank has on its host, made by their members alone. gloo's waits are made by a thread of the
network, one swap after the other, so that they run beside what this rank computes; GPU tensors pass through host
memory there. NCCL's are put into its stream, between two marks that the device writes into memory of the host, also
when a CUDA graph of them is replayed. A thread looks at the marks, and aborts the process groups when a swap has lasted
`seconds`, or its connection ended; NCCL's own watchdog, which would end the process, is told to leave it alone.
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

from pyrocshmem.environment import changed_environment
from pyrocshmem.groups import new_process_group
from pyrocshmem.timeouts import init_seconds

# By the number of the host that they go to or come from.
Blocks = Mapping[int, torch.Tensor]

# How often a rank that waits looks whether a peer gave up, and NCCL's watcher at the marks.
_LOOK_S = 0.05
# Process groups of NCCL among which a block is divided: one uses few channels to a peer. Two H100 by sockets exchange
# 64 MiB at 2.1 GB/s by one, 4.3 by two, 7.3 by four; a ring at 3.7. Each has at least so many bytes.
_RAILS, _RAIL_BYTES = 4, 512 << 10
# To end NCCL's process group; what takes longer goes on by itself.
_END_S = 1.0
_NEVER = timedelta(days=30)


class Lost(Exception):
    """One of `hosts` did not send or take a block: `late` where time ran out, else its connection ended."""

    def __init__(self, hosts: Sequence[int], late: bool, waited_s: float, why: str) -> None:
        self.hosts, self.late, self.waited_s, self.why = tuple(hosts), late, waited_s, why
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
        self.others = [other for other in range(len(self.peers)) if other != host]
        self._words = new_process_group(self.peers, timedelta(seconds=init_seconds()), "gloo")
        self._rails: list[Any] = []  # NCCL's
        self._differs = False
        self.lost: Lost | None = None  # what the watcher of NCCL found
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._aborting: list[threading.Thread] = []
        self._threads: list[threading.Thread] = []
        self._start(self._work)
        if device.type == "cuda" and "nccl" in dist.get_backend_config():
            # When they are made they read whether their own watchdog may end the process.
            with changed_environment({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}):
                self._rails = [new_process_group(self.peers, _NEVER, "nccl") for _ in range(_RAILS)]
            self._count = torch.zeros(1, dtype=torch.int64, device=device)
            self._marks = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)
            self._begin, self._end = self._marks.split(1)
            self._connect()
            self._start(self._watch)

    def _start(self, loop: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=loop, name="pyrocshmem network", daemon=True))
        self._threads[-1].start()

    def _connect(self) -> None:
        """Have NCCL connect, which it does at a first swap: without an end where a peer is gone, and never in a
        capture. RuntimeError after `init_seconds()`."""
        done: Future[None] = Future()

        def job() -> None:
            try:
                blank = torch.zeros(_RAILS * _RAIL_BYTES, dtype=torch.uint8, device=self.device)
                send = dict.fromkeys(self.others, blank)
                self._by_stream(send, {host: torch.empty_like(blank) for host in self.others})
                torch.cuda.synchronize(self.device)
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self._jobs.put(job)
        try:
            done.result(init_seconds())
        except NotYet:
            raise RuntimeError(f"NCCL found no connection in {init_seconds():g} s") from None

    def swap(self, send: Blocks, receive: Blocks) -> Leg:
        """Send contiguous blocks to hosts, and receive such from hosts. Every rank of `peers` makes the same swaps in
        the same order; a block that is sent must stay as it is until the wait."""
        send, receive = _filled(send), _filled(receive)
        self.bytes_sent += sum(block.numel() * block.element_size() for block in send.values())
        return self._by_stream(send, receive) if self._rails else self._by_thread(send, receive)

    def greet(self, number: int, words: str) -> Leg:
        """Compare a call with those of the peers: 16 bytes to each, which are not counted. Its wait raises `Differs`
        where theirs is another; then what else was given to the thread is not sent: gloo ends the process to which more
        comes than it asked for."""
        digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
        mine = torch.tensor([number, int.from_bytes(digest, "little", signed=True)], device="cpu")
        theirs = torch.empty(len(self.peers), 2, dtype=torch.int64, device="cpu")

        def compare() -> None:
            self._differs = not bool((theirs[self.others] == mine).all())

        send, receive = dict.fromkeys(self.others, mine), {host: theirs[host] for host in self.others}
        return self._by_thread(send, receive, compare)

    def close(self) -> None:
        """End what is under way, the threads and the process groups. Local; nothing is said to the peers."""
        self._jobs.put(None)
        self._closed.set()
        with contextlib.suppress(RuntimeError):
            self._words.abort()
        for thread in self._abort_nccl():
            thread.join(_END_S)
        for thread in self._threads:
            thread.join(_LOOK_S + self.seconds)

    def _abort_nccl(self) -> list[threading.Thread]:
        """End what its kernels wait for. By a thread each: NCCL goes on until no CUDA graph has calls of it."""
        if not self._aborting:
            self._aborting = [
                threading.Thread(target=rail.abort, name="pyrocshmem abort", daemon=True)
                for rail in self._rails
            ]
            for thread in self._aborting:
                thread.start()
        return self._aborting

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
                raise Lost([host], waited >= self.seconds, waited, str(error)) from None

        works = [
            (host, with_host(host, way, block, self.peers[host], self._words))
            for way, blocks in ((dist.isend, send), (dist.irecv, receive))
            for host, block in blocks.items()
        ]
        for host, work in works:
            left = max(start + self.seconds - time.monotonic(), 0.001)
            with_host(host, work.wait, timedelta(seconds=left))

    def _by_stream(self, send: Blocks, receive: Blocks) -> Leg:
        by_rail: list[list[dist.P2POp]] = [[] for _ in self._rails]
        for way, blocks in ((dist.isend, send), (dist.irecv, receive)):
            for host, block in blocks.items():
                shares = min(max(block.nbytes // _RAIL_BYTES, 1), _RAILS)
                for rail, share in enumerate(block.view(-1).tensor_split(shares)):
                    by_rail[rail].append(dist.P2POp(way, share, self.peers[host], self._rails[rail]))
        done: Future[Callable[[], object]] = Future()
        done.set_result(self._enqueue(by_rail) if by_rail[0] else _nothing)
        return Leg(done)

    def _enqueue(self, by_rail: list[list[dist.P2POp]]) -> Callable[[], object]:
        """Enqueue the swap between its marks; what lets the current stream wait for it."""
        side = self._side
        assert side is not None
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._begin.copy_(self._count.add_(1), non_blocking=True)
        try:
            works = [work for both in by_rail if both for work in dist.batch_isend_irecv(both)]
        except dist.DistBackendError as error:  # what it has noticed of an earlier swap
            raise self.lost or Lost(self.others, False, 0.0, str(error)) from None
        with torch.cuda.stream(side):
            for work in works:
                work.wait()
            self._end.copy_(self._count, non_blocking=True)
        arrived = side.record_event()

        def arrive() -> None:
            torch.cuda.current_stream(self.device).wait_event(arrived)
            by_rail.clear()  # whose blocks had to stay for so long

        return arrive

    def _watch(self) -> None:
        """End what NCCL waits for in vain, from when the device came to it."""
        rails = [rail._get_backend(self.device) for rail in self._rails]
        seen, since = (0, 0), 0.0
        while not self._closed.wait(_LOOK_S):
            now, before = time.monotonic(), seen
            seen = int(self._begin), int(self._end)
            since = now if seen != before else since
            if seen[0] == seen[1]:
                continue
            late = now - since >= self.seconds
            if not late and all(rail.get_error().name == "SUCCESS" for rail in rails):
                continue
            self.lost = Lost(
                self.others, late, now - since, "NCCL waited in vain" if late else "NCCL reports it"
            )
            self._abort_nccl()
            return


def _filled(blocks: Blocks) -> dict[int, torch.Tensor]:
    """Those that have elements: their sizes are known on both sides."""
    return {host: block for host, block in blocks.items() if block.numel() > 0}


def _nothing() -> None:
    """What a caller's stream waits for where there are none."""
