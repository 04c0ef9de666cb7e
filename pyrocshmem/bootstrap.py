"""Groups of ranks that can vote: each brings a call by name and a few bytes, and hears of all bytes or of any failure.

    group = as_group(None)       # or a ProcessGroup, a 1-D DeviceMesh, a ThreadGroup
    replies = group.exchange(b"...", "what this call is")
    group.abort("the reason")    # the others' pending exchange raises PeerAborted with it

Protocol, over a key-value store that all ranks see (torch.distributed's, or a dictionary for threads): in
round n each rank sets `<channel>/<n>/<rank>` to the call's name and payload, then polls until every rank's
key is there. Its key of round n - 2 goes at the start of round n: by then all have posted round n - 1, hence
have read round n - 2. Polling, rather than a collective of NCCL or gloo, lets the missing ranks be named and
an abort be seen.

Nothing here initialises torch.distributed.
"""

import json
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from pyrocshmem.boards import Board, MemoryBoard, StoreBoard
from pyrocshmem.budgets import init_seconds
from pyrocshmem.errors import CallMismatch, InitTimeout, PeerAborted, ShmemError

_FIRST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.01
_LOOK_FOR_ABORT_S = 0.05
_GAVE_UP = 0xFFFFFFFF  # instead of the length of a call

_live_groups: "weakref.WeakSet[Group]" = weakref.WeakSet()


