"""Placement "blas" of `gemm`: the BLAS multiplies where that is what `gemm` promises, and our own GEMM elsewhere."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pyrocshmem import Heap, stream_k, target
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.workspace import Workspace, local_workspace
from pyrocshmem.errors import WorkspaceBusy
from pyrocshmem.groups import ThreadGroup
from pyrocshmem.stream_k.choice import rules
from pyrocshmem.stream_k.choice.placement import placement_names
from pyrocshmem.stream_k.local_gemm import blas, plan
from tests.stream_k.products import (
    DTYPES,
    LAYOUTS,
    ON_CPU,
    Frame,
    check_product,
    device,
    integers,
    laid_out,
    random,
    same_bits,
    small_config,
)

TIER = 2
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
BLAS = small_config(placement="blas")
OWN = small_config(placement="after")
M, N, K = 72, 48, 40  # lines of 16-bit operands begin at multiples of 16 bytes


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who multiplied, call by call: "blas" or "own"."""
    found: list[str] = []
    real = blas._multiply, plan.GemmPlan.run

    def by_blas(*given: Any) -> None:
        if not found or found[-1] != "blas begun":  # not the call in fp32 that one of 16 bits makes on a CPU
            found.append("blas begun")
            real[0](*given)
            found[-1] = "blas"
        else:
            real[0](*given)

    def own(self: Any, *given: Any) -> None:
        found.append("own")
        real[1](self, *given)

    monkeypatch.setattr(blas, "_multiply", by_blas)
    monkeypatch.setattr(plan.GemmPlan, "run", own)
    return found


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the rules chose the BLAS, wherever this runs."""
    monkeypatch.setattr(plan, "choose", lambda *_, **__: BLAS)


@pytest.fixture(autouse=True)
def _planned_anew() -> Iterator[None]:
    local_workspace(device()).plans.clear()
    yield
    local_workspace(device()).plans.clear()


@contextlib.contextmanager
def switched(backend: Any, name: str, value: Any) -> Iterator[None]:
    """PyTorch's switch of the process, so set inside."""
    before = getattr(backend, name)
    setattr(backend, name, value)
    try:
        yield
    finally:
        setattr(backend, name, before)


def fp32_in(precision: str) -> contextlib.AbstractContextManager[None]:
    """What fp32 products of the BLAS go through: of this target, where oneDNN stands for cuBLAS on a CPU."""
    return switched(
        torch.backends.mkldnn.matmul if ON_CPU else torch.backends.cuda.matmul, "fp32_precision", precision
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [each for each in LAYOUTS if "one" not in each])
def test_asked_for_by_hand(dtype: torch.dtype, layout: str, multiplied: list[str]) -> None:
    """Whatever the layout, with a bias and without."""
    a, b, bias = random(M, K, dtype), random(K, N, dtype), random(1, N, dtype)[0]
    for shift in (None, bias):
        frame = Frame(M, N, dtype)
        out = stream_k.gemm(laid_out(a, layout), laid_out(b, layout), bias=shift, out=frame.out, config=BLAS)
        assert out is frame.out
        check_product(frame.out, a, b, shift)
        frame.check()
        assert stream_k.gemm(a, b, bias=shift, config=BLAS).dtype == dtype
    assert set(multiplied) == {"blas"}


@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 8, 8), (8, 0, 8), (8, 8, 0), (3, 5, 7)], ids=str)
def test_any_size(shape: tuple[int, int, int]) -> None:
    rows, columns, inner = shape
    for dtype in DTYPES:
        a, b = integers(rows, inner, dtype, 1), integers(inner, columns, dtype, 2)
        assert torch.equal(stream_k.gemm(a, b, config=BLAS).double(), a.double() @ b.double())


