"""The collectives on whole tensors: exact on integers, between canaries, call after call, wherever the tensors lie."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from pyrocshmem import CallMismatch, Heap, collectives, target  # before Triton
from pyrocshmem.calls.workspace import workspace_for
from pyrocshmem.collectives import exchange
from pyrocshmem.message_slots import HEAD_WORDS, NUM_SLOTS, SENTINEL
from tests.ranks import run_ranks, values

TIER = 2
TIMEOUT_S = 90.0
HEAP_BYTES = 32 << 20
CANARY = -77.0
DTYPES = (torch.float16, torch.float32, torch.bfloat16)
HALF, FLOAT, BRAIN = DTYPES
CASES = (
    ((1,), HALF),
    ((5,), FLOAT),
    ((520,), BRAIN),
    ((3, 5), BRAIN),
    ((64, 24), HALF),
    ((64, 24), FLOAT),
    ((35, 51), HALF),
    ((1, 700), FLOAT),
)


def device() -> torch.device:
    """Of this rank's kernels."""
    return torch.device("cpu") if target.interpreted() else torch.device("cuda", torch.cuda.current_device())


def integers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small enough that sums over ranks are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype).to(device())


def between_canaries(
    shape: tuple[int, ...], dtype: torch.dtype, shift: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(a tensor of NaN, `shift` elements off the start of the buffer around it)."""
    size = math.prod(shape)
    buffer = torch.full((size + 32,), CANARY, dtype=dtype, device=device())
    inside = buffer[16 + shift : 16 + shift + size].fill_(float("nan"))
    return inside.view(shape), buffer


def expected(name: str, parts: list[torch.Tensor], rank: int) -> torch.Tensor:
    """The result of a collective, from what all ranks brought."""
    if name == "all_gather":
        return torch.cat(parts)
    if name == "all_scatter":
        return torch.cat(parts, 1)
    if name == "broadcast":
        return parts[-1]
    if name == "reduce_scatter":
        return torch.tensor_split(torch.stack(parts).sum(0), len(parts))[rank]
    return torch.stack(parts).sum(0)


def everything(rank: int, world_size: int, piece_bytes: int) -> list[str]:
    """Every collective, shape, dtype and alignment, into new, given and strided tensors; what came out wrong."""
    exchange.PIECE_BYTES = piece_bytes
    calls = {
        "one_shot": lambda x, **k: collectives.all_reduce(x, algorithm="one_shot", **k),
        "two_shot": lambda x, **k: collectives.all_reduce(x, algorithm="two_shot", **k),
        "all_gather": collectives.all_gather,
        "reduce_scatter": collectives.reduce_scatter,
        "all_scatter": collectives.all_scatter,
        "broadcast": lambda x, **k: collectives.broadcast(x, world_size - 1, **k),
    }
    wrong = []
    with Heap(HEAP_BYTES) as heap:
        for shape, dtype in CASES:
            for number, (name, call) in enumerate(calls.items()):
                if name == "all_scatter" and len(shape) != 2:
                    continue
                parts = [integers(shape, dtype, 10 * number + r) for r in range(world_size)]
                right = expected(name, parts, rank)
                x, around_x = between_canaries(shape, dtype, number % 2)
                x.copy_(parts[rank])
                out, around = between_canaries(tuple(right.shape), dtype, rank % 2)
                found = call(x, group=heap, out=out)
                heap.synchronize()
                outside = torch.cat((around[:16], around[16 + rank % 2 + out.numel() :]))
                if not torch.equal(found, right) or not torch.equal(x, parts[rank]):
                    wrong.append(f"{name} {shape} {dtype}")
                if not (outside[:16] == CANARY).all() or not (outside[-15:] == CANARY).all():
                    wrong.append(f"{name} {shape} {dtype}: outside")
                assert (around_x[:16] == CANARY).all()
        for name, call in calls.items():
            wrong += in_place(name, call, heap)
        for name in ("one_shot", "two_shot", "broadcast"):
            parts = [integers((35, 51), torch.float32, 7 + r) for r in range(world_size)]
            x = parts[rank].t()
            found = calls[name](x, group=heap)
            heap.synchronize()
            if not torch.equal(found, expected(name, parts, rank).t()):
                wrong.append(f"{name} of a transposed view")
        collectives.barrier(group=heap)
        heap.synchronize()
    return wrong


def in_place(name: str, call: Callable[..., torch.Tensor], heap: Heap) -> list[str]:
    """x is out, its part of out, or has out as a part; also where neither is contiguous. What came out wrong."""
    wrong = []
    rank, world_size = heap.rank, heap.world_size
    shapes = ((35, 51), FLOAT), ((64, 24), HALF), ((1, 40), BRAIN), ((), FLOAT)
    for shape, dtype in shapes if name in ("one_shot", "two_shot", "broadcast") else shapes[:3]:
        parts = [integers(shape, dtype, 7 + r) for r in range(world_size)]
        right = expected(name, parts, rank)
        if name == "reduce_scatter":  # the other ranks' rows stay
            blocks = list(parts[rank].tensor_split(world_size))
            blocks[rank] = right
            right = torch.cat(blocks)
        for columns_first in (False, True) if len(shape) == 2 else (False,):
            shown = right.t() if columns_first else right
            place = torch.full(shown.shape, CANARY, dtype=dtype, device=device())
            x = out = whole = place.t() if columns_first else place
            if name == "all_gather":
                x = out.tensor_split(world_size)[rank]
            elif name == "all_scatter":
                x = out.tensor_split(world_size, 1)[rank]
            elif name == "reduce_scatter":
                out = x.tensor_split(world_size)[rank]
            x.copy_(parts[rank])
            call(x, group=heap, out=out)
            heap.synchronize()
            if not torch.equal(whole, right):
                wrong.append(f"{name} {shape} {dtype} in place, columns first {columns_first}")
    return wrong


def special_values(rank: int, world_size: int) -> None:
    """NaN, infinity and -0.0 arrive; data that look like an empty slot are a NaN still."""
    with Heap(HEAP_BYTES) as heap:
        empty = torch.full((8,), -786445, dtype=torch.int32, device=device())
        for dtype in DTYPES:
            looks_empty = empty.view(dtype)
            gathered = collectives.all_gather(looks_empty, group=heap)
            heap.synchronize()
            assert gathered.isnan().all()
            x = torch.zeros(8, dtype=dtype, device=device())
            x[1:4] = torch.tensor([float("nan"), float("inf"), -0.0])
            if rank != 0:
                x[:3] = 1
                x[3] = -0.0
            total = collectives.all_reduce(x, group=heap)
            heap.synchronize()
            assert total[1].isnan()
            assert total[2].isposinf()
            assert torch.signbit(collectives.all_gather(x[3:4], group=heap)).all()
            assert torch.equal(total[[0, 4, 5]].cpu(), torch.tensor([world_size - 1.0, 0, 0], dtype=dtype))


def mistakes(rank: int, world_size: int) -> None:
    """What the caller gets wrong raises before anything starts; the heap works afterwards."""
    with Heap(HEAP_BYTES) as heap:
        x = torch.ones(8, 8, device=device())
        with pytest.raises(TypeError, match=r"torch.float64, a tensor is needed of torch.float16"):
            collectives.all_reduce(x.double(), group=heap)
        with pytest.raises(TypeError, match=r"out has dtype torch.float16, allowed is torch.float32"):
            collectives.all_reduce(x, group=heap, out=x.half())
        with pytest.raises(ValueError, match="allowed are auto, one_shot, two_shot"):
            collectives.all_reduce(x, group=heap, algorithm="three_shot")
        with pytest.raises(ValueError, match=r"out is \(2, 2\)"):
            collectives.all_scatter(x, group=heap, out=torch.ones(2, 2, device=device()))
        with pytest.raises(ValueError, match="a matrix is needed"):
            collectives.all_scatter(x.view(-1), group=heap)
        with pytest.raises(ValueError, match="1 dimensions or more"):
            collectives.all_gather(x[0, 0], group=heap)
        with pytest.raises(ValueError, match="root is 2, the group has ranks 0 to 1"):
            collectives.broadcast(x, 2, group=heap)
        with pytest.raises(ValueError, match="overlap"):
            collectives.all_reduce(x[1:], group=heap, out=x[:-1])
        one = torch.full((1, 8), CANARY, device=device())
        for shared in (one.expand(8, 8), one.view(-1).as_strided((2, 4), (1, 1))):
            with pytest.raises(ValueError, match="several of its elements share a place"):
                collectives.all_reduce(x[:2, :4] if len(shared) == 2 else x, group=heap, out=shared)
        assert one.eq(CANARY).all()
        with pytest.raises(TypeError, match=r"out is a str, a torch.Tensor or None is needed"):
            collectives.all_reduce(x, group=heap, out="x")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"workspace is a int, a stream_k.Workspace or None is needed"):
            collectives.all_gather(x, group=heap, workspace=3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="overlap"):
            collectives.reduce_scatter(x, group=heap, out=x[1:5])
        with pytest.raises(ValueError, match="overlap"):
            collectives.all_gather(x[2:6], group=heap, out=x)
        with pytest.raises(CallMismatch, match=r"\(8, 8\)"):
            collectives.all_reduce(x[: 8 - rank], group=heap)
        assert collectives.all_reduce(x, group=heap).eq(world_size).all()
        assert collectives.all_reduce(x[:0], group=heap).shape == (0, 8)


@pytest.mark.parametrize(
    ("world_size", "piece_bytes"),
    [
        (1, 1 << 20),
        pytest.param(2, 1 << 20, marks=pytest.mark.num_ranks(2)),
        pytest.param(3, 6144, marks=pytest.mark.num_ranks(3)),
        # What three ranks can't show shows on GPUs.
        *(pytest.param(n, 6144, marks=[pytest.mark.num_ranks(n), pytest.mark.gpu]) for n in (4, 8)),
    ],
)
def test_collectives(world_size: int, piece_bytes: int) -> None:
    found = run_ranks(everything, world_size, piece_bytes, timeout=TIMEOUT_S)
    assert values(found) == [[]] * world_size


@pytest.mark.num_ranks(2)
def test_special_values() -> None:
    values(run_ranks(special_values, 2, timeout=TIMEOUT_S))


@pytest.mark.num_ranks(2)
def test_mistakes() -> None:
    values(run_ranks(mistakes, 2, timeout=TIMEOUT_S))


@pytest.mark.cpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_slot_has_room_for_a_piece(ranks: int) -> None:
    """Of every rank; of a broadcast for the root's alone, whatever their number, and a unit of the others."""
    x = torch.empty(1).expand(1 << 13, 1 << 13)
    for kind in exchange._KINDS:
        pieces = exchange._pieces(kind, x, x.dtype, ranks, False, exchange.PIECE_BYTES)
        held = [exchange.slot_bytes(kind, piece, x.dtype, x.dtype, ranks) for piece in pieces]
        assert max(held) <= exchange.PIECE_BYTES * (2 if kind == "two_shot" else 1), kind
        sizes = [piece.rows * piece.width for piece in pieces]
        assert max(sizes) - min(sizes) < len(pieces) * x.shape[1], kind
        parts = ranks if kind in ("two_shot", "reduce_scatter") else 1
        assert sum(sizes) * parts == x.numel(), kind
        assert kind != "broadcast" or len(pieces) == 5


def left_in_slots(rank: int, world_size: int) -> list[str]:
    """Calls after which a slot is not empty: a message would be there before it is sent."""
    left = []
    with Heap(HEAP_BYTES) as heap:
        workspace = workspace_for(heap)
        for number, (name, root) in enumerate(itertools.product(exchange._KINDS, range(world_size))):
            more = (
                {"algorithm": name}
                if name.endswith("shot")
                else {"root": root}
                if name == "broadcast"
                else {}
            )
            call = getattr(collectives, "all_reduce" if name.endswith("shot") else name)
            call(torch.ones(9 + number, 8, device=heap.device), group=heap, **more)
            heap.synchronize()
            messages, quads = workspace.messages(0)
            slots = messages[HEAD_WORDS:][: NUM_SLOTS * 4 * quads].view(NUM_SLOTS, -1)
            if (slots != SENTINEL).any():
                left.append(f"{name}, root {root}: {(slots != SENTINEL).sum(1).tolist()}")
            heap.vote("looked")
    return left


@pytest.mark.num_ranks(2)
def test_slots_are_emptied() -> None:
    assert values(run_ranks(left_in_slots, 2, timeout=TIMEOUT_S)) == [[], []]
