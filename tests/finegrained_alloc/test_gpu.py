"""Real GPUs: memory across processes and devices, PyTorch's pool, what fails, and nothing left behind."""

import gc
import random
import signal
from collections.abc import Iterator

import pytest
import torch

from pyrocshmem import finegrained_alloc as fga
from tests.finegrained_alloc import support
from tests.finegrained_alloc.gpu_access import read, write

TIER = 2
pytestmark = pytest.mark.gpu

BACKEND = "hip" if torch.version.hip else "cuda"
PAGE = 2 << 20
NBYTES = 3_000_001
CHILD = """
import torch
from tests.finegrained_alloc.gpu_access import read, write
BACKEND = "hip" if torch.version.hip else "cuda"
"""
PEER = (
    CHILD
    + """
view = fga.open_handle(bytes.fromhex(sys.argv[1]), int(sys.argv[2]))
assert view.backend == BACKEND
seen = read(view.ptr, view.nbytes, int(sys.argv[2]))
write(view.ptr, seen[::-1], int(sys.argv[2]))
view.close()
say(seen=seen.hex(), mappings=fga.live().mappings)
"""
)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    def live() -> fga.Stats:
        gc.collect()
        torch.cuda.empty_cache()
        return fga.live()

    before = live()
    yield
    after = live()
    assert (after.allocations, after.bytes, after.mappings) == (
        before.allocations,
        before.bytes,
        before.mappings,
    )


def test_the_backend_is_there() -> None:
    found, text = fga.available(BACKEND)
    assert found, text
    assert fga.device_count(BACKEND) == torch.cuda.device_count()


def test_alloc_write_read_free() -> None:
    before = torch.cuda.memory_allocated()
    with fga.alloc(NBYTES, BACKEND) as memory:
        assert memory.ptr % PAGE == 0
        assert fga.live().bytes == 2 * PAGE
        data = random.randbytes(NBYTES)
        write(memory.ptr, data)
        assert read(memory.ptr, NBYTES) == data
    assert torch.cuda.memory_allocated() == before


