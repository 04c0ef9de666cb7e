"""One allocation for each rank, mapped by every peer: how a heap's memory is made and released.

    memory = form(channel, nbytes, device, backend, timeout)
    memory.bases[peer]           # where the peer's memory is in this process
    memory.release()

Protocol: allocate, vote (size, handle, any failure); map each peer's memory and read in it the words that
the peer announced, so that nothing else can be mistaken for it; vote again; take the names off the files.
A failure on one rank is told to all in the next vote: nobody hangs, and everybody names the rank and the cause.
"""

import contextlib
import json
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

import finegrained_alloc
from pyrocshmem import status, target
from pyrocshmem.boards import store_may_be_gone
from pyrocshmem.bootstrap import Group
from pyrocshmem.errors import InitTimeout, ShmemError
from pyrocshmem.modes import normal_tensors
from pyrocshmem.records import parsed

SYSTEM_WORDS = 4096  # int32 words at the start of every heap: flags and the like, see `pyrocshmem.signal`
SYSTEM_BYTES = 4 * SYSTEM_WORDS
_NONCE_WORDS = 4  # the last words of the system area
_FAREWELL_S = 2.0
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


class SharedMemory:
    """The own memory and the mappings of the peers', released once: on demand, or with the last reference."""

    def __init__(self, channel: Group, device: torch.device, backend: str) -> None:
        self.device, self.backend = device, backend
        self.bases: tuple[int, ...] = ()
        self.processes: tuple[tuple[int, int], ...] = ()  # of each rank, for `status.describe_process`
        self.own: finegrained_alloc.Allocation | None = None
        self._parts: list[Callable[[], None]] = []
        # No channel, which has its group, whose heap would then live as long as this memory.
        farewell = None if backend == "host" else channel.subgroup(range(channel.world_size))
        self.release = weakref.finalize(self, _release, self._parts, farewell, device, os.getpid())
        self.release.atexit = False  # `heap` ends the live ones, after telling the peers of an exception
        live_memories.add(self)

    def allocate(self, nbytes: int) -> tuple[bytes, list[int]]:
        """(handle, nonce): allocate the own memory, zero its system area but for the nonce."""
        index = self.device.index or 0
        own = finegrained_alloc.alloc(nbytes, self.backend, index)
        self.own = own
        self._parts.append(own.free)
        nonce = [secrets.randbits(31) for _ in range(_NONCE_WORDS)]
        words = [0] * (SYSTEM_WORDS - _NONCE_WORDS) + nonce
        self.words(own.ptr).copy_(torch.tensor(words, dtype=torch.int32, device="cpu"))
        synchronize(self.device)
        return own.export(), nonce

    def map_peer(self, handle: bytes, nbytes: int, nonce: list[int]) -> int:
        """The address of a peer's memory in this process. `ShmemError` when it isn't what the peer
        announced."""
        mapping = finegrained_alloc.open_handle(handle, self.device.index or 0)
        self._parts.insert(0, mapping.close)  # closed before the own memory is freed
        if mapping.nbytes != nbytes:
            raise ShmemError(f"its handle stands for {mapping.nbytes} bytes, its heap has {nbytes}")
        if self.words(mapping.ptr)[-_NONCE_WORDS:].tolist() != nonce:
            raise ShmemError("its handle led to memory that isn't its heap")
        return mapping.ptr

    def words(self, base: int) -> torch.Tensor:
        """The system area of the heap that starts at `base`: int32[SYSTEM_WORDS]."""
        return tensor_on(storage_at(base, SYSTEM_BYTES, self.device, None), torch.int32, (SYSTEM_WORDS,))


def _release(parts: list[Callable[[], None]], farewell: Group | None, device: torch.device, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: the memory is its parent's
    with contextlib.suppress(RuntimeError):  # a kernel failed: nothing runs on this device any more
        synchronize(device)
    *mappings, free = parts if parts else [lambda: None]
    for close in mappings:
        close()
    if farewell is not None:
        # The driver leaves it undefined to free memory that others have mapped: give them a moment.
        with store_may_be_gone():
            farewell.leave("unmapped")
            farewell.wait_until_all_left(_FAREWELL_S)
    free()


def form(channel: Group, nbytes: int, device: torch.device, backend: str, timeout: float) -> SharedMemory:
    """Allocate `nbytes` bytes on every rank of `channel` and map the peers'.

    Raises:
        InitTimeout: ranks were missing, or could not allocate (then with the reason).
        CallMismatch: the ranks asked for different sizes.
        ShmemError: a rank could not map a peer's memory; names both and the cause.
    """
    memory = SharedMemory(channel, device, backend)
    try:
        _form(memory, channel, nbytes, timeout)
    except BaseException:
        memory.release()
        raise
    return memory


def _form(memory: SharedMemory, channel: Group, nbytes: int, timeout: float) -> None:
    call = f"Heap({nbytes - SYSTEM_BYTES} bytes) on {memory.backend}"
    cause: Exception | None = None
    offer: dict[str, Any] = {}
    try:
        handle, nonce = memory.allocate(nbytes)
        offer = {"handle": handle.hex(), "nonce": nonce, "process": status.own_process()}
    except (MemoryError, RuntimeError, ValueError, OSError) as error:
        cause = error
        offer = {"problem": f"{type(error).__name__}: {error}"}
    offers = parsed(call, channel.exchange(json.dumps(offer).encode(), call, timeout))
    unable = [rank for rank, reply in enumerate(offers) if "problem" in reply]
    if isinstance(cause, finegrained_alloc.NotBuilt | finegrained_alloc.Unavailable):
        raise cause
    if unable:
        raise InitTimeout(unable, call, 0.0, channel.world_size, offers[unable[0]]["problem"]) from cause

    bases: list[int] = []
    problem = ""
    for peer, reply in enumerate(offers):
        try:
            if peer == channel.rank:
                assert memory.own is not None
                bases.append(memory.own.ptr)
            else:
                bases.append(memory.map_peer(bytes.fromhex(reply["handle"]), nbytes, reply["nonce"]))
        except (MemoryError, RuntimeError, ValueError, OSError) as error:
            cause = error
            problem = f"rank {channel.rank} could not map the heap of rank {peer}: {error}"
            break
    problems = [text.decode() for text in channel.exchange(problem.encode(), f"{call}: mapped", timeout)]
    if any(problems):
        raise ShmemError(f"{call} did not form: " + "; ".join(text for text in problems if text)) from cause
    memory.bases = tuple(bases)
    memory.processes = tuple((number, namespace) for number, namespace in (o["process"] for o in offers))
    assert memory.own is not None
    memory.own.seal()
