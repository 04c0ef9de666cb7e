"""A whole step of training under `torch.compile` and in a CUDA graph: the bits of the eager step."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pyrocshmem import Heap, target
from pyrocshmem.stream_k import nn as parallel
from pyrocshmem.stream_k.nn import pointwise
from tests.fused.norm_gradients import fused_calls
from tests.nn.models import HIDDEN, INTERMEDIATE, Case, ParallelBlock, unsharded
from tests.ranks import run_ranks, values

TIER = 3


class Part(nn.Module):
    """One layer of each kind, and a norm."""

    def __init__(self, sequence_parallel: bool, device: torch.device, group: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "device": device, "group": group}
        self.norm = parallel.RMSNorm(HIDDEN, 1e-5, **options)
        self.mlp = parallel.ParallelMLP(HIDDEN, INTERMEDIATE, bias=True, **options)

    def forward(self, x: torch.Tensor, num_rows: int) -> torch.Tensor:
        return self.mlp(self.norm(x), num_rows=num_rows, residual=x)


def step(call: Any, model: nn.Module, x: torch.Tensor, *more: int) -> list[torch.Tensor]:
    """The output and all gradients of a step whose loss is the sum of the output's squares, halved."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    y = call(x, *more)
    y.backward(y.detach())
    return [y.detach(), *(each.grad.clone() for each in (x, *model.parameters()))]


def compiled(rank: int, world_size: int) -> list[bool]:
    found = []
    device = target.device(rank)
    mesh = init_device_mesh(device.type, (world_size,))
    with Heap(8 << 20) as heap:
        for sequence_parallel, group in ((False, heap), (True, mesh)):
            case = Case(sequence_parallel, True, 1, 7)
            model = Part(sequence_parallel, device, group)
            fused = torch.compile(model, fullgraph=True, backend="aot_eager")
            for seed in range(2):
                x = case.inputs(seed, device)[0]
                x = x.tensor_split(world_size)[rank] if sequence_parallel else x
                # What is traced has PyTorch's formulas, of other bits than the kernels of eager layers.
                with mock.patch.object(pointwise, "_by_kernel", return_value=False):
                    eager = step(model, model, x, case.rows)
                traced = step(fused, model, x, case.rows)
                found += [torch.equal(*pair) for pair in zip(traced, eager, strict=True)]
    return found


@pytest.mark.slow
@pytest.mark.num_ranks(2)
def test_compiled_steps() -> None:
    for found in values(run_ranks(compiled, 2, timeout=100)):
        # In each of two modes, twice: y, x, a norm, three weights, three biases.
        assert found == [True] * (2 * 2 * 9)


@torch.no_grad()
def dynamic(rank: int, world_size: int) -> tuple[list[bool], int]:
    """Activations of several sizes through one graph: whether each gives the eager bits; how many graphs there are."""
    device, found = target.device(rank), []
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for sequence_parallel in (False, True):
        options: dict[str, Any] = {
            "sequence_parallel": sequence_parallel,
            "sequence_dim": 1,
            "device": device,
        }
        up, down = parallel.ColumnParallelLinear(6, 8, **options), parallel.RowParallelLinear(8, 6, **options)

        def call(x: torch.Tensor, up: nn.Module = up, down: nn.Module = down) -> torch.Tensor:
            return down(up(x))

        traced = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
        for sizes in ((3, 4), (5, 2)):
            x = torch.randn(*sizes, 6, device=device)
            found.append(torch.equal(traced(x), call(x)))
    return found, len(graphs)


@pytest.mark.num_ranks(2)
def test_dynamic_shapes_of_three_dimensions() -> None:
    assert values(run_ranks(dynamic, 2, timeout=100)) == [([True] * 4, 2)] * 2


