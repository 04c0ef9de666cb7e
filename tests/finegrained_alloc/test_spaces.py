"""Memory at given addresses in reserved space: it grows without moving, between processes and threads.

On the host for real; what the CUDA backend calls, against a stand-in whose memory is shared between processes, too.
"""

import ctypes
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrocshmem import finegrained_alloc as fga
from tests.finegrained_alloc import support
from tests.finegrained_alloc.standin import PREAMBLE, Standin
from tests.finegrained_alloc.test_handles import forged

TIER = 1
pytestmark = pytest.mark.cpu

PIECE = fga.PIECE
START_TIME = 72  # offset in handle.h
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with support.nothing_kept():
        mapped = _reserved_here()
        yield
        assert _reserved_here() == mapped


def _reserved_here(nbytes: int = 1 << 36) -> int:
    """Ranges of so many addresses and more that this process can't touch."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *_ = line.split()
        start, end = (int(each, 16) for each in addresses.split("-"))
        found += rights.startswith("---") and end - start >= nbytes
    return found


def _blocks(handle: bytes) -> int:
    return support.file_of(handle).stat().st_blocks * 512


def test_pieces_lie_where_they_were_put_and_keep_what_they_hold() -> None:
    with fga.reserve(1 << 37, "host") as space:
        assert _reserved_here() == 1
        first = fga.alloc(PIECE, "host", at=space.ptr)
        second = fga.alloc(3 * PIECE, "host", at=space.ptr + PIECE)
        assert (first.ptr, second.ptr) == (space.ptr, space.ptr + PIECE)
        data = random.randbytes(4 * PIECE)
        both = (ctypes.c_char * (4 * PIECE)).from_address(space.ptr)
        assert both.raw == bytes(4 * PIECE)
        both.raw = data
        assert (_blocks(first.export()), _blocks(second.export())) == (PIECE, 3 * PIECE)
        second.free()
        assert ctypes.string_at(space.ptr, PIECE) == data[:PIECE]
        again = fga.alloc(PIECE, "host", at=space.ptr + 2 * PIECE)
        assert ctypes.string_at(again.ptr, PIECE) == bytes(PIECE)
        again.free()
        first.free()


PEER = """
space = fga.reserve(1 << 30, "host")
views = []
for handle in sys.argv[1:]:
    views.append(fga.open_handle(bytes.fromhex(handle), at=space.ptr + sum(view.nbytes for view in views)))
whole = (ctypes.c_char * sum(view.nbytes for view in views)).from_address(space.ptr)
say(seen=[view.ptr - space.ptr for view in views], sum=sum(whole.raw))
whole[-1] = b"x"
space.free()                      # its addresses go with the last of these
say(last=whole.raw[-1:].decode())
for view in views: view.close()
say(mappings=fga.live().mappings)
"""


def test_a_peer_maps_pieces_behind_one_another() -> None:
    with fga.reserve(1 << 30, "host") as space:
        pieces = [fga.alloc(n * PIECE, "host", at=space.ptr + o * PIECE) for n, o in ((1, 0), (2, 1))]
        whole = (ctypes.c_char * (3 * PIECE)).from_address(space.ptr)
        whole.raw = random.randbytes(PIECE) * 3
        handles = [piece.export().hex() for piece in pieces]
        expected = sum(whole.raw)
        facts = support.run_child(PEER, *handles)
        assert facts == [{"seen": [0, PIECE], "sum": expected}, {"last": "x"}, {"mappings": 0}]
        assert whole.raw[-1:] == b"x"
        for piece in pieces:
            piece.free()


def test_what_was_given_back_can_not_be_touched() -> None:
    code = """
import faulthandler; faulthandler.disable()
space = fga.reserve(1 << 30, "host")
memory = fga.alloc(fga.PIECE, "host", at=space.ptr)
child = os.fork()
if child == 0:
    memory = fga.alloc(fga.PIECE, "host")   # the child's own is none of the parent's space
    say(at=error_of(lambda: fga.alloc(fga.PIECE, "host", at=space.ptr + fga.PIECE)))
    os._exit(0)
os.waitpid(child, 0)
memory.free()
child = os.fork()
if child == 0:
    ctypes.string_at(space.ptr, 1)
    os._exit(0)
