"""`collectives.rms_norm` against float64 and PyTorch: every rank's result, its gradients, odd input, its operators."""

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional

from pyrocshmem import CallMismatch, Heap, collectives
from pyrocshmem.calls.operators import name_of
from pyrocshmem.reference import accuracy
from tests.collectives.norm_rows import CASES, EPS, F16, F32, HEAP_BYTES, MIXES, Rows, run
from tests.library.bodies import eagerly

TIER = 2
CANARY = -77.0


# For as many ranks as a heap can have; one size has fewer columns than these.
FEW = [CASES[1], *CASES[5:6]]


def forward_everything(group: Any, cases: list[Any]) -> tuple[list[str], list[torch.Tensor]]:
    """Every kind of result of `cases`; what came out wrong, and the replicated results."""
    wrong, results = [], []
    with Heap(HEAP_BYTES, group) as heap:
        for seed, (((M, H), mix), replicated) in enumerate(itertools.product(cases, (False, True))):
            rows = Rows.random(heap, M, H, mix, seed)
            wide = H if replicated else rows.mine[0].shape[1]
            frame = torch.full((M + 2, wide + 3), CANARY, dtype=mix[3], device=heap.device)
            ways = [{"out_dtype": mix[3]}, {"out": frame[1:-1, 1:-2].fill_(float("nan"))}]
            if replicated:
                ways.append({"out": heap.full((M, H), float("nan"), dtype=mix[3])})
            for way, options in enumerate(ways if H == 37 and mix[2] is None else ways[:1]):
                out, updated = rows.call(replicated, **options)
                heap.synchronize()
                if out.dtype != mix[3] or (problem := rows.wrong(out, updated, replicated)):
                    wrong.append(f"{M} x {H} {mix} {replicated} way {way}: {problem}")
                if replicated:
                    results.append(out.cpu())
            frame[1:-1, 1:-2] = CANARY
            if not (frame == CANARY).all():
                wrong.append(f"{M} x {H} {mix} {replicated}: outside")
    return wrong, results


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        *(pytest.param(n, CASES, marks=pytest.mark.num_ranks(n), id=str(n)) for n in (2, 3)),
        pytest.param(4, CASES, marks=[pytest.mark.num_ranks(4), pytest.mark.gpu], id="4"),
        pytest.param(8, FEW, marks=pytest.mark.num_ranks(8), id="8"),
    ],
)
def test_forward(world_size: int, cases: list[Any]) -> None:
    """Right on every rank, and the same bits of what is replicated."""
    ends = run(forward_everything, world_size, cases)
    assert [wrong for wrong, _ in ends] == [[]] * world_size
    assert all(len(results) >= len(cases) for _, results in ends)
    for results in zip(*(results for _, results in ends), strict=True):
        assert all(torch.equal(results[0], other) for other in results[1:])


