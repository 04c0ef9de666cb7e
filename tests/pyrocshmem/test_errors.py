"""Faults keep their facts through pickling, and say what happened, to whom, and where to look."""

import copy
import pickle
import signal
import subprocess
import sys
import time

import pytest

import pyrocshmem
from pyrocshmem import status

TIER = 0
pytestmark = pytest.mark.cpu

FAULTS = [
    (pyrocshmem.HeapOutOfMemory(4096, 1024, 512, 1), ("4096", "1024", "512", "rank 1")),
    (
        pyrocshmem.PeerTimeout("all_reduce", 0, 3, tile=7, expected=12, seen=11, waited_s=2.5),
        ("all_reduce", "rank 0", "rank 3", "tile 7", "expected 12", "seen 11", "2.50 s"),
    ),
    (
        pyrocshmem.PeerTimeout("barrier", 2, 1),
        ("barrier", "rank 2", "rank 1", "Look at what rank 1 was doing"),
    ),
    (
        pyrocshmem.PeerTimeout("all_reduce", 0, 3, call=41, process="process 7 is stopped: resume it"),
        ("in vain for rank 3 (call 41)", "Rank 3's process 7 is stopped: resume it"),
    ),
    (
        pyrocshmem.PeerTimeout.in_vote(
            "free", 7, 0, pyrocshmem.InitTimeout([1, 3], "free", 2.0, 4), "process 5"
        ),
        ("free: rank 0 waited 2.00 s in vain for rank 1 (call 7, expected all 4 ranks, seen ranks 0, 2)",),
    ),
    (
        pyrocshmem.PeerTimeout("gemm_all_reduce", 2, 2, expected=9, seen=8, process="process 7 is alive"),
        ("rank 2 waited in vain for a program of its own", "this rank's kernels"),
    ),
    (pyrocshmem.PeerAborted(0, 2, "KeyError: 'x'"), ("rank 0", "rank 2", "KeyError: 'x'")),
    (pyrocshmem.CallMismatch(["zeros(3)", "zeros(4)"]), ("rank 0: zeros(3)", "rank 1: zeros(4)")),
    (
        pyrocshmem.InitTimeout([1, 3], "Heap", 30.0, 4),
        ("ranks 1, 3 of 4", "30.0 s", "PYROCSHMEM_INIT_SECONDS"),
    ),
    (pyrocshmem.InitTimeout([1], "Heap", 0.0, 4, "MemoryError: full"), ("rank 1 of 4", "MemoryError: full")),
    (pyrocshmem.WorkspaceBusy("in use by thread 3"), ("thread 3",)),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS, ids=lambda value: type(value).__name__)
def test_fault_says_its_facts_and_survives_pickling(fault, words):
    assert isinstance(fault, pyrocshmem.ShmemError)
    assert isinstance(fault, RuntimeError)
    for word in words:
        assert word in str(fault)
    for twin in (pickle.loads(pickle.dumps(fault)), copy.copy(fault)):
        assert type(twin) is type(fault)
        assert str(twin) == str(fault)
        assert vars(twin) == vars(fault)


def record(**facts):
    words = [0] * status.NUM_WORDS
    for name, value in facts.items():
        words[status.Word[name.upper()]] = value
    return words


def test_record_of_a_timeout():
    words = record(
        code=1, op=9, rank=2, peer=3, tile=0, expected=5, seen=-(2**31), waited_us=2_500_000, epoch=6
    )
    fault = status.to_error(words, 2, str, lambda peer: f"process of {peer}")
    assert (fault.call, fault.process) == (6, "process of 3")
    assert "(call 6, tile 0, expected 5, seen -2147483648)" in str(fault)
    assert isinstance(fault, pyrocshmem.PeerTimeout)
    assert (fault.op, fault.rank, fault.peer, fault.tile) == ("gemm_all_reduce", 2, 3, 0)
    assert (fault.expected, fault.seen, fault.waited_s) == (5, -(2**31), 2.5)


def test_what_has_become_of_a_process():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    _, namespace = status.own_process()
    process = (child.pid, namespace)

    def says(words):
        deadline = time.monotonic() + 20
        while not (
            words in status.describe_process(process) and str(child.pid) in status.describe_process(process)
        ):
            assert time.monotonic() < deadline, status.describe_process(process)
            time.sleep(0.01)

    try:
        says("is alive")
        child.send_signal(signal.SIGSTOP)
        says(f"kill -CONT {child.pid}")
        child.kill()
        says("has ended")  # a zombie
        child.wait()
        says("has ended")
    finally:
        child.kill()
        child.wait()
    assert status.describe_process((child.pid, namespace + 1)) == ""


def test_record_of_an_abort_asks_for_the_message():
    fault = status.to_error(record(code=2, peer=3, tile=-1), 1, lambda peer: f"said by {peer}")
    assert isinstance(fault, pyrocshmem.PeerAborted)
    assert (fault.rank, fault.peer, fault.message) == (1, 3, "said by 3")


def test_record_without_a_fault_or_a_tile():
    assert status.to_error(record(), 0, str) is None
    assert status.to_error(record(code=1, tile=-1), 0, str).tile is None


def test_op_names():
    assert status.op_name(status.Op.FIX_UP) == "fix_up"
    assert status.op_name(99) == "op 99"
    assert len({op.value for op in status.Op}) == len(status.Op.__members__)
