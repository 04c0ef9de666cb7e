"""The Triton device API between ranks, compared exactly with what torch says, canaries around every buffer."""

import pytest
import torch

from pyrocshmem import Heap
from tests.pyrocshmem import kernels
from tests.ranks import run_ranks, values

TIER = 1
MOVES = ("load", "store", "get", "put", "copy")
ATOMICS = ("add", "sub", "xchg", "and", "or", "xor", "min", "max", "cas")
BLOCK = 32
PAD = 24
OTHER = 5

every_world = pytest.mark.parametrize(
    "world", [pytest.param(r, marks=pytest.mark.num_ranks(r)) for r in (2, 3)]
)


class Guarded:
    """n elements inside a larger tensor, at an odd place, whose surroundings must stay as they are."""

    def __init__(self, make, n: int, dtype: torch.dtype) -> None:
        self.n = n
        self.whole = make(n + 2 * PAD + 1, dtype=dtype)
        self.whole.fill_(77)

    @property
    def inner(self) -> torch.Tensor:
        # One more than the padding: a pointer that is not divisible by 16 bytes.
        return self.whole[PAD + 1 : PAD + 1 + self.n]

    def intact(self) -> bool:
        around = self.whole.clone()
        around[PAD + 1 : PAD + 1 + self.n] = 77
        return bool((around == 77).all())


