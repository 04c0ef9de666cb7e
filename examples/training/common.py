"""What the training examples share: the command line, and the loop around a step.

`train` shows progress, gathers the losses, writes them and their curve, saves checkpoints, resumes from the newest.
`compare` trains the whole model on one rank and holds the losses of the split one against it.
"""

import inspect
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from model import Part, Shape, batch, mean_loss
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from pyrocshmem import options, target
from pyrocshmem.launching import from_torchrun

# Of the losses of the split and of the whole model, in nats, at every step: both sum in fp32, in different orders.
TOLERANCE = 1e-4

# The file that holds the number of the newest checkpoint's step.
NEWEST = "newest"

# What AdamW keeps of a parameter, each of its shape.
MOMENTS = ("exp_avg", "exp_avg_sq")

# Parameters, or what a rank holds of them, by the names that they have in the whole model.
StateOf = Callable[[nn.Module], Mapping[str, Any]]


@dataclass(frozen=True)
class Settings(Shape):
    """Of a run; every field is an option of the command line. Raises ValueError for a count or a size below 1."""

    steps: Annotated[int, typer.Option(help="Steps to train, from the very first.")] = 300
    stop_at: Annotated[int | None, typer.Option(help="Save and stop after so many of them.")] = None
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-3
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, losses and their curve.")] = Path(
        "out/training"
    )
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Every rank prints a line a step, instead of a progress bar.")
    ] = False
    compare: Annotated[
        bool, typer.Option("--compare", help="Train the whole model on one rank, too; fail if losses differ.")
    ] = False

    def __post_init__(self) -> None:
        sizes = "width", "layers", "heads", "batch", "length"
        for name in ("steps", "stop_at", "save_every", *sizes):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} is {count}, allowed are 1 or more")


def command(
    train_rank: Callable[[Any], list[float]], settings_type: type[Settings], description: str
) -> None:
    """Run `train_rank(settings)` in this process, which torchrun started, with options from the command line."""

    def main(**values: Any) -> None:
        try:
            settings = settings_type(**values)
            from_torchrun()
            losses = train_rank(settings)
            if settings.compare and not compare(settings, losses):
                raise typer.Exit(1)
        except ValueError as error:
            options.refuse(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    main.__doc__ = description
    main.__signature__ = inspect.signature(settings_type)  # type: ignore[attr-defined]  # typer makes options of it
    options.run(main)


def rank_device() -> torch.device:
    """The device of this rank: its GPU, or the CPU."""
    on_cpu = target.backend() == "host"
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def console() -> Console:
    """Where rank 0 prints; the others' is silent."""
    return Console(quiet=dist.get_rank() != 0)


def print_line(text: str) -> None:
    """Print a line of this rank; lines of several ranks stay whole."""
    sys.stdout.write(f"[rank {dist.get_rank()}] {text}\n")
    sys.stdout.flush()


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW over the parameters of this rank."""
    return torch.optim.AdamW(model.parameters(), settings.lr)


def train(
    model: nn.Module,
    backward: Callable[[Tensor, Tensor], Tensor | None],
    settings: Settings,
    state_of: StateOf = nn.Module.state_dict,
) -> list[float]:
    """Train this rank's `model`, and return the mean loss of every step since the first, in nats, on every rank.

    Args:
        model: on its device; what the rank holds of the whole.
        backward: takes characters and targets, int64 [batch, length], and leaves the gradients of their mean loss in
            the parameters; returns that loss, a scalar, at least on the last rank.
        state_of: parameters by the names that they have in the whole model, sharing their memory; `DTensor`s where
            this rank holds a shard.

    Raises:
        ValueError: `settings.out` can't be written; a checkpoint to resume from is missing, of another model, or past
            the last step of this run.
    """
    check_folder(settings.out)
    optimizer, device, losses = make_optimizer(model, settings), rank_device(), list[float]()
    last_rank = dist.get_world_size() - 1
    stop = settings.steps if settings.stop_at is None else min(settings.stop_at, settings.steps)
    if settings.resume:
        losses = load(settings, model, optimizer, state_of)
    if len(losses) > stop:
        raise ValueError(f"the checkpoint is of step {len(losses)}, past the last of this run, {stop}")
    if settings.all_ranks:
        numbers = sum(parameter.numel() for parameter in model.parameters())
        print_line(f"holds {numbers} parameters, on {device}")
    columns = MofNCompleteColumn(), BarColumn(), TextColumn("loss {task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console(), disable=settings.all_ranks) as progress:
        task = progress.add_task("-", total=stop, completed=len(losses))
        for step in range(len(losses), stop):
            optimizer.zero_grad()
            loss = backward(*batch(settings, step, device))
            optimizer.step()
            loss = torch.zeros((), device=device) if loss is None else loss.detach().clone()
            dist.broadcast(loss, last_rank)
            losses.append(loss.item())
            progress.update(task, advance=1, description=f"{losses[-1]:.4f}")
            if settings.all_ranks:
                print_line(f"step {step + 1}/{stop}: loss {losses[-1]:.4f}")
            if (step + 1) % settings.save_every == 0 or step + 1 == stop:
                save(settings, model, optimizer, state_of, losses)
    if dist.get_rank() == 0:
        write_curve(settings, losses)
    return losses


def check_folder(folder: Path) -> None:
    """Make it where it is missing. ValueError, before the first step, where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{folder} can't be written: {error}") from None


def state(model: nn.Module, optimizer: torch.optim.Optimizer, state_of: StateOf) -> dict[str, Any]:
    """Weights and AdamW's moments under the names of the whole model; they share memory with what is trained."""
    parts = {f"weight.{name}": tensor for name, tensor in state_of(model).items()}
    for moment in MOMENTS:
        # In its parameter's place a moment is named, and cut, as that is.
        weights = [(parameter, parameter.data) for parameter in model.parameters()]
        for parameter, _ in weights:
            parameter.data = optimizer.state[parameter][moment]
        parts |= {f"{moment}.{name}": tensor for name, tensor in state_of(model).items()}
        for parameter, weight in weights:
            parameter.data = weight
    return parts


def save(
    settings: Settings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state_of: StateOf,
    losses: list[float],
) -> None:
    """Write the checkpoint of the step that `losses` ends with; all ranks together, to a folder that they share."""
    folder = settings.out / f"step-{len(losses)}"
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)  # another run's, perhaps of more ranks
    dist.barrier()
    parts = state(model, optimizer, state_of) | {"losses": torch.tensor(losses, dtype=torch.float64)}
    checkpoint.save(parts, checkpoint_id=folder)
    if dist.get_rank() == 0:  # last: a checkpoint that was cut short is never the newest
        (settings.out / NEWEST).write_text(str(len(losses)))
    dist.barrier()


