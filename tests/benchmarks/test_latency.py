"""What is timed in microseconds: sizes and calls of collectives alone, copies of weights, truths that see one wrong
element, where ours is behind.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pyrocshmem import Heap, target
from pyrocshmem.benchmarks import check, providers, records, tables
from pyrocshmem.benchmarks.operands import Operands
from pyrocshmem.benchmarks.provider import Unavailable, provided
from pyrocshmem.benchmarks.shapes import OPS, Case, cases_of, graph_calls, tensor_bytes
from pyrocshmem.reference.problems import BY_NAME
from pyrocshmem.reference.timing import COLD_BYTES, cold_copies
from pyrocshmem.stream_k.run.calls import meeting
from tests.benchmarks import made_up
from tests.ranks import run_ranks, values

TIER = 2
pytestmark = pytest.mark.gpu_a_rank("it times beside NCCL")
ALONE = [op.name for op in OPS.values() if op.kind == "collective"]


@pytest.mark.parametrize("op", [op for op in ALONE if "sizes" in OPS[op].sets])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.cpu
def test_sizes(op: str, ranks: int) -> None:
    """1 KiB to 512 MiB in powers of two, all in graphs, of fewer calls where one takes long."""
    cases = cases_of(op, "sizes", ranks, "bfloat16", True)
    sizes = [tensor_bytes(op, case.M, case.N, ranks, case.dtype) for case in cases]
    assert sizes == [1 << i for i in range(10, 30)]
    assert {case.timing for case in cases} == {"graph"}
    assert [graph_calls(case) for case in cases] == [20] * 16 + [5] * 4
    assert op != "reduce_scatter" or all(case.M % ranks == 0 for case in cases)


@pytest.mark.cpu
def test_rows_of_a_norm() -> None:
    """Each rank brings all rows; as bytes, rows of the longest."""
    cases = cases_of("all_reduce_rms_norm", "norm-rows", 4, "bfloat16", True)
    assert [(case.M, case.N) for case in cases[:3]] == [(1, 512), (1, 4096), (1, 8192)]
    assert [(case.M, case.N) for case in cases[3:]] == [(4 << i, 8192) for i in range(6)]
    assert {(case.K, case.timing) for case in cases} == {(0, "graph")}
    sized = cases_of("all_reduce_rms_norm", "1024,65536", 4, "bfloat16", True)
    assert [(case.M, case.N) for case in sized] == [(1, 512), (4, 8192)]
    for op, shapes in (("all_reduce", "norm-rows"), ("all_reduce_rms_norm", "sizes")):
        with pytest.raises(ValueError, match=f"{op} has no shapes '{shapes}'"):
            cases_of(op, shapes, 4, "bfloat16", True)


@pytest.mark.cpu
def test_calls_of_a_graph_read_copies_of_the_weights() -> None:
    """In turn, each as the others, so many that L2 can't hold what lies between two readings of one."""
    cpu = torch.device("cpu")
    operands = Operands(Case("gemm", "decode", 3, 4096, 1024, "float16", 1, "graph"), None, cpu)
    first = [operands.b for _ in range(operands.num_weights)]
    assert [x.data_ptr() for x in first] == [operands.b.data_ptr() for _ in first]
    assert len({x.data_ptr() for x in first}) == len(first) == operands.num_weights
    assert all(torch.equal(x, first[0]) for x in first)
    assert (len(first) - 1) * first[0].numel() * 2 >= COLD_BYTES
    operands.hold_weights()
    assert len({operands.b.data_ptr() for _ in first}) == 1
    eager = Operands(Case("gemm", "decode", 3, 8, 16, "float16", 1, "eager"), None, cpu)
    assert (eager.num_weights, eager.b is eager.b) == (1, True)


def spoilt(rank: int, world_size: int) -> list[str]:
    """Results of the library with one element changed by three roundings on rank 1: what is not seen there."""
    wrong = []
    device = target.device(rank)
    with Heap(1 << 20) as heap:
        for op in (*ALONE, "gemm_all_reduce_rms_norm", "gemm_rms_norm_all_scatter"):
            K = 16 if op.startswith("gemm") else 0
            M = 1 if op in ("all_reduce", "broadcast") else 6
            operands = Operands(Case(op, "tiny", M, 24, K, "float16", world_size, "eager"), heap, device)
            run = providers.prepare("unfused", operands)
            run.reset()
            run.call()
            # A library's bound is wider for sums: that of ours is put to the test, and there on exact results.
            run.library, run.roundings = False, 0
            sample = operands.sampled("result")
            if not sample.truth.moved:
                run.out = sample.truth.value.to(run.result().dtype).view(run.result().shape)
            if check.error_of(run, sample, world_size)["num_bad"]:
                wrong.append(f"{op}: wrong as it is")
            run.out.view(-1)[-1] *= 1 + rank * 2**-8
            if check.error_of(run, sample, world_size)["num_bad"] != rank:
                wrong.append(f"{op}: rank {rank} is not seen")
    return wrong


