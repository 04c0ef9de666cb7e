"""A Llama by torchtitan's plan, of our styles: 20 steps of AdamW with clipped gradients, on 2 and on 4 ranks.

Losses are those of one rank that trains the ordinary model, within 1e-4 nats at every step (fp32, summed in different
orders; AdamW's first steps are as large where gradients are small); runs are saved after half of the steps, and resumed
by another number of ranks for some.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from tests.nn import llama
from tests.ranks import run_ranks, values

TIER = 4
pytestmark = [pytest.mark.cpu, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, HALF, RESUMED, TOLERANCE = 20, 10, 13, 1e-4
CLIP = 0.5


def adamw(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **{kind: True})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = llama.loss_of(model, step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def run(rank: int, ranks: int, kind: str, load: Path | None, save: Path | None) -> list[float]:
    """Losses of all steps, with a checkpoint halfway; or of those that follow one."""
    model = llama.divided("ours", init_device_mesh("cpu", (ranks,)), seed=0 if load is None else 9)
    optimizer = adamw(model, kind)
    if load is not None:
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"weights": weights, "moments": moments}
        dcp.load(state, checkpoint_id=load)
        set_state_dict(model, optimizer, model_state_dict=state["weights"], optim_state_dict=state["moments"])
        return train(model, optimizer, range(HALF, RESUMED))
    losses = train(model, optimizer, range(HALF))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"weights": weights, "moments": moments}, checkpoint_id=save)
    return losses + train(model, optimizer, range(HALF, STEPS))


def off(found: list[float], wanted: list[float]) -> float:
    assert len(found) == len(wanted)
    return max(abs(mine - other) for mine, other in zip(found, wanted, strict=True))


@pytest.mark.num_ranks(4)
@pytest.mark.parametrize(
    ("kind", "ranks", "others"),
    [("foreach", 2, 4), ("fused", 4, 2)],
    ids=["2 ranks, foreach", "4 ranks, fused"],
)
def test_training_and_resuming(kind: str, ranks: int, others: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = llama.Llama()
    wanted = train(model, adamw(model, kind), range(STEPS))
    assert wanted[-1] < wanted[0] - 0.1, "it learns"
    folder = tmp_path / "half"
    for found in values(run_ranks(run, ranks, kind, None, folder, timeout=150)):
        assert off(found, wanted) <= TOLERANCE
    for found in values(run_ranks(run, others, kind, folder, None, timeout=150)):
        assert off(found, wanted[HALF:RESUMED]) <= TOLERANCE
