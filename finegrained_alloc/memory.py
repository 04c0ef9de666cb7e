"""Allocations, exported handles and mappings of peers' allocations.

Every object names a piece of raw memory by address; none of them is freed by the garbage collector, because tensors
made from the address would outlive it unseen. Free and close by hand or with ``with``; ``live()`` shows what was
forgotten.
All functions may be called from several threads.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from .library import BACKENDS, CStats, backend_number, c_number, check, load

PIECE = 2 << 20  # of memory in a Space: its addresses and sizes are multiples of that


@dataclass(frozen=True)
class Stats:
    """What this process holds. ``bytes`` counts whole pages; mappings hold no memory of their own."""

    allocations: int
    bytes: int
    mappings: int
    total_allocations: int
    total_mappings: int


class _OfThisProcess:
    """What it names is an address: in another process, or twice, it would be somebody else's memory."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} can't be pickled or copied: send `export()`, and open it there"
        )


@dataclass(frozen=True)
class Allocation(_OfThisProcess):
    """Memory of this process, made by ``alloc``. A context manager that frees.

    ``ptr``: address of the first byte. ``nbytes``: as asked for. ``backend``, ``device``: where it lives.
    ``number``: its name in the C library, never used again after ``free``.
    """

    ptr: int
    nbytes: int
    backend: str
    device: int
    number: int

    def export(self) -> bytes:
        """A handle of ``handle_bytes()`` bytes that a process of the same user on this machine can open.

        Raises ``ValueError`` when the memory was freed or sealed.
        """
        return export_pointer(self.ptr)

    def seal(self) -> None:
        """Lets no new peer in, once all have opened the memory, and gives back the descriptor that it holds for them.

        Nothing where it has none: GPU memory that isn't in a ``Space``. Raises ``ValueError`` when it was freed.
        """
        check(load().fga_seal(self.number))

    def free(self) -> None:
        """Gives the memory back; where threads of this process still have it open, with the last of them.

        Raises ``ValueError`` when it was freed before.
        """
        check(load().fga_free(self.number))

    def __enter__(self) -> Allocation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()


@dataclass(frozen=True)
class Mapping(_OfThisProcess):
    """A peer's memory in this process, made by ``open_handle``. A context manager that closes."""

    ptr: int
    nbytes: int
    backend: str
    device: int
    number: int

    def close(self) -> None:
        """Unmaps. Raises ``ValueError`` when it was closed before."""
        check(load().fga_close(self.number))

    def __enter__(self) -> Mapping:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Space(_OfThisProcess):
    """Address space of this process with no memory behind it, made by ``reserve``. A context manager that frees.

    ``alloc`` and ``open_handle`` put memory at addresses in it, which is how memory grows without moving.
    """

    ptr: int
    nbytes: int
    backend: str
    device: int
    number: int

    def free(self) -> None:
        """Gives the addresses back; where memory still lies on some, with the last of it.

        Raises ``ValueError`` when they were given back before.
        """
        check(load().fga_unreserve(self.number))

    def __enter__(self) -> Space:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()


def reserve(nbytes: int, backend: str, device: int = 0) -> Space:
    """Reserves ``nbytes`` bytes of addresses, a multiple of ``PIECE``, for memory of ``device`` or that it reaches.

    Takes no memory. Raises ``ValueError`` / ``TypeError`` for bad arguments, ``Unavailable`` where memory can't be put
    at given addresses ("hip", and a device or driver without virtual memory management), ``MemoryError`` when the
    process may not have so many addresses, ``RuntimeError`` with the runtime's text, ``NotBuilt``.
    """
    number = backend_number(backend)
    nbytes = c_number("nbytes", nbytes, 64)
    device = c_number("device", device, 32)
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}, expected at least {PIECE}")
    ptr, name = ctypes.c_void_p(), ctypes.c_uint64()
    check(load().fga_reserve(number, device, nbytes, ctypes.byref(ptr), ctypes.byref(name)))
    assert ptr.value is not None
    return Space(ptr.value, nbytes, backend, device, name.value)


def alloc(nbytes: int, backend: str, device: int = 0, at: int | None = None) -> Allocation:
    """Allocates ``nbytes`` bytes: page-aligned and zeroed on "host", 2 MiB-aligned and not zeroed on "cuda" and "hip".

    ``at``: an address in a ``Space`` of that device, a multiple of ``PIECE`` from its start as ``nbytes`` is one, and
    nothing there yet; None: anywhere.

    Raises ``ValueError`` / ``TypeError`` for bad arguments, ``MemoryError`` (with backend, bytes and the system's text)
    when there is not enough, ``RuntimeError`` with the system's text (on "host" and in a ``Space`` each allocation
    holds a file descriptor until it is sealed or freed), ``Unavailable`` when this machine has no such backend,
    ``NotBuilt``.
    """
    number = backend_number(backend)
    nbytes = c_number("nbytes", nbytes, 64)
    if nbytes < 1:
        raise ValueError(f"nbytes is {nbytes}, expected at least 1")
    device = c_number("device", device, 32)
    ptr, name = ctypes.c_void_p(), ctypes.c_uint64()
    check(load().fga_alloc(number, device, nbytes, _address(at), ctypes.byref(ptr), ctypes.byref(name)))
    assert ptr.value is not None
    return Allocation(ptr.value, nbytes, backend, device, name.value)


