"""Memory of each rank, mapped by every peer: how a heap's is made, grows, shrinks and is released.

    memory = form(channel, call, nbytes, device, backend, timeout)
    memory.bases[peer]           # where the peer's memory is in this process
    memory.add(exchange, call, [(4 << 20, 2 << 20)])     # 2 MiB more, at 4 MiB from each base; see `form_growing`
    memory.remove([4 << 20])
    memory.release()             # or del memory

Protocol: allocate, and write into the memory whose it is; vote (handles, any failure); map each peer's memory,
read in it whose it is, and leave a word there; vote again; look whether every peer has been here; let no other in.
A failure on one rank is told to all in the next vote: nobody hangs, and everybody names the rank and the cause.

Memory that grows has its addresses reserved at once, the own and those for each peer's, so that a base never moves.
Each piece is memory of its own in them, made by the protocol above, and goes on each rank without a word to the others,
who must have agreed that nobody uses it: what a peer has mapped stays with it until it unmaps it.

Handles travel through a store that strangers may reach; memory is opened by processes of one user alone. So what the
memory itself says decides, in both directions, and a handle of another rank, heap or job is an error.
"""

import contextlib
import hashlib
import json
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from pyrocshmem import finegrained_alloc, status, target
from pyrocshmem.errors import InitTimeout, ShmemError
from pyrocshmem.finegrained_alloc import PIECE
from pyrocshmem.groups import Group
from pyrocshmem.stores import store_may_be_gone
from pyrocshmem.torch_contexts import makes_normal_tensors

SYSTEM_WORDS = 4096  # int32 words at the start of every heap: flags and the like, see `pyrocshmem.signal`
SYSTEM_BYTES = 4 * SYSTEM_WORDS
# The last words of the system area say whose memory it is: rank, digest of the channel's name, nonce. Before them each
# peer leaves, at the place of its rank, the first word of its own nonce.
_DIGEST_WORDS = 3
_NONCE_WORDS = 4
_OWNER_WORDS = 1 + _DIGEST_WORDS + _NONCE_WORDS
_FAREWELL_S = 2.0
_SMALLER = "PYROCSHMEM_HEAP_BYTES limits heaps that aren't given a size"
CPU_HEAP_BYTES = 64 << 20
GPU_HEAP_BYTES = 8 << 30
_CPU_LIMIT = 64 << 30  # ranks may be threads, each with addresses for all of them

live_memories: "weakref.WeakSet[SharedMemory]" = weakref.WeakSet()
Exchange = Callable[[bytes, str], list[bytes]]


class DefaultBytes(NamedTuple):
    """Of a heap that isn't given a size: the most that it may grow to, and all of it where it can't grow."""

    limit: int
    fixed: int