def test_rows_are_copied_on_a_stream_and_in_a_graph() -> None:
    """Between odd pitches; the gaps between the rows stay. A replay reads what its source holds then."""
    source = torch.randint(0, 256, (500, 700), dtype=torch.uint8, device="cuda")
    to = torch.full((500, 901), 200, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        fga.copy_rows(BACKEND, 0, to.data_ptr() + 3, 901, source.data_ptr(), 700, 699, 500, stream)

    copy()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy()
    for _ in range(2):
        assert torch.equal(to[:, 3:702], source[:, :699])
        assert (to[:, :3] == 200).all()
        assert (to[:, 702:] == 200).all()
        source.random_(0, 256)
        graph.replay()


def test_the_current_device_stays() -> None:
    last = torch.cuda.device_count() - 1
    with torch.cuda.device(last):
        with fga.alloc(NBYTES, BACKEND, 0) as memory:
            memory.export()
        assert torch.cuda.current_device() == last
        assert torch.zeros(1, device="cuda").device.index == last


def exchange(device: int) -> None:
    """Another process, on ``device``, reads what device 0 wrote, and device 0 what it answered."""
    data = random.randbytes(NBYTES)
    with fga.alloc(NBYTES, BACKEND, 0) as memory:
        write(memory.ptr, data)
        (facts,) = support.run_child(PEER, memory.export().hex(), str(device))
        assert bytes.fromhex(facts["seen"]) == data
        assert facts["mappings"] == 0
        assert read(memory.ptr, NBYTES) == data[::-1]


def test_another_process_on_the_same_gpu() -> None:
    exchange(0)


@pytest.mark.num_gpus(2)
def test_another_process_on_another_gpu() -> None:
    exchange(1)


@pytest.mark.num_gpus(2)
def test_threads_of_one_process_on_two_gpus() -> None:
    data = random.randbytes(NBYTES)
    assert fga.can_access_peer(BACKEND, 1, 0)
    with fga.alloc(NBYTES, BACKEND, 0) as memory, fga.open_handle(memory.export(), 1) as view:
        assert view.ptr == memory.ptr
        write(view.ptr, data, device=1)
        assert read(memory.ptr, NBYTES, device=0) == data
        fga.enable_peer_access(BACKEND, 1, 0)  # again: nothing to do


def test_many_handles_open_and_close_without_a_leak() -> None:
    owner = "memories = [fga.alloc(1, sys.argv[1]) for _ in range(20)]\n"
    owner += "say(handles=[memory.export().hex() for memory in memories])\nsys.stdin.readline()\n"
    owner += "for memory in memories: memory.free()\nsay(live=fga.live().allocations)"
    with support.child(owner, BACKEND) as process:
        handles = [bytes.fromhex(handle) for handle in support.hear(process)["handles"]]
        for _ in range(3):
            views = [fga.open_handle(handle) for handle in handles]
            assert len({view.ptr for view in views}) == 20
            for view in views:
                view.close()
        support.tell(process)
        assert support.hear(process) == {"live": 0}


def test_one_handle_opened_twice() -> None:
    """Each opening is closed on its own; the first close does not pull the memory from under the second."""
    owner = CHILD + "memory = fga.alloc(5, BACKEND)\nwrite(memory.ptr, b'hello')\n"
    owner += "say(handle=memory.export().hex())\nsys.stdin.readline()"
    with support.child(owner) as process:
        handle = bytes.fromhex(support.hear(process)["handle"])
        first, second = fga.open_handle(handle), fga.open_handle(handle)
        first.close()
        assert read(second.ptr, 5) == b"hello"
        second.close()
        with pytest.raises(ValueError, match="not an open mapping"):
            second.close()


@pytest.mark.parametrize("end", ["killed", "freed"])
def test_handle_of_memory_that_is_gone(end: str) -> None:
    """Never a mapping of something else, though the owner allocates anew at once."""
    owner = "memory = fga.alloc(5, sys.argv[1])\nsay(handle=memory.export().hex())\nsys.stdin.readline()\n"
    owner += "memory.free()\nother = fga.alloc(5, sys.argv[1])\nsay(freed=True)\nsys.stdin.readline()"
    with support.child(owner, BACKEND) as process:
        handle = bytes.fromhex(support.hear(process)["handle"])
        if end == "killed":
            process.send_signal(signal.SIGKILL)
            process.wait(support.TIMEOUT_S)
            with pytest.raises(fga.StaleHandle, match=f"owner, process {process.pid}, is not running"):
                fga.open_handle(handle)
        else:
            support.tell(process)
            assert support.hear(process) == {"freed": True}
            with pytest.raises(RuntimeError, match=BACKEND):
                fga.open_handle(handle)
    assert torch.ones(5, device="cuda").sum().item() == 5


def test_out_of_memory_and_the_process_lives() -> None:
    with pytest.raises(MemoryError, match=f"{BACKEND}: .* of {1 << 45} bytes on device 0"):
        fga.alloc(1 << 45, BACKEND)
    with fga.alloc(NBYTES, BACKEND) as memory:
        write(memory.ptr, bytes(NBYTES))
    assert torch.ones(5, device="cuda").sum().item() == 5


def test_pool_holds_tensors_and_nothing_else() -> None:
    before = fga.live()
    with fga.pool():
        inside = torch.arange(1 << 20, device="cuda")
        now = fga.live()
        assert now.allocations == before.allocations + 1
        assert now.bytes - before.bytes >= inside.nbytes
    outside = torch.arange(1 << 20, device="cuda")
    assert fga.live() == now
    assert torch.equal(inside, outside)
    del inside, outside


def test_pool_memory_can_be_exported() -> None:
    with fga.pool():
        tensor = torch.randint(256, (PAGE,), dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="only a base can be exported"):
        fga.export_pointer(tensor.data_ptr() + 512)
    (facts,) = support.run_child(
        PEER.replace("view.nbytes", str(PAGE)), fga.export_pointer(tensor.data_ptr()).hex(), "0"
    )
    answer = tensor.cpu().numpy().tobytes()
    assert bytes.fromhex(facts["seen"])[::-1] == answer


def test_pool_is_of_this_thread_and_ends_with_the_block() -> None:
    for _ in range(3):
        before = fga.live()
        with fga.pool(torch.cuda.current_device()):
            first = torch.zeros(5 << 20, device="cuda")
        del first
        gc.collect()
        torch.cuda.empty_cache()
        after = fga.live()
        assert (after.allocations, after.bytes) == (before.allocations, before.bytes)
        assert after.total_allocations > before.total_allocations


def test_pool_out_of_memory() -> None:
    with fga.pool(), pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    with fga.pool():
        assert torch.ones(5, device="cuda").sum().item() == 5


@pytest.mark.num_gpus(2)
def test_pool_on_another_device() -> None:
    before = fga.live().allocations
    with fga.pool(1):
        tensor = torch.ones(5 << 20, device="cuda:1")
        other = torch.ones(5 << 20, device="cuda:0")
        assert fga.live().allocations == before + 1
    assert tensor.sum().item() == other.sum().item() == 5 << 20


# ---- memory at given addresses


def space_of(nbytes: int, device: int = 0) -> fga.Space:
    """Skips where the driver or the container refuses it; see `test_spaces.py` for what is called."""
    try:
        with fga.reserve(PAGE, BACKEND) as space, fga.alloc(PAGE, BACKEND, at=space.ptr) as memory:
            memory.export()
        return fga.reserve(nbytes, BACKEND, device)
    except (fga.Unavailable, RuntimeError) as error:
        pytest.skip(str(error))


def test_pieces_in_reserved_space_are_one_memory() -> None:
    """Written and read by one kernel across both; each keeps its own when the other goes and comes."""
    before, _ = torch.cuda.mem_get_info()
    with space_of(1 << 40) as space:
        assert before - torch.cuda.mem_get_info()[0] < 16 << 20, "addresses take memory"
        first = fga.alloc(2 * PAGE, BACKEND, at=space.ptr)
        second = fga.alloc(40 * PAGE, BACKEND, at=space.ptr + 2 * PAGE)
        assert before - torch.cuda.mem_get_info()[0] >= 42 * PAGE
        data = random.randbytes(42 * PAGE)
        write(space.ptr, data)
        assert read(space.ptr, 42 * PAGE) == data
        with pytest.raises(ValueError, match="other memory lies there"):
            fga.alloc(PAGE, BACKEND, at=space.ptr + 2 * PAGE)
        # From here on: the first kernels of a process take memory of their own.
        full, _ = torch.cuda.mem_get_info()
        second.free()
        assert torch.cuda.mem_get_info()[0] - full >= 40 * PAGE
        assert read(space.ptr, 2 * PAGE) == data[: 2 * PAGE]
        again = fga.alloc(PAGE, BACKEND, at=space.ptr + 2 * PAGE)
        write(space.ptr, data[: 3 * PAGE])
        assert read(space.ptr, 3 * PAGE) == data[: 3 * PAGE]
        again.free()
        first.free()


PEER_IN_SPACE = (
    CHILD
    + """
device = int(sys.argv[1])
space = fga.reserve(1 << 40, BACKEND, device)
views = []
for handle in sys.argv[2:]:
    views.append(fga.open_handle(bytes.fromhex(handle), device, space.ptr + sum(view.nbytes for view in views)))
nbytes = sum(view.nbytes for view in views)
seen = read(space.ptr, nbytes, device)
write(space.ptr, seen[::-1], device)
say(anywhere=error_of(fga.open_handle, bytes.fromhex(sys.argv[2]), device), nbytes=nbytes)
for view in views: view.close()
space.free()
"""
)


def exchange_in_spaces(device: int) -> None:
    with space_of(1 << 40) as space:
        pieces = [fga.alloc(n * PAGE, BACKEND, 0, space.ptr + o * PAGE) for n, o in ((1, 0), (3, 1))]
        data = random.randbytes(4 * PAGE)
        write(space.ptr, data)
        handles = [piece.export().hex() for piece in pieces]
        (facts,) = support.run_child(PEER_IN_SPACE, str(device), *handles)
        assert facts["nbytes"] == 4 * PAGE
        assert "in reserved address space" in facts["anywhere"][1]
        assert read(space.ptr, 4 * PAGE) == data[::-1]
        for piece in pieces:
            piece.seal()
            with pytest.raises(ValueError, match="sealed"):
                piece.export()
            piece.free()


def test_another_process_maps_pieces_behind_one_another() -> None:
    exchange_in_spaces(0)


@pytest.mark.num_gpus(2)
def test_another_process_on_another_gpu_maps_pieces() -> None:
    exchange_in_spaces(1)


@pytest.mark.num_gpus(2)
def test_threads_on_two_gpus_share_a_piece() -> None:
    data = random.randbytes(PAGE)
    with (
        space_of(1 << 40) as space,
        fga.alloc(PAGE, BACKEND, 0, space.ptr) as memory,
        fga.open_handle(memory.export(), 1) as view,
    ):
        assert view.ptr == memory.ptr
        write(view.ptr, data, device=1)
        assert read(memory.ptr, PAGE, device=0) == data


def test_memory_in_a_space_outlives_its_killed_owner() -> None:
    """A mapping holds it: what the owner's end leaves a peer is no fault."""
    owner = (
        CHILD
        + """
space = fga.reserve(1 << 30, BACKEND)
memory = fga.alloc(fga.PIECE, BACKEND, at=space.ptr)
write(memory.ptr, b"hello")
say(handle=memory.export().hex())
sys.stdin.readline()
"""
    )
    with space_of(1 << 30) as space, support.child(owner) as process:
        handle = bytes.fromhex(support.hear(process)["handle"])
        with fga.open_handle(handle, at=space.ptr) as view:
            process.send_signal(signal.SIGKILL)
            process.wait(support.TIMEOUT_S)
            assert read(view.ptr, 5) == b"hello"
        with pytest.raises(fga.StaleHandle, match="is not running"):
            fga.open_handle(handle, at=space.ptr)


def test_out_of_memory_in_a_space() -> None:
    with space_of(1 << 42) as space:
        with pytest.raises(MemoryError, match=f"cuda: cuMemCreate of {1 << 41} bytes on device 0"):
            fga.alloc(1 << 41, BACKEND, at=space.ptr)
        with fga.alloc(PAGE, BACKEND, at=space.ptr) as memory:
            write(memory.ptr, b"works")
