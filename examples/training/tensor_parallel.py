"""Tensor parallelism: every layer divided over processes, on the fused ops; alone, or together with a pipeline.

    torchrun --nproc-per-node=4 examples/training/tensor_parallel.py
    torchrun --nproc-per-node=4 examples/training/tensor_parallel.py --stages 2
    torchrun --nproc-per-node=2 examples/training/tensor_parallel.py --steps 5 --layers 2 --width 32 --length 16 \\
        --batch 4 --compare

The heads of attention and the inner features of MLPs are divided (Shoeybi et al., 2019), and between them the rows, a
row being a character's hidden state (Korthikanti et al., 2022); `--replicated` leaves the rows on every rank. Processes
form a mesh of `--stages` x the rest: layers are divided over the first dimension, and each layer over the second.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch.distributed as dist
import torch.nn.functional as F
import typer
from common import command, rank_device, train
from model import Layer, Part, share
from pipeline_parallel import Pipeline, PipelineSettings
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pyrocshmem.stream_k import nn as parallel

ROPE_THETA = 10000.0


@dataclass(frozen=True)
class TensorSettings(PipelineSettings):
    """Of a run; every field is an option of the command line."""

    micro_batches: Annotated[int, typer.Option(help="Parts that a batch is cut into, with --stages.")] = 4
    stages: Annotated[int, typer.Option(help="Stages of the pipeline; each divides its layers.")] = 1
    replicated: Annotated[bool, typer.Option("--replicated", help="All rows on every rank.")] = False


class ParallelLayer(nn.Module):
    """What `layer` is, its attention and MLP divided over ranks; its names in a checkpoint stay.

    name: for messages. num_sequences: in a batch. num_rows: of the batch, on all ranks together. divided: options of
    the parallel modules.
    """

    def __init__(self, layer: Layer, name: str, num_sequences: int, num_rows: int, **divided: Any) -> None:
        super().__init__()
        self.num_sequences, self.num_rows = num_sequences, num_rows
        self.attention_norm, self.mlp_norm = layer.attention_norm, layer.mlp_norm
        attention, mlp = layer.attention, layer.mlp
        self.attention = parallel.ParallelAttention.from_linears(
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            attention.o_proj,
            head_dim=attention.q_proj.out_features // attention.heads,
            rope_theta=ROPE_THETA,
            name=f"{name}.attention",
            **divided,
        )
        self.mlp = parallel.ParallelMLP.from_linears(
            mlp.gate_proj, mlp.up_proj, mlp.down_proj, name=f"{name}.mlp", **divided
        )

    def forward(self, x: Tensor) -> Tensor:
        """`x` [rows of this rank, width]; the same shape."""
        normed, x = self.attention(
            self.attention_norm(x),
            batch_size=self.num_sequences,
            num_rows=self.num_rows,
            residual=x,
            norm=self.mlp_norm,
        )
        return self.mlp(normed, num_rows=self.num_rows, residual=x)


class ParallelPart(Part):
    """A part of the model for the ranks of `mesh`, which divide each of its layers.

    Raises ValueError, naming the layer, where they can't divide the heads or the features.
    """

    def __init__(self, settings: TensorSettings, which: range, mesh: DeviceMesh) -> None:
        super().__init__(settings, which, settings.recompute)
        self.mesh, self.by_rows = mesh, not settings.replicated
        num_sequences = settings.batch // (settings.micro_batches if settings.stages > 1 else 1)
        self.num_rows = num_sequences * settings.length
        for name, layer in self.layers.items():
            # Ordinary tensors, as the other weights are; of a mesh they would be DTensors.
            divided = {"group": mesh.get_group(), "sequence_parallel": self.by_rows}
            self.layers[name] = ParallelLayer(
                layer, f"layers.{name}", num_sequences, self.num_rows, **divided
            )

    def own_rows(self, x: Tensor) -> Tensor:
        """This rank's rows of `x` [batch, length], flat."""
        rows = x.flatten()
        return rows.tensor_split(self.mesh.size())[self.mesh.get_local_rank()] if self.by_rows else rows

    def forward(self, x: Tensor) -> Tensor:
        """As `Part`, but hidden states are [rows of this rank, width], and logits [rows of this rank, VOCABULARY]."""
        return super().forward(x if self.embedding is None else self.own_rows(x))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The part of the mean loss that this rank's rows make: where rows are divided, the ranks' parts add up."""
        return F.cross_entropy(logits, self.own_rows(targets), reduction="sum") / self.num_rows

    def sum_gradients(self) -> None:
        """Add up over ranks the gradients of weights that every rank holds whole, and used for its own rows."""
        norms = (
            module for layer in self.layers.values() for module in (layer.attention_norm, layer.mlp_norm)
        )
        for module in (self.embedding, *norms, self.norm, self.head):
            for weight in () if module is None or not self.by_rows else module.parameters():
                dist.all_reduce(weight.grad, group=self.mesh.get_group())


def train_rank(settings: TensorSettings) -> list[float]:
    """Train this rank's shards of its stage's layers; every step's loss."""
    device, world_size = rank_device(), dist.get_world_size()
    if settings.stages < 1 or world_size % settings.stages:
        raise ValueError(
            f"{settings.stages} stages, allowed are divisors of the number of ranks, {world_size}"
        )
    sizes = (settings.stages, world_size // settings.stages)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("stage", "tensor"))
    which = share(settings, mesh.get_local_rank("stage"), settings.stages)
    part = ParallelPart(settings, which, mesh["tensor"]).to(device)
    pipeline = Pipeline(part, settings, mesh.get_group("stage"), part.loss) if settings.stages > 1 else None

    def backward(characters: Tensor, targets: Tensor) -> Tensor | None:
        if pipeline is None:
            loss = part.loss(part(characters), targets)
            loss.backward()
        else:
            loss = pipeline(characters, targets)
        part.sum_gradients()
        if loss is not None and part.by_rows:
            loss = loss.detach().clone()
            dist.all_reduce(loss, group=part.mesh.get_group())
        return loss

    losses = train(part, backward, settings, parallel.sharded_state_dict)
    if pipeline is not None:
        pipeline.report()
    return losses


if __name__ == "__main__":
    command(
        train_rank,
        TensorSettings,
        "Train a character model whose layers are divided over processes.",
    )
