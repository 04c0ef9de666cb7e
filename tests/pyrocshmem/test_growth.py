"""A heap that isn't given a size takes what it needs, at addresses that stay, and gives it back; or says why not.

The same on CPUs and on GPUs whose driver can do it. What it does in faults: tests/faults/test_growth_faults.py.
"""

import functools
import random
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrocshmem import (
    Heap,
    HeapOutOfMemory,
    Workspace,
    finegrained_alloc,
    growth,
    heap_for,
    spawn_threads,
    target,
)
from pyrocshmem.allocator import FreeList
from pyrocshmem.finegrained_alloc import PIECE
from pyrocshmem.forming import SYSTEM_BYTES
from tests.ranks import run_ranks, values

TIER = 1
MIB = 1 << 20
FIRST = PIECE - SYSTEM_BYTES  # what tensors have of a heap that has formed

# ---- which pieces: no memory is touched


class Model:
    """A free list and its pieces, as `Heap` uses them."""

    def __init__(self, limit: int) -> None:
        self.blocks = growth.blocks_of(limit, 256, PIECE)
        self.pieces: list[growth.Piece] = []
        self.live: dict[int, int] = {}

    def alloc(self, nbytes: int) -> int | None:
        offset = self.blocks.alloc(nbytes)
        if offset is None:
            pieces = growth.needed(self.blocks, nbytes)
            if not pieces:
                return None
            for piece in pieces:
                self.add(piece)
            offset = self.blocks.alloc(nbytes)
            assert offset is not None, "more memory, and still no room"
        self.live[offset] = self.blocks.rounded(nbytes)
        assert not self.blocks.missing(offset, nbytes), "a block without memory"
        return offset

    def add(self, piece: growth.Piece) -> None:
        start, nbytes = piece
        assert start % PIECE == nbytes % PIECE == 0
        assert start >= PIECE
        assert start + nbytes <= -(-(self.blocks.total + SYSTEM_BYTES) // PIECE) * PIECE
        assert all(start + nbytes <= a or a + size <= start for a, size in self.pieces), (
            "two pieces at one place"
        )
        growth.hold(self.blocks, piece)
        self.pieces.append(piece)

    def free(self, offset: int) -> None:
        self.blocks.free(offset)
        del self.live[offset]
        for piece in growth.spare(self.blocks, self.pieces):
            start, nbytes = piece[0] - SYSTEM_BYTES, piece[1]
            assert all(start + nbytes <= a or a + size <= start for a, size in self.live.items()), "in use"
            growth.let_go(self.blocks, piece)
            self.pieces.remove(piece)

    @property
    def used(self) -> int:
        return sum(self.live.values())

    @property
    def held(self) -> int:
        return FIRST + sum(nbytes for _, nbytes in self.pieces)


SIZES = st.one_of(
    st.integers(0, 10_000),
    st.integers(0, 40 * MIB),
    st.integers(0, 3 << 30),
    st.just(2 * MIB),
    st.just(1 << 30),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), SIZES), max_size=60))
def test_pieces_of_random_calls(ops: list[tuple[bool, int]]) -> None:
    """Every block lies in memory, no two pieces meet, and what is wholly free goes when there is too much of it."""
    model = Model(24 << 30)
    most = 0
    for is_free, number in ops:
        if is_free and model.live:
            model.free(sorted(model.live)[number % len(model.live)])
        elif not is_free:
            model.alloc(number)
        most = max(most, model.used)
        assert model.blocks.held_bytes <= model.held  # less where the last piece ends behind the limit
        assert model.blocks.free_bytes == model.blocks.held_bytes - model.used
    for offset in list(model.live):
        model.free(offset)
    assert model.blocks.free_bytes <= growth.SPARE_BYTES
    assert model.held <= growth.SPARE_BYTES + PIECE


def test_a_workspace_s_life_at_the_size_of_a_model() -> None:
    """Buffers of workspaces that are made and closed, small ones between them: at most 64 MiB more than is used."""
    chance = random.Random(3)
    model = Model(70 << 30)
    kept = []
    for _ in range(20):
        buffers = [model.alloc(256)]
        for _ in range(6):
            for size in (4096, chance.randrange(1 << 20), chance.randrange(3 << 30)):
                buffers.append(model.alloc(size))
                assert model.held <= model.used + growth.SPARE_BYTES
        kept.append(buffers.pop(0))  # one of 256 bytes outlives each
        chance.shuffle(buffers)
        for offset in buffers:
            assert offset is not None
            model.free(offset)
            assert model.held <= model.used + growth.SPARE_BYTES
    assert model.used == 256 * len(kept)


