"""The training examples: losses of split and whole models, resumed runs, what a pipeline costs.

Tolerance: `common.TOLERANCE`, of losses in nats, at every step. A run that is resumed by the same ranks repeats the
bits on a CPU; GPUs add up gradients in no fixed order.
"""

import gc
import json
import os
import secrets
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pyrocshmem import target
from tests.ranks import run_ranks, values

TIER = 4
pytestmark = [pytest.mark.timeout(480), pytest.mark.gpu_a_rank("stages send to each other by NCCL")]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "training"


def torchrun(name: str, num_ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return subprocess.run(
        [*command, "--local-addr=localhost", str(EXAMPLES / name), *options],
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def off(found: list[float], wanted: list[float]) -> float:
    """The largest difference of two runs' losses; NaN where one is."""
    difference = torch.tensor(found, dtype=torch.float64) - torch.tensor(wanted, dtype=torch.float64)
    return difference.abs().max().item()


def train_whole(settings: Any) -> list[float]:
    """Every rank trains the whole model."""
    import common
    import model

    whole = model.Part(settings).to(common.rank_device())

    def backward(characters: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model.mean_loss(whole(characters), targets)
        loss.backward()
        return loss

    return common.train(whole, backward, settings)


def train(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Runs of all examples on these ranks: losses by run, what pipelines cost, whether splits agree with the whole."""
    sys.path.insert(0, str(EXAMPLES))
    import common
    import model_parallel
    import pipeline_parallel
    import tensor_parallel
    from pipeline_parallel import PipelineSettings, Schedule

    reports: dict[str, Any] = {}
    losses: dict[str, list[float]] = {}
    agrees: dict[str, bool] = {}
    report, save = pipeline_parallel.Pipeline.report, common.save
    pipeline_parallel.Pipeline.report = lambda self: reports.setdefault(name, report(self))
    # Drawn anew in each run of the test, and the same on all ranks.
    small: dict[str, Any] = {"layers": 4, "width": 32, "heads": 2, "length": 24, "batch": 8, "lr": 1e-2}
    settings = PipelineSettings(**small, seed=int(folder.name), steps=9, out=folder, micro_batches=8)

    for name, run in {
        "gpipe": replace(settings, schedule=Schedule.gpipe),
        "1f1b": replace(settings, steps=3),
        "recompute": replace(settings, steps=3, schedule=Schedule.gpipe, recompute=True),
    }.items():
        gc.collect()  # a GPU's peak counts what earlier runs have left
        losses[name] = pipeline_parallel.train_rank(replace(run, out=folder / name))
    agrees["gpipe"] = common.compare(settings, losses["gpipe"])

    name = "stopped"
    on = replace(settings, schedule=Schedule.gpipe, out=folder / name, resume=True)
    pipeline_parallel.train_rank(replace(on, resume=False, stop_at=5, save_every=3))
    common.save = lambda *_: None  # every run below is to find the checkpoint of step 5
    losses["resumed"] = pipeline_parallel.train_rank(on)
    losses["resumed by model parallelism"] = model_parallel.train_rank(on)
    moments, common.MOMENTS = common.MOMENTS, ()
    losses["control without moments"] = model_parallel.train_rank(on)
    common.MOMENTS, common.save = moments, save

    name = "tensor"
    mesh = {"stages": 2 if world_size > 2 else 1, "micro_batches": 2}
    divided = tensor_parallel.TensorSettings(
        **small | mesh | {"layers": 2, "batch": 4}, steps=2, out=folder / name
    )
    losses[name] = tensor_parallel.train_rank(divided)
    losses["tensor, on undivided"] = train_whole(replace(divided, steps=4, resume=True))
    agrees[name] = common.compare(divided, losses["tensor, on undivided"])
    return {"losses": losses, "costs": reports, "agrees": agrees, "tolerance": common.TOLERANCE}


@pytest.fixture(scope="module")
def num_ranks() -> int:
    """Four, or two where there are fewer GPUs."""
    return 2 if not target.interpreted() and target.num_devices() < 4 else 4


@pytest.mark.slow
@pytest.mark.num_ranks(2)
def test_splits_train_as_the_whole_does(num_ranks: int, tmp_path: Path) -> None:
    folder = tmp_path / str(secrets.randbelow(1000))
    ranks = values(run_ranks(train, num_ranks, folder, timeout=200))
    assert all(found == ranks[0] for found in ranks), "all ranks are told the same"
    found = ranks[0]
    losses, agrees, tolerance = found["losses"], found["agrees"], found["tolerance"]

    assert agrees == {"gpipe": True, "tensor": True}
    for name in ("1f1b", "recompute"):
        assert off(losses[name], losses["gpipe"][:3]) <= tolerance
    assert losses["gpipe"][-1] < losses["gpipe"][0] - 0.5
    assert losses["tensor, on undivided"][:2] == losses["tensor"]

    assert off(losses["resumed"], losses["gpipe"]) <= (0 if target.interpreted() else tolerance)
    assert off(losses["resumed by model parallelism"], losses["gpipe"]) <= tolerance
    control = losses["control without moments"]
    assert control[:5] == losses["resumed"][:5]
    assert off(control, losses["gpipe"]) > 10 * tolerance

    costs = found["costs"]
    for each in (rank for name in ("gpipe", "1f1b", "recompute") for rank in costs[name]):
        assert 0 < each["passes"] < each["steps"]
    peaks = {name: costs[name][0]["peak_bytes"] for name in ("gpipe", "1f1b", "recompute")}
    assert 0 < peaks["recompute"] < peaks["gpipe"]
    assert 0 < peaks["1f1b"] < peaks["gpipe"]


def train_divided(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Layers divided: stopped with all rows on every rank, resumed with rows divided, too."""
    sys.path.insert(0, str(EXAMPLES))
    import common
    import tensor_parallel

    small: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "length": 16, "batch": 4, "lr": 3e-2}
    settings = tensor_parallel.TensorSettings(**small, seed=int(folder.name), steps=14, out=folder)
    stopped = tensor_parallel.train_rank(replace(settings, replicated=True, stop_at=4))
    resumed = tensor_parallel.train_rank(replace(settings, resume=True))
    return {"stopped": stopped, "resumed": resumed, "agrees": common.compare(settings, resumed)}


@pytest.mark.num_ranks(2)
def test_divided_layers_stop_and_go_on(tmp_path: Path) -> None:
    folder = tmp_path / str(secrets.randbelow(1000))
    ranks = values(run_ranks(train_divided, 2, folder, timeout=200))
    assert all(found == ranks[0] for found in ranks), "all ranks are told the same"
    stopped, resumed = ranks[0]["stopped"], ranks[0]["resumed"]
    assert resumed[:4] == stopped
    assert len(resumed) == 14
    assert ranks[0]["agrees"], "of replicated and of divided rows, with the moments of the steps before"
    # Of 64 characters each, so that one loss alone says little.
    assert sum(resumed[-4:]) / 4 < sum(resumed[:2]) / 2 - 0.5


SMALL = ("--layers=2", "--width=16", "--heads=2", "--length=16", "--batch=2")


@pytest.mark.num_ranks(2)
def test_tensor_parallel_command(tmp_path: Path) -> None:
    """Every rank says what it does."""
    options = (*SMALL, f"--out={tmp_path}", "--steps=2", "--replicated", "--all-ranks", "--compare")
    done = torchrun("tensor_parallel.py", 2, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = json.loads((tmp_path / "losses.json").read_text())
    lines = done.stdout.splitlines()
    for rank in range(2):
        assert sum(line.startswith(f"[rank {rank}] holds ") for line in lines) == 1
        for step, loss in enumerate(losses, start=1):
            assert f"[rank {rank}] step {step}/2: loss {loss:.4f}" in lines
    assert "2 losses, split over 2 and whole, differ by at most" in done.stdout


@pytest.mark.num_ranks(2)
def test_pipeline_parallel_command(tmp_path: Path) -> None:
    options = (*SMALL, f"--out={tmp_path}", "--steps=4", "--micro-batches=2", "--recompute")
    done = torchrun("pipeline_parallel.py", 2, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with 2 equal stages it would be 33%" in done.stdout
    assert "peak memory, MiB" in done.stdout
    assert "[rank 1]" not in done.stdout
    assert len(json.loads((tmp_path / "losses.json").read_text())) == 4


@pytest.mark.num_ranks(2)
def test_command(tmp_path: Path) -> None:
    done = torchrun("model_parallel.py", 2, *SMALL, f"--out={tmp_path}", "--steps=3", "--compare")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3/3" in done.stdout
    assert "3 losses, split over 2 and whole, differ by at most" in done.stdout
    assert len(json.loads((tmp_path / "losses.json").read_text())) == 3
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "newest").read_text() == "3"


def test_parts_that_can_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import model

    with pytest.raises(ValueError, match="2 layers can't be cut into 3 parts: allowed are 1 to 2"):
        model.share(model.Shape(layers=2), 0, 3)
    with pytest.raises(ValueError, match="width is 20, allowed are multiples of 8"):
        model.Part(model.Shape(width=20, heads=4))
    parts = [model.share(model.Shape(layers=7), part, 3) for part in range(3)]
    assert [layer for part in parts for layer in part] == list(range(7))
    assert min(map(len, parts)) >= 2


def test_a_folder_that_can_not_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import common

    common.check_folder(tmp_path / "a" / "b")
    assert not list((tmp_path / "a" / "b").iterdir())
    for folder in ("/proc/nowhere", "/proc"):
        with pytest.raises(ValueError, match=f"{folder} can't be written: "):
            common.check_folder(Path(folder))
    settings = common.Settings(out=Path("/proc/nowhere"))
    with pytest.raises(ValueError, match="/proc/nowhere can't be written"):
        common.train(torch.nn.Linear(2, 2), None, settings)


COUNTS = ("steps", "stop_at", "save_every", "batch", "length", "heads")


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import common

    with pytest.raises(ValueError, match=f"^{name} is 0, allowed are 1 or more$"):
        common.Settings(**{name: 0})


def test_a_count_of_nothing_on_the_command_line() -> None:
    """Seen before any rank waits for another; one line, as of all else that is wrong."""
    command = [sys.executable, str(EXAMPLES / "model_parallel.py"), "--save-every=-1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr == "error: save_every is -1, allowed are 1 or more\n"
