"""The order in which copy engines send the partial rows of a sum (`stream_k.ops.rows`): what waits for what, on streams
that stand in for a GPU's."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from pyrocshmem.stream_k.ops import rows
from pyrocshmem.stream_k.ops.rows import RowsPlan

STEPS = 3

Command = tuple[str, int, int]


class Streams:
    """Commands of streams. before: of each command, those that are over when it starts. deaf: a stream that no fork
    reaches."""

    def __init__(self, deaf: int = -1) -> None:
        self.current, self.deaf = -1, deaf
        self.over: dict[int, frozenset[Command]] = {}
        self.before: dict[Command, frozenset[Command]] = {}

    def enqueue(self, command: Command) -> None:
        self.before[command] = self.over.get(self.current, frozenset())
        self.over[self.current] = self.before[command] | {command}

    def fork(self, side: int) -> None:
        if side != self.deaf:
            self.over[side] = self.over.get(side, frozenset()) | self.over.get(self.current, frozenset())

    def join(self, side: int) -> None:
        self.over[self.current] = self.over.get(self.current, frozenset()) | self.over[side]

    @contextlib.contextmanager
    def beside(self, side: int) -> Iterator[None]:
        before, self.current = self.current, side
        try:
            yield
        finally:
            self.current = before


def sent(streams: Streams, world: int) -> None:
    """What rank 0 enqueues, as ("tiles" | "copy" | "flag", step, owner); step 0 enters the call as well."""

    def copies(step: int) -> list[tuple[int, Callable[[tuple[int, int]], None], tuple[int, int]]]:
        return [
            (owner, lambda which: streams.enqueue(("copy", *which)), (step, owner))
            for owner in range(1, world)
        ]

    def step_arguments(raised: int = 0, receivers: int = 0, tiles: tuple[int, int] = (0, 0)) -> Command:
        return ("flag", raised, receivers.bit_length() - 1) if receivers else ("tiles", *tiles)

    plan = SimpleNamespace(
        workspace=streams,
        world=world,
        steps=range(STEPS),
        copies=[copies(step) for step in range(STEPS)],
        enter=streams.enqueue,
        step=streams.enqueue,
        _step_arguments=step_arguments,
        _tiles_of=lambda step, peer: (step, peer + 1),
    )
    RowsPlan._send(plan)  # type: ignore[arg-type]


def mistakes(streams: Streams, world: int) -> list[Command]:
    """Copies before their tiles or behind a flag, flags before their copies, and what the call does not wait for."""
    found: list[Command] = []
    for step in range(STEPS):
        for owner in range(1, world):
            tiles, copy, flag = ((what, step, owner) for what in ("tiles", "copy", "flag"))
            if tiles not in streams.before[copy] or any(what == "flag" for what, *_ in streams.before[copy]):
                found.append(copy)
            if copy not in streams.before[flag]:
                found.append(flag)
            found += [command for command in (copy, flag) if command not in streams.over[-1]]
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_owners_are_told_after_a_copy_and_no_copy_waits_for_that(world: int) -> None:
    streams = Streams()
    sent(streams, world)
    assert mistakes(streams, world) == []
    assert len(streams.before) == 3 * STEPS * (world - 1)


def test_a_flag_that_waits_for_no_copy_is_found() -> None:
    streams = Streams(deaf=rows._FLAGS)
    sent(streams, 2)
    assert [what for what, *_ in mistakes(streams, 2)] == ["flag"] * STEPS