BIAS32 = torch.zeros(N, dtype=F32)
REFUSED: list[tuple[torch.dtype, dict[str, Any], str]] = [
    (F16, {"activation": "relu"}, r"but activation 'relu' would follow the rounding"),
    (F32, {"activation": "silu", "bias": BIAS32}, r"but activation 'silu' would follow"),
    (
        F16,
        {"bias": BIAS32},
        r"but a bias of torch.float32 would be added after the rounding to torch.float16",
    ),
    (F16, {"out": "padded"}, r"but out has strides \(\d+, 1\), rows one behind another"),
    (F16, {"out": "column"}, r"but out has strides \(1, \d+\), rows"),
    (F32, {"allow_tf32": True}, r"but allow_tf32 is True"),
]


@pytest.mark.parametrize(("dtype", "more", "text"), REFUSED, ids=str)
def test_what_it_can_not_do(
    dtype: torch.dtype,
    more: dict[str, Any],
    text: str,
    multiplied: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By hand a ValueError before anything is launched; left to the rules, our own GEMM does it."""
    a, b, frame = random(M, K, dtype), random(K, N, dtype), Frame(M, N, dtype, more.get("out", "row"))
    more = {**more, "out": frame.out}
    if "bias" in more:
        more["bias"] = more["bias"].to(device())
    with pytest.raises(ValueError, match=r"^Config\.placement is 'blas', " + text + ".*; leave config out"):
        stream_k.gemm(a, b, config=BLAS, **more)
    assert frame.out.isnan().all()
    assert multiplied == []
    monkeypatch.setattr(plan, "choose", lambda *_, **__: BLAS)
    stream_k.gemm(a, b, **more)
    assert multiplied == ["own"]
    if not more.get("allow_tf32"):
        check_product(frame.out, a, b, more.get("bias"), more.get("activation", "none"))
    frame.check()


@pytest.mark.parametrize("placement", [*sorted({*placement_names()} - {*placement_names("gemm")})])
def test_places_of_other_ops(placement: str) -> None:
    """A GEMM alone has none of them, and says which it has; nor has that with a norm the BLAS."""
    a, b = random(M, K, F16), random(K, N, F16)
    config = small_config(placement=placement)
    with pytest.raises(
        ValueError, match=rf"^Config\.placement is '{placement}', gemm has blas, after; start from"
    ):
        stream_k.gemm(a, b, config=config)


@pytest.mark.num_ranks(1)
def test_of_one_rank_every_place_of_the_op_is_the_same() -> None:
    a, b = integers(M, K, F16, 1), integers(K, N, F16, 2)
    with Heap(16 << 20, ThreadGroup.create(1)[0]) as heap:
        for op in ("gemm_all_reduce", "all_gather_gemm"):
            for placement in placement_names(op):
                config = small_config(placement=placement, split="none")
                out = getattr(stream_k, op)(a, b, group=heap, config=config)
                assert torch.equal(out.double(), a.double() @ b.double())
        for placement in ("blas", "unfused", "beside"):
            with pytest.raises(ValueError, match=rf"is '{placement}', gemm_rms_norm_all_scatter has after"):
                stream_k.gemm_rms_norm_all_scatter(
                    a, b, b[0].contiguous(), 1e-5, group=heap, config=small_config(placement=placement)
                )


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("precision", ["tf32", "ieee", "none"])
def test_fp32_is_ieee_whatever_the_switch_says(
    precision: str, multiplied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read at each call, and not written; what it may want was compiled with the plan."""
    compiled: list[object] = []
    real = Launch.compile

    def counted(*given: Any) -> Any:
        compiled.append(given)
        return real(*given)

    monkeypatch.setattr(Launch, "compile", counted)
    a, b = random(M, K, F32), random(K, N, F32)
    for _ in range(2):
        check_product(stream_k.gemm(a, b), a, b)
    assert multiplied == ["blas"] * 2
    assert len(compiled) == 1
    with fp32_in(precision):
        for _ in range(2):
            check_product(stream_k.gemm(a, b), a, b)
        assert torch._C._get_fp32_precision_getter("mkldnn" if ON_CPU else "cuda", "matmul") == precision
    check_product(stream_k.gemm(a, b), a, b)
    assert multiplied[2:4] == ["own" if precision == "tf32" else "blas"] * 2
    assert multiplied[4:] == ["blas"]
    assert len(compiled) == 1


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_the_older_switch(precision: str, multiplied: list[str]) -> None:
    """`torch.set_float32_matmul_precision`, and the one of all backends."""
    a, b = random(M, K, F32), random(K, N, F32)
    torch.set_float32_matmul_precision(precision)
    try:
        stream_k.gemm(a, b)
    finally:
        torch.set_float32_matmul_precision("highest")
    with switched(
        torch.backends.mkldnn.matmul if ON_CPU else torch.backends.cuda.matmul, "fp32_precision", "none"
    ):
        stream_k.gemm(a, b)
        with switched(torch.backends, "fp32_precision", "tf32"):
            stream_k.gemm(a, b)
    assert multiplied == ["own", "blas", "own"]


@pytest.mark.usefixtures("chosen")
def test_fp16_is_summed_in_fp32(multiplied: list[str]) -> None:
    a, b = random(M, K, F16), random(K, N, F16)
    for accumulates in (False, True, False):
        with switched(torch.backends.cuda.matmul, "allow_fp16_accumulation", accumulates):
            check_product(stream_k.gemm(a, b), a, b)
    assert multiplied == ["blas", "own", "blas"]


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("dtype", [F16, F32] if ON_CPU else DTYPES, ids=str)
def test_were_parts_rounded(
    dtype: torch.dtype, multiplied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other value of ROUNDS_PARTS: 16-bit operands are ours while PyTorch lets the BLAS round parts of a sum."""
    monkeypatch.setattr(blas, "ROUNDS_PARTS", True)
    a, b = random(M, K, dtype), random(K, N, dtype)
    stream_k.gemm(a, b)
    name = (
        "allow_fp16_reduced_precision_reduction" if dtype == F16 else "allow_bf16_reduced_precision_reduction"
    )
    with switched(torch.backends.cuda.matmul, name, False):
        stream_k.gemm(a, b)
    assert multiplied == ["blas" if dtype == F32 else "own", "blas"]


@pytest.mark.usefixtures("chosen")
def test_autocast_has_no_part_in_it(multiplied: list[str]) -> None:
    a, b, bias = random(M, K, F32), random(K, N, F32), random(1, N, F32)[0]
    with torch.autocast(device().type, BF16):
        for shift in (None, bias):
            check_product(stream_k.gemm(a, b, bias=shift), a, b, shift)
    assert multiplied == ["blas"] * 2


@pytest.mark.usefixtures("chosen")
def test_tensors_of_inference_mode(multiplied: list[str]) -> None:
    """Written outside of it, too, as our own kernels write them."""
    with torch.inference_mode():
        a, b = random(M, K, F16), random(K, N, F16)
        out = torch.full((M, N), math.nan, dtype=F16, device=device())
        check_product(stream_k.gemm(a, b, out=out), a, b)
    check_product(stream_k.gemm(a, b, out=out), a, b)
    with torch.inference_mode():
        check_product(stream_k.gemm(a, b), a, b)
    assert multiplied == ["blas"] * 3


@pytest.mark.usefixtures("chosen")
def test_gradients(multiplied: list[str]) -> None:
    a, b = (x.requires_grad_() for x in (integers(M, K, F32, 1), integers(K, N, F32, 2)))
    bias = integers(1, N, F32, 3)[0].requires_grad_()
    out = stream_k.gemm(a, b, bias=bias)
    grad = integers(M, N, F32, 4)
    out.backward(grad)
    assert torch.equal(out, a @ b + bias)
    assert torch.equal(a.grad, grad @ b.t())
    assert torch.equal(b.grad, a.t() @ grad)
    assert torch.equal(bias.grad, grad.sum(0))
    assert multiplied == ["blas"] * 3


@pytest.mark.usefixtures("chosen")
def test_the_same_bits_each_time() -> None:
    for dtype in DTYPES:
        a, b = random(M, K, dtype), random(K, N, dtype)
        first = stream_k.gemm(a, b)
        assert all(same_bits(first, stream_k.gemm(a, b)) for _ in range(3))


@pytest.mark.usefixtures("chosen")
def test_calls_need_no_turn(multiplied: list[str]) -> None:
    """By the BLAS they hold nothing that others use; on a workspace that the caller gives calls keep their order."""
    a, b = random(M, K, F16), random(K, N, F16)
    mine = Workspace(device=device())
    stream_k.gemm(a, b)
    stream_k.gemm(a, b, workspace=mine)
    with local_workspace(device()).begin(None), mine.begin(None):
        stream_k.gemm(a, b)
        with pytest.raises(WorkspaceBusy):
            stream_k.gemm(a, b, workspace=mine)
    assert multiplied == ["blas"] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_captured(dtype: torch.dtype) -> None:
    """A graph of a call by the BLAS multiplies what is there when it is replayed."""
    a, b, bias = random(M, K, dtype), random(K, N, dtype), random(1, N, dtype)[0]
    frame = Frame(M, N, dtype)
    stream_k.gemm(a, b, bias=bias, out=frame.out, config=BLAS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream_k.gemm(a, b, bias=bias, out=frame.out, config=BLAS)
    for _ in range(3):
        a.copy_(random(M, K, dtype))
        frame.poison()
        graph.replay()
        check_product(frame.out, a, b, bias)
    frame.check()


@pytest.mark.gpu
def test_what_a_gpu_is_given(multiplied: list[str]) -> None:
    """Without a configuration: the BLAS where it is the faster one."""
    for dtype, rows, columns, inner, expected in (
        (BF16, 64, N, 2056, "own"),
        (BF16, 72, N, 2048, "own"),
        (BF16, 72, N, 2056, "blas"),
        (BF16, 72, N + 1, 2056, "own"),
        (F16, 72, N, 2056, "blas"),
        (F32, 1, N + 1, K, "blas"),
    ):
        multiplied.clear()
        a, b = random(rows, inner, dtype), random(inner, columns, dtype)
        check_product(stream_k.gemm(a, b), a, b)
        assert multiplied == [expected], (dtype, rows, columns, inner)


@pytest.mark.gpu
def test_deterministic_algorithms() -> None:
    """PyTorch once refused products by cuBLAS under this switch."""
    torch.use_deterministic_algorithms(True)
    try:
        for dtype in DTYPES:
            a, b = random(M, K, dtype), random(K, N, dtype)
            check_product(stream_k.gemm(a, b, config=BLAS), a, b)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.cpu
@pytest.mark.parametrize(("of", "refused"), [(F16, False), (F32, False), (BF16, True)], ids=str)
def test_results_of_another_type(of: torch.dtype, refused: bool) -> None:
    """cuBLAS stores what 16-bit operands have, or fp32; partial sums may be asked for in the other 16-bit type."""
    a, b = random(M, K, F16), random(K, N, F16)
    reason = blas.why_not(a, b, None, "none", torch.empty(M, N, dtype=of), False)
    assert ("none that the BLAS has" in reason) == refused


CHOICES = [
    (BF16, (64, 4096, 4096), {}, "after"),
    (BF16, (65, 4096, 4096), {}, "blas"),
    (F16, (8192, 8192, 3584), {}, "blas"),
    # Few tiles, and a short K: 33 tiles of 128 x 128 on 132 SMs.
    (BF16, (128, 128 * 33, 2048), {}, "after"),
    (BF16, (128, 128 * 33, 2049), {}, "blas"),
    (BF16, (128, 128 * 33 + 1, 2048), {}, "blas"),
    (F16, (8192, 8192, 256), {}, "after"),
    (F16, (8192, 8192, 257), {}, "blas"),
    (BF16, (0, 4096, 4096), {}, "after"),
    (F32, (1, 4096, 4096), {}, "blas"),
    (F32, (8192, 1, 1), {}, "blas"),
    (F32, (8192, 4096, 4096), {"allow_tf32": True}, "after"),
    (BF16, (8192, 4096, 4096), {"allow_tf32": True}, "blas"),
    (BF16, (65, 4096, 4096), {"placement": "after"}, "after"),
    (BF16, (64, 4096, 4096), {"placement": "blas"}, "blas"),
]


@pytest.mark.cpu
@pytest.mark.parametrize(("dtype", "shape", "more", "expected"), CHOICES, ids=str)
def test_choices_of_an_h200(
    dtype: torch.dtype, shape: tuple[int, int, int], more: dict[str, Any], expected: str, h200: torch.device
) -> None:
    """By either placement the same tile: our own GEMM's, where the BLAS can't multiply."""
    call = ("gemm", *shape, dtype, 1, h200)
    found = stream_k.choose(*call, **more)
    assert found.placement == expected
    tf32 = {name: value for name, value in more.items() if name == "allow_tf32"}
    assert dataclasses.replace(found, placement="after") == stream_k.choose(*call, placement="after", **tf32)
    assert f"placement {expected}: " in str(stream_k.explain(*call, **more))
    assert rules.cost_model(*call, **more) == found


@pytest.mark.cpu
@pytest.mark.parametrize("backend", ["hip", "host"])
def test_choices_elsewhere(backend: str, h200: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was measured on sm_90 alone."""
    monkeypatch.setattr(target, "backend", lambda: backend)
    for dtype in DTYPES:
        found = stream_k.explain("gemm", 4096, 4096, 4096, dtype, 1, h200)
        assert found.config.placement == "after"
        assert "the BLAS was measured on sm_90 alone" in found.line()


def _between(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(rows, columns + 1, dtype=dtype)[:, :columns]


@pytest.mark.cpu
def test_where_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """16-bit lines that begin between multiples of 16 bytes, on NVIDIA: of A, B or the result."""
    new: Callable[..., torch.Tensor] = torch.empty
    a, b, out = new(M, K, dtype=BF16), new(N, K, dtype=BF16).t(), new(M, N, dtype=BF16)
    cases = [
        ((a, b, out), False),
        ((_between(M, K, BF16), b, out), True),
        ((a, _between(N, K, BF16).t(), out), True),
        ((a, b, _between(M, N, BF16)), True),
        ((a, b[:, : N - 1], new(M, N - 1, dtype=BF16)), True),
        ((a[1:], b, out[1:]), False),
        ((a, b, new(M, N, dtype=F32)), False),
        ((_between(M, K, F32), _between(N, K, F32).t(), _between(M, N, F32)), False),
    ]
    for backend in ("cuda", "hip"):
        monkeypatch.setattr(target, "backend", lambda backend=backend: backend)
        assert [blas.is_slow(*given) for given, _ in cases] == [
            slow and backend == "cuda" for _, slow in cases
        ]


@pytest.mark.cpu
def test_operands_that_are_copied_first_are_ours(
    multiplied: list[str], chosen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the caller asks for the BLAS by name."""
    monkeypatch.setattr(plan, "is_slow", lambda *_: True)
    a, b = random(M, K, F16), random(K, N, F16)
    check_product(stream_k.gemm(a, b), a, b)
    check_product(stream_k.gemm(a, b, config=BLAS), a, b)
    assert multiplied == ["own", "blas"]


@pytest.mark.cpu
def test_graphs_need_memory_that_outlives_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch allocates what the library adds up parts in when the first product is captured."""
    a, b = integers(M, K, BF16, 1), integers(K, N, BF16, 2)
    made = plan.plan_gemm(a, b, BLAS, False, None, "none", a.new_empty(M, N), local_workspace(a.device))
    assert isinstance(made, blas.BlasPlan)
    assert made.replayable
    made._device = torch.device("cuda")
    for backend, replayable in (("native", True), ("cudaMallocAsync", False)):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda backend=backend: backend)
        assert made.replayable == replayable
