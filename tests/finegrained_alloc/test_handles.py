"""Handles: every kind of damage is an error that names it, and none of them maps anything."""

import random
from collections.abc import Iterator

import pytest

from pyrocshmem import finegrained_alloc as fga
from tests.finegrained_alloc import support

TIER = 0
pytestmark = pytest.mark.cpu

# Offsets in handle.h.
MAGIC, VERSION, BACKEND, DEVICE, NBYTES, NAMESPACE, PAYLOAD = 0, 8, 12, 16, 24, 64, support.PAYLOAD


def checksum(data: bytes) -> bytes:
    """FNV-1a, written down again so that a forged handle gets past it."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value.to_bytes(8, "little")


def forged(handle: bytes, offset: int, new: bytes) -> bytes:
    body = handle[:offset] + new + handle[offset + len(new) : -8]
    return body + checksum(body)


@pytest.fixture(scope="module")
def handle() -> Iterator[bytes]:
    """Of another process, so that opening it would map."""
    with support.own(5000) as (_, of_another):
        yield of_another


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    with support.nothing_kept():
        yield


def test_checksum_is_the_documented_one(handle: bytes) -> None:
    assert checksum(handle[:-8]) == handle[-8:]


@pytest.mark.parametrize("length", [0, 1, 64, -1])
def test_truncated(handle: bytes, length: int) -> None:
    short = handle[:length]
    with pytest.raises(ValueError, match=f"truncated: {len(short)} bytes, expected {len(handle)}"):
        fga.open_handle(short)


def test_too_long(handle: bytes) -> None:
    with pytest.raises(ValueError, match="too long"):
        fga.open_handle(handle + b"\0")


def test_every_damaged_byte_is_noticed(handle: bytes) -> None:
    before = fga.live()
    for offset in range(len(handle)):
        damaged = bytearray(handle)
        damaged[offset] ^= random.randrange(1, 256)
        with pytest.raises(ValueError, match=r"magic|version|checksum"):
            fga.open_handle(bytes(damaged))
    assert fga.live() == before  # not even for a moment


@pytest.mark.parametrize(
    ("offset", "new", "message"),
    [
        (MAGIC, b"x", "magic"),
        (VERSION, b"\1", "version 1, this library reads version 2"),
        (BACKEND, b"\3", r"unknown backend 3, expected 0 \(host\)"),
        (DEVICE, b"\xff\xff\xff\xff", "device -1"),
        (NBYTES, bytes(8), "0 bytes"),
        (NBYTES, b"\xff" * 8, "makes no sense"),
        (NBYTES + 8, (1 << 40).to_bytes(8, "little"), "not the file that was exported"),
    ],
)
def test_forged(handle: bytes, offset: int, new: bytes, message: str) -> None:
    """Damage behind a right checksum is still refused, field by field."""
    assert forged(handle, offset, b"") == handle
    with pytest.raises(ValueError, match=message):
        fga.open_handle(forged(handle, offset, new))


@pytest.mark.parametrize(
    ("offset", "new", "message"),
    [
        (PAYLOAD, b"\xff" * 7, "is another file now"),
        (PAYLOAD + 8, b"\xff" * 7, "is another file now"),
        (PAYLOAD + 16, b"\0", "is another file now"),  # its standard input
        (PAYLOAD + 16, b"\xff" * 8, "fd/-1 does not exist"),
        (PAYLOAD + 16, (1 << 20).to_bytes(8, "little"), "does not exist"),
        (NAMESPACE, b"\1", "is in another pid namespace"),
        (support.PID, b"\1\0\0\0", "process 1, is not running any more"),  # of another start time
    ],
)
def test_forged_to_lead_elsewhere(handle: bytes, offset: int, new: bytes, message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as raised:
        fga.open_handle(forged(handle, offset, new))
    assert isinstance(raised.value, fga.StaleHandle) == (offset != NAMESPACE)


def test_only_bases_are_exported() -> None:
    with fga.alloc(5000, "host") as memory:
        assert fga.export_pointer(memory.ptr) == memory.export()
        with pytest.raises(ValueError, match=r"ptr is .*, expected a signed integer of 64 bits"):
            fga.export_pointer(memory.ptr + 2**64)
        for offset in (1, 64, 4096, 8191):
            with pytest.raises(
                ValueError, match=f"is {offset} bytes inside the allocation at {memory.ptr:#x}"
            ):
                fga.export_pointer(memory.ptr + offset)
        for foreign in (memory.ptr - 1, memory.ptr + 8192, id(memory), 0):
            with pytest.raises(ValueError, match="not a live allocation"):
                fga.export_pointer(foreign)
    with pytest.raises(ValueError, match="not a live allocation"):
        fga.export_pointer(memory.ptr)


def test_a_mapping_is_not_ours_to_export(handle: bytes) -> None:
    with fga.open_handle(handle) as opened, pytest.raises(ValueError, match="not a live allocation"):
        fga.export_pointer(opened.ptr)
    before = fga.live()
    with pytest.raises(ValueError, match="not an open mapping"):
        opened.close()
    assert fga.live() == before  # a second close counts nothing


def test_double_free_even_when_the_address_came_back() -> None:
    first = fga.alloc(5000, "host")
    first.free()
    with pytest.raises(ValueError, match="freed before"):
        first.free()
    with fga.alloc(5000, "host"):  # the system may well give the same address again
        with pytest.raises(ValueError, match="freed before"):
            first.free()
        with pytest.raises(ValueError, match="not a live allocation"):
            first.seal()


@pytest.mark.parametrize("nbytes", [0, -1, -(2**70), 2**63, 2**64 + 4096])
def test_bad_sizes(nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"nbytes is {nbytes}, expected"):
        fga.alloc(nbytes, "host")


@pytest.mark.parametrize("nbytes", [1.5, "1", None, True])
def test_sizes_that_are_no_integers(nbytes: object) -> None:
    with pytest.raises(TypeError):
        fga.alloc(nbytes, "host")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["", "HOST", "rocm", None, 0])
def test_unknown_backends(backend: object) -> None:
    with pytest.raises(ValueError, match="expected one of host, cuda, hip"):
        fga.alloc(1, backend)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected one of host, cuda, hip"):
        fga.available(backend)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", [-1, 1, 2**31 - 1])
def test_bad_devices(device: int) -> None:
    with pytest.raises(ValueError, match=f"host: device {device}, expected 0 to 0"):
        fga.alloc(1, "host", device)


def test_a_device_that_a_c_int_cannot_hold() -> None:
    with pytest.raises(ValueError, match="device is 4294967296"):
        fga.alloc(1, "host", 2**32)


@pytest.mark.parametrize("handle_of_no_bytes", [None, "text", 5, bytearray(192)])
def test_handles_that_are_no_bytes(handle_of_no_bytes: object) -> None:
    with pytest.raises(TypeError, match="expected bytes"):
        fga.open_handle(handle_of_no_bytes)  # type: ignore[arg-type]
