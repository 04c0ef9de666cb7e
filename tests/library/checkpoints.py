"""What the ranks of test_library.py run: activation checkpoints beside torch.compile, the ways that
docs/architecture.md names, each against the same blocks without either."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pyrocshmem import Heap, collectives, stream_k
from tests.library.bodies import HEAP_BYTES
from tests.stream_k.products import random

# With the partitioner of the backends that ship, which decides what is computed again.
_compile = partial(torch.compile, backend="aot_eager_decomp_partition")
_Block = Callable[..., torch.Tensor]


def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps what communicates, computes the rest again."""
    ours = op.namespace in ("stream_k", "collectives")
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, group: Heap) -> torch.Tensor:
    """Rows in and out; its backward needs what its calls returned."""
    wide = stream_k.all_gather_gemm(x.sin(), up, activation="gelu", group=group)
    return x + collectives.reduce_scatter(wide @ down, group=group).tanh()


def _twice(each: _Block) -> _Block:
    return lambda x, *more: each(each(x, *more), *more)


def _ways() -> Iterator[tuple[str, _Block]]:
    yield "without either", _twice(block)
    compiled = _compile(block, fullgraph=True)
    yield "checkpoint(compile)", _twice(partial(checkpoint, compiled, use_reentrant=False))
    selective = partial(create_selective_checkpoint_contexts, policy)
    kept = _twice(partial(checkpoint, block, use_reentrant=False, context_fn=selective))
    yield "compile(selective checkpoint)", _compile(kept, fullgraph=True)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def eager(*args: Any) -> Any:
        return checkpoint(block, *args, use_reentrant=False)

    yield "compile(disabled checkpoint)", _compile(_twice(eager))


def body(rank: int, world_size: int) -> list[str]:
    """The ways whose result or gradients differ from the first one's."""
    wrong: list[str] = []
    expected: list[torch.Tensor] | None = None
    with Heap(HEAP_BYTES) as heap:
        for name, run in _ways():
            torch._dynamo.reset()
            sizes = ((6, 8), (8, 6), (6, 8))
            leaves = [random(*size, torch.float32, rank).requires_grad_() for size in sizes]
            y = run(*leaves, heap)
            found = [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]
            expected = expected or found
            pairs = zip(expected, found, strict=True)
            if not all(torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in pairs):
                wrong.append(name)
    return wrong
