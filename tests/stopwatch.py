"""Wall-clock time, and how much of it other work had the cores: what assertions on time allow for.

    with within(1.0):                 # AssertionError if it takes longer, and not for want of a core
        heap.barrier()

    watch = Stopwatch()               # the same in parts, where begin and end are times of different processes
    ...
    assert watch.seconds() < 1.0 + watch.late()

    until(lambda: int(word) == 1)     # what another rank has yet to do

On an idle machine `late` is next to nothing, and a limit is a limit of wall-clock time. Beside busy processes the
kernel's accounts tell how long a thread stood in a core's queue; only that is added, so a wait that lasts too long
fails there, too. A thread that sleeps is in no queue. Accounts are those of a process group: tests that run at once,
and what the same script has started beside them, count as well.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path


class Stopwatch:
    def __init__(self) -> None:
        self._queued = _seconds_in_queues()
        self._start = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._start

    def late(self) -> float:
        """The longest time since the start that one thread of this test's processes was ready to run and did not:
        whoever waits for it is as late. 0 where the kernel keeps no such accounts."""
        now = _seconds_in_queues()
        return max((now[thread] - self._queued.get(thread, 0.0) for thread in now), default=0.0)


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """AssertionError if what is inside takes `limit_s` seconds or longer, not counting what it was late."""
    watch = Stopwatch()
    yield
    seconds, late = watch.seconds(), watch.late()
    assert seconds < limit_s + late, (
        f"it took {seconds:.2f} s, {late:.2f} s of it in queues; limit {limit_s} s"
    )


def until(condition: Callable[[], object], patience_s: float = 60.0) -> None:
    """Return once `condition()` holds; AssertionError if it does not within `patience_s` seconds. In the place of a
    sleep that is long enough on an idle machine."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience_s} s in vain"
        time.sleep(0.005)


def _seconds_in_queues() -> dict[int, float]:
    """By thread, of all processes of this one's group: pytest's, the server that forks its ranks, and the ranks."""
    found, group = {}, os.getpgrp()
    for process in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if os.getpgid(process) != group:
                continue
            for thread in Path(f"/proc/{process}/task").iterdir():
                # Nanoseconds on a core, nanoseconds in a queue, times that it was given a core.
                found[int(thread.name)] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found
