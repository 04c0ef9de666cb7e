"""Which calls the ranks have begun, so that calls made in another order are noticed.

Ranks compare a call when they plan it; later it is made without a vote, and a rank that makes another of the planned
calls would mix its data with theirs. So each rank's host writes down which call it begins, in memory that the hosts of
its peers can read, and looks at what they wrote. A word has the number of a call and an index of the planned call (the
same on each rank, which has voted on them in the same order):

    rank 0   .. | 7: all_reduce of 4 x 8 | 8: all_gather of 2 x 8
    rank 1   .. | 7: all_reduce of 4 x 8 | 8: rms_norm of 4 x 8     the second one to come sees it and launches nothing

A rank that is behind is compared later, unless its peers get _KEPT calls ahead. A word has 31 bits of the number, which
wraps. Replays of captured graphs don't count as calls: their order is the caller's to keep.

A rank that closes its heap writes _CLOSED in place of its next call. So a call that it still made ends as ever, however
late a peer makes it, and one that it will never make is known for such by whoever begins it, at no cost. Those that
have begun it before must be told: it looks whether there are any, after it has written.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple, Protocol

import torch

from pyrocshmem.errors import ShmemError
from pyrocshmem.forming import SYSTEM_BYTES, form
from pyrocshmem.groups import Group

_KEPT = 1024
_WHICH_BITS = 32
_CLOSED = (1 << _WHICH_BITS) - 1
_NUMBERS = 1 << 31


class Difference(NamedTuple):
    """Call `number` is, on each rank, the planned call `which[rank]`; None: not begun there."""

    number: int
    which: list[int | None]

    @property
    def closed_by(self) -> int | None:
        """The first rank that closed its heap instead, None if there is none."""
        return self.which.index(_CLOSED) if _CLOSED in self.which else None


class Caller(Protocol):
    """What makes calls on a heap and counts them, as `stream_k.Workspace` does: what the heap asks of it."""

    def difference(self) -> ShmemError | None:
        """Whether ranks have begun different calls, or one closed its heap instead: in `Heap.check`."""

    def make_no_more(self) -> list[int]:
        """This rank makes no more calls. Returns the peers that have begun one more: in `Heap.close`."""

    def start_anew(self) -> None:
        """Count calls from 0: in `Heap.recover`, while no rank writes anything."""

    def let_go(self) -> None:
        """Hold no memory of the heap any more: in `Heap.close`."""


class Ledger:
    """The words of all ranks of a group. Making one is collective, the rest is local."""

    def __init__(self, group: Group, timeout: float) -> None:
        # In host memory, whatever the device. Its system area, but for the last words, is room enough.
        channel, cpu = group.channel("ledger"), torch.device("cpu")
        self._memory = form(channel, "memory to compare calls", SYSTEM_BYTES, cpu, "host", timeout)
        self._words = [
            memoryview((ctypes.c_int64 * _KEPT).from_address(base)).cast("B").cast("q")
            for base in self._memory.bases
        ]
        self._rank = group.rank
        self._own = self._words[group.rank]
        self._peers = [words for rank, words in enumerate(self._words) if rank != group.rank]
        self._begun = self._compared = 0

    def begin(self, which: int) -> None:
        """Write down that this rank begins the planned call `which`."""
        self._begun = number = self._begun + 1
        self._own[number % _KEPT] = number % _NUMBERS << _WHICH_BITS | which

    def compare(self) -> Difference | None:
        """The first call that a peer has begun otherwise than this rank, None if there is none so far."""
        compared = max(self._compared, self._begun - _KEPT)
        while compared < self._begun:
            number = compared + 1
            place = number % _KEPT
            mine = self._own[place]
            behind = False
            for words in self._peers:
                word = words[place]
                if word != mine:
                    ahead = ((word >> _WHICH_BITS) - number) % _NUMBERS
                    if ahead == 0:
                        return self._at(number)
                    if ahead >= _NUMBERS // 2:
                        behind = True
            if behind:
                return None  # later
            self._compared = compared = number
        return None

    def close(self) -> list[int]:
        """Write down that this rank begins no more calls. Returns the peers that have begun one more already."""
        number = self._begun + 1
        place = number % _KEPT
        self._own[place] = number % _NUMBERS << _WHICH_BITS | _CLOSED
        ahead = [((words[place] >> _WHICH_BITS) - number) % _NUMBERS for words in self._words]
        return [rank for rank, calls in enumerate(ahead) if rank != self._rank and calls < _NUMBERS // 2]

    def restart(self) -> None:
        """Count from 0 again: while no rank begins a call."""
        self._begun = self._compared = 0
        for place in range(_KEPT):
            self._own[place] = 0

    def _at(self, number: int) -> Difference:
        words = [words[number % _KEPT] for words in self._words]
        mask, begun = (1 << _WHICH_BITS) - 1, number % _NUMBERS
        return Difference(number, [w & mask if w >> _WHICH_BITS == begun else None for w in words])
