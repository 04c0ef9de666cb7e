"""The host backend between real processes and threads: data, permissions, lifetime, counts."""

import concurrent.futures
import ctypes
import os
import random
import signal
import stat
import threading
import time
from collections.abc import Iterator

import pytest

from pyrocshmem import finegrained_alloc as fga
from tests.finegrained_alloc import support

TIER = 0
pytestmark = pytest.mark.cpu

PAGE = os.sysconf("SC_PAGESIZE")


def view(ptr: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * nbytes).from_address(ptr)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with support.nothing_kept():
        yield


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 3_000_001])
def test_memory_is_zero_aligned_and_writable_to_the_last_byte(nbytes: int) -> None:
    before = fga.live()
    with fga.alloc(nbytes, "host") as memory:
        assert (memory.nbytes, memory.backend, memory.device) == (nbytes, "host", 0)
        assert memory.ptr % PAGE == 0
        data = view(memory.ptr, nbytes)
        assert data.raw == bytes(nbytes)
        data.raw = random.randbytes(nbytes)
        held = -(-nbytes // PAGE) * PAGE
        now = fga.live()
        assert (now.allocations, now.bytes) == (before.allocations + 1, before.bytes + held)
        assert now.total_allocations == before.total_allocations + 1


def test_both_sides_see_each_other_s_writes() -> None:
    nbytes = 3 * PAGE + 17
    question, answer = random.randbytes(nbytes), random.randbytes(nbytes)
    code = """
view = fga.open_handle(bytes.fromhex(sys.argv[1]))
data = (ctypes.c_char * view.nbytes).from_address(view.ptr)
say(seen=data.raw.hex(), nbytes=view.nbytes, backend=view.backend, mappings=fga.live().mappings)
data.raw = bytes.fromhex(sys.stdin.readline())
view.close()
say(mappings=fga.live().mappings)
"""
    with fga.alloc(nbytes, "host") as memory:
        view(memory.ptr, nbytes).raw = question
        handle = memory.export()
        assert len(handle) == fga.handle_bytes()
        with support.child(code, handle.hex()) as peer:
            seen = support.hear(peer)
            assert seen == {"seen": question.hex(), "nbytes": nbytes, "backend": "host", "mappings": 1}
            support.tell(peer, answer.hex())
            assert support.hear(peer) == {"mappings": 0}
        assert view(memory.ptr, nbytes).raw == answer


def test_the_file_is_private_whatever_the_umask() -> None:
    for umask in (0o000, 0o777, 0o022):
        old = os.umask(umask)
        try:
            memory = fga.alloc(1, "host")
        finally:
            os.umask(old)
        path = support.file_of(memory.export())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        support.run_child("fga.open_handle(bytes.fromhex(sys.argv[1])).close()", memory.export().hex())
        memory.free()
        assert not path.exists()


def test_no_file_has_a_name_at_any_time() -> None:
    nbytes = support.odd_size()
    with fga.alloc(nbytes, "host") as memory:
        about = support.file_of(memory.export()).stat()
        assert (about.st_size, about.st_nlink) == (nbytes, 0)
        assert support.files_of_size(nbytes) == []


def test_a_descriptor_is_held_until_the_memory_is_sealed_or_freed() -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = held()
    memories = [fga.alloc(1, "host") for _ in range(50)]
    inodes = {support.file_of(memory.export()).stat().st_ino for memory in memories}
    assert (held(), len(inodes)) == (before + 50, 50)
    for memory in memories[:20]:
        memory.seal()
    assert held() == before + 30
    for memory in memories:
        memory.free()
    assert held() == before


def test_no_descriptor_left() -> None:
    code = """
import resource
fga.load()
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
memories = []
try:
    while True: memories.append(fga.alloc(1, "host"))
except RuntimeError as error:
    say(text=str(error), some=len(memories) > 5)
memories.pop().seal()
fga.alloc(1, "host").free()
"""
    (failed,) = support.run_child(code)
    assert "Too many open files (at most 16, `ulimit -n`; an allocation holds one until" in failed["text"]
    assert failed["some"]


def test_space_is_reserved_at_once() -> None:
    """So that a full /dev/shm is an error of alloc and never a SIGBUS of the first write."""
    with fga.alloc(8 << 20, "host") as memory:
        assert support.file_of(memory.export()).stat().st_blocks * 512 >= 8 << 20


def test_sealed_memory_outlives_its_killed_owner_and_leaves_nothing() -> None:
    code = """
memory = fga.alloc(5000, "host")
(ctypes.c_char * 5).from_address(memory.ptr).raw = b"hello"
say(handle=memory.export().hex())
sys.stdin.readline()
memory.seal()
memory.seal()
say(error=error_of(memory.export))
sys.stdin.readline()
"""
    with support.child(code) as owner:
        handle = bytes.fromhex(support.hear(owner)["handle"])
        opened = fga.open_handle(handle)
        support.tell(owner)
        kind, text = support.hear(owner)["error"]
        assert kind == "ValueError"
        assert "sealed" in text
        assert not support.file_of(handle).exists()
        with pytest.raises(fga.StaleHandle, match="freed or sealed"):
            fga.open_handle(handle)
        owner.send_signal(signal.SIGKILL)
        owner.wait(support.TIMEOUT_S)
    assert view(opened.ptr, 5).raw == b"hello"
    view(opened.ptr, 5000).raw = random.randbytes(5000)
    opened.close()


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "os._exit(0)"])
def test_exit_without_freeing_leaves_no_file(end: str) -> None:
    nbytes = support.odd_size()
    support.run_child(f'memories = [fga.alloc({nbytes}, "host") for _ in range(3)]\n{end}')
    assert support.files_of_size(nbytes) == []