def gradients(
    rows: Rows, g: torch.Tensor, more: torch.Tensor | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(gradients of h and of the weight in float64, for gradients `g` of the result and `more` of h; the sizes of the
    terms that they are sums of)."""
    h, w, g = rows.h.double(), rows.weight.double(), g.double()
    scale = torch.rsqrt(h.square().mean(1, keepdim=True) + EPS)
    normal, product = h * scale, g * w
    of_h = scale * (product - normal * (product * normal).mean(1, keepdim=True))
    size = scale * (product.abs() + normal.abs() * (product * normal).abs().mean(1, keepdim=True))
    if more is not None:
        of_h, size = of_h + more.double(), size + more.double().abs()
    return [of_h, (g * normal).sum(0)], [size, (g * normal).abs().sum(0)]


def backward_everything(group: Any) -> list[str]:
    """Gradients of every mix and kind of result, broadcast ones and random ones; what came out wrong."""
    wrong = []
    with Heap(HEAP_BYTES, group) as heap:
        for seed, (((M, H), mix), replicated) in enumerate(itertools.product(CASES, (False, True))):
            rows = Rows.random(heap, M, H, mix, seed)
            leaves = [leaf.requires_grad_() for leaf in rows.mine if leaf is not None]
            columns = rows.columns
            out = collectives.rms_norm(
                leaves[0], leaves[1], EPS, group=heap, residual=leaves[2] if len(leaves) > 2 else None,
                replicated=replicated, hidden=H, out_dtype=mix[3],
            )  # fmt: skip
            out, updated = out if len(leaves) > 2 else (out, None)
            generator = torch.Generator().manual_seed(seed + 1)
            g = torch.ones(M, H) if seed % 2 else torch.randn(M, H, generator=generator)
            g = g.to(mix[3]).to(heap.device)
            more = None
            loss = out.sum() if seed % 2 else (out * (g if replicated else g[:, columns])).sum()
            if updated is not None and seed % 3:
                more = torch.randn(M, H, generator=generator).to(mix[2]).to(heap.device)
                loss = loss + (updated * more[:, columns]).sum()
            found = torch.autograd.grad(loss, leaves)
            heap.synchronize()
            exact, sizes = gradients(rows, g, more)
            theirs = torch_gradients(rows, g, more)
            for leaf, which, name in zip(found, (0, 1, 0), ("x", "weight", "residual"), strict=False):
                expected, size, baseline = (t[which][..., columns] for t in (exact, sizes, theirs))
                terms = H + 16 + (M if name == "weight" else 0)
                # Where residual and x are of different types the gradient is rounded to the wider of them first.
                allowed = accuracy.bound(expected, baseline.to(leaf.dtype), size, terms, leaf.dtype)
                bad = (leaf.double() - expected).abs() > allowed
                if leaf.dtype != leaves[("x", "weight", "residual").index(name)].dtype or bad.any():
                    wrong.append(f"{M} x {H} {mix} {replicated}: {name}, {int(bad.sum())} elements")
    return wrong


def torch_gradients(rows: Rows, g: torch.Tensor, more: torch.Tensor | None) -> list[torch.Tensor]:
    """PyTorch's gradients in fp32 of h and of the weight."""
    h, w = rows.h.float().requires_grad_(), rows.weight.float().requires_grad_()
    loss = (functional.rms_norm(h, h.shape[1:], w, EPS) * g.float()).sum()
    if more is not None:
        loss = loss + (h * more.float()).sum()
    return list(torch.autograd.grad(loss, (h, w)))


@pytest.mark.num_ranks(2)
def test_gradients() -> None:
    assert run(backward_everything, 2) == [[], []]


def odd_rows(group: Any) -> list[str]:
    """NaN, infinity, zeros and the largest numbers beside ordinary rows, eps 0 and not."""
    wrong = []
    with Heap(HEAP_BYTES, group) as heap:
        for eps, replicated in itertools.product((0.0, EPS), (False, True)):
            rows = Rows.random(heap, 7, 40, (F32, F32, None, F32), 5)
            rows.x[1], rows.x[2, 3], rows.x[3, 30], rows.x[4] = 0.0, float("nan"), float("inf"), 1e30
            rows.x[5] = 1e-30
            out, _ = rows.call(replicated, eps)
            heap.synchronize()
            columns = slice(None) if replicated else rows.columns
            theirs = functional.rms_norm(rows.x, (40,), rows.weight, eps)[:, columns]
            close = torch.isclose(out, theirs, rtol=1e-5, atol=0, equal_nan=True)
            if not close.all():
                wrong.append(
                    f"eps {eps}, {replicated}: rows {sorted({int(i) for i in (~close).nonzero()[:, 0]})}"
                )
    return wrong


@pytest.mark.num_ranks(2)
def test_odd_rows_as_in_torch() -> None:
    assert run(odd_rows, 2) == [[], []]


def layouts(group: Any) -> list[str]:
    """x with rows apart, turned, misaligned, of three dimensions; out in place of x; more calls than slots."""
    wrong = []
    with Heap(HEAP_BYTES, group) as heap:
        rows = Rows.random(heap, 12, 48, (F16, F32, None, F16), 9)
        x, weight, _ = rows.mine
        apart = torch.full((12, 60), CANARY, dtype=F16, device=heap.device)
        apart[:, 1 : 1 + x.shape[1]] = x
        views = (apart[:, 1 : 1 + x.shape[1]], x.t().contiguous().t(), x.view(3, 4, -1), x)
        for view in (*views, *views):
            out = collectives.rms_norm(view, weight, EPS, group=heap, hidden=48)
            if out.shape != view.shape or (problem := rows.wrong(out.reshape(12, -1), None, False)):
                wrong.append(f"{tuple(view.shape)} {view.stride()}: {problem}")
        if collectives.rms_norm(x, weight, EPS, group=heap, out=x) is not x or rows.wrong(x, None, False):
            wrong.append("in place")
    return wrong


@pytest.mark.num_ranks(2)
def test_layouts() -> None:
    assert run(layouts, 2) == [[], []]


def mistakes(group: Any) -> None:
    """What the caller gets wrong raises before anything starts; the heap works afterwards."""
    with Heap(HEAP_BYTES, group) as heap:
        rows = Rows.random(heap, 4, 8 * heap.world_size, (F32, F32, F32, F32), 1)
        x, weight, residual = rows.mine
        norm = collectives.rms_norm
        with pytest.raises(ValueError, match=r"weight is \(7,\)"):
            norm(x, weight[:7], EPS, group=heap)
        with pytest.raises(ValueError, match="8 columns on rank"):
            norm(x, weight, EPS, group=heap, hidden=8 * heap.world_size + heap.world_size)
        with pytest.raises(ValueError, match=r"residual is \(3, 8\)"):
            norm(x, weight, EPS, group=heap, residual=residual[:3])
        with pytest.raises(TypeError, match=r"weight has dtype torch.int64"):
            norm(x, weight.long(), EPS, group=heap)
        with pytest.raises(TypeError, match=r"of layout torch.sparse_coo; dense ones"):
            norm(x.to_sparse(), weight, EPS, group=heap)
        with pytest.raises(ValueError, match="weight has PyTorch's negative bit"):
            norm(x, torch._neg_view(weight), EPS, group=heap)
        with pytest.raises(TypeError, match=r"out_dtype is torch.float64"):
            norm(x, weight, EPS, group=heap, out_dtype=torch.float64)
        for eps in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="finite numbers of 0 or more"):
                norm(x, weight, eps, group=heap)
        with pytest.raises(TypeError, match="eps is a NoneType"):
            norm(x, weight, None, group=heap)
        with pytest.raises(ValueError, match=r"out is \(4, 8\)"):
            norm(x, weight, EPS, group=heap, replicated=True, out=torch.empty_like(x))
        with pytest.raises(ValueError, match="contiguous rows"):
            norm(x, weight, EPS, group=heap, out=torch.empty(8, 4, device=heap.device).t())
        with pytest.raises(ValueError, match="several of its elements share a place"):
            norm(x, weight, EPS, group=heap, out=torch.empty(1, 8, device=heap.device).expand(4, 8))
        with pytest.raises(TypeError, match="out is a str"):
            norm(x, weight, EPS, group=heap, out="x")
        wide = torch.empty(4, 8 * heap.world_size, device=heap.device)
        with pytest.raises(ValueError, match="out shares memory with x"):
            norm(wide[:, :8], weight, EPS, group=heap, replicated=True, out=wide)
        with pytest.raises(ValueError, match="out shares memory with x"):
            norm(wide.view(-1)[:32].view(4, 8), weight, EPS, group=heap, out=wide.view(-1)[4:36].view(4, 8))
        with pytest.raises(ValueError, match="takes no out where a gradient"):
            norm(x.requires_grad_(), weight, EPS, group=heap, out=torch.empty_like(x))
        x = x.detach()
        # Ranks that disagree: on the rows, even where one has none, on the columns, on the kind, on a digit.
        for mine in (
            {"x": x[: heap.rank]},
            {"x": x[heap.rank :]},
            {"x": x, "replicated": heap.rank == 0},
            {"x": x, "out_dtype": (F16, F32)[heap.rank]},
            {"x": x, "eps": (0.1234567, 0.123457)[heap.rank]},
        ):
            with pytest.raises(CallMismatch, match="rms_norm"):
                norm(mine.pop("x"), weight, mine.pop("eps", EPS), group=heap, **mine)
        out = norm(x, weight, EPS, group=heap)
        assert not Rows(heap, rows.x, rows.weight, None).wrong(out, None, False)


