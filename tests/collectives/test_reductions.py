"""Sum, average, largest and smallest of what ranks bring: exact on integers, whatever their sums exceed; of floating
point against float64, NaN and both zeros; along any dimension; with their gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyrocshmem import Heap, collectives, target  # before Triton
from pyrocshmem.calls.operators import name_of
from pyrocshmem.collectives import exchange
from pyrocshmem.elements import DTYPES, REDUCED
from tests.collectives.test_tensors import HEAP_BYTES, TIMEOUT_S, device
from tests.ranks import run_ranks, values

TIER = 2
INTEGERS = tuple(dtype for dtype in REDUCED if dtype not in DTYPES)
OPS = ("sum", "max", "min")
# The last one is longer than a piece, of the size that `integers` sets.
SHAPES = ((40,), (35, 51))
NAN, INF = float("nan"), float("inf")


def any_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits, so that sums exceed the dtype; of bool, random values."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), generator=generator).to(torch.uint8)
    return (raw & 1 if dtype == torch.bool else raw).view(dtype).view(shape).to(device())


def reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """What PyTorch makes of integers: sums wrap around, those of bool are "or"."""
    stacked = torch.stack(parts)
    if op == "sum":
        return stacked.any(0) if stacked.dtype == torch.bool else stacked.sum(0, dtype=stacked.dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def integers(rank: int, world_size: int, piece_bytes: int) -> list[str]:
    """Every integer dtype, reduction and algorithm; what came out wrong."""
    exchange.PIECE_BYTES = piece_bytes
    wrong = []
    with Heap(HEAP_BYTES) as heap:
        few = target.interpreted() and world_size != 2
        for number, dtype in enumerate((torch.int64, torch.uint8) if few else INTEGERS):
            for shape in SHAPES:
                parts = [any_of(dtype, shape, 100 * number + r) for r in range(world_size)]
                for op in OPS:
                    right = reduced(parts, op)
                    for algorithm in ("one_shot", "two_shot"):
                        out = torch.full_like(right, 77)
                        collectives.all_reduce(parts[rank], group=heap, op=op, algorithm=algorithm, out=out)
                        heap.synchronize()
                        if not torch.equal(out, right):
                            wrong.append(f"{algorithm} {op} {dtype} {shape}")
                    dim = number % len(shape)
                    found = collectives.reduce_scatter(parts[rank], group=heap, op=op, scatter_dim=dim)
                    heap.synchronize()
                    if not torch.equal(found, right.tensor_split(world_size, dim)[rank]):
                        wrong.append(f"reduce_scatter {op} {dtype} {shape} along {dim}")
    return wrong


def like_torch_distributed(heap: Heap) -> list[str]:
    """The same by `torch.distributed`, of numbers: NCCL, or gloo."""
    wrong = []
    for dtype in (*DTYPES, torch.int64, torch.int32, torch.uint8):
        x = any_of(torch.int8, (257,), heap.rank).to(dtype)
        for op in OPS:
            theirs = x.clone()
            dist.all_reduce(theirs, op=getattr(dist.ReduceOp, op.upper()))
            ours = collectives.all_reduce(x, group=heap, op=getattr(dist.ReduceOp, op.upper()))
            heap.synchronize()
            if not torch.equal(ours, theirs):
                wrong.append(f"{op} of {dtype} is not torch.distributed's")
    return wrong


def floats(heap: Heap) -> list[str]:
    """Averages to half a unit of their dtype, and of fp32 sums before; largest and smallest values exactly."""
    wrong, rank, world = [], heap.rank, heap.world_size
    first, others = [NAN, 1.0, -0.0, 0.0, NAN, INF, -INF, -0.0], [2.0, NAN, 0.0, -0.0, NAN, 3.0, 3.0, -0.0]
    largest, smallest = [2.0, 1, 0, 0, NAN, INF, 3, -0.0], [2.0, 1, -0.0, -0.0, NAN, 3, -INF, -0.0]
    for dtype in DTYPES:
        unit = torch.finfo(dtype).eps / 2
        for algorithm in ("one_shot", "two_shot"):
            parts = [torch.randn(35, 51, generator=torch.Generator().manual_seed(r)) for r in range(world)]
            parts = [part.to(dtype).to(heap.device) for part in parts]
            call = {"group": heap, "algorithm": algorithm}
            stacked = torch.stack(parts).double()
            average = collectives.all_reduce(parts[rank], op="avg", **call)
            exact = stacked.mean(0)
            slack = unit * exact.abs() + world**0.5 * 2.0**-23 * stacked.abs().sum(0) / world + 2.0**-25
            if not ((average.double() - exact).abs() <= slack).all():
                wrong.append(f"avg of {dtype}, {algorithm}")
            rows = collectives.reduce_scatter(parts[rank], group=heap, op="avg")
            if not torch.equal(rows, average.tensor_split(world)[rank]):
                wrong.append(f"reduce_scatter avg of {dtype}")
            for op, right in (("max", stacked.amax(0)), ("min", stacked.amin(0))):
                if not torch.equal(collectives.all_reduce(parts[rank], op=op, **call).double(), right):
                    wrong.append(f"{op} of {dtype}, {algorithm}")
            x = torch.tensor(first if rank == world - 1 else others, device=heap.device).to(dtype)
            for op, right in (("max", largest), ("min", smallest)):
                found, known = (
                    collectives.all_reduce(x, op=op, **call),
                    torch.tensor(right, device=heap.device).to(dtype),
                )
                same = (found == known) & (torch.signbit(found) == torch.signbit(known))
                if not (same | (found.isnan() & known.isnan())).all():
                    wrong.append(f"{op} of {dtype}, {algorithm}: {found.tolist()}")
    return wrong


def along_dimensions(heap: Heap) -> list[str]:
    """Gathered and scattered along each, also where ranks don't divide it; given, strided and in place."""
    wrong, rank, world = [], heap.rank, heap.world_size
    shape = (3, 4, 5)
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    parts = [part.to(heap.device) for part in parts]
    for dim in (0, 1, 2, -1):
        joined, total = torch.cat(parts, dim), torch.stack(parts).sum(0)
        divided = total.tensor_split(world, dim)[rank]
        gathered = collectives.all_gather(parts[rank], group=heap, gather_dim=dim)
        scattered = collectives.reduce_scatter(parts[rank], group=heap, scatter_dim=dim)
        out = torch.full_like(joined, NAN).transpose(0, 2).contiguous().transpose(0, 2)
        given = collectives.all_gather(parts[rank], group=heap, gather_dim=dim, out=out)
        whole = torch.full_like(joined, NAN)
        mine = whole.tensor_split(world, dim)[rank]
        mine.copy_(parts[rank])
        collectives.all_gather(mine, group=heap, gather_dim=dim, out=whole)
        x = parts[rank].clone()
        own = x.tensor_split(world, dim)[rank]
        collectives.reduce_scatter(x, group=heap, scatter_dim=dim, out=own)
        heap.synchronize()
        pairs = {
            "gathered": (gathered, joined),
            "given": (given, joined),
            "gathered in place": (whole, joined),
            "scattered": (scattered, divided),
            "scattered in place": (own, divided),
        }
        wrong += [f"{name} along {dim}" for name, pair in pairs.items() if not torch.equal(*pair)]
    none = collectives.all_gather(parts[rank][:0], group=heap, gather_dim=1)
    wrong += [] if none.shape == (0, 4 * world, 5) else [f"{tuple(none.shape)} of nothing"]
    return wrong


