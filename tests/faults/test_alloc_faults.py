"""Faults 17 and 25 at the allocator: handles that must not open, a library that is not built, memory that is not there.

After each of them the process goes on: a sound allocation is made, opened and freed, and the counts are as before.
"""

import contextlib
import gc
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrocshmem import finegrained_alloc as fga
from tests.finegrained_alloc import support, test_handles

TIER = 1
pytestmark = pytest.mark.cpu

PROMPT_S = 2.0  # a fault at this layer needs no waiting


@pytest.fixture(autouse=True, scope="module")
def built_library() -> None:
    support.build_library()


@pytest.fixture(autouse=True)
def the_process_lives_on() -> Iterator[None]:
    gc.collect()  # what an earlier test left must not go meanwhile
    before = fga.live()
    yield
    with fga.alloc(5000, "host") as memory:
        support.run_child("fga.open_handle(bytes.fromhex(sys.argv[1])).close()", memory.export().hex())
    after = fga.live()
    assert (after.allocations, after.mappings) == (before.allocations, before.mappings)


# -- case 17 --


def test_handle_of_a_part_of_an_allocation() -> None:
    with fga.alloc(1 << 20, "host") as memory, pytest.raises(ValueError, match="only a base can be exported"):
        fga.export_pointer(memory.ptr + 65536)


def test_truncated_handle() -> None:
    with support.own(5000) as (_, handle):
        for length in range(0, len(handle), 7):
            with pytest.raises(ValueError, match="truncated"):
                fga.open_handle(handle[:length])


@pytest.mark.parametrize("reaped", [True, False])
@pytest.mark.alone
def test_handle_of_a_killed_process(reaped: bool) -> None:
    """Nothing is left of its file, whether the process still is a zombie or not."""
    nbytes = support.odd_size()
    with support.own(nbytes) as (owner, handle):
        owner.send_signal(signal.SIGKILL)
        if reaped:
            owner.wait(support.TIMEOUT_S)
        else:
            wait_for_zombie(owner.pid)
        assert support.files_of_size(nbytes) == []
        start = time.perf_counter()
        with pytest.raises(fga.StaleHandle, match=f"owner, process {owner.pid}, is not running any more"):
            fga.open_handle(handle)
        assert time.perf_counter() - start < PROMPT_S


def wait_for_zombie(pid: int) -> None:
    deadline = time.monotonic() + support.TIMEOUT_S
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_handle_of_a_process_that_ended_well() -> None:
    with support.own(5000) as (owner, handle):
        support.tell(owner)
        assert owner.wait(support.TIMEOUT_S) == 0
    with pytest.raises(fga.StaleHandle, match="not running any more"):
        fga.open_handle(handle)


REPLACES = """
memory = fga.alloc(5000, "host")
handle = memory.export()
say(handle=handle.hex())
sys.stdin.readline()
other = fga.alloc(5000, "host")
place, kept = [int.from_bytes(h[104:112], "little") for h in (handle, other.export())]
before = os.dup(place)
os.dup2(kept, place)
say(replaced=True)
sys.stdin.readline()
os.dup2(before, place)
say(restored=True)
sys.stdin.readline()
"""


def test_another_file_under_the_same_descriptor_is_not_mapped() -> None:
    """Same descriptor, same size, same mode, same user; but not the inode that was exported."""
    with support.child(REPLACES) as owner:
        handle = bytes.fromhex(support.hear(owner)["handle"])
        support.tell(owner)
        assert support.hear(owner) == {"replaced": True}
        with pytest.raises(fga.StaleHandle, match="is another file now: the owner has freed or sealed"):
            fga.open_handle(handle)
        support.tell(owner)
        assert support.hear(owner) == {"restored": True}
        fga.open_handle(handle).close()  # the control: the right file opens


@pytest.mark.parametrize("kind", ["pipe", "file with a name"])
@pytest.mark.alone
def test_a_handle_that_leads_to_something_else_opens_nothing(tmp_path: Path, kind: str) -> None:
    """The handle is forged with the right inode. To open a pipe may wait, and other files are not heaps."""
    nbytes = os.sysconf("SC_PAGESIZE")
    path = tmp_path / "other"
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.touch(mode=0o600)
        os.truncate(path, nbytes)
    with support.own(nbytes) as (_, handle), contextlib.ExitStack() as stack:
        fd = os.open(path, os.O_RDWR)
        stack.callback(os.close, fd)
        about = os.fstat(fd)
        own = fga.alloc(nbytes, "host")  # a handle with this process' identity, but for the token
        stack.callback(own.free)
        mine = test_handles.forged(own.export(), 48, handle[48:64])
        fga.open_handle(mine).close()  # the control
        for offset, number in enumerate((about.st_ino, about.st_dev, fd)):
            mine = test_handles.forged(mine, support.PAYLOAD + 8 * offset, number.to_bytes(8, "little"))
        start = time.perf_counter()
        with pytest.raises(ValueError, match=r"not the file that was exported .*, 1 names"):
            fga.open_handle(mine)
        assert time.perf_counter() - start < PROMPT_S


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o606, 0o700])
def test_a_file_that_others_may_use_is_not_mapped(mode: int) -> None:
    with support.own(5000) as (_, handle):
        path = support.file_of(handle)
        assert path.stat().st_mode & 0o7777 == 0o600
        path.chmod(mode)
        with pytest.raises(ValueError, match=f"mode {mode:o}"):
            fga.open_handle(handle)
        path.chmod(0o600)
        fga.open_handle(handle).close()


