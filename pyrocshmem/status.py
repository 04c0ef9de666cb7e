"""The record that a kernel leaves when a wait ends without what it waited for, and the faults made of it.

`Heap.status` is an int64[16] tensor in host memory, written by the device and read by the host without
synchronising. Its words are those of `Word`; CODE is written last, the first record stands.
`pyrocshmem.signal` writes it. `abort` words on the heap hold 0, or 1 + the rank that gave up.
"""

import enum
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from pyrocshmem.errors import PeerAborted, PeerTimeout, ShmemError

NUM_WORDS = 16
_ENDED = ("gone", "Z", "X")


class Code(enum.IntEnum):
    """How waiting ended."""

    OK = 0
    TIMEOUT = 1
    ABORTED = 2


class Word(enum.IntEnum):
    """Index of each fact in the record. A tile of -1 means that no tile was waited for."""

    CODE = 0
    OP = 1
    RANK = 2
    PEER = 3
    TILE = 4
    EXPECTED = 5
    SEEN = 6
    WAITED_US = 7
    EPOCH = 8


class Op(enum.IntEnum):
    """Numbers by which kernels name the op that waited."""

    NONE = 0
    BARRIER = 1
    ALL_REDUCE = 2
    ALL_GATHER = 3
    REDUCE_SCATTER = 4
    ALL_SCATTER = 5
    BROADCAST = 6
    RMS_NORM = 7
    FIX_UP = 8
    GEMM_ALL_REDUCE = 9
    GEMM_REDUCE_SCATTER = 10
    GEMM_ALL_SCATTER = 11
    ALL_GATHER_GEMM = 12
    GEMM_ALL_REDUCE_RMS_NORM = 13
    GEMM_RMS_NORM_ALL_SCATTER = 14
    ALL_REDUCE_RMS_NORM = 15
    TEST = 16


_numbering = threading.Lock()
_numbers: dict[str, int] = {op.name.lower(): int(op) for op in Op}


def op_number(name: str) -> int:
    """The number by which kernels name an op: `Op`'s or, for any other name, one of its own in this process, the same
    at every call. A wait that gives up records it, and `PeerTimeout` says the name.

        OP = tl.constexpr(pyrocshmem.op_number("ring_all_gather"))

    Raises TypeError for what is no string, ValueError for an empty one.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of an op is a {type(name).__name__}, a string is needed")
    if not name:
        raise ValueError("the name of an op is empty")
    with _numbering:
        return _numbers.setdefault(name, max(_numbers.values()) + 1)


def op_name(number: int) -> str:
    """The name of an op, or `op <number>` when no op has that number."""
    return next((name for name, known in _numbers.items() if known == number), f"op {number}")


def own_process() -> tuple[int, int]:
    """(number, namespace of numbers) of this process, for `describe_process` in another one of this machine."""
    return os.getpid(), _namespace()


def _namespace() -> int:
    """Of process numbers, and of this machine since it was started: another one may have a namespace of that number."""
    try:
        machine = uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).int
        return machine << 64 | os.stat("/proc/self/ns/pid").st_ino
    except (OSError, ValueError):  # no /proc
        return 0


def _state(process: tuple[int, int]) -> str:
    """The letter of a process' state in /proc, "gone" when there is none, "" where this process can't see it."""
    number, namespace = process
    if namespace == 0 or namespace != _namespace():
        return ""
    try:
        # The name of the program, in brackets, may itself hold spaces and brackets.
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"


def describe_end(process: tuple[int, int]) -> str:
    """That a peer's process has ended; "" where it has not, or this process can't see it."""
    return _ended(process[0]) if _state(process) in _ENDED else ""


def _ended(number: int) -> str:
    return f"process {number} has ended: look at its exit status and its log"


def describe_process(process: tuple[int, int]) -> str:
    """What has become of a peer's process, and what to do about it; "" where this process can't see it."""
    number, state = process[0], _state(process)
    if not state:
        return ""
    if state in _ENDED:
        return (
            f"{_ended(number)}. The others go on with a new heap on heap.group.subgroup(the ranks that live)"
        )
    if state in ("T", "t"):
        return (
            f"process {number} is stopped, by a signal or a debugger: resume it (kill -CONT {number}), then "
            "heap.recover() on all ranks"
        )
    return (
        f"process {number} is alive: look at where it is (py-spy dump --pid {number}). It is late "
        "(PYROCSHMEM_WAIT_SECONDS gives it longer) or made another call; then heap.recover() on all ranks"
    )


def to_error(
    words: Sequence[int],
    rank: int,
    peer_message: Callable[[int], str],
    peer_process: Callable[[int], str] = lambda peer: "",
) -> ShmemError | None:
    """The fault that a record describes, or None when all is well.

    Args:
        words: the record, `NUM_WORDS` integers.
        rank: the rank whose record it is.
        peer_message: gives what a peer said when it gave up.
        peer_process: gives what has become of a peer's process.
    """
    code = words[Word.CODE]
    if code == Code.OK:
        return None
    peer = words[Word.PEER]
    if code == Code.ABORTED:
        return PeerAborted(rank, peer, peer_message(peer))
    tile = words[Word.TILE]
    return PeerTimeout(
        op=op_name(words[Word.OP]),
        rank=rank,
        peer=peer,
        tile=tile if tile >= 0 else None,
        expected=words[Word.EXPECTED],
        seen=words[Word.SEEN],
        waited_s=words[Word.WAITED_US] / 1e6,
        call=words[Word.EPOCH],
        process=peer_process(peer),
    )