class Group:
    """Ranks 0 .. `world_size` - 1 that exchange bytes in rounds. Made by `as_group`.

    Attributes: `rank`, `world_size`, `name`, `global_ranks` (of each member, in the default group), `rounds` (begun by
    this rank). A group serves one thread at a time; `channel` gives independent ones.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        world_size: int,
        name: str,
        global_ranks: Sequence[int] | None = None,
        parent: "Group | None" = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of a group of {world_size}, allowed are 0..{world_size - 1}")
        self.rank, self.world_size, self.name = rank, world_size, name
        self.global_ranks = tuple(global_ranks if global_ranks is not None else range(world_size))
        self._board = board
        self._parent = parent
        self.rounds = 0
        self.heap: Any = None  # of `heap_for`, which lives as long as the group
        self._channels: Counter[str] = Counter()
        self._failed: ShmemError | None = None
        self._lock = threading.Lock()
        _live_groups.add(self)

    def __repr__(self) -> str:
        return f"Group({self.name!r}, rank {self.rank} of {self.world_size})"

    def channel(self, label: str) -> "Group":
        """A group of the same ranks with rounds of its own. All ranks make theirs in the same order for a
        label."""
        number = self._channels[label]
        self._channels[label] += 1
        name = f"{self.name}/{label}{number}"
        return Group(self._board, self.rank, self.world_size, name, self.global_ranks, self)

    def subgroup(self, ranks: Sequence[int]) -> "Group":
        """A group of some of this one's ranks, for a new heap of the survivors of a fault: only they make the call.

        What was or will be aborted here doesn't concern it. `ValueError` when `ranks` are not different ranks of this
        group, or this one isn't among them.
        """
        members = sorted(ranks)
        if len(set(members)) < len(members) or not set(members) <= set(range(self.world_size)):
            raise ValueError(f"ranks {list(ranks)}, allowed are different ones of 0..{self.world_size - 1}")
        if self.rank not in members:
            raise ValueError(
                f"rank {self.rank} is not one of the ranks {members}; only they may make the group"
            )
        label = "of" + "-".join(map(str, members))
        name = f"{self.name}/{label}.{self._channels[label]}"
        self._channels[label] += 1
        global_ranks = [self.global_ranks[member] for member in members]
        return Group(self._board, members.index(self.rank), len(members), name, global_ranks)

    def exchange(self, payload: bytes, what: str, timeout: float | None = None) -> list[bytes]:
        """Give `payload` to every rank and return all ranks' payloads, in rank order.

        Args:
            payload: any bytes, of any length.
            what: the call in words; ranks that bring different ones all raise `CallMismatch`.
            timeout: seconds, `init_seconds()` when None.

        Raises:
            InitTimeout: naming the ranks that did not come; the group is unusable afterwards.
            PeerAborted: a rank called `abort`, or has left.
            CallMismatch: the ranks' `what` differ; the group stays usable.
        """
        with self._lock:
            if self._failed is not None:
                raise self._failed
            try:
                messages = self._run_round(_pack(what, payload), what, timeout)
            except ShmemError as error:
                self._failed = error
                raise
            except (RuntimeError, ValueError) as error:  # what a torch store raises when its host has gone
                self._failed = ShmemError(
                    f"{what}: the store of {self.name} is gone ({error}); its host process ended"
                )
                raise self._failed from error
        calls, payloads = zip(*map(_unpack, messages), strict=True)
        if len(set(calls)) > 1:
            raise CallMismatch(calls)
        return list(payloads)

    def barrier(self, what: str = "barrier", timeout: float | None = None) -> None:
        """Return once every rank has come here. Errors as `exchange`."""
        self.exchange(b"", what, timeout)

    def abort(self, message: str) -> None:
        """Tell the others that this rank gives up: their pending or next exchange raises `PeerAborted` at
        once."""
        if self._failed is None:
            self._failed = PeerAborted(self.rank, self.rank, message)
        if self._read("abort") is None:  # the first reason is the cause, later ones its consequences
            self._board.set(self._key("abort"), json.dumps([self.rank, message]).encode())

    def abort_record(self) -> tuple[int, str] | None:
        """(rank, message) of the first abort here, or where this is a channel of, or None."""
        if (record := self._read("abort")) is not None:
            rank, message = json.loads(record)
            return rank, message
        return self._parent.abort_record() if self._parent is not None else None

    def leave(self, message: str) -> None:
        """Say that this rank makes no more exchanges here, nor on channels of this group; a peer that waits for one
        raises `PeerAborted`."""
        self._board.set(self._key(f"left/{self.rank}"), message.encode())

    def wait_until_all_left(self, timeout: float) -> bool:
        """Whether every rank has called `leave` within `timeout` seconds."""
        keys = [self._key(f"left/{peer}") for peer in range(self.world_size)]
        deadline = time.monotonic() + timeout
        while self._board.get_all(keys) is None:
            if time.monotonic() >= deadline:
                return False
            self._board.pause(_LONGEST_PAUSE_S)
        return True

    def _key(self, suffix: str) -> str:
        return f"{self.name}/{suffix}"

    def _read(self, suffix: str) -> bytes | None:
        return self._value(self._key(suffix))

    def _value(self, key: str) -> bytes | None:
        values = self._board.get_all([key])
        return None if values is None else values[0]

    def _run_round(self, message: bytes, what: str, timeout: float | None) -> list[bytes]:
        seconds = init_seconds() if timeout is None else timeout
        number, self.rounds = self.rounds, self.rounds + 1
        keys = [self._key(f"{number}/{peer}") for peer in range(self.world_size)]
        if number >= 2:
            self._board.delete(self._key(f"{number - 2}/{self.rank}"))
        self._board.set(keys[self.rank], message)
        start = time.monotonic()
        look_for_abort = start + _FIRST_PAUSE_S
        pause = _FIRST_PAUSE_S
        while (messages := self._board.get_all(keys)) is None:
            now = time.monotonic()
            if now >= look_for_abort:
                self._raise_if_given_up(keys)
                self._give_up_with_others(keys, [self._value(key) for key in keys], what, now - start)
                look_for_abort = now + _LOOK_FOR_ABORT_S
            if now - start >= seconds:
                missing = [peer for peer, key in enumerate(keys) if self._value(key) is None]
                self._give_up(keys[self.rank], InitTimeout(missing, what, now - start, self.world_size))
            self._board.pause(min(pause, max(0.0, start + seconds - now)))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        self._give_up_with_others(keys, messages, what, time.monotonic() - start)
        return messages

    def _give_up(self, key: str, fault: InitTimeout) -> NoReturn:
        # Marked, so that a rank that comes later doesn't take this call for a live one; not deleted, so that one that
        # gives up a moment later doesn't take this rank for missing.
        self._board.set(key, _pack_given_up(fault.missing))
        raise fault

    def _give_up_with_others(
        self, keys: Sequence[str], messages: Sequence[bytes | None], what: str, waited_s: float
    ) -> None:
        """When peers gave up in this round, do so too: they waited for this rank, or for others that are missing."""
        given_up = {
            peer: missing for peer, m in enumerate(messages) if (missing := _given_up_for(m)) is not None
        }
        waited_for_me = [peer for peer, missing in given_up.items() if self.rank in missing]
        if waited_for_me:
            reason = "it had waited in vain and given up"
            fault = InitTimeout(waited_for_me, what, waited_s, self.world_size, reason)
            self._give_up(keys[self.rank], fault)
        for missing in given_up.values():
            self._give_up(keys[self.rank], InitTimeout(missing, what, waited_s, self.world_size))

    def _raise_if_given_up(self, keys: Sequence[str]) -> None:
        self._raise_if_aborted()
        for peer, key in enumerate(keys):
            # Looked at in this order: a rank that posts and then leaves has taken part.
            message = self._farewell_of(peer)
            if message is not None and self._value(key) is None:
                self._raise_if_aborted()  # a rank that aborts leaves next: its reason tells more
                raise PeerAborted(self.rank, peer, message.decode())

    def _farewell_of(self, peer: int) -> bytes | None:
        found = self._read(f"left/{peer}")
        return self._parent._farewell_of(peer) if found is None and self._parent is not None else found

    def _raise_if_aborted(self) -> None:
        if (record := self.abort_record()) is not None:
            raise PeerAborted(self.rank, *record)


def _pack(what: str, payload: bytes) -> bytes:
    name = what.encode()
    return len(name).to_bytes(4, "little") + name + payload


def _pack_given_up(missing: list[int]) -> bytes:
    return _GAVE_UP.to_bytes(4, "little") + json.dumps(missing).encode()


def _given_up_for(message: bytes | None) -> list[int] | None:
    """The ranks for which a peer had waited when it left this message; None if the message is a call."""
    if message is None or int.from_bytes(message[:4], "little") != _GAVE_UP:
        return None
    missing: list[int] = json.loads(message[4:])
    return missing


def _unpack(message: bytes) -> tuple[str, bytes]:
    end = 4 + int.from_bytes(message[:4], "little")
    if end > len(message):
        raise ShmemError(
            f"a peer's message of {len(message)} bytes announces a call of {end - 4}: it is damaged"
        )
    return message[4:end].decode(), message[end:]


class ThreadGroup(Group):
    """A group whose ranks are threads of this process."""

    @classmethod
    def create(cls, num_ranks: int) -> "list[ThreadGroup]":
        """One group object for each of `num_ranks` threads."""
        if num_ranks < 1:
            raise ValueError(f"{num_ranks} thread ranks, allowed are 1 or more")
        board = MemoryBoard()
        return [cls(board, rank, num_ranks, "threads") for rank in range(num_ranks)]


_of_process_group: "weakref.WeakKeyDictionary[Any, Group]" = weakref.WeakKeyDictionary()
_names_used: Counter[str] = Counter()
_solo: Group | None = None
_solo_lock = threading.Lock()


def as_group(group: Any = None) -> Group:
    """The `Group` of what torch calls one: the same object every time for the same ranks.

    Args:
        group: None (the default process group; this process alone where it never had one, nor has peers), a
            `torch.distributed.ProcessGroup`, a 1-D `DeviceMesh`, or a `Group`, which is returned as it is.

    Raises `TypeError` for anything else, `ValueError` for a mesh of several dimensions or a group without this rank,
    `RuntimeError` for None where there should be a process group: `WORLD_SIZE` is 2 or more, or there was one before.
    """
    if isinstance(group, Group):
        return group
    if group is None:
        return _from_process_group(dist.group.WORLD) if dist.is_initialized() else _alone()
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or tuple(range(group.ndim))
            raise ValueError(
                f"a DeviceMesh of {group.ndim} dimensions; give one of them, as in mesh[{names[0]!r}]"
            )
        return _from_process_group(group.get_group())
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the group it was given; only members may use it")
    if isinstance(group, dist.ProcessGroup):
        return _from_process_group(group)
    raise TypeError(
        f"group is a {type(group).__name__}, allowed: None, ProcessGroup, 1-D DeviceMesh, Heap, "
        "Group, ThreadGroup"
    )


def abort_all(message: str) -> None:
    """`abort` every live group of this process: for a rank that is about to end with an exception."""
    for group in list(_live_groups):
        try:
            group.abort(message)
        except (RuntimeError, ValueError):  # this group's store is gone; the others still want to know
            continue


def _alone() -> Group:
    """This process as a group of one. `RuntimeError` where it has peers: what is theirs would be missing."""
    global _solo
    if (why := _missing_process_group()) is not None:
        raise RuntimeError(
            f"{why}, and each rank would compute alone. Call pyrocshmem.from_torchrun() or "
            "torch.distributed.init_process_group() before; group=pyrocshmem.ThreadGroup.create(1)[0] is for one rank "
            "that is meant to be alone"
        )
    with _solo_lock:
        if _solo is None:
            _solo = Group(MemoryBoard(), 0, 1, "alone")
        return _solo


def _missing_process_group() -> str | None:
    """Why there should be a default process group, which there isn't; None where this process is alone."""
    try:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:  # no launcher has set it
        world_size = 1
    if world_size > 1:
        return f"WORLD_SIZE is {world_size}, but this process has no process group"
    # torch keeps the name of the last one's backend for good, and has no public trace of it; ours are those seen here.
    if _names_used or getattr(dist.distributed_c10d, "_backend", None) is not None:
        return "the process group of this process was destroyed"
    return None


def _from_process_group(process_group: Any) -> Group:
    if (known := _of_process_group.get(process_group)) is not None:
        return known
    ranks = dist.get_process_group_ranks(process_group)
    label = f"pyrocshmem/{process_group.group_name}/{'-'.join(map(str, ranks))}"
    # A process group made again under an old name, over the same store, must not read the old one's keys.
    name = f"{label}.{_names_used[label]}"
    _names_used[label] += 1
    board = StoreBoard(process_group.get_group_store())
    made = Group(board, dist.get_rank(process_group), len(ranks), name, ranks)
    _of_process_group[process_group] = made
    weakref.finalize(process_group, _end, made).atexit = False  # there `endings` closes all heaps
    return made


def _end(group: Group) -> None:
    """Its process group is destroyed, and nobody holds that: nor can anybody ask for its heap."""
    if group.heap is not None:
        group.heap.close()
        group.heap = None
