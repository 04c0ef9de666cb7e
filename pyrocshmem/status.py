"""The record that a kernel leaves when a wait ends without what it waited for, and the faults made of it.

`Heap.status` is an int64[16] tensor in host memory, written by the device and read by the host without
synchronising. Its words are those of `Word`; CODE is written last, the first record stands.
`pyrocshmem.signal` writes it. `abort` words on the heap hold 0, or 1 + the rank that gave up.
"""

import enum
from collections.abc import Callable, Sequence

from pyrocshmem.errors import PeerAborted, PeerTimeout, ShmemError

NUM_WORDS = 16


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
    TEST = 15


def op_name(number: int) -> str:
    """The lower-case name of an op, or `op <number>` when the number is none of ours."""
    return Op(number).name.lower() if number in Op._value2member_map_ else f"op {number}"


def to_error(words: Sequence[int], rank: int, peer_message: Callable[[int], str]) -> ShmemError | None:
    """The fault that a record describes, or None when all is well.

    Args:
        words: the record, `NUM_WORDS` integers.
        rank: the rank whose record it is.
        peer_message: gives what a peer said when it gave up.
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
    )
