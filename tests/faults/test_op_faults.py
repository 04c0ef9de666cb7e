"""Faults 5, 6, 9, 13, 16, 18, 19, 20 and 21 at the fused ops: mistakes are refused before any launch, on all ranks,
and the next call works.

A body makes wrong calls one after another on one heap; it returns what each raised, and whether the output kept
its poison. After every one of them a right call is made and judged.
"""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyrocshmem import CallMismatch, Heap, HeapOutOfMemory, collectives, stream_k, target
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.errors import ShmemError
from pyrocshmem.reference.problems import PROBLEMS
from pyrocshmem.stream_k.choice.placement import placement_names
from tests.fused.cases import HEAP_BYTES, Case, Operands, call, judge, run_case
from tests.ranks import run_ranks, values
from tests.stopwatch import within
from tests.stream_k.products import ON_CPU, check_product, device, random, small_config

TIER = 2
TIMEOUT_S = 60.0
PROMPT_S = 5.0  # half the time after which a wait for a peer gives up
FP32 = torch.float32
OPS = ("all_reduce", "all_scatter")
M, N, K = 20, 24, 16


def outcome(body: Callable[[], Any]) -> str:
    """Class and text of what `body` raises, "" if nothing. It must not have waited for anyone."""
    said = ""
    with within(PROMPT_S):
        try:
            body()
        except (ShmemError, ValueError, TypeError) as error:
            said = f"{type(error).__name__}: {error}"
    return said


def op_of(name: str) -> Callable[..., Any]:
    return stream_k.gemm_all_reduce if name == "all_reduce" else stream_k.gemm_all_scatter


def goes_on(heap: Heap, op: str, seed: int, workspace: Workspace | None = None) -> None:
    error = run_case(Case(op, M, N, K, FP32, "symmetric"), heap, seed, workspace).error
    assert not error, error


def wrong_calls(rank: int, world_size: int, op: str) -> dict[str, str]:
    """Faults 16, 18, 21: the caller's mistakes, the same on all ranks."""
    found = {}
    with Heap(HEAP_BYTES) as heap, Heap(1 << 20) as other:
        a, b = random(M, K, FP32, 1), random(K, N, FP32, 2)
        columns = N * (world_size if op == "all_scatter" else 1)
        out = torch.full((M, columns), float("nan"), device=device())
        foreign = Workspace(other)
        calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
            "mixed": ((a, b.half()), {}),
            "float64": ((a.double(), b.double()), {}),
            "inner": ((a, b[1:]), {}),
            "shape of out": ((a, b), {"out": out[1:]}),
            "dtype of out": ((a, b), {"out": out.half()}),
            "overlap of out": ((a, b), {"out": out[:1].expand(M, columns)}),
            "bias": ((a, b), {"bias": b[0, 1:]}),
            "activation": ((a, b), {"activation": "swish"}),
            "workspace": ((a, b), {"workspace": foreign}),
            "no workspace": ((a, b), {"workspace": 3}),
            "group": ((a, b), {"group": "world"}),
            "device": ((a.to("meta"), b.to("meta")), {"out": None}),
        }
        for seed, (name, (operands, more)) in enumerate(calls.items()):
            options = {"group": heap, "out": out, **more}
            found[name] = outcome(lambda o=operands, m=options: op_of(op)(*o, **m))  # type: ignore[misc]
            assert out.isnan().all(), name
            goes_on(heap, op, seed)
    return found


