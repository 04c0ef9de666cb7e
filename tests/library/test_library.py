"""The ops in `torch.library`: gradients against the whole model in float64, opcheck, torch.compile, order of calls."""

import pytest
import torch

from pyrocshmem import stream_k
from pyrocshmem.calls import operators
from tests.library import bodies, checkpoints, finite_differences, tracing, unused
from tests.library.bodies import Case
from tests.ranks import run_ranks, values
from tests.stream_k.products import random

TIER = 3
TIMEOUT_S = 110.0
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_scatter")
UNSAVED = (("save_gathered", False),)


def cases() -> list[Case]:
    """For two ranks: shares that differ by one, ranks that have none, each dtype, each factor alone."""
    made = [
        case
        for op in OPS
        for case in (
            Case(op, 37, 30, 25, FP32, bias=FP32),
            Case(op, 37, 30, 25, FP16, bias=FP32, activation="gelu"),
            Case(op, 20, 12, 17, BF16, bias=BF16, activation="silu"),
            Case(op, 20, 12, 17, FP16, activation="relu", options=(("partial_dtype", FP32),)),
            Case(op, 1, 2, 1, FP32, bias=FP32),
            Case(op, 0, 2, 3, FP32, bias=FP32),
            Case(op, 3, 2, 0, FP32, bias=FP32),
        )
    ]
    alone = [
        Case(op, 9, 6, 7, FP32, bias=FP32, needs=(factor,))
        for op in ("all_gather", "reduce_scatter")
        for factor in bodies.FACTORS
    ]
    return [
        *made,
        *alone,
        Case("all_gather", 37, 30, 25, FP16, bias=FP16, options=UNSAVED),
        Case("all_gather", 4, 2, 0, FP32, bias=FP32),
        Case("all_gather", 5, 1, 4, FP32, bias=FP32, options=UNSAVED),
        Case("all_gather", 38, 31, 25, FP32, bias=FP32),
        Case("gemm", 37, 30, 25, FP16, bias=FP32, activation="gelu"),
        Case("gemm", 20, 12, 17, BF16, bias=BF16),
    ]


@pytest.mark.num_ranks(2)
def test_gradients_are_those_of_the_whole_model() -> None:
    """Twice a gradient must not pass: the mistake of replicated tensors is a factor R."""
    assert values(run_ranks(bodies.gradients, 2, cases(), timeout=TIMEOUT_S)) == [[], []]


@pytest.mark.num_ranks(1)
def test_gradients_on_one_rank() -> None:
    made = [Case(op, 17, 12, 9, FP32, bias=FP32, activation="silu") for op in OPS]
    assert values(run_ranks(bodies.gradients, 1, made, timeout=TIMEOUT_S)) == [[]]


@pytest.mark.num_ranks(2)
def test_duals_and_the_eager_way() -> None:
    """What watches the dispatcher sees each call, and the duals of its backward; where nothing does, nothing goes
    through it, and the bits are the same."""
    for found in values(run_ranks(bodies.ways, 2, timeout=TIMEOUT_S)):
        for number, (case, duals) in enumerate(bodies.BACKWARD.items()):
            name = case.function.__name__
            assert found[number] == ([name, name], [name], duals, [], False), case


@pytest.mark.num_ranks(2)
def test_rows_are_there_when_nothing_multiplies_them() -> None:
    assert values(run_ranks(bodies.late_rows, 2, True, timeout=TIMEOUT_S)) == [0, 0]


@pytest.mark.num_ranks(2)
@pytest.mark.cpu
def test_rows_that_nobody_waits_for_are_caught() -> None:
    """The control of the test above."""
    wrong = values(run_ranks(bodies.late_rows, 2, False, timeout=TIMEOUT_S))
    assert wrong[0] > 0


@pytest.mark.num_ranks(2)
def test_traced() -> None:
    """opcheck; one graph for each kind of group; compiled calls stay, in their order, and don't without effects."""
    made = ["gemm_all_reduce", "gemm_reduce_scatter", "gemm_all_reduce"]
    for found in values(run_ranks(tracing.traced, 2, timeout=TIMEOUT_S)):
        assert found["opcheck"] == []
        assert found["groups"] == []
        assert found["compiled"] == []
        assert found["calls"] == [made, made]
        assert all(len(calls) < len(made) for calls in found["control"])


@pytest.mark.num_ranks(2)
def test_norms_traced() -> None:
    """The ops with RMSNorm: opcheck, duals, one node each of a graph, where all their calls stay."""
    assert values(run_ranks(tracing.norms, 2, timeout=TIMEOUT_S)) == [([], [3, 3, 3])] * 2


