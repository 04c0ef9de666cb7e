"""`collectives.all_reduce` and `all_scatter` of whole tensors: exact on integers, between canaries, call after call."""

import pytest
import torch

import collectives
from pyrocshmem import CallMismatch, Heap, target  # before Triton
from tests.ranks import run_ranks, values

TIER = 2
TIMEOUT_S = 90.0
HEAP_BYTES = 4 << 20
CANARY = -77.0
DTYPES = (torch.float16, torch.float32)
SIZES = (1, 5, 4096, 20000)
SHAPES = ((1, 1), (3, 5), (70, 300), (33, 64))


def device() -> torch.device:
    """Of this rank's kernels."""
    return torch.device("cpu") if target.interpreted() else torch.device("cuda", torch.cuda.current_device())


def integers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small enough that sums over ranks are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype).to(device())


def reduce_everything(rank: int, world_size: int) -> list[str]:
    """Every size, dtype and algorithm, three calls each with data of their own; what came out wrong."""
    wrong = []
    with Heap(HEAP_BYTES) as heap:
        for size in SIZES:
            for dtype in DTYPES:
                buffer = heap.full((size + 16,), CANARY, dtype=dtype)
                x, out = buffer[8 : 8 + size], heap.empty(size, dtype=dtype)
                for call, (algorithm, into) in enumerate(
                    (("one_shot", None), ("two_shot", out), ("two_shot", x), ("auto", None))
                ):
                    parts = [integers((size,), dtype, 100 * call + r) for r in range(world_size)]
                    x.copy_(parts[rank])
                    out.fill_(float("nan"))
                    found = collectives.all_reduce(x, group=heap, out=into, algorithm=algorithm)
                    heap.synchronize()
                    around = torch.cat((buffer[:8], buffer[8 + size :]))
                    if not torch.equal(found, sum(parts)) or not (around == CANARY).all():
                        wrong.append(f"{size} {dtype} {algorithm} {call}")
                    heap.barrier()
    return wrong


def scatter_everything(rank: int, world_size: int) -> list[str]:
    """Every shape and dtype into new, strided and symmetric outputs; what came out wrong."""
    wrong = []
    with Heap(HEAP_BYTES) as heap:
        for M, N in SHAPES:
            for dtype in DTYPES:
                symmetric = heap.empty(M, N * world_size, dtype=dtype)
                padded = torch.full((M, N * world_size + 3), CANARY, dtype=dtype, device=device())
                for call, out in enumerate((None, symmetric, padded[:, :-3])):
                    parts = [integers((M, N), dtype, 100 * call + r) for r in range(world_size)]
                    mine = torch.nn.functional.pad(parts[rank], (0, 2))[:, :N]
                    found = collectives.all_scatter(mine, group=heap, out=out)
                    heap.synchronize()
                    if not torch.equal(found, torch.cat(parts, 1)):
                        wrong.append(f"{M} x {N} {dtype} {call}")
                    heap.barrier()
                if not (padded[:, -3:] == CANARY).all():
                    wrong.append(f"{M} x {N} {dtype}: outside")
    return wrong


def mistakes(rank: int, world_size: int) -> None:
    """What the caller gets wrong raises before anything starts; the heap works afterwards."""
    with Heap(HEAP_BYTES) as heap:
        x, y = heap.ones(64), heap.ones(64)
        with pytest.raises(ValueError, match="not on the group's heap"):
            collectives.all_reduce(torch.ones(64, device=device()), group=heap)
        with pytest.raises(TypeError, match=r"torch.int64, allowed are torch.float16"):
            collectives.all_reduce(heap.arange(64), group=heap)
        with pytest.raises(ValueError, match="contiguous"):
            collectives.all_reduce(x[::2], group=heap)
        with pytest.raises(ValueError, match="allowed are auto, one_shot, two_shot"):
            collectives.all_reduce(x, group=heap, algorithm="three_shot")
        with pytest.raises(ValueError, match="another tensor"):
            collectives.all_reduce(x, group=heap, out=x, algorithm="one_shot")
        with pytest.raises(ValueError, match=r"out is \(2, 2\)"):
            collectives.all_scatter(x.view(8, 8), group=heap, out=torch.ones(2, 2, device=device()))
        with pytest.raises(ValueError, match="contiguous rows"):
            collectives.all_scatter(x.view(8, 8).t(), group=heap)
        # Ranks that bring tensors from different places.
        with pytest.raises(CallMismatch, match="at offset"):
            collectives.all_reduce(x if rank == 0 else y, group=heap)
        assert collectives.all_reduce(x, group=heap).eq(world_size).all()
        assert collectives.all_reduce(heap.empty(0), group=heap).shape == (0,)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.num_ranks(3)
def test_all_reduce(world_size: int) -> None:
    assert values(run_ranks(reduce_everything, world_size, timeout=TIMEOUT_S)) == [[]] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.num_ranks(3)
def test_all_scatter(world_size: int) -> None:
    assert values(run_ranks(scatter_everything, world_size, timeout=TIMEOUT_S)) == [[]] * world_size


@pytest.mark.num_ranks(2)
def test_mistakes() -> None:
    values(run_ranks(mistakes, 2, timeout=TIMEOUT_S))