def test_the_check_above_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a large block's piece one, of which others have the ends, a small one would keep it."""
    monkeypatch.setattr(growth, "_cut", lambda first, last, start, end: [(first, last - first)])
    with pytest.raises(AssertionError, match="SPARE_BYTES"):
        test_a_workspace_s_life_at_the_size_of_a_model()


def test_no_more_than_is_needed() -> None:
    blocks = FreeList(1 << 40, held=FIRST)
    assert growth.needed(blocks, FIRST + 1) == [(PIECE, PIECE)]
    assert sum(size for _, size in growth.needed(blocks, 1 << 30)) == 1 << 30
    assert growth.needed(blocks, 1 << 41) == []
    blocks.hold(FIRST, FIRST + 128 * PIECE)
    blocks.alloc(FIRST + 128 * PIECE)
    assert growth.needed(blocks, 1) == [
        (129 * PIECE, 32 * MIB)
    ]  # an eighth of what is there, and 32 MiB at most
    full = FreeList(FIRST, held=FIRST)
    full.alloc(FIRST)
    assert growth.needed(full, 1) == []


# ---- heaps


def _why_not(rank, world_size):
    with Heap() as heap:
        return heap.usage().fixed_because


@functools.cache
def why_not(num_ranks: int) -> str:
    return values(run_ranks(_why_not, num_ranks))[0]


@pytest.fixture
def grows(request):
    """On GPUs only where the driver and the container let it: elsewhere the heap says why not, which is shown. It is
    asked of as many ranks as the test starts."""
    marker = request.node.get_closest_marker("num_ranks")
    if target.backend() != "host" and (why := why_not(marker.args[0] if marker else 1)):
        pytest.skip(why)


