"""Ends that are hard to tell of: results that can't be sent, errors without a text, ranks that never started."""

import json
import os
import threading
import time

import pytest

from pyrocshmem import Heap, PeerAborted, RanksFailed, as_group, launching, spawn, spawn_threads
from tests.faults.heap_support import mapped_files
from tests.ranks import run_ranks
from tests.stopwatch import until, within

TIER = 2


def _forms_alone(rank, world_size, folder):
    seen = folder / "files"
    if rank == 1:
        until(seen.exists)
        os._exit(9)

    def look():
        while not (files := mapped_files()):
            time.sleep(0.01)
        (folder / "new").write_text(json.dumps([os.getpid(), *files]))
        (folder / "new").rename(seen)

    threading.Thread(target=look, daemon=True).start()
    Heap(1 << 20)


@pytest.mark.cpu
@pytest.mark.alone
def test_a_heap_that_was_forming_leaves_nothing(monkeypatch, tmp_path):
    """A rank died before it came; the one that waits for it there is killed."""
    monkeypatch.setattr(launching, "_GRACE_S", 0.5)
    with pytest.raises(RanksFailed, match="did not finish within"):
        spawn(_forms_alone, 2, tmp_path)
    pid, *files = json.loads((tmp_path / "files").read_text())
    assert len(files) == 1  # one that never had a name
    assert not os.path.exists(f"/proc/{pid}")


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def _fails_beside_a_vote(rank, world_size, how):
    if rank == 1 and how == "unpicklable result":
        return lambda: None
    if rank == 1:
        raise Mute
    as_group(None).barrier(timeout=20)
    return None


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["unpicklable result", "error without a text"])
def test_peers_hear_of_what_cannot_be_sent(how):
    ends = run_ranks(_fails_beside_a_vote, 2, how, timeout=60)
    said = "TypeError: the rank's result can't be sent" if how == "unpicklable result" else "Mute"
    assert isinstance(ends[0].exception, PeerAborted)
    assert ends[0].exception.message.startswith(said)


def _raises(rank, world_size):
    if rank == 1:
        raise KeyError("weights")
    return rank


def _starts_ranks(rank, world_size):
    return spawn(_raises, 2)


@pytest.mark.cpu
def test_failed_ranks_of_a_rank():
    with pytest.raises(RanksFailed) as raised:
        spawn(_starts_ranks, 1)
    inner = raised.value.__cause__
    assert isinstance(inner, RanksFailed)
    assert [result.value for result in inner.results] == [0, None]
    assert isinstance(inner.results[1].exception, KeyError)


def _pid(rank, world_size):
    return os.getpid()


@pytest.mark.cpu
@pytest.mark.alone
def test_a_rank_that_does_not_start(monkeypatch):
    start = launching._Rank.__init__

    def fail_second(self, context, job):
        if job.rank == 1:
            raise OSError("no more processes")
        start(self, context, job)

    monkeypatch.setattr(launching._Rank, "__init__", fail_second)
    # Longer if the first rank waited for the second.
    with within(8), pytest.raises(OSError, match="no more processes"):
        spawn(_pid, 2)


@pytest.mark.cpu
@pytest.mark.parametrize("start", [spawn, spawn_threads])
def test_bad_timeouts(start):
    with pytest.raises(TypeError, match="timeout is a str, allowed are seconds"):
        start(_pid, 2, timeout="1")
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"timeout is {seconds}, allowed are seconds greater than 0"):
            start(_pid, 2, timeout=seconds)
