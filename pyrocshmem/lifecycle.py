"""What a heap is besides memory: ranks that vote, one fault that stops it for all, an end that harms nobody.

`Heap` inherits `Lifecycle`. Faults travel three ways: a rank that waits in a vote sees the abort in the
group's store; a kernel that waits sees the abort word of its heap; a host that launched the kernel finds the
record in `status`. After the first fault a heap is broken: every later call raises it again, until all ranks have
called `recover`, or a new heap takes its place.

Recovery. A fault leaves the ranks out of step: one has finished a call that another never launched, one has freed
what another still holds, a kernel may still wait. Protocol, by all ranks:
1. set all abort words, so that waits end, and wait for the own device;
2. vote, on a channel that no earlier abort concerns: from here on no rank launches or writes anything;
3. keep the allocations that all ranks hold; clear the own abort word, record, call numbers and flags;
4. vote: from here on any rank may write to any other.
A rank that has called `recover` less often than its peers hears at once that they gave up, and so catches up with them.
"""

import contextlib
import copy
import ctypes
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Protocol, Self

import torch

from pyrocshmem import status, target
from pyrocshmem.errors import CallMismatch, InitTimeout, PeerAborted, PeerTimeout, ShmemError, describe
from pyrocshmem.forming import (
    SYSTEM_BYTES,
    SYSTEM_WORDS,
    DefaultBytes,
    SharedMemory,
    default_bytes,
    form,
    form_growing,
    own_device,
    refuse_capture,
    storage_at,
    synchronize,
    tensor_on,
)
from pyrocshmem.groups import Group, as_group
from pyrocshmem.signed_records import parsed
from pyrocshmem.stores import store_may_be_gone
from pyrocshmem.timeouts import init_seconds
from pyrocshmem.torch_contexts import makes_normal_tensors

ALIGNMENT = 256
PADDED_RANKS = 8
_MESSAGE_S = 0.3
live_heaps: "weakref.WeakSet[Lifecycle]" = weakref.WeakSet()

# Calls that a rank's memory holds.
_KEPT = 1024
# Bits of a word: the sign's is left alone.
_INDEX_BITS, _ROW_BITS, _NUMBER_BITS = 16, 24, 23
_INDICES, MOST_ROWS, _NUMBERS = 1 << _INDEX_BITS, (1 << _ROW_BITS) - 1, 1 << _NUMBER_BITS
_WHICH_BITS = _INDEX_BITS + _ROW_BITS
_CLOSED = (1 << _WHICH_BITS) - 1


class Begun(NamedTuple):
    """A call, by the number of what ranks have voted on, and its rows, at most MOST_ROWS."""

    call: int
    rows: int = 0


class Difference(NamedTuple):
    """Call `number` is `which[rank]` on each rank; None: not begun there. closed_by: the first rank that closed its
    heap instead, None if there is none."""

    number: int
    which: list[Begun | None]
    closed_by: int | None = None


class Caller(Protocol):
    """What makes calls on a heap and counts them, as `stream_k.Workspace` does: what the heap asks of it."""

    def difference(self) -> ShmemError | None:
        """Whether ranks have begun different calls, or one closed its heap instead: in `Heap.check`."""

    def make_no_more(self) -> list[int]:
        """This rank makes no more calls. Returns the peers that have begun one more: in `Heap.close`."""

    def start_anew(self) -> None:
        """Count calls from 0: in `Heap.recover`, while no rank writes anything."""

    def let_go(self) -> None:
        """Hold no memory of the heap any more: in `Heap.close`."""


