"""The measuring harness: what a sample is made of, whose turn it is, and what is compared."""

import pytest
import torch
import torch.distributed as dist

from pyrocshmem.reference.timing import Meter, Run

TIER = 0
pytestmark = pytest.mark.cpu


def test_ranks_are_lined_up_after_the_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs' clocks differ: a spin after the joining all-reduce would put them out of step again."""
    seen: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            seen.append("event")

        def elapsed_time(self, end: "Event") -> float:
            return 1500.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append("spin"))
    monkeypatch.setattr(dist, "all_reduce", lambda token: seen.append("line up"))
    meter = Meter(torch.device("cpu"), lined_up=True)
    meter.on_gpu = True
    assert meter.sample(lambda: seen.append("call"), lambda: seen.append("poison")) == 1.5
    assert seen == ["poison", "synchronize", "spin", "line up", "event", "call", "event", "synchronize"]


def test_turns() -> None:
    """A B A B, those that are seldom timed in every third round; each call finds its output poisoned, and its result is
    compared where that is asked for."""
    order: list[str] = []

    def run(name: str) -> Run:
        out = torch.zeros(4)

        def call() -> None:
            assert out.isnan().all()
            order.append(name)
            out.copy_(torch.arange(4.0) + (len(order) > 4 and name == "b"))

        return Run(call, out)

    runs = {name: run(name) for name in "abc"}
    samples = Meter(torch.device("cpu"), lined_up=False).in_turn(runs, 4, seldom=("c",), compared=("a", "b"))
    assert "".join(order) == "abcababab" + "c"
    assert {name: len(each) for name, each in samples.seconds.items()} == {"a": 4, "b": 4, "c": 2}
    assert {name: len(set(each)) for name, each in samples.checksums.items()} == {"a": 1, "b": 2}