say(signal=os.WTERMSIG(os.waitpid(child, 0)[1]))
"""
    forked, touched = support.run_child(code)
    assert "this process has not reserved them" in forked["at"][1]
    assert touched == {"signal": 11}


@pytest.mark.parametrize(
    ("offset", "nbytes", "words"),
    [
        (0, PIECE, "other memory lies there"),
        (2 * PIECE, PIECE, "other memory lies there"),
        (PIECE, 2 * PIECE, "other memory lies there"),
        (PIECE + PAGE, PIECE, "multiple of 2 MiB"),
        (PIECE, PAGE, "multiple of 2 MiB"),
        (7 * PIECE, 2 * PIECE, "not reserved them"),
        (-PIECE, PIECE, "not reserved them"),
        (100 * PIECE, PIECE, "not reserved them"),
    ],
)
def test_bad_places(offset: int, nbytes: int, words: str) -> None:
    with (
        fga.reserve(8 * PIECE, "host") as space,
        fga.alloc(PIECE, "host", at=space.ptr),
        fga.alloc(PIECE, "host", at=space.ptr + 2 * PIECE),
    ):
        with pytest.raises(ValueError, match=words):
            fga.alloc(nbytes, "host", at=space.ptr + offset)
        fga.alloc(PIECE, "host", at=space.ptr + 7 * PIECE).free()


def test_bad_reservations() -> None:
    for nbytes in (0, 1, PIECE + 1, -PIECE):
        with pytest.raises(ValueError, match="expected"):
            fga.reserve(nbytes, "host")
    with pytest.raises(ValueError, match="device 1"):
        fga.reserve(PIECE, "host", 1)
    with pytest.raises(MemoryError, match="mmap of"):
        fga.reserve(1 << 62, "host")
    space = fga.reserve(PIECE, "host")
    space.free()
    with pytest.raises(ValueError, match="not address space"):
        space.free()
    with pytest.raises(ValueError, match="not reserved"):
        fga.alloc(PIECE, "host", at=space.ptr)


def test_a_limit_of_addresses_is_named() -> None:
    code = """
import resource
fga.load()
resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
say(error=error_of(fga.reserve, 1 << 36, "host"))
"""
    (facts,) = support.run_child(code)
    assert facts["error"][0] == "MemoryError"
    assert "RLIMIT_AS" in facts["error"][1]


def test_threads_share_the_pointer_and_the_space_goes_with_the_last() -> None:
    """The owner's thread gives memory and space back while another has it open."""
    space = fga.reserve(1 << 37, "host")
    memory = fga.alloc(PIECE, "host", at=space.ptr)
    with fga.reserve(PIECE, "host") as other:
        opened = fga.open_handle(memory.export(), at=other.ptr)
        assert opened.ptr == memory.ptr
    memory.free()
    space.free()
    assert _reserved_here() == 1
    ctypes.memset(opened.ptr, 5, PIECE)
    with pytest.raises(ValueError, match="not reserved them"):
        fga.alloc(PIECE, "host", at=space.ptr + PIECE)
    opened.close()


# ---- CUDA, against the stand-in


@pytest.fixture
def cuda(standin: Path, tmp_path: Path) -> Standin:
    return Standin(standin, "cuda", tmp_path / "log")


OWNER = (
    PREAMBLE
    + """
space = fga.reserve(1 << 30, B, 1)
memory = fga.alloc(2 * fga.PIECE, B, 1, at=space.ptr + fga.PIECE)
(ctypes.c_char * 5).from_address(memory.ptr).raw = b"hello"
descriptors = len(os.listdir("/proc/self/fd"))
handle = memory.export()
say(handle=handle.hex(), space=space.ptr, listens=len(os.listdir("/proc/self/fd")) - descriptors)
sys.stdin.readline()
memory.seal()
memory.seal()
say(sealed=error_of(memory.export), seen=ctypes.string_at(memory.ptr, 5).decode())
sys.stdin.readline()
memory.free()
space.free()
say(left=len(os.listdir("/proc/self/fd")) - descriptors, **state())
"""
)
OPENER = """
space = fga.reserve(1 << 30, B, 0)
handle = bytes.fromhex(sys.argv[2])
say(anywhere=error_of(fga.open_handle, handle, 0))
view = fga.open_handle(handle, 0, at=space.ptr)
say(same=view.ptr == space.ptr, seen=ctypes.string_at(view.ptr, 5).decode(), space=space.ptr)
(ctypes.c_char * 5).from_address(view.ptr).raw = b"jello"
view.close()
space.free()
assert fga.live().mappings == 0 and state() == dict(live=0, device=0, depth=0, sticky=0)
"""


