"""Episode after episode until the time is over; what fails is made smaller.

report = hunt(Options(minutes=2.0, seed=7))
report.failure is None or print(report.failure.smallest)
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from pyrocshmem import run_ranks, target
from tests.sharing import describe, shared
from tests.stress.episode import Episode, episode, shrink
from tests.stress.ops import OPS
from tests.stress.rounds import Round, draw_rounds

# Rounds of an episode; ranks start in a second on the CPU target, in ten on GPUs.
_ROUNDS_CPU, _ROUNDS_GPU = 30, 200
_START_S = 60.0
_MOST_CPU_RANKS = 3


@dataclass(frozen=True)
class Options:
    """ops: names to draw from. ranks: of an episode, 0: another number each time. shrink_seconds: for making a failing
    round smaller. plant: a mistake that must be found. ranks_a_gpu: how many may share one (`tests.sharing`)."""

    minutes: float = 2.0
    seed: int = 0
    ops: tuple[str, ...] = tuple(OPS)
    ranks: int = 0
    shrink_seconds: float = 120.0
    plant: str | None = None
    ranks_a_gpu: int = 1

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.ops) - set(OPS)):
            raise ValueError(f"op is {', '.join(unknown)}, allowed {', '.join(OPS)}")
        if self.minutes <= 0:
            raise ValueError(f"minutes is {self.minutes}, allowed are numbers greater than 0")
        if self.ranks_a_gpu < 1:
            raise ValueError(f"ranks_a_gpu is {self.ranks_a_gpu}, allowed are 1 or more")
        if not target.interpreted() and self.ranks > _room(self.ranks_a_gpu):
            each = f"{self.ranks_a_gpu} on each of this machine's {torch.cuda.device_count()} GPUs"
            raise ValueError(f"{self.ranks} ranks, allowed are {each}")


@dataclass
class Failure:
    """seed, ranks: of the episode. failed: the round, the last of `rounds`. wrong: what went wrong. smallest: a round
    that is as small as was found and goes wrong by itself, with what does; None where `failed` did not by itself."""

    seed: int
    ranks: int
    rounds: list[Round]
    wrong: list[str]
    smallest: Round | None = None
    smallest_wrong: list[str] = field(default_factory=list)


@dataclass
class Report:
    options: Options
    episodes: int = 0
    rounds: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failure: Failure | None = None

    def as_json(self) -> dict[str, Any]:
        """For `json.dump`."""
        failure = None if self.failure is None else dataclasses.asdict(self.failure)
        return {
            "target": describe(self.options.ranks_a_gpu),
            "options": dataclasses.asdict(self.options),
            "episodes": self.episodes,
            "rounds": self.rounds,
            "seconds": round(self.seconds, 1),
            "counts": dict(self.counts),
            "failure": failure,
        }


def _run(body: Callable[..., Episode], ranks: int, what: Any, seconds: float, options: Options) -> Episode:
    """What an episode on `ranks` ranks found. Ranks that hang or die are wrong, too."""
    with shared(options.ranks_a_gpu):
        ends = run_ranks(body, ranks, what, seconds, options.plant, timeout=_START_S + 2 * seconds)
    found = ends[0].value if ends[0].ok else Episode()
    found.wrong = found.wrong or [end.describe() for end in ends if not end.ok]
    return found


def hunt(options: Options, say: Callable[[str], object] = lambda text: None) -> Report:
    """Run episodes until the time is over or one fails. say: is told how it goes."""
    report, begin = Report(options), time.monotonic()
    seeds, limit = Random(options.seed), 60 * options.minutes
    while report.failure is None and (left := limit - (time.monotonic() - begin)) > 0:
        seed = seeds.randrange(1 << 31)
        rng = Random(seed)
        ranks = options.ranks or _num_ranks(rng, options.ranks_a_gpu)
        count = _ROUNDS_CPU if target.interpreted() else _ROUNDS_GPU
        rounds = draw_rounds(rng, count, ranks, options.ops, not target.interpreted())
        found = _run(episode, ranks, rounds, left, options)
        report.episodes += 1
        report.rounds += found.rounds
        report.counts += found.counts
        say(f"episode {report.episodes}, seed {seed}, {ranks} ranks: {found.rounds} rounds")
        if found.wrong:
            report.failure = Failure(seed, ranks, rounds[: found.rounds or None], found.wrong)
        if report.failure is not None and found.failed is not None:
            smaller = _run(shrink, ranks, found.failed, options.shrink_seconds, options)
            report.failure.smallest, report.failure.smallest_wrong = smaller.failed, smaller.wrong
    report.seconds = time.monotonic() - begin
    return report


def _room(ranks_a_gpu: int) -> int:
    return torch.cuda.device_count() * ranks_a_gpu


def _num_ranks(rng: Random, ranks_a_gpu: int) -> int:
    most = _MOST_CPU_RANKS if target.interpreted() else _room(ranks_a_gpu)
    return rng.randint(min(2, most), most)
