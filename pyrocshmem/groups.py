"""Groups of ranks that can vote: each brings a call by name and a few bytes, and hears of all bytes or of any failure.

    group = as_group(None)       # or a ProcessGroup, a 1-D DeviceMesh, a ThreadGroup
    replies = group.exchange(b"...", "what this call is")
    group.abort("the reason")    # the others' pending exchange raises PeerAborted with it

Protocol, over a key-value store that all ranks see (torch.distributed's, or a dictionary for threads): in
round n each rank sets `<channel>/<n>/<rank>` to the call's name and payload, then polls until every rank's
key is there. Its key of round n - 2 goes at the start of round n: by then all have posted round n - 1, hence
have read round n - 2. Polling, rather than a collective of NCCL or gloo, lets the missing ranks be named and
an abort be seen.

A key is written once, by whoever finds it absent. A rank that would leave a round (its time is up, a peer gave up or
has left) first writes the reason into the key of the lowest missing rank: a tombstone. If a message has just come
there, it looks again. So the keys alone decide: with the messages of all ranks each has the result, also one that has
heard of an abort since; with a tombstone, of which there is never a second, no rank has it, and all raise for its
reason. `tests/model/test_votes.py` tries every interleaving.

Nothing here initialises torch.distributed.
"""

import contextlib
import json
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from pyrocshmem import secret, signed_records, status
from pyrocshmem.errors import CallMismatch, InitTimeout, PeerAborted, ShmemError
from pyrocshmem.places import own_place
from pyrocshmem.signed_records import Reason
from pyrocshmem.stores import Board, MemoryBoard, store_board
from pyrocshmem.timeouts import init_seconds

# Of the time waited so far: who oversleeps keeps its peers waiting in the next round, who then oversleep by more.
_PAUSE_SHARE = 0.25
_SHORTEST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.01
# A look for aborts reads several keys, one after another: not before a vote takes longer than most.
_FIRST_LOOK_S = 0.003
_LOOK_FOR_ABORT_S = 0.05

_live_groups: "weakref.WeakSet[Group]" = weakref.WeakSet()


