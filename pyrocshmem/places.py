"""Where a rank is: which ranks share a host, and so can have one symmetric heap.

A host is what shares memory: one boot of one kernel, one `/dev/shm`, one namespace of processes and one of networks, by
which ranks open each other's memory. Two containers of one machine are two hosts unless they share all of these.
`PYROCSHMEM_HOST`, any word, divides a machine into hosts that are only made up, for tests and demonstrations.
"""

import os
import socket
from pathlib import Path

_MADE_UP = "PYROCSHMEM_HOST"


def make_up(host: int) -> None:
    """Be on a host that is only made up, the one of this number, before any group forms."""
    os.environ[_MADE_UP] = f"made up {host}"


def own_place() -> bytes:
    """What the ranks of one host have in common, and those of other hosts have not."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no /proc
        kernel = socket.gethostname()
    shared = (_identity(path) for path in ("/dev/shm", "/proc/self/ns/pid", "/proc/self/ns/net"))
    return "\n".join((kernel, *shared, os.environ.get(_MADE_UP, ""))).encode()


def _identity(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return "none"
    return f"{found.st_dev}:{found.st_ino}"