def default_bytes(device: torch.device) -> DefaultBytes:
    """Before the ranks agree on the smallest."""
    text = os.environ.get("PYROCSHMEM_HEAP_BYTES")
    if text is not None:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"PYROCSHMEM_HEAP_BYTES={text!r}, allowed are whole numbers of 1 or more")
        return DefaultBytes(int(text), int(text))
    if device.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return DefaultBytes(min(memory, _CPU_LIMIT), CPU_HEAP_BYTES)
    memory = torch.cuda.get_device_properties(device).total_memory
    return DefaultBytes(memory, min(GPU_HEAP_BYTES, memory // 8))


def own_device(device: torch.device | str | int | None) -> torch.device:
    """The device of this rank, the current one when None. `ValueError` when the target has no such device."""
    on_cpu = target.backend() == "host"
    if device is None:
        return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    given = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if given.type != ("cpu" if on_cpu else "cuda"):
        allowed = "cpu" if on_cpu else f"cuda:0..{target.num_devices() - 1}"
        raise ValueError(f"device {given}, allowed are {allowed}: {target.describe()}")
    if on_cpu:
        return torch.device("cpu")  # tensors never say cpu:0
    return target.device(torch.cuda.current_device() if given.index is None else given.index)


def storage_at(address: int, nbytes: int, device: torch.device, owner: object) -> torch.UntypedStorage:
    """A storage over memory that torch doesn't own; `owner` lives as long as any tensor on it."""
    # Always at least a byte: an empty storage has no address, by which `free` finds its block.
    storage = torch._C._construct_storage_from_data_pointer(address, device, max(nbytes, 1))
    storage.pyrocshmem_owner = owner
    return storage


@makes_normal_tensors
def tensor_on(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """A tensor over `storage`, contiguous when `stride` is None; `offset` counts elements. A normal one, under
    `torch.inference_mode` too: what is on a heap outlives that."""
    if stride is None:
        stride = torch.empty(tuple(shape), device="meta").stride()
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset, tuple(shape), tuple(stride))


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched on `device`; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def refuse_capture(device: torch.device, call: str) -> None:
    """`RuntimeError` under CUDA graph capture, for what can't be captured."""
    if device.type != "cpu" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"heap.{call} under CUDA graph capture, where it can't be done: call it outside")


@dataclass(frozen=True)
class _Offer:
    """What a rank tells its peers of its memory, or why it has none. handles: one a piece. process: see
    `status.describe_process`."""

    handles: tuple[str, ...] = ()
    nonce: tuple[int, ...] = ()
    process: tuple[int, int] = (0, 0)
    problem: str = ""

    def pack(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @staticmethod
    def unpack(record: bytes, num_pieces: int) -> "_Offer":
        """`ValueError` for a record that no rank has written."""
        try:
            facts = json.loads(record)
            nonce, process = (tuple(map(int, facts[name])) for name in ("nonce", "process"))
            number, namespace = process
            handles, problem = tuple(map(str, facts["handles"])), str(facts["problem"])
            if not problem and len(handles) != num_pieces:
                raise ValueError(f"{len(handles)} handles of {num_pieces}")
            return _Offer(handles, nonce, (number, namespace), problem)
        except Exception as error:  # there is no telling what somebody else has written
            raise ValueError(
                "its record can't be read: it is damaged, or somebody else wrote to the store "
                f"({type(error).__name__}: {error})"
            ) from None


@dataclass(frozen=True)
class Failure:
    """Why all ranks have no memory more. unable: those that had none to give. unmet: on this rank alone, which must
    tell the others."""

    text: str
    unable: list[int] = field(default_factory=list)
    unmet: bool = False
    cause: Exception | None = None


@dataclass(frozen=True)
class _Piece:
    own: finegrained_alloc.Allocation
    mappings: list[finegrained_alloc.Mapping]


@dataclass(frozen=True)
class _Parts:
    """pieces: by bytes from the base. spaces: by rank, its own among them."""

    pieces: dict[int, _Piece] = field(default_factory=dict)
    spaces: dict[int, finegrained_alloc.Space] = field(default_factory=dict)

    def unmap(self, starts: Sequence[int]) -> None:
        for start in starts:
            mappings = self.pieces[start].mappings
            while mappings:
                mappings.pop().close()

    def free(self, starts: Sequence[int]) -> None:
        for start in starts:
            self.pieces.pop(start).own.free()


class SharedMemory:
    """The own memory and the mappings of the peers', released with the last reference, or by the process's end.

    limit: None for memory of one piece; bytes of addresses for memory that may grow to that.
    """

    def __init__(self, channel: Group, device: torch.device, backend: str, limit: int | None = None) -> None:
        self.device, self.backend, self.limit = device, backend, limit
        self.rank, self.world_size = channel.rank, channel.world_size
        self.bases: tuple[int, ...] = ()
        self.processes: tuple[tuple[int, int], ...] = ()  # of each rank, for `status.describe_process`
        self._name = channel.name
        self._parts = _Parts()
        # No channel, which has its group, whose heap would then live as long as this memory.
        must_part = backend != "host" and limit is None
        self._farewell = channel.subgroup(range(channel.world_size)) if must_part else None
        self._pid = os.getpid()
        self.release = weakref.finalize(self, _release, self._parts, self._farewell, device, self._pid)
        self.release.atexit = False  # see `leave`
        live_memories.add(self)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """(bytes from the base, bytes) of each piece."""
        return [(start, piece.own.nbytes) for start, piece in self._parts.pieces.items()]

    def add(self, exchange: Exchange, call: str, pieces: Sequence[tuple[int, int]]) -> Failure | None:
        """Put memory at each of `pieces` (bytes from the base, bytes) on all ranks, or on none: then why not.

        exchange: gives what it is given to all ranks and returns all of theirs; what it raises is passed on. call:
        names this, in errors.
        """
        try:
            failure = self._add(exchange, call, pieces)
        except BaseException:
            self._withdraw(pieces)
            raise
        if failure is not None:
            self._withdraw(pieces)
        return failure

    def remove(self, starts: Sequence[int]) -> None:
        """Give the pieces at `starts` back, in which no rank has anything."""
        self._parts.unmap(starts)
        self._parts.free(starts)

    def _withdraw(self, pieces: Sequence[tuple[int, int]]) -> None:
        if self.bases:  # else it never formed, and `release` knows how its end must go
            self.remove([start for start, _ in pieces if start in self._parts.pieces])

    def _add(self, exchange: Exchange, call: str, pieces: Sequence[tuple[int, int]]) -> Failure | None:
        nonce = tuple(secrets.randbits(31) for _ in range(_NONCE_WORDS))
        cause: Exception | None = None
        try:
            offer = self._allocate(pieces, nonce)
        except (MemoryError, RuntimeError, ValueError, OSError) as error:
            cause = error
            advice = f"; {_SMALLER}" if isinstance(error, MemoryError) and not self.bases else ""
            offer = _Offer(problem=f"{type(error).__name__}: {error}{advice}")
        offers: list[_Offer] = []
        problem = ""
        for peer, record in enumerate(exchange(offer.pack(), call)):
            offers.append(_Offer())
            try:
                offers[peer] = _Offer.unpack(record, len(pieces))
            except ValueError as error:
                problem = self._could_not_map(peer, error)
        unable = [rank for rank, reply in enumerate(offers) if reply.problem]
        if unable:
            return Failure(offers[unable[0]].problem, unable, cause=cause)
        bases: list[int] = []
        for peer, reply in enumerate([] if problem else offers):
            try:
                bases.append(self._map(peer, reply, pieces, nonce))
            except (MemoryError, RuntimeError, ValueError, OSError) as error:
                cause = error
                problem = self._could_not_map(peer, error)
                break
        problems = [text.decode() for text in exchange(problem.encode(), f"{call}: mapped")]
        if any(problems):
            return Failure("; ".join(text for text in problems if text), cause=cause)
        if absent := self._absent(offers, pieces):
            text = (
                f"ranks {self.rank} and {absent[0]} did not meet in each other's memory; "
                "the store had a handle of something else in place of one of theirs"
            )
            return Failure(text, unmet=True)
        if not self.bases:
            self.bases = tuple(bases)
            self.processes = tuple(reply.process for reply in offers)
        for start, _ in pieces:
            self._parts.pieces[start].own.seal()
        return None

    def _could_not_map(self, peer: int, error: Exception) -> str:
        return f"rank {self.rank} could not map the heap of rank {peer}: {error}"

    def _allocate(self, pieces: Sequence[tuple[int, int]], nonce: tuple[int, ...]) -> _Offer:
        """Allocate own memory, and zero a system area in each piece but for the words that say whose it is."""
        handles = []
        for start, nbytes in pieces:
            own = self._alloc(nbytes, start)
            self._parts.pieces[start] = _Piece(own, [])
            owner = [self.rank, *self._digest(start), *nonce]
            self._write(own.ptr, 0, [0] * (SYSTEM_WORDS - _OWNER_WORDS) + owner)
            handles.append(own.export().hex())
        synchronize(self.device)
        return _Offer(tuple(handles), nonce, status.own_process())

    def _alloc(self, nbytes: int, start: int) -> finegrained_alloc.Allocation:
        alloc, place = finegrained_alloc.alloc, self._place(self.rank, start)
        try:
            return alloc(nbytes, self.backend, self.device.index or 0, **place)
        except MemoryError:
            if self.device.type == "cpu":
                raise
        torch.cuda.empty_cache()  # PyTorch keeps from the driver what no tensor of its own needs
        return alloc(nbytes, self.backend, self.device.index or 0, **place)

    def _map(
        self, peer: int, offer: _Offer, pieces: Sequence[tuple[int, int]], nonce: tuple[int, ...]
    ) -> int:
        """The base of a peer's memory in this process. In each piece the peer finds then that this rank has come.
        `ShmemError` when it isn't that peer's memory."""
        base = self.bases[peer] if self.bases else None
        for (start, nbytes), handle in zip(pieces, offer.handles, strict=True):
            if peer == self.rank:
                at = self._parts.pieces[start].own.ptr
            else:
                # Threads of a process have one place for the same memory.
                place = {} if offer.process == status.own_process() else self._place(peer, start)
                mapping = finegrained_alloc.open_handle(
                    bytes.fromhex(handle), self.device.index or 0, **place
                )
                self._parts.pieces[start].mappings.append(mapping)
                if mapping.nbytes != nbytes:
                    raise ShmemError(f"its handle stands for {mapping.nbytes} bytes, its heap has {nbytes}")
                at = mapping.ptr
                self._visit(peer, at, start, offer.nonce, nonce)
            base = at - start if base is None else base
            if at - start != base:
                raise ShmemError("its handle led to memory of this process that isn't its heap")
        assert base is not None
        return base

    def _visit(self, peer: int, at: int, start: int, theirs: tuple[int, ...], mine: tuple[int, ...]) -> None:
        rank, *rest = self.words(at)[-_OWNER_WORDS:].tolist()
        digest, nonce = rest[:_DIGEST_WORDS], rest[_DIGEST_WORDS:]
        if digest == self._digest(start) and rank != peer:
            raise ShmemError(f"its handle led to memory that says it is rank {rank}'s")
        if digest != self._digest(start) or tuple(nonce) != theirs:
            raise ShmemError("its handle led to memory that isn't its heap")
        self._write(at, self._visits.start + self.rank, list(mine[:1]))
        synchronize(self.device)

    def _absent(self, offers: Sequence[_Offer], pieces: Sequence[tuple[int, int]]) -> list[int]:
        """The peers that have not been in this rank's memory, once all have voted that they mapped it."""
        found = set()
        for start, _ in pieces:
            visits = self.words(self._parts.pieces[start].own.ptr)[self._visits].tolist()
            came = [visit == offer.nonce[0] for visit, offer in zip(visits, offers, strict=True)]
            found |= {peer for peer in range(self.world_size) if peer != self.rank and not came[peer]}
        return sorted(found)

    def _place(self, rank: int, start: int) -> dict[str, int]:
        """Where memory of `rank` belongs in this process."""
        if self.limit is None:
            return {}
        spaces = self._parts.spaces
        if rank not in spaces:
            spaces[rank] = finegrained_alloc.reserve(self.limit, self.backend, self.device.index or 0)
        return {"at": spaces[rank].ptr + start}

    def _digest(self, start: int) -> list[int]:
        """Of the channel whose memory it is, and of where in that it lies."""
        digest = hashlib.sha256(f"{self._name}@{start}".encode()).digest()
        return [int.from_bytes(digest[4 * i : 4 * i + 4], "little") >> 1 for i in range(_DIGEST_WORDS)]

    @property
    def _visits(self) -> slice:
        end = SYSTEM_WORDS - _OWNER_WORDS
        return slice(end - self.world_size, end)

    def _write(self, base: int, start: int, words: list[int]) -> None:
        place = self.words(base)[start : start + len(words)]
        place.copy_(torch.tensor(words, dtype=torch.int32, device="cpu"))

    def leave(self) -> None:
        """The process ends, and its memory with it. What tensors may lie on stays mapped: what runs later may read
        them."""
        if not self.bases:
            self.release()  # it never formed
        elif os.getpid() == self._pid:
            _finish(self.device)
            _part_from_peers(self._farewell)

    def words(self, base: int) -> torch.Tensor:
        """The system area of the heap that starts at `base`: int32[SYSTEM_WORDS]."""
        return tensor_on(storage_at(base, SYSTEM_BYTES, self.device, None), torch.int32, (SYSTEM_WORDS,))


def _release(parts: _Parts, farewell: Group | None, device: torch.device, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: the memory is its parent's
    _finish(device)
    starts = list(parts.pieces)
    parts.unmap(starts)
    _part_from_peers(farewell)
    parts.free(starts)
    for space in parts.spaces.values():
        space.free()


def _finish(device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):  # a kernel failed: nothing runs on this device any more
        synchronize(device)


def _part_from_peers(farewell: Group | None) -> None:
    """Before own memory behind an IPC handle goes: the driver leaves it undefined to free what others have mapped, give
    them a moment."""
    if farewell is not None:
        with store_may_be_gone():
            farewell.leave("unmapped")
            farewell.wait_until_all_left(_FAREWELL_S)


def form(
    channel: Group, call: str, nbytes: int, device: torch.device, backend: str, timeout: float
) -> SharedMemory:
    """Allocate `nbytes` bytes on every rank of `channel` and map the peers'. `call` names that, in errors.

    Raises:
        InitTimeout: ranks were missing, or could not allocate (then with the reason).
        CallMismatch: the ranks brought different calls.
        ShmemError: a rank could not map a peer's memory; names both and the cause.
    """
    call = f"{call} on {backend}"
    formed = _form(SharedMemory(channel, device, backend), channel, call, nbytes, timeout)
    if isinstance(formed, SharedMemory):
        return formed
    if isinstance(formed.cause, finegrained_alloc.NotBuilt | finegrained_alloc.Unavailable):
        raise formed.cause
    if formed.unable:
        raise InitTimeout(formed.unable, call, 0.0, channel.world_size, formed.text) from formed.cause
    raise ShmemError(f"{call} did not form: {formed.text}") from formed.cause


def form_growing(
    channel: Group, call: str, limit: int, device: torch.device, backend: str, timeout: float
) -> SharedMemory | str:
    """A first piece of memory on every rank of `channel`, and addresses for `limit` bytes. Why not, in words, where a
    rank can't do that, or can't map such memory of a peer. Raises as `form` does in all other cases."""
    memory = SharedMemory(channel, device, backend, -(-limit // PIECE) * PIECE)
    formed = _form(memory, channel, f"{call} on {backend}", PIECE, timeout)
    if isinstance(formed, SharedMemory):
        return formed
    return f"rank {formed.unable[0]}: {formed.text}" if formed.unable else formed.text


def _form(
    memory: SharedMemory, channel: Group, call: str, nbytes: int, timeout: float
) -> SharedMemory | Failure:
    def exchange(payload: bytes, what: str) -> list[bytes]:
        return channel.exchange(payload, what, timeout)

    try:
        failure = memory.add(exchange, call, [(0, nbytes)])
    except BaseException:
        memory.release()
        raise
    if failure is None:
        return memory
    memory.release()
    if failure.unmet:
        text = f"{call} did not form: {failure.text}"
        channel.abort(text)  # who took part believes that it formed
        raise ShmemError(text)
    return failure
