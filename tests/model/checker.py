"""A small explicit-state checker: every interleaving of the threads of a few ranks, breadth first.

    found = explore(model, may_time_out=True)       # None, or the shortest way into a state that must not be

A model is, for every thread, the list of its steps; the protocols in `tests.model.protocols` are built of them. Memory
is one byte a word. What a step does is one transition; nothing else is atomic. Words that ranks wait for hold epochs,
numbers modulo `EPOCHS`; cells hold the number of the call whose data they are, or GARBAGE.

What must not be: a rank that calls a call done though a thread of it read the data of another one; a rank that waits
its budget out twice; a flag more than two calls ahead of who waits for it; a state that nobody leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

EPOCHS, WINDOW, FURTHEST = 8, 4, 2
GARBAGE = 255


class Step(NamedTuple):
    """One step of a thread.

    put: `value` (a call) into the cells of `places`. raise: the words of `places` to epoch `value`. wait: until the
    words of `places` have reached epoch `value`; the next `skips` steps are left out when it gives up. take: until the
    cells of `places`, which are 0 while empty, hold anything; it must be call `value`'s. read: the cells
    of `places` must be those of call `value`. launch: all threads of the rank have done call `value`, and its host
    looks at the record. A step that touches several places of peers is several steps in a model.
    """

    kind: str
    places: tuple[int, ...]
    value: int
    skips: int = 0


@dataclass
class Model:
    """Threads as (rank, steps), and the words of memory, by name. guards: those that are left in."""

    num_ranks: int
    guards: frozenset[str]
    threads: list[tuple[int, list[Step]]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    initial: list[int] = field(default_factory=list)

    def word(self, name: str, value: int = 0) -> int:
        """The place called `name`, which holds `value` at first."""
        if name not in self.names:
            self.names[name] = len(self.initial)
            self.initial.append(value)
        return self.names[name]

    def add_thread(self, rank: int, steps: list[Step]) -> None:
        self.threads.append((rank, steps))


class Counterexample(NamedTuple):
    """What is wrong, and the steps that lead there."""

    wrong: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*(f"{number:3} {line}" for number, line in enumerate(self.trace, 1)), self.wrong])


class State(NamedTuple):
    """pcs: of each thread, its next step. memory: a byte a word. buffered: of each thread, its puts on their way."""

    pcs: tuple[int, ...]
    memory: bytes
    buffered: tuple[tuple[tuple[int, int], ...], ...]


class _Wrong(Exception): ...


class Checker:
    """The transitions of a model. crash: a rank that may die at any moment, None for none."""

    def __init__(self, model: Model, may_time_out: bool, crash: int | None) -> None:
        self.model, self.guards = model, model.guards
        self.may_time_out, self.crash = may_time_out, crash
        ranks = range(model.num_ranks)
        self.abort = [model.word(f"rank {r}: abort word") for r in ranks]
        self.failed = [model.word(f"rank {r}: record") for r in ranks]
        self.timeouts = [model.word(f"rank {r}: budgets waited out") for r in ranks]
        self.dead = [model.word(f"rank {r}: dead") for r in ranks]
        self.of_rank = [[t for t, (rank, _) in enumerate(model.threads) if rank == r] for r in ranks]
        self.poison = [
            model.word(f"rank {r}: read wrong data, thread {t}") for t, (r, _) in enumerate(model.threads)
        ]
        self.label = {place: name for name, place in model.names.items()}

    def finished(self, state: State) -> bool:
        return all(
            pc >= len(steps) or state.memory[self.dead[rank]]
            for pc, (rank, steps) in zip(state.pcs, self.model.threads, strict=True)
        )

    def following(self, state: State) -> Iterator[tuple[str, State]]:
        """(what happens, the state after it); raises _Wrong with the last line of a counterexample."""
        for thread, (rank, steps) in enumerate(self.model.threads):
            if state.memory[self.dead[rank]]:
                continue
            for number, (place, value) in enumerate(state.buffered[thread]):
                rest = state.buffered[thread][:number] + state.buffered[thread][number + 1 :]
                text = f"rank {rank}: the write of call {value} arrives in {self.label[place]}"
                yield text, self._with(state, thread, 0, {place: value}, rest)
            if state.pcs[thread] < len(steps):
                yield from self._step(state, thread, rank, steps[state.pcs[thread]])
        if self.crash is not None and not state.memory[self.dead[self.crash]]:
            yield f"rank {self.crash}: dies", self._with(state, 0, 0, {self.dead[self.crash]: 1})

    def _step(self, state: State, thread: int, rank: int, step: Step) -> Iterator[tuple[str, State]]:
        memory, kind, value = state.memory, step.kind, step.value
        names = ", ".join(self.label[place] for place in step.places)
        if kind == "put":
            data = GARBAGE if memory[self.poison[thread]] else value
            if "settle" in self.guards:
                yield (
                    f"rank {rank}: writes call {data} to {names}",
                    self._with(state, thread, 1, dict.fromkeys(step.places, data)),
                )
            else:
                waiting = state.buffered[thread] + tuple((place, data) for place in step.places)
                yield f"rank {rank}: writes to {names}", self._with(state, thread, 1, {}, waiting)
        elif kind == "raise":
            yield (
                f"rank {rank}: raises {names} to {value}",
                self._with(state, thread, 1, dict.fromkeys(step.places, value)),
            )
        elif kind == "read":
            bad = [memory[place] for place in step.places if memory[place] != value]
            text = f"rank {rank}: reads {names}, due is call {value}" + (f", FINDS {bad}" if bad else "")
            yield text, self._with(state, thread, 1, {self.poison[thread]: 1} if bad else {})
        elif kind in {"wait", "take"}:
            yield from self._wait(state, thread, rank, step, names)
        elif thread == self.of_rank[rank][0]:
            yield from self._launch(state, rank, value)

    def _launch(self, state: State, rank: int, call: int) -> Iterator[tuple[str, State]]:
        """The last thread to come ends the call: all raise, or all go on."""
        memory, threads = state.memory, self.of_rank[rank]
        nexts = [self.model.threads[each][1][state.pcs[each] :][:1] for each in threads]
        if any(not step or step[0].kind != "launch" for step in nexts):
            return
        told = "end" in self.guards and memory[self.abort[rank]]
        raises = bool(told or memory[self.failed[rank]])
        if not raises and any(memory[self.poison[each]] for each in threads):
            raise _Wrong(f"rank {rank} calls call {call} done, with wrong data")
        pcs = list(state.pcs)
        for each in threads:
            pcs[each] = len(self.model.threads[each][1]) if raises else pcs[each] + 1
        text = f"rank {rank}: call {call} {'raises' if raises else 'is done'}"
        yield text, state._replace(pcs=tuple(pcs))

    def _wait(
        self, state: State, thread: int, rank: int, step: Step, names: str
    ) -> Iterator[tuple[str, State]]:
        memory = state.memory
        held = [memory[place] for place in step.places]
        if step.kind == "take" and all(held):
            changes = {self.poison[thread]: 1} if set(held) != {step.value} else {}
            yield f"rank {rank}: takes {held} from {names}", self._with(state, thread, 1, changes)
            return
        if step.kind == "wait" and all(self._up(flag, step.value) for flag in held):
            if "epoch" in self.guards:
                furthest = max(((memory[p] - step.value) % EPOCHS for p in step.places), default=0)
                if furthest > FURTHEST:
                    raise _Wrong(
                        f"rank {rank} waits for {step.value} and finds a flag {furthest} calls ahead"
                    )
            yield f"rank {rank}: finds {names} at {step.value}", self._with(state, thread, 1, {})
            return
        told = memory[self.abort[rank]]
        if told and "abort" in self.guards:
            yield (
                f"rank {rank}: is told to stop",
                self._with(state, thread, 1 + step.skips, {self.failed[rank]: 1}),
            )
        elif self.may_time_out:
            if memory[self.timeouts[rank]]:
                raise _Wrong(f"rank {rank} waits its budget out a second time, for {names}")
            text = f"rank {rank}: waits its budget out for {names}, tells all"
            changes = dict.fromkeys(self.abort, 1) if "tell" in self.guards else {self.abort[rank]: 1}
            changes |= {self.timeouts[rank]: 1, self.failed[rank]: 1}
            yield text, self._with(state, thread, 1 + step.skips, changes)

    def _up(self, flag: int, epoch: int) -> bool:
        if "epoch" not in self.guards:
            return flag != self.model.initial[self.model.names["first epoch"]]
        if "wrap" not in self.guards:
            return flag >= epoch
        return (flag - epoch) % EPOCHS < WINDOW

    def _with(
        self,
        state: State,
        thread: int,
        steps: int,
        changes: dict[int, int],
        buffered: tuple[tuple[int, int], ...] | None = None,
    ) -> State:
        memory = state.memory
        if changes:
            changed = bytearray(memory)
            for place, value in changes.items():
                changed[place] = value
            memory = bytes(changed)
        pcs = state.pcs
        if steps:
            pcs = (*pcs[:thread], pcs[thread] + steps, *pcs[thread + 1 :])
        every = state.buffered
        if buffered is not None:
            every = (*every[:thread], buffered, *every[thread + 1 :])
        return State(pcs, memory, every)


def way_to(state: Any, came_from: Mapping[Any, tuple[Any, str] | None]) -> tuple[str, ...]:
    """What happened on the way from the first state, which came from None, to `state`."""
    lines = []
    while (step := came_from[state]) is not None:
        state, text = step
        lines.append(text)
    return tuple(reversed(lines))


def explore(
    model: Model, may_time_out: bool = False, crash: int | None = None
) -> tuple[Counterexample | None, int]:
    """(the shortest counterexample or None, number of states)."""
    checker = Checker(model, may_time_out, crash)
    threads = len(model.threads)
    start = State((0,) * threads, bytes(model.initial), ((),) * threads)
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    pending = deque([start])
    while pending:
        state = pending.popleft()
        try:
            ways = list(checker.following(state))
            if not ways and not checker.finished(state):
                raise _Wrong("nobody can go on")
        except _Wrong as wrong:
            return Counterexample(str(wrong), way_to(state, came_from)), len(came_from)
        for text, after in ways:
            if after not in came_from:
                came_from[after] = (state, text)
                pending.append(after)
    return None, len(came_from)
