"""Every interleaving of ranks that vote: not of a model of them, but of `Group` itself.

    found, states = explore(3, rounds=1, may_time_out=True)     # None, or the shortest way into what must not be

What a rank does next follows from what its store, its clock and its user have answered so far. So a rank is the list of
these answers; its code runs again from the start on them, until it asks for one more, and each answer that there can be
is a transition. A wait that has looked and seen nothing is where it was when it began: its answers since are forgotten.

Its user lets it vote, abort, leave or die, before each round and after the last. What must not be: a round that has a
result for one rank and an error for another; a time-out that names nobody; two tombstones in a round; a state from
which the ranks can't all come to an end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

from pyrocshmem import groups
from pyrocshmem.errors import InitTimeout, PeerAborted, ShmemError
from pyrocshmem.groups import Group
from pyrocshmem.signed_records import Reason, pack_message, unpack
from tests.model.checker import Counterexample, way_to

BUDGET_S, EARLY_S, LATE_S = 100.0, 1.0, 1000.0
NAME = "g"
BESIDE = "another thread aborts"


class _Asks(BaseException):
    """The code of a rank has come to what has no answer yet."""


class Answers:
    """The board, the clock and the user of a rank, who answer what they have answered before, then raise `_Asks`.

    loop: how many of them had been given when the wait last looked for all messages.
    """

    def __init__(self, history: tuple[Any, ...], atomic: bool) -> None:
        self.history, self.atomic = history, atomic
        self.given = self.loop = 0
        self.now, self.waits = 0.0, False

    def ask(self, *question: Any) -> Any:
        if self.given == len(self.history):
            raise _Asks(question)
        self.given += 1
        return self.history[self.given - 1]

    def set(self, key: str, value: bytes) -> None:
        self.ask("set", key, value)

    def set_once(self, key: str, value: bytes) -> bytes:
        if self.atomic:
            found: bytes = self.ask("set_once", key, value)
        else:
            found = (self.get_all([key]) or [value])[0]
            if found == value:
                self.set(key, value)
        return found

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        self.loop = self.given if len(keys) > 1 else self.loop
        found: tuple[bytes, ...] | None = self.ask("get_all", *keys)
        self.waits = found is None and len(keys) > 1
        return None if found is None else list(found)

    def delete(self, key: str) -> None:
        self.ask("delete", key)

    def pause(self, seconds: float) -> None:
        self.ask("pause")

    def monotonic(self) -> float:
        if self.waits:  # it has looked for all messages in vain, and asks whether its time is up
            self.waits = False
            self.now += self.ask("clock")
        return self.now


class Life(NamedTuple):
    """Of a rank: what it asks next, None when it has ended; how its rounds ended; its answers before it waited."""

    question: tuple[Any, ...] | None
    ends: tuple[str, ...]
    loop: int


class State(NamedTuple):
    store: frozenset[tuple[str, bytes]]
    histories: tuple[tuple[Any, ...], ...]


class LooksThenLeaves(Group):
    """The control: looks for messages, then for aborts; whose time is up writes so into its own key."""

    def _run_round(self, payload: bytes, what: str, timeout: float | None) -> list[tuple[str, bytes]]:
        keys = [self._key(f"{self.rounds}/{peer}") for peer in range(self.world_size)]
        self.rounds += 1
        self._board.set(keys[self.rank], pack_message(what, payload))
        start = groups.time.monotonic()
        while (values := self._board.get_all(keys)) is None:
            late = groups.time.monotonic() - start >= BUDGET_S
            if (record := self.abort_record()) is not None:
                raise PeerAborted(self.rank, *record)
            seen = [self._value(key) for key in keys]
            self._give_up_with_others(keys, seen)
            if late:
                self._give_up(keys, tuple(peer for peer, key in enumerate(keys) if self._value(key) is None))
            self._board.pause(0.0)
        return self._give_up_with_others(keys, values)

    def _give_up_with_others(
        self, keys: list[str], values: Sequence[bytes | None]
    ) -> list[tuple[str, bytes]]:
        found = [unpack(key, v, self.world_size) for key, v in zip(keys, values, strict=True) if v]
        for reason in found:
            if isinstance(reason, Reason):
                self._give_up(keys, reason.missing)
        return [message for message in found if not isinstance(message, Reason)]

    def _give_up(self, keys: list[str], missing: tuple[int, ...]) -> None:
        self._board.set(keys[self.rank], Reason(missing).pack())
        raise InitTimeout(missing, "call", BUDGET_S, self.world_size)


class _Votes:
    """The ranks of one exploration."""

    def __init__(
        self,
        num_ranks: int,
        rounds: int,
        ways: Sequence[str],
        may_time_out: bool,
        absent: int,
        kind: type[Group],
        atomic: bool,
    ) -> None:
        self.num_ranks, self.rounds = num_ranks, rounds
        self.ways = [way for way in ways if way != BESIDE]
        self.num_lives = num_ranks - absent
        self.ranks = [*range(self.num_lives), *([0] if BESIDE in ways else [])]  # of each thread
        self.times = (EARLY_S, LATE_S) if may_time_out else (EARLY_S,)
        self.kind, self.atomic = kind, atomic
        self.known: dict[tuple[int, tuple[Any, ...]], Life] = {}

    def life(self, thread: int, history: tuple[Any, ...]) -> Life:
        if (thread, history) not in self.known:
            answers, ends = Answers(history, self.atomic), []
            question = None
            with mock.patch.object(groups, "time", answers):
                try:
                    group = self.kind(answers, self.ranks[thread], self.num_ranks, NAME)
                    if thread < self.num_lives:
                        self._live(group, answers, ends)
                    else:
                        group.abort("another thread")
                except _Asks as asks:
                    (question,) = asks.args
            self.known[thread, history] = Life(question, tuple(ends), answers.loop)
        return self.known[thread, history]

    def _live(self, group: Group, answers: Answers, ends: list[str]) -> None:
        for number in range(self.rounds + 1):
            way = answers.ask("user", number)
            if way == "aborts":
                group.abort("tired")
            elif way == "leaves":
                group.leave("gone")
            if way != "votes":
                return
            try:
                replies = group.exchange(b"%d" % group.rank, "call", BUDGET_S)
                assert replies == [b"%d" % peer for peer in range(self.num_ranks)]
                ends.append("the result")
            except InitTimeout as error:
                ends.append("a time-out" if error.missing else "a time-out that names nobody")
                group.abort(str(error))  # as a heap does
                return
            except ShmemError:
                ends.append("an error")
                return

    def following(self, state: State) -> Iterator[tuple[str, State]]:
        store = dict(state.store)
        for thread, history in enumerate(state.histories):
            life = self.life(thread, history)
            if life.question is None:
                continue
            for answer, after in self._answers(life.question, store):
                grown = history[: life.loop] if life.question[0] == "pause" else (*history, answer)
                histories = (*state.histories[:thread], grown, *state.histories[thread + 1 :])
                text = f"rank {self.ranks[thread]}: {' '.join(map(str, life.question))} -> {answer}"
                for end in self.life(thread, grown).ends[len(life.ends) :]:
                    text += f"; the vote ends with {end}"
                yield text, State(frozenset(after.items()), histories)

    def _answers(
        self, question: tuple[Any, ...], store: dict[str, bytes]
    ) -> Iterator[tuple[Any, dict[str, bytes]]]:
        """(answer, store after it)."""
        kind, *args = question
        if kind == "user":
            last = args[0] == self.rounds
            yield from ((way, store) for way in self.ways if way != "votes" or not last)
            if last:
                yield "ends", store
        elif kind == "clock":
            yield from ((elapsed, store) for elapsed in self.times)
        elif kind == "get_all":
            yield tuple(store[key] for key in args) if all(key in store for key in args) else None, store
        elif kind == "set_once":
            yield store.get(*args), {args[0]: args[1]} | store
        elif kind == "set":
            yield None, store | {args[0]: args[1]}
        elif kind == "delete":
            yield None, {key: value for key, value in store.items() if key != args[0]}
        else:
            yield None, store

    def wrong(self, state: State) -> str:
        """What must not be; "" where all is well."""
        lives = [self.life(*each) for each in enumerate(state.histories)]
        for number in range(self.rounds):
            ends = {life.ends[number] for life in lives if len(life.ends) > number}
            if "the result" in ends and len(ends) > 1:
                return f"round {number} ends with {' and with '.join(sorted(ends))}"
            if "a time-out that names nobody" in ends:
                return f"round {number} ends with a time-out that names nobody"
            keys = {f"{NAME}/{number}/{rank}" for rank in range(self.num_ranks)}
            reasons = [value for key, value in state.store if key in keys and value.startswith(b"\xff" * 4)]
            if self.kind is not LooksThenLeaves and len(reasons) > 1:
                return f"round {number} has {len(reasons)} tombstones"
        return ""

    def finished(self, state: State) -> bool:
        return all(self.life(*each).question is None for each in enumerate(state.histories))


def explore(
    num_ranks: int,
    rounds: int,
    ways: Sequence[str] = ("votes", "aborts", "leaves"),
    may_time_out: bool = False,
    absent: int = 0,
    kind: type[Group] = Group,
    atomic: bool = True,
) -> tuple[Counterexample | None, int]:
    """(the shortest counterexample or None, number of states).

    ways: what users let their ranks do; with BESIDE another thread of rank 0 aborts at any time. absent: how many
    ranks never come. kind: the group that is tried. atomic: whether the store sets a key once in one step, or by a
    look and a write.
    """
    votes = _Votes(num_ranks, rounds, ways, may_time_out, absent, kind, atomic)
    start = State(frozenset(), ((),) * len(votes.ranks))
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    before: dict[State, list[State]] = defaultdict(list)
    pending, ended = deque([start]), []
    while pending:
        state = pending.popleft()
        if wrong := votes.wrong(state):
            return Counterexample(wrong, way_to(state, came_from)), len(came_from)
        if votes.finished(state):
            ended.append(state)
        for text, after in votes.following(state):
            before[after].append(state)
            if after not in came_from:
                came_from[after] = (state, text)
                pending.append(after)
    can_end = set(ended)
    while ended:
        for state in before[ended.pop()]:
            if state not in can_end:
                can_end.add(state)
                ended.append(state)
    for state in came_from:
        if state not in can_end:
            return Counterexample("a rank waits for ever", way_to(state, came_from)), len(came_from)
    return None, len(came_from)