def load(
    settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer, state_of: StateOf
) -> list[float]:
    """Read the newest checkpoint into `model` and `optimizer`; its losses. All ranks together, of any number."""
    if not (settings.out / NEWEST).exists():
        raise ValueError(f"nothing to resume from: {settings.out.resolve()} holds no checkpoint")
    step = int((settings.out / NEWEST).read_text())
    get_optimizer_state_dict(model, optimizer)  # makes the moments, which AdamW has only after a step
    losses = torch.empty(step, dtype=torch.float64)
    parts = state(model, optimizer, state_of) | {"losses": losses}
    try:
        checkpoint.load(parts, checkpoint_id=settings.out / f"step-{step}")
    except checkpoint.CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise ValueError(
            f"the checkpoint in {settings.out.resolve()} does not fit this model: {first}"
        ) from error
    for moments in optimizer.state.values():
        moments["step"].fill_(step)
    return losses.tolist()


def write_curve(settings: Settings, losses: list[float]) -> None:
    """Write `losses.json` and, where matplotlib is there, `losses.png`."""
    (settings.out / "losses.json").write_text(json.dumps(losses))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        console().print("no loss curve: matplotlib is missing; install it, or the project's extra 'plot'")
        return
    axes = (figure := Figure(layout="constrained")).subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(
        xlabel="step",
        ylabel="loss, nats a character",
        title=f"{settings.layers} layers, width {settings.width}",
    )
    figure.savefig(settings.out / "losses.png", dpi=150)
    console().print(
        f"losses, their curve and checkpoints: {escape(str(settings.out.resolve()))}", soft_wrap=True
    )


def compare(settings: Settings, losses: list[float]) -> bool:
    """Train the whole model on rank 0 for as many steps, print how far `losses` are from its; whether near enough."""
    worst = torch.zeros((), dtype=torch.float64, device=rank_device())
    if dist.get_rank() == 0:
        model = Part(settings).to(worst.device)
        optimizer = make_optimizer(model, settings)
        for step, loss in enumerate(losses):
            characters, targets = batch(settings, step, worst.device)
            optimizer.zero_grad()
            alone = mean_loss(model(characters), targets)
            alone.backward()
            optimizer.step()
            worst = worst.maximum((alone.detach() - loss).abs())
        # A NaN is no agreement: maximum() keeps it, and it compares as not within.
        text = f"{len(losses)} losses, split over {dist.get_world_size()} and whole, differ by at most"
        console().print(f"{text} {worst.item():.1e}; allowed {TOLERANCE:.0e}", soft_wrap=True)
    dist.broadcast(worst, 0)
    return worst.item() <= TOLERANCE
