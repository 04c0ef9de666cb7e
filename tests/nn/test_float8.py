"""Layers of 8-bit products: forward against float64 of what is quantized, gradients against those of the layers
without, weights that are held in 8 bits."""

import copy
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pyrocshmem import batch_invariant, stream_k, target
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.nn import ColumnParallelLinear, ParallelAttention, ParallelMLP, RowParallelLinear
from pyrocshmem.stream_k.nn.pointwise import swiglu
from tests.ranks import run_ranks, values

TIER = 3
RECIPES = ("rowwise", "blockwise")
IN, OUT, ROWS = 264, 48, 10
# NVIDIA's matrix units keep 14 bits or so of a sum of 8-bit products.
TOLERANCE = 1e-4 if target.interpreted() else 5e-3


def of_weight(recipe: str) -> str:
    return "blockwise_weight" if recipe == "blockwise" else recipe


def meant(x: torch.Tensor, recipe: str) -> torch.Tensor:
    """float64 of what x stands for once it is quantized."""
    return stream_k.dequantize(*stream_k.quantize(x, recipe)).double()


class Case:
    """A layer of one kind in 8 bits, the same one without, and what goes in, of this rank and of all."""

    def __init__(self, kind: str, recipe: str, divided: bool, rank: int, world_size: int) -> None:
        self.kind, self.recipe, self.divided, self.rank, self.world = kind, recipe, divided, rank, world_size
        device = target.device(rank)
        torch.manual_seed(4)
        linear = nn.Linear(IN, OUT, device=device)
        self.whole, self.weight, self.bias = torch.randn(ROWS, IN, device=device), linear.weight, linear.bias
        layer = ColumnParallelLinear if kind == "column" else RowParallelLinear
        made = [layer.from_linear(linear, sequence_parallel=divided, float8=f) for f in (recipe, None)]
        self.layer, self.plain = made
        self.rows = slice(*shard_range(ROWS, rank, world_size))
        self.k = slice(rank * IN // world_size, (rank + 1) * IN // world_size)
        self.n = slice(rank * OUT // world_size, (rank + 1) * OUT // world_size)
        of_column = self.whole[self.rows] if divided else self.whole
        self.x = (of_column if kind == "column" else self.whole[:, self.k]).clone()

    def call(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        more = {"num_rows": ROWS} if self.kind == "column" and self.divided else {}
        return layer(x, **more)

    def exact(self) -> torch.Tensor:
        """This rank's result, float64."""
        bias = self.bias.detach().double()
        if self.kind == "column":
            weight = meant(self.weight[self.n], of_weight(self.recipe))
            return meant(self.whole, self.recipe) @ weight.t() + bias[self.n]
        total = bias.clone().expand(ROWS, OUT).clone()
        for rank in range(self.world):
            k = slice(rank * IN // self.world, (rank + 1) * IN // self.world)
            total += (
                meant(self.whole[:, k], self.recipe) @ meant(self.weight[:, k], of_weight(self.recipe)).t()
            )
        return total[self.rows] if self.divided else total


def cases(rank: int, world_size: int) -> Any:
    every = itertools.product(("column", "row"), RECIPES, (False, True))
    return ((str(facts), Case(*facts, rank, world_size)) for facts in every)


def near(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return found.shape == exact.shape and torch.allclose(
        found.double(), exact, rtol=TOLERANCE, atol=TOLERANCE
    )


def results(rank: int, world_size: int) -> list[str]:
    """What is wrong of results without a gradient, of weights in 8 bits, of their state, and with a residual."""
    wrong = []
    for name, case in cases(rank, world_size):
        with torch.no_grad():
            found = case.call(case.layer, case.x)
            if not near(found, case.exact()):
                wrong.append(name)
            if case.kind == "row":
                norm = nn.RMSNorm(OUT, device=found.device)
                y, total = case.layer(case.x, residual=torch.ones_like(found), norm=norm)
                if not (near(total, case.exact() + 1) and near(y, norm(total).double())):
                    wrong.append(f"{name}, residual and norm")
            held = case.layer.quantize_weight()
            if held.weight.element_size() != 1 or not torch.equal(case.call(held, case.x), found):
                wrong.append(f"{name}, held in 8 bits")
            state = {key: x.clone() for key, x in held.state_dict().items()}
            other = Case(case.kind, case.recipe, case.divided, rank, world_size).layer
            for parameter in other.parameters():
                parameter.zero_()
            other.quantize_weight().load_state_dict(state)
            if not torch.equal(case.call(other, case.x), found):
                wrong.append(f"{name}, loaded")
    return wrong


def gradients(rank: int, world_size: int) -> list[str]:
    """What gradients differ from those of the layers without 8 bits, for the same gradient of the result."""
    wrong = []
    for name, case in cases(rank, world_size):
        x, same = case.x.clone().requires_grad_(), case.x.clone().requires_grad_()
        found, plain = case.call(case.layer, x), case.call(case.plain, same)
        if not near(found.detach(), case.exact()):
            wrong.append(name)
        upstream = torch.randn(plain.shape, generator=torch.Generator().manual_seed(rank)).to(plain)
        if case.kind == "row" and not case.divided:
            upstream = torch.ones_like(plain)  # all ranks have the same result
        found.backward(upstream)
        plain.backward(upstream)
        pairs = [("x", x.grad, same.grad)]
        for kind in ("weight", "bias"):
            pairs.append((kind, getattr(case.layer, kind).grad, getattr(case.plain, kind).grad))
        wrong += [
            f"{name}: {which}" for which, a, b in pairs if not torch.allclose(a, b, rtol=1e-5, atol=1e-5)
        ]
    return wrong


def on_a_mesh(rank: int, world_size: int) -> list[bool]:
    """Whether layers with DTensors give what those with shares give, before and after their weights are quantized."""
    mesh = init_device_mesh(target.device().type, (world_size,))
    same = []
    torch.manual_seed(4)
    linear, x = (
        nn.Linear(IN, OUT, device=target.device(rank)),
        torch.randn(ROWS, IN, device=target.device(rank)),
    )
    with torch.no_grad():
        for recipe in RECIPES:
            of_mesh, of_group = (
                ColumnParallelLinear.from_linear(linear, group=group, float8=recipe)  # type: ignore[arg-type]
                for group in (mesh, None)
            )
            expected = of_group(x)
            same += [torch.equal(of_mesh(x), expected), torch.equal(of_mesh.quantize_weight()(x), expected)]
            same.append(tuple(of_mesh.weight.shape) == (OUT, IN))
    return same


def compiled(rank: int, world_size: int) -> list[str]:
    """What differs of layers that torch.compile traces, whole, without a gradient."""
    wrong = []
    for name, case in cases(rank, world_size):
        with torch.no_grad():
            for layer in (case.layer, case.layer.quantize_weight()):
                traced = torch.compile(layer, backend="eager", fullgraph=True)
                if not torch.equal(case.call(traced, case.x), case.call(layer, case.x)):
                    wrong.append(name)
    return wrong


@pytest.mark.num_ranks(2)
def test_compiled() -> None:
    assert values(run_ranks(compiled, 2, timeout=150.0)) == [[]] * 2


@pytest.mark.num_ranks(3)
def test_results() -> None:
    assert values(run_ranks(results, 3, timeout=150.0)) == [[]] * 3


@pytest.mark.num_ranks(2)
def test_gradients() -> None:
    assert values(run_ranks(gradients, 2, timeout=150.0)) == [[]] * 2


@pytest.mark.num_ranks(2)
def test_on_a_mesh() -> None:
    assert values(run_ranks(on_a_mesh, 2, timeout=100.0)) == [[True] * 6] * 2


def blocks_of_layers(rank: int, world_size: int) -> list[str]:
    """What is wrong of whole MLPs and attentions: beside the same of single layers in 8 bits, which quantize what lies
    between them, and beside float64 without 8 bits; of weights in 8 bits; of gradients."""
    wrong = []
    device = target.device(rank)
    # Shares that blocks of 128 divide, so that weights are joined, and shares that they don't.
    for recipe, inner, divided in itertools.product(RECIPES, (128 * world_size, 48), (False, True)):
        torch.manual_seed(4)
        gate, up = (nn.Linear(IN, inner, bias=False, device=device) for _ in "ab")
        down = nn.Linear(inner, IN, bias=False, device=device)
        whole = torch.randn(ROWS, IN, device=device)
        rows = slice(*shard_range(ROWS, rank, world_size)) if divided else slice(None)
        options: dict[str, Any] = {"sequence_parallel": divided, "float8": recipe}
        more = {"num_rows": ROWS} if divided else {}
        mlp = ParallelMLP.from_linears(gate, up, down, **options)
        singles = [ColumnParallelLinear.from_linear(each, **options) for each in (gate, up)]
        last = RowParallelLinear.from_linear(down, **options)
        name = f"{recipe}, {inner} features, divided {divided}"
        with torch.no_grad():
            x = whole[rows]
            with mock.patch.object(stream_k, "quantize", wraps=stream_k.quantize) as quantized:
                found = mlp(x, **more)
            # x, the joined weight and the last one; what lies between is quantized where it is made.
            if quantized.call_count != (5 if recipe == "blockwise" and inner == 48 else 3):
                wrong.append(f"MLP, {name}: {quantized.call_count} calls of quantize")
            product = torch.cat([each(x, **more) for each in singles], -1)
            with batch_invariant():  # by the kernel on CPUs, too
                middle = swiglu(product)
            if not torch.allclose(found, last(middle), rtol=TOLERANCE, atol=TOLERANCE):
                wrong.append(f"MLP, {name}: not as single layers")
            exact = nn.functional.silu(gate(whole)) * up(whole)
            exact = (exact.double() @ down.weight.double().t())[rows]
            error = float((found.double() - exact).norm() / exact.norm())
            if not 0.001 < error < 0.1:
                wrong.append(f"MLP, {name}: {error:.4f} of float64")
            held = copy.deepcopy(mlp).quantize_weights()
            if {each.weight.element_size() for each in (held.gate_proj, held.down_proj)} != {1}:
                wrong.append(f"MLP, {name}: not held in 8 bits")
            if not torch.equal(held(x, **more), found):
                wrong.append(f"MLP, {name}: held in 8 bits")
        y = x.clone().requires_grad_()
        mlp(y, **more).sum().backward()
        same = x.clone().requires_grad_()
        plain = ParallelMLP.from_linears(gate, up, down, sequence_parallel=divided)
        plain(same, **more).sum().backward()
        for a, b in ((y.grad, same.grad), (mlp.gate_proj.weight.grad, plain.gate_proj.weight.grad)):
            assert a is not None
            assert b is not None
            if not 0 < float((a - b).norm() / b.norm()) < 0.1:  # what goes into SwiGLU is of 8 bits
                wrong.append(f"MLP, {name}: gradients")
        if not divided and inner > 48:
            heads = {"head_dim": 16, "rope_theta": 100.0}
            of_heads = [nn.Linear(IN, 16 * n, bias=False, device=device) for n in (8, 4, 4)]
            output = nn.Linear(128, IN, bias=False, device=device)
            made = [
                ParallelAttention.from_linears(*of_heads, output, float8=f, **heads) for f in (recipe, None)
            ]  # type: ignore[arg-type]
            with torch.no_grad():
                found, exact = (each(whole) for each in made)
                if not 0.001 < float((found - exact).norm() / exact.norm()) < 0.1:
                    wrong.append(f"attention, {recipe}")
                if not torch.equal(made[0].quantize_weights()(whole), found):
                    wrong.append(f"attention, {recipe}: held in 8 bits")
    return wrong


@pytest.mark.num_ranks(2)
def test_blocks_of_layers() -> None:
    assert values(run_ranks(blocks_of_layers, 2, timeout=150.0)) == [[]] * 2


def refused(rank: int, world_size: int) -> list[str]:
    """What layers say that can't do what they are asked for."""
    said = []
    linear = nn.Linear(IN, OUT, device=target.device(rank))
    layer = ColumnParallelLinear.from_linear(linear, float8="rowwise")
    x = torch.randn(4, IN, device=target.device(rank))
    for call in (
        lambda: ColumnParallelLinear(IN, OUT, float8="tensorwise"),  # type: ignore[arg-type]
        lambda: ColumnParallelLinear(IN, OUT, device=target.device(rank)).quantize_weight(),
        lambda: ColumnParallelLinear(IN, OUT, device="meta", float8="rowwise").quantize_weight(),
        lambda: layer.quantize_weight()(x.clone().requires_grad_()),
        lambda: torch.compile(layer, backend="eager", fullgraph=True)(x),
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        said.append(str(caught.value))
    return said


@pytest.mark.num_ranks(1)
def test_what_is_refused() -> None:
    (said,) = values(run_ranks(refused, 1, timeout=100.0))
    for text, words in zip(
        said,
        (
            "ColumnParallelLinear: float8 is 'tensorwise', allowed are None, 'rowwise', 'blockwise'",
            "nothing says how its weight is quantized",
            'on "meta"',
            "held in 8 bits has no gradient",
            "torch.compile traces layers with float8 under torch.no_grad() alone",
        ),
        strict=True,
    ):
        assert words in text