def _mapped() -> int:
    """Bytes of nameless files that this process maps: the heaps of all ranks."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/#" in line:
            start, end = (int(each, 16) for each in line.split()[0].split("-"))
            total += end - start
    return total


def _grows(rank, world_size):
    before, live = _mapped(), finegrained_alloc.live().bytes
    heap = Heap()
    on_host = target.backend() == "host"

    def held():
        """Of this rank, as the C library counts it; on a CPU also what is mapped of each rank."""
        held = finegrained_alloc.live().bytes - live
        assert held == heap.usage().total + SYSTEM_BYTES
        assert not on_host or _mapped() - before == world_size * held
        return held

    found = [held()]
    bases, table = heap.bases, heap.heap_bases.tolist()
    first = heap.full((1000,), float(rank))
    big = heap.empty(100 * MIB // 4)
    found.append(held())
    data = torch.arange(big.numel(), dtype=torch.float32, device=heap.device)
    right = (rank + 1) % world_size
    heap.peer_view(big, right).copy_(data + rank)  # across all pieces
    heap.barrier()
    assert torch.equal(big, data + (rank - 1) % world_size)
    assert heap.is_symmetric(big[7:])
    more = [heap.full((5 * MIB // 4,), float(number)) for number in range(8)]
    found.append(held())
    assert (heap.bases, heap.heap_bases.tolist()) == (bases, table)
    assert torch.equal(big, data + (rank - 1) % world_size)
    assert float(heap.peer_view(first, right)[999]) == right
    heap.free(big)
    view = big[-5:]
    del big
    heap.barrier()
    assert view.tolist() == (data + (rank - 1) % world_size)[-5:].tolist(), "it can still be read"
    found.append(held())
    del view
    heap.barrier()
    found.append(held())
    assert all(bool((x == number).all()) for number, x in enumerate(more))
    del more
    heap.barrier()
    again = heap.full((100 * MIB // 4,), 3.0)
    heap.barrier()
    assert bool((heap.peer_view(again, right) == 3).all())
    usage = heap.usage()
    assert usage.total - usage.used <= growth.SPARE_BYTES
    assert usage.held_by == {"tensors": 100 * MIB + 4096}
    assert heap.bases == bases
    heap.close()
    del first, again
    assert finegrained_alloc.live().bytes == live
    assert _mapped() == before
    return found, usage.fixed_because


@pytest.mark.num_ranks(2)
def test_it_takes_what_it_needs_and_gives_it_back(grows):
    for found, because in values(run_ranks(_grows, 2)):
        assert because == ""
        formed, with_big, with_all, read, given_back = found
        assert formed == PIECE
        assert with_big == 102 * MIB
        assert 102 * MIB + 40 * MIB - 2 * MIB <= with_all <= 142 * MIB + growth.SPARE_BYTES
        assert read == with_all, "memory of a tensor that lives is gone"
        assert given_back <= with_all - 96 * MIB


def _at_random(group, seed):
    """Tensors made alike on all ranks, dropped or freed when each likes; of what was wrong, and the most pieces."""
    wrong, most, shrunk = [], 0, 0
    with Heap(None, group) as heap:
        together, own = random.Random(seed), random.Random(f"{seed} {heap.rank}")
        tensors = {}
        for number in range(60):
            size = together.choice((0, 100, 1000, 300_000, 3_000_000, 20_000_000, 50_000_000))
            tensors[number] = heap.full((size,), number % 100, dtype=torch.int8)
            held = heap.usage().total
            third = number - 3
            if together.random() < 0.3 and b"0" not in heap.vote("has it?", b"%d" % (third in tensors)):
                heap.free(tensors.pop(third))
            for kept in list(tensors):
                if own.random() < 0.3 or number % 20 == 19:
                    del tensors[kept]
            for kept, x in tensors.items():
                at_peer = heap.peer_view(x, own.randrange(heap.world_size))
                wrong += [str(kept)] if bool((at_peer[-1000:] != kept % 100).any()) else []
                wrong += [str(kept)] if bool((at_peer[:1000] != kept % 100).any()) else []
            most = max(most, len(heap._memory.pieces))
            heap.barrier()
            usage = heap.usage()
            shrunk += usage.total < held
            said = heap.vote("usage", f"{usage} {heap._memory.pieces}".encode())
            wrong += ["usage differs"] if len(set(said)) > 1 else []
    return wrong, most, shrunk


@pytest.mark.cpu
def test_threads_at_random():
    for wrong, most, shrunk in spawn_threads(_at_random, 3, random.randrange(1 << 30), timeout=100):
        assert wrong == []
        assert most > 3
        assert shrunk > 0


def _processes_at_random(rank, world_size, seed):
    return _at_random(None, seed)


@pytest.mark.num_ranks(2)
def test_processes_at_random(grows):
    for wrong, most, shrunk in values(run_ranks(_processes_at_random, 2, random.randrange(1 << 30))):
        assert wrong == []
        assert most > 3
        assert shrunk > 0


def _one_keeps_it(rank, world_size):
    """Rank 1 holds a view of its peer's tensor, long after all have freed it."""
    with Heap() as heap:
        x = heap.full((80 * MIB,), 7, dtype=torch.int8)
        kept = heap.peer_view(x, 0)[-3:] if rank == 1 else None
        heap.free(x)
        del x
        found = []
        for _ in range(2):
            heap.barrier()
            found.append(heap.usage().total)
        seen = kept.tolist() if kept is not None else []
        heap.barrier()
        del kept
        heap.barrier()
        return [*found, heap.usage().total], seen


@pytest.mark.num_ranks(2)
def test_memory_stays_as_long_as_any_rank_can_reach_it(grows):
    ends = values(run_ranks(_one_keeps_it, 2))
    assert ends[1][1] == [7] * 3
    for (first, second, last), _ in ends:
        assert first == second >= 80 * MIB
        assert last <= growth.SPARE_BYTES


class GivesBackWhatIsHeld(Heap):
    """The guard taken out: it doesn't look whether tensors of this rank are on what it gives back."""

    def _deserted(self):
        return [start for start, _ in self._pieces()]


def _reads_what_is_gone(rank, world_size):
    with GivesBackWhatIsHeld() as heap:
        x = heap.full((80 * MIB,), 7, dtype=torch.int8)
        heap.free(x)
        heap.barrier()
        if rank == 0:
            return x.sum().item()
        return heap.usage().total


@pytest.mark.cpu
def test_without_the_guard_reading_a_freed_tensor_ends_the_process():
    ends = run_ranks(_reads_what_is_gone, 2)
    assert ends[0].exitcode == -signal.SIGSEGV
    assert ends[1].value <= growth.SPARE_BYTES


