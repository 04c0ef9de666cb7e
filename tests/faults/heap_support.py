"""What the tests of the heap's faults share: canaries, a job that must work afterwards, files of heaps."""

import contextlib
import re
import time
from pathlib import Path

import torch

from pyrocshmem import Heap, target
from tests.ranks import run_ranks, values
from tests.stopwatch import within

MIB = 1 << 20
# How the list of what a process maps names a file without a name.
_FILE = re.compile(r"/dev/shm/#\d+ \(deleted\)")


def mapped_files():
    """The nameless files that this process maps: the heaps, its own and its peers'. Other jobs' are not ours."""
    return set(_FILE.findall(Path("/proc/self/maps").read_text()))


@contextlib.contextmanager
def canary(heap):
    """Words before and after what is allocated inside, which must keep their bits; and a heap that works afterwards."""
    rank = heap.rank
    before, after = (
        heap.full((64,), 7 + rank, dtype=torch.int64),
        heap.full((64,), 9 + rank, dtype=torch.int64),
    )
    usage = heap.usage()
    yield
    assert heap.usage() == usage, "a piece was kept"
    assert bool((before == 7 + rank).all())
    assert bool((after == 9 + rank).all())
    x = heap.full((100,), rank)
    heap.barrier()
    assert all(float(heap.peer_view(x, peer)[99]) == peer for peer in range(heap.world_size))
    for tensor in (x, before, after):
        heap.free(tensor)


def warm_up(rank):
    """Start the device: on a GPU that takes seconds, which are not the heap's."""
    torch.zeros(1, device=target.device(rank))


def raised_by(call):
    """(the exception of `call`, seconds)."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return error, time.monotonic() - start
    raise AssertionError("nothing was raised")


def raised_within(limit_s, call):
    """The exception of `call`, which may take so many seconds."""
    with within(limit_s):
        return raised_by(call)[0]


def healthy(rank, world_size):
    with Heap(MIB) as heap:
        return float(heap.ones(8).sum())


def assert_next_job_works(num_ranks=2):
    assert values(run_ranks(healthy, num_ranks)) == [8.0] * num_ranks


# ---- 1, 4: a peer is killed, or raises