ALLOWED = "allowed are torch.float16, torch.bfloat16, torch.float32"
EXPECTED = {
    "mixed": f"TypeError: a is torch.float32 and b is torch.float16; {ALLOWED}, one for both",
    "float64": f"TypeError: a has dtype torch.float64, {ALLOWED}",
    "inner": "ValueError: a is (20, 16) and b is (15, 24): their inner sizes 16 and 15 differ",
    "shape of out": "ValueError: out has shape (19, ",
    "dtype of out": "TypeError: out has dtype torch.float16, allowed is torch.float32, ",
    "overlap of out": "ValueError: out has strides",
    "bias": "ValueError: bias has shape (23,)",
    "activation": "ValueError: activation is 'swish', allowed are none, relu, gelu, silu",
    "workspace": "ValueError: the workspace belongs to Heap(",
    "no workspace": "TypeError: workspace is a int, a stream_k.Workspace or None is needed",
    "group": "TypeError: group is a str, allowed: None, ProcessGroup",
    "device": "ValueError: a is on meta, the heap of this rank on",
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.num_ranks(2)
def test_wrong_calls(op: str) -> None:
    for found in values(run_ranks(wrong_calls, 2, op, timeout=TIMEOUT_S)):
        assert {name: found[name].startswith(text) for name, text in EXPECTED.items()} == dict.fromkeys(
            EXPECTED, True
        ), found


def small_places(rank: int, world_size: int, op: str) -> dict[str, str]:
    """Faults 9 and 14: a workspace, or a heap, that is too small for the call."""
    found = {}
    case = Case(op, 70, 80, K, FP32, config=(("placement", "inside"),))
    with Heap(HEAP_BYTES) as heap:
        operands = Operands(case, rank, world_size, 1)
        out = torch.full((70, case.columns(world_size)), float("nan"), device=device())
        tight = Workspace(heap, nbytes=4096)
        found["workspace"] = outcome(lambda: call(case, heap, operands, out, tight))
        assert out.isnan().all()
        goes_on(heap, op, 2)
        goes_on(heap, op, 3, Workspace(heap, nbytes=1 << 20))
    with Heap(32 << 10) as heap:
        workspace = Workspace(heap)
        found["heap"] = outcome(lambda: call(case, heap, operands, out, workspace))
        assert out.isnan().all()
        assert heap.vote("both are still here") is not None
    return found


@pytest.mark.parametrize("op", OPS)
@pytest.mark.num_ranks(2)
def test_places_that_are_too_small(op: str) -> None:
    for found in values(run_ranks(small_places, 2, op, timeout=TIMEOUT_S)):
        assert found["workspace"].startswith("ValueError: the workspace has 4096 bytes, this call needs ")
        assert found["heap"].startswith(f"{HeapOutOfMemory.__name__}: ")


def different_calls(rank: int, world_size: int) -> dict[str, str]:
    """Faults 5 and 6: the ranks disagree about shape, dtype, op, order, configuration, or where the output lies."""
    found = {}
    with Heap(HEAP_BYTES) as heap:
        out = torch.full((M, N), float("nan"), device=device())
        a, b = random(M, K, FP32, 1), random(K, N, FP32, 2)
        wide = random(K, N + 8, FP32, 3)
        symmetric = heap.zeros(2, M, N)
        config = small_config(split="none", algorithm=("one_shot", "two_shot")[rank % 2])
        reduce, scatter = stream_k.gemm_all_reduce, stream_k.gemm_all_scatter
        first = rank == 0
        calls: dict[str, Callable[[], Any]] = {
            "shape": lambda: reduce(a, b if first else wide, group=heap, out=out if first else None),
            "dtype": lambda: reduce(*((a, b) if first else (a.half(), b.half())), group=heap),
            "op": lambda: reduce(a, b, group=heap, out=out) if first else scatter(a, b, group=heap),
            "configuration": lambda: reduce(a, b, group=heap, out=out, config=config),
            "activation": lambda: reduce(a, b, group=heap, activation="relu" if first else "silu"),
            "squares": lambda: reduce(a, b, group=heap, squared_partials=first),
            "place": lambda: reduce(a, b, group=heap, out=symmetric[rank % 2]),
        }
        for seed, (name, body) in enumerate(calls.items()):
            found[name] = outcome(body)
            assert out.isnan().all(), name
            assert not symmetric.any()
            goes_on(heap, OPS[seed % 2], seed)
    return found


@pytest.mark.num_ranks(2)
def test_ranks_that_disagree() -> None:
    for found in values(run_ranks(different_calls, 2, timeout=TIMEOUT_S)):
        for name, text in found.items():
            assert text.startswith(f"{CallMismatch.__name__}: "), (name, text)
            assert "rank 0: gemm_all_reduce(20 x 24 torch.float32" in text
            assert "rank 1: gemm_all_" in text


def special_values(rank: int, world_size: int) -> list[str]:
    """Fault 20: NaN, infinities, -0.0 and denormals in the share of the last rank alone; the last two once more in rows
    of zeros, whose results are zeros and denormals."""
    found = []
    tiny = torch.finfo(FP32).smallest_normal / 4
    marks = (float("nan"), float("inf"), -float("inf"), -0.0, tiny, -0.0, tiny)
    with Heap(HEAP_BYTES) as heap:
        for op, problem in PROBLEMS.items():
            for placement in placement_names(problem.op):
                case = Case(op, M, N, K, FP32, config=(("placement", placement),))
                operands = Operands(case, rank, world_size, 5)
                # Shares are views of the whole, which every rank knows; only the last rank's are marked.
                a, b = problem.shares(operands.full_a, operands.full_b, world_size - 1, world_size)
                place = a if problem.a_cut else b.t()
                (operands.full_a if problem.sums else place)[5:7] = 0.0
                for row, mark in enumerate(marks):
                    place[row, 2] = mark
                out = call(case, heap, operands)
                rows, columns = operands.part
                expected = (operands.full_a @ operands.full_b)[rows, columns]
                try:
                    assert torch.equal(out.isnan(), expected.isnan())
                    assert torch.equal(out.isinf() * out.sign(), expected.isinf() * expected.sign())
                    zeros = expected == 0
                    assert torch.equal(out == 0, zeros), "denormals"
                    assert torch.equal(out.signbit() & zeros, expected.signbit() & zeros), "signs of zeros"
                    check_product(out, *operands.factors()[:2], baseline=expected)
                except AssertionError as error:
                    found.append(f"{case}: {error}")
                heap.vote("next")
    return found


@pytest.mark.num_ranks(2)
def test_special_values_on_one_rank() -> None:
    assert values(run_ranks(special_values, 2, timeout=TIMEOUT_S)) == [[], []]


# -- fault 13: more programs than fit on the device --


def pretend_multiprocessors(patch: pytest.MonkeyPatch, number: int) -> None:
    """From now on every choice of a grid takes this device for one of `number` multiprocessors."""
    target.num_sms.cache_clear()
    patch.setattr(target, "CPU_PROGRAMS", number)
    if not ON_CPU:
        real = torch.cuda.get_device_properties(device())
        facts = {name: getattr(real, name) for name in dir(real) if not name.startswith("_")}
        fake = types.SimpleNamespace(**{**facts, "multi_processor_count": number})
        patch.setattr(torch.cuda, "get_device_properties", lambda *which: fake)
    assert target.num_sms(device()) == number


def on_other_devices(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """(what was wrong, what was refused) on devices of 78, 132 and 304 multiprocessors, whatever this one has."""
    wrong, refused = [], []
    rows, columns = (60, 50) if ON_CPU else (1500, 1000)
    with Heap(4 * HEAP_BYTES) as heap:
        for number in (78, 132, 304):
            with pytest.MonkeyPatch.context() as patch:
                pretend_multiprocessors(patch, number)
                for op, placement in (("all_reduce", "beside"), ("all_scatter", "own_stream")):
                    case = Case(op, rows, columns, K, FP32).with_config(placement=placement)
                    wrong.append(run_case(case, heap, number).error)
                too_many = Case("all_reduce", M, N, K, FP32).with_config(
                    placement="own_stream", num_programs=number
                )
                refused.append(outcome(lambda case=too_many: run_case(case, heap, 1)))  # type: ignore[misc]
    return [error for error in wrong if error], refused


@pytest.mark.num_ranks(2)
def test_more_programs_than_are_resident() -> None:
    for wrong, refused in values(run_ranks(on_other_devices, 2, timeout=TIMEOUT_S)):
        assert wrong == []
        for text, number in zip(refused, (78, 132, 304), strict=True):
            assert text.startswith(f"ValueError: Config.num_programs is {number} on {number} multiprocessors")


# -- fault 19: offsets beyond 2^31 --


@pytest.mark.num_ranks(1)
def test_strides_beyond_2_31() -> None:
    """Two rows 2^31 elements apart: an offset kept in 32 bits would be negative. Pages between stay untouched."""
    far = 2**31 + 8
    buffer = torch.empty(far + 64, dtype=torch.float16, device=device())
    a = buffer.as_strided((2, 48), (far, 1)).copy_(random(2, 48, torch.float16))
    b = random(48, 40, torch.float16)
    for x in (a, buffer.as_strided((2, 24), (far, 2))):
        check_product(stream_k.gemm(x, b[: x.shape[1]], config=small_config()), x, b[: x.shape[1]])
    out = buffer.as_strided((2, 40), (far, 1))
    left = random(2, 48, torch.float16)
    stream_k.gemm(left, b, out=out, config=small_config())
    check_product(out, left, b)


@pytest.mark.gpu
def test_an_output_beyond_2_31() -> None:
    """M x N of more than 2^31 elements; the last rows and columns are looked at."""
    rows, columns, depth = 65600, 32800, 64
    a, b = random(rows, depth, torch.bfloat16), random(depth, columns, torch.bfloat16)
    out = stream_k.gemm(a, b)
    assert out.numel() > 2**31
    check_product(out[-300:], a[-300:], b)
    check_product(out[:, -300:].contiguous(), a, b[:, -300:])


def far_places(rank: int, world_size: int) -> list[float]:
    """On a heap whose first 2 GiB are taken: sums of each peer's tensor, and of the all-reduce of these. Then products
    whose operands, workspace and result lie there."""
    with Heap(2**31 + 16 * HEAP_BYTES) as heap:
        heap.empty(2**31, dtype=torch.uint8)
        x, workspace = heap.full((1000,), 1.0 + rank), Workspace(heap)
        assert heap.offset(x) >= 2**31
        heap.barrier()
        found = [float(heap.peer_view(x, peer).sum()) for peer in range(world_size)]
        heap.barrier()
        found.append(float(collectives.all_reduce(x, group=heap, out=x, workspace=workspace).sum()))
        for op, placement in (
            ("all_reduce", "inside"),
            ("all_scatter", "inside"),
            ("all_reduce", "messages"),
        ):
            case = Case(op, M, N, K, FP32, config=(("placement", placement),))
            operands = Operands(case, rank, world_size, 3)
            operands.a, operands.b = (
                heap.empty(*part.shape).copy_(part) for part in (operands.a, operands.b)
            )
            out = heap.full(operands.shape, float("nan"))
            call(case, heap, operands, out, workspace)
            heap.synchronize()
            judge(case, operands, out, world_size)
        heap.barrier()
        return found


@pytest.mark.gpu
@pytest.mark.num_ranks(2)
def test_places_beyond_2_31_of_a_heap() -> None:
    assert values(run_ranks(far_places, 2, timeout=TIMEOUT_S)) == [[1000.0, 2000.0, 3000.0]] * 2
