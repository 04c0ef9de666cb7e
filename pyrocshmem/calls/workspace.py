"""Workspace: the memory that a call of an op needs beside its tensors: control words, flags, slots, fix-up tiles.

A GEMM alone uses one per device (`local_workspace`), ops with peers one per heap (`workspace_for`), in which everything
that peers touch lies on the symmetric heap. Give an op a workspace of its own to run it beside another one:

    mine = stream_k.Workspace(heap)                     # grows as calls need it
    stream_k.gemm_all_reduce(a, b, group=heap, workspace=mine)

Calls on one workspace run one after another. A call on another stream waits, on the device, for the one before; a call
from another thread at the same time raises `WorkspaceBusy`. All ranks make the calls of a workspace in the same order.

A call that is new is voted on by all ranks, whatever its rows; after that only what makes a buffer grow is. `reserve`
says beforehand how many rows calls will have.

Threads beside one another need a workspace each. What is new on a heap (a workspace, the first call of a kind, what
makes a workspace grow, a tensor) is voted on, and all ranks must vote in the same order, whatever the thread: so make
the workspaces, and each call once, in one thread; later calls need no order. Or give each thread a heap of its own,
where it may vote when it likes; form those in one thread.

Keep a workspace as long as graphs that were captured of its calls.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from pyrocshmem import signal, status, timeouts
from pyrocshmem.blocks import held_by
from pyrocshmem.calls import invariance, planning
from pyrocshmem.calls.call_name import CallName
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.labels import label
from pyrocshmem.calls.streams import Streams
from pyrocshmem.checks import as_integer
from pyrocshmem.errors import CallMismatch, HeapOutOfMemory, ShmemError, WorkspaceBusy
from pyrocshmem.forming import synchronize
from pyrocshmem.groups import as_group
from pyrocshmem.heap import SYSTEM_BYTES, Heap, heap_for
from pyrocshmem.hosts import Hosts, hosts_for
from pyrocshmem.lifecycle import Difference
from pyrocshmem.message_slots import QUAD_BYTES, Room, clear
from pyrocshmem.torch_contexts import makes_normal_tensors, normal_tensors, on_device

# Slots are whole multiples of this, so that they hold whole rows of a tile of any width.
_SLOT_STEP = 4096
# What an error recommends of a heap's size is a multiple of this.
_HEAP_STEP = 1 << 20
# Plans hold buffers in circles of references, and a heap that grows gives no memory back that anything holds: a buffer
# of so many bytes is worth looking for circles.
_WORTH_COLLECTING = 16 << 20

# Plans that a workspace keeps. A plan of a fused op takes some 20 KB of the host, and graphs of the driver's memory.
KEPT_PLANS = 512
# What plans share, in things: calls of one kind have a dozen, but each number of rows has its own where A lies in
# columns, whose stride it is.
_MOST_SHARED = 4 * KEPT_PLANS

_MESSAGES = f"symmetric:{torch.int32}:messages"


class Turn:
    """What `Workspace.begin` returns: the call's launches are in a `with` block of it, at whose end it is over."""

    __slots__ = ("_end",)

    def __init__(self, end: Callable[[bool], None]) -> None:
        self._end = end

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(error is not None)


class _Kept:
    __slots__ = ("captured", "plan", "used")

    def __init__(self, plan: Any, used: int) -> None:
        self.plan, self.used, self.captured = plan, used, False