# -- case 25 --


def test_library_not_built(tmp_path: Path) -> None:
    """Importing works, using it names the command, and the command makes it work."""
    copy = tmp_path / "finegrained_alloc"
    shutil.copytree(support.PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    code = f"""
for name in [name for name in sys.modules if name.startswith("finegrained_alloc")]: del sys.modules[name]
sys.path.insert(0, {str(tmp_path)!r})
import finegrained_alloc as fga
assert fga.__file__.startswith({str(tmp_path)!r})
calls = [lambda: fga.alloc(1, "host"), fga.live, lambda: fga.open_handle(b""), lambda: fga.available("host"), fga.load]
for call in calls: say(error=error_of(call), kind=fga.NotBuilt.__bases__[0].__name__)
import subprocess
subprocess.run(["sh", {str(copy / "build.sh")!r}], check=True)
with fga.alloc(1, "host") as memory: say(nbytes=memory.nbytes)
"""
    *facts, built = support.run_child(code)
    for fact in facts:
        kind, text = fact["error"]
        assert (kind, fact["kind"]) == ("NotBuilt", "RuntimeError")
        assert "finegrained_alloc/build.sh" in text
        assert str(copy / "build.sh") in text
    assert built == {"nbytes": 1}


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_library_damaged(tmp_path: Path, content: bytes) -> None:
    copy = tmp_path / "finegrained_alloc"
    shutil.copytree(support.PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (copy / "libfinegrained_alloc.so").write_bytes(content)
    code = f"""
for name in [name for name in sys.modules if name.startswith("finegrained_alloc")]: del sys.modules[name]
sys.path.insert(0, {str(tmp_path)!r})
import finegrained_alloc as fga
say(error=error_of(fga.load))
"""
    ((kind, text),) = [fact["error"] for fact in support.run_child(code)]
    assert kind == "NotBuilt"
    assert "does not load" in text
    assert "build.sh" in text


@pytest.mark.parametrize("nbytes", [1 << 50, (1 << 63) - 1])
@pytest.mark.alone
def test_more_memory_than_there_is(nbytes: int) -> None:
    start = time.perf_counter()
    with pytest.raises(MemoryError, match=f"host: {nbytes} bytes in /dev/shm: .*bytes free there"):
        fga.alloc(nbytes, "host")
    assert time.perf_counter() - start < PROMPT_S


def test_no_file_may_grow() -> None:
    """The system refuses in the middle of the work (as a full /dev/shm would): an error, no signal, no file."""
    code = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
say(error=error_of(fga.alloc, 1 << 20, "host"))
with fga.alloc(65536, "host") as memory: say(nbytes=memory.nbytes)
"""
    failed, worked = support.run_child(code)
    assert failed["error"][0] == "MemoryError"
    assert "1048576 bytes" in failed["error"][1]
    assert "limited to 65536 bytes (RLIMIT_FSIZE, `ulimit -f`)" in failed["error"][1]
    assert worked == {"nbytes": 65536}


def test_no_address_space() -> None:
    """The text names that limit and its value, and doesn't speak of /dev/shm, which has room; in a peer, too."""
    code = """
import resource
fga.load()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + (32 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
say(error=error_of(fga.alloc, 256 << 20, "host"), limit=limit)
say(error=error_of(fga.open_handle, bytes.fromhex(sys.argv[1])), limit=limit)
with fga.alloc(5000, "host") as memory: say(nbytes=memory.nbytes, allocations=fga.live().allocations)
"""
    with support.own(256 << 20) as (_, handle):
        *failed, worked = support.run_child(code, handle.hex())
    for facts in failed:
        kind, text = facts["error"]
        assert kind == "MemoryError"
        assert f"mmap of {256 << 20} bytes: the address space of this process is limited" in text
        assert f"to {facts['limit']} bytes (RLIMIT_AS, `ulimit -v`)" in text
        assert "shm" not in text
    assert worked == {"nbytes": 5000, "allocations": 1}


def test_no_gpu_runtime() -> None:
    code = """
say(error=error_of(fga.alloc, 5000, sys.argv[1]), found=fga.available(sys.argv[1]))
with fga.alloc(5000, "host") as memory: say(nbytes=memory.nbytes)
"""
    for backend, variable in (("cuda", "PYROCSHMEM_CUDA_LIBRARY"), ("hip", "PYROCSHMEM_HIP_LIBRARY")):
        failed, worked = support.run_child(code, backend, **{variable: "/nonexistent.so"})
        assert failed["error"] == ["Unavailable", failed["found"][1]]
        assert failed["found"][0] is False
        assert "/nonexistent.so" in failed["found"][1]
        assert worked == {"nbytes": 5000}


def test_pool_without_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(RuntimeError, match=r"needs a GPU, and PyTorch .* sees none"), fga.pool():
        pass
