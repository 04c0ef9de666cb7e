"""A transformer layer (attention, MLP, norms) on all ranks: forward, forward + backward, and a step of decoding.

    python -m pyrocshmem bench layers --shapes llama3-8b -n 4

`ours`: `stream_k.nn`; `ours_fp32`: partial sums travel in fp32, where `torch_tp`'s, too, have 16 bits; `ours_compiled`:
under `torch.compile`. `torch_tp`: the ordinary layer under PyTorch's tensor parallelism: `ColwiseParallel`,
`RowwiseParallel`, and, but for decoding, `SequenceParallel`; `torch_tp_async`: under `torch.compile` with its
asynchronous tensor parallelism, where that forms a fused op at all. `symm_mem`: linears that call
`torch.ops.symm_mem`, as torchtitan's do, served by PyTorch; `ours_symm_mem`: the same, served by
`pyrocshmem.torch_ops`.

Forward and training: M tokens of one sequence, divided by rows. Decoding: the next token of M sequences, a cache of
`LayerSize.context` tokens behind each, in a CUDA graph, nothing but heads and features divided. Results are held to
float64: of each row the relative error, at most twice the largest of the ordinary layer on one GPU in the same dtype.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pyrocshmem import torch_ops
from pyrocshmem.benchmarks.clocks import Clocks
from pyrocshmem.benchmarks.derive import merged
from pyrocshmem.benchmarks.layer_models import Layer, OurLayer, attend_by_head, place_of
from pyrocshmem.benchmarks.measure import LIMIT_S, Table, part_of
from pyrocshmem.benchmarks.provider import Run, Unavailable
from pyrocshmem.benchmarks.schema import IS_DEFAULT
from pyrocshmem.benchmarks.shapes import LAYER_SIZES, Case
from pyrocshmem.benchmarks.symm_mem_layer import SymmMemLayer
from pyrocshmem.calls.workspace import Workspace, workspace_for
from pyrocshmem.json_objects import all_gather_json
from pyrocshmem.reference.timing import Meter, host_seconds
from pyrocshmem.stream_k.nn import KVCache

# Sums in another order, and the partial sums of some libraries rounded, may err more than one product does.
_ERRORS = 2.0
_HOST_CALLS = 5
_SEED = 20261


@dataclass
class Step(Run):
    """A provider's step; `function` returns what it made."""

    results: tuple[torch.Tensor, ...] = ()

    def call(self) -> None:
        """One step."""
        self.results = self.function()

    def reset(self) -> None:
        """Poison what the last step made."""
        for result in self.results:
            result.fill_(float("nan"))