def numbers(rank: int, salt: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """The same on every rank that asks: each can say what the others hold. Whole numbers, so that floats are exact."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    wide = dtype == torch.int64
    bound = 1 << 40 if wide else 1000
    return torch.randint(-bound, bound, (n,), generator=generator, dtype=torch.int64).to(dtype)


def updated(op: str, old: torch.Tensor, value: torch.Tensor, compare: torch.Tensor) -> torch.Tensor:
    if op == "cas":
        return torch.where(old == compare, value, old)
    return {
        "add": lambda: old + value,
        "sub": lambda: old - value,
        "xchg": lambda: value,
        "and": lambda: old & value,
        "or": lambda: old | value,
        "xor": lambda: old ^ value,
        "min": lambda: torch.minimum(old, value),
        "max": lambda: torch.maximum(old, value),
    }[op]()


def local_like(device: torch.device):
    return lambda n, dtype: torch.empty(n, dtype=dtype, device=device)


def move_body(rank: int, world: int, dtypes: list[torch.dtype], n: int) -> list[str]:
    """Every move to every peer, the own rank too; the names of those that went wrong."""
    with Heap(1 << 20) as heap:
        return [f"{dtype}: {wrong}" for dtype in dtypes for wrong in wrong_moves(heap, dtype, n)]


def wrong_moves(heap: Heap, dtype: torch.dtype, n: int) -> list[str]:
    wrong = []
    rank, world, device = heap.rank, heap.world_size, heap.device
    touched = torch.arange(n) % 3 != 1
    x, z = Guarded(heap.empty, n, dtype), Guarded(heap.empty, n, dtype)
    y = Guarded(local_like(device), n, dtype)
    for salt, op in enumerate(MOVES):
        for shift in range(world):
            peer, source_peer = (rank + shift) % world, (rank + 1) % world
            writer = (rank - shift) % world  # the rank that acts on our x
            held = [numbers(r, 10 * salt, n, dtype) for r in range(world)]
            sources = [numbers(r, 10 * salt + 1, n, dtype) for r in range(world)]
            for guarded, value in ((x, held[rank]), (z, sources[rank]), (y, sources[rank])):
                guarded.inner.copy_(value)
            heap.barrier()
            arguments = (x.inner, y.inner, z.inner, n, peer, source_peer, heap.heap_bases)
            kernels.run(kernels.move_kernel, -(-n // BLOCK), *arguments, OP=op, OTHER=OTHER, BLOCK=BLOCK)
            heap.barrier()
            want_x, want_y = held[rank], sources[rank]
            if op == "load":
                want_y = torch.where(touched, held[peer], torch.full_like(held[peer], OTHER))
            elif op == "get":
                want_y = torch.where(touched, held[peer], want_y)
            else:
                source = sources[(writer + 1) % world] if op == "copy" else sources[writer]
                want_x = torch.where(touched, source, want_x)
            for name, guarded, want in (("x", x, want_x), ("y", y, want_y), ("z", z, sources[rank])):
                if not torch.equal(guarded.inner.cpu(), want):
                    wrong.append(f"{op} to {peer}: {name}")
                if not guarded.intact():
                    wrong.append(f"{op} to {peer}: around {name}")
            heap.barrier()
    return wrong


def atomic_body(rank: int, world: int, ops: dict[torch.dtype, tuple[str, ...]], n: int) -> list[str]:
    with Heap(1 << 20) as heap:
        return [f"{dtype}: {wrong}" for dtype in ops for wrong in wrong_atomics(heap, dtype, ops[dtype], n)]


def wrong_atomics(
    heap: Heap,
    dtype: torch.dtype,
    ops: tuple[str, ...],
    n: int,
    sem: str = "acq_rel",
    scope: str = "sys",
) -> list[str]:
    wrong = []
    rank, world, device = heap.rank, heap.world_size, heap.device
    x = Guarded(heap.empty, n, dtype)
    value, compare, seen = (Guarded(local_like(device), n, dtype) for _ in range(3))
    for salt, op in enumerate(ops):
        touched = torch.arange(n) % 3 != 1
        for shift in range(world):
            peer, writer = (rank + shift) % world, (rank - shift) % world
            held = [numbers(r, 10 * salt, n, dtype) for r in range(world)]
            given = [numbers(r, 10 * salt + 1, n, dtype) for r in range(world)]
            # Half of the comparisons are with what is there.
            guesses = [
                torch.where(torch.arange(n) % 2 == 0, held[(r + shift) % world], given[r])
                for r in range(world)
            ]
            x.inner.copy_(held[rank])
            value.inner.copy_(given[rank])
            compare.inner.copy_(guesses[rank])
            seen.inner.fill_(-3)
            heap.barrier()
            arguments = (x.inner, value.inner, compare.inner, seen.inner, n, peer, heap.heap_bases)
            # The last program has nothing to do.
            kernels.run(
                kernels.atomic_kernel,
                -(-n // BLOCK) + 1,
                *arguments,
                OP=op,
                SEM=sem,
                SCOPE=scope,
                BLOCK=BLOCK,
            )
            heap.barrier()
            want = torch.where(touched, updated(op, held[rank], given[writer], guesses[writer]), held[rank])
            before = torch.where(touched, held[peer], torch.full_like(held[peer], -3))
            if not torch.equal(x.inner.cpu(), want):
                wrong.append(f"{op} on {peer}: result")
            if not torch.equal(seen.inner.cpu(), before):
                wrong.append(f"{op} on {peer}: what was there")
            if not all(each.intact() for each in (x, value, compare, seen)):
                wrong.append(f"{op} on {peer}: around a buffer")
            heap.barrier()
    return wrong


def scalar_body(rank: int, world: int) -> tuple[list[int], list[int]]:
    with Heap(1 << 16) as heap:
        x = heap.empty(8, dtype=torch.int32)
        x.copy_(torch.arange(8) + 100 * rank)
        out = torch.tensor([-1, -1, 42, -1], dtype=torch.int32, device=heap.device)
        heap.barrier()
        kernels.run(kernels.scalar_kernel, 1, x, out, (rank + 1) % world, heap.heap_bases)
        heap.barrier()
        return x.tolist(), out.tolist()


def ticket_body(rank: int, world: int, count: int) -> tuple[list[int], int]:
    with Heap(1 << 16) as heap:
        counter = heap.zeros(1, dtype=torch.int32)
        taken = torch.full((count,), -1, dtype=torch.int32, device=heap.device)
        heap.barrier()
        kernels.run(kernels.ticket_kernel, 1, counter, taken, count, heap.heap_bases)
        heap.barrier()
        return taken.tolist(), int(heap.peer_view(counter, 0)[0])


@every_world
def test_moves(world: int) -> None:
    dtypes = [torch.int32, torch.int64, torch.float32, torch.float16]
    assert values(run_ranks(move_body, world, dtypes, 100)) == [[]] * world


@every_world
def test_atomics(world: int) -> None:
    ops = {torch.int32: ATOMICS, torch.int64: ATOMICS, torch.float32: ("add", "sub")}
    assert values(run_ranks(atomic_body, world, ops, 100)) == [[]] * world


def ordered_body(rank: int, world: int) -> list[str]:
    """Every atomic with every ordering and scope."""
    with Heap(1 << 20) as heap:
        return [
            f"{sem}, {scope}: {wrong}"
            for sem in ("relaxed", "acquire", "release", "acq_rel")
            for scope in ("cta", "gpu", "sys")
            for wrong in wrong_atomics(heap, torch.int32, ATOMICS, BLOCK, sem, scope)
        ]


@pytest.mark.num_ranks(2)
def test_orderings_and_scopes() -> None:
    assert values(run_ranks(ordered_body, 2)) == [[], []]


@pytest.mark.num_ranks(2)
def test_scalars() -> None:
    (x0, out0), (x1, out1) = values(run_ranks(scalar_body, 2))
    assert x0 == [0, 11, 7, 42, 4, 5, 6, 7]
    assert x1 == [100, 11, 107, 42, 12, 105, 106, 107]
    assert out0 == [100, 102, 42, 104]
    assert out1 == [0, 2, 42, 4]


@pytest.mark.num_ranks(2)
def test_atomics_of_two_ranks_lose_nothing() -> None:
    count = 300
    ends = values(run_ranks(ticket_body, 2, count))
    taken = [ticket for tickets, _ in ends for ticket in tickets]
    assert sorted(taken) == list(range(2 * count))
    assert [total for _, total in ends] == [2 * count] * 2
