"""What the tests of the allocator share: the built library, children that cannot outlive a test, files in /dev/shm.

Children run a few lines of Python that import finegrained_alloc alone: without torch they start in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyrocshmem import finegrained_alloc as fga

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PACKAGE = ROOT / "finegrained_alloc"
SHM = Path("/dev/shm")
TIMEOUT_S = 60
PID, PAYLOAD = 80, 88  # offsets in handle.h; the payload of a host handle: inode, file system, descriptor

PREAMBLE = """
import ctypes, json, os, sys, threading
import finegrained_alloc as fga
def say(**facts): print(json.dumps(facts), flush=True)
def error_of(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None
"""


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """AssertionError where this process has not as much of the allocator's memory, and of its peers', after as
    before."""

    def held() -> tuple[int, int, int]:
        stats = fga.live()
        return stats.allocations, stats.bytes, stats.mappings

    gc.collect()  # heaps that earlier tests dropped
    before = held()
    yield
    assert held() == before


def build_library() -> None:
    """Builds the library where it is missing or old, as activate.sh does."""
    subprocess.run(["sh", str(PACKAGE / "build.sh")], check=True, timeout=TIMEOUT_S)


def environment(extra: dict[str, str]) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)} | extra


def run_child(code: str, *arguments: str, **extra: str) -> list[dict[str, Any]]:
    """Runs PREAMBLE and ``code`` in a fresh process; what it said with ``say``. ``extra``: environment variables.

    Fails when the child fails, so a child that dies from a signal is never taken for a silent one.
    """
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code, *arguments],
        env=environment(extra),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"child ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


@contextlib.contextmanager
def child(code: str, *arguments: str, **extra: str) -> Iterator[subprocess.Popen[str]]:
    """A process running PREAMBLE and ``code``, with pipes; killed and reaped at the end whatever happens."""
    process = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + code, *arguments],
        env=environment(extra),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def hear(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next facts that the child says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the child ended with {process.wait(TIMEOUT_S)} and said nothing"
    return json.loads(line)


def tell(process: subprocess.Popen[str], line: str = "") -> None:
    """One line to the child's standard input."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def file_of(handle: bytes) -> Path:
    """Where peers open the file that a host handle stands for."""
    pid = int.from_bytes(handle[PID : PID + 8], "little")
    return Path(f"/proc/{pid}/fd/{int.from_bytes(handle[PAYLOAD + 16 : PAYLOAD + 24], 'little')}")


def files_of_size(nbytes: int) -> list[Path]:
    """Files in /dev/shm, under whatever name, of a size that nobody else chooses: other jobs may be running."""
    found = []
    for path in SHM.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size == nbytes:
                found.append(path)
    return found


def holders_of_size(nbytes: int) -> list[int]:
    """Processes that map a whole file of /dev/shm of that size, named or not."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            for line in maps.read_text(errors="replace").splitlines():
                start, end = (int(address, 16) for address in line.split()[0].split("-"))
                if "/dev/shm/" in line and end - start == nbytes:
                    found.append(int(maps.parent.name))
                    break
    return found


def odd_size() -> int:
    """Whole pages, a number that no other program in /dev/shm is likely to have chosen."""
    return os.sysconf("SC_PAGESIZE") * random.randrange(301, 901)


OWNER = """
memory = fga.alloc(int(sys.argv[1]), "host")
say(handle=memory.export().hex())
sys.stdin.readline()
"""


@contextlib.contextmanager
def own(nbytes: int) -> Iterator[tuple[subprocess.Popen[str], bytes]]:
    """A child that holds one host allocation, and its handle; it ends after one line on its standard input."""
    with child(OWNER, str(nbytes)) as owner:
        yield owner, bytes.fromhex(hear(owner)["handle"])
