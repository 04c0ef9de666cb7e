"""What the caller gets wrong: ValueError, before anything is changed, naming the layer. No peers are needed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial

from pyrocshmem import Heap
from pyrocshmem.groups import ThreadGroup
from pyrocshmem.stream_k import nn as parallel
from tests.nn import models

TIER = 1
pytestmark = pytest.mark.cpu

GROUP = ThreadGroup.create(4)[1]
OPTIONS: dict[str, Any] = {"group": GROUP, "name": "layers.3"}


def attention(**changes: Any) -> parallel.ParallelAttention:
    sizes = {"hidden": 32, "num_heads": 8, "num_kv_heads": 4} | changes
    return parallel.ParallelAttention(**sizes, **OPTIONS)


def mixed_devices() -> None:
    linear = nn.Linear(8, 8)
    linear.bias = nn.Parameter(torch.empty(8, device="meta"))
    parallel.RowParallelLinear.from_linear(linear, **OPTIONS)


def other_device() -> None:
    parallel.ColumnParallelLinear(8, 8, **OPTIONS)(torch.empty(3, 8, device="meta"))


def from_linears(**sizes: tuple[int, int]) -> None:
    given = {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)} | sizes
    parallel.ParallelMLP.from_linears(**{key: nn.Linear(*size) for key, size in given.items()}, **OPTIONS)


def uneven(dim: int) -> None:
    layer = parallel.ColumnParallelLinear(8, 8, sequence_parallel=True, sequence_dim=dim, **OPTIONS)
    layer(torch.zeros(2, 3, 8), 2 * 9)


def attend(batch_size: int | None = None, cached: bool = False, **options: Any) -> None:
    """A call of attention of one rank on six tokens."""
    layer = parallel.ParallelAttention(8, 2, **OUTPUT, **options)
    cache = layer.make_cache(1, 6) if cached else None
    layer(torch.zeros(6, 8), batch_size=batch_size, cache=cache)


def divided(layer: type[nn.Module], dim: int, *shape: int) -> None:
    """A call of a layer that divides dimension `dim` of an input of this shape."""
    layer(8, 8, sequence_parallel=True, sequence_dim=dim, **OUTPUT)(torch.zeros(shape))


def three_dimensions() -> None:
    layer = parallel.ParallelAttention(32, 8, sequence_parallel=True, **OPTIONS)
    layer(torch.zeros(2, 3, 32))


ALONE = ThreadGroup.create(1)[0]
OUTPUT: dict[str, Any] = {"group": ALONE, "name": "layers.3.o"}


def output(**given: Any) -> None:
    """A call of a row-parallel layer of 8 features, of one rank."""
    sequence_parallel = given.pop("sequence_parallel", False)
    parallel.RowParallelLinear(8, 8, sequence_parallel=sequence_parallel, **OUTPUT)(
        torch.zeros(4, 8), **given
    )


def elsewhere(layer: type[nn.Module]) -> None:
    """A call of a layer that is on another device than the kernels, with its input."""
    layer(8, 8, device="meta", **OUTPUT)(torch.empty(4, 8, device="meta"))


def other_heap() -> None:
    with Heap(1 << 20, ALONE) as heap:
        options = OUTPUT | {"group": heap}
        parallel.ColumnParallelLinear(8, 8, device="meta", **options)(torch.empty(4, 8, device="meta"))


def without_weight() -> None:
    linear = nn.Linear(8, 8)
    del linear.weight
    parallel.RowParallelLinear.from_linear(linear, **OPTIONS)


MISTAKES: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "no heads": (lambda: attention(num_heads=0), ("num_heads is 0", "4 ranks")),
    "heads": (lambda: attention(num_heads=6, head_dim=4, num_kv_heads=2), ("num_heads is 6", "4 ranks")),
    "key-value heads": (lambda: attention(num_kv_heads=2), ("num_kv_heads is 2", "4 ranks")),
    "groups": (lambda: attention(num_heads=12, num_kv_heads=8, head_dim=4), ("no multiple",)),
    "head_dim": (lambda: attention(hidden=30), ("hidden is 30",)),
    "odd rotation": (lambda: attention(head_dim=3, rope_theta=1e4), ("head_dim is 3",)),
    "mixed devices": (mixed_devices, ("cpu", "meta")),
    "another device": (other_device, ("meta", "cpu")),
    "features": (lambda: parallel.RowParallelLinear(8, 8, **OPTIONS)(torch.zeros(3, 8)), ("(3, 8)", "2")),
    "a vector": (lambda: parallel.ColumnParallelLinear(8, 8, **OPTIONS)(torch.zeros(8)), ("(8,)", "(.., 8)")),
    "inputs differ": (lambda: from_linears(up_proj=(12, 16)), ("up_proj", "(16, 12)", "(16, 8)")),
    "parts differ": (lambda: from_linears(up_proj=(8, 32)), ("up_proj", "(32, 8)", "(16, 8)")),
    "uneven blocks": (lambda: uneven(1), ("dimension 1 is 9", "matrix of tokens")),
    "residual elsewhere": (
        lambda: output(residual=torch.empty(4, 8, device="meta")),
        ("residual", "meta", "cpu"),
    ),
    "residual's shape": (lambda: output(residual=torch.zeros(1, 8)), ("residual", "(1, 8)", "(4, 8)")),
    "residual's rows": (
        lambda: output(residual=torch.zeros(3, 8), sequence_parallel=True),
        ("residual", "(3, 8)", "(4, 8)"),
    ),
    "norm elsewhere": (lambda: output(norm=nn.RMSNorm(8, device="meta")), ("norm", "meta", "cpu")),
    "other norm elsewhere": (lambda: output(norm=nn.LayerNorm(8, device="meta")), ("norm", "meta", "cpu")),
    "norm's length": (lambda: output(norm=nn.RMSNorm(4)), ("(4,)", "(8,)")),
    "not the kernels' device": (
        lambda: elsewhere(parallel.RowParallelLinear),
        ("meta", "kernels run elsewhere"),
    ),
    "neither, by columns": (
        lambda: elsewhere(parallel.ColumnParallelLinear),
        ("meta", "kernels run elsewhere"),
    ),
    "not the given heap's": (other_heap, ("heap", "meta", "cpu")),
    "no weight": (without_weight, ("weight is missing",)),
    "features divided": (
        lambda: divided(parallel.ColumnParallelLinear, 2, 2, 3, 8),
        ("sequence_dim is 2", "(2, 3, 8)", "0 to 1, and -3 to -2"),
    ),
    "features divided, by rows": (
        lambda: divided(parallel.RowParallelLinear, -1, 2, 3, 8),
        ("sequence_dim is -1", "(2, 3, 8)"),
    ),
    "too few dimensions": (
        lambda: divided(parallel.RowParallelLinear, 2, 3, 8),
        ("sequence_dim is 2", "(3, 8)"),
    ),
    "no equal sequences": (lambda: attend(4), ("6 tokens", "4 equal")),
    "tokens of no sequence": (lambda: attend(0), ("6 tokens", "0 equal")),
    "fewer than no sequences": (lambda: attend(-2), ("6 tokens", "-2 equal")),
    "a cache of later tokens": (lambda: attend(cached=True, causal=False), ("causal is False", "cache")),
    "batches of shards": (three_dimensions, ("(2, 3, 32)",)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    call, parts = MISTAKES[name]
    with pytest.raises(ValueError, match=r"^layers\.3") as raised:
        call()
    assert all(part in str(raised.value) for part in parts), raised.value


def test_sizes_that_are_no_integers() -> None:
    whole: Any = 8.0
    for wrong, name in (
        (lambda: parallel.ColumnParallelLinear(whole, 8, **OPTIONS), "in_features"),
        (lambda: parallel.ColumnParallelLinear(8, whole, **OPTIONS), "out_features"),
        (lambda: parallel.RowParallelLinear(8, True, **OPTIONS), "out_features"),
        (lambda: parallel.RowParallelLinear(8, 8, sequence_dim=whole, **OPTIONS), "sequence_dim"),
    ):
        with pytest.raises(TypeError, match=rf"^layers\.3: {name} must be an integer"):
            wrong()


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(parallel.ParallelMLP(8, 16, bias=True, group=GROUP), nn.LayerNorm(8))


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    ordinary = nn.Sequential(nn.Module(), nn.LayerNorm(8))
    for name, size in {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}.items():
        ordinary[0].add_module(name, nn.Linear(*size))
    return ordinary.state_dict()


def test_bad_checkpoints_change_nothing(model: nn.Module) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    good = whole(model)
    bad: dict[str, tuple[dict[str, torch.Tensor], str]] = {
        "missing": ({key: x for key, x in good.items() if key != "0.up_proj.weight"}, "0.up_proj.weight is missing"),
        "missing norm": ({key: x for key, x in good.items() if key != "1.weight"}, "1.weight is missing"),
        "unknown": (good | {"0.extra": torch.zeros(1)}, "0.extra is unknown"),
        "a share": (good | {"0.down_proj.weight": torch.zeros(8, 8)}, r"0.down_proj.weight .*full_state_dict"),
        "norm": (good | {"1.bias": torch.zeros(9)}, "1.bias has shape"),
    }  # fmt: skip
    for state, text in bad.values():
        with pytest.raises(ValueError, match=text):
            parallel.load_full_state_dict(model, state)
    with pytest.raises(ValueError, match=r"0.down_proj.weight .*load_full_state_dict"):
        model.load_state_dict(before | {"0.down_proj.weight": torch.zeros(8, 8)})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    parallel.load_full_state_dict(model, good)
    assert torch.equal(model[0].up_proj.weight, good["0.up_proj.weight"][4:8])
    assert torch.equal(model[0].down_proj.weight, good["0.down_proj.weight"][:, 4:8])


def test_nothing_is_loaded_where_there_is_no_memory(model: nn.Module) -> None:
    good = whole(model)
    model[0].to("meta")
    with pytest.raises(
        ValueError, match=r"0\.down_proj\.weight.*: on \"meta\".* to_empty\(device="
    ) as raised:
        parallel.load_full_state_dict(model, good)
    assert "1.weight" not in str(raised.value)
    model[0].to_empty(device="cpu")
    model[1].to("meta")
    with pytest.raises(ValueError, match=r": 1\.weight, 1\.bias: on \"meta\""):
        parallel.load_full_state_dict(model, good)
    model[1].to_empty(device="cpu")
    parallel.load_full_state_dict(model, good)
    assert torch.equal(model[0].down_proj.weight, good["0.down_proj.weight"][:, 4:8])


def test_checkpoints_need_a_group_that_torch_knows(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"gate_proj: its group is a ThreadGroup"):
        parallel.full_state_dict(model)


def test_equal_seeds_give_the_unsharded_model() -> None:
    torch.manual_seed(1)
    ordinary = nn.Linear(12, 8)
    torch.manual_seed(1)
    layer = parallel.ColumnParallelLinear(12, 8, group=GROUP)
    assert torch.equal(layer.weight, ordinary.weight[2:4])
    assert layer.bias is not None
    assert torch.equal(layer.bias, ordinary.bias[2:4])


def on_a_mesh(kind: str = "cpu") -> Any:
    """What a style looks at before it divides anything."""
    return SimpleNamespace(device_type=kind)


def test_layouts_and_modules_that_styles_do_not_take() -> None:
    """Said where the plan is made or applied, not at the first step."""
    for wrong, text in (
        (lambda: parallel.ColwiseParallel(output_layouts=Partial()), "output_layouts is P.*, allowed are Rep"),
        (lambda: parallel.RowwiseParallel(output_layouts=Partial()), "output_layouts is P.*, allowed are Rep"),
        (lambda: parallel.ColwiseParallel(input_layouts="rows"), "input_layouts is rows, allowed are .*Partial"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            wrong()
    style, wide = parallel.ColwiseParallel(), nn.Linear(8, 8, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"for nn.Linear and nn.Embedding, got Block"):
        style._apply(models.Block(False), on_a_mesh())
    with pytest.raises(
        ValueError, match=r"of torch.float64, allowed are torch.float16, torch.bfloat16, torch.float32"
    ):
        style._apply(wide, on_a_mesh())
    with pytest.raises(ValueError, match="the mesh is of cuda, but kernels run elsewhere"):
        style._apply(nn.Linear(8, 8), on_a_mesh("cuda"))


class Adapted(nn.Linear):
    """A linear that computes more than its weight says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_linears_with_a_forward_of_their_own() -> None:
    patched = nn.Linear(8, 12)
    patched.forward = Adapted(8, 12).forward  # type: ignore[method-assign]
    for linear in (Adapted(8, 12), patched):
        for layer in (parallel.RowParallelLinear, parallel.ColumnParallelLinear):
            with pytest.raises(
                TypeError, match=rf"{layer.__name__} is for nn.Linear, got .* forward of its own"
            ):
                layer.from_linear(linear, group=GROUP)
        with pytest.raises(TypeError, match=r"RowwiseParallel is for nn.Linear, got .* forward of its own"):
            parallel.RowwiseParallel()._apply(linear, None)
