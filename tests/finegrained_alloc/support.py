"""What the tests of the allocator share: the built library, children that cannot outlive a test, files in /dev/shm.

Children run a few lines of Python that import finegrained_alloc alone: without torch they start in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PACKAGE = ROOT / "finegrained_alloc"
SHM = Path("/dev/shm")
TIMEOUT_S = 60
HANDLE_NAME = 88  # offset of the payload in handle.h, which starts with the name of the file

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
    """The file that a host handle stands for. Asked of the handle and not of /dev/shm: other jobs may be running."""
    return SHM / handle[HANDLE_NAME : HANDLE_NAME + 64].rstrip(b"\0").decode()


OWNER = """
memory = fga.alloc(int(sys.argv[1]), "host")
say(handle=memory.export().hex())
sys.stdin.readline()
"""


@contextlib.contextmanager
def own(nbytes: int) -> Iterator[tuple[subprocess.Popen[str], bytes]]:
    """A child that holds one host allocation, and its handle; it ends after one line on its standard input."""
    with child(OWNER, str(nbytes)) as owner:
        handle = bytes.fromhex(hear(owner)["handle"])
        try:
            yield owner, handle
        finally:
            file_of(handle).unlink(missing_ok=True)  # a killed owner cannot
