"""The end of all heaps of a process, at its own end at the latest."""

import atexit
import sys

from pyrocshmem.errors import describe
from pyrocshmem.forming import live_memories
from pyrocshmem.groups import Group
from pyrocshmem.hosts import live_hosts
from pyrocshmem.lifecycle import live_heaps


def close_all() -> None:
    """Close every heap of this process, and leave every group that is over several hosts."""
    for hosts in list(live_hosts):
        hosts.close()
    for heap in list(live_heaps):
        heap.close()


def leave_all() -> None:
    """Close every heap of this process, which ends. Tensors on them can be read to the last: other handlers, that were
    registered before ours, and threads may do so."""
    close_all()
    for memory in list(live_memories):
        memory.leave()


def abort_all(message: str, group: Group | None = None) -> None:
    """`abort` every heap of this process, or of `group`: for a rank that is about to end with an exception."""
    for heap in list(live_heaps):
        if group is None or heap.group is group:
            heap.abort(message)


def _at_exit() -> None:
    # Set when an exception ended the program, and at a prompt after any exception.
    uncaught = getattr(sys, "last_value", None)
    if uncaught is not None and not hasattr(sys, "ps1"):
        abort_all(describe(uncaught))
    leave_all()


atexit.register(_at_exit)
