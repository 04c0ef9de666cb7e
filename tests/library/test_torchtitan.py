"""torchtitan's autograd functions for tensor-parallel linears, as they are, over `torch_ops.install`: results and
gradients against float64, and on GPUs against PyTorch's own operators."""

import importlib.metadata
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyrocshmem import torch_ops
from pyrocshmem.reference.accuracy import bound
from tests.library.served import made, world
from tests.ranks import run_ranks, values
from tests.stream_k.products import ON_CPU, random

VERSION = "0.3.0"
TIER = 3
TIMEOUT_S = 110.0


def installed() -> str:
    """Its version; "" where it is not installed."""
    try:
        return importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return ""


pytestmark = pytest.mark.skipif(
    installed() != VERSION,
    reason=f"needs torchtitan {VERSION}, found {installed() or 'none'}; CONTRIBUTING.md says how it is installed",
)


class Sums:
    """A sum of products in float64, and how far from it what the operators make may be."""

    def __init__(self, *terms: tuple[torch.Tensor, torch.Tensor], roundings: int = 1) -> None:
        """roundings: of a value as large as the terms may add up to: a partial sum's, and what a bias follows."""
        self.exact = sum(x.double() @ y.double() for x, y in terms)
        self.size = sum(x.double().abs() @ y.double().abs() for x, y in terms)
        self.length, self.roundings = sum(x.shape[1] for x, _ in terms), roundings

    def rows(self, rank: int, ranks: int) -> "Sums":
        self.exact, self.size = (x.chunk(ranks)[rank] for x in (self.exact, self.size))
        return self

    def plus(self, bias: torch.Tensor) -> "Sums":
        self.exact, self.size = self.exact + bias.double(), self.size + bias.double().abs()
        return self

    def holds(self, found: torch.Tensor) -> bool:
        unit = torch.finfo(found.dtype).eps / 2
        allowed = bound(self.exact, self.exact.to(found.dtype), self.size, self.length, found.dtype)
        return bool(
            ((found.double() - self.exact).abs() <= allowed + self.roundings * unit * self.size).all()
        )


def differentiated(
    function: Any, tensors: dict[str, torch.Tensor], grads: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a function gives for `tensors`, by "y" and numbers, and their gradients, by name."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    group = dist.group.WORLD
    given = function.apply(*leaves.values(), group, group.group_name)
    results = given if isinstance(given, tuple) else (given,)
    torch.autograd.backward(results, grads)
    found = {f"y{number}": y.detach() for number, y in enumerate(results)}
    return found | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def cases(
    rank: int, ranks: int, dtype: torch.dtype
) -> dict[str, tuple[Any, dict[str, torch.Tensor], Any, dict[str, Sums]]]:
    """By name: a function, its tensors, its results' gradients, what must come out."""
    from torchtitan.distributed import linear

    M, K, N = 6 * ranks, 8 * ranks, 12 * ranks
    x, gate, up, bias = (
        random(*size, dtype, seed) for seed, size in enumerate(((M, K), (N, K), (N, K), (1, N)), 1)
    )
    grads = [random(M, N, dtype, seed) for seed in (5, 6)]
    rows, columns, inner = (slice(rank * size // ranks, (rank + 1) * size // ranks) for size in (M, N, K))
    g, h = (each[:, columns].contiguous() for each in grads)
    bias = bias[0]
    ones = torch.ones(1, M, dtype=dtype, device=x.device)
    of_bias = Sums((ones, grads[0]))
    of_bias.exact, of_bias.size = of_bias.exact[0], of_bias.size[0]
    of_columns = Sums((ones, g))
    of_columns.exact, of_columns.size = of_columns.exact[0], of_columns.size[0]
    wa, wb = gate[columns].contiguous(), up[columns].contiguous()
    return {
        "AllGatherLinear": (
            linear.AllGatherLinear,
            {"x": x[rows], "w": wa, "bias": bias[columns]},
            [g],
            {
                "y0": Sums((x, wa.t()), roundings=2).plus(bias[columns]),
                "x": Sums((grads[0], gate)).rows(rank, ranks),
                "w": Sums((g.t(), x)),
                "bias": of_columns,
            },
        ),
        "AllGatherLinearMulti": (
            linear.AllGatherLinearMulti,
            {"x": x[rows], "wa": wa, "wb": wb},
            [g, h],
            {
                "y0": Sums((x, wa.t())),
                "y1": Sums((x, wb.t())),
                "x": Sums((grads[0], gate), (grads[1], up)).rows(rank, ranks),
                "wa": Sums((g.t(), x)),
                "wb": Sums((h.t(), x)),
            },
        ),
        "LinearReduceScatter": (
            linear.LinearReduceScatter,
            {"x": x[:, inner].contiguous(), "w": gate[:, inner].contiguous(), "bias": bias},
            [grads[0][rows].contiguous()],
            {
                "y0": Sums((x, gate.t()), roundings=2).plus(bias).rows(rank, ranks),
                "x": Sums((grads[0], gate[:, inner])),
                "w": Sums((grads[0].t(), x[:, inner])),
                "bias": of_bias,
            },
        ),
    }


def linears(rank: int, ranks: int) -> dict[str, tuple[list[str], int]]:
    """A body: by the function's name, what is wrong, and how many calls this library made."""
    library = torch.library.Library("aten", "IMPL")
    if ON_CPU:
        # PyTorch has this product, which torchtitan makes by itself, on GPUs alone.
        product: Callable[..., torch.Tensor] = lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype)  # noqa: E731
        library.impl("mm.dtype", product, "CPU")
    world()
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, (function, tensors, grads, expected) in cases(rank, ranks, dtype).items():
            with torch_ops.install(), made() as seen:
                got = differentiated(function, tensors, grads)
            wrong = [each for each, sums in expected.items() if not sums.holds(got[each])]
            wrong += sorted(expected.keys() ^ got.keys())
            if not ON_CPU:
                with made() as others:
                    stock = differentiated(function, tensors, grads)
                assert others == []
                wrong += [
                    f"PyTorch's {each}" for each, sums in expected.items() if not sums.holds(stock[each])
                ]
            # The control: twice a result is too far off.
            wrong += [f"twice {each}" for each, sums in expected.items() if sums.holds(2 * got[each])]
            found[f"{name} {dtype}"] = wrong, len(seen)
    library._destroy()
    return found


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.num_ranks(n)) for n in (2, 4)])
def test_linears(ranks: int) -> None:
    """One call of ours forward, one for each collective of the backward pass."""
    num_calls = {"AllGatherLinear": 3, "AllGatherLinearMulti": 3, "LinearReduceScatter": 2}
    for found in values(run_ranks(linears, ranks, timeout=TIMEOUT_S)):
        for dtype in (torch.float32, torch.bfloat16):
            for name, count in num_calls.items():
                assert found[f"{name} {dtype}"] == ([], count)
