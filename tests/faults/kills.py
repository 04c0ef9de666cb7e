"""Kills processes while they form heaps, at random instants: `python -m tests.faults.kills RANKS PARENTS NBYTES`.

A pair of ranks does nothing but form heaps of NBYTES bytes, system area included, and is killed, one after the other;
then another pair, until RANKS are dead. After that PARENTS processes that have started ranks are killed. Prints as JSON
{killed, heaps, files, holders}: how many processes were killed and heaps formed, files of that size in /dev/shm, and
processes that still map one.

Ranks are forked from this process, which has imported torch, and have a store but no process group: hundreds of them
take seconds. It is a program of its own since a test's process has threads; the store, whose server is one, is in
another, or ranks could inherit a lock that it held.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyrocshmem import Heap, launching, rank_process
from pyrocshmem.forming import SYSTEM_BYTES
from pyrocshmem.groups import Group
from pyrocshmem.stores import StoreBoard
from tests.finegrained_alloc import support
from tests.ranks import load_server
from tests.stopwatch import until

_LONGEST_S = 0.015  # some times what a heap takes to form
# Two ranks start and form a heap, the first time once their server has imported torch, on cores that others use, too;
# ranks end once their parent has.
_STARTS_S, _ENDS_S = 60.0, 20.0


def main(num_ranks: int, num_parents: int, nbytes: int) -> None:
    torch.set_num_threads(1)
    killed = heaps = 0
    server, port = _serve()
    while killed < num_ranks:
        pair_killed, pair_heaps = _kill_pair(port, killed, nbytes)
        killed += pair_killed
        heaps += pair_heaps
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    if num_parents:
        load_server()
    for _ in range(num_parents):
        _kill_parent(nbytes)
        killed += 1
    holders = support.holders_of_size(nbytes)
    deadline = time.monotonic() + _ENDS_S
    while holders and time.monotonic() < deadline:  # a rank sees its parent's end, and ends
        time.sleep(0.01)
        holders = support.holders_of_size(nbytes)
    files = [str(path) for path in support.files_of_size(nbytes)]
    print(json.dumps({"killed": killed, "heaps": heaps, "files": files, "holders": holders}))


def _serve() -> tuple[int, int]:
    """(process, port) of the ranks' store."""
    reading, writing = os.pipe()
    parent = os.getpid()
    server = os.fork()
    if server == 0:
        _as_child(_listen, parent, writing)
    port = int.from_bytes(os.read(reading, 2), "little")
    os.close(reading)
    os.close(writing)
    return server, port


def _listen(parent: int, writing: int) -> None:
    rank_process._die_with_parent(parent)
    store, port = launching._listen()
    os.write(writing, port.to_bytes(2, "little"))
    signal.pause()
    del store


def _kill_pair(port: int, number: int, nbytes: int) -> tuple[int, int]:
    """How many were killed, and how many heaps each has formed, about.

    The second may have noticed the first one's end and have ended by itself, where a busy machine left it the time.
    """
    assert len(os.listdir("/proc/self/task")) == 1, "a rank may inherit a lock that a thread holds"
    reading, writing = os.pipe()
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            _as_child(_form_for_ever, port, number, rank, nbytes, writing)
    os.close(writing)
    formed = len(os.read(reading, 1))  # from now on
    random.shuffle(ranks)
    for pid in ranks:
        time.sleep(random.uniform(0, _LONGEST_S))
        os.kill(pid, signal.SIGKILL)
    were_killed = [os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL for pid in ranks]
    assert were_killed[0], "it ended by itself"
    while more := os.read(reading, 1 << 16):
        formed += len(more)
    os.close(reading)
    return sum(were_killed), formed // 2


def _as_child(body: Any, *arguments: Any) -> None:
    """Doesn't return: nothing that this process has registered for its end may run in its child."""
    try:
        body(*arguments)
    finally:
        os._exit(1)


def _form_for_ever(port: int, number: int, rank: int, nbytes: int, writing: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    group = Group(StoreBoard(dist.PrefixStore(str(number), store)), rank, 2, "kills")
    while True:
        with Heap(nbytes - SYSTEM_BYTES, group):
            os.write(writing, b".")


def _kill_parent(nbytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parent = os.fork()
        if parent == 0:
            # It has the server of the process that it was forked from, and mustn't wait for it as for a child.
            forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
            _as_child(launching.run_ranks, _form_as_rank, 2, nbytes, folder)
        until(lambda: len(os.listdir(folder)) == 2, _STARTS_S)
        time.sleep(random.uniform(0, 5 * _LONGEST_S))
        os.kill(parent, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(parent, 0)[1]) == signal.SIGKILL


def _form_as_rank(rank: int, world_size: int, nbytes: int, folder: str) -> None:
    while True:
        with Heap(nbytes - SYSTEM_BYTES):
            Path(folder, str(rank)).touch()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
