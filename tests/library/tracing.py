"""What the ranks of test_library.py trace: opcheck, torch.compile, CUDA graphs."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._library.effects import EffectType
from torch.distributed.device_mesh import init_device_mesh

from pyrocshmem import Heap, stream_k
from pyrocshmem.calls import operators
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.stream_k.ops import all_gather_gemm, op
from tests.fused import norm_gradients
from tests.library.bodies import BACKWARD, HEAP_BYTES, Model
from tests.stream_k.products import ON_CPU, device, random


def checked(heap: Heap) -> list[str]:
    """`torch.library.opcheck` of every op, with gradients; what fails."""
    found = []
    name = operators.name_of(heap)
    for number, case in enumerate(case for case in BACKWARD if not case.options):
        model = Model(dataclasses.replace(case, bias=torch.float32), heap.rank, heap.world_size, number)
        a, b, bias = (x.clone().requires_grad_() for x in model.shares(model.whole).values())
        args: tuple[Any, ...] = (a, b, name, bias, "none", False, None)
        if case.op == "gemm":
            args = (a, b, bias, "none", False, "")
        elif case.op == "all_gather":
            args = (a, b, name, case.M, bias, "none", False, None, True)
        op = getattr(torch.ops.stream_k, case.function.__name__).default
        for test, outcome in torch.library.opcheck(op, args, raise_exception=False).items():
            if outcome != "SUCCESS":
                found.append(f"{case.op}: {test}: {outcome}")
    return found


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Names of the fused ops that run inside, in order."""
    ran: list[str] = []
    honest = op.run

    def counting(which: op.GemmOp, *args: Any) -> Any:
        ran.append(which.name)
        return honest(which, *args)

    with mock.patch.object(op, "run", counting), mock.patch.object(all_gather_gemm, "run", counting):
        yield ran


