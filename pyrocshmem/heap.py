"""The symmetric heap: on every rank of a group the same size and the same offsets, mapped by all its peers.

    heap = Heap()                              # of the default process group; or heap_for(group)
    x = heap.zeros(1024)                       # collective: every rank makes the same call
    heap.peer_view(x, peer).copy_(y)           # the same tensor in a peer's memory
    heap.barrier()
    heap.free(x)                               # collective
    heap.recover()                             # collective: after a fault (PeerTimeout, PeerAborted), go on
    heap.close()

Layout: `SYSTEM_WORDS` int32 words for signals (word 0: abort, 64 onwards: barrier flags; see
`pyrocshmem.signal`; the last ones belong to `forming`), then the blocks. Every allocation and free is a vote
of all ranks: they bring their call and the offset they would give it, and unless all agree nothing happens
anywhere. A rank that fails brings its failure.

A heap that isn't given a size grows: an allocation that doesn't fit brings all ranks more memory, at the same offsets,
and with any vote goes what has too much free (`pyrocshmem.growth`). Addresses don't move. Memory of a heap goes only
where no tensor of any rank lies, live or freed.

A tensor need not be freed: once it is gone on all ranks its block is, too. With every vote a rank says which blocks
no tensor of its own lies on any more, nor a view or a `peer_view`, when its device has finished what it launched; in
the vote in which the last rank says so, all give the block back. So nobody can reach the memory who could still write
to it, and offsets stay the same. Keep what a captured graph uses, as with other tensors: a graph holds none.

Memory stays mapped while any tensor on it lives, even after `free` and `close`: a late access is never a crash.
"""

import contextlib
import json
import struct
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pyrocshmem import growth
from pyrocshmem.blocks import Block, Owner, block_under
from pyrocshmem.calls.labels import label
from pyrocshmem.errors import CallMismatch, HeapOutOfMemory, ShmemError
from pyrocshmem.forming import (
    SYSTEM_BYTES,
    SYSTEM_WORDS,
    refuse_capture,
    storage_at,
    synchronize,
    tensor_on,
)
from pyrocshmem.groups import as_group
from pyrocshmem.heap_tensors import Plan, TensorFactories
from pyrocshmem.lifecycle import ALIGNMENT, Lifecycle
from pyrocshmem.signed_records import parsed, unreadable_payload

__all__ = [
    "SYSTEM_BYTES",
    "SYSTEM_WORDS",
    "Heap",
    "Usage",
    "heap_for",
]

_DEBUG_BYTE = 0xFF  # NaN in every floating-point type that has one


@dataclass(frozen=True)
class Usage:
    """Bytes of this rank that the heap has for tensors now: `total`, of them `used`, `free`, `largest` in one piece.

    limit: the most that it can have. fixed_because: why it can't have more than now; "" where it grows. held_by: the
    used bytes of each holder: a workspace's buffer, with the op whose call made it so large, or "tensors".
    """

    total: int
    used: int
    free: int
    largest: int
    num_allocations: int
    limit: int
    fixed_because: str
    held_by: dict[str, int]


