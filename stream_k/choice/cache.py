"""The user's cache of measured configurations: where it lies, what a table was measured with, how its file is read.

    ~/.cache/pyrocshmem/tuned-sm_90-132.json        # $XDG_CACHE_HOME/pyrocshmem/.., where that is set: a file a GPU

A table counts where it was measured: on that kind of GPU, with these versions of torch and Triton and these sources.
The file is the user's own and nothing else vouches for it, so whatever it holds is read as data, up to a size, and
checked. What can't be used is ignored with one line on stderr.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from pyrocshmem import target

# An entry takes half a kilobyte.
_MOST_BYTES = 16 << 20

# What a configuration means and how long it takes: all modules of these folders, and the device code beside them.
_PACKAGE = Path(__file__).parents[2]
_FOLDERS = ("stream_k/choice", "stream_k/local_gemm", "stream_k/ops", "collectives", "calls")
_MODULES = ("counts", "dependent_launch", "device", "message", "note", "polls", "signal", "write_back")


class Made(NamedTuple):
    """What a table was measured with. arch: as `architecture` gives it; sources: as `sources` does."""

    arch: str
    num_sms: int
    torch: str
    triton: str
    sources: str

    def differs(self, here: Made) -> str:
        """In what a table made with this is not of `here`, in words; "" where it is."""
        if self[:2] != here[:2]:
            return f"on {self.arch} with {self.num_sms} SMs, not {here.arch} with {here.num_sms}"
        for name in ("torch", "triton"):
            if getattr(self, name) != getattr(here, name):
                return f"with {name} {getattr(self, name)}, not {getattr(here, name)}"
        return "" if self.sources == here.sources else "with other sources of this library"


def made_here(device: torch.device) -> Made:
    """What is measured on `device` now is measured with."""
    return Made(
        architecture(device), target.num_sms(device), torch.__version__, triton.__version__, sources()
    )


def architecture(device: torch.device) -> str:
    """What kernels are compiled for: "sm_90", "gfx942", ...; "cpu" in the interpreter."""
    if device.type == "cpu":
        return "cpu"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":", maxsplit=1)[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@lru_cache(maxsize=1)
def sources() -> str:
    """A hash of the sources on which measurements depend: those of kernels, of what launches them, of the choice."""
    found = hashlib.sha256()
    for path in source_files():
        found.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def source_files() -> list[Path]:
    """The files that `sources` hashes."""
    files = [_PACKAGE / f"{name}.py" for name in _MODULES]
    files += [path for folder in _FOLDERS for path in sorted((_PACKAGE / folder).glob("*.py"))]
    return [path for path in files if path.is_file()]


def default_path(device: torch.device) -> Path | None:
    """The user's file for a GPU like `device`; None where the user has no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "pyrocshmem" / f"tuned-{architecture(device)}-{target.num_sms(device)}.json"


def read_json(path: Path) -> Any:
    """What a file holds as JSON. OSError where it can't be read, ValueError for anything but a file of JSON up to
    16 MiB."""
    # What waits for a writer, or never ends, is no table: looked at before it is read.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def one_line(text: str) -> str:
    """`text`, which may hold anything of a file's, as a line of at most 600 characters that can be printed."""
    return "".join(each if each.isprintable() else "?" for each in text[:600])


@lru_cache(maxsize=64)
def say_once(text: str) -> None:
    """One line on stderr, the first time in this process."""
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        print(f"pyrocshmem: {one_line(text)}", file=sys.stderr, flush=True)