def in_place(heap: Heap) -> list[str]:
    """Results in x itself: of plain tensors, of what has a gradient, and in a graph."""
    wrong, rank, world = [], heap.rank, heap.world_size
    ones = torch.full((4, 3), float(rank + 1), device=heap.device)
    for name, call, right in (
        ("all_reduce_", lambda x: collectives.all_reduce_(x, group=heap, op="max"), float(world)),
        ("broadcast_", lambda x: collectives.broadcast_(x, 1, group=heap), 2.0),
    ):
        x = ones.clone()
        if call(x) is not x or not (x == right).all():
            wrong.append(name)
        columns = ones.repeat(1, 2)[:, ::2]
        call(columns)
        torch._dynamo.reset()
        traced = ones.clone()
        torch.compile(call, fullgraph=True, backend="aot_eager")(traced)
        if not (columns == right).all() or not (traced == right).all():
            wrong.append(f"{name}: strided or traced")
    leaf = ones.clone().requires_grad_()
    y = leaf * 2
    collectives.all_reduce_(y, group=heap)
    y.sum().backward()
    if leaf.grad is None or not (leaf.grad == 2).all():
        wrong.append(f"all_reduce_: gradient {leaf.grad}")
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        collectives.all_reduce_(leaf, group=heap)
    return wrong