class Heap(Lifecycle, TensorFactories):
    """A symmetric heap. Forming it, allocating, freeing and `barrier` are collective; the rest is local.

    Args:
        nbytes: bytes for tensors, the same on all ranks, which are all taken now, and never more. None: the heap takes
            what it needs, when it does, at most `PYROCSHMEM_HEAP_BYTES`, otherwise the smallest GPU's memory (on a CPU
            the machine's, 64 GiB at most). Where a device can't do that (AMD; `Usage.fixed_because`) it takes these
            bytes now, otherwise 8 GiB or an eighth of the smallest GPU.
        group: what `as_group` takes.
        device: of this rank; None: the current GPU, or the CPU. One device serves any number of heaps.
        timeout: seconds that a vote waits for the others.
        debug: fill fresh and freed memory with NaN bytes.

    Attributes:
        rank, world_size, group, device, timeout, debug. nbytes: the most that it has for tensors, see `usage`.
        base: address of the own heap. bases: of every rank's heap, in this process.
        heap_bases: int64[1 + max(R, 8)] on `device`: the own base, that of each rank, the own one as padding.
        system: int32[SYSTEM_WORDS] on `device`, the start of the own heap, zeroed when it formed but for its
            last words. label: a name of it.
        status: int64[16] in host memory that kernels write when a wait runs out; see `pyrocshmem.status`.

    Raises:
        ValueError, TypeError: bad arguments.
        InitTimeout: ranks were missing, or had no memory for the heap.
        CallMismatch: the ranks asked for different sizes. ShmemError: a peer's memory could not be mapped.
    """

    def __init__(
        self,
        nbytes: int | None = None,
        group: Any = None,
        device: torch.device | str | int | None = None,
        timeout: float = 30.0,
        debug: bool = False,
    ) -> None:
        super().__init__(nbytes, group, device, timeout, debug)
        self.label = label(self)
        assert self._memory is not None
        first = None if self._memory.limit is None else self._memory.pieces[0][1]
        self._free_list = growth.blocks_of(self.nbytes, ALIGNMENT, first)
        self._owners: weakref.WeakSet[Owner] = (
            weakref.WeakSet()
        )  # what tensors live, of blocks that were freed, too
        self._live: dict[int, Block] = {}
        self._dropped_by: dict[int, set[int]] = {}  # the ranks that have said so; alike on all ranks
        self._collected = 0  # blocks that the last vote gave back

    def vote(self, call: str, payload: bytes = b"") -> list[bytes]:
        """See `Lifecycle.vote`. Waits for the own device, only where tensors were dropped since the last vote."""
        with self._lock:
            self._require_usable()
            dropped, deserted = self._newly_dropped(), self._deserted()
            offer = _pack([block.offset for block in dropped]) + _pack(deserted)
            replies = super().vote(call, offer + payload)
            for block in dropped:
                block.offered = True
            offers = [_unpack(call, *reply) for reply in enumerate(replies)]
            for rank, (offsets, _, _) in enumerate(offers):
                for offset in offsets:
                    self._dropped_by.setdefault(offset, set()).add(rank)
            self._collect()
            self._shrink(set.intersection(*(set(starts) for _, starts, _ in offers)))
            return [rest for _, _, rest in offers]

    def free(self, tensor: torch.Tensor) -> None:
        """Give the block of `tensor` back, on all ranks, once all of them have finished what they launched.

        Raises `ValueError` on all ranks, and frees nothing, when on any rank the tensor isn't on this heap,
        isn't the start of its block, or was freed before; `CallMismatch` when the ranks free different
        blocks.
        """
        with self._lock:
            self._require_usable()
            facts: dict[str, Any]
            mistake: Exception | None = None
            try:
                refuse_capture(self.device, "free")
                block = self._block_of(tensor)
                if self.offset(tensor) != SYSTEM_BYTES + block.offset:
                    raise ValueError("the tensor starts inside its block; free the one that was allocated")
                facts = {"offset": block.offset}
                synchronize(self.device)
            except Exception as error:
                mistake = error
                facts = {"error": f"{type(error).__name__}: {error}"}
            replies = self._vote("free", facts)
            if mistake is not None:
                raise mistake
            for rank, reply in enumerate(replies):
                if "error" in reply:
                    raise ValueError(f"free: nothing was freed, because rank {rank} raised {reply['error']}")
            self._require_same_offsets("free", replies)
            self._give_back(block)
            if self.debug:
                self._fill_with_nan(block)

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether all of `tensor`'s storage lies in a live allocation of this heap."""
        try:
            self._block_of(tensor)
        except (TypeError, ValueError):
            return False
        return True

    def offset(self, tensor: torch.Tensor) -> int:
        """Bytes from the heap's base to the first element of `tensor`; `ValueError` when it isn't on the
        heap."""
        self._block_of(tensor)
        # Through the storage, because torch gives a tensor without elements the address 0.
        start = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
        return start - self.base

    def peer_view(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The tensor of the same shape, strides and dtype, at the same offset of the heap of `rank`.

        Nothing is ordered: call `barrier`, or wait for a signal, before reading. It keeps the block as the tensor does,
        and stays valid after `free`, which gives the bytes to other tensors. Raises `ValueError` when `tensor` is not
        on this heap or `rank` is not in the group.
        """
        self._require_usable()
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"rank is a {type(rank).__name__}, allowed is int")
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank}, allowed are 0..{self.world_size - 1}: ranks count within the heap's group, "
                f"whose members are global ranks {list(self.group.global_ranks)}"
            )
        self._block_of(tensor)
        under = tensor.untyped_storage()
        owner = getattr(under, "pyrocshmem_owner", (under, self._memory))
        # What is at a peer is no tensor of this heap, but its view keeps the block from being given to others.
        owner = owner if rank == self.rank else (owner,)
        address = self.bases[rank] + under.data_ptr() - self.base
        storage = storage_at(address, under.nbytes(), self.device, owner)
        view = tensor_on(storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        # Bits that PyTorch keeps beside what is in memory.
        view = view.conj() if tensor.is_conj() else view
        return torch._neg_view(view) if tensor.is_neg() else view

    def usage(self) -> Usage:
        """What is used, by whom, and what is free. Local, and the same on all ranks."""
        blocks = self._free_list
        total, free = blocks.held_bytes, blocks.free_bytes
        held_by: Counter[str] = Counter()
        for block in self._live.values():
            held_by[block.holder] += blocks.rounded(block.nbytes)
        return Usage(
            total,
            total - free,
            free,
            blocks.largest,
            blocks.num_allocations,
            self.nbytes,
            self.fixed_because,
            dict(held_by),
        )

    def recover(self) -> None:
        """Make the heap work again after a fault: collective, in the processes in which it broke.

        Kernels of all ranks that still wait end at once. Allocations that all ranks hold stay, with whatever the
        fault left in them; those that only some hold are given back, and their tensors are as if freed. Calls are
        compared, planned and counted anew on every workspace. CUDA graphs that were captured before may be replayed.

        Raises `PeerTimeout` when a rank doesn't come within `timeout`, `PeerAborted` when one gave up (call it
        again) or has closed the heap (form a new one), `ValueError` after `close`.
        """
        facts = {
            "blocks": [(block.offset, block.nbytes) for block in self._live.values()],
            "workspace": self.workspace is not None,
            "pieces": self._pieces(),
        }
        self._recover(json.dumps(facts).encode(), self._keep_common)

    def _keep_common(self, holdings: list[bytes]) -> None:
        held = parsed("recover", holdings)
        self._dropped_by.clear()  # a rank may have left before the last vote ended for it: all say it again
        for block in self._live.values():
            block.offered = False
        common = set.intersection(*({(offset, nbytes) for offset, nbytes in each["blocks"]} for each in held))
        for block in list(self._live.values()):
            if (block.offset, block.nbytes) not in common:
                self._give_back(block)
        # Alike on all ranks, unless one was interrupted in a vote.
        kept = set.intersection(*({(start, nbytes) for start, nbytes in each["pieces"]} for each in held))
        for piece in self._pieces():
            if piece in kept:
                growth.hold(self._free_list, piece)
            else:
                self._remove(piece)
        if not all(each["workspace"] for each in held):
            self.workspace = None

    def close(self) -> None:
        """Leave the heap. Local, and harmless when repeated.

        The memory itself is given back when no tensor on it lives any more: at once where only workspaces have some,
        after what was launched. Calls on these raise `ValueError` from now on. A peer's calls that this rank has made,
        too, end as ever; those that it never makes, and votes, raise `PeerAborted` at once.
        """
        super().close()
        if self._closed:
            self._live.clear()

    def _allocate(self, name: str, make_plan: Callable[[], Plan]) -> torch.Tensor:
        with self._lock:
            self._require_usable()
            try:
                refuse_capture(self.device, name)
                plan = make_plan()
                nbytes = plan.dtype.itemsize * torch.Size(plan.shape).numel()
            except Exception as error:
                # So that the others don't wait. If they made a proper call, this mistake still is what
                # matters.
                with contextlib.suppress(CallMismatch):
                    self._vote(f"{name}: {type(error).__name__}: {error}", {})
                raise
            call = f"{name}({list(plan.shape)}, {plan.dtype})"
            while True:
                offset = self._free_list.alloc(nbytes)
                try:
                    if offset is not None:
                        return self._allocate_plan(call, plan, offset, nbytes)
                    self._make_room(call, nbytes)
                except HeapOutOfMemory:
                    if self._collected == 0:  # alike on all ranks
                        raise

    def _make_room(self, call: str, nbytes: int) -> None:
        """In a vote, which may give back what all ranks have dropped; if that was nothing, by more memory."""
        pieces = growth.needed(self._free_list, nbytes) if self._grows else []
        facts = {"short": self._shortage(nbytes), "pieces": pieces}
        replies = self._vote(call, facts)
        if not pieces or any(reply != replies[0] for reply in replies):
            self._settle(call, replies)
            raise AssertionError("the vote let an allocation pass that has no memory")
        if self._collected == 0:
            self._grow(call, nbytes, pieces)

    def _shortage(self, nbytes: int) -> tuple[int, int, int]:
        return nbytes, self._free_list.free_bytes, self._free_list.largest

    def _grow(self, call: str, nbytes: int, pieces: list[growth.Piece]) -> None:
        """More memory at `pieces` on all ranks, or `HeapOutOfMemory` or another `ShmemError` on all."""
        assert self._memory is not None
        what = f"{call}: {sum(size for _, size in pieces)} bytes more"
        failure = self._memory.add(lambda payload, what: super(Heap, self).vote(what, payload), what, pieces)
        if failure is None:
            for piece in pieces:
                growth.hold(self._free_list, piece)
            return
        if failure.unable:
            raise HeapOutOfMemory(*self._shortage(nbytes), failure.unable[0], failure.text) from failure.cause
        fault = ShmemError(f"{what}: the heap could not grow: {failure.text}")
        if failure.unmet:
            self._fail(fault)
        raise fault from failure.cause

    @property
    def _grows(self) -> bool:
        return self._memory is not None and self._memory.limit is not None

    def _pieces(self) -> list[growth.Piece]:
        """What may go: not the first one, in which the system area is."""
        return self._memory.pieces[1:] if self._memory is not None and self._grows else []

    def _deserted(self) -> list[int]:
        """Pieces on which no tensor of this rank is, live or freed."""
        if self.device.type != "cpu" and torch.cuda.is_current_stream_capturing():
            return []
        found = self._pieces()
        for owner in list(self._owners) if found else ():
            start, nbytes = SYSTEM_BYTES + owner.block.offset, max(owner.block.nbytes, 1)
            found = [(a, size) for a, size in found if start >= a + size or start + nbytes <= a]
        return [start for start, _ in found]

    def _shrink(self, deserted: set[int]) -> None:
        """Give memory back of which too much is free, alike on all ranks: only of pieces that all have `deserted`. What
        ran there has ended, as before any block is given back."""
        if deserted:
            candidates = [piece for piece in self._pieces() if piece[0] in deserted]
            for piece in growth.spare(self._free_list, candidates):
                self._remove(piece)

    def _remove(self, piece: growth.Piece) -> None:
        assert self._memory is not None
        growth.let_go(self._free_list, piece)
        self._memory.remove([piece[0]])

    def _allocate_plan(self, call: str, plan: Plan, offset: int, nbytes: int) -> torch.Tensor:
        assert self._memory is not None
        block = Block(self._memory, offset, nbytes)
        self._live[offset] = block
        try:
            owner = block.own()
            self._owners.add(owner)
            storage = storage_at(self.base + SYSTEM_BYTES + offset, nbytes, self.device, owner)
            del owner
            tensor = tensor_on(storage, plan.dtype, plan.shape)
            failure: Exception | None = None
            facts: dict[str, Any] = {"offset": offset}
            try:
                self._fill(tensor, block, plan)
            except Exception as error:
                failure = error
                facts = {"error": f"{type(error).__name__}: {error}"}
            replies = self._vote(call, facts)
            if failure is not None:
                raise failure
            self._settle(call, replies)
        except BaseException:
            self._give_back(block)
            raise
        return tensor

    def _fill(self, tensor: torch.Tensor, block: Block, plan: Plan) -> None:
        # Before the vote: once any rank has its tensor, no rank's filling overwrites what a peer puts in it.
        if self.debug:
            self._fill_with_nan(block)
        if plan.fill is not None:
            plan.fill(tensor)
            synchronize(self.device)

    def _fill_with_nan(self, block: Block) -> None:
        size = max(block.nbytes, 1)
        storage = storage_at(self.base + SYSTEM_BYTES + block.offset, size, self.device, block.memory)
        tensor_on(storage, torch.uint8, (size,)).fill_(_DEBUG_BYTE)
        synchronize(self.device)

    def _newly_dropped(self) -> list[Block]:
        """Blocks that no tensor of this rank is on any more, and that the peers don't know of; what was launched on
        them has ended."""
        found = [block for block in self._live.values() if block.dropped and not block.offered]
        if found:
            if self.device.type != "cpu" and torch.cuda.is_current_stream_capturing():
                return []  # no device waits then
            synchronize(self.device)
        return found

    def _collect(self) -> None:
        """Give back what all ranks have dropped, in the same order on all of them."""
        gone = sorted(offset for offset, ranks in self._dropped_by.items() if len(ranks) == self.world_size)
        for offset in gone:
            block = self._live[offset]
            self._give_back(block)
            if self.debug:
                self._fill_with_nan(block)
        self._collected = len(gone)

    def _give_back(self, block: Block) -> None:
        block.retire()
        if self._live.pop(block.offset, None) is block:
            self._free_list.free(block.offset)
            self._dropped_by.pop(block.offset, None)

    def _vote(self, call: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        return parsed(call, self.vote(call, json.dumps(facts).encode()))

    def _settle(self, call: str, replies: list[dict[str, Any]]) -> None:
        """Raise on all ranks when an allocation failed on one."""
        if any("error" in reply for reply in replies):
            raise CallMismatch([f"{call}: {reply.get('error', 'could be done')}" for reply in replies])
        for rank, reply in enumerate(replies):
            if "short" in reply:
                requested, free, largest = reply["short"]
                raise HeapOutOfMemory(requested, free, largest, rank)
        self._require_same_offsets(call, replies)

    def _require_same_offsets(self, call: str, replies: list[dict[str, Any]]) -> None:
        offsets = [reply["offset"] for reply in replies]
        if len(set(offsets)) > 1:
            raise CallMismatch([f"{call} at offset {offset}" for offset in offsets])

    def _block_of(self, tensor: torch.Tensor) -> Block:
        """The live block that holds all of `tensor`'s storage; `TypeError` or `ValueError` without one."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected a tensor, got a {type(tensor).__name__}")
        if tensor.device != self.device:
            raise ValueError(f"the tensor is on {tensor.device}, the heap on {self.device}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"the tensor has the layout {tensor.layout}, allowed is {torch.strided}")
        storage = tensor.untyped_storage()
        owned = block_under(storage)
        if owned is not None and owned.memory is self._memory:
            if not owned.live:
                raise ValueError("the tensor was freed")
            return owned
        start = storage.data_ptr() - self.base - SYSTEM_BYTES
        for block in self._live.values():
            if block.offset <= start and start + storage.nbytes() <= block.offset + max(block.nbytes, 1):
                return block
        raise ValueError(f"the tensor is not on this heap (nor on it before, if it was freed): {self!r}")


def _pack(numbers: list[int]) -> bytes:
    return struct.pack(f"<{1 + len(numbers)}Q", len(numbers), *numbers)


def _unpack(call: str, rank: int, reply: bytes) -> tuple[tuple[int, ...], tuple[int, ...], bytes]:
    """(offsets of the blocks that `rank` has dropped, pieces that it has deserted, what else it brought to `call`)."""
    try:
        found, at = [], 0
        for _ in range(2):
            (count,) = struct.unpack_from("<Q", reply, at)
            found.append(struct.unpack_from(f"<{count}Q", reply, at + 8))
            at += 8 * (1 + count)
    except struct.error:
        raise unreadable_payload(call, rank) from None
    return found[0], found[1], reply[at:]


def heap_for(group: Any = None, nbytes: int | None = None) -> Heap:
    """The heap of a group, formed at the first call (then collective), the same one until it is closed: by the caller,
    or when the process group that it is of is destroyed, and nobody holds that any more.

    Args:
        group: what `as_group` takes, or a `Heap`, which is returned.
        nbytes: at least so many: a new heap takes them at once, one that is there must be allowed as many (`limit` of
            its `usage`). None: a heap that grows, or whatever is there.

    Raises:
        ValueError: the group's heap is there already and smaller than `nbytes`, or its ranks are on several hosts.
    """
    if isinstance(group, Heap):
        heap = group
    else:
        members = as_group(group)
        if members.heap is None or members.heap.closed:
            if (hosts := 1 + max(members.host_numbers())) > 1:
                raise ValueError(
                    f"the group's ranks are on {hosts} hosts, a heap is of one: hosts_for(group).heap is this host's"
                )
            members.heap = Heap(nbytes, members)
        heap = members.heap
    if nbytes is not None and nbytes > heap.nbytes:
        raise ValueError(
            f"the group's heap has {heap.nbytes} bytes, {nbytes} asked; close it, then ask for more"
        )
    return heap