class Ledger:
    """Which calls the ranks have begun, so that calls made in another order, or of other numbers of rows, are noticed.
    Making one is collective, the rest is local.

    Ranks vote on what a call is when it is new (`Workspace.planned_together`); later it is made without a vote, with
    any number of rows, and a rank that makes another call, or the same one of other rows, would mix its data with
    theirs. So each rank's host writes down which call it begins, in memory that the hosts of its peers can read, and
    looks at what they wrote:

        rank 0   .. | 7: all_reduce of 4 x 8 | 8: all_gather of 2 x 8
        rank 1   .. | 7: all_reduce of 4 x 8 | 8: rms_norm of 4 x 8     the second one to come sees it and launches
        nothing

    A word, of 64 bits, has the number of a call, its rows, and an index of what ranks have voted on (the same on each
    rank, since they vote in the same order).

    A rank that is behind is compared later, unless its peers get _KEPT calls ahead. Numbers wrap; so do indices, of
    more than 65,535 calls that were voted on. Replays of captured graphs don't count as calls: their order is the
    caller's to keep.

    A rank that closes its heap writes _CLOSED in place of its next call. So a call that it still made ends as ever,
    however late a peer makes it, and one that it will never make is known for such by whoever begins it, at no cost.
    Those that have begun it before must be told: it looks whether there are any, after it has written.
    """

    def __init__(self, group: Group, timeout: float) -> None:
        # In host memory, whatever the device. Its system area, but for the last words, is room enough.
        channel, cpu = group.channel("ledger"), torch.device("cpu")
        self._memory = form(channel, "memory to compare calls", SYSTEM_BYTES, cpu, "host", timeout)
        self._words = [
            memoryview((ctypes.c_int64 * _KEPT).from_address(base)).cast("B").cast("q")
            for base in self._memory.bases
        ]
        self._rank = group.rank
        self._own = self._words[group.rank]
        self._peers = [words for rank, words in enumerate(self._words) if rank != group.rank]
        self._begun = self._compared = 0

    def begin(self, index: int, rows: int = 0) -> None:
        """Write down that this rank begins a call."""
        self._begun = number = self._begun + 1
        # One index is left out: with the most rows it would be _CLOSED.
        which = rows << _INDEX_BITS | index % (_INDICES - 1)
        self._own[number % _KEPT] = number % _NUMBERS << _WHICH_BITS | which

    def compare(self) -> Difference | None:
        """The first call that a peer has begun otherwise than this rank, None if there is none so far."""
        compared = max(self._compared, self._begun - _KEPT)
        while compared < self._begun:
            number = compared + 1
            place = number % _KEPT
            mine = self._own[place]
            behind = False
            for words in self._peers:
                word = words[place]
                if word != mine:
                    ahead = ((word >> _WHICH_BITS) - number) % _NUMBERS
                    if ahead == 0:
                        return self._at(number)
                    if ahead >= _NUMBERS // 2:
                        behind = True
            if behind:
                return None  # later
            self._compared = compared = number
        return None

    def close(self) -> list[int]:
        """Write down that this rank begins no more calls. Returns the peers that have begun one more already."""
        number = self._begun + 1
        place = number % _KEPT
        self._own[place] = number % _NUMBERS << _WHICH_BITS | _CLOSED
        ahead = [((words[place] >> _WHICH_BITS) - number) % _NUMBERS for words in self._words]
        return [rank for rank, calls in enumerate(ahead) if rank != self._rank and calls < _NUMBERS // 2]

    def restart(self) -> None:
        """Count from 0 again: while no rank begins a call."""
        self._begun = self._compared = 0
        for place in range(_KEPT):
            self._own[place] = 0

    def overtaken(self) -> Difference | None:
        """The next call of this rank, which has not begun it, where a peer has; None if no peer has."""
        found = self._at(self._begun + 1)
        return found if found.closed_by is None and any(found.which) else None

    def _at(self, number: int) -> Difference:
        begun, closed_by = number % _NUMBERS, None
        found: list[Begun | None] = []
        for rank, words in enumerate(self._words):
            word = words[number % _KEPT]
            which = word & _CLOSED if word >> _WHICH_BITS == begun else None
            if which == _CLOSED and closed_by is None:
                closed_by = rank
            found.append(None if which in (None, _CLOSED) else Begun(which % _INDICES, which >> _INDEX_BITS))
        return Difference(number, found, closed_by)


class Lifecycle:
    """Forming, votes, faults and the end of a heap; see `Heap` for the arguments and attributes."""

    @makes_normal_tensors
    def __init__(
        self,
        nbytes: int | None = None,
        group: Any = None,
        device: torch.device | str | int | None = None,
        timeout: float = 30.0,
        debug: bool = False,
    ) -> None:
        self._closed = True  # until formed: `close` and `__del__` of a heap that never was do nothing
        self._failure: ShmemError | None = None
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._voters: set[int] = set()  # threads
        self.group = as_group(group)
        self.rank, self.world_size = self.group.rank, self.group.world_size
        self.timeout, self.debug = timeout, debug
        self._home = self.group.channel("heap")
        self._channel = self._home.channel("votes")  # another one after each recovery
        try:
            self.device = own_device(device)
            refuse_capture(self.device, "__init__")
            if not timeout > 0:
                raise ValueError(f"timeout is {timeout}, allowed are seconds greater than 0")
            size = self._agree_on_size(nbytes)
        except (TypeError, ValueError, RuntimeError) as error:
            self._home.leave(f"{type(error).__name__}: {error}")  # the peers needn't wait for this rank
            raise
        memory, self.fixed_because = self._form(size)
        self.nbytes = size.fixed if memory.limit is None else size.limit
        self._memory: SharedMemory | None = memory
        self.workspace: Any = None  # of `stream_k.workspace_for`, which lives as long as the heap
        self._callers: list[weakref.ref[Caller]] = []
        self.bases = memory.bases
        self.base = memory.bases[self.rank]
        # Padded, so that a kernel can read the table as one block of 8 lanes.
        padding = [self.base] * (PADDED_RANKS - self.world_size)
        table = [self.base, *self.bases, *padding]
        self.heap_bases = torch.tensor(table, dtype=torch.int64, device=self.device)
        storage = storage_at(self.base, SYSTEM_BYTES, self.device, memory)
        self._system: torch.Tensor | None = tensor_on(storage, torch.int32, (SYSTEM_WORDS,))
        on_gpu = self.device.type != "cpu"
        on_host: Any = {"device": "cpu", "pin_memory": on_gpu}  # whatever the caller's default device is
        self.status = torch.zeros(status.NUM_WORDS, dtype=torch.int64, **on_host)
        self._record = self.status.numpy()  # the same memory: an array gives a number in a tenth of the time
        # For aborting while kernels hold every SM and wait: a copy, which needs no SM, on a stream of its own. Made
        # now, because pinning memory waits for running kernels.
        self._abort_word = torch.full((1,), 1 + self.rank, dtype=torch.int32, **on_host)
        self._abort_seen = torch.zeros(1, dtype=torch.int32, **on_host)
        self._abort_places = [memory.words(base)[:1] for base in self.bases]
        self._abort_stream = torch.cuda.Stream(self.device) if on_gpu else None
        self._closed = False
        live_heaps.add(self)

    def __repr__(self) -> str:
        if self._closed or self.broken:
            state = "closed" if self._closed else "broken"
        else:
            state = f"{'' if self.fixed_because else 'up to '}{self.nbytes} bytes"
        return f"Heap(rank {self.rank} of {self.world_size}, {self.device}, {state})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a heap is memory of this process and its peers: it can't be pickled or copied")

    def vote(self, call: str, payload: bytes = b"") -> list[bytes]:
        """Give `payload` to all ranks and return all of theirs, in rank order.

        Raises `CallMismatch` when the ranks' `call` differ (the heap stays usable), `PeerTimeout` when one
        doesn't come within `timeout`, `PeerAborted` when one gave up; after these two the heap is broken.
        """
        with self._lock:
            self._require_usable()
            self._voters.add(threading.get_ident())
            try:
                return self._exchange(call, payload)
            except CallMismatch as error:
                raise CallMismatch(error.calls, in_threads=len(self._voters) > 1) from None
            except (PeerTimeout, PeerAborted):
                mismatch = self._difference()
                if not isinstance(mismatch, CallMismatch):
                    raise
                self._failure = mismatch
                self._set_abort_words()
                raise mismatch from None

    def _exchange(self, call: str, payload: bytes) -> list[bytes]:
        try:
            return self._channel.exchange(payload, call, self.timeout)
        except InitTimeout as error:
            peer = error.missing[0]
            process = self._process_of(peer)
            fault: ShmemError = PeerTimeout.in_vote(call, self._channel.rounds, self.rank, error, process)
            if error.reason:  # this rank is the late one: the peer was here, and gave up
                fault = PeerAborted(self.rank, peer, self._message_of(peer))
            self._fail(fault)
            raise fault from None
        except CallMismatch:
            raise
        except ShmemError as error:
            self._fail(error)
            raise

    def barrier(self) -> None:
        """Return once everything that any rank launched before has finished. Raises as `vote` and `check`."""
        self.synchronize()
        self.vote("barrier")

    def synchronize(self) -> None:
        """Wait for what this rank launched on its device, then `check`."""
        self._require_usable()
        refuse_capture(self.device, "synchronize")
        synchronize(self.device)
        self.check()

    @property
    def broken(self) -> bool:
        """Whether a wait ran out, a peer gave up, or this rank did: until `recover`, the heap can only be closed."""
        return self._failure is not None

    @property
    def system(self) -> torch.Tensor:
        """int32[SYSTEM_WORDS]: the start of the own heap. `ValueError` after `close`."""
        if self._system is None:
            raise ValueError("the heap is closed")
        return self._system

    def check(self) -> None:
        """Raise the fault that kernels of this rank have recorded, if any, or `CallMismatch` where ranks have begun
        different calls. Doesn't wait for the device."""
        self._require_usable()
        fault: ShmemError | None = None
        if self._record[status.Word.CODE]:
            fault = status.to_error(self.status.tolist(), self.rank, self._message_of, self._process_of)
            if isinstance(fault, PeerTimeout) and (farewell := self._farewell_of(fault.peer)) is not None:
                fault = PeerAborted(self.rank, fault.peer, farewell)
        elif self.device.type == "cpu" and (word := int(self.system[0])) != 0:
            fault = PeerAborted(self.rank, word - 1, self._message_of(word - 1))
        # Last: a peer that gave up for another call had written that down before.
        difference = self._difference()
        if difference is not None:
            fault = difference
        if fault is not None:
            self._fail(fault)
            if isinstance(fault, CallMismatch):
                self._set_abort_words()  # kernels that wait for another call's data end
            raise fault

    def _difference(self) -> ShmemError | None:
        for caller in self._living():
            if (found := caller.difference()) is not None:
                return found
        return None

    def closed_by(self, peer: int) -> PeerAborted:
        """The fault that `peer`, for whom all was well, has closed the heap instead of making a call."""
        return PeerAborted(self.rank, peer, _farewell(peer))

    def abort(self, message: str) -> None:
        """Give up: peers that wait for this rank, on the host or in a kernel, raise `PeerAborted`.

        Leaving `with heap:` by an exception does this. The heap can afterwards only be closed, or recovered.
        """
        if self._closed or self.broken or os.getpid() != self._pid:
            return
        self._failure = PeerAborted(self.rank, self.rank, message)
        # The message first: a kernel that sees the abort word ends at once, and its host looks for one.
        with store_may_be_gone():
            self._channel.abort(message)
        self._set_abort_words()

    def attach(self, caller: Caller) -> None:
        """Ask `caller` what `Caller` says, as long as it lives."""
        self._callers = [weakref.ref(each) for each in (*self._living(), caller)]

    def _living(self) -> list[Caller]:
        return [caller for each in self._callers if (caller := each()) is not None]

    def new_ledger(self) -> Ledger | None:
        """Where ranks write down which calls of a workspace they begin: collective. None: of one rank."""
        return Ledger(self.group, self.timeout) if self.world_size > 1 else None

    def _recover(self, holdings: bytes, keep: Callable[[list[bytes]], None]) -> None:
        """See `Heap.recover`. keep: is given every rank's `holdings`, at that time."""
        with self._lock:
            self._require_own_process()
            if self._closed:
                raise ValueError("the heap is closed")
            refuse_capture(self.device, "recover")
            with store_may_be_gone():  # for peers that still vote there
                self._channel.abort("it has begun to recover the heap")
            self._channel = self._home.channel("votes")
            try:
                self._set_abort_words()
                synchronize(self.device)
                keep(self._exchange("recover", holdings))
                self._start_anew()
                self._exchange("recovered", b"")
            except BaseException as error:
                self._failure = None
                fault = ShmemError(f"the heap could not recover: {type(error).__name__}: {error}")
                self._fail(error if isinstance(error, ShmemError) else fault)
                raise
            self._failure = None

    def _start_anew(self) -> None:
        self.system[:1] = 0
        self.status.zero_()
        for caller in self._living():
            caller.start_anew()
        synchronize(self.device)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """See `Heap.close`."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        live_heaps.discard(self)
        with store_may_be_gone():
            self._home.leave(_farewell(self.rank))
        if self._failure is None:  # else the peers have been told why
            waiting = {peer for caller in self._living() for peer in caller.make_no_more()}
            with contextlib.suppress(RuntimeError):  # a kernel failed: nothing runs on this device any more
                self._set_abort_words(sorted(waiting))
        for caller in self._living():
            caller.let_go()
        self._system = None
        self.workspace = None
        self._abort_places = []
        self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(describe(error))
        self.close()

    def __del__(self) -> None:
        # While the interpreter ends, modules are half gone; `_at_exit` has closed every heap.
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            self.close()

    def _agree_on_size(self, nbytes: int | None) -> DefaultBytes:
        """`limit` 0 is that of a heap that shall not grow."""
        if nbytes is not None:
            if isinstance(nbytes, bool) or not isinstance(nbytes, int):
                raise TypeError(f"nbytes is a {type(nbytes).__name__}, allowed are int and None")
            if nbytes < 1:
                raise ValueError(f"nbytes is {nbytes}, allowed are 1 or more")
            return DefaultBytes(0, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        mine = default_bytes(self.device)
        call = "Heap of the default size"
        replies = parsed(call, self._channel.exchange(json.dumps(mine._asdict()).encode(), call))
        smallest = (min(int(reply[name]) for reply in replies) for name in mine._fields)
        return DefaultBytes(*(max(ALIGNMENT, size // ALIGNMENT * ALIGNMENT) for size in smallest))

    def _form(self, size: DefaultBytes) -> tuple[SharedMemory, str]:
        """(the memory, why it can't grow), alike on all ranks."""
        where = self.device, target.backend(), init_seconds()
        because = "it was given a size"
        if size.limit:
            call, limit = f"Heap(up to {size.limit} bytes)", SYSTEM_BYTES + size.limit
            found = form_growing(self._channel, call, limit, *where)
            if isinstance(found, SharedMemory):
                return found, ""
            because = found
        call = f"Heap({size.fixed} bytes)"
        return form(self._channel, call, SYSTEM_BYTES + size.fixed, *where), because

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise ShmemError(
                f"the heap formed in process {self._pid} and is used in its fork {os.getpid()}; "
                "form it after the fork, or start ranks with pyrocshmem.spawn"
            )

    def _require_usable(self) -> None:
        self._require_own_process()
        if self._failure is not None:
            raise copy.copy(self._failure)
        if self._closed:
            raise ValueError("the heap is closed")

    def _process_of(self, peer: int) -> str:
        known = self._memory.processes[peer : peer + 1] if self._memory else ()
        return "".join(map(status.describe_process, known))

    def _message_of(self, peer: int) -> str:
        # A kernel that gives up sets the abort words at once; its host says why a moment later.
        deadline = time.monotonic() + _MESSAGE_S
        while time.monotonic() < deadline:
            # Looked at in this order: a rank that aborts leaves next.
            farewell = self._farewell_of(peer)
            try:
                record = self._channel.abort_record()
            except (RuntimeError, ValueError):
                break
            if record is not None and record[0] == peer:
                return record[1]
            if farewell is not None:
                return farewell
            time.sleep(0.01)
        return "a wait of its own ran out, or it was told to stop"

    def _farewell_of(self, peer: int) -> str | None:
        """What a peer said when it closed the heap."""
        with store_may_be_gone():
            if (farewell := self._home._farewell_of(peer)) is not None:
                return farewell.text
        return None

    def _fail(self, fault: ShmemError) -> None:
        """Break the heap, and tell the peers: those that wait in a vote would otherwise wait in vain."""
        if self._failure is not None:
            return
        self._failure = fault
        if isinstance(fault, PeerAborted):
            return  # the peers hear it from where this rank heard it; passing it on would hide who began
        with store_may_be_gone():
            self._channel.abort(f"{type(fault).__name__}: {fault}")

    def _set_abort_words(self, ranks: Sequence[int] | None = None) -> None:
        """At ranks (None: all) that nobody has told yet: the first to tell them names the cause."""
        with torch.cuda.stream(self._abort_stream):
            for rank in range(self.world_size) if ranks is None else ranks:
                place = self._abort_places[rank]
                self._abort_seen.copy_(place)
                if not self._abort_seen:
                    place.copy_(self._abort_word)


def _farewell(rank: int) -> str:
    return (
        f"rank {rank} has closed the heap, which can't recover: form a new one, on heap.group or on "
        "heap.group.subgroup(the ranks that go on)"
    )
