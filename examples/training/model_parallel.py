"""Model parallelism: the layers of one model divided over processes, hidden states and their gradients handed on.

    torchrun --nproc-per-node=2 examples/training/model_parallel.py
    torchrun --nproc-per-node=2 examples/training/model_parallel.py --steps 20 --width 64 --length 64 --compare

Only one process computes at a time: the memory of a model is divided, its time is not. That is what
`pipeline_parallel.py` mends. On GPUs each process has one; without them, processes on a CPU with gloo.
"""

import torch
import torch.distributed as dist
from common import Settings, command, rank_device, train
from model import Part, mean_loss, share
from torch import Tensor


def train_rank(settings: Settings) -> list[float]:
    """Train this rank's part of the model; every step's loss."""
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), rank_device()
    part = Part(settings, share(settings, rank, world_size)).to(device)
    hidden_shape = (settings.batch, settings.length, settings.width)

    def backward(characters: Tensor, targets: Tensor) -> Tensor | None:
        hidden = characters
        if rank > 0:
            hidden = torch.empty(hidden_shape, device=device)
            dist.recv(hidden, rank - 1)
            hidden.requires_grad_()
        out = part(hidden)
        loss = None
        if rank < world_size - 1:
            dist.send(out.detach(), rank + 1)
            gradient = torch.empty_like(out)
            dist.recv(gradient, rank + 1)
            out.backward(gradient)
        else:
            loss = mean_loss(out, targets)
            loss.backward()
        if rank > 0:
            assert hidden.grad is not None
            dist.send(hidden.grad, rank - 1)
        return loss

    return train(part, backward, settings)


if __name__ == "__main__":
    command(train_rank, Settings, "Train a character model whose layers are divided over processes.")