@torch.no_grad()
def test_traced_inference_copies_no_weights() -> None:
    """Gate and up are put together after the products, not before."""
    device = target.device(0)
    torch._dynamo.reset()
    mlp = parallel.ParallelMLP(HIDDEN, INTERMEDIATE, device=device)
    shapes = []

    def backend(graph: Any, inputs: Any) -> Any:
        joined = [node for node in graph.graph.nodes if node.target is torch.cat]
        shapes.extend(tuple(node.meta["example_value"].shape) for node in joined)
        return graph.forward

    x = torch.randn(3, HIDDEN, device=device)
    torch.testing.assert_close(torch.compile(mlp, fullgraph=True, backend=backend)(x), mlp(x))
    assert shapes == [(3, 2 * INTERMEDIATE)]


def with_norm(rank: int, world_size: int) -> list[str]:
    """A row-parallel layer with residual and norm under torch.compile, decoding and training: what is wrong."""
    device = target.device(rank)
    torch.manual_seed(1)
    wrong = []
    with Heap(8 << 20) as heap:
        layer = parallel.RowParallelLinear(2 * HIDDEN, INTERMEDIATE, group=heap, device=device)
        norms = (
            nn.RMSNorm(INTERMEDIATE, 1e-5, device=device),
            parallel.RMSNorm(INTERMEDIATE, group=heap, device=device),
        )
        inputs = (torch.randn(3, size, device=device) for size in (2 * HIDDEN // world_size, INTERMEDIATE))
        x, residual = (each.requires_grad_() for each in inputs)
        for norm in norms:

            def call(x: torch.Tensor, residual: torch.Tensor, norm: nn.Module = norm) -> Any:
                return layer(x, residual=residual, norm=norm)

            torch._dynamo.reset()
            seen: list[list[str]] = []
            backend = fused_calls("aot_eager", seen)
            graph = torch.compile(call, fullgraph=True, backend=backend)
            leaves = [x, residual, *layer.parameters(), *norm.parameters()]
            found = []
            for run in (call, graph):
                with torch.no_grad():
                    decoded = run(x, residual)
                results = run(x, residual)
                found.append([*decoded, *results, *torch.autograd.grad(results, leaves, results)])
            if not all(torch.equal(*pair) for pair in zip(*found, strict=True)):
                wrong.append(f"{norm}: other bits than eagerly")
            if seen != [["gemm_all_reduce_rms_norm"]] * 2:
                wrong.append(f"{norm}: graphs of {seen}")
    return wrong


@pytest.mark.num_ranks(2)
def test_a_row_parallel_layer_and_its_norm_are_one_node() -> None:
    assert values(run_ranks(with_norm, 2, timeout=100)) == [[], []]


def captured(rank: int, world_size: int, case: Case) -> list[bool]:
    """Replays of one graph of a step, on inputs that change in place, each beside an eager step."""
    device = target.device(rank)
    model = ParallelBlock(unsharded(case).to(device), case.sequence_parallel)

    def mine(seed: int) -> torch.Tensor:
        x = case.inputs(seed, device)[0]
        return x.tensor_split(world_size)[rank] if case.sequence_parallel else x

    x = mine(0).clone().requires_grad_()

    def train() -> torch.Tensor:
        x.grad = None
        model.zero_grad(set_to_none=True)
        y = model(x, case.batch, case.rows)
        y.backward(y.detach())
        return y.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            train()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = train()
    held = [y, x.grad, *(parameter.grad for parameter in model.parameters())]
    replays = []
    for seed in range(1, 5):
        with torch.no_grad():
            x.copy_(mine(seed))
            for result in held:
                assert result is not None
                result.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        replays.append([result.clone() for result in held if result is not None])
    found = []
    for seed, replayed in enumerate(replays, 1):
        eager = step(model, model, mine(seed), case.batch, case.rows)
        found += [torch.equal(*pair) for pair in zip(replayed, eager, strict=True)]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
@pytest.mark.num_ranks(2)
def test_steps_in_a_cuda_graph(sequence_parallel: bool) -> None:
    case = Case(sequence_parallel, True, 3, 5, torch.bfloat16)
    for found in values(run_ranks(captured, 2, case, timeout=100)):
        assert len(found) == 4 * (2 + 16)
        assert all(found)