class Problem:
    """A case on this rank: the ordinary layer, inputs, and the results in float64 with the error allowed of a row.

    Alike on all ranks. x, grad: [B, S, hidden].
    """

    def __init__(self, case: Case, heap: Any, device: torch.device) -> None:
        self.case, self.heap, self.device = case, heap, device
        sizes = (
            each for each in LAYER_SIZES.values() if (each.hidden, each.intermediate) == (case.N, case.K)
        )
        self.size, self.dtype = next(sizes), getattr(torch, case.dtype)
        self.decodes, self.trains = case.op == "layer_decode", case.op == "layer_training"
        torch.manual_seed(_SEED)
        with device:
            self.layer = Layer(self.size).to(self.dtype)
            shape = (case.M, 1) if self.decodes else (1, case.M)
            self.x = torch.randn(*shape, self.size.hidden, dtype=self.dtype)
            self.grad = torch.randn_like(self.x)
            last = self.size.context - 1
            positions = torch.arange(last, last + 1) if self.decodes else torch.arange(case.M)
            self.place = place_of(positions, self.size.head_dim)
            cached = (case.M, self.size.kv_heads, self.size.context, self.size.head_dim)
            self.cached = torch.randn(2, *(cached if self.decodes else (0,)), dtype=self.dtype)
        exact = copy.deepcopy(self.layer).double()
        exact.attn.attend = attend_by_head
        made = self.step(exact.requires_grad_(False), 1, torch.float64)()
        alone = self.step(self.layer, 1)()
        self.truth = [self.rows(each) for each in made]
        unit = torch.finfo(self.dtype).eps
        self.allowed = [
            _ERRORS * float(relative_errors(mine, each).max()) + unit
            for mine, each in zip(alone, made, strict=True)
        ]

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows, or all where they are not divided: a matrix."""
        x = x.flatten(0, 1)
        return x if self.decodes else x.tensor_split(dist.get_world_size())[dist.get_rank()]

    def step(
        self, layer: nn.Module, ranks: int, dtype: torch.dtype | None = None, matrix: bool = False
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        """A step of `layer`, which is divided over so many ranks: gives (y,), or with gradients (y, the input's).

        matrix: the layer takes rows of tokens.
        """
        x, grad = (each.detach().to(dtype or self.dtype, copy=True) for each in (self.x, self.grad))
        cache = None
        if self.decodes:
            rank = dist.get_rank() % ranks
            heads = (each.chunk(ranks, 1)[rank] for each in self.cached)
            cache = KVCache(*(each.to(x.dtype, copy=True).contiguous() for each in heads))
        elif ranks > 1:
            x, grad = (each.tensor_split(ranks, 1)[dist.get_rank()].contiguous() for each in (x, grad))
        if matrix:
            x, grad = x.flatten(0, 1), grad.flatten(0, 1)

        def forward() -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                return (layer(x, self.place, cache),)

        def train() -> tuple[torch.Tensor, ...]:
            x.grad = None
            layer.zero_grad(set_to_none=True)
            y = layer(x, self.place, cache)
            y.backward(grad)
            return y.detach(), x.grad

        x.requires_grad_(self.trains)
        return train if self.trains else forward

    def error_of(self, run: Step) -> dict[str, Any]:
        """Of all results, as `benchmarks.check` gives it; elements are rows."""
        found: dict[str, Any] = {"worst_ratio": -1.0}
        bad, count = 0, 0
        for result, exact, allowed in zip(run.results, self.truth, self.allowed, strict=True):
            errors = relative_errors(result.view(exact.shape), exact)
            # A NaN is as wrong as can be.
            errors = errors.nan_to_num(nan=float("inf"))
            worst = float(errors.max()) if errors.numel() else 0.0
            bad, count = bad + int((errors > allowed).sum()), count + errors.numel()
            if worst / allowed > found["worst_ratio"]:
                found = {"max_error": worst, "bound_at_max": allowed, "worst_ratio": worst / allowed}
        return found | {"num_bad": bad, "num_elements": count}


def relative_errors(x: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Of each row, the norm of the difference over that of the exact one."""
    return (x.double() - exact).norm(dim=-1) / exact.norm(dim=-1)


def _divided(problem: Problem, layer: nn.Module) -> Step:
    """A step of a layer that all ranks have a part of, of rows of tokens but for decoding."""
    return Step(problem.step(layer, problem.case.ranks, matrix=not problem.decodes), None)


def _ours(problem: Problem, compiled: bool = False, partial_dtype: torch.dtype | None = None) -> Step:
    if compiled:
        _need_gpus(problem)
    layer: Any = OurLayer(problem.layer, problem.heap, not problem.decodes, partial_dtype)
    if compiled:
        layer = torch.compile(layer, dynamic=False)
    return _divided(problem, layer)


def _ours_fp32(problem: Problem) -> Step:
    if problem.dtype.itemsize != 2:
        raise Unavailable(IS_DEFAULT)
    return _ours(problem, partial_dtype=torch.float32)


def _torch_tp(problem: Problem) -> Step:
    return _divided(problem, _parallelized(problem))


def _torch_tp_async(problem: Problem) -> Step:
    _need_gpus(problem)
    if problem.decodes:
        raise Unavailable("its fused ops divide rows, which decoding does not")
    symmetric_memory = importlib.import_module("torch.distributed._symmetric_memory")
    symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    step = _divided(problem, torch.compile(_parallelized(problem), dynamic=False))
    inductor = importlib.import_module("torch._inductor.utils")
    with importlib.import_module("torch._inductor.config").patch(_micro_pipeline_tp=True):
        _, codes = inductor.run_and_get_code(step.call)
    fused = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    if not any(name in code for code in codes for name in fused):
        raise Unavailable(f"torch.compile of {torch.__version__} formed no fused op")
    return step


def _parallelized(problem: Problem) -> nn.Module:
    """The ordinary layer under PyTorch's tensor parallelism. Of rows of tokens: of one sequence [1, S, hidden], whose
    dimension 1 is gathered, torch.compile forms no fused all-gather (2.13)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    ranks = problem.case.ranks
    if not problem.decodes and problem.case.M % ranks:
        raise Unavailable(f"M = {problem.case.M} is not divisible by the {ranks} ranks")
    outer = Replicate() if problem.decodes else Shard(0)
    plan: dict[str, Any] = {}
    if not problem.decodes:
        plan = {name: SequenceParallel(sequence_dim=0) for name in ("norm1", "norm2")}
        gather = {"input_layouts": (outer,), "desired_input_layouts": (Replicate(),)}
        plan |= {name: PrepareModuleInput(**gather) for name in ("attn", "mlp")}
    columns = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan |= {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel(output_layouts=outer) for name in ("attn.o_proj", "mlp.down_proj")}
    mesh = init_device_mesh(problem.device.type, (ranks,))
    return parallelize_module(copy.deepcopy(problem.layer), mesh, plan)


class _ServedStep(Step):
    """A step of a layer that calls `torch.ops.symm_mem`. served: whether by ours; switched outside of what is timed."""

    served = False

    def reset(self) -> None:
        """See the base class."""
        _serve(self.served)
        super().reset()

    def call(self) -> None:
        """See the base class."""
        _serve(self.served)
        super().call()


_installed: Any = None


def _serve(ours: bool) -> None:
    """Have `torch.ops.symm_mem` served by ours, or by PyTorch."""
    global _installed
    if ours and _installed is None:
        _installed = torch_ops.install()
    elif not ours and _installed is not None:
        _installed.uninstall()
        _installed = None


def _symm_mem(problem: Problem, served: bool) -> Step:
    if problem.decodes:
        raise Unavailable("its fused ops divide rows, which decoding does not")
    if not served:
        _need_gpus(problem)
        importlib.import_module("torch.distributed._symmetric_memory")  # registers the ops
    rank, ranks = dist.get_rank(), problem.case.ranks
    layer = SymmMemLayer(problem.layer, rank, ranks, dist.group.WORLD.group_name)
    step = _ServedStep(problem.step(layer, ranks, matrix=True), None)
    step.served = served
    return step


def _need_gpus(problem: Problem) -> None:
    if problem.device.type != "cuda":
        raise Unavailable("needs GPUs")


_PROVIDERS: dict[str, Callable[[Problem], Step]] = {
    "ours": _ours,
    "ours_fp32": _ours_fp32,
    "ours_compiled": partial(_ours, compiled=True),
    "torch_tp": _torch_tp,
    "torch_tp_async": _torch_tp_async,
    "symm_mem": partial(_symm_mem, served=False),
    "ours_symm_mem": partial(_symm_mem, served=True),
}


ALL_PROVIDERS = tuple(_PROVIDERS)


def measure_cases(
    cases: list[Case], names: tuple[str, ...] | None, iters: int, heap: Any, device: torch.device
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Measure layers on the ranks of `heap`, as `benchmarks.measure.measure_cases` does ops.

    A record also has peak_mib {provider: MiB}, on GPUs: the most that PyTorch's allocator holds during a step, beyond
    what it held before (weights, inputs), and for ours the workspace that this step alone needs: what peers and copy
    engines write on the heap, and partial tiles. Not counted: what products alone keep from call to call, ours and
    cuBLAS's, and NCCL's buffers.
    """
    meter = Meter(device, heap.world_size > 1, Clocks(device))
    for case in cases:
        part = _measure(case, names, iters, heap, meter)
        parts = all_gather_json(part, "parts of records", timeout=LIMIT_S)
        record = merged(parts)
        peaks = [part["peak_mib"] for part in parts]
        yield case, record | {"peak_mib": {name: max(peak[name] for peak in peaks) for name in peaks[0]}}


def _measure(
    case: Case, names: tuple[str, ...] | None, iters: int, heap: Any, meter: Meter
) -> dict[str, Any]:
    if meter.on_gpu:
        # Only there is anything compiled; cases have layers of their own.
        torch.compiler.reset()
    problem = Problem(case, heap, meter.device)
    makers = {
        name: partial(_ready, make, problem)
        for name, make in _PROVIDERS.items()
        if names is None or name in names
    }
    table = Table(makers, case, case.ranks)
    samples = table.samples(meter, iters)
    heap.synchronize()
    errors, host, peaks = {}, {}, {}
    for name, run in table.runs.items():
        assert isinstance(run, Step)
        errors[name] = problem.error_of(run)
        if meter.on_gpu:
            workspace = workspace_for(heap) if name.startswith("ours") else None
            peaks[name] = _peak_mib(run, meter.device, workspace)
            if name == "ours":
                host[name] = 1e6 * host_seconds(run.call, _HOST_CALLS, meter.device)
    table.close()
    part = part_of(case, meter.device, table, samples, host, errors, {})
    return part | {"peak_mib": peaks}


def _ready(make: Callable[[Problem], Step], problem: Problem) -> Step:
    step = make(problem)
    step.call()
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)
    return step


def _peak_mib(run: Step, device: torch.device, workspace: Workspace | None) -> float:
    """See `measure_cases`. workspace: the one that a step of ours shares with others."""
    run.results = ()
    if workspace is not None:
        # Without what other steps, and other cases, wanted of it.
        workspace.free()
        run.call()
        run.results = ()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run.call()
    torch.cuda.synchronize(device)
    kept = 0 if workspace is None else workspace.nbytes_in_use()
    return (torch.cuda.max_memory_allocated(device) - before + kept) / 2**20
