"""What the ranks of test_library.py run: backward passes in which one rank has no gradient of some results.

That is as good as zeros, and its peers, which have one, must not wait for it.
"""

from typing import Any

import torch

from pyrocshmem import Heap
from tests.library.bodies import HEAP_BYTES
from tests.library.finite_differences import Op, ops
from tests.stream_k.products import device

WITHOUT = 1  # the rank that has none


class _Nothing(torch.autograd.Function):
    """Zeros, whose gradient is None: what is before it still gets its turn."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        return None


def _gradients(
    operands: list[torch.Tensor], results: tuple[torch.Tensor, ...], unused: tuple[int, ...], zeros: bool
) -> list[torch.Tensor]:
    """Of a loss that reads the results but for `unused`, which have gradients of zeros, or none."""
    read = []
    for at, result in enumerate(results):
        if at not in unused:
            read.append(result.square())
        else:
            read.append(result * 0 if zeros else _Nothing.apply(result))
    loss = sum((x.sum() for x in read), torch.zeros((), device=device()))
    return list(torch.autograd.grad(loss, operands, materialize_grads=True))


def _results(op: Op, x: dict[str, torch.Tensor], heap: Heap) -> tuple[torch.Tensor, ...]:
    found = op.function(**x, group=heap)
    return found if isinstance(found, tuple) else (found,)


def body(rank: int, world_size: int) -> list[str]:
    """Every op, and of its results any that the rank does not read: where gradients differ from those with zeros."""
    wrong = []
    with Heap(HEAP_BYTES) as heap:
        for name, op in ops(rank).items():
            generator = torch.Generator().manual_seed(rank)
            x = {
                operand: torch.randn(shape, generator=generator).to(device()).requires_grad_()
                for operand, shape in (op.own | op.shared).items()
            }
            for unused in ((0,), (1,), (0, 1)):
                known, found = (
                    _gradients(
                        list(x.values()), _results(op, x, heap), unused if rank == WITHOUT else (), zeros
                    )
                    for zeros in (True, False)
                )
                if not all(map(torch.equal, known, found)):
                    wrong.append(f"{name}: without gradients of results {unused}")
    return wrong
