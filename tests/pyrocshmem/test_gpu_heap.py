"""What only GPUs can show: IPC between processes, graph capture, aborts that pass a busy stream, device memory."""

import time

import pytest
import torch

from pyrocshmem import Heap, spawn_threads, target
from pyrocshmem.calls.streams import CALLS, Streams
from tests.ranks import run_ranks, values

TIER = 2
MIB = 1 << 20
pytestmark = pytest.mark.gpu


def test_the_stream_of_captures_is_nobody_elses():
    """PyTorch hands out 32 of a priority in turn."""
    if target.backend() == "hip":
        pytest.skip("on AMD nothing is captured")
    device = torch.device("cuda", 0)
    several = [Streams(device) for _ in range(40)]
    own = [each._side(CALLS).stream for each in several]
    others = [torch.cuda.Stream(device, priority=priority) for priority in (0, -1) for _ in range(33)]
    handles = {stream.cuda_stream for stream in own}
    assert len(handles) == 40
    assert not handles & {0, *(stream.cuda_stream for stream in others)}
    x = torch.ones(1, device=device)
    for streams in several:
        streams.fork(CALLS)
        with streams.beside(CALLS):
            x += 1
        streams.join(CALLS)
    assert x.item() == 41


def test_capture_refuses_allocation_and_leaves_the_heap_usable():
    with Heap(4 * MIB) as heap:
        x = heap.ones(1000)
        usage = heap.usage()
        graph = torch.cuda.CUDAGraph()
        refused = []
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            x.add_(1)
            for call in (
                lambda: heap.zeros(3),
                lambda: heap.free(x),
                heap.synchronize,
                heap.barrier,
                lambda: Heap(MIB),
            ):
                try:
                    call()
                except RuntimeError as error:
                    refused.append("under CUDA graph capture" in str(error))
            x.mul_(2)
        assert refused == [True] * 5
        assert heap.usage() == usage
        graph.replay()
        heap.synchronize()
        assert float(x[999]) == 4
        heap.free(heap.ones(3))


@pytest.mark.alone
def test_device_memory_comes_back():
    with Heap(MIB) as heap:  # loads the kernels, which stay
        heap.zeros(10)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    heap = Heap(256 * MIB)
    assert free - torch.cuda.mem_get_info()[0] >= 256 * MIB
    assert heap.base % (2 * MIB) == 0
    x = heap.zeros(10)
    heap.close()
    assert free - torch.cuda.mem_get_info()[0] >= 256 * MIB, "memory of a live tensor is gone"
    del x
    assert free - torch.cuda.mem_get_info()[0] < 64 * MIB


def test_status_is_memory_that_a_kernel_can_write():
    with Heap(MIB) as heap:
        assert heap.status.is_pinned()
        assert heap.heap_bases.device == heap.system.device == heap.device


def test_wrong_device():
    with pytest.raises(ValueError, match="allowed are cuda:0"):
        Heap(MIB, device="cpu")
    with pytest.raises(ValueError, match="has no GPU of its own"):
        Heap(MIB, device=torch.cuda.device_count())
    with Heap(MIB) as heap, pytest.raises(ValueError, match="the tensor is on cpu, the heap on cuda"):
        heap.offset(torch.ones(3))


def _exchange(rank, world_size, nbytes):
    device = target.device(rank)
    with Heap(nbytes) as heap:
        assert heap.device == device
        count = nbytes // 16
        x = heap.zeros(count)
        data = torch.randn(count, device=device, generator=torch.Generator(device).manual_seed(rank))
        for step in range(world_size):
            peer = (rank + step) % world_size
            heap.barrier()
            heap.peer_view(x, peer).copy_(data)
            heap.barrier()
            source = (rank - step) % world_size
            expected = torch.randn(
                count, device=device, generator=torch.Generator(device).manual_seed(source)
            )
            assert torch.equal(x, expected)
            assert torch.equal(heap.peer_view(x, peer), data), "reading back from the peer"
        return len(set(heap.bases))


@pytest.mark.num_gpus(2)
@pytest.mark.parametrize("nbytes", [MIB, 512 * MIB])
def test_two_gpus_share_memory(nbytes):
    assert values(run_ranks(_exchange, 2, nbytes)) == [2, 2]


@pytest.mark.num_ranks(4)
def test_four_ranks_share_memory():
    assert values(run_ranks(_exchange, 4, 64 * MIB)) == [4] * 4


@pytest.mark.num_gpus(2)
def test_threads_of_one_process_share_memory():
    def body(group):
        with Heap(MIB, group) as heap:
            x = heap.zeros(1000)
            heap.peer_view(x, 1 - heap.rank).fill_(heap.rank + 1.0)
            heap.barrier()
            return str(heap.device), float(x.min()), float(x.max())

    assert spawn_threads(body, 2) == [("cuda:0", 2.0, 2.0), ("cuda:1", 1.0, 1.0)]


def _abort_past_a_busy_stream(rank, world_size):
    heap = Heap(MIB)
    heap.barrier()
    if rank == 0:
        torch.cuda._sleep(6_000_000_000)  # some seconds
        start = time.monotonic()
        heap.abort("planted")
        return time.monotonic() - start
    side = torch.cuda.Stream()
    deadline = time.monotonic() + 30
    with torch.cuda.stream(side):
        while int(heap.system[0]) == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return int(heap.system[0])


@pytest.mark.num_gpus(2)
@pytest.mark.alone
def test_abort_words_pass_a_busy_stream():
    seconds, word = values(run_ranks(_abort_past_a_busy_stream, 2))
    assert seconds < 1
    assert word == 1