def calls_made(heap: Heap) -> list[list[str]]:
    """Which calls a compiled function makes that makes two equal ones and one whose result nobody reads: without
    gradients, then with them."""

    def calls(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first = stream_k.gemm_all_reduce(a, b, group=heap)
        stream_k.gemm_reduce_scatter(a, b, group=heap)
        return first * stream_k.gemm_all_reduce(a, b, group=heap)

    found = []
    for needs in (False, True):
        torch._dynamo.reset()
        # With the partitioner of the backends that ship, which merges what is equal.
        function = torch.compile(calls, fullgraph=True, backend="aot_eager_decomp_partition")
        a, b = (random(*shape, torch.float32).requires_grad_(needs) for shape in ((8, 4), (4, 6)))
        with counted() as ran:
            function(a, b)
        heap.synchronize()
        found.append(ran)
    return found


def block(x: torch.Tensor, weights: list[torch.Tensor], group: Any, world_size: int) -> torch.Tensor:
    """A layer that has every op: rows in, a sum of squares out."""
    up = stream_k.all_gather_gemm(
        x, weights[0], activation="gelu", num_rows=x.shape[0] * world_size, group=group
    )
    down = stream_k.gemm_reduce_scatter(up, weights[1], group=group)
    both = stream_k.gemm_all_reduce(up, weights[1], bias=weights[3], group=group)
    wide = stream_k.gemm_all_scatter(both, weights[2], activation="silu", group=group)
    return stream_k.gemm(down + x, weights[4], activation="relu").sum() + wide.square().sum()


def leaves_of_block(rows: int) -> list[torch.Tensor]:
    """Its x, then its weights."""
    sizes = ((rows, 8), (8, 6), (6, 8), (8, 4), (1, 8), (8, 3))
    x, up, down, wide, bias, last = (random(*size, torch.float32) for size in sizes)
    return [each.requires_grad_() for each in (x, up, down, wide, bias[0].clone(), last)]


def differentiated(
    run: Callable[..., torch.Tensor], leaves: list[torch.Tensor], heap: Heap
) -> list[torch.Tensor]:
    """The loss and its gradients."""
    loss = run(leaves[0], leaves[1:], heap, heap.world_size)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def compiled(heap: Heap, backend: str) -> list[str]:
    """`block` as one graph, at two sizes and without gradients, against itself run eagerly: what differs."""
    torch._dynamo.reset()
    function = torch.compile(block, fullgraph=True, backend=backend)
    pairs = []
    for rows in (6, 5):
        leaves = leaves_of_block(rows)
        pairs += zip(differentiated(block, leaves, heap), differentiated(function, leaves, heap), strict=True)
    with torch.no_grad():
        pairs += [(run(leaves[0], leaves[1:], heap, heap.world_size) for run in (block, function))]
    return [
        f"{backend}: number {number} differs"
        for number, (eager, traced) in enumerate(pairs)
        if not torch.allclose(eager, traced, rtol=1e-5, atol=1e-5)
    ]


def groups(heap: Heap) -> list[str]:
    """A compiled call on each kind of group, and on a workspace of its own; which are wrong."""
    ways: dict[str, tuple[Any, Workspace | None]] = {
        "heap": (heap, None),
        "workspace": (heap, Workspace(heap)),
        "default": (None, None),
        "process group": (dist.group.WORLD, None),
        "mesh": (init_device_mesh(device().type, (heap.world_size,)), None),
    }
    a, b = random(5, 3, torch.float32, 1), random(3, 4, torch.float32, 2)
    expected = heap.world_size * (a.double() @ b.double())
    wrong = []
    for name, (group, workspace) in ways.items():
        torch._dynamo.reset()
        found = torch.compile(stream_k.gemm_all_reduce, fullgraph=True, backend="eager")(
            a, b, group=group, workspace=workspace
        )
        if not torch.allclose(found.double(), expected, atol=1e-5):
            wrong.append(name)
    return wrong


def traced(rank: int, world_size: int) -> dict[str, Any]:
    """A body: all that traces, in one start, since what traces takes seconds to import."""
    with Heap(HEAP_BYTES) as heap:
        # The control of the calls first: once traced, an effect is known to graphs for good.
        with_effects(None)
        found: dict[str, Any] = {"control": calls_made(heap)}
        with_effects(EffectType.ORDERED)
        found |= {"calls": calls_made(heap), "opcheck": checked(heap), "groups": groups(heap)}
        found["compiled"] = compiled(heap, "aot_eager" if ON_CPU else "inductor")
        return found


def norms(rank: int, world_size: int) -> tuple[list[str], list[int]]:
    """A body: the same of the ops with RMSNorm of whole rows: what is wrong, and calls of a compiled function."""
    with Heap(HEAP_BYTES) as heap:
        made = norm_gradients.calls_made(heap)
        return norm_gradients.operators(heap) + norm_gradients.traced(heap), made


def with_effects(effect: EffectType | None) -> None:
    """Register the fused ops as having this effect."""
    for name in ("all_gather_gemm", "gemm_all_reduce", "gemm_all_scatter", "gemm_reduce_scatter"):
        torch.library._register_effectful_op(f"stream_k::{name}", effect)


def captured(rank: int, world_size: int) -> list[str]:
    """A whole step, forward and backward, in a CUDA graph: replays with other data against eager steps."""
    errors = []
    with Heap(HEAP_BYTES) as heap:
        leaves = leaves_of_block(6)
        for _ in range(2):
            differentiated(block, leaves, heap)
        heap.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step = differentiated(block, leaves, heap)
        for replay in range(5):
            with torch.no_grad():
                for leaf, fresh in zip(leaves, leaves_of_block(6), strict=True):
                    leaf.copy_(fresh)
            for tensor in step:
                tensor.fill_(float("nan"))
            graph.replay()
            heap.synchronize()
            expected = differentiated(block, leaves, heap)
            errors += [
                f"replay {replay}: number {number} differs"
                for number, (x, y) in enumerate(zip(step, expected, strict=True))
                if not torch.equal(x, y)
            ]
    return errors