@pytest.mark.alone
def test_memory_freed_by_its_owner_stays_with_the_peer() -> None:
    with support.own(5000) as (owner, handle):
        opened = fga.open_handle(handle)
        support.tell(owner)
        assert owner.wait(support.TIMEOUT_S) == 0
        view(opened.ptr, 5000).raw = random.randbytes(5000)
        opened.close()


def test_threads_of_one_process_share_the_pointer() -> None:
    memory = fga.alloc(5000, "host")
    handle = memory.export()
    views = [fga.open_handle(handle) for _ in range(3)]
    assert {opened.ptr for opened in views} == {memory.ptr}
    assert len({opened.number for opened in views}) == 3
    memory.free()
    assert not support.file_of(handle).exists()
    with pytest.raises(fga.StaleHandle, match="was freed"):
        fga.open_handle(handle)
    view(memory.ptr, 5000).raw = random.randbytes(5000)  # still there: three threads have it open
    for opened in views:
        opened.close()


def test_a_forked_child_owns_nothing_of_its_parent() -> None:
    code = """
memory = fga.alloc(5000, "host")
handle = memory.export()
(ctypes.c_char * 5).from_address(memory.ptr).raw = b"hello"
descriptors = len(os.listdir("/proc/self/fd"))
child = os.fork()
if child == 0:
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1
    with fga.open_handle(handle) as view:
        again = ctypes.string_at(view.ptr, 5).decode()
        say(stats=[fga.live().allocations, fga.live().mappings], free=error_of(memory.free), seen=again,
            export=error_of(memory.export), other=view.ptr != memory.ptr)
    with fga.alloc(1, "host") as own, fga.open_handle(own.export()) as same:
        assert same.ptr == own.ptr
    sys.exit(0)
os.waitpid(child, 0)
say(still=fga.live().allocations, export=memory.export() == handle)
memory.free()
"""
    in_child, in_parent = support.run_child(code)
    assert in_child["stats"] == [0, 1]
    assert in_child["free"][0] == in_child["export"][0] == "ValueError"
    assert in_child["other"]
    assert in_child["seen"] == "hello"
    assert in_parent == {"still": 1, "export": True}


def test_many_threads_at_once() -> None:
    before = fga.live()
    barrier = threading.Barrier(8)

    def work(seed: int) -> None:
        chosen = random.Random(seed)
        barrier.wait(support.TIMEOUT_S)
        for _ in range(50):
            nbytes = chosen.randrange(1, 3 * PAGE)
            with fga.alloc(nbytes, "host") as memory, fga.open_handle(memory.export()) as opened:
                view(opened.ptr, nbytes).raw = bytes([seed]) * nbytes
                assert view(memory.ptr, nbytes).raw == bytes([seed]) * nbytes

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    after = fga.live()
    assert after.total_allocations - before.total_allocations == 400
    assert after.total_mappings - before.total_mappings == 400


def test_objects_are_fixed() -> None:
    with fga.alloc(1, "host") as memory, pytest.raises(AttributeError):
        memory.ptr = 0  # type: ignore[misc]


def test_peers_on_the_host_always_reach_each_other() -> None:
    assert fga.can_access_peer("host", 0, 0)
    assert fga.device_count("host") == 1
    fga.enable_peer_access("host", 0, 0)
    assert fga.available("host") == (True, "host: /dev/shm")


@pytest.mark.alone
def test_allocating_is_quick_enough_for_a_job_s_start() -> None:
    start = time.perf_counter()
    fga.alloc(64 << 20, "host").free()
    assert time.perf_counter() - start < 5


def test_copies_of_rows() -> None:
    """Nothing between the rows, nor behind them, is touched; what can't be copied raises before anything is."""
    source, to = (ctypes.c_ubyte * 60)(*range(60)), (ctypes.c_ubyte * 60)(*[200] * 60)
    places = ctypes.addressof(to), ctypes.addressof(source)

    def copy(to_pitch: int, source_pitch: int, width: int, rows: int) -> None:
        fga.copy_rows("host", 0, places[0], to_pitch, places[1], source_pitch, width, rows)

    copy(10, 7, 6, 5)
    for i in range(5):
        assert list(to[10 * i : 10 * i + 10]) == [*range(7 * i, 7 * i + 6), *[200] * 4]
    assert list(to[50:]) == [200] * 10
    before = list(to)
    cut = 2**64  # what ctypes would make 0 of
    bad = (5, 7, 6, 5), (10, 5, 6, 5), (10, 2**31, 6, 5), (10, 7, -6, 5), (-10, 7, 6, 5)
    for sizes in (*bad, (10, 7, cut + 6, 5), (10, 7, 6, cut + 5), (cut + 10, 7, 6, 5)):
        with pytest.raises(ValueError, match=r"pitches|negative"):
            copy(*sizes)
    with pytest.raises(ValueError, match="device 1"):
        fga.copy_rows("host", 1, *places, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="device is 4294967296"):
        fga.copy_rows("host", 2**32, *places, 1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"0x|nil"):
        fga.copy_rows("host", 0, 0, 1, places[1], 1, 1, 1)
    assert list(to) == before