def _address(at: int | None) -> int | None:
    return None if at is None else c_number("at", at, 64)


def handle_bytes() -> int:
    """Length of every handle."""
    return int(load().fga_handle_size())


def export_pointer(ptr: int) -> bytes:
    """The handle of the allocation that starts at address ``ptr`` (PyTorch's from ``pool()`` included).

    Raises ``ValueError`` when ``ptr`` is not the base of a live allocation: a handle never stands for a part.
    """
    handle = ctypes.create_string_buffer(handle_bytes())
    ptr = c_number("ptr", ptr, 64)
    check(load().fga_export(ptr, handle, len(handle)))
    return handle.raw


def open_handle(handle: bytes, device: int = 0, at: int | None = None) -> Mapping:
    """Maps the memory that a peer exported, for use on ``device`` of this process (ignored for host memory: 0).

    ``at``: as in ``alloc``, and needed for GPU memory that lies in a ``Space`` of its owner. A handle made by this very
    process maps nothing: the pointer is the owner's, whatever ``at`` is, with peer access between the devices.
    Raises ``ValueError`` for a handle that is truncated, damaged or not one of ours, ``StaleHandle`` when its owner has
    ended or given the memory back, ``MemoryError`` without room to map it, ``RuntimeError`` with the runtime's text
    when mapping fails, or when the owner of host memory is in another pid namespace, ``NotBuilt``.
    """
    if not isinstance(handle, bytes):
        raise TypeError(f"handle is a {type(handle).__name__}, expected bytes")
    device = c_number("device", device, 32)
    ptr, nbytes, number, name = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int(), ctypes.c_uint64()
    results = [ctypes.byref(result) for result in (ptr, nbytes, number, name)]
    check(load().fga_open(handle, len(handle), device, _address(at), *results))
    assert ptr.value is not None
    return Mapping(ptr.value, nbytes.value, BACKENDS[number.value], device, name.value)


def device_count(backend: str) -> int:
    """Devices of the backend, 1 for "host". Raises ``Unavailable`` when this machine has none."""
    count = ctypes.c_int()
    check(load().fga_device_count(backend_number(backend), ctypes.byref(count)))
    return count.value


def can_access_peer(backend: str, device: int, peer: int) -> bool:
    """Whether kernels on ``device`` can reach memory on ``peer``; always true on "host". Raises as ``alloc`` does."""
    yes = ctypes.c_int()
    pair = c_number("device", device, 32), c_number("peer", peer, 32)
    check(load().fga_can_access_peer(backend_number(backend), *pair, ctypes.byref(yes)))
    return yes.value != 0


def enable_peer_access(backend: str, device: int, peer: int) -> None:
    """Lets kernels on ``device`` reach memory on ``peer``, for the life of the process; nothing when they already can.

    Raises ``RuntimeError`` when the two are not linked.
    """
    pair = c_number("device", device, 32), c_number("peer", peer, 32)
    check(load().fga_enable_peer_access(backend_number(backend), *pair))


def copy_rows(
    backend: str,
    device: int,
    to: int,
    to_pitch: int,
    source: int,
    source_pitch: int,
    width: int,
    rows: int,
    stream: int = 0,
) -> None:
    """Copies ``rows`` rows of ``width`` bytes, ``source_pitch`` bytes apart from address ``source`` on, to ``to``.

    It is a command of ``stream`` (a raw handle of ``device``) for a copy engine, even if rows don't lie together, and
    a graph may capture it. On "host" it is done when this returns. The addresses are not checked.
    Raises ``ValueError`` for a null pointer, for what is negative or has more than 63 bits, and for a pitch below the
    width or of 2 GiB and more; ``RuntimeError`` with the runtime's text; ``Unavailable``, ``NotBuilt``.
    """
    arguments = to, to_pitch, source, source_pitch, width, rows, stream
    if min(arguments[:6]) < 0 or max(arguments) >= 1 << 63:  # ctypes would cut them silently
        raise ValueError(
            f"rows {rows}, width {width}, pitches {to_pitch} and {source_pitch}: none may be negative, or have more "
            "than 63 bits"
        )
    device = c_number("device", device, 32)
    status = load().fga_copy_rows(backend_number(backend), device, *arguments)
    if status:
        check(status)


def live() -> Stats:
    """What this process holds now, counted by the C library, PyTorch's allocations from ``pool()`` included."""
    stats = CStats()
    load().fga_get_stats(ctypes.byref(stats))
    return Stats(
        allocations=stats.allocations,
        bytes=stats.bytes,
        mappings=stats.mappings,
        total_allocations=stats.total_allocations,
        total_mappings=stats.total_mappings,
    )
