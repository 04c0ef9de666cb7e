"""Steps of training with divided layers equal those of the unsharded model, in float64.

Tolerances: of the largest element of what is compared, 1e-5 for float32 (some 50 roundings of 2^-24 through two
layers and three steps), 0.05 for bfloat16 (the same at 2^-9). A gradient that is not summed over ranks is off by
tens of per cent, which the controls show.
"""

from typing import Any

import pytest
import torch

from pyrocshmem import stream_k, target
from tests.nn import models
from tests.nn.models import Case
from tests.ranks import run_ranks, values

TIER = 3
STEPS = 3
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.05}

CASES = [
    Case(sequence_parallel=False, bias=True, batch=1, tokens=7),
    Case(sequence_parallel=True, bias=True, batch=3, tokens=5),
    Case(sequence_parallel=True, bias=False, batch=2, tokens=4, dtype=torch.bfloat16, frugal=True),
]
CONTROLS = [("column_product", CASES[0]), ("sum_gradient", CASES[1])]


def train(rank: int, world_size: int) -> list[Any]:
    device = target.device(rank)
    found = [models.train_parallel(rank, world_size, case, STEPS, device) for case in CASES]
    for what, case in CONTROLS:
        models.without(what)
        found.append(models.train_parallel(rank, world_size, case, 1, device))
    return found


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, as a share of the largest element."""
    assert found.shape == wanted.shape
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def worst(case: Case, found: list[models.Trained], steps: int) -> dict[str, float]:
    """By what was compared, how far the ranks are off."""
    losses, inputs, grads, after = models.train_unsharded(case, steps)
    table = {}
    for step in range(steps):
        mine = [each[0][step] for each in found]
        loss = sum(mine) if case.sequence_parallel else mine[0]
        assert case.sequence_parallel or len(set(mine)) == 1
        table[f"loss {step}"] = abs(loss - losses[step]) / losses[step]
        if case.sequence_parallel:
            table[f"input {step}"] = off(torch.cat([each[1][step] for each in found]), inputs[step])
        else:
            table[f"input {step}"] = max(off(each[1][step], inputs[step]) for each in found)
    for what, index, wanted in (("gradient", 2, grads), ("value", 3, after)):
        for each in found:
            assert each[index].keys() == wanted.keys()
        for key, exact in wanted.items():
            table[f"{what} of {key}"] = max(off(each[index][key], exact) for each in found)
    return table


@pytest.mark.num_ranks(2)
@pytest.mark.gpu_a_rank("PyTorch's DTensor over gloo ends in a segmentation fault with tensors of a GPU")
def test_steps_equal_those_of_the_unsharded_model() -> None:
    found = values(run_ranks(train, 2, timeout=100))
    for number, case in enumerate(CASES):
        table = worst(case, [each[number] for each in found], STEPS)
        bad = {key: value for key, value in table.items() if not value <= TOLERANCES[case.dtype]}
        assert not bad, f"{case}: {bad}"
        losses = [sum(each[number][0][step] for each in found) for step in range(STEPS)]
        assert len(set(losses)) == STEPS, "training changed nothing"
    for number, (what, case) in enumerate(CONTROLS, len(CASES)):
        table = worst(case, [each[number] for each in found], 1)
        spoilt = {key for key, value in table.items() if value > 0.01}
        wanted = "input 0" if what == "column_product" else "gradient of norm1.weight"
        assert wanted in spoilt, f"without {what} nothing is wrong: {table}"
        assert table["loss 0"] < TOLERANCES[case.dtype], "the control's forward pass must be right"


def test_the_gradient_of_a_weight_is_laid_out_as_the_weight() -> None:
    """Otherwise autograd copies it, which costs time and memory for each weight."""
    device = target.device(0)
    x = torch.randn(5, 6, device=device)
    weight = torch.randn(8, 6, device=device, requires_grad=True)
    for b, wanted in ((weight.t(), (6, 1)), (weight.t().contiguous(), (1, 8))):
        (grad,) = torch.autograd.grad(stream_k.gemm(x, b).sum(), weight)
        assert grad.stride() == wanted
        assert off(grad.cpu(), x.cpu().double().sum(0).expand(8, 6)) < TOLERANCES[torch.float32]
