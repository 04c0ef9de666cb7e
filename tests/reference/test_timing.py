"""The measuring harness: what a sample is made of, whose turn it is, and what is compared."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from pyrocshmem.reference.timing import Meter, Run

TIER = 0
pytestmark = pytest.mark.cpu


@dataclass
class Device:
    """A stand-in for a GPU. seen: what it is asked for, in order; spins: cycles. first: whether it is always there
    before the host has enqueued a call."""

    seen: list[str] = field(default_factory=list)
    spins: list[int] = field(default_factory=list)
    first: bool = False

    def meter(self, monkeypatch: pytest.MonkeyPatch) -> Meter:
        """One that measures on it."""
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                device.seen.append("event")

            def query(self) -> bool:
                return device.first

            def elapsed_time(self, end: "Event") -> float:
                return 1500.0

        def spin(cycles: int) -> None:
            self.seen.append("spin")
            self.spins.append(cycles)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.seen.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "_sleep", spin)
        monkeypatch.setattr(dist, "all_reduce", lambda token: self.seen.append("line up"))
        meter = Meter(torch.device("cpu"), lined_up=True, cold=False)
        meter.on_gpu = True
        return meter


def test_ranks_are_lined_up_after_the_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs' clocks differ: a spin after the joining all-reduce would put them out of step again."""
    device = Device()
    meter, seen = device.meter(monkeypatch), device.seen
    assert meter.sample(lambda: seen.append("call"), lambda: seen.append("poison")) == 1.5
    assert seen == ["poison", "synchronize", "spin", "line up", "event", "call", "event", "synchronize"]


def test_the_spin_outlasts_what_the_host_enqueues(monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows where the device was there first, within bounds, and only for these calls."""
    device = Device(first=True)
    meter, runs = device.meter(monkeypatch), {"a": Run(lambda: None, None)}
    meter.in_turn(runs, 3)
    first = device.spins[0]
    assert device.spins == [first, 2 * first, 4 * first, 8 * first, 8 * first, 8 * first]
    device.first = False
    device.spins.clear()
    meter.in_turn(runs, 1)
    assert set(device.spins) == {first}


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
