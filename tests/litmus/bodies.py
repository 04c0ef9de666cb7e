"""What the ranks of the litmus tests run: each experiment in both directions of every pair of ranks."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from pyrocshmem import Heap, interpreter, target
from pyrocshmem.calls.workspace import Workspace
from tests.litmus import kernels

WAIT_S = 20.0
_HEAP_BYTES = 16 << 20
_WARPS = 8
# Copies of a batch, which has one wait for the receiver's answer; words of each.
_BATCH, _WIDTH = (20, 256) if target.interpreted() else (200, 1024)
# On the CPU target a copy takes microseconds and a poll 0.2 ms: the wrong order shows only if it lasts.
_CONTROL_GAP_S = 0.03
# Places that messages take in turn, words a side of their tiles.
_RING, _SIZE = (50, 16) if target.interpreted() else (8, 64)


@dataclass(frozen=True)
class Litmus:
    """how: "push", "pull" or "tma" (a message), "buffering", or "copies". without: guards of the kernel that are left
    out. pieces: tiles of SIZE x SIZE words that a message has."""

    how: str
    rounds: int
    without: tuple[str, ...] = ()
    pieces: int = 1


@dataclass(frozen=True)
class Outcome:
    """Of one direction, on this rank. bad: rounds that went wrong; both: of store buffering, whether each round was
    missed, as bytes. played: rounds that this rank finished."""

    litmus: Litmus
    pair: tuple[int, int]
    bad: int
    played: int
    missed: bytes = b""


def litmus(rank: int, world_size: int, experiments: list[Litmus]) -> list[Outcome]:
    """All experiments, one after another, on one start of the ranks; each on disjoint pairs at a time."""
    with Heap(_HEAP_BYTES) as heap:
        bench = _Bench(heap)
        return [
            outcome
            for each in experiments
            for pairs in pairs_in_turn(world_size, both_ways=each.how != "buffering")
            if (outcome := bench.run(each, next((pair for pair in pairs if rank in pair), None))) is not None
        ]


def pairs_in_turn(world_size: int, both_ways: bool) -> list[list[tuple[int, int]]]:
    """Pairs (sender, receiver) that play at a time, no rank in two of them; all have played in the end.

    Example, three ranks, one way: [(1, 2)], [(0, 2)], [(0, 1)].
    """
    seats, found = list(range(world_size + world_size % 2)), []
    for _ in seats[1:]:
        facing = zip(seats, reversed(seats[len(seats) // 2 :]), strict=False)
        pairs = [(min(pair), max(pair)) for pair in facing if max(pair) < world_size]
        found += [pairs] + ([[(b, a) for a, b in pairs]] if both_ways else [])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


class _Bench:
    """A heap, and on it the places that all experiments use."""

    def __init__(self, heap: Heap) -> None:
        self.heap, self.world = heap, heap.world_size
        self.workspace = Workspace(heap, wait_seconds=WAIT_S)
        self.flags = self.workspace.buffer("flags", 2 + max(_BATCH, _RING), torch.int32)
        self.data = heap.zeros(max(_BATCH * _WIDTH, 8 * _RING * _SIZE * _SIZE), dtype=torch.int32)
        self.zeros = heap.zeros(16, dtype=torch.int32)
        self.found = torch.zeros(3, dtype=torch.int32, device=heap.device)
        self.start = torch.zeros(1, dtype=torch.int32, device=heap.device)
        self.epoch = 0

    def run(self, each: Litmus, pair: tuple[int, int] | None) -> Outcome | None:
        """This rank's outcome as one of the pair (sender, receiver); None where it is in none."""
        # Everything that an experiment before it left looks old.
        self.epoch += 2_000_000
        self.workspace.restart(self.epoch)
        self.found.zero_()
        self.start.fill_(self.epoch)
        outcome = None
        if pair is not None:
            run = {"buffering": self._buffering, "copies": self._copies}.get(each.how, self._message)
            outcome = run(each, pair)
        else:
            self.heap.barrier()
        self.heap.barrier()
        return outcome

    def _launch(self, kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        # As ops launch theirs: the interpreter takes a third of the time.
        with interpreter.taken() if target.interpreted() else contextlib.nullcontext():
            kernel[(1,)](*arguments, **constants, num_warps=_WARPS)

    def _load(self, *launches: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> None:
        """Load kernels before any rank can wait: loading code waits for kernels that spin."""
        if not target.interpreted():
            for kernel, arguments, constants in launches:
                kernel.warmup(*arguments, grid=(1,), **constants, num_warps=_WARPS)
        self.heap.barrier()

    def _outcome(self, each: Litmus, pair: tuple[int, int], missed: bytes = b"") -> Outcome:
        self.heap.synchronize()
        bad, played, _ = self.found.tolist()
        return Outcome(each, pair, bad, played, missed)

    def _message(self, each: Litmus, pair: tuple[int, int]) -> Outcome:
        words = self.data[: _RING * each.pieces * _SIZE * _SIZE]
        tiles: Any = words
        if each.how == "tma":
            there = self.heap.peer_view(words, pair[1]).view(-1, _SIZE)
            tiles = TensorDescriptor.from_tensor(there, [_SIZE, _SIZE])
        arguments = (
            words, tiles, self.zeros, self.flags, self.found, self.start, *pair, each.rounds, self.workspace.context
        )  # fmt: skip
        guards = {name: name not in each.without for name in ("SETTLED", "ACQUIRED")}
        sizes = {"WORLD": self.world, "RING": _RING, "PIECES": each.pieces, "SIZE": _SIZE}
        launch = kernels.message_kernel, arguments, {"HOW": each.how, **guards, **sizes}
        self._load(launch)
        self._launch(*launch)
        return self._outcome(each, pair)

    def _buffering(self, each: Litmus, pair: tuple[int, int]) -> Outcome:
        missed = torch.full((each.rounds,), 9, dtype=torch.int8, device=self.heap.device)
        peer = pair[0] + pair[1] - self.heap.rank
        arguments = (
            self.data, self.flags, missed, self.found, self.start, peer, each.rounds, self.workspace.context
        )  # fmt: skip
        launch = kernels.buffering_kernel, arguments, {"MET": "MET" not in each.without, "WORLD": self.world}
        self.data[:1].fill_(self.epoch)
        self._load(launch)
        self._launch(*launch)
        self.heap.synchronize()
        return self._outcome(each, pair, missed.cpu().numpy().tobytes())

    def _copies(self, each: Litmus, pair: tuple[int, int]) -> Outcome:
        sender, receiver = pair
        here = self.heap.rank == sender
        numbers = torch.arange(1, 1 + _BATCH, dtype=torch.int32, device=self.heap.device)
        source = torch.empty(_BATCH, _WIDTH, dtype=torch.int32, device=self.heap.device)
        places = [
            (self.heap.peer_view(row, receiver), self.heap.peer_view(self.flags[2 + i : 3 + i], receiver))
            for i, row in enumerate(self.data[: _BATCH * _WIDTH].view(_BATCH, _WIDTH))
        ]
        common = (self.flags, self.found, self.start)
        if here:
            launch: Any = kernels.received_kernel, (*common, receiver, self.workspace.context), {}
        else:
            arguments = (self.data, *common, sender, _BATCH, self.workspace.context)
            launch = kernels.receive_kernel, arguments, {"WIDTH": _WIDTH}
        launch[2]["WORLD"] = self.world
        self._load(launch)
        for batch in range(each.rounds // _BATCH):
            self.start.fill_(self.epoch + batch * _BATCH)
            if here:
                torch.add(numbers[:, None], self.start, out=source[:, :1])
                source.copy_(source[:, :1].expand_as(source).clone())
                flag = source[0, :1]  # every flag of a batch gets the same number
                for (row, word), value in zip(places, source, strict=True):
                    self._copy(row, value, word, flag, "ORDER" not in each.without)
            self._launch(*launch)
        return self._outcome(each, pair)

    def _copy(self, row: Any, value: Any, word: Any, flag: Any, ordered: bool) -> None:
        if ordered:
            row.copy_(value)
            word.copy_(flag)
            return
        word.copy_(flag)
        if target.interpreted():
            time.sleep(_CONTROL_GAP_S)
        row.copy_(value)
