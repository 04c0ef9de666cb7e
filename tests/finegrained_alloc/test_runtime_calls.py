"""What the HIP and CUDA backends call, in which order and with which flags, against a stand-in that records it.

No GPU is needed: standin_runtime.c takes the place of libamdhip64 and libcuda, over plain memory. Each test runs a
child, whose log of calls it reads. The same cases run for both backends; where they differ, the expected log says so.
"""

from pathlib import Path

import pytest

from tests.finegrained_alloc import support
from tests.finegrained_alloc.standin import BALANCED, PREAMBLE, Standin

TIER = 1
pytestmark = pytest.mark.cpu

PAGE = 2 << 20


def test_alloc_and_free(runtime: Standin) -> None:
    """On device 1 while 0 is current: fine-grained, whole 2 MiB pages, and the caller's device is put back."""
    (facts,) = runtime.run("""
memory = fga.alloc(3_000_000, B, 1)
aligned, held = memory.ptr % (2 << 20), fga.live().bytes
memory.free()
say(ptr=memory.ptr, aligned=aligned, held=held, after=fga.live().bytes, **state())
""")
    ptr = facts.pop("ptr")
    assert facts == {"aligned": 0, "held": 2 * PAGE, "after": 0, **BALANCED}
    hip = [
        "hipSetDevice 1",
        f"hipExtMallocWithFlags device=1 nbytes={2 * PAGE} flags=1",
        "hipSetDevice 0",
        "hipSetDevice 1",
        f"hipFree device=1 ptr={ptr:#x}",
        "hipSetDevice 0",
    ]
    cuda = [
        "cuCtxPushCurrent 1",
        f"cuMemAlloc device=1 nbytes={2 * PAGE}",
        "cuCtxPopCurrent",
        "cuCtxPushCurrent 1",
        f"cuMemFree device=1 ptr={ptr:#x}",
        "cuCtxPopCurrent",
    ]
    assert runtime.calls() == runtime.pick(hip, cuda)


def test_export_open_close_between_processes(runtime: Standin) -> None:
    owner = (
        "memory = fga.alloc(5, B, 1)\nsay(ptr=memory.ptr, handle=memory.export().hex())\nsys.stdin.readline()"
    )
    runtime.log.unlink(missing_ok=True)
    with support.child(PREAMBLE + owner, runtime.backend, **runtime.environment) as process:
        facts = support.hear(process)
        exported = runtime.calls()
        (peer,) = runtime.run(
            """
view = fga.open_handle(bytes.fromhex(sys.argv[2]), 1)
say(ptr=view.ptr, nbytes=view.nbytes, backend=view.backend, device=view.device)
view.close()
assert state() == dict(live=0, device=0, depth=0, sticky=0), state()
""",
            facts["handle"],
        )
    assert (peer["nbytes"], peer["backend"], peer["device"]) == (5, runtime.backend, 1)
    ptr = f"{facts['ptr']:#x}"
    assert [line for line in exported if "Range" in line or "Ipc" in line] == runtime.pick(
        [f"hipMemGetAddressRange ptr={ptr}", f"hipIpcGetMemHandle device=1 ptr={ptr}"],
        [f"cuMemGetAddressRange ptr={ptr}", f"cuIpcGetMemHandle device=1 ptr={ptr}"],
    )
    opened = f"{peer['ptr']:#x}"
    assert [line for line in runtime.calls() if "Ipc" in line] == runtime.pick(
        ["hipIpcOpenMemHandle device=1 flags=1", f"hipIpcCloseMemHandle device=1 ptr={opened}"],
        ["cuIpcOpenMemHandle device=1 flags=1", f"cuIpcCloseMemHandle device=1 ptr={opened}"],
    )


def test_threads_of_one_process_share_the_pointer(runtime: Standin) -> None:
    """No IPC with oneself: the owner's pointer, peer access between devices (twice is fine), freed with the last."""
    (facts,) = runtime.run("""
memory = fga.alloc(5, B, 0)
handle = memory.export()
views = [fga.open_handle(handle, device) for device in (0, 1, 1)]
same = {view.ptr for view in views} == {memory.ptr}
memory.free()
kept = standin.standin_live()
mappings = fga.live().mappings
for view in views: view.close()
say(same=same, kept=kept, mappings=mappings, allocations=fga.live().allocations, **state())
""")
    assert facts == {"same": True, "kept": 1, "mappings": 3, "allocations": 0, **BALANCED}
    enabling = [line for line in runtime.calls() if "EnablePeerAccess" in line]
    name = runtime.pick("hipDeviceEnablePeerAccess", "cuCtxEnablePeerAccess")
    assert enabling == [f"{name} device=1 peer=0 flags=0"] * 2
    assert not [line for line in runtime.calls() if "IpcOpen" in line or "IpcClose" in line]


