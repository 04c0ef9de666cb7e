"""Pipeline parallelism: the layers divided over processes, a batch cut into micro-batches that follow one another.

    torchrun --nproc-per-node=4 examples/training/pipeline_parallel.py --schedule gpipe
    torchrun --nproc-per-node=4 examples/training/pipeline_parallel.py --schedule 1f1b --recompute
    torchrun --nproc-per-node=4 examples/training/pipeline_parallel.py --steps 10 --width 64 --length 64 --compare

GPipe (Huang et al., 2019) runs all forward passes, then all backward passes; 1F1B (Narayanan et al., 2019) alternates,
and so keeps the activations of no more micro-batches than there are stages. `--recompute` keeps only the inputs of
layers (gradient checkpointing). At the end: each stage's time in passes, the bubble, and the peak memory, all measured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import torch.distributed as dist
import typer
from common import Settings, command, console, rank_device, train
from measure import Costs
from model import Part, mean_loss, share
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


class Schedule(StrEnum):
    """In which order a stage runs its passes."""

    gpipe = "gpipe"
    one_f_one_b = "1f1b"


@dataclass(frozen=True)
class PipelineSettings(Settings):
    """Of a run; every field is an option of the command line."""

    schedule: Annotated[Schedule, typer.Option(help="Order of the passes.")] = Schedule.one_f_one_b
    micro_batches: Annotated[int, typer.Option(help="Parts that a batch is cut into.")] = 8
    recompute: Annotated[bool, typer.Option("--recompute", help="Gradient checkpointing.")] = False


class TimedStage(PipelineStage):
    """A stage whose passes are timed; waiting for neighbours is not part of a pass."""

    def __init__(self, costs: Costs, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.costs = costs

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.costs.passes.span():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.costs.passes.span():
            return super().backward_one_chunk(*args, **kwargs)


class Pipeline:
    """This rank's stage of a pipeline over `group`, None: all ranks. Call it for the passes of a step.

    loss: of a micro-batch's outputs and targets. Raises ValueError for micro-batches that the schedule can't have.
    """

    def __init__(
        self,
        part: nn.Module,
        settings: PipelineSettings,
        group: dist.ProcessGroup | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = mean_loss,
    ) -> None:
        rank, size, device = dist.get_rank(group), dist.get_world_size(group), rank_device()
        self.num_micro_batches = settings.micro_batches
        least = size if settings.schedule == Schedule.one_f_one_b else 1
        if settings.micro_batches < least or settings.batch % settings.micro_batches:
            raise ValueError(
                f"{settings.micro_batches} micro-batches, allowed are divisors of the batch, {settings.batch}, "
                f"that are at least {least}"
            )
        self.is_first, self.is_last, self.num_stages = rank == 0, rank == size - 1, size
        self.costs = Costs(part, device)
        stage = TimedStage(self.costs, part, rank, size, device, group=group)
        make = ScheduleGPipe if settings.schedule == Schedule.gpipe else Schedule1F1B
        self.schedule = make(stage, settings.micro_batches, loss_fn=loss)

    def __call__(self, characters: Tensor, targets: Tensor) -> Tensor | None:
        """Leaves the gradients of the mean loss in the stage's parameters; the loss, on the last stage."""
        losses = list[Tensor]()
        inputs = (characters,) if self.is_first else ()
        outputs = {"target": targets, "losses": losses} if self.is_last else {}
        with self.costs.step():
            self.schedule.step(*inputs, **outputs, return_outputs=False)
        return (
            sum(losses, start=characters.new_zeros((), dtype=losses[0].dtype)) / len(losses)
            if losses
            else None
        )

    def report(self) -> list[dict[str, float]]:
        """Print what the pipeline cost, beside the bubble that stages of equal cost would have."""
        idle = self.num_stages - 1
        expected = idle / (idle + self.num_micro_batches)
        return self.costs.report(console(), f"with {self.num_stages} equal stages it would be", expected)


def train_rank(settings: PipelineSettings) -> list[float]:
    """Train this rank's stage of the model; every step's loss."""
    which = share(settings, dist.get_rank(), dist.get_world_size())
    part = Part(settings, which, settings.recompute).to(rank_device())
    pipeline = Pipeline(part, settings)
    losses = train(part, pipeline, settings)
    pipeline.report()
    return losses


if __name__ == "__main__":
    command(
        train_rank, PipelineSettings, "Train a character model whose layers form a pipeline of processes."
    )
