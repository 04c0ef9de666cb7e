"""The steps of the copies that bring a result from the peers, and their order."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyrocshmem import trace
from pyrocshmem.stream_k.ops.pulls import Block, Pull, Pulls, blocks_of
from tests.stream_k.schedule_checks import tiles_in_order

TIER = 0
pytestmark = pytest.mark.cpu
PEERS = ("first", "second", "third")


class Streams:
    """A workspace: what is enqueued, with the number of its stream."""

    def __init__(self) -> None:
        self.stream, self.enqueued = -1, list[tuple[int, str]]()

    @contextlib.contextmanager
    def beside(self, side: int) -> Iterator[None]:
        before, self.stream = self.stream, side
        yield
        self.stream = before

    def fork(self, side: int) -> None:
        pass

    join = fork

    def put(self, what: str) -> None:
        self.enqueued.append((self.stream, what))


def order_of(num_steps: int, together: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """What is enqueued for so many steps, the last of which finds nothing at the last peer."""
    streams: Any = Streams()
    monkeypatch.setattr(trace, "copy", lambda copy, out: streams.put(copy))
    steps: list[Any] = [
        Pull((f"wait {i}",), [f"{peer} {i}" for peer in PEERS], [f"own {i}"]) for i in range(num_steps)
    ]
    steps[-1] = steps[-1]._replace(copies=steps[-1].copies[:-1])
    launch: Any = lambda arguments: streams.put(arguments[0])  # noqa: E731
    Pulls(streams, launch, steps, together=together).into(torch.empty(0))
    return streams.enqueued


def copies_in(enqueued: list[tuple[int, str]]) -> list[str]:
    """Those from peers."""
    return [what for _, what in enqueued if what.startswith(PEERS)]


def test_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = order_of(2, 1, monkeypatch)
    assert copies_in(found) == ["first 0", "second 0", "third 0", "first 1", "second 1"]


def test_peer_by_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps that are taken together, and of those that are left."""
    found = order_of(3, 2, monkeypatch)
    assert copies_in(found) == [
        "first 0", "first 1", "second 0", "second 1", "third 0", "third 1", "first 2", "second 2"
    ]  # fmt: skip


@pytest.mark.parametrize("together", [1, 2, 3, 5])
def test_every_copy_once_behind_the_wait_of_its_step(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [what for _, what in order_of(5, together, monkeypatch)]
    copies = [f"{name} {i}" for i in range(5) for name in ("own", *PEERS)][:-1]
    assert sorted(found) == sorted(copies + [f"wait {i}" for i in range(5)])
    for what in copies:
        assert found.index(f"wait {what[-1]}") < found.index(what)


def test_waits_and_copies_have_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """None holds up another: neither an own copy the next wait, nor one from a peer."""
    sides: dict[str, set[int]] = {"wait": set(), "own": set(), "peers": set()}
    for side, what in order_of(3, 1, monkeypatch):
        sides["peers" if what.startswith(PEERS) else what.split()[0]].add(side)
    assert [len(each) for each in sides.values()] == [1, 1, 1]
    assert len({-1}.union(*sides.values())) == 4


def test_programs_pull_beside_what_announces() -> None:
    """Enqueued last, so that on the CPU target, where launches run at once, all is announced."""
    streams: Any = Streams()
    steps: list[Any] = [Pull((f"tell {i}",)) for i in range(3)]
    programs: Any = lambda out: streams.put("pull")  # noqa: E731
    Pulls(streams, lambda arguments: streams.put(arguments[0]), steps, programs).into(torch.empty(0))  # type: ignore[arg-type]
    sides, found = zip(*streams.enqueued, strict=True)
    assert found == ("tell 0", "tell 1", "tell 2", "pull")
    assert len(set(sides[:3])) == 1
    assert sides[3] not in (sides[0], -1)


def wrong(blocks: list[Block], tiles_m: int, tiles_n: int, group: int) -> str:
    """What is wrong with these steps of so many tiles."""
    tiles = tiles_in_order(tiles_m, tiles_n, group)
    brought = []
    for block in blocks:
        awaited = set(tiles[slice(*block.tiles)])
        inside = [(row, column) for row in range(*block.rows) for column in range(*block.columns)]
        if not awaited.issuperset(inside):
            return f"{block} doesn't wait for all that it brings"
        brought += inside
    if sorted(brought) != sorted(tiles):
        return "not every tile is brought once"
    ends = [block.tiles[1] for block in blocks]
    return "" if ends == sorted(ends) else "steps wait for one another"


counts = st.integers(1, 40)
TILE = 128 * 256


@given(counts, st.integers(1, 200), counts, st.integers(1, 16), st.integers(8, 23), st.booleans())
def test_steps_bring_every_tile_once_it_is_there(
    tiles_m: int, tiles_n: int, chunk: int, group: int, bits: int, cut: bool
) -> None:
    tile = 1 << bits
    blocks = [*blocks_of(tiles_m, tiles_n, chunk, group, tile, cut)]
    assert wrong(blocks, tiles_m, tiles_n, group) == ""
    if not cut:
        assert {block.columns for block in blocks} == {(0, tiles_n)}


def test_wide_steps_are_cut_where_a_group_has_their_rows() -> None:
    """Into parts of about 128 tiles of 128 x 256, 16 x 56 of them into seven; of 256 narrower ones."""
    found = [*blocks_of(16, 56, 16, 16, TILE)]
    assert [block.columns for block in found] == [(n, n + 8) for n in range(0, 56, 8)]
    assert [block.tiles for block in found] == [(n, n + 128) for n in range(0, 896, 128)]
    narrow = [block.columns for block in blocks_of(16, 112, 16, 16, TILE // 2)]
    assert narrow == [(2 * first, 2 * last) for first, last in (block.columns for block in found)]
    assert len([*blocks_of(128, 208, 16, 16, TILE)]) == 16
    assert len([*blocks_of(16, 56, 8, 16, TILE)]) == len([*blocks_of(16, 56, 8, 4, TILE)]) == 2


def test_a_tile_that_a_step_forgets_is_caught() -> None:
    honest = [*blocks_of(14, 56, 7, 7, TILE)]
    assert wrong(honest, 14, 56, 7) == ""
    first, last = honest[1].tiles
    for tiles in ((first, last - 1), (first + 1, last)):
        assert "doesn't wait" in wrong([honest[0], honest[1]._replace(tiles=tiles), *honest[2:]], 14, 56, 7)
    assert "once" in wrong(honest[:-1], 14, 56, 7)
