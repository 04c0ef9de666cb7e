"""The heap: what torch's functions give, at the same offsets everywhere, in memory that peers really share.

The same on both targets; `R` ranks on a machine with that many GPUs.
"""

import numpy
import pytest
import torch

from pyrocshmem import Heap, heap_for
from tests.ranks import run_ranks, values
from tests.stopwatch import until

TIER = 1
MIB = 1 << 20

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


@pytest.fixture
def heap():
    with Heap(4 * MIB, debug=True) as made:
        yield made
        assert made.usage().used == sum(-(-max(b.nbytes, 1) // 256) * 256 for b in made._live.values())


def same(got, expected):
    """Equal in dtype, shape and bits."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    got, expected = got.cpu().contiguous().view(-1), expected.cpu().contiguous().view(-1)
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


SHAPES = [(), (0,), (7,), (3, 0, 5), (13, 17), (2, 3, 5, 7)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant_fills_in_every_dtype_and_shape(heap, dtype):
    for shape in SHAPES:
        same(heap.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
        same(heap.ones(*shape, dtype=dtype), torch.ones(shape, dtype=dtype))
        same(heap.full(shape, 1, dtype=dtype), torch.full(shape, 1, dtype=dtype))
        empty = heap.empty(shape, dtype=dtype)
        assert (tuple(empty.shape), empty.dtype, empty.device) == (shape, dtype, heap.device)
        assert heap.is_symmetric(empty)


def test_inferred_dtypes_and_ranges(heap):
    for value in (3, 2.5, True, 1j):
        same(heap.full((2, 2), value), torch.full((2, 2), value))
    for arguments in [(5,), (2, 9), (2, 9, 3), (0.5, 3, 0.25), (5, 0, -1), (0,)]:
        same(heap.arange(*arguments), torch.arange(*arguments))
    same(heap.arange(5, dtype=torch.float16), torch.arange(5, dtype=torch.float16))
    same(heap.linspace(-1, 3, 9), torch.linspace(-1, 3, 9, device=heap.device))
    for size in (numpy.int64(3), torch.tensor(3), torch.Size([3]), numpy.array([3])):
        same(heap.zeros(size), torch.zeros(3))
    for make in (heap.empty, heap.zeros):
        assert [make(2, dtype=dtype).dtype for dtype in (None, float)] == [torch.float32, torch.float64]
    assert heap.empty_like(torch.zeros(2), dtype=float).dtype == torch.float64


def test_the_callers_default_device_is_of_no_account():
    with torch.device("meta"), Heap(MIB) as heap:
        made = [
            heap.zeros(3), heap.ones(3), heap.full(3, 1), heap.arange(3), heap.linspace(0, 1, 3), heap.empty(3),
            heap.rand(3, seed=1), heap.randn(3), heap.randint(0, 5, 3), heap.ones(3, dtype=torch.float8_e4m3fn),
        ]  # fmt: skip
        assert {x.device for x in (*made, heap.system, heap.heap_bases)} == {heap.device}
        assert {x.device.type for x in (heap.status, heap._abort_word, heap._abort_seen)} == {"cpu"}
        same(heap.arange(5), torch.arange(5, device="cpu"))
        heap.recover()
        heap.abort("told to")
        assert int(heap.system[0]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64], ids=str)
def test_random_fills_follow_torch(heap, dtype):
    def seeded():
        return torch.Generator(heap.device).manual_seed(11)

    shape, where = (33, 5), heap.device
    expected = torch.randn(shape, dtype=dtype, device=where, generator=seeded())
    same(heap.randn(shape, dtype=dtype, seed=11), expected)
    expected = torch.rand(shape, dtype=dtype, device=where, generator=seeded())
    same(heap.rand(33, 5, dtype=dtype, generator=seeded()), expected)
    integers = heap.randint(-5, 9, shape, seed=11)
    same(integers, torch.randint(-5, 9, shape, device=where, generator=seeded()))
    torch.manual_seed(3)
    first = heap.randn(shape)
    torch.manual_seed(3)
    same(first, torch.randn(shape, device=where))
    small = heap.rand(1000, dtype=torch.float8_e4m3fn, seed=1).float()
    assert 0 <= small.min() < 0.1
    assert 0.9 < small.max() <= 1
    with pytest.raises(ValueError, match="give one of them"):
        heap.rand(3, seed=1, generator=seeded())


def test_like(heap):
    source = torch.randn(4, 6, device=heap.device).t()
    like = heap.empty_like(source)
    assert (like.shape, like.dtype, like.stride()) == (source.shape, source.dtype, (4, 1))
    same(heap.zeros_like(source, dtype=torch.int16), torch.zeros(6, 4, dtype=torch.int16))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda heap: heap.zeros(-1), RuntimeError),
        (lambda heap: heap.zeros(3, dtype="float32"), TypeError),
        (lambda heap: heap.zeros("three"), TypeError),
        (lambda heap: heap.arange(0, 5, -1), RuntimeError),
        (lambda heap: heap.zeros(1 << 62, 1 << 62), RuntimeError),
    ],
)
def test_what_torch_refuses_is_refused_and_nothing_stays(heap, call, error):
    before = heap.usage()
    with pytest.raises(error):
        call(heap)
    assert heap.usage() == before
    same(heap.ones(3), torch.ones(3))


def test_alignment_order_and_reuse(heap):
    tensors = [heap.empty(size, dtype=torch.uint8) for size in (1, 255, 256, 257, 0, 5)]
    offsets = [heap.offset(tensor) for tensor in tensors]
    assert offsets == [16384 + 256 * n for n in (0, 1, 2, 3, 5, 6)]
    assert all((heap.base + offset) % 256 == 0 for offset in offsets)
    heap.free(tensors[2])
    heap.free(tensors[1])
    merged = heap.empty(512, dtype=torch.uint8)
    assert heap.offset(merged) == offsets[1]
    for tensor in [tensors[0], *tensors[3:]]:
        heap.free(tensor)
    assert heap.usage().num_allocations == 1


def test_is_symmetric_and_offset_of_views(heap):
    x = heap.zeros(8, 16)
    assert heap.offset(x[3, 2:]) == heap.offset(x) + 4 * (3 * 16 + 2)
    assert heap.offset(x.t()[5:]) == heap.offset(x) + 4 * 5
    assert all(heap.is_symmetric(view) for view in (x[3:], x.t(), x.view(torch.uint8), x.detach(), x[:0]))
    assert not any(
        heap.is_symmetric(other) for other in (x.clone(), torch.zeros(3), x + 1, torch.empty(0), 7)
    )
    with Heap(MIB) as other:
        assert not other.is_symmetric(x)
        assert not heap.is_symmetric(other.ones(3))
    with pytest.raises(ValueError, match="not on this heap"):
        heap.offset(x.clone())


def test_a_tensor_made_by_others_on_heap_memory_is_recognised(heap):
    x = heap.randn(40)
    again = torch.from_dlpack(x)
    assert heap.is_symmetric(again)
    assert heap.offset(again[3:]) == heap.offset(x) + 12


def test_bits_beside_the_memory_are_those_of_the_tensor(heap):
    x = heap.full((2, 3), 1 + 2j)
    for view in (x.conj(), x.conj().imag, x.conj().t(), x.conj().imag.conj(), x.imag):
        same(heap.peer_view(view, 0).resolve_conj().resolve_neg(), view.resolve_conj().resolve_neg())


def test_debug_fill(heap):
    x = heap.empty(100)
    assert bool(x.isnan().all())
    x.fill_(1)
    kept = x[10:20]
    heap.free(x)
    assert bool(kept.isnan().all()), "memory that was freed still looks sound"
    with Heap(MIB) as plain:
        y = plain.ones(100)
        plain.free(y)
        assert not bool(y.isnan().any()), "the check above can't fail"


def test_usage_counts(heap):
    assert heap.usage().total == heap.nbytes == 4 * MIB
    x = heap.empty(MIB, dtype=torch.uint8)
    y = heap.empty(3)
    usage = heap.usage()
    assert (usage.used, usage.num_allocations) == (MIB + 256, 2)
    assert usage.free == usage.largest == 3 * MIB - 256
    heap.free(x)
    assert heap.usage().largest == 3 * MIB - 256
    assert heap.usage().free == 4 * MIB - 256
    heap.free(y)


def test_system_area_starts_zeroed_but_for_what_says_whose_it_is(heap):
    assert heap.system.shape == (4096,)
    assert heap.system.dtype == torch.int32
    assert not bool(heap.system[: -8 - heap.world_size].any())  # a word for each rank, rank, digest, nonce
    assert heap.heap_bases.tolist() == [heap.base] * 9


def _neighbours(rank, world_size, debug):
    with Heap(MIB, debug=debug) as heap:
        assert heap.heap_bases.tolist()[: 1 + world_size] == [heap.base, *heap.bases]
        assert len(set(heap.bases)) == world_size
        heap.empty(rank * 0 + 100)
        x = heap.full((16, 24), -1.0)
        # Over a view with strides and an offset: row 3 on of the transposed tensor.
        mine, right = x.t()[3:], (rank + 1) % world_size
        theirs = heap.peer_view(mine, right)
        assert (theirs.shape, theirs.stride(), theirs.dtype) == (mine.shape, mine.stride(), mine.dtype)
        theirs.copy_(torch.arange(mine.numel(), device=heap.device).view(mine.shape) + 1000.0 * rank)
        heap.barrier()
        left = (rank - 1) % world_size
        expected = torch.arange(mine.numel()).view(mine.shape) + 1000.0 * left
        assert torch.equal(mine.cpu(), expected)
        assert bool((x.t()[:3] == -1).all()), "written outside of the view"
        assert torch.equal(heap.peer_view(x, rank), x)
        # Reading: every rank sees every rank's.
        seen = [float(heap.peer_view(mine, peer)[0, 1]) for peer in range(world_size)]
        heap.barrier()
        return heap.offset(mine), seen


@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=pytest.mark.num_ranks(n)) for n in (2, 4)])
def test_peers_share_memory(num_ranks):
    ends = values(run_ranks(_neighbours, num_ranks, True))
    assert len({offset for offset, _ in ends}) == 1
    expected = [1000.0 * ((peer - 1) % num_ranks) + 1 for peer in range(num_ranks)]
    assert all(seen == expected for _, seen in ends)


class FillsAfterTheVote(Heap):
    """The guard taken out: rank 1 fills its tensor, of zeros, when a peer that goes on has written to it."""

    def _fill(self, tensor, block, plan):
        pass

    def _allocate_plan(self, call, plan, *place):
        tensor = super()._allocate_plan(call, plan, *place)
        if self.rank == 1:
            until(lambda: bool(tensor.all()))
        plan.fill(tensor)
        return tensor


def _contents_are_there(rank, world_size, kind, rounds):
    """No barrier: what a peer writes at once must not be wiped out by the owner's own filling."""
    heap = kind(MIB)
    wrong = 0
    for number in range(rounds):
        x = heap.zeros(2000)
        heap.peer_view(x, (rank + 1) % world_size).fill_(number + 1.0)
        heap.barrier()
        wrong += int((x != number + 1).any())
        heap.free(x)
    return wrong


@pytest.mark.num_ranks(2)
def test_contents_are_there_on_every_rank_once_a_call_returns():
    assert values(run_ranks(_contents_are_there, 2, Heap, 60)) == [0, 0]
    _, wrong = values(run_ranks(_contents_are_there, 2, FillsAfterTheVote, 10))
    assert wrong > 0, "the check above can't fail"


def _defaults(rank, world_size):
    heap = heap_for()
    assert heap is heap_for() is heap_for(heap) is heap_for(None, heap.nbytes)
    with pytest.raises(ValueError, match=f"has {heap.nbytes} bytes, {heap.nbytes + 1} asked"):
        heap_for(None, heap.nbytes + 1)
    size = heap.nbytes
    heap.close()
    bigger = heap_for(None, 2 * size)
    assert (bigger.nbytes, bigger is heap) == (2 * size, False)
    return size


@pytest.mark.num_ranks(2)
def test_heap_for_is_one_heap_a_group(monkeypatch):
    monkeypatch.setenv("PYROCSHMEM_HEAP_BYTES", "300000")
    assert values(run_ranks(_defaults, 2)) == [299776] * 2


@pytest.mark.parametrize(
    ("nbytes", "error"), [(0, ValueError), (-5, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_bad_sizes(nbytes, error):
    with pytest.raises(error, match="allowed are"):
        Heap(nbytes)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_bad_timeouts(timeout):
    with pytest.raises(ValueError, match=f"timeout is {timeout}, allowed are"):
        Heap(MIB, timeout=timeout)


def test_bad_device_and_default_size(monkeypatch):
    with pytest.raises(ValueError, match="device meta, allowed are"):
        Heap(MIB, device="meta")
    monkeypatch.setenv("PYROCSHMEM_HEAP_BYTES", "64M")
    with pytest.raises(ValueError, match="'64M', allowed are whole numbers"):
        Heap()


def test_peer_out_of_range(heap):
    x = heap.zeros(3)
    for peer in (-1, 1):
        with pytest.raises(
            ValueError, match=f"rank {peer}, allowed are 0..0: ranks count within the heap's group"
        ):
            heap.peer_view(x, peer)
    with pytest.raises(TypeError, match="rank is a float"):
        heap.peer_view(x, 0.0)
    with pytest.raises(ValueError, match="not on this heap"):
        heap.peer_view(x.clone(), 0)
    with pytest.raises(TypeError, match="expected a tensor, got a list"):
        heap.peer_view([1.0], 0)
