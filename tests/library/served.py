"""What the ranks of test_torch_ops.py run: `torch.ops.symm_mem.*` by ours, against float64 and PyTorch's Meta."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from pyrocshmem import ShmemError, heap_for, torch_ops
from pyrocshmem.calls.call_name import CallName
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.reference.accuracy import EPS32, Partials, bound
from tests.stream_k.products import ON_CPU, check_product, random, same_bits

HEAP_BYTES = 32 << 20
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
NAMES = tuple(torch_ops.OPERATORS)


def operators() -> Any:
    import torch.distributed._symmetric_memory  # defines some of them

    return torch.ops.symm_mem


def outcome(call: Callable[[], Any]) -> str:
    """Class and text of what `call` raises, "" if nothing."""
    try:
        call()
    except (ShmemError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def world() -> str:
    """The default group's name. Its heap is made first, of the tests' size."""
    heap_for(None, HEAP_BYTES)
    return str(dist.group.WORLD.group_name)


@contextlib.contextmanager
def made() -> Iterator[list[str]]:
    """The calls that communicate which this library makes inside, as ranks compare them."""
    seen: list[str] = []
    honest = Workspace.begin

    def begin(self: Workspace, call: CallName | None) -> Any:
        seen.extend(() if call is None else (str(call),))
        return honest(self, call)

    with mock.patch.object(Workspace, "begin", begin):
        yield seen


def of_rank(shape: tuple[int, ...], dtype: torch.dtype, rank: int, tag: int) -> torch.Tensor:
    """An operand of a rank, which every rank can make."""
    rows = math.prod(shape[:-1])
    return random(rows, shape[-1], dtype, 1000 * tag + rank).view(shape)


def laid_out_anew(x: torch.Tensor) -> torch.Tensor:
    """The same values, by columns, with something between them."""
    wide = x.new_full((*x.shape[:-2], x.shape[-1] + 3, x.shape[-2] + 1), math.nan)
    view = wide[..., 1 : 1 + x.shape[-1], : x.shape[-2]].transpose(-2, -1)
    return view.copy_(x)


def like_meta(name: str, found: Any, args: tuple[Any, ...], **options: Any) -> None:
    """AssertionError unless results have the shapes, strides and dtypes of PyTorch's Meta kernel."""

    def to_meta(x: Any) -> Any:
        if isinstance(x, list):
            return [to_meta(each) for each in x]
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    def facts(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [facts(each) for each in x]
        if x is None:
            return None
        steps = [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]
        return tuple(x.shape), steps if x.numel() else None, x.dtype

    expected = getattr(operators(), name)(*map(to_meta, args), **options)
    assert facts(found) == facts(expected), f"{name}: {facts(found)}, expected {facts(expected)}"


def gather(
    rank: int, ranks: int, shape: tuple[int, ...], columns: tuple[int, ...], dim: int, dtype: torch.dtype,
    strided: bool = False, return_A: bool = True,
) -> None:  # fmt: skip
    """One call, two times. shape: of a rank's A."""
    shards = [of_rank(shape, dtype, peer, 1) for peer in range(ranks)]
    a = laid_out_anew(shards[rank]) if strided else shards[rank]
    whole = torch.cat(shards, dim)
    bs = [of_rank((whole.shape[-1], n), dtype, rank, 2 + number) for number, n in enumerate(columns)]
    # Weights are read transposed.
    bs = [b.t().contiguous().t() if number % 2 else b for number, b in enumerate(bs)]
    bs = [laid_out_anew(b) if strided else b for b in bs]
    for _ in range(2):
        args = (a, bs, dim, world())
        gathered, products = operators().fused_all_gather_matmul(*args, return_A=return_A)
        like_meta("fused_all_gather_matmul", (gathered, products), args, return_A=return_A)
        assert (gathered is not None) == return_A
        assert gathered is None or same_bits(gathered, whole)
        assert len(products) == len(bs)
        for c, b in zip(products, bs, strict=True):
            check_product(c.flatten(0, -2), whole.flatten(0, -2), b)


def scatter(
    rank: int, ranks: int, shape: tuple[int, ...], columns: int, dim: int, dtype: torch.dtype, op: str = "sum",
    strided: bool = False,
) -> None:  # fmt: skip
    """One call, two times. shape: of a rank's A."""
    pairs = [
        (of_rank(shape, dtype, peer, 1), of_rank((shape[-1], columns), dtype, peer, 2))
        for peer in range(ranks)
    ]
    a, b = pairs[rank]
    if strided:
        a, b = laid_out_anew(a), b.t().contiguous().t()
    exact = sum(x.double() @ y.double() for x, y in pairs)
    size = sum(x.double().abs() @ y.double().abs() for x, y in pairs)
    divisor = ranks if op == "avg" else 1
    partials = sum((x.double() @ y.double()).abs() for x, y in pairs)
    exact, size, partials, mine = (
        x.chunk(ranks, dim)[rank] / divisor for x in (exact, size, partials, exact)
    )
    # Of the sum; of each rank's partial, which is rounded; of the division.
    terms = Partials(partials, ranks / divisor, ELEMENTS[dtype].wire_dtype(None))
    allowed = bound(exact, exact.to(dtype), size, ranks * shape[-1], dtype, terms)
    unit = torch.finfo(dtype).eps / 2
    allowed += unit * mine.abs() + torch.finfo(dtype).smallest_normal * unit if ranks & (ranks - 1) else 0.0
    for _ in range(2):
        args = (a, b, op, dim, world())
        found = operators().fused_matmul_reduce_scatter(*args)
        assert tuple(found.shape) == tuple(exact.shape)
        assert found.is_contiguous()
        assert found.dtype == dtype
        over = (found.double() - exact).abs() > allowed
        assert not over.any(), f"{shape}, {dim}, {dtype}, {op}: {int(over.sum())} elements are off"
        # The control: another rank's block would be noticed.
        if found.numel() and ranks > 1 and shape[-1]:
            assert ((found.double() - exact.roll(1, 0) - 1).abs() > allowed).any()


def reduce(
    rank: int, ranks: int, shape: tuple[int, ...], dtype: torch.dtype, op: str, strided: bool = False
) -> None:
    terms = [of_rank(shape, dtype, peer, 1) for peer in range(ranks)]
    exact = sum(x.double() for x in terms) / (ranks if op == "avg" else 1)
    size = sum(x.double().abs() for x in terms)
    unit = torch.finfo(dtype).eps / 2
    allowed = 2 * unit * exact.abs() + ranks * EPS32 * size + torch.finfo(dtype).smallest_normal * unit
    for name in ("one_shot_all_reduce", "two_shot_all_reduce_"):
        x = laid_out_anew(terms[rank]) if strided else terms[rank].clone()
        found = getattr(operators(), name)(x, op, world())
        assert ((found.double() - exact).abs() <= allowed).all(), f"{name} of {shape} {dtype}, {op}"
        assert found.shape == x.shape
        if name.endswith("_"):
            assert found is x
        else:
            assert same_bits(x, terms[rank])


def few_calls(rank: int, ranks: int) -> None:
    """Of a number of ranks by which a division is rounded, too."""
    for dtype in (FP16, FP32):
        gather(rank, ranks, (2, 3, 4), (5, 8), 1, dtype)
        scatter(rank, ranks, (2 * ranks, 3, 5), 8, 0, dtype, "avg")
        reduce(rank, ranks, (5, 7), dtype, "avg")


def many_calls(rank: int, ranks: int) -> None:
    """Every dimension, layout, reduction and dtype; PyTorch's own cases."""
    for dim, dtype in enumerate((FP16, BF16, FP32)):
        gather(rank, ranks, (2, 4, 5), (8, 3, 6), dim, dtype, strided=dim == 1)
        scatter(rank, ranks, (2 * ranks, ranks, 5), 3 * ranks, dim, dtype, ("sum", "avg")[dim % 2])
        scatter(rank, ranks, (ranks, 3 * ranks, 6), 2 * ranks, dim, dtype, strided=True)
        for op in torch_ops.REDUCTIONS:
            reduce(rank, ranks, (5, 7), dtype, op)
    for dim in range(4):
        gather(rank, ranks, (2, 1, 3, 4), (5, 8), dim, FP16, return_A=dim % 2 == 0)
    for dim in range(2):
        gather(rank, ranks, (5, 8), (8, 16, 4), dim, FP16, strided=True, return_A=dim == 0)
        scatter(rank, ranks, (3 * ranks, 8), 2 * ranks, dim, FP16, strided=True)
        # Nothing to multiply by, nothing to gather, nothing to add.
        gather(rank, ranks, (5, 8), (), dim, FP32)
        gather(rank, ranks, (0, 8), (3, 4), dim, FP32)
        scatter(rank, ranks, (0, 8), 2 * ranks, dim, FP32)
        scatter(rank, ranks, (2 * ranks, 0), 2 * ranks, dim, FP32)
    gather(rank, ranks, (5, 8), (0, 0), 0, FP32)
    gather(rank, ranks, (5, 0), (3,), 0, FP32)
    reduce(rank, ranks, (3, 5, 7), FP16, "sum", strided=True)
    reduce(rank, ranks, (0, 7), FP32, "avg")
    for dim in range(3):
        sizes = [8, 64, 32]
        sizes[dim] //= ranks
        gather(rank, ranks, (sizes[0], sizes[1], sizes[2]), (16, 16, 16), dim, FP32)
        scatter(rank, ranks, (8, 64, 1024), 16, dim, FP32, "avg")
    scatter(rank, ranks, (64, 1024), 32, 0, BF16, "avg")


def calls(rank: int, ranks: int, few: bool) -> int:
    """A body: how many calls that communicate were this library's."""
    world()
    with warnings.catch_warnings(), torch_ops.install(), made() as seen:
        warnings.simplefilter("error", UserWarning)
        (few_calls if few else many_calls)(rank, ranks)
    sums = [call for call in seen if call.startswith("gemm_reduce_scatter(") and f" {FP16}, " in call]
    assert sums
    assert all(f"partials={FP16}" in call for call in sums), sums[0]
    return len(seen)


@contextlib.contextmanager
def stand_in(name: str) -> Iterator[list[str]]:
    """A kernel of one operator in PyTorch's place, for the target's device; yields the groups of its calls."""
    seen: list[str] = []

    def kernel(*args: Any, **options: Any) -> Any:
        seen.extend(x for x in args if isinstance(x, str) and x not in torch_ops.REDUCTIONS)
        return args[0].clone() if name != "fused_all_gather_matmul" else (None, [])

    library = torch.library.Library("symm_mem", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(name, kernel, "CPU" if ON_CPU else "CUDA")
    try:
        yield seen
    finally:
        library._destroy()


def installs(rank: int, ranks: int) -> dict[str, Any]:
    """A body: whose kernel makes a call, as installs of one group and of all come and go."""
    operators()
    every, name = world(), "one_shot_all_reduce"
    alone = [dist.new_group([peer]) for peer in range(ranks)][rank]
    x = random(3, 4, FP32, rank)
    found: dict[str, Any] = {}

    def ours(group: str, given: torch.Tensor = x) -> bool:
        """Whether this library makes the call; otherwise the stand-in does."""
        count = len(seen)
        getattr(operators(), name)(given, "sum", group)
        assert len(seen) - count in (0, 1)
        return len(seen) == count

    def registered() -> list[str]:
        return [torch._C._dispatch_dump(f"symm_mem::{operator}") for operator in torch_ops.OPERATORS]

    with stand_in(name) as seen:
        before = registered()
        found["before"] = ours(every)
        first, second = torch_ops.install(), torch_ops.install(dist.group.WORLD)
        found["both"] = ours(every), ours(alone.group_name)
        first.uninstall()
        first.uninstall()
        found["one group"] = ours(every), ours(alone.group_name)
        found["float64"] = ours(every, x.double())
        third = torch_ops.install(alone)
        second.uninstall()
        found["the other group"] = ours(every), ours(alone.group_name)
        third.uninstall()
        found["none"] = ours(every), ours(alone.group_name)
        try:
            with torch_ops.install():
                found["with"] = ours(every)
                raise KeyError
        except KeyError:
            found["after an exception"] = ours(every)
        found["nothing is left"] = registered() == before
    with stand_in("fused_all_gather_matmul") as gathers, torch_ops.install(alone):
        args = (x, [x.t(), x.t()], 0, every)
        found["lists"] = operators().fused_all_gather_matmul(*args, return_A=False), gathers == [every]
    heap_for().barrier()
    return found


def compiled(rank: int, ranks: int) -> dict[str, Any]:
    """A body: a compiled function calls ours, as one graph, as long as it is installed."""
    group = world()
    a, weights = random(4, 8, FP32, rank), [random(8, 6, FP32, 10 + n) for n in range(2)]
    down = random(6, 8, FP32, rank + 20)

    def block(a: torch.Tensor, weights: list[torch.Tensor], down: torch.Tensor) -> torch.Tensor:
        whole, (gate, up) = operators().fused_all_gather_matmul(a, weights, 0, group)
        rows = operators().fused_matmul_reduce_scatter(gate * up, down, "sum", 0, group)
        return rows + whole.sum()

    def moved(a: torch.Tensor, weights: list[torch.Tensor], down: torch.Tensor) -> torch.Tensor:
        _, (gate, up) = operators().fused_all_gather_matmul(a[None], weights, 1, group, return_A=False)
        return operators().fused_matmul_reduce_scatter(gate + up, down, "avg", 1, group).relu()

    def summed(a: torch.Tensor, weights: list[torch.Tensor], down: torch.Tensor) -> torch.Tensor:
        return operators().one_shot_all_reduce(a * 2, "sum", group) + 1

    found: dict[str, Any] = {}
    for function in (block, moved, summed):
        # Not Inductor, which has a form of its own of the last one, for GPUs alone.
        fast = torch.compile(function, fullgraph=True, backend="aot_eager")
        with torch_ops.install(), made() as seen:
            eager = function(a, weights, down)
            expected = len(seen)
            right = torch.allclose(fast(a, weights, down), eager, rtol=1e-5, atol=1e-5)
            found[function.__name__] = right, len(seen) == 2 * expected > 0
        found[f"{function.__name__} after"] = outcome(lambda f=fast: f(a, weights, down)) if ON_CPU else ""  # type: ignore[misc]
        with torch_ops.install():
            found[f"{function.__name__} again"] = torch.allclose(
                fast(a, weights, down), eager, rtol=1e-5, atol=1e-5
            )
    return found


def gradients(rank: int, ranks: int) -> dict[str, Any]:
    """A body: like PyTorch's kernels ours leave no gradient, nor a part of one."""
    group, found = world(), {}
    a, b = (random(4 * ranks, 8, FP32, rank).requires_grad_() for _ in range(2))
    with torch_ops.install(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a backward through an operator that has none
        ops = operators()
        makers: dict[str, Callable[[], torch.Tensor]] = {
            "gathered": lambda: ops.fused_all_gather_matmul(a, [b.t()], 0, group)[0],
            "moved": lambda: ops.fused_all_gather_matmul(a[None], [b.t()], 1, group)[0],
            "product": lambda: ops.fused_all_gather_matmul(a, [b.t()], 0, group)[1][0],
            "scattered": lambda: ops.fused_matmul_reduce_scatter(a, b.t(), "avg", 1, group),
            "sum": lambda: ops.one_shot_all_reduce(a, "avg", group),
        }
        for name, make in makers.items():
            value = make()
            if value.requires_grad:
                value.sum().backward()
            found[name] = a.grad, b.grad
    return found


def undefined(rank: int, ranks: int) -> dict[str, Any]:
    """A body: a PyTorch that lacks two operators. They are there while they are installed, for tracing, too."""
    import torch.distributed._symmetric_memory as stock

    stock.lib._destroy()
    found: dict[str, Any] = {"before": outcome(lambda: torch.ops.symm_mem.fused_all_gather_matmul)}
    with torch_ops.install():
        gather(rank, ranks, (2, 3, 5), (4, 8), 1, FP32)
        gather(rank, ranks, (2, 3, 5), (4,), 2, FP16)
        scatter(rank, ranks, (ranks, 3, 5), 4, 0, FP32)
        args = (random(ranks, 5, FP32), random(5, 4, FP32), "sum", 0, world())
        like_meta("fused_matmul_reduce_scatter", operators().fused_matmul_reduce_scatter(*args), args)
    found["after"] = outcome(lambda: torch.ops.symm_mem.fused_all_gather_matmul)
    return found


def mistakes(rank: int, ranks: int) -> dict[str, str]:
    """A body: by name, what wrong calls and wrong installs raise."""
    group, ops = world(), operators()
    a, b = random(4 * ranks, 8, FP32, rank), random(8, 4, FP32)
    pairs = [dist.new_group([peer]) for peer in range(ranks)]
    given: dict[str, Callable[[], Any]] = {
        "dimension": lambda: ops.fused_all_gather_matmul(a, [b], 2, group),
        "negative": lambda: ops.fused_matmul_reduce_scatter(a, b, "sum", -1, group),
        "vector": lambda: ops.fused_all_gather_matmul(a[0], [b], 0, group),
        "inner": lambda: ops.fused_all_gather_matmul(a, [b, b[1:]], 0, group),
        "inner of columns": lambda: ops.fused_all_gather_matmul(a, [b], 1, group),
        "batch of B": lambda: ops.fused_all_gather_matmul(a, [b[None]], 0, group),
        "mixed": lambda: ops.fused_all_gather_matmul(a, [b, b.half()], 0, group),
        "reduction": lambda: ops.fused_matmul_reduce_scatter(a, b, "max", 0, group),
        "reduction of a sum": lambda: ops.one_shot_all_reduce(a, "max", group),
        "uneven rows": lambda: ops.fused_matmul_reduce_scatter(a[1:], b, "sum", 0, group),
        "uneven columns": lambda: ops.fused_matmul_reduce_scatter(a, b[:, 1:], "sum", 1, group),
        "no group": lambda: ops.one_shot_all_reduce(a, "sum", "nobody"),
        "install a heap": lambda: torch_ops.install(heap_for()),
        "install a name": lambda: torch_ops.install(group),
        "install another's": lambda: torch_ops.install(pairs[(rank + 1) % ranks]),
    }
    if ON_CPU:
        given["float64"] = lambda: ops.one_shot_all_reduce(a.double(), "sum", group)
    with torch_ops.install():
        found = {name: outcome(call) for name, call in given.items()}
        gather(rank, ranks, (2, 3), (4,), 0, FP32)
    with torch_ops.install(pairs[rank]):
        found["not installed"] = outcome(lambda: ops.one_shot_all_reduce(a, "sum", group)) if ON_CPU else ""
    schema, *rest = torch_ops.OPERATORS["two_shot_all_reduce_"]
    torch_ops.OPERATORS["two_shot_all_reduce_"] = (schema.replace("reduce_op", "op"), *rest)
    found["another schema"] = outcome(torch_ops.install)
    # Nothing is half installed.
    found["after that"] = outcome(lambda: ops.fused_all_gather_matmul(a, [b], 0, group)) if ON_CPU else ""
    heap_for().barrier()
    return found