@pytest.mark.num_ranks(2)
def test_one_wrong_element_is_seen() -> None:
    assert values(run_ranks(spoilt, 2)) == [[], []]


def hurries(rank: int, world_size: int) -> list[int]:
    """Wrong elements of a barrier that nobody waits for, and of one that does its work, where rank 1 is late."""
    device, found = target.device(rank), []
    with Heap(8 << 20) as heap:
        operands = Operands(Case("barrier", "once", 1, 0, 0, "float16", world_size, "eager"), heap, device)
        for run in (provided(meeting(heap, lambda: None)), providers.prepare("ours", operands)):
            run.call()  # the first one plans, for which hosts meet
            heap.synchronize()
            time.sleep(0.5 * rank)
            run.reset()
            run.call()
            found.append(check.error_of(run, operands.sampled("result"), world_size)["num_bad"])
            heap.synchronize()
    return found


@pytest.mark.num_ranks(2)
def test_a_barrier_that_does_not_wait_is_seen() -> None:
    assert values(run_ranks(hurries, 2)) == [[1, 0], [0, 0]]


@pytest.mark.cpu
def test_shapes_of_norms_over_columns() -> None:
    """Rows are as those of other norms, each rank has its share of their columns."""
    whole = [(case.M, case.N) for case in cases_of("all_reduce_rms_norm", "norm-rows", 4, "bfloat16", True)]
    for op in ("rms_norm", "rms_norm_replicated"):
        cases = cases_of(op, "norm-rows", 4, "bfloat16", True)
        assert [(case.M, 4 * case.N) for case in cases] == whole
        assert tables.shape(made_up.case(op, "norm-rows", 8, 2048, 0)) == "8 x 8192"
        sized = cases_of(op, "1024,65536", 4, "bfloat16", True)
        assert [(case.M, case.N) for case in sized] == [(1, 128), (4, 2048)]
    assert BY_NAME["rms_norm"].link_bytes(8, 2048, 0, 4, 2) == 3 * 8 * 4
    assert BY_NAME["rms_norm_replicated"].link_bytes(8, 2048, 0, 4, 2) == 3 * 8 * (2 * 2048 + 4)
    decode = cases_of("gemm_rms_norm_all_scatter", "decode", 4, "bfloat16", True)
    assert {(case.N, case.K) for case in decode} == {(1024, 4096), (3584, 4096), (2048, 8192), (7168, 8192)}


@pytest.mark.cpu
def test_a_barrier_has_no_shapes() -> None:
    (case,) = cases_of("barrier", "once", 4, "bfloat16", True)
    assert (case.M, case.N, case.K, case.timing, graph_calls(case)) == (1, 0, 0, "graph", 20)
    assert tables.shape(made_up.case("barrier", "once", 1, 0, 0)) == "no data"
    for op, shapes, text in (
        ("barrier", "1024", "barrier takes once or tiny"),
        ("all_reduce", "once", "no shapes"),
    ):
        with pytest.raises(ValueError, match=text):
            cases_of(op, shapes, 4, "bfloat16", True)


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["transformer_engine", "flux"])
def test_libraries_without_an_adapter_say_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = Operands(
        Case("all_gather_gemm", "x", 8, 8, 8, "float16", 1, "eager"), None, torch.device("cpu")
    )
    assert name in providers.providers_of("gemm_reduce_scatter")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unavailable, match="not importable"):
        providers.prepare(name, operands)
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__="1.2"))
    with pytest.raises(Unavailable, match=r"no adapter for version 1\.2"):
        providers.prepare(name, operands)


@pytest.mark.cpu
def test_where_ours_is_behind(tmp_path: Path) -> None:
    times = {512: (3, 4, 9), 2048: (5, 4, 3), 1 << 20: (9, 8, 12)}
    cases = [
        made_up.case("all_gather", "sizes", 1, n // 8, 0, ours=ours, unfused=nccl, nccl_window=window)
        for n, (ours, nccl, window) in times.items()
    ]
    file = records.File(tmp_path / "x", made_up.ENVIRONMENT, cases)
    text = tables.document([file])
    assert "Ours is behind\n\n- `unfused` at 2 KiB (0.800), 1 MiB (0.889): reason not known.\n" in text
    assert "- `nccl_window` at 2 KiB (0.600): reason not known.\n" in text


def test_weights_that_are_empty_are_cold() -> None:
    """Those of K = 0, too."""
    copies = cold_copies(torch.empty(0, 8), 20)
    assert len(copies) == 20
    assert {copy.shape for copy in copies} == {(0, 8)}
