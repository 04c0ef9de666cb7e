"""One allocation for each rank, mapped by every peer: how a heap's memory is made and released.

    memory = form(channel, call, nbytes, device, backend, timeout)
    memory.bases[peer]           # where the peer's memory is in this process
    memory.release()             # or del memory

Protocol: allocate, and write into the memory whose it is; vote (size, handle, any failure); map each peer's memory,
read in it whose it is, and leave a word there; vote again; look whether every peer has been here; let no other in.
A failure on one rank is told to all in the next vote: nobody hangs, and everybody names the rank and the cause.

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
from dataclasses import dataclass

import torch

from pyrocshmem import finegrained_alloc, status, target
from pyrocshmem.errors import InitTimeout, ShmemError
from pyrocshmem.groups import Group
from pyrocshmem.stores import store_may_be_gone
from pyrocshmem.torch_contexts import normal_tensors

SYSTEM_WORDS = 4096  # int32 words at the start of every heap: flags and the like, see `pyrocshmem.signal`
SYSTEM_BYTES = 4 * SYSTEM_WORDS
# The last words of the system area say whose memory it is: rank, digest of the channel's name, nonce. Before them each
# peer leaves, at the place of its rank, the first word of its own nonce.
_DIGEST_WORDS = 3
_NONCE_WORDS = 4
_OWNER_WORDS = 1 + _DIGEST_WORDS + _NONCE_WORDS
_FAREWELL_S = 2.0
_SMALLER = "PYROCSHMEM_HEAP_BYTES sets the size of heaps that aren't given one"
CPU_HEAP_BYTES = 64 << 20
GPU_HEAP_BYTES = 8 << 30

live_memories: "weakref.WeakSet[SharedMemory]" = weakref.WeakSet()


def default_bytes(device: torch.device) -> int:
    """Bytes of a heap whose size wasn't given, before the ranks agree on the smallest."""
    text = os.environ.get("PYROCSHMEM_HEAP_BYTES")
    if text is not None:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"PYROCSHMEM_HEAP_BYTES={text!r}, allowed are whole numbers of 1 or more")
        return int(text)
    if device.type == "cpu":
        return CPU_HEAP_BYTES
    return min(GPU_HEAP_BYTES, torch.cuda.get_device_properties(device).total_memory // 8)


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


@normal_tensors()
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
    """What a rank tells its peers of its memory, or why it has none. process: see `status.describe_process`."""

    handle: str = ""
    nonce: tuple[int, ...] = ()
    process: tuple[int, int] = (0, 0)
    problem: str = ""

    def pack(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @staticmethod
    def unpack(record: bytes) -> "_Offer":
        """`ValueError` for a record that no rank has written."""
        try:
            facts = json.loads(record)
            nonce, process = (tuple(map(int, facts[name])) for name in ("nonce", "process"))
            number, namespace = process
            return _Offer(str(facts["handle"]), nonce, (number, namespace), str(facts["problem"]))
        except Exception as error:  # there is no telling what somebody else has written
            raise ValueError(
                "its record can't be read: it is damaged, or somebody else wrote to the store "
                f"({type(error).__name__}: {error})"
            ) from None


class SharedMemory:
    """The own memory and the mappings of the peers', released with the last reference, or by the process's end."""

    def __init__(self, channel: Group, device: torch.device, backend: str) -> None:
        self.device, self.backend = device, backend
        self.rank, self.world_size = channel.rank, channel.world_size
        self.bases: tuple[int, ...] = ()
        self.processes: tuple[tuple[int, int], ...] = ()  # of each rank, for `status.describe_process`
        self.own: finegrained_alloc.Allocation | None = None
        self._nonce = [secrets.randbits(31) for _ in range(_NONCE_WORDS)]
        digest = hashlib.sha256(channel.name.encode()).digest()
        self._digest = [
            int.from_bytes(digest[4 * i : 4 * i + 4], "little") >> 1 for i in range(_DIGEST_WORDS)
        ]
        self._parts: list[Callable[[], None]] = []
        # No channel, which has its group, whose heap would then live as long as this memory.
        self._farewell = None if backend == "host" else channel.subgroup(range(channel.world_size))
        self._pid = os.getpid()
        self.release = weakref.finalize(self, _release, self._parts, self._farewell, device, self._pid)
        self.release.atexit = False  # see `leave`
        live_memories.add(self)

    def allocate(self, nbytes: int) -> _Offer:
        """Allocate the own memory, and zero its system area but for the words that say whose it is."""
        index = self.device.index or 0
        own = finegrained_alloc.alloc(nbytes, self.backend, index)
        self.own = own
        self._parts.append(own.free)
        owner = [self.rank, *self._digest, *self._nonce]
        self._write(own.ptr, 0, [0] * (SYSTEM_WORDS - _OWNER_WORDS) + owner)
        synchronize(self.device)
        return _Offer(own.export().hex(), tuple(self._nonce), status.own_process())

    def map_peer(self, peer: int, offer: _Offer, nbytes: int) -> int:
        """The address of a peer's memory in this process, where the peer finds then that this rank has come.
        `ShmemError` when it isn't that peer's memory."""
        mapping = finegrained_alloc.open_handle(bytes.fromhex(offer.handle), self.device.index or 0)
        self._parts.insert(0, mapping.close)  # closed before the own memory is freed
        if mapping.nbytes != nbytes:
            raise ShmemError(f"its handle stands for {mapping.nbytes} bytes, its heap has {nbytes}")
        rank, *rest = self.words(mapping.ptr)[-_OWNER_WORDS:].tolist()
        digest, nonce = rest[:_DIGEST_WORDS], rest[_DIGEST_WORDS:]
        if digest == self._digest and rank != peer:
            raise ShmemError(f"its handle led to memory that says it is rank {rank}'s")
        if digest != self._digest or tuple(nonce) != offer.nonce:
            raise ShmemError("its handle led to memory that isn't its heap")
        self._write(mapping.ptr, self._visits.start + self.rank, self._nonce[:1])
        synchronize(self.device)
        return mapping.ptr

    def absent(self, offers: Sequence[_Offer]) -> list[int]:
        """The peers that have not been in this rank's memory, once all have voted that they mapped it."""
        assert self.own is not None
        visits = self.words(self.own.ptr)[self._visits].tolist()
        came = [visit == offer.nonce[0] for visit, offer in zip(visits, offers, strict=True)]
        return [peer for peer in range(self.world_size) if peer != self.rank and not came[peer]]

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


def _release(parts: list[Callable[[], None]], farewell: Group | None, device: torch.device, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: the memory is its parent's
    _finish(device)
    *mappings, free = parts if parts else [lambda: None]
    for close in mappings:
        close()
    _part_from_peers(farewell)
    free()


def _finish(device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):  # a kernel failed: nothing runs on this device any more
        synchronize(device)


def _part_from_peers(farewell: Group | None) -> None:
    """Before the own memory goes: the driver leaves it undefined to free what others have mapped, give them a
    moment."""
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
    memory = SharedMemory(channel, device, backend)
    try:
        _form(memory, channel, f"{call} on {backend}", nbytes, timeout)
    except BaseException:
        memory.release()
        raise
    return memory


def _form(memory: SharedMemory, channel: Group, call: str, nbytes: int, timeout: float) -> None:
    cause: Exception | None = None
    try:
        offer = memory.allocate(nbytes)
    except (MemoryError, RuntimeError, ValueError, OSError) as error:
        cause = error
        advice = f"; {_SMALLER}" if isinstance(error, MemoryError) else ""
        offer = _Offer(problem=f"{type(error).__name__}: {error}{advice}")
    offers: list[_Offer] = []
    problem = ""
    for peer, record in enumerate(channel.exchange(offer.pack(), call, timeout)):
        offers.append(_Offer())
        try:
            offers[peer] = _Offer.unpack(record)
        except ValueError as error:
            problem = f"rank {channel.rank} could not map the heap of rank {peer}: {error}"
    unable = [rank for rank, reply in enumerate(offers) if reply.problem]
    if isinstance(cause, finegrained_alloc.NotBuilt | finegrained_alloc.Unavailable):
        raise cause
    if unable:
        raise InitTimeout(unable, call, 0.0, channel.world_size, offers[unable[0]].problem) from cause

    bases: list[int] = []
    for peer, reply in enumerate([] if problem else offers):
        try:
            if peer == channel.rank:
                assert memory.own is not None
                bases.append(memory.own.ptr)
            else:
                bases.append(memory.map_peer(peer, reply, nbytes))
        except (MemoryError, RuntimeError, ValueError, OSError) as error:
            cause = error
            problem = f"rank {channel.rank} could not map the heap of rank {peer}: {error}"
            break
    problems = [text.decode() for text in channel.exchange(problem.encode(), f"{call}: mapped", timeout)]
    if any(problems):
        raise ShmemError(f"{call} did not form: " + "; ".join(text for text in problems if text)) from cause
    if absent := memory.absent(offers):
        text = (
            f"{call} did not form: ranks {channel.rank} and {absent[0]} did not meet in each other's memory; "
            "the store had a handle of something else in place of one of theirs"
        )
        channel.abort(text)  # who took part believes that it formed
        raise ShmemError(text)
    memory.bases = tuple(bases)
    memory.processes = tuple(reply.process for reply in offers)
    assert memory.own is not None
    memory.own.seal()