@pytest.mark.num_ranks(2)
@pytest.mark.cpu
def test_checkpoints_and_compile() -> None:
    """The ways around what PyTorch can't compile: a plain checkpoint of calls that communicate."""
    assert values(run_ranks(checkpoints.body, 2, timeout=TIMEOUT_S)) == [[], []]


@pytest.mark.gpu
@pytest.mark.num_ranks(2)
def test_a_step_in_a_graph() -> None:
    assert values(run_ranks(tracing.captured, 2, timeout=TIMEOUT_S)) == [[], []]


@pytest.mark.num_ranks(1)
def test_gradcheck() -> None:
    """Finite differences of the kernel itself: products are linear in each factor, so a step of a quarter is exact up
    to fp32's rounding, of sums of at most five products of numbers of a few units: 1e-5. Then the second derivative."""
    a, b, bias = (x.requires_grad_() for x in (random(3, 5, FP32), random(5, 4, FP32), random(1, 4, FP32)[0]))

    def product(*factors: torch.Tensor) -> torch.Tensor:
        return stream_k.gemm(factors[0], factors[1], bias=factors[2])

    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradcheck(product, (a, b, bias), eps=0.25, atol=1e-5, rtol=0)
    bent = stream_k.gemm(a, b, bias=bias, activation="gelu")
    (grad,) = torch.autograd.grad(bent.sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), b)
    a64, b64, bias64 = (x.detach().double().requires_grad_() for x in (a, b, bias))
    (grad64,) = torch.autograd.grad(
        torch.nn.functional.gelu(a64 @ b64 + bias64).sum(), a64, create_graph=True
    )
    torch.testing.assert_close(
        second.double(), torch.autograd.grad(grad64.square().sum(), b64)[0], rtol=1e-3, atol=1e-4
    )


@pytest.mark.num_ranks(2)
@pytest.mark.cpu
def test_finite_differences() -> None:
    """Of every op that can be differentiated, in random directions of all its operands."""
    found = values(run_ranks(finite_differences.body, 2, timeout=TIMEOUT_S))
    assert [
        each for name in found[0] for each in finite_differences.errors(name, [x[name] for x in found])
    ] == []


@pytest.mark.num_ranks(2)
@pytest.mark.cpu
def test_a_rank_without_a_gradient() -> None:
    """Of any result that one rank does not use: it takes part in the backward pass, as with zeros."""
    assert values(run_ranks(unused.body, 2, timeout=TIMEOUT_S)) == [[], []]


@pytest.mark.num_ranks(1)
def test_what_has_no_gradient() -> None:
    """ValueError before anything is launched; the same call goes without a gradient."""
    a, b = random(4, 5, FP32).requires_grad_(), random(5, 6, FP32)
    out = torch.full((4, 6), float("nan"), device=a.device)
    config = stream_k.choose("gemm", 4, 6, 5, FP32, 1, a.device)
    for more in ({"out": out}, {"config": config}):
        (name,) = more
        with pytest.raises(ValueError, match=f"takes no {name} where a gradient"):
            stream_k.gemm(a, b, **more)
        assert out.isnan().all()
    with torch.no_grad():
        assert stream_k.gemm(a, b, config=config, out=out) is out
    with pytest.raises(ValueError, match="squared_partials"):
        stream_k.gemm_all_reduce(a, b, squared_partials=True)
    with pytest.raises(ValueError, match="has no gradient with activation 'gelu'"):
        torch.ops.stream_k.gemm(a, b, None, "gelu", False, "")
    with pytest.raises(ValueError, match="swish"):
        stream_k.gemm(a, b, activation="swish")
    with pytest.raises(TypeError, match="float64"):
        stream_k.gemm(a.double(), b.double())
    with pytest.raises(ValueError, match="partial_dtype"):
        stream_k.gemm_all_reduce(a.detach(), b, config=config, partial_dtype=FP16)
    with pytest.raises(ValueError, match="nothing of that name lives"):
        torch.ops.stream_k.gemm_all_reduce(a.detach(), b, "0/1/Heap 999", None, "none", False, None)


def test_names() -> None:
    """The same one for the same thing; a process group is called as torch.distributed calls it."""
    assert operators.name_of() == operators.name_of()
    assert operators.name_of().startswith("0/1/")
    with pytest.raises(TypeError, match="group is a str"):
        operators.name_of("world")
