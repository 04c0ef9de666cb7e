"""Faults of the heap and of ops on it, as one small tree.

    ShmemError
    ├── HeapOutOfMemory   an allocation does not fit; nothing was allocated on any rank
    ├── PeerTimeout       a wait for a peer ran out
    ├── PeerAborted       a peer said that it gave up, with its reason
    ├── CallMismatch      ranks made different calls
    ├── InitTimeout       ranks were missing, or had no memory, when a group or heap formed
    └── WorkspaceBusy     a workspace is in use by another call

The caller's own mistakes are `ValueError` and `TypeError`, raised before anything starts. Every fault keeps
its facts as attributes and survives pickling, because ranks send theirs to the process that started them.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class ShmemError(RuntimeError):
    """Base of every fault of this library."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle as class(*args); ours take facts, not a message: rebuilt without __init__.
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(kind: type[ShmemError], args: tuple[Any, ...], facts: dict[str, Any]) -> ShmemError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class HeapOutOfMemory(ShmemError):
    """`requested` bytes do not fit: `free` bytes are left, `largest` of them in one piece. reason: why the heap can't
    grow, where it was to."""

    def __init__(
        self, requested: int, free: int, largest: int, rank: int | None = None, reason: str = ""
    ) -> None:
        self.requested, self.free, self.largest, self.rank = requested, free, largest, rank
        self.reason = reason
        where = "" if rank is None else f" on rank {rank}"
        why = f" ({reason})" if reason else ""
        form = "" if reason else ", or form the heap with more bytes (PYROCSHMEM_HEAP_BYTES)"
        super().__init__(
            f"the symmetric heap is out of memory{where}: {requested} bytes requested, {free} free, "
            f"{largest} the largest free block{why}; no rank allocated anything. "
            f"Let go of tensors, on all ranks (del, or heap.free){form}"
        )


class PeerTimeout(ShmemError):
    """`rank` waited in `op` for `peer`; the other facts tell for what, None where unknown.

    Attributes: op, rank, peer; `call`: the number of the call on its workspace, or of the vote on its heap, whose
    forming takes some; `tile`; `expected` and `seen`: what the flag should have held and held, of a vote the ranks that
    should have come and came; `waited_s`: seconds; `process`: what has become of the peer's process, in words.
    """

    def __init__(
        self,
        op: str,
        rank: int,
        peer: int,
        tile: int | None = None,
        expected: int | str | None = None,
        seen: int | str | None = None,
        waited_s: float | None = None,
        call: int | None = None,
        process: str = "",
    ) -> None:
        self.op, self.rank, self.peer, self.tile, self.call = op, rank, peer, tile, call
        self.expected, self.seen, self.waited_s, self.process = expected, seen, waited_s, process
        waited = "" if waited_s is None else f" {waited_s:.2f} s"
        facts = ", ".join(
            f"{name} {value}"
            for name, value in (("call", call), ("tile", tile), ("expected", expected), ("seen", seen))
            if value is not None
        )
        whom = "a program of its own" if peer == rank else f"rank {peer}"
        super().__init__(
            f"{op}: rank {rank} waited{waited} in vain for {whom}"
            + (f" ({facts})" if facts else "")
            + f". {self._next()}"
        )

    @classmethod
    def in_vote(cls, op: str, number: int, rank: int, late: "InitTimeout", process: str) -> "PeerTimeout":
        """Of the vote `number`, to which the ranks that `late` names did not come."""
        came = [peer for peer in range(late.world_size) if peer not in late.missing]
        expected, seen = f"all {late.world_size} ranks", _named(came)
        return cls(op, rank, late.missing[0], None, expected, seen, late.waited_s, number, process)

    def _next(self) -> str:
        """What to look at, and what then makes the ranks work again."""
        if self.peer == self.rank:
            return (
                "Look at this rank's kernels: one ended, or was never launched, before it announced its tile. "
                "heap.recover() on all ranks makes the heap work again"
            )
        if not self.process:
            return (
                f"Look at what rank {self.peer} was doing: it died, is stopped, is late, or made another call"
            )
        return f"Rank {self.peer}'s {self.process}"


class PeerAborted(ShmemError):
    """`peer` gave up, so `rank` did too. `message` is what the peer said."""

    def __init__(self, rank: int, peer: int, message: str) -> None:
        self.rank, self.peer, self.message = rank, peer, message
        super().__init__(f"rank {rank} stopped because rank {peer} gave up: {message}")


class CallMismatch(ShmemError):
    """Ranks made different calls; `calls[r]` is the call of rank r.

    number: None: they were about to plan it, and nothing was done on any rank. Otherwise it is the number of a call
    whose plans are there: some ranks may have launched it, what it gave is not valid, and the heap must recover.
    in_threads: whether several threads of this rank have planned calls on the heap, whose order is nobody's then.
    """

    def __init__(self, calls: Sequence[str], number: int | None = None, in_threads: bool = False) -> None:
        self.calls, self.number, self.in_threads = list(calls), number, in_threads
        listing = "".join(f"\n  rank {rank}: {call}" for rank, call in enumerate(self.calls))
        what = (
            "ranks made different calls, nothing was done"
            if number is None
            else f"ranks made different calls as number {number} of a workspace, what it gave on any rank is not valid "
            "(heap.recover() on all ranks makes the heap work again)"
        )
        threads = (
            "\nSeveral threads of this rank make new calls on the heap, in an order that is left to chance. Make each "
            "call once in one thread before (later ones need no order), or give each thread a heap of its own"
        )
        text = f"{what}; all must make the same ones in the same order:{listing}"
        super().__init__(text + threads if in_threads else text)


class InitTimeout(ShmemError):
    """A group or heap did not form: `missing` ranks did not arrive, or could not take part (`reason`).

    Attributes: missing, never empty; what: the call; waited_s: seconds; world_size; reason; ended: of each missing rank
    whose process is known to have ended, that in words.
    """

    def __init__(
        self,
        missing: Sequence[int],
        what: str,
        waited_s: float,
        world_size: int,
        reason: str = "",
        ended: Mapping[int, str] | None = None,
    ) -> None:
        self.missing, self.what, self.waited_s = list(missing), what, waited_s
        self.world_size, self.reason, self.ended = world_size, reason, dict(ended or {})
        named = _named(self.missing)
        text = f"{what}: {named} of {world_size} could not take part: {reason}"
        if not reason:
            text = (
                f"{what}: {named} of {world_size} did not arrive within {waited_s:.1f} s. "
                "Look at whether they started and reached this call (PYROCSHMEM_INIT_SECONDS sets the time)"
            )
            text += "".join(f". Rank {peer}'s {words}" for peer, words in self.ended.items())
        super().__init__(text)


class WorkspaceBusy(ShmemError):
    """A workspace is in use by a call of another thread; give each thread its own workspace."""


def describe(error: BaseException) -> str:
    """Its type and its text, for peers; the type alone where `str` of it raises, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