class _Vote(NamedTuple):
    """The keys of all ranks' messages, the call in words, when the wait began."""

    keys: list[str]
    what: str
    start: float


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
        process_keys: Sequence[str] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of a group of {world_size}, allowed are 0..{world_size - 1}")
        self.rank, self.world_size, self.name = rank, world_size, name
        self.global_ranks = tuple(global_ranks if global_ranks is not None else range(world_size))
        self._board = board
        self._parent = parent
        self._process_keys = process_keys or [self._key(f"process/{peer}") for peer in range(world_size)]
        self.rounds = 0
        self.heap: Any = None  # of `heap_for`, which lives as long as the group
        self.hosts: Any = None  # of `hosts_for`, in its place where the ranks are on several hosts
        self._host_numbers: tuple[int, ...] | None = None
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
        return Group(
            self._board, self.rank, self.world_size, name, self.global_ranks, self, self._process_keys
        )

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
        process_keys = [self._process_keys[member] for member in members]
        return Group(
            self._board, members.index(self.rank), len(members), name, global_ranks, None, process_keys
        )

    def host_numbers(self) -> tuple[int, ...]:
        """The number of each rank's host, from 0 on in the order of the ranks: (0, 0, 1, 1) of two hosts of two.
        Collective at its first use, a vote, and known from then on. Raises as `exchange`."""
        if self._host_numbers is None:
            places = [b""]
            if self.world_size > 1:
                places = self.channel("hosts").exchange(own_place(), "which ranks share a host")
            order = list(dict.fromkeys(places))
            self._host_numbers = tuple(order.index(place) for place in places)
        return self._host_numbers

    def exchange(self, payload: bytes, what: str, timeout: float | None = None) -> list[bytes]:
        """Give `payload` to every rank and return all ranks' payloads, in rank order.

        Args:
            payload: any bytes, of any length.
            what: the call in words; ranks that bring different ones all raise `CallMismatch`.
            timeout: seconds, `init_seconds()` when None.

        Either all ranks that make the call have the payloads, or none has. The group is unusable after any error but
        `CallMismatch`.

        Raises:
            InitTimeout: naming the ranks that did not come.
            PeerAborted: a rank called `abort`, or has left.
            CallMismatch: the ranks' `what` differ.
            ShmemError: the store is gone, or holds what its ranks did not write.
        """
        with self._lock:
            if self._failed is not None:
                raise self._failed
            try:
                messages = self._run_round(payload, what, timeout)
            except ShmemError as error:
                self._failed = error
                raise
            except (RuntimeError, ValueError) as error:  # what a torch store raises when its host has gone
                self._failed = ShmemError(
                    f"{what}: the store of {self.name} is gone ({error}); its host process ended"
                )
                raise self._failed from error
        calls, payloads = zip(*messages, strict=True)
        if len(set(calls)) > 1:
            raise CallMismatch(calls)
        return list(payloads)

    def barrier(self, what: str = "barrier", timeout: float | None = None) -> None:
        """Return once every rank has come here. Errors as `exchange`."""
        self.exchange(b"", what, timeout)

    def introduce(self) -> None:
        """Say which process this rank is, for peers that will wait for it in vain."""
        self._board.set(self._process_keys[self.rank], json.dumps(status.own_process()).encode())

    def abort(self, message: str) -> None:
        """Tell the others that this rank gives up: their pending or next exchange raises `PeerAborted` at once, unless
        this rank has taken part in it and the others do."""
        if self._failed is None:
            self._failed = PeerAborted(self.rank, self.rank, message)
        # The first reason is the cause, later ones its consequences.
        self._board.set_once(self._key("abort"), Reason(peer=self.rank, text=message).pack())

    def abort_record(self) -> tuple[int, str] | None:
        """(rank, message) of the first abort here, or where this is a channel of, or None."""
        if (reason := self._reason("abort")) is not None and reason.peer is not None:
            return reason.peer, reason.text
        return self._parent.abort_record() if self._parent is not None else None

    def leave(self, message: str) -> None:
        """Say that this rank makes no more exchanges here, nor on channels of this group; a peer that waits for one
        raises `PeerAborted`."""
        self._board.set(self._key(f"left/{self.rank}"), Reason(peer=self.rank, text=message).pack())

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

    def _value(self, key: str) -> bytes | None:
        values = self._board.get_all([key])
        return None if values is None else values[0]

    def _reason(self, suffix: str) -> Reason | None:
        key = self._key(suffix)
        record = self._value(key)
        return None if record is None else signed_records.unpack_reason(key, record, self.world_size)

    def _run_round(self, payload: bytes, what: str, timeout: float | None) -> list[tuple[str, bytes]]:
        """All ranks' (call, payload)."""
        seconds = init_seconds() if timeout is None else timeout
        number, self.rounds = self.rounds, self.rounds + 1
        keys = [self._key(f"{number}/{peer}") for peer in range(self.world_size)]
        if number >= 2:
            self._board.delete(self._key(f"{number - 2}/{self.rank}"))
        message = signed_records.pack_message(what, payload)
        found = self._board.set_once(keys[self.rank], message)
        start = time.monotonic()
        vote = _Vote(keys, what, start)
        if found != message:
            self._message(vote, self.rank, found)  # raises, where it is a tombstone
            self._refuse_place(keys[self.rank])
        look_for_reason = start + _FIRST_LOOK_S
        while (values := self._board.get_all(keys)) is None:
            now = time.monotonic()
            late = now - start >= seconds
            if late or now >= look_for_reason:
                self._leave_in_vain(vote, late)
                look_for_reason = now + _LOOK_FOR_ABORT_S
            pause = min(max(_SHORTEST_PAUSE_S, _PAUSE_SHARE * (now - start)), _LONGEST_PAUSE_S)
            self._board.pause(min(pause, max(0.0, start + seconds - now)))
        return [self._message(vote, peer, value) for peer, value in enumerate(values)]

    def _message(self, vote: _Vote, peer: int, record: bytes) -> tuple[str, bytes]:
        """(call, payload) of `peer`; raises what it says if there is a tombstone in its place."""
        found = signed_records.unpack(vote.keys[peer], record, self.world_size)
        if isinstance(found, Reason):
            raise self._error(vote, found)
        return found

    def _refuse_place(self, key: str) -> None:
        """For this rank nothing of the round is true, so the peers must not go on either."""
        fault = ShmemError(
            f"{signed_records.named(key)} was there before that rank came: somebody else wrote to the store, or two "
            "processes are the same rank"
        )
        self.abort(str(fault))
        raise fault

    def _leave_in_vain(self, vote: _Vote, late: bool) -> None:
        """Raise if there is a reason to leave the round: after seeing to it that no rank ever has its result."""
        missing = []
        for peer, key in enumerate(vote.keys):
            record = self._value(key)
            if record is None:
                missing.append(peer)
            else:
                self._message(vote, peer, record)
        if not missing:
            return
        try:
            reason = self._reason_to_leave(missing)
        except ShmemError as fault:  # a record that says why a peer gives up, but can't be read
            reason = Reason(text=str(fault))
        if reason is None and late:
            reason = Reason(tuple(missing))
        if reason is not None:
            first = missing[0]
            self._message(vote, first, self._board.set_once(vote.keys[first], reason.pack()))

    def _reason_to_leave(self, missing: Sequence[int]) -> Reason | None:
        # Looked for in this order: a rank that aborts leaves next, and its abort tells more.
        farewells = (farewell for peer in missing if (farewell := self._farewell_of(peer)) is not None)
        farewell = next(farewells, None)
        record = self.abort_record()
        return farewell if record is None else Reason((), *record)

    def _farewell_of(self, peer: int) -> Reason | None:
        found = self._reason(f"left/{peer}")
        return self._parent._farewell_of(peer) if found is None and self._parent is not None else found

    def _error(self, vote: _Vote, reason: Reason) -> ShmemError:
        """What a tombstone with this reason makes this rank raise."""
        if reason.peer is not None:
            return PeerAborted(self.rank, reason.peer, reason.text)
        if not reason.missing:
            return ShmemError(reason.text)
        waited_s = time.monotonic() - vote.start
        if self.rank in reason.missing:
            came = [peer for peer in range(self.world_size) if peer not in reason.missing]
            why = "it had waited in vain and given up"
            return InitTimeout(came, vote.what, waited_s, self.world_size, why)
        ended = {peer: words for peer in reason.missing if (words := self._end_of(peer))}
        return InitTimeout(reason.missing, vote.what, waited_s, self.world_size, ended=ended)

    def _end_of(self, peer: int) -> str:
        """That the process of `peer` has ended; "" where it hasn't, or nothing is known of it."""
        # The store may be gone, and the record anything: it makes a text fuller, no more.
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            if (record := self._value(self._process_keys[peer])) is not None:
                number, namespace = json.loads(record)
                return status.describe_end((int(number), int(namespace)))
        return ""


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
            `torch.distributed.ProcessGroup`, a 1-D `DeviceMesh`, or a 2-D one of hosts x ranks of a host (collective
            at its first use), or a `Group`, which is returned as it is.

    Raises `TypeError` for anything else, `ValueError` for another mesh or a group without this rank,
    `RuntimeError` for None where there should be a process group: `WORLD_SIZE` is 2 or more, or there was one before.
    """
    if isinstance(group, Group):
        return group
    if group is None:
        return _from_process_group(dist.group.WORLD) if dist.is_initialized() else _alone()
    if isinstance(group, dist.device_mesh.DeviceMesh):
        members = _from_process_group(of_mesh(group))
        if group.ndim == 2 and members.host_numbers() != tuple(
            i // group.shape[1] for i in range(group.size())
        ):
            raise _not_hosts(group)
        return members
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the group it was given; only members may use it")
    if isinstance(group, dist.ProcessGroup):
        return _from_process_group(group)
    raise TypeError(
        f"group is a {type(group).__name__}, allowed: None, ProcessGroup, 1-D DeviceMesh, Heap, "
        "Group, ThreadGroup"
    )


_of_ranks: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def of_mesh(mesh: Any) -> Any:
    """The process group of a 1-D mesh, or of all ranks of one of hosts x ranks of a host. ValueError for another."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = mesh.mesh.flatten().tolist()
    if mesh.ndim != 2 or ranks != sorted(ranks):
        raise _not_hosts(mesh)
    if ranks == dist.get_process_group_ranks(dist.group.WORLD):
        return dist.group.WORLD
    if mesh not in _of_ranks:
        _of_ranks[mesh] = new_process_group(ranks)
    return _of_ranks[mesh]


def new_process_group(ranks: list[int], timeout: timedelta | None = None, backend: str | None = None) -> Any:
    """A process group of these global ranks, who alone call."""
    world = dist.group.WORLD
    # Where the default group is bound to a device, NCCL's groups are split from its own: by all of its ranks.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
    finally:
        world.bound_device_id = bound


def _not_hosts(mesh: Any) -> ValueError:
    names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
    return ValueError(
        f"a DeviceMesh of {mesh.ndim} dimensions; give one of them, as in mesh[{names[0]!r}], unless it has a row for "
        "each host and that host's ranks in it, in ascending order"
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
    board = store_board(process_group.get_group_store(), secret.current())
    made = Group(board, dist.get_rank(process_group), len(ranks), name, ranks)
    made.introduce()
    _of_process_group[process_group] = made
    weakref.finalize(process_group, _end, made).atexit = False  # there `endings` closes all heaps
    return made


def _end(group: Group) -> None:
    """Its process group is destroyed, and nobody holds that: nor can anybody ask for its heap."""
    for formed in (group.heap, group.hosts):
        if formed is not None:
            formed.close()
    group.heap = group.hosts = None
