"""Loads the C library and turns its status codes into exceptions.

``load()`` opens ``libfinegrained_alloc.so`` beside this file at the first call. It is never built from here: a rank
that compiles behind the caller's back hides a broken installation, so the message says what to run instead.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from pathlib import Path

BACKENDS: tuple[str, ...] = ("host", "cuda", "hip")

_ABI_VERSION = 3
_DIRECTORY = Path(__file__).resolve().parent
LIBRARY_PATH = _DIRECTORY / "libfinegrained_alloc.so"


class NotBuilt(RuntimeError):
    """The C library is missing or belongs to another version; the message holds the build command."""


class Unavailable(RuntimeError):
    """This machine has no such backend: no driver, no runtime library, or no device."""


class StaleHandle(RuntimeError):
    """A handle that was good once: its owner has ended, or has freed or sealed the memory."""


class CStats(ctypes.Structure):
    """``fga_stats`` of finegrained_alloc.h."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("allocations", "bytes", "mappings", "total_allocations", "total_mappings")
    ]


_EXCEPTIONS: dict[int, type[Exception]] = {
    1: ValueError,
    2: MemoryError,
    3: Unavailable,
    4: StaleHandle,
    5: RuntimeError,
}

_INT = ctypes.c_int
_U64 = ctypes.c_uint64
_PTR = ctypes.c_void_p
_INT_OUT = ctypes.POINTER(ctypes.c_int)
_U64_OUT = ctypes.POINTER(ctypes.c_uint64)
_PTR_OUT = ctypes.POINTER(ctypes.c_void_p)

# name: (result, arguments), as in finegrained_alloc.h
_PROTOTYPES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "fga_abi_version": (ctypes.c_uint32, ()),
    "fga_last_error": (ctypes.c_char_p, ()),
    "fga_available": (_INT, (_INT, ctypes.c_char_p, _U64)),
    "fga_device_count": (_INT, (_INT, _INT_OUT)),
    "fga_reserve": (_INT, (_INT, _INT, _U64, _PTR_OUT, _U64_OUT)),
    "fga_unreserve": (_INT, (_U64,)),
    "fga_alloc": (_INT, (_INT, _INT, _U64, _PTR, _PTR_OUT, _U64_OUT)),
    "fga_free": (_INT, (_U64,)),
    "fga_seal": (_INT, (_U64,)),
    "fga_handle_size": (_U64, ()),
    "fga_export": (_INT, (_PTR, ctypes.c_char_p, _U64)),
    "fga_open": (_INT, (ctypes.c_char_p, _U64, _INT, _PTR, _PTR_OUT, _U64_OUT, _INT_OUT, _U64_OUT)),
    "fga_close": (_INT, (_U64,)),
    "fga_can_access_peer": (_INT, (_INT, _INT, _INT, _INT_OUT)),
    "fga_enable_peer_access": (_INT, (_INT, _INT, _INT)),
    "fga_copy_rows": (_INT, (_INT, _INT, _PTR, _U64, _PTR, _U64, _U64, _U64, _PTR)),
    "fga_get_stats": (None, (ctypes.POINTER(CStats),)),
    "fga_set_torch_backend": (_INT, (_INT,)),
}


def _not_built(problem: str) -> NotBuilt:
    return NotBuilt(
        f"the C library of finegrained_alloc {problem}; build it with finegrained_alloc/build.sh "
        f"(here: sh {_DIRECTORY / 'build.sh'}), which needs only a C compiler"
    )


@functools.cache
def load() -> ctypes.CDLL:
    """The C library, opened once in a process, with its prototypes set.

    Raises ``NotBuilt``, with the build command, when the library is missing, does not load, or is of another version.
    """
    if not LIBRARY_PATH.exists():
        raise _not_built(f"is not built ({LIBRARY_PATH} does not exist)")
    try:
        library = ctypes.CDLL(str(LIBRARY_PATH))
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise _not_built(f"does not load ({error})") from error
    version = library.fga_abi_version()
    if version != _ABI_VERSION:
        raise _not_built(f"is of version {version}, expected {_ABI_VERSION}")
    return library


def check(status: int) -> None:
    """Raises what the C status stands for, with the C library's text; returns on success.

    To be called in the thread that made the failing call: the text is kept for each thread.
    """
    if status != 0:
        text = load().fga_last_error().decode("utf-8", "replace")
        raise _EXCEPTIONS[status](text)


def backend_number(backend: str) -> int:
    """Position of the backend in ``BACKENDS``; ``ValueError`` for a name that is not there."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}, expected one of {', '.join(BACKENDS)}")
    return BACKENDS.index(backend)


def c_number(name: str, value: int, bits: int) -> int:
    """``value`` as an integer that fits a signed C integer of ``bits``, since ctypes would cut it silently.

    Raises ``TypeError`` for what is no integer (a bool included) and ``ValueError`` for what does not fit.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, expected an integer")
    number = operator.index(value)
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise ValueError(f"{name} is {number}, expected a signed integer of {bits} bits")
    return number


def available(backend: str) -> tuple[bool, str]:
    """Whether this machine has the backend, and what was found, or why not.

    The GPU runtime is loaded for that. Import torch first where it brings its own copy of it: that copy is then used.
    Raises ``ValueError`` for an unknown name and ``NotBuilt``.
    """
    number = backend_number(backend)
    text = ctypes.create_string_buffer(512)
    try:
        check(load().fga_available(number, text, len(text)))
    except Unavailable as error:
        return False, str(error)
    return True, f"{backend}: {text.value.decode('utf-8', 'replace')}"
