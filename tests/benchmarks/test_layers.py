"""The benchmark of layers, tiny: its records, what is made of them, and that a wrong result is seen."""

import contextlib
import importlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pyrocshmem import Heap, target
from pyrocshmem.benchmarks import layers, plots, records, run, tables
from pyrocshmem.benchmarks.layers import Problem, Step
from pyrocshmem.benchmarks.shapes import LAYERS, cases_of
from tests.ranks import run_ranks, values

TIER = 3
pytestmark = pytest.mark.gpu_a_rank("it times beside NCCL")
PROVIDERS = ("ours", "ours_fp32", "torch_tp")


def measured(rank: int, world_size: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Records of every kind of step, and rows found wrong of results that were spoilt."""
    device = target.device(rank)
    dtype = "float16" if device.type == "cpu" else "bfloat16"
    cases = [case for op in LAYERS for case in cases_of(op, "tiny", world_size, dtype, device.type == "cuda")]
    with Heap(32 << 20) as heap:
        found = [record for _, record in layers.measure_cases(cases, None, 1, heap, device)]
        problem = Problem(cases[0], heap, device)
        step = Step(problem.step(problem.layer, 1), None)
        step.call()
        right = problem.rows(step.results[0])
        bad = {}
        for what, spoil in {
            "nothing": lambda x: x,
            "a row": lambda x: x.index_fill(0, torch.tensor([1], device=device), 1.0),
            "an element": lambda x: x.index_put((torch.tensor(2), torch.tensor(3)), x.new_tensor(torch.nan)),
            "a tenth": lambda x: 1.1 * x,
        }.items():
            step.results = (spoil(right),)
            bad[what] = problem.error_of(step)["num_bad"]
        return found, bad


@pytest.mark.num_ranks(2)
def test_layers(tmp_path: Path) -> None:
    for found, bad in values(run_ranks(measured, 2, timeout=100)):
        assert bad == {"nothing": 0, "a row": 1, "an element": 1, "a tenth": 4}
        assert [record["op"] for record in found] == list(LAYERS)
        assert run.problems(found) == []
        for record in found:
            assert set(PROVIDERS) <= record["us"].keys(), record["skipped"]
            assert all(len(samples) == 1 and min(samples) > 0 for samples in record["us"].values())
            assert all(0 < error["worst_ratio"] <= 1 for error in record["error"].values())
            assert (record["peak_mib"].keys() == record["us"].keys()) != target.interpreted()
            if target.interpreted():
                assert record["skipped"]["torch_tp_async"] == "needs GPUs"
        # Of forward and training, rows are divided; the gradient of the input counts as well.
        rows = [record["error"]["ours"]["num_elements"] for record in found]
        assert rows == [8, 16, 2 * 3]
    path = tmp_path / "layers.jsonl"
    records.start(path, records.environment(2, "0" * 40))
    for record in found:
        records.append(path, record | {"clock_mhz": None, "power_w": None, "peak_mib": {"ours": 12.5}})
    file = records.read(path)
    assert file is not None
    text = tables.document([file])
    for op in LAYERS:
        assert f"### {op}, tiny" in text
    assert "spread over torch_tp" in text
    assert "| ours 12.5 |" in text
    drawn = {path.name for path in plots.draw([file], tmp_path)}
    on = "-cpu" if target.interpreted() else ""
    assert {f"{op.replace('_', '-')}-{found[0]['dtype']}-2{on}-time.svg" for op in LAYERS} <= drawn
    assert ("speedup-over-peers.svg" in drawn) == (not target.interpreted())  # a CPU's times mean nothing


def compiled_ops(rank: int, world_size: int) -> set[str]:
    """Of the graph that torch_tp_async compiles, as if there were symmetric memory; it is not run."""
    symmetric_memory = importlib.import_module("torch.distributed._symmetric_memory")
    found: set[str] = set()

    def note(graph: torch.fx.Graph) -> None:
        found.update(str(node.target) for node in graph.nodes)
        raise RuntimeError("seen")

    (case,) = cases_of("layer_forward", "tiny", world_size, "float32", False)
    with Heap(32 << 20) as heap, contextlib.ExitStack() as stack:
        for where, name in (
            (layers, "_need_gpus"),
            (symmetric_memory, "enable_symm_mem_for_group"),
            (symmetric_memory, "is_symm_mem_enabled_for_group"),
            (torch.distributed, "is_nccl_available"),
        ):
            stack.enter_context(mock.patch.object(where, name))
        inductor = importlib.import_module("torch._inductor.config")
        stack.enter_context(inductor.patch(post_grad_custom_post_pass=note))
        with pytest.raises(Exception, match="seen"):
            layers._torch_tp_async(Problem(case, heap, target.device(rank)))
    return found


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_the_asynchronous_peer_has_both_fused_ops() -> None:
    for found in values(run_ranks(compiled_ops, 2, timeout=100)):
        for op in ("all_gather_matmul", "matmul_reduce_scatter"):
            assert f"symm_mem.fused_{op}.default" in found
