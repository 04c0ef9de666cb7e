"""Starting ranks: results, every way of failing, and that nothing outlives the parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist

from pyrocshmem import RanksFailed, as_group, launching, spawn, spawn_threads, target  # isort: skip
import triton

from tests.ranks import run_ranks, values
from tests.stopwatch import within

TIER = 2
ROOT = Path(__file__).resolve().parents[2]


def _sum(rank, world_size, factor, extra):
    device = target.device(rank)
    x = torch.full((3,), float(rank + 1), device=device)
    dist.all_reduce(x)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    assert (as_group(None).rank, as_group(None).world_size) == (rank, world_size)
    return {
        "sum": (x * factor).tolist(),
        "extra": extra,
        "interpreted": target.interpreted(),
        "tensor": x.cpu(),
    }


@pytest.mark.num_ranks(2)
def test_results_come_in_rank_order():
    results = spawn(_sum, 2, 10, {"a": torch.ones(2)})
    for result in results:
        assert result["sum"] == [30.0] * 3
        assert torch.equal(result["extra"]["a"], torch.ones(2))
        assert torch.equal(result["tensor"], torch.full((3,), 3.0))
        assert result["interpreted"] is target.interpreted()


class OddError(Exception):
    """Pickles, but can't be rebuilt."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def _fails(rank, world_size, how):
    store = dist.distributed_c10d._get_default_store()
    if rank != 1:
        dist.barrier() if how == "hangs with the others" else None
        store.set(f"formed {rank}", "")
        return rank
    if how != "hangs with the others":
        # Or the others would fail, too, where they are still connecting.
        store.wait([f"formed {peer}" for peer in range(world_size) if peer != rank])
    if how == "raises":
        raise KeyError("weights")
    if how == "odd":
        raise OddError("a", "b")
    if how == "unpicklable result":
        return lambda: None
    if how == "exits":
        sys.exit(4)
    if how == "dies":
        os._exit(9)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("how", "cause", "words"),
    [
        ("raises", KeyError, "KeyError: 'weights'"),
        ("odd", RuntimeError, "OddError: a b"),
        ("unpicklable result", TypeError, "the rank's result can't be sent"),
        ("exits", SystemExit, "SystemExit: 4"),
        ("dies", type(None), "rank 1: died (exit code 9)"),
        ("killed", type(None), "rank 1: died (signal SIGKILL)"),
    ],
)
def test_failure_of_one_rank(how, cause, words):
    with pytest.raises(RanksFailed) as raised:
        spawn(_fails, 3, how)
    assert words in str(raised.value)
    assert "1 of 3 ranks failed" in str(raised.value)
    assert isinstance(raised.value.__cause__, cause)
    assert [result.ok for result in raised.value.results] == [True, False, True]
    assert raised.value.results[2].value == 2
    assert spawn(_pid, 2)[0] > 0, "the next job works"


def _pid(rank, world_size):
    return os.getpid()


def _leaves_a_child(rank, world_size):
    if rank == 1:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


@pytest.mark.cpu
def test_a_dead_rank_whose_child_lives():
    """The child has the rank's end of the pipe, which stays open."""
    with within(15), pytest.raises(RanksFailed, match=r"rank 1: died \(signal SIGKILL\)"):
        spawn(_leaves_a_child, 2)


def _raises_and_hangs(rank, world_size):
    if rank == 1:
        raise ValueError("first")
    time.sleep(60)


@pytest.mark.cpu
@pytest.mark.alone
def test_the_others_are_killed_after_a_grace(monkeypatch):
    monkeypatch.setattr(launching, "_GRACE_S", 0.5)
    with (
        within(10),
        pytest.raises(RanksFailed, match=r"within 0\.5 s of the failure of rank 1") as raised,
    ):
        spawn(_raises_and_hangs, 2)
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.cpu
def test_timeout():
    ends = launching.run_ranks(_fails, 2, "hangs", timeout=8)
    assert ends[0].value == 0
    assert isinstance(ends[1].exception, TimeoutError)


@pytest.mark.cpu
def test_bad_arguments():
    with pytest.raises(ValueError, match="0 ranks asked"):
        spawn(_pid, 0)
    with pytest.raises(TypeError, match="num_ranks is a str"):
        spawn(_pid, "2")
    with pytest.raises(ValueError, match="backend 'tpu', allowed are"):
        spawn(_pid, 2, backend="tpu")
    with pytest.raises(ValueError, match="fn must be importable"):
        spawn(lambda rank, world_size: None, 2)