def gradients(heap: Heap) -> list[str]:
    """Of averages, and along dimensions: those of the whole model in float64, eagerly, in a graph, and by opcheck."""
    wrong, rank, world = [], heap.rank, heap.world_size
    options: tuple[tuple[str, dict[str, Any], Callable[[list[torch.Tensor]], torch.Tensor]], ...] = (
        ("all_reduce", {"op": "avg"}, lambda parts: torch.stack(parts).mean(0)),
        ("reduce_scatter", {"op": "avg", "scatter_dim": 1}, lambda parts: torch.stack(parts).mean(0)),
        ("all_gather", {"gather_dim": 1}, lambda parts: torch.cat(parts, 1)),
    )
    for name, more, model in options:
        for columns in (4, 5):
            parts = [
                torch.randn(3, columns, generator=torch.Generator().manual_seed(r)) for r in range(world)
            ]
            leaves = [part.double().requires_grad_() for part in parts]
            whole = model(leaves)
            weight = torch.randn(whole.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
            (right,) = torch.autograd.grad(whole, leaves[rank], weight)
            mine = weight.tensor_split(world, 1)[rank] if name == "reduce_scatter" else weight
            x = parts[rank].to(heap.device).requires_grad_()
            g = mine.float().to(heap.device)

            def call(x: torch.Tensor, name: str = name, more: dict[str, Any] = more) -> torch.Tensor:
                return getattr(collectives, name)(x, group=heap, **more)  # type: ignore[no-any-return]

            torch._dynamo.reset()
            for how in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
                (found,) = torch.autograd.grad(how(x), x, g)
                if not torch.allclose(found.double().cpu(), right, rtol=1e-6, atol=1e-7):
                    wrong.append(f"{name} {more} {columns}: {found}, {right}")
    x = torch.ones(3, 4, device=heap.device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="all_reduce with op 'max' has no gradient"):
        collectives.all_reduce(x, group=heap, op="max")
    arguments = (x, "two_shot", name_of(heap), "max")
    y = torch.ops.collectives.all_reduce(*arguments)
    with pytest.raises(NotImplementedError, match="no gradient"):
        y.sum().backward()
    label = name_of(heap)
    for name, arguments in (
        ("all_reduce", (x, "two_shot", label, "avg")),
        ("all_gather", (x, label, 1)),
        ("reduce_scatter", (x, label, "avg", 1)),
    ):
        op = getattr(torch.ops.collectives, name).default
        for test, outcome in torch.library.opcheck(op, arguments, raise_exception=False).items():
            wrong += [] if outcome == "SUCCESS" else [f"{name}: {test}: {outcome}"]
    return wrong


def refused(heap: Heap) -> None:
    """What the caller gets wrong raises before anything starts."""
    x = torch.ones(4, 4, device=heap.device)
    for op in ("prod", "average", None, 3, dist.ReduceOp.PRODUCT):
        with pytest.raises(ValueError, match=r"allowed are sum, avg, max, min, or torch.distributed's"):
            collectives.all_reduce(x, group=heap, op=op)
    for dtype in (torch.int32, torch.bool):
        with pytest.raises(TypeError, match=rf"op is 'avg' of {dtype}, allowed are torch.float16"):
            collectives.reduce_scatter(x.to(dtype), group=heap, op="avg")
    with pytest.raises(TypeError, match=r"x is torch.float64, a tensor is needed of torch.float16"):
        collectives.all_reduce(x.double(), group=heap, op="max")
    with pytest.raises(ValueError, match=r"gather_dim is 2, x has shape \(4, 4\): allowed are -2 to 1"):
        collectives.all_gather(x, group=heap, gather_dim=2)
    with pytest.raises(TypeError, match=r"scatter_dim must be an integer, got 1\.0"):
        collectives.reduce_scatter(x, group=heap, scatter_dim=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="overlap"):
        collectives.all_gather(x[:, 1:3], group=heap, gather_dim=1, out=x)


def others(rank: int, world_size: int) -> list[str]:
    with Heap(HEAP_BYTES) as heap:
        refused(heap)
        found = floats(heap) + like_torch_distributed(heap) + along_dimensions(heap)
        return found + in_place(heap) + gradients(heap)


@pytest.mark.parametrize(
    ("world_size", "piece_bytes"),
    [
        pytest.param(2, 1 << 20, marks=pytest.mark.num_ranks(2)),
        pytest.param(3, 6144, marks=pytest.mark.num_ranks(3)),
        *(pytest.param(n, 6144, marks=[pytest.mark.num_ranks(n), pytest.mark.gpu]) for n in (4, 8)),
    ],
)
def test_integers(world_size: int, piece_bytes: int) -> None:
    assert values(run_ranks(integers, world_size, piece_bytes, timeout=TIMEOUT_S)) == [[]] * world_size


@pytest.mark.num_ranks(2)
def test_reductions_and_dimensions() -> None:
    assert values(run_ranks(others, 2, timeout=TIMEOUT_S)) == [[], []]