def _blind(handle: str) -> bytes:
    """That handle, of a process of which only the number is known."""
    return forged(bytes.fromhex(handle), START_TIME, bytes(8))


LATE = "say(error=error_of(lambda: fga.open_handle(bytes.fromhex(sys.argv[2]), 0, at=fga.reserve(1 << 30, B, 0).ptr)))"


def test_cuda_memory_in_a_space_between_processes(cuda: Standin) -> None:
    """What the driver is asked for on both sides, and that sealing lets no new peer in."""
    cuda.log.unlink(missing_ok=True)
    with support.child(OWNER, "cuda", **cuda.environment) as process:
        facts = support.hear(process)
        assert facts["listens"] == 1
        at, size = facts["space"] + PIECE, 2 * PIECE
        assert [line for line in cuda.calls() if line.startswith("cuMem")] == [
            "cuMemGetAllocationGranularity device=1 option=0",
            f"cuMemAddressReserve nbytes={1 << 30} alignment={PIECE} at=0 flags=0",
            f"cuMemCreate device=1 nbytes={size} type=1 handles=1 flags=0",
            "cuMemExportToShareableHandle type=1 flags=0",
            f"cuMemMap device=1 ptr={at:#x} nbytes={size} offset=0 flags=0",
            f"cuMemSetAccess ptr={at:#x} nbytes={size} device=1 flags=3 count=1",
            "cuMemRelease",
        ]
        anywhere, opened = cuda.run(OPENER, facts["handle"])
        assert anywhere["anywhere"][0] == "ValueError"
        assert "in reserved address space" in anywhere["anywhere"][1]
        there = opened.pop("space")
        assert opened == {"same": True, "seen": "hello"}
        assert [line for line in cuda.calls() if line.startswith("cuMem")][2:] == [
            "cuMemImportFromShareableHandle type=1",
            f"cuMemMap device=0 ptr={there:#x} nbytes={size} offset=0 flags=0",
            f"cuMemSetAccess ptr={there:#x} nbytes={size} device=0 flags=3 count=1",
            "cuMemRelease",
            f"cuMemUnmap device=0 ptr={there:#x} nbytes={size}",
            f"cuMemAddressFree ptr={there:#x} nbytes={1 << 30}",
        ]
        support.tell(process)
        sealed = support.hear(process)
        assert sealed["seen"] == "jello"
        assert "sealed" in sealed["sealed"][1]
        (late,) = cuda.run(LATE, facts["handle"])
        assert late["error"][0] == "StaleHandle"
        assert "was freed or sealed" in late["error"][1]
        support.tell(process)
        # The listening socket stays, the descriptor of the memory went.
        assert support.hear(process) == {"left": 0, "live": 0, "device": 0, "depth": 0, "sticky": 0}


def test_cuda_memory_of_an_owner_that_has_gone_or_answers_nothing(cuda: Standin) -> None:
    with support.child(OWNER, "cuda", **cuda.environment) as process:
        handle = support.hear(process)["handle"]
    (late,) = cuda.run(LATE, handle)
    assert late["error"][0] == "StaleHandle"
    assert "is not running any more" in late["error"][1]
    # Where pids tell nothing (as in another namespace), nobody listens under that name.
    (late,) = cuda.run(LATE, _blind(handle).hex())
    assert late["error"][0] == "StaleHandle"
    assert "gives no descriptors: it has ended" in late["error"][1]


def test_cuda_descriptors_are_not_taken_from_another_process(cuda: Standin) -> None:
    """Somebody else listens under the owner's name: the process that answers must be the one that the handle names."""
    with support.child(OWNER, "cuda", **cuda.environment) as process:
        handle = forged(
            _blind(support.hear(process)["handle"]), support.PID, os.getpid().to_bytes(8, "little")
        )
        (facts,) = cuda.run(LATE, handle.hex())
    assert facts["error"][0] == "ValueError"
    assert f"answers in place of process {os.getpid()}" in facts["error"][1]


