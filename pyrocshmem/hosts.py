"""Groups whose ranks are on several hosts: a symmetric heap on each host, an engine of torch.distributed between them.

    total = collectives.all_reduce(x)          # of a default process group over two hosts: nothing else is new
    hosts = hosts_for(group)                   # for `barrier`, `recover` and `close`
    hosts.heap                                 # of the ranks on this host

Ranks h L .. h L + L - 1 of the group are on host h: L ranks a host, as torchrun starts them. What ranks of one host
give one another goes through their heap, what they give to other hosts through the process group of the ranks that have
the same number on their host (`pyrocshmem.network`), so that each byte leaves its host once.

Calls are compared between hosts, too: each brings its number and a digest of what it is, 16 bytes to every other host,
and what differs is a `CallMismatch` on all ranks before the results are returned. A fault of any rank ends the waits of
all: on its host by the heap, elsewhere by a record in the group's store, at which ranks that wait look. Then all
ranks call `recover`.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pyrocshmem.errors import InitTimeout, PeerAborted, PeerTimeout, ShmemError, WorkspaceBusy, describe
from pyrocshmem.groups import Group, as_group
from pyrocshmem.heap import Heap
from pyrocshmem.network import Differs, Leg, Lost, Network
from pyrocshmem.stores import store_may_be_gone
from pyrocshmem.timeouts import wait_seconds
from pyrocshmem.versions import version

# A host that gave up says why before its connections end, but its words may take as long to come.
_MESSAGE_S = 0.5
# Each reads a record of every other host: not at every look.
_LOOKS_A_FAREWELL = 5

live_hosts: weakref.WeakSet[Hosts] = weakref.WeakSet()


class Hosts:
    """The ranks of a group, which are on several hosts. Made by `hosts_for`; forming one is collective.

    Attributes: rank, world_size, group; num_hosts, host: of this rank; local_size: ranks of a host, local_rank; heap:
    of this host; device; timeout: seconds that a vote waits; network.
    """

    def __init__(self, members: Group) -> None:
        numbers = members.host_numbers()
        self.group, self.rank, self.world_size = members, members.rank, members.world_size
        self.num_hosts, self.host = 1 + max(numbers), numbers[self.rank]
        self.local_size = _ranks_of_a_host(numbers)
        self.local_rank = self.rank % self.local_size
        self.workspace: Any = None  # of `calls.workspace.find_workspace`
        self._home = members.channel("over hosts")
        self._channel = self._home.channel("votes")
        self._failure: ShmemError | None = None
        self._closed = False
        self._busy = threading.Lock()
        self._calls = 0
        self._words = ""
        self._greeting: Leg | None = None
        self._looks = 0
        first = self.host * self.local_size
        try:
            self.heap = Heap(None, members.subgroup(range(first, first + self.local_size)))
        except BaseException as error:
            self._channel.abort(describe(error))
            raise
        self.device, self.timeout = self.heap.device, self.heap.timeout
        self._require_alike()
        self.network = self._connected()
        live_hosts.add(self)

    def __repr__(self) -> str:
        return f"Hosts(rank {self.rank} of {self.world_size}, host {self.host} of {self.num_hosts}, {self.device})"

    def others(self) -> list[int]:
        """The other hosts, from the next one on."""
        return [(self.host + step) % self.num_hosts for step in range(1, self.num_hosts)]

    def turns(self) -> list[tuple[int, int]]:
        """(host to send to, host to receive from), in each of which every host has one of both."""
        others = self.others()
        return list(zip(others, reversed(others), strict=True))

    def rank_on(self, host: int) -> int:
        """The rank on `host` that has this rank's number there."""
        return host * self.local_size + self.local_rank

    @contextlib.contextmanager
    def call(self, words: str) -> Iterator[None]:
        """Around a call of all ranks, which `words` tell from others. A fault inside ends it on all of them."""
        self.check()
        if not self._busy.acquire(blocking=False):
            raise WorkspaceBusy(
                f"{self!r} is in use by a call of another thread; calls over hosts are made by one"
            )
        try:
            self._calls += 1
            self._words = f"call {self._calls} over hosts: {words}"
            self._greeting = self.network.greet(self._calls, self._words)
            yield
            self._compare()
        except BaseException as error:
            raise self._given_up(error) from None
        finally:
            self._greeting = None
            self._busy.release()

    def wait(self, leg: Leg) -> None:
        """Return once the blocks of `leg` are there for what this rank launches next."""
        self._compare()
        leg.wait(self._look)

    def check(self) -> None:
        """Raise the fault of an earlier call, if any."""
        if self._closed:
            raise ValueError("the hosts' group is closed")
        if self._failure is None and self.network.lost is not None:
            raise self._given_up(self.network.lost)
        if self._failure is not None:
            raise copy.copy(self._failure)

    def barrier(self) -> None:
        """Return once everything that any rank launched before has finished. Raises as `Heap.barrier`."""
        self.synchronize()
        self._vote("barrier of hosts")

    def synchronize(self) -> None:
        """Wait for what this rank launched on its device, then `check`."""
        self.heap.synchronize()
        self.check()

    @property
    def broken(self) -> bool:
        """Whether a call failed: until `recover`, the hosts can only be closed."""
        return self._failure is not None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def recover(self) -> None:
        """Make calls work again after a fault: collective, on the ranks of all hosts, in the processes in which it
        came. The heaps recover as `Heap.recover` does, and the hosts connect anew.

        Raises `PeerTimeout` when a rank doesn't come within `timeout`, `PeerAborted` when one gave up, `ValueError`
        after `close`. Where a host is gone for good the others go on with a group of the ranks that live.
        """
        if self._closed:
            raise ValueError("the hosts' group is closed")
        with store_may_be_gone():  # for peers that still vote or wait there
            self._channel.abort("it has begun to recover")
        self._channel = self._home.channel("votes")
        self.network.close()
        self._failure, self._calls = None, 0
        try:
            self._vote("recover the hosts")
            self.heap.recover()
            self._vote("the hosts' heaps recovered")
            self.network = self._connected()
        except BaseException as error:
            raise self._given_up(error) from None

    def close(self) -> None:
        """Leave the group: its heap and its connections. Local, and harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        live_hosts.discard(self)
        with store_may_be_gone():
            self._home.leave(
                f"rank {self.rank} has left the group over hosts: form a new one of those that go on"
            )
        self.heap.close()
        self.network.close()
        self.workspace = None

    def _connected(self) -> Network:
        peers = [self.group.global_ranks[self.rank_on(host)] for host in range(self.num_hosts)]
        try:
            return Network(peers, self.host, self.device, wait_seconds())
        except (RuntimeError, ValueError) as error:  # where a peer has just ended, say
            raise ShmemError(f"ranks {peers} could not connect between their hosts: {error}") from error

    def _require_alike(self) -> None:
        """ValueError on all ranks where hosts run what can't work together. Their GPUs may differ: each sum is made by
        one rank, and all have its bits."""
        own = f"pyrocshmem {version()} on {'a CPU' if self.device.type == 'cpu' else 'GPUs'}"
        replies = self._vote("the hosts' heaps", own.encode())
        found = {
            rank // self.local_size: reply.decode(errors="replace") for rank, reply in enumerate(replies)
        }
        if len(set(found.values())) > 1:
            each = ", ".join(f"host {host} runs {what}" for host, what in found.items())
            self.heap.close()
            raise ValueError(f"all hosts must run the same: {each}")

    def _vote(self, call: str, payload: bytes = b"") -> list[bytes]:
        try:
            return self._channel.exchange(payload, call, self.timeout)
        except InitTimeout as late:
            raise PeerTimeout.in_vote(call, self._channel.rounds, self.rank, late, "") from None

    def _compare(self) -> None:
        """CallMismatch where other hosts make another call; once a call."""
        greeting, self._greeting = self._greeting, None
        if greeting is None:
            return
        try:
            greeting.wait(self._look)
        except Differs:
            self._channel.exchange(b"", self._words, self.timeout)  # raises it, with each rank's call
            raise ShmemError(f"other hosts make another call than {self._words}") from None

    def _look(self) -> None:
        """Raise what ended the call elsewhere, if it has."""
        if (record := self._abort_record()) is not None:
            raise PeerAborted(self.rank, *record)
        self.heap.check()
        self._looks += 1
        if self._looks % _LOOKS_A_FAREWELL == 0:
            for host in self.others():
                if (left := self._left(self.rank_on(host))) is not None:
                    raise left

    def _left(self, peer: int) -> PeerAborted | None:
        """That a peer has closed its `Hosts`."""
        with store_may_be_gone():
            if (farewell := self._home._farewell_of(peer)) is not None:
                return PeerAborted(self.rank, peer, farewell.text)
        return None

    def _abort_record(self) -> tuple[int, str] | None:
        with store_may_be_gone():
            return self._channel.abort_record()
        return None

    def _given_up(self, error: BaseException) -> BaseException:
        """`error` as this rank raises it, after telling the others."""
        if isinstance(error, Lost):
            error = self._named(error)
        elif isinstance(error, ShmemError):
            error = self._of_all_ranks(error)
        fault = error if isinstance(error, ShmemError) else ShmemError(f"a call failed: {describe(error)}")
        if self._failure is None:
            self._failure = fault
            with store_may_be_gone():
                if not isinstance(fault, PeerAborted):  # passing it on would hide who began
                    self._channel.abort(describe(error))
            self.heap.abort(describe(error))
        return error

    def _named(self, lost: Lost) -> ShmemError:
        """What became of a host from which nothing came: it gave up, or is gone, or late."""
        deadline = time.monotonic() + _MESSAGE_S
        waiting = self._channel.channel("waiting")
        with store_may_be_gone():
            waiting.leave("it waits in vain, too")
        missing = [self.rank_on(host) for host in lost.hosts]
        while time.monotonic() < deadline:
            if (record := self._abort_record()) is not None:
                return PeerAborted(self.rank, *record)
            for peer in missing:
                if (left := self._left(peer)) is not None:
                    return left
            time.sleep(0.02)
        # NCCL doesn't say whose block it was.
        peer = missing[0]
        with store_may_be_gone():
            peer = next((peer for peer in missing if waiting._reason(f"left/{peer}") is None), peer)
        host = peer // self.local_size
        expected = f"a block from host {host}"
        process = "" if lost.late else f"host, {host}, has ended its connection ({lost.why.splitlines()[0]})"
        return PeerTimeout(
            self._words, self.rank, peer, None, expected, "none", lost.waited_s, self._calls, process
        )

    def _of_all_ranks(self, fault: ShmemError) -> ShmemError:
        """A fault of this host's heap, where ranks count within the host, with the group's."""
        first = self.host * self.local_size
        if not (isinstance(fault, PeerAborted | PeerTimeout) and fault.rank == self.local_rank != self.rank):
            return fault
        if isinstance(fault, PeerAborted):
            return PeerAborted(self.rank, first + fault.peer, fault.message)
        facts = fault.tile, fault.expected, fault.seen, fault.waited_s, fault.call, fault.process
        return PeerTimeout(fault.op, self.rank, first + fault.peer, *facts)


def _ranks_of_a_host(numbers: tuple[int, ...]) -> int:
    """How many. ValueError where hosts have different numbers of ranks, or ranks that don't follow one another."""
    counts = Counter(numbers)
    if len(set(counts.values())) > 1:
        each = ", ".join(f"host {host} has {count}" for host, count in counts.items())
        raise ValueError(f"all hosts must have as many ranks of the group: {each}")
    if list(numbers) != sorted(numbers):
        raise ValueError(
            f"the ranks of a host must follow one another in the group; ranks 0, 1, .. are on hosts {list(numbers)}"
        )
    return counts[0]


def hosts_for(group: Any = None) -> Hosts:
    """The `Hosts` of a group whose ranks are on several hosts: formed at the first call of it, or of an op (then
    collective), the same one until it is closed. ValueError for a group on one host, where `heap_for` has what there
    is, and for hosts that have different numbers of ranks."""
    members = as_group(group)
    if max(members.host_numbers()) == 0:
        raise ValueError("all ranks of the group are on one host: heap_for(group) has its heap")
    if members.hosts is None or members.hosts.closed:
        members.hosts = Hosts(members)
    return members.hosts