def _workspaces(rank, world_size):
    with Heap() as heap:
        made = [Workspace(heap) for _ in range(3)]
        held = []
        for number, workspace in enumerate(made):
            workspace.buffer("partials", 12 * MIB, torch.float32)
            workspace.buffer("partials", 24 * MIB, torch.float32)  # grown
            workspace.flags(100 + number)
        used = heap.usage()
        assert used.held_by[f"{made[0].label}, no call yet: partials"] == 96 * MIB
        assert sum(used.held_by.values()) == used.used
        assert {name.split(": ")[1] for name in used.held_by} == {"partials", "flags", "control words"}
        most = used.used
        for workspace in made:
            workspace.free()
            held.append(heap.usage())
        captured = Workspace(heap)
        captured._captured = True  # a graph may be replayed that uses what it has had
        places = [captured.buffer("partials", size * MIB, torch.float32) for size in (20, 25)]
        kept = [heap.offset(x) for x in places]
        del places
        captured.free()
        heap.barrier()
        last = heap.usage()
        assert all(heap._free_list.size(offset - SYSTEM_BYTES) for offset in kept)
        return most, [(each.total, each.used) for each in held], (last.total, last.used)


@pytest.mark.num_ranks(2)
def test_closed_workspaces_give_memory_back_but_for_what_graphs_use(grows):
    for most, held, (total, used) in values(run_ranks(_workspaces, 2)):
        assert most > 288 * MIB
        assert [held[i][1] > held[i + 1][1] for i in range(2)] == [True, True]
        for each, in_use in held:
            assert each <= in_use + growth.SPARE_BYTES
        assert held[-1][0] <= growth.SPARE_BYTES + PIECE
        assert 180 * MIB <= used <= total <= used + growth.SPARE_BYTES


def test_its_limit(monkeypatch, grows):
    monkeypatch.setenv("PYROCSHMEM_HEAP_BYTES", str(16 * MIB))
    with Heap() as heap:
        assert heap.nbytes == heap.usage().limit == 16 * MIB
        assert heap.usage().total < 16 * MIB
        x = heap.ones(3 * MIB)
        with pytest.raises(HeapOutOfMemory, match=f"{4 * MIB + 4} bytes requested"):
            heap.zeros(MIB + 1)
        y = heap.zeros(MIB)
        assert float(x.sum()) == 3 * MIB
        assert heap.usage().free == 0
        assert heap.usage().total == 16 * MIB
        with pytest.raises(HeapOutOfMemory):
            heap.zeros(1)
        heap.free(y)
        assert heap.zeros(5).tolist() == [0] * 5
        assert heap_for(heap, 16 * MIB) is heap
        with pytest.raises(ValueError, match=f"{16 * MIB + 1} asked"):
            heap_for(heap, 16 * MIB + 1)


@pytest.mark.gpu_a_rank("fills a GPU")
@pytest.mark.gpu
def test_memory_that_pytorch_only_keeps_is_no_reason_to_have_none(grows):
    with Heap() as heap:
        free, _ = torch.cuda.mem_get_info()
        kept = torch.empty(free - (1 << 30), dtype=torch.uint8, device=heap.device)
        del kept
        assert torch.cuda.mem_get_info()[0] < 2 << 30
        x = heap.ones(1 << 30)
        assert float(x[-1]) == 1


def test_a_size_that_is_given_is_taken_at_once_and_stays():
    with Heap(8 * MIB) as heap:
        usage = heap.usage()
        assert usage.total == usage.limit == heap.nbytes == 8 * MIB
        assert usage.fixed_because == "it was given a size"
        with pytest.raises(HeapOutOfMemory):
            heap.zeros(2 * MIB + 1)


def _refused(rank, world_size):
    real = finegrained_alloc.reserve

    def refuse(nbytes, backend, device=0):
        if rank == 1:
            raise finegrained_alloc.Unavailable("planted: no virtual memory")
        return real(nbytes, backend, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finegrained_alloc, "reserve", refuse)
        patch.setenv("PYROCSHMEM_HEAP_BYTES", str(4 * MIB))
        with Heap() as heap:
            x = heap.full((100,), rank)
            heap.barrier()
            usage = heap.usage()
            return usage.total, usage.fixed_because, float(heap.peer_view(x, 1 - rank).sum())


@pytest.mark.num_ranks(2)
def test_where_a_rank_can_not_grow_all_have_a_heap_of_a_fixed_size():
    for rank, end in enumerate(values(run_ranks(_refused, 2))):
        assert end == (4 * MIB, "rank 1: Unavailable: planted: no virtual memory", 100 - 100 * rank)