def test_peer_access(runtime: Standin) -> None:
    (facts,) = runtime.run("""
say(can=fga.can_access_peer(B, 0, 1), self=fga.can_access_peer(B, 1, 1), first=fga.enable_peer_access(B, 1, 0),
    again=fga.enable_peer_access(B, 1, 0), itself=fga.enable_peer_access(B, 1, 1), **state())
""")
    assert facts == {"can": True, "self": True, "first": None, "again": None, "itself": None, **BALANCED}
    (facts,) = runtime.run("say(can=fga.can_access_peer(B, 0, 1))", STANDIN_LINKED="0")
    assert facts == {"can": False}


def test_peer_access_refused(runtime: Standin) -> None:
    """By the runtime: an error, and nothing left half-open."""
    name = runtime.pick("hipDeviceEnablePeerAccess", "cuCtxEnablePeerAccess")
    (facts,) = runtime.run(
        """
memory = fga.alloc(5, B, 0)
say(direct=error_of(fga.enable_peer_access, B, 1, 0), opened=error_of(fga.open_handle, memory.export(), 1),
    mappings=fga.live().mappings)
memory.free()
assert standin.standin_live() == 0
""",
        STANDIN_FAIL=f"{name}=217",
    )
    assert facts["mappings"] == 0
    for kind, text in (facts["direct"], facts["opened"]):
        assert kind == "RuntimeError"
        assert "stand-in error (error 217)" in text


def test_out_of_memory(runtime: Standin) -> None:
    """MemoryError with backend, bytes and text; no error left for PyTorch to trip on; the next one works."""
    name = runtime.pick("hipExtMallocWithFlags", "cuMemAlloc")
    (facts,) = runtime.run(f"""
os.environ["STANDIN_FAIL"] = "{name}=2"
failed = error_of(fga.alloc, 12345, B, 1)
after = state()
del os.environ["STANDIN_FAIL"]
stats = fga.live()
with fga.alloc(12345, B, 1): pass
say(failed=failed, after=after, allocations=stats.allocations, total=stats.total_allocations, **state())
""")
    kind, text = facts.pop("failed")
    assert kind == "MemoryError"
    assert text.startswith(f"{runtime.backend}: {name} of 12345 bytes on device 1: stand-in out of memory")
    assert facts.pop("after") == BALANCED
    assert facts == {"allocations": 0, "total": 0, **BALANCED}


@pytest.mark.parametrize("step", ["alloc", "free", "range", "export", "open", "close"])
def test_other_failures(runtime: Standin, step: str) -> None:
    """RuntimeError naming the call; the caller's device is put back whichever call failed."""
    names = {
        "alloc": ("hipExtMallocWithFlags", "cuMemAlloc"),
        "free": ("hipFree", "cuMemFree"),
        "range": ("hipMemGetAddressRange", "cuMemGetAddressRange"),
        "export": ("hipIpcGetMemHandle", "cuIpcGetMemHandle"),
        "open": ("hipIpcOpenMemHandle", "cuIpcOpenMemHandle"),
        "close": ("hipIpcCloseMemHandle", "cuIpcCloseMemHandle"),
    }
    name = runtime.pick(*names[step])
    owner = """
def all_of_it():
    memory = fga.alloc(5, B, 1)
    say(handle=memory.export().hex())
    sys.stdin.readline()
    memory.free()
say(error=error_of(all_of_it), **state())
"""
    peer = """
sys.stdin.readline()
def all_of_it(): fga.open_handle(bytes.fromhex(sys.argv[2]), 1).close()
say(error=error_of(all_of_it), **state())
"""
    at_peer = step in ("open", "close")
    planted = runtime.environment | {"STANDIN_FAIL": f"{name}=999"}
    with support.child(
        PREAMBLE + owner, runtime.backend, **(runtime.environment if at_peer else planted)
    ) as process:
        facts = support.hear(process)
        if at_peer:
            environment = planted
            with support.child(PREAMBLE + peer, runtime.backend, facts["handle"], **environment) as other:
                support.tell(other)
                facts = support.hear(other)
        elif step == "free":
            support.tell(process)
            facts = support.hear(process)
    kind, text = facts["error"]
    assert kind == "RuntimeError"
    assert name in text
    assert "stand-in error (error 999)" in text
    assert (facts["device"], facts["depth"], facts["sticky"]) == (0, 0, 0)


def test_a_part_of_a_block_is_not_exported(runtime: Standin) -> None:
    """A runtime that packs allocations would export its neighbours too: refused, naming the offset."""
    (facts,) = runtime.run(
        """
memory = fga.alloc(5, B)
say(error=error_of(memory.export))
memory.free()
""",
        STANDIN_OFFSET="512",
    )
    kind, text = facts["error"]
    assert kind == "RuntimeError"
    assert "block of its own" in text
    assert not [line for line in runtime.calls() if "IpcGet" in line]