@pytest.mark.num_ranks(2)
def test_mistakes() -> None:
    run(mistakes, 2)


def operators(group: Any) -> list[str]:
    """torch.library's own checks of the operator and its derivative, and calls that are traced into one graph, of which
    the second has other rows, and go past the dispatcher eagerly; what did not succeed."""
    failed = []
    with Heap(HEAP_BYTES, group) as heap:
        for mix, replicated in ((MIXES[1], False), (MIXES[0], True)):
            rows = Rows.random(heap, 3, 12, mix, 4)
            leaves = [None if leaf is None else leaf.requires_grad_() for leaf in rows.mine]
            arguments = (*leaves, EPS, 12, replicated, mix[3], name_of(heap))
            found = torch.library.opcheck(torch.ops.collectives.rms_norm.default, arguments)
            failed += [name for name, result in found.items() if result != "SUCCESS"]

        def norms(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            y, h = collectives.rms_norm(x, weight, EPS, group=heap, residual=residual)
            return collectives.rms_norm(y, weight, EPS, group=heap, replicated=True).sum() + h.square().sum()

        torch._dynamo.reset()
        traced = torch.compile(norms, fullgraph=True, backend="aot_eager")
        for M in (3, 4):
            rows = Rows.random(heap, M, 12, (F32, F32, F32, F32), M)
            leaves = [leaf.requires_grad_() for leaf in rows.mine]
            mine, through = eagerly(lambda leaves=leaves: torch.autograd.grad(norms(*leaves), leaves))
            pairs = zip(mine, torch.autograd.grad(traced(*leaves), leaves), strict=True)
            failed += [f"{M} rows" for eager, other in pairs if not torch.equal(eager, other)] + through
    return failed


def test_operators() -> None:
    assert run(operators, 1) == [[]]