def test_a_fork_of_the_owner_serves_nothing(cuda: Standin) -> None:
    """Its child has no thread that would answer, and must not keep the name alive."""
    code = OWNER.replace(
        "sys.stdin.readline()",
        """
child = os.fork()
if child == 0:
    os.close(0); import time; time.sleep(30); os._exit(0)
say(child=child)
os.kill(os.getpid(), 9)
""",
        1,
    )
    with support.child(code, "cuda", **cuda.environment) as process:
        handle, child = support.hear(process)["handle"], support.hear(process)["child"]
        process.wait(support.TIMEOUT_S)
        try:
            (late,) = cuda.run(LATE, _blind(handle).hex())
        finally:
            os.kill(child, 9)
    assert "gives no descriptors" in late["error"][1]


def test_cuda_threads_on_two_devices(cuda: Standin) -> None:
    """Access of the second device to the owner's memory, at the owner's pointer."""
    (facts,) = cuda.run("""
space = fga.reserve(1 << 30, B, 0)
memory = fga.alloc(fga.PIECE, B, 0, at=space.ptr)
view = fga.open_handle(memory.export(), 1)
memory.free()
say(same=view.ptr == memory.ptr, held=fga.live().allocations)
view.close()
space.free()
assert state() == dict(live=0, device=0, depth=0, sticky=0)
""")
    assert facts == {"same": True, "held": 1}
    access = [line.split(" ", 3)[3] for line in cuda.calls() if line.startswith("cuMemSetAccess")]
    assert access == [f"device={device} flags=3 count=1" for device in (0, 1)]
    assert not [line for line in cuda.calls() if "Enable" in line or "Import" in line]


@pytest.mark.parametrize(
    "name",
    [
        "cuDeviceGetAttribute",
        "cuMemGetAllocationGranularity",
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemRelease",
        "cuMemUnmap",
        "cuMemAddressFree",
    ],
)
def test_cuda_failures_name_the_call(cuda: Standin, name: str) -> None:
    """And leave the caller's context, no descriptor and a space in which the next one works."""
    (facts,) = cuda.run(f"""
os.environ["STANDIN_FAIL"] = "{name}=999"
def all_of_it():
    with fga.reserve(1 << 30, B, 1) as space, fga.alloc(fga.PIECE, B, 1, at=space.ptr): pass
before = len(os.listdir("/proc/self/fd"))
error = error_of(all_of_it)
left = len(os.listdir("/proc/self/fd")) - before
after = state()
del os.environ["STANDIN_FAIL"]
all_of_it()
say(error=error, left=left, allocations=fga.live().allocations, **after)
""")
    kind, text = facts.pop("error")
    assert kind == "RuntimeError"
    assert text.startswith(f"cuda: {name} ")
    assert "stand-in error (error 999)" in text
    left = int(name == "cuMemRelease")  # the stand-in's handle is a descriptor, which nobody could give back
    assert facts == {"left": left, "allocations": 0, "live": 0, "device": 0, "depth": 0, "sticky": 0}


def test_cuda_out_of_memory_in_a_space(cuda: Standin) -> None:
    (facts,) = cuda.run("""
with fga.reserve(1 << 30, B, 1) as space:
    os.environ["STANDIN_FAIL"] = "cuMemCreate=2"
    say(error=error_of(lambda: fga.alloc(fga.PIECE, B, 1, at=space.ptr)))
""")
    assert facts["error"][0] == "MemoryError"
    assert facts["error"][1].startswith(
        f"cuda: cuMemCreate of {PIECE} bytes on device 1: stand-in out of memory"
    )


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"STANDIN_LACKS": "102"}, "cuda: device 0 has no virtual memory management"),
        ({"STANDIN_LACKS": "103"}, "cuda: device 0 has no file descriptors for memory"),
        ({"STANDIN_GRANULARITY": str(3 << 20)}, f"cuda: device 0 has memory in pieces of {3 << 20} bytes"),
    ],
)
def test_a_device_without_virtual_memory_says_so(cuda: Standin, extra: dict[str, str], words: str) -> None:
    (facts,) = cuda.run("say(error=error_of(fga.reserve, 1 << 30, B))", **extra)
    assert facts["error"][0] == "Unavailable"
    assert facts["error"][1].startswith(words)


def test_hip_has_no_spaces(standin: Path, tmp_path: Path) -> None:
    (facts,) = Standin(standin, "hip", tmp_path / "log").run("say(error=error_of(fga.reserve, 1 << 30, B))")
    assert facts["error"] == ["Unavailable", "hip: memory can't be put at given addresses here"]
