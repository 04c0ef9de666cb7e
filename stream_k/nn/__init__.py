"""Tensor-parallel layers on the fused ops.

    from stream_k import nn as parallel

    mlp = parallel.ParallelMLP(4096, 14336, group=mesh, sequence_parallel=True)
    parallel.load_full_state_dict(mlp, unsharded.state_dict())
    y = mlp(x)                                       # x, y: [M/R, 4096], a block of rows on each rank

sequence_parallel: activations between layers are divided by rows (tokens), a block for each rank; otherwise every rank
holds them whole. Each rank's loss is then its rows' part of the model's loss; otherwise the whole loss, the same on
all.

`linear`: the two linear layers and RMSNorm; `mlp`, `attention`; `pointwise`: what these compute between products, and
their gradients, one kernel each; `packed`: layers with the same input as one product; `state`: checkpoints of the
unsharded model; `clip`: of gradients; `parallel_style`: the linear layers for
`torch.distributed.tensor.parallel.parallelize_module`; `functional`: products with gradients that cross ranks.
"""

from typing import TYPE_CHECKING, Any

from pyrocshmem.stream_k.nn.attention import KVCache, ParallelAttention, rotation
from pyrocshmem.stream_k.nn.clip import clip_grad_norm_
from pyrocshmem.stream_k.nn.functional import sum_gradient
from pyrocshmem.stream_k.nn.linear import ColumnParallelLinear, RMSNorm, RowParallelLinear
from pyrocshmem.stream_k.nn.mlp import ParallelMLP
from pyrocshmem.stream_k.nn.state import (
    full_linears,
    full_state_dict,
    load_full_state_dict,
    sharded_state_dict,
)

if TYPE_CHECKING:
    from pyrocshmem.stream_k.nn.parallel_style import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "KVCache",
    "ParallelAttention",
    "ParallelMLP",
    "RMSNorm",
    "RowParallelLinear",
    "RowwiseParallel",
    "clip_grad_norm_",
    "full_linears",
    "full_state_dict",
    "load_full_state_dict",
    "rotation",
    "sharded_state_dict",
    "sum_gradient",
]


def __getattr__(name: str) -> Any:
    # DTensor takes longer to import than all else here: only who asks for the styles pays for it.
    if name in ("ColwiseParallel", "RowwiseParallel"):
        from pyrocshmem.stream_k.nn import parallel_style

        return getattr(parallel_style, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
