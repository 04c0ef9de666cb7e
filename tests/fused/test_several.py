"""Several Bs for one gather, `all_gather_gemm(a, [q, k, v])`: results, gradients, one graph, mistakes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyrocshmem import Heap, stream_k
from pyrocshmem.calls import operators
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.reference.accuracy import Partials, bound
from tests.fused.cases import HEAP_BYTES
from tests.fused.test_batches import tensor
from tests.fused.test_gather_scatter_ops import outcome
from tests.ranks import run_ranks, values
from tests.stream_k.products import same_bits

TIER = 2
TIMEOUT_S = 110.0
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
ROWS, K = 6, 16  # of a rank's a, [2, 3, K]


class Model:
    """All ranks' operands, and the gradients of their products, on every rank. On rank 0 nothing gives the second
    product a gradient."""

    def __init__(self, heap: Heap, columns: tuple[int, ...], dtype: torch.dtype) -> None:
        ranks = range(heap.world_size)
        self.heap, self.dtype, self.rank = heap, dtype, heap.rank

        def of_all(rows: int, seed: int) -> list[list[torch.Tensor]]:
            seeds = [[seed + 10 * peer + number for number in range(len(columns))] for peer in ranks]
            each = [zip(columns, of_rank, strict=True) for of_rank in seeds]
            return [[tensor(rows, n, dtype=dtype, seed=number) for n, number in of_rank] for of_rank in each]

        self.shards = [tensor(2, 3, K, dtype=dtype, seed=100 + peer) for peer in ranks]
        self.bs, self.grads = of_all(K, 1000), of_all(ROWS * len(ranks), 2000)
        self.grads[0][1].zero_()
        self.a = self.shards[self.rank]
        self.whole = torch.cat(self.shards).flatten(0, -2)

    def close(
        self,
        found: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        shift: Any = None,
        partials: Partials | None = None,
    ) -> bool:
        """Whether it is left @ right + shift, within the bound. partials: of a sum over ranks."""
        left, right = left.double(), right.double()
        added = torch.zeros(1, device=left.device) if shift is None else shift.double()
        exact, size = left @ right + added, left.abs() @ right.abs() + added.abs()
        allowed = bound(exact, exact.to(self.dtype), size, left.shape[1], self.dtype, partials)
        return found.shape == exact.shape and bool(((found.double() - exact).abs() <= allowed).all())

    def right_gradient_of_a(
        self, found: torch.Tensor, grads: list[list[torch.Tensor]], asked: torch.dtype | None = None
    ) -> bool:
        """As the sum over all products of all ranks, whose terms travel in what was asked for; the control: twice that
        would be noticed."""
        lefts = [torch.cat(of, 1)[ROWS * self.rank :][:ROWS].double() for of in grads]
        rights = [torch.cat([b.t() for b in of]).double() for of in self.bs]
        size = sum((left @ right).abs() for left, right in zip(lefts, rights, strict=True))
        terms = Partials(size, len(lefts), ELEMENTS[self.dtype].wire_dtype(asked))
        both, rows = (torch.cat(lefts, 1), torch.cat(rights)), found.flatten(0, -2)
        return self.close(rows, *both, partials=terms) and not self.close(2 * rows, *both, partials=terms)


def results(model: Model) -> list[str]:
    """Without gradients: with biases and outputs for some."""
    a, bs, heap = model.a, model.bs[model.rank], model.heap
    biases = [tensor(1, 8, dtype=model.dtype)[0], None, tensor(1, 12, dtype=FP32)[0]]
    found = stream_k.all_gather_gemm(a, bs, bias=biases, group=heap)
    outs: list[Any] = [torch.full_like(found[0], torch.nan), None, torch.full_like(found[2], torch.nan)]
    again = stream_k.all_gather_gemm(a, tuple(bs), bias=biases, out=outs, group=heap)
    assert again[0] is outs[0]
    assert again[2] is outs[2]
    assert all(same_bits(c, d) for c, d in zip(found, again, strict=True))
    each = enumerate(zip(found, bs, biases, strict=True))
    return [
        f"product {number}"
        for number, (c, b, bias) in each
        if not model.close(c.flatten(0, -2), model.whole, b, bias)
    ]


def gradients(model: Model, save_gathered: bool) -> list[str]:
    """Of all factors; the second B is a weight, read transposed. Partial sums are rounded where the rows are kept."""
    heap, dtype = model.heap, model.dtype
    asked = None if save_gathered else FP32
    given = [model.a, *model.bs[model.rank], tensor(1, 8, dtype=dtype)[0]]
    given[2] = given[2].t().contiguous().t()
    a, *bs, bias = (x.detach().requires_grad_() for x in given)
    products = stream_k.all_gather_gemm(
        a, bs, bias=[bias, None, None], group=heap, save_gathered=save_gathered, partial_dtype=asked
    )
    grads = model.grads[model.rank]
    pairs = [(c, g.view_as(c)) for c, g in zip(products, grads, strict=True) if g.any()]
    assert len(pairs) == (2 if model.rank == 0 else 3)
    torch.autograd.backward([c for c, _ in pairs], [g for _, g in pairs])
    wrong = [] if model.right_gradient_of_a(a.grad, model.grads, asked) else ["a's gradient"]
    for number, (b, g) in enumerate(zip(bs, grads, strict=True)):
        wrong += [] if model.close(b.grad, model.whole.t(), g) else [f"gradient {number} of b"]
    assert bs[1].grad.stride() == bs[1].stride()
    ones = torch.ones(1, len(model.whole), device=a.device)
    return wrong if model.close(bias.grad[None], ones, grads[0]) else [*wrong, "the bias' gradient"]


def one_factor(model: Model, needs: str) -> list[str]:
    """The gradient of a alone, or of the second B alone, through an activation."""
    a = model.a.clone().requires_grad_(needs == "a")
    bs = [b.clone().requires_grad_(needs == "b" and n == 1) for n, b in enumerate(model.bs[model.rank])]
    products = stream_k.all_gather_gemm(a, bs, activation="relu", group=model.heap)
    grads = model.grads[model.rank]
    torch.autograd.backward(products, [g.view_as(c) for c, g in zip(products, grads, strict=True)])
    bent = [
        [g * (model.whole.double() @ b.double() > 0) for g, b in zip(*of, strict=True)]
        for of in zip(model.grads, model.bs, strict=True)
    ]
    if needs == "a":
        right = model.right_gradient_of_a(a.grad, bent) and bs[1].grad is None
    else:
        right = model.close(bs[1].grad, model.whole.t(), bent[model.rank][1]) and bs[0].grad is a.grad is None
    return [] if right else [f"the gradient of {needs} alone"]


def compiled(model: Model) -> list[str]:
    """One graph, with gradients and without, gives what eager calls do."""

    def loss(a: torch.Tensor, bs: list[torch.Tensor]) -> torch.Tensor:
        gate, up, down = stream_k.all_gather_gemm(a, bs, group=model.heap)
        return gate.square().sum() + up.sin().sum() - down.sum()

    found = []
    for needs in (True, False):
        torch._dynamo.reset()
        both = []
        for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager_decomp_partition")):
            a, *bs = (x.clone().requires_grad_(needs) for x in (model.a, *model.bs[model.rank]))
            value = function(a, bs)
            both.append([value.detach(), *(torch.autograd.grad(value, [a, *bs]) if needs else ())])
        if not all(torch.allclose(x, y, rtol=1e-5, atol=1e-5) for x, y in zip(*both, strict=True)):
            found.append(f"compiled, gradients {needs}")
    return found


def mistakes(model: Model) -> list[str]:
    """Wrong calls that don't say so; they launch nothing."""
    heap, a, (b, c, _) = model.heap, model.a, model.bs[model.rank]
    rows = a.flatten(0, -2)
    leaf = b.clone().requires_grad_()
    out = [torch.empty(ROWS * heap.world_size, 8, device=a.device)]

    def twice() -> None:
        x = a.clone().requires_grad_()
        product = stream_k.all_gather_gemm(x, [leaf, c], group=heap)[0]
        (grad,) = torch.autograd.grad(product.square().sum(), x, create_graph=True)
        grad.sum().backward()

    op = functools.partial(stream_k.all_gather_gemm, group=heap)
    wrong: dict[str, Callable[[], Any]] = {
        "bias has 1 entries for 2 matrices": lambda: op(a, [b, c], bias=[None]),
        "out is a Tensor beside 2 matrices": lambda: op(rows, [b, c], out=b),
        "inner sizes 16 and 15": lambda: op(a, [b, c[1:]]),
        "b is torch.float16": lambda: op(a, [b, c.half()]),
        "b is a str": lambda: op(a, ["b"]),
        "takes no out": lambda: op(rows, [leaf], out=out),
    }
    texts = {part: outcome(call) for part, call in wrong.items()}
    with pytest.raises(RuntimeError, match="twice"):
        twice()
    assert len(stream_k.all_gather_gemm(a, [b, c], group=heap)) == 2
    assert stream_k.all_gather_gemm(a, [], group=heap) == []
    return [f"{part}: {text!r}" for part, text in texts.items() if part not in text]