def test_cuda_refuses_a_mapping_that_is_too_small(standin: Path, tmp_path: Path) -> None:
    runtime = Standin(standin, "cuda", tmp_path / "log")
    owner = "say(handle=fga.alloc(5, B).export().hex())\nsys.stdin.readline()"
    with support.child(PREAMBLE + owner, "cuda", **runtime.environment) as process:
        handle = support.hear(process)["handle"]
        code = "say(error=error_of(fga.open_handle, bytes.fromhex(sys.argv[2])), kept=fga.live().mappings, **state())"
        (facts,) = runtime.run(code, handle, STANDIN_SHORT="4096")
    assert facts["error"][0] == "RuntimeError"
    assert (facts["kept"], facts["live"], facts["depth"]) == (0, 0, 0)


def test_devices_out_of_range(runtime: Standin) -> None:
    calls = [
        "fga.alloc, 5, B, 2",
        "fga.alloc, 5, B, -1",
        "fga.can_access_peer, B, 0, 2",
        "fga.enable_peer_access, B, 2, 0",
    ]
    facts = runtime.run("\n".join(f"say(error=error_of({call}))" for call in calls))
    assert [fact["error"][0] for fact in facts] == ["ValueError"] * len(calls)
    assert facts[0]["error"][1] == f"{runtime.backend}: device 2, expected 0 to 1"
    assert runtime.calls() == []


def test_copies_of_rows(runtime: Standin) -> None:
    """Between pitches, on a stream, on device 1 while 0 is current; rows that lie together are copied as one."""
    name = runtime.pick("hipMemcpy2DAsync", "cuMemcpy2DAsync")
    (facts,) = runtime.run(f"""
source = (ctypes.c_char * 40)(*range(40))
to = (ctypes.c_char * 40)()
places = ctypes.addressof(to), ctypes.addressof(source)
copy = lambda *sizes: fga.copy_rows(B, 1, places[0] + 1, sizes[0], places[1], *sizes[1:], 0x5a)
copy(12, 9, 5, 3)
rows = [list(to.raw[1 + 12 * i : 1 + 12 * i + 12]) for i in range(3)]
copy(5, 5, 5, 3)
together = to.raw[1:16] == source.raw[:15]
copy(12, 9, 0, 3)
copy(12, 9, 5, 0)
os.environ["STANDIN_FAIL"] = "{name}=700"
say(rows=rows, together=together, failed=error_of(copy, 12, 9, 5, 3), **state())
""")
    kind, text = facts.pop("failed")
    assert (kind, text) == ("RuntimeError", f"{runtime.backend}: {text.split(': ', 1)[1]}")
    assert text.split(": ", 1)[1].startswith(f"{name} of 15 bytes on device 1: stand-in error")
    rows = [[*range(9 * i, 9 * i + 5), *[0] * 7] for i in range(3)]
    assert facts == {"rows": rows, "together": True, **BALANCED}
    kinds = runtime.pick("kind=4", "kinds=4,4")
    made = [
        f"{name} device=1 to_pitch={to} from_pitch={source} width={width} rows={count} {kinds} stream=0x5a"
        for to, source, width, count in ((12, 9, 5, 3), (15, 15, 15, 1), (12, 9, 5, 3))
    ]
    assert [line for line in runtime.calls() if "Memcpy" in line] == made


def test_torch_hooks(runtime: Standin) -> None:
    """Counted like any other allocation; out of memory is a null pointer, and a foreign pointer harms nothing."""
    name = runtime.pick("hipExtMallocWithFlags", "cuMemAlloc")
    (facts,) = runtime.run(f"""
library = fga.load()
library.fga_torch_malloc.restype = ctypes.c_void_p
library.fga_torch_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
library.fga_torch_free.restype = None
library.fga_torch_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
unset = library.fga_torch_malloc(100, 0, None)
assert library.fga_set_torch_backend(fga.BACKENDS.index(B)) == 0
assert library.fga_set_torch_backend(0) != 0
ptr = library.fga_torch_malloc(100, 1, None)
handle = len(fga.export_pointer(ptr))
inside = error_of(fga.export_pointer, ptr + 512)
held = fga.live().allocations
library.fga_torch_free(ptr + 512, 100, 1, None)
library.fga_torch_free(ptr, 100, 1, None)
os.environ["STANDIN_FAIL"] = "{name}=2"
failed = library.fga_torch_malloc(100, 1, None)
say(unset=unset, handle=handle == fga.handle_bytes(), inside=inside, held=held, failed=failed,
    after=fga.live().allocations, live=standin.standin_live())
""")
    inside = facts.pop("inside")
    assert inside[0] == "ValueError"
    assert "512 bytes inside" in inside[1]
    assert facts == {"unset": None, "handle": True, "held": 1, "failed": None, "after": 0, "live": 0}
