"""Norms in 8 bits, of both sums that are normalized: the bits of `quantize` of the norm that a call returns otherwise,
beside the same total, in every recipe; odd rows; refused calls. tests/fused/test_row_programs.py has late programs."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from pyrocshmem import CallMismatch, Heap, batch_invariant, collectives, stream_k
from pyrocshmem.collectives.quantized_norm import QuantizedNorm
from pyrocshmem.elements import float8
from pyrocshmem.reference.accuracy import make_operand
from tests.ranks import run_ranks, values
from tests.stream_k.products import device

TIER = 2
TIMEOUT_S = 100.0
HEAP_BYTES = 32 << 20
EPS = 1e-5
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
RECIPES = ("rowwise", "blockwise", "tensorwise")
# Of one group and of several, whole ones and not; rows that ranks don't divide, in three dimensions, in one; none.
SHAPES = (
    ((7, 37), F16, "one_shot"),
    ((2, 2, 300), BF16, "two_shot"),
    ((5, 256), F32, "one_shot"),
    ((3, 130), F32, "two_shot"),
    ((1, 1), F16, "two_shot"),
    ((140,), BF16, "one_shot"),
    ((0, 24), F16, "auto"),
)
# Of whole units, off their boundaries, fewer rows than ranks.
PRODUCTS = (((5, 264, 40), F16), ((3, 130, 17), F32), ((1, 16, 16), F16))


def made(shape: tuple[int, ...], dtype: torch.dtype, tag: str, rank: int = 0) -> torch.Tensor:
    return make_operand(shape, dtype, 3, rank, tag=tag).to(device())


def poison(*shapes: tuple[int, ...]) -> None:
    """What the allocator gives next is no number where nobody writes it."""
    held = [torch.full(shape, torch.nan, device=device()) for shape in shapes for _ in range(4)]
    del held


def differences(call: Any, dtype: torch.dtype) -> list[str]:
    """What differs between call(quantize=..) and `quantize` of call(), by recipe: in bits, or in how scales lie."""
    y, total = call()
    rows, wrong = y.reshape(-1, y.shape[-1]), []
    for recipe, keep in zip((*RECIPES, "rowwise"), (False, True, False, True), strict=True):
        scale = torch.full((1, 1), 0.004, device=device()) if recipe == "tensorwise" else None
        q, scales = stream_k.quantize(rows, recipe, scale=scale)
        if scale is None:
            scales = scales.view(*y.shape[:-1], scales.shape[1])
        poison(y.shape, scales.shape)
        found = call(quantize=recipe, quantize_scale=scale, keep_norm=keep)
        kept = found.norm is not None and torch.equal(found.norm, y) if keep else found.norm is None
        same = (
            found.quantized.dtype == float8()[0]
            and torch.equal(found.quantized.view(torch.uint8), q.view(torch.uint8).view(y.shape))
            and torch.equal(found.scale, scales)
            and found.scale.stride() == scales.stride()
            and torch.equal(found.total, total)
        )
        if not (kept and same):
            wrong.append(f"{tuple(y.shape)} {dtype} {recipe}, kept {keep}")
    return wrong


def sums(heap: Heap) -> list[str]:
    """Of tensors."""
    wrong = []
    for shape, dtype, algorithm in SHAPES:
        x, residual = made(shape, dtype, "x", heap.rank), made(shape, dtype, "residual")
        given = (x, residual, made(shape[-1:], BF16, "weight"), EPS)
        more: dict[str, Any] = {"group": heap, "algorithm": algorithm}
        wrong += differences(partial(collectives.all_reduce_rms_norm, *given, **more), dtype)
    return wrong


def products(heap: Heap) -> list[str]:
    """Of products, sent by their tiles or not, of both algorithms, and summed in other ways; of a batch; in 8 bits."""
    call, wrong = stream_k.gemm_all_reduce_rms_norm, []
    for (M, N, K), dtype in PRODUCTS:
        a, b = made((M, K), dtype, "a", heap.rank), made((K, N), dtype, "b", heap.rank)
        residual, weight = made((M, N), dtype, "residual"), made((N,), F32, "weight")
        ways = (("messages", "one_shot"), ("messages", "two_shot"), ("after", "one_shot"))
        for placement, algorithm in ways if heap.world_size > 1 else ():
            config = stream_k.Config(
                block_m=16, block_n=32, block_k=32, placement=placement, algorithm=algorithm, comm_rows=8
            )
            given = (a, b, residual, weight, EPS)
            wrong += differences(partial(call, *given, group=heap, config=config), dtype)
        given = (a[None], b, residual[None], weight, EPS)
        wrong += differences(partial(call, *given, group=heap), dtype)
    a, of_a = stream_k.quantize(made((5, 160), F16, "a", heap.rank), "blockwise")
    b, of_b = stream_k.quantize(made((264, 160), F16, "b", heap.rank), "blockwise_weight")
    given = (a, b.t(), None, made((264,), BF16, "weight"), EPS)
    scales: dict[str, Any] = {"scale_a": of_a, "scale_b": of_b.t(), "group": heap}
    return wrong + differences(partial(call, *given, **scales), F16)


def invariant(heap: Heap) -> list[str]:
    x, weight = made((6, 300), BF16, "x", heap.rank), made((300,), BF16, "weight")
    wrong = []
    for tp_invariant in (False, True):
        with batch_invariant(tp_invariant=tp_invariant):
            call = partial(collectives.all_reduce_rms_norm, x, None, weight, EPS, group=heap)
            whole = call(quantize="rowwise")
            alone = collectives.all_reduce_rms_norm(x[4:5], None, weight, EPS, group=heap, quantize="rowwise")
            wrong += differences(call, BF16)
        same = torch.equal(whole.quantized[4:5].view(torch.uint8), alone.quantized.view(torch.uint8))
        if not same or not torch.equal(whole.scale[4:5], alone.scale):
            wrong.append(f"tp_invariant={tp_invariant}: a row alone differs")
    return wrong


def saturated(heap: Heap) -> list[int]:
    """Elements that are counted in two contexts, less those of the call that only the outer one sees; and whether that
    call has the same bits as one that is not counted."""
    x, weight = made((6, 300), F32, "x", heap.rank), torch.ones(300, device=device())
    scale = torch.full((), 1.0 / torch.finfo(float8()[0]).max, device=device())  # of numbers up to 1

    def call(**more: Any) -> Any:
        more = more or {"quantize": "tensorwise", "quantize_scale": scale, "keep_norm": True}
        return collectives.all_reduce_rms_norm(x, None, weight, EPS, group=heap, **more)

    first = call()
    assert first.norm is not None
    with stream_k.count_saturated() as outer:
        second = call()
        with stream_k.count_saturated() as inner:
            call(quantize="rowwise")
            stream_k.quantize(
                torch.tensor([[2.0, -3.0, 1.0, torch.nan, torch.inf]], device=device()),
                "tensorwise",
                scale=scale,
            )
    call()
    same = torch.equal(first.quantized.view(torch.uint8), second.quantized.view(torch.uint8))
    beyond = int((first.norm.abs() > 1).sum())
    assert 0 < beyond < 1800
    return [outer.elements - beyond, inner.elements, int(same)]


def odd_rows(heap: Heap) -> list[str]:
    """Zeros, NaN, infinities, numbers whose squares overflow, weights of zero: as `quantize` has them."""
    x = made((8, 260), F32, "x", heap.rank)
    weight = made((260,), F32, "weight")
    x[1] = 0.0
    x[2, 20], x[3, 200], x[4, 1], x[5, 7] = torch.nan, torch.inf, -torch.inf, 1e30
    weight[130] = 0.0
    wrong = []
    for eps, algorithm in itertools.product((0.0, EPS), ("one_shot", "two_shot")):
        more = {"group": heap, "algorithm": algorithm}
        y, _ = collectives.all_reduce_rms_norm(x, None, weight, eps, **more)
        for recipe in ("rowwise", "blockwise"):
            q, scales = stream_k.quantize(y, recipe)
            found = collectives.all_reduce_rms_norm(x, None, weight, eps, quantize=recipe, **more)
            bits = (each.float().nan_to_num(1e9) for each in (found.quantized, q))
            if not torch.equal(*bits) or not torch.equal(found.scale, scales):
                wrong.append(f"{recipe} {algorithm} eps {eps}")
    return wrong


def outcome(heap: Heap, *given: Any, **more: Any) -> str:
    try:
        collectives.all_reduce_rms_norm(*given, EPS, group=heap, **more)
    except (ValueError, TypeError, CallMismatch) as error:
        if heap.broken:
            heap.recover()
        return f"{type(error).__name__}: {error}"
    return ""


# By name, how each error begins, and what it must say.
MISTAKES = {
    "recipe": ("ValueError", "allowed are None, 'tensorwise', 'rowwise', 'blockwise'"),
    "no scale": ("ValueError", "go together"),
    "a scale": ("ValueError", "go together"),
    "a scale alone": ("ValueError", "go with quantize"),
    "kept alone": ("ValueError", "go with quantize"),
    "a number": ("TypeError", "quantize_scale is a float"),
    "two scales": ("ValueError", "one element of torch.float32"),
    "gradient": ("ValueError", "no gradient"),
    "recipes differ": ("CallMismatch", "quantize="),
    "kept on one": ("CallMismatch", "norm kept"),
}


def mistakes(heap: Heap) -> dict[str, str]:
    x, weight = made((3, 24), F16, "x", heap.rank), made((24,), F16, "weight")
    first, one = heap.rank == 0, torch.ones((), device=device())
    calls: dict[str, dict[str, Any]] = {
        "recipe": {"quantize": "columnwise"},
        "no scale": {"quantize": "tensorwise"},
        "a scale": {"quantize": "rowwise", "quantize_scale": one},
        "a scale alone": {"quantize_scale": one},
        "kept alone": {"keep_norm": True},
        "a number": {"quantize": "tensorwise", "quantize_scale": 1.0},
        "two scales": {"quantize": "tensorwise", "quantize_scale": torch.ones(2, device=device())},
        "recipes differ": {"quantize": "rowwise" if first else "blockwise"},
        "kept on one": {"quantize": "rowwise", "keep_norm": first},
    }
    found = {name: outcome(heap, x, None, weight, **more) for name, more in calls.items()}
    with pytest.raises(ValueError, match="go with quantize"):
        stream_k.gemm_all_reduce_rms_norm(x[None], x.t(), None, weight[:3], EPS, group=heap, keep_norm=True)  # type: ignore[call-overload]
    found["gradient"] = outcome(heap, x.clone().requires_grad_(), None, weight, quantize="rowwise")
    assert isinstance(
        collectives.all_reduce_rms_norm(x, None, weight, EPS, group=heap, quantize="rowwise"), QuantizedNorm
    )
    return found


def body(rank: int, world_size: int, few: bool) -> dict[str, Any]:
    with Heap(HEAP_BYTES) as heap:
        found: dict[str, Any] = {"sums": sums(heap), "products": products(heap)}
        if not few:
            found |= {"invariant": invariant(heap), "odd": odd_rows(heap), "mistakes": mistakes(heap)}
            found["saturated"] = saturated(heap)
        return found


@pytest.mark.num_ranks(2)
def test_two_ranks() -> None:
    """Everything."""
    for found in values(run_ranks(body, 2, False, timeout=TIMEOUT_S)):
        wrong = found.pop("mistakes")
        assert found.pop("saturated") == [3, 3, 1]
        assert found == {"sums": [], "products": [], "invariant": [], "odd": []}
        assert wrong.keys() == MISTAKES.keys()
        for name, (error, part) in MISTAKES.items():
            assert wrong[name].startswith(f"{error}: "), f"{name}: {wrong[name]!r}"
            assert part in wrong[name], f"{name}: {wrong[name]!r}"


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.num_ranks(n)) for n in (1, 3)])
def test_other_numbers_of_ranks(world_size: int) -> None:
    for found in values(run_ranks(body, world_size, True, timeout=TIMEOUT_S)):
        assert found == {"sums": [], "products": []}


@pytest.mark.num_ranks(1)
def test_traced_calls() -> None:
    """A compiled call is two operators, and has the same bits."""
    with Heap(1 << 20) as heap:
        x, weight = made((4, 300), F32, "x"), made((300,), F32, "weight")

        def call(x: torch.Tensor) -> Any:
            return collectives.all_reduce_rms_norm(x, None, weight, EPS, group=heap, quantize="blockwise")

        compiled = torch.compile(call, fullgraph=True, backend="eager")
        for one, other in zip(compiled(x)[:3], call(x)[:3], strict=True):
            assert torch.equal(one.float(), other.float())