def checked(model: Model) -> list[str]:
    """`torch.library.opcheck` of the operator."""
    heap, a = model.heap, model.a.flatten(0, -2).requires_grad_()
    bs = [b.clone().requires_grad_() for b in model.bs[model.rank]]
    more = (operators.name_of(heap), ROWS * heap.world_size, [tensor(1, 8)[0].requires_grad_()], [0])
    args = (a, bs, *more, "none", False, None, True)
    checks = torch.library.opcheck(torch.ops.stream_k.all_gather_gemms.default, args, raise_exception=False)
    return [f"{test}: {end}" for test, end in checks.items() if end != "SUCCESS"]


def several(rank: int, ranks: int) -> list[str]:
    """A body; what is wrong."""
    wrong = []
    with Heap(HEAP_BYTES) as heap:
        for dtype in (FP16, BF16, FP32):
            model = Model(heap, (8, 5, 12), dtype)
            found = results(model) + gradients(model, save_gathered=dtype != FP16)
            wrong += [f"{dtype}: {each}" for each in found]
        wrong += one_factor(model, "a") + one_factor(model, "b") + mistakes(model)
    return wrong


def traced(rank: int, ranks: int) -> list[str]:
    """A body; what is wrong."""
    with Heap(HEAP_BYTES) as heap:
        model = Model(heap, (8, 5, 12), FP32)
        return checked(model) + compiled(model)


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.num_ranks(n)) for n in (2, 4)])
def test_several(ranks: int) -> None:
    assert values(run_ranks(several, ranks, timeout=TIMEOUT_S)) == [[]] * ranks


@pytest.mark.num_ranks(2)
def test_traced() -> None:
    assert values(run_ranks(traced, 2, timeout=2 * TIMEOUT_S)) == [[], []]