@pytest.mark.alone
def test_more_ranks_than_gpus():
    present = torch.cuda.device_count()
    refused = pytest.raises(ValueError, match=f"{present + 1} ranks asked, .* this machine has {present}")
    with within(1), refused:
        spawn(_pid, present + 1, backend="gpu")


def _target_of_rank(rank, world_size):
    return target.backend(), target.interpreted(), str(target.device(rank))


def test_cpu_ranks_on_any_machine():
    try:
        target._check_interpreter(triton.__version__, numpy.__version__)
    except RuntimeError as error:
        pytest.skip(str(error))
    assert spawn(_target_of_rank, 2, backend="cpu") == [("host", True, "cpu")] * 2


def _environment_and_children(rank, world_size):
    child = os.fork()  # e.g. a data loader
    if child == 0:
        os._exit(5)
    return os.environ.get("PYROCSHMEM_TEST_WORD"), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.cpu
@pytest.mark.parametrize("word", ["first", "second"])
def test_ranks_see_the_environment_of_now(monkeypatch, word):
    monkeypatch.setenv("PYROCSHMEM_TEST_WORD", word)
    assert spawn(_environment_and_children, 2) == [(word, 5)] * 2


@pytest.mark.cpu
def test_thread_ranks():
    def body(group, factor):
        replies = group.exchange(bytes([group.rank * factor]), "call")
        if factor == 3 and group.rank == 1:
            raise KeyError("weights")
        group.barrier()
        return [reply[0] for reply in replies]

    assert spawn_threads(body, 3, 2, timeout=float("inf")) == [[0, 2, 4]] * 3
    with pytest.raises(
        RanksFailed, match="rank 0 stopped because rank 1 gave up: KeyError: 'weights'"
    ) as raised:
        spawn_threads(body, 3, 3)
    assert isinstance(raised.value.__cause__, KeyError)
    assert len(raised.value.results) == 3


ORPHANS = """
import os, sys, time
import pyrocshmem

def main(rank, world_size, folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    while True:          # a rank that spins
        pass

if __name__ == "__main__":
    pyrocshmem.spawn(main, 2, sys.argv[1])
"""


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("interpret", ["1", "0"], ids=["forked", "spawned"])
@pytest.mark.alone
def test_no_rank_outlives_its_parent(tmp_path, interpret):
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    pids = tmp_path / "pids"
    pids.mkdir()
    environment = dict(os.environ, PYTHONPATH=str(ROOT), TRITON_INTERPRET=interpret)
    parent = subprocess.Popen([sys.executable, str(script), str(pids)], env=environment)
    deadline = time.monotonic() + 60
    try:
        while len(found := [int(path.name) for path in pids.iterdir()]) < 2:
            assert parent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert all(running(pid) for pid in found)
    finally:
        parent.kill()
        parent.wait()
    while any(running(pid) for pid in found):
        assert time.monotonic() < deadline, "ranks spin on after the death of their parent"
        time.sleep(0.05)


TORCHRUN = """
import pyrocshmem, torch
rank, world_size = pyrocshmem.from_torchrun()
assert pyrocshmem.from_torchrun() == (rank, world_size)
with pyrocshmem.Heap(1 << 20) as heap:
    x = heap.zeros(world_size)
    for peer in range(world_size):
        heap.peer_view(x, peer)[rank] = rank + 1
    heap.barrier()
    print(f"rank {rank}: {x.tolist()}")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
try:
    pyrocshmem.Heap(1 << 20)
except RuntimeError as error:
    assert "WORLD_SIZE is 2, but this process has no process group" in str(error)
    pyrocshmem.from_torchrun()  # once more, over the same store
with pyrocshmem.Heap(1 << 20) as heap:
    assert heap.world_size == 2
"""


@pytest.mark.slow
@pytest.mark.num_ranks(2)
@pytest.mark.gpu_a_rank("torchrun starts a rank a GPU")
def test_under_torchrun(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(TORCHRUN)
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    # Two ranks write to one pipe: their texts may come on one line, and the line ends together.
    assert [done.stdout.count(f"rank {rank}: [1.0, 2.0]") for rank in (0, 1)] == [1, 1]


@pytest.mark.cpu
def test_not_under_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ValueError, match="RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR not set; use `torchrun"):
        launching.from_torchrun()


def _loopback(rank, world_size):
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = {
        os.readlink(path).strip("socket:[]") for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
    }
    return [row[1].split(":")[0] for row in listening if row[3] == "0A" and row[9] in mine]


@pytest.mark.cpu
def test_cpu_ranks_listen_on_the_loopback_interface_only():
    addresses = [address for found in values(run_ranks(_loopback, 2)) for address in found]
    assert set(addresses) <= {"0100007F"}