class Plans:
    """The KEPT_PLANS plans that were asked for last, by what they are made for. A serving engine brings other rows at
    every step, so most are never asked for again.

    retire: is given those that go while a captured graph may still be replayed, which reads what they hold. shared:
    what plans have in common, by what it is made for; it goes when all go, or when it is too much.
    """

    def __init__(self, retire: Callable[[Any], None]) -> None:
        self._retire = retire
        self.shared: dict[Hashable, Any] = {}
        self._kept: dict[Hashable, _Kept] = {}
        self._last: _Kept | None = None
        self._asked = 0

    def get(self, key: Hashable) -> Any:
        """The plan of that key; None where there is none."""
        found = self._last = self._kept.get(key)
        if found is None:
            return None
        # The order of a dict would cost a call two more hashes of its key.
        self._asked = found.used = self._asked + 1
        return found.plan

    def __setitem__(self, key: Hashable, plan: Any) -> None:
        if len(self._kept) >= KEPT_PLANS:
            self._drop_oldest()
        if len(self.shared) > _MOST_SHARED:
            self.shared.clear()
        self._asked += 1
        self._last = self._kept[key] = _Kept(plan, self._asked)

    def __len__(self) -> int:
        return len(self._kept)

    def values(self) -> Iterator[Any]:
        """All plans, in the order in which they were made."""
        return (kept.plan for kept in self._kept.values())

    def captured(self) -> None:
        """The plan that was asked for or made last is part of a captured graph."""
        if self._last is not None:
            self._last.captured = True

    def clear(self) -> None:
        """Drop all."""
        for kept in self._kept.values():
            if kept.captured:
                self._retire(kept.plan)
        self._kept.clear()
        for made in self.shared.values():
            if isinstance(made, Launch):
                made.compile_again()  # a plan that is being made may have it, and buffers of another kind now
        self.shared.clear()
        self._last = None

    def _drop_oldest(self) -> None:
        """An eighth at once, since finding them means looking at all."""
        oldest = sorted(self._kept, key=lambda key: self._kept[key].used)[: max(1, KEPT_PLANS // 8)]
        for key in oldest:
            kept = self._kept.pop(key)
            if kept.captured:
                self._retire(kept.plan)


class Workspace(Streams):
    """Memory for the calls of one heap's ranks, or of one device when `heap` is None.

    heap: where peers reach it; creating and growing a workspace is then collective. device: of a workspace with no
    heap. nbytes: a limit of all its buffers; calls that need more raise ValueError before anything is launched. None:
    grows as needed. wait_seconds: how long a device-side wait lasts, at most 2147; None: PYROCSHMEM_WAIT_SECONDS, or
    10. batch_invariant, tp_invariant: all its calls are made as inside `pyrocshmem.batch_invariant`. Raises ValueError
    for neither heap nor device, more than 8 ranks, or such seconds; RuntimeError under capture.
    """

    @makes_normal_tensors
    def __init__(
        self,
        heap: Heap | None = None,
        device: torch.device | None = None,
        nbytes: int | None = None,
        wait_seconds: float | None = None,
        batch_invariant: bool = False,
        tp_invariant: bool = False,
    ) -> None:
        self.invariance = invariance.wanted(batch_invariant, tp_invariant)
        if heap is None and device is None:
            raise ValueError("a workspace needs a heap or a device, got neither")
        seconds = timeouts.wait_seconds(wait_seconds)
        if heap is None and torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Its words would be zeroed by the graph: at each replay, not now.
            raise RuntimeError("no workspace can be made under CUDA graph capture: make the call once before")
        self.heap = heap
        self.label = label(self)
        super().__init__(heap.device if heap is not None else torch.device(device))
        # Of a group over several hosts the calls are made of calls on the heap's own workspace, and the ranks are all.
        self.hosts: Hosts | None = None
        self.rank, self.world_size = (heap.rank, heap.world_size) if heap is not None else (0, 1)
        self.nbytes = nbytes
        if self.world_size > int(signal.MAX_WORLD.value):
            raise ValueError(
                f"the heap has {self.world_size} ranks, at most {signal.MAX_WORLD.value} are supported"
            )
        self.reserved = 0  # rows that were announced
        self._roomy: set[str] = set()  # kinds of calls that have buffers for them
        self._retired: list[Any] = []
        self.plans = Plans(self._retired.append)
        self.agreed: dict[Hashable, int] = {}
        self._calls: dict[str, int] = {}  # what ranks have compared, counted alike on all of them
        self._op = "no call yet"  # of the last one of these
        self._comparing: CallName | None = None  # while ranks vote on it
        self._unvoted: CallName | None = (
            None  # while a call is planned of which the ranks know all but its rows
        )
        self._buffers: dict[str, torch.Tensor] = {}
        self._room = Room()
        self._outgrown: list[tuple[str, torch.Tensor]] = []
        self._lost = False
        self.own: Workspace | None = None  # of this rank's products alone, see `stream_k.gemm`
        self._lock = threading.Lock()
        self.control = self._zeros(signal.CONTROL_WORDS, torch.int32)
        if heap is not None:
            self.status, abort, bases = heap.status, heap.system, heap.heap_bases
        else:
            pinned = self.device.type == "cuda"
            self.status = torch.zeros(status.NUM_WORDS, dtype=torch.int64, device="cpu", pin_memory=pinned)
            abort = torch.zeros(1, dtype=torch.int32, device=self.device)
            bases = torch.zeros(1 + int(signal.MAX_WORLD.value), dtype=torch.int64, device=self.device)
        self.control[int(signal.RANK.value)] = self.rank
        self.control[int(signal.BUDGET_US.value)] = int(seconds * 1e6)
        self.context = signal.Context(self.control, abort, self.status, bases)
        self._agree("workspace")
        self._ledger = heap.new_ledger() if heap is not None else None
        if heap is not None:
            heap.attach(self)

    def _zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        if self.heap is None:
            return torch.zeros(count, dtype=dtype, device=self.device)
        made = self._on_heap(self.heap.zeros, count, dtype)
        held_by(made, f"{self.label}: control words")
        return made

    def _on_heap(self, make: Callable[..., torch.Tensor], count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that `make` takes of the heap; HeapOutOfMemory says how large a heap has room for it."""
        assert self.heap is not None
        try:
            return make(count, dtype=dtype)
        except HeapOutOfMemory as short:
            # So much more at its end, whatever lies where.
            enough = -(-(self.heap.nbytes + short.requested) // _HEAP_STEP) * _HEAP_STEP
            raise HeapOutOfMemory(
                short.requested, short.free, short.largest, short.rank, short.reason, enough
            ) from None

    def _agree(self, what: str) -> None:
        """Every rank's writes to its own part are done before anyone goes on."""
        if self.heap is not None:
            self.heap.synchronize()
            self.heap.vote(what)

    def epoch(self) -> int:
        """Number of the last finished call, as the int32 that kernels see. Waits for the device."""
        return int(self.control[int(signal.EPOCH.value)].item())

    def restart(self, epoch: int) -> None:
        """Count calls from `epoch` (any int32) on: collective, no call in flight. For tests of wrap-around."""
        self.control[int(signal.EPOCH.value)] = epoch
        for first in (signal.ENTERED, signal.BARRIER):
            self.control[int(first.value) :][: int(signal.MAX_WORLD.value)] = epoch
        for name, buffer in self._buffers.items():
            if name.endswith("flags"):
                buffer.fill_(epoch)
        self._agree("restart")

    def start_anew(self) -> None:
        """As a fault is recovered from: count calls from 0, plan them anew, drop what not all ranks hold."""
        assert self.heap is not None
        self.plans.clear()
        self.agreed.clear()
        self._roomy.clear()
        self._calls.clear()
        if self._ledger is not None:
            self._ledger.restart()
        there = range(self.heap.base, self.heap.base + SYSTEM_BYTES + self.heap.nbytes)
        held = [*self._buffers.items()], self._outgrown
        for buffers in held:
            buffers[:] = (x for x in buffers if x[1].data_ptr() not in there or self.heap.is_symmetric(x[1]))
            for key, buffer in buffers:
                if key.endswith("flags"):
                    buffer.zero_()
                elif key == _MESSAGES:
                    clear(buffer)
        self._buffers = dict(held[0])
        if not self.heap.is_symmetric(self.control):
            self._lost = True  # a peer never made this workspace
            return
        kept = [int(signal.RANK.value), int(signal.BUDGET_US.value)]
        values = self.control[kept]
        self.control.zero_()
        self.control[kept] = values

    def make_no_more(self) -> list[int]:
        """This rank makes no more calls. Returns the peers that have begun one more."""
        return self._ledger.close() if self._ledger is not None else []

    def let_go(self) -> None:
        """The heap is closed: hold none of its memory, as plans would until Python looks for circles."""
        with contextlib.suppress(RuntimeError):  # a kernel failed: nothing runs on this device any more
            synchronize(self.device)
            self.control = self.control.to("cpu", copy=True)
        self.plans.clear()
        for held in (self.agreed, self._buffers, self._retired, self._outgrown):
            held.clear()
        self.own, self._ledger = None, None
        self.context = signal.Context(None, None, None, None)

    def compare(self, call: CallName, payload: bytes = b"") -> list[bytes]:
        """Vote on a call, as `Heap.vote` does: from now on `begin` knows it, whatever its rows."""
        assert self.heap is not None
        self._comparing = call
        try:
            replies = self.heap.vote(str(call), payload)
        finally:
            self._comparing = None
        self._calls.setdefault(call.text, len(self._calls))
        self._op = "".join(re.findall(r"^\w+", call.text))
        return replies

    @makes_normal_tensors
    def planned_together(
        self, call: CallName, make: Callable[[int], Any], share: int = 0, share_counts: bool = False
    ) -> Any:
        """What `make` plans for `call`, which the ranks compare first where one of its kind is new; all then wait until
        all are ready: one that compiles longer than the others must not eat into their kernels' wait budget. A call
        that differs from an earlier one in its rows alone is compared only where a buffer that peers reach must grow.

        share: of this rank, of something that ranks may have unequal shares of. `make` is given the largest.
        share_counts: whether it must be that of the calls of now; else a rank may change its share alone."""
        assert self.heap is not None
        # A layout that is new on this rank alone, in a call that all have compared, is planned here alone.
        kind = call.text, share if share_counts else 0
        new = kind not in self.agreed
        if new:
            largest = max(int(each) for each in self.compare(call, str(share).encode()))
            self.agreed |= {(call.text, each): largest for each in (0, share)}
        self._unvoted = None if new else call
        try:
            with on_device(self.device):
                plan = make(self.agreed[kind])
            voted = self._unvoted is None
        except BaseException:
            if new:
                for each in {0, share}:
                    del self.agreed[call.text, each]
            raise
        finally:
            self._unvoted = None
        if voted:
            self.heap.vote(f"{call}: ready")
        return plan

    @property
    def is_voted_on(self) -> bool:
        """Whether all ranks wait, when the call that is planned now is ready, until those of all others are: not where
        it differs from an earlier one in its rows alone."""
        return self._unvoted is None

    def make_room(self, call: CallName, again: Callable[[int], object]) -> None:
        """Once for each kind of call: where more rows were announced than `call` has, buffers for so many. again: makes
        the call with the number of rows that it is given."""
        if call.rows < self.reserved and call.text not in self._roomy and planning.here.mode is None:
            self._roomy.add(call.text)
            with planning.only("sizes"):
                again(self.reserved)

    def buffer(self, name: str, count: int, dtype: torch.dtype, local: bool = False) -> torch.Tensor:
        """`count` elements under `name`, kept from call to call; at least as many as asked for. Buffers whose name ends
        in "flags" start at the current epoch, so that none looks raised. `local`: peers don't touch it, so it lies off
        the heap.

        Raises ValueError when the workspace has a fixed size and that is exceeded, RuntimeError when it would grow
        under CUDA graph capture.
        """
        key = f"{'local' if local else 'symmetric'}:{dtype}:{name}"
        found = self._buffers.get(key)
        if found is not None and found.numel() >= count:
            return found
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the workspace would have to grow ({name}) under CUDA graph capture: make the call once before"
            )
        if not local and self._unvoted is not None:
            # What follows are votes: of the same call on all ranks.
            call, self._unvoted = self._unvoted, None
            self.compare(call)
        held = sum(x.numel() * x.element_size() for k, x in self._buffers.items() if k != key)
        needed = held + count * dtype.itemsize
        if self.nbytes is not None and needed > self.nbytes:
            raise ValueError(
                f"the workspace has {self.nbytes} bytes, this call needs {needed} of them; "
                "use a larger one or smaller blocks"
            )
        old = 0 if found is None else found.nbytes
        found = None
        self._release(key)
        if old >= _WORTH_COLLECTING:
            gc.collect()
        if self.heap is not None and not local:
            made = self._on_heap(self.heap.empty, count, dtype)
            held_by(made, f"{self.label}, {self._op}: {name}")
        else:
            with normal_tensors():
                made = torch.empty(count, dtype=dtype, device=self.device)
        if name.endswith("flags"):
            made.fill_(self.epoch())
        elif key == _MESSAGES:
            clear(made)
        self._buffers[key] = made
        if not local:
            self._agree(name)
        return made

    def flags(self, count: int) -> torch.Tensor:
        """`count` flags a rank, for `signal.word`: all ops on this workspace share them."""
        return self.buffer("flags", count * int(signal.MAX_WORLD.value), torch.int32)

    def slots(self, name: str, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """(a buffer of two slots of at least `count` elements, the elements from one to the other).

        The slots are the halves of the buffer, whatever its size: were they packed for each call, a large call's first
        slot would reach into the second one of the small call before, which a peer still reads.
        """
        buffer = self.buffer(name, 2 * -(-count // _SLOT_STEP) * _SLOT_STEP, dtype)
        return buffer, buffer.numel() // 2

    def messages(self, slot_bytes: int, notes: int = 0) -> tuple[torch.Tensor, int]:
        """(memory for `pyrocshmem.message`, the quads of one of its slots): `slot_bytes` have room in each, and
        `notes` notes of a call behind them."""
        needed, found = Room(-(-slot_bytes // QUAD_BYTES), notes), self._buffers.get(_MESSAGES)
        held = Room() if found is None else self._room
        if found is None or not held.has(needed):
            room = held.grown(needed)
            try:
                self.buffer("messages", room.words, torch.int32)
            finally:
                # There is a new one even where a peer then failed to come.
                if self._buffers.get(_MESSAGES) is not found:
                    self._room = room
        return self._buffers[_MESSAGES], self._room.quads

    def note_capture(self) -> None:
        super().note_capture()
        self.plans.captured()

    def _release(self, key: str) -> None:
        buffer = self._buffers.pop(key, None)
        if buffer is None:
            return
        self.plans.clear()
        if self._captured:
            # A captured graph may still use it.
            self._outgrown.append((key, buffer))
        elif self.heap is not None and self.heap.is_symmetric(buffer):
            self.heap.free(buffer)
        elif self._stream is not None:
            buffer.record_stream(self._stream)  # the last call, on whatever stream, may use it still

    def begin(self, call: CallName | None) -> Turn:
        """`with workspace.begin(call):` around the launches of a call orders it after the one before, and raises what
        is in the record. call: as the ranks compared it; where one of them makes another, or the same one of other
        rows, all raise `CallMismatch`. None: a call of this rank alone."""
        if not self._lock.acquire(blocking=False):
            raise WorkspaceBusy(
                "the workspace is in use by a call of another thread; give each thread a workspace of its own"
            )
        try:
            if call is not None and self._ledger is not None:
                self._ledger.begin(self._calls[call.text], call.rows)
            self.check()
            if self._lost:
                raise ValueError("a fault came before all ranks had this workspace; make another one")
            if self.device.type == "cuda":
                self.enter()
        except BaseException:
            self._lock.release()
            raise
        return Turn(self._end)

    # On a CPU nothing runs beside the caller's thread.

    def fork(self, side: int) -> None:
        if self.device.type == "cuda":
            super().fork(side)

    def join(self, side: int) -> None:
        if self.device.type == "cuda":
            super().join(side)

    def _end(self, failed: bool) -> None:
        if self.device.type == "cuda":
            self.leave()
        self._lock.release()
        if self.device.type == "cpu" and not failed:
            self.check()

    def check(self) -> None:
        """Raise the fault that a kernel recorded, if any. Does not wait for the device."""
        if self.heap is not None:
            self.heap.check()
        elif self.status[0]:
            raise status.to_error(self.status.tolist(), 0, lambda peer: "")  # type: ignore[misc]

    def difference(self) -> ShmemError | None:
        """The first call that ranks have begun otherwise than one another, or that one of them has closed its heap
        instead; None if there is none so far."""
        if self._ledger is None:
            return None
        found = self._ledger.compare()
        if found is None and self._comparing is not None:
            found = self._ledger.overtaken()
        if found is None:
            return None
        if found.closed_by is not None:
            assert self.heap is not None
            return self.heap.closed_by(found.closed_by)
        return CallMismatch(self._named(found), found.number)

    def _named(self, found: Difference) -> list[str]:
        """What each rank did."""
        texts = dict(enumerate(self._calls))
        names = [
            "none yet" if begun is None else str(CallName(texts.get(begun.call, "?"), begun.rows))
            for begun in found.which
        ]
        if self._comparing is not None and self.heap is not None:
            names[self.heap.rank] = f"{self._comparing}, which is new"
        return names

    def reserve(self, rows: int) -> None:
        """Announce that calls will have up to so many rows (M, of all ranks' A): from now on the first call of each
        kind makes its buffers that large, so that none of these grows later, which would cost the ranks a vote. What
        smaller calls need besides, where they are made in another way, comes when they come; `pyrocshmem.warm_up`
        makes that, too. So do collectives on whole tensors, whose slots grow to 128 MiB. All ranks announce the same.
        Raises TypeError for what is no integer, ValueError for less than 1."""
        if as_integer("rows", rows) < 1:
            raise ValueError(f"rows is {rows}, at least 1 is needed")
        self.reserved = rows
        self._roomy.clear()

    def free(self) -> None:
        """Give all buffers back; calls make new ones. Collective, no call in flight. Captured graphs keep theirs. What
        a heap that grows then has too much, it gives back, too."""
        self._roomy.clear()
        self.plans.clear()  # some name buffers of `own` alone
        if self.own is not None:
            self.own.free()
        for key in list(self._buffers):
            self._release(key)
        if self.heap is not None:
            gc.collect()  # see _WORTH_COLLECTING
            self.heap.vote("free of a workspace")

    def nbytes_in_use(self) -> int:
        """Bytes of all buffers, local and symmetric."""
        own = self.own.nbytes_in_use() if self.own is not None else 0
        return own + sum(x.numel() * x.element_size() for x in self._buffers.values())


def local_workspace(device: torch.device) -> Workspace:
    """The workspace of GEMMs alone on `device`; on a CPU, where ranks may be threads, this thread's own."""
    return _local_workspace(device, threading.get_ident() if device.type == "cpu" else 0)


@functools.cache
def _local_workspace(device: torch.device, thread: int) -> Workspace:
    return Workspace(device=device)


def workspace_for(heap: Heap) -> Workspace:
    """The workspace that ops on `heap` share; it lives as long as the heap. Collective at its first use."""
    if heap.workspace is None:
        heap.workspace = Workspace(heap)
    return heap.workspace


def check_workspace(workspace: Any) -> None:
    """TypeError for what is no workspace."""
    if not isinstance(workspace, Workspace):
        raise TypeError(f"workspace is a {type(workspace).__name__}, a stream_k.Workspace or None is needed")


def find_workspace(group: Any, workspace: Workspace | None) -> tuple[Heap, Workspace]:
    """The heap of `group`, and `workspace` or the heap's own. Of a group over several hosts: this host's heap, and the
    workspace that has `hosts`. ValueError when they don't belong together, TypeError for what is no workspace."""
    if isinstance(group, Heap):
        heap = group
    else:
        members = as_group(group)
        if members.heap is None and max(members.host_numbers()) > 0:
            return _over_hosts(hosts_for(members), workspace)
        heap = heap_for(members)
    if workspace is None and heap.workspace is not None:
        return heap, heap.workspace
    if workspace is not None and getattr(workspace, "heap", None) is not heap:
        check_workspace(workspace)
        raise ValueError(f"the workspace belongs to {workspace.heap!r}, the group's heap is {heap!r}")
    return heap, workspace if workspace is not None else workspace_for(heap)


def _over_hosts(hosts: Hosts, workspace: Workspace | None) -> tuple[Heap, Workspace]:
    if hosts.workspace is None:
        made = Workspace(hosts.heap)
        made.hosts, made.rank, made.world_size = hosts, hosts.rank, hosts.world_size
        hosts.workspace = made
    if workspace is not None and workspace is not hosts.workspace:
        check_workspace(workspace)
        raise ValueError(
            f"the workspace belongs to {workspace.heap!r}; a group over several hosts has one of its own"
        )
    return hosts.heap, hosts.workspace
