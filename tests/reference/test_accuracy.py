"""The accuracy bound: what is within it passes, what is just outside is found, wherever it is."""

import math
import secrets
from dataclasses import replace

import pytest
import torch

from pyrocshmem import target
from pyrocshmem.reference.accuracy import (
    EPS32,
    Partials,
    bound,
    check,
    compare,
    make_operand,
    root_mean_square,
)

TIER = 0

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
M, N, K = 37, 29, 131


def operands(
    dtype: torch.dtype, seed: int, m: int = M, n: int = N, k: int = K
) -> tuple[torch.Tensor, torch.Tensor]:
    device = target.device()
    a = make_operand((m, k), dtype, seed, 0, tag="a", device=device)
    return a, make_operand((k, n), dtype, seed, 0, tag="b", device=device)


def allowed_error(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, baseline: torch.Tensor
) -> torch.Tensor:
    """The formula of the bound, written out once more."""
    a, b = a.double(), b.double()
    info = torch.finfo(out.dtype)
    rounding = (info.eps / 2) * (a @ b).abs() + info.smallest_normal * info.eps / 2
    return (baseline.double() - a @ b).abs() + math.sqrt(a.shape[1]) * 2**-23 * (a.abs() @ b.abs()) + rounding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [1, 200, 1 << 25])
def test_rounded_float64_product_passes(dtype: torch.dtype, blocks: int) -> None:
    seed = secrets.randbits(32)
    a, b = operands(dtype, seed)
    out = (a.double() @ b.double()).to(dtype)
    found = check(out, a, b, torch.matmul(a, b), block_elements=blocks)
    assert found.ok, f"seed {seed}: {found}"
    assert found.num_elements == M * N
    assert 0 < found.max_error <= found.bound_at_max
    assert found.worst_ratio <= 1
    # Blocks of any size find the same.
    assert found == check(out, a, b, torch.matmul(a, b)) or math.isclose(
        found.worst_ratio, check(out, a, b, torch.matmul(a, b)).worst_ratio, rel_tol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [(0, 0), (0, N - 1), (17, 11), (M - 1, N - 1)])
def test_one_element_over_its_bound_is_found(dtype: torch.dtype, at: tuple[int, int]) -> None:
    seed = secrets.randbits(32)
    a, b = operands(dtype, seed)
    baseline = torch.matmul(a, b)
    limit = allowed_error(baseline, a, b, baseline)[at]
    exact = (a.double() @ b.double())[at]
    # The last value of the dtype that the bound allows, and the next one.
    inside, up = (exact + limit).to(dtype), torch.tensor(math.inf, dtype=dtype, device=exact.device)
    while (inside.double() - exact).abs() > limit:
        inside = torch.nextafter(inside, -up)
    while (torch.nextafter(inside, up).double() - exact).abs() <= limit:
        inside = torch.nextafter(inside, up)
    out = baseline.clone()
    out[at] = inside
    assert check(out, a, b, baseline, block_elements=200).ok, f"seed {seed}"
    out[at] = torch.nextafter(inside, up)
    found = check(out, a, b, baseline, block_elements=200)
    assert (found.num_bad, found.first_bad, found.ok) == (1, at, False), f"seed {seed}: {found}"
    assert found.worst_ratio > 1
    assert f"1 of {M * N} elements bad, the first at {at}" in str(found)


def test_first_bad_is_the_first_row_by_row() -> None:
    a, b = operands(torch.float32, 1)
    out = torch.matmul(a, b)
    baseline = out.clone()
    for at in ((5, 3), (5, 20), (2, 28), (30, 0)):
        out[at] += 1.0
    for blocks in (1, 300, 2000, 1 << 25):
        found = check(out, a, b, baseline, block_elements=blocks)
        assert (found.num_bad, found.first_bad) == (4, (2, 28))
        assert math.isclose(found.max_error, 1.0, rel_tol=1e-4)


def test_bound_by_hand() -> None:
    # C = 3 * 5 + 4 * -2 = 7, |A| @ |B| = 23, K = 2, baseline off by 0.25.
    ref64, magnitude = torch.tensor([[7.0]], dtype=torch.float64), torch.tensor([[23.0]], dtype=torch.float64)
    got = bound(ref64, torch.tensor([[7.25]]), magnitude, 2, torch.float16)
    assert math.isclose(got.item(), 0.25 + math.sqrt(2) * EPS32 * 23 + 7 * 2**-11 + 2**-25, rel_tol=1e-12)


def test_bound_of_rounded_partials_by_hand() -> None:
    """Their roundings take the place of the baseline's error; fp16 has a half of its smallest subnormal for each."""
    # The same C of two ranks, which bring 15 and -8.
    ref64, magnitude = torch.tensor([[7.0]], dtype=torch.float64), torch.tensor([[23.0]], dtype=torch.float64)
    rest = math.sqrt(2) * EPS32 * 23 + 7 * 2**-11 + 2**-25
    for dtype, lost in (
        (torch.float16, 23 * 2**-11 + 2 * 2**-25),
        (torch.bfloat16, 23 * 2**-8),
        (torch.float32, 0.25),
    ):
        terms = Partials(magnitude, 2, dtype)
        got = bound(ref64, torch.tensor([[7.25]]), magnitude, 2, torch.float16, terms)
        assert math.isclose(got.item(), lost + rest, rel_tol=1e-12)
    twice = bound(ref64, ref64, magnitude, 2, torch.float16, Partials(magnitude, 2, torch.float16).times(2))
    assert math.isclose(twice.item(), 2 * (23 * 2**-11 + 2 * 2**-25) + rest, rel_tol=1e-12)


def test_root_mean_square() -> None:
    out = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float16)
    assert root_mean_square(out, out.double() + torch.tensor([3.0, -4.0])) == math.sqrt(12.5)


def test_low_precision_accumulation_is_found() -> None:
    a, b = operands(torch.bfloat16, secrets.randbits(32), k=1024)
    out = torch.zeros(M, N, dtype=torch.bfloat16, device=a.device)
    for k in range(0, 1024, 64):
        out += a[:, k : k + 64] @ b[k : k + 64]
    assert not check(out, a, b, (a.double() @ b.double()).bfloat16()).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_partials_need_their_own_allowance(dtype: torch.dtype) -> None:
    ranks = 4
    a, b = operands(dtype, secrets.randbits(32), m=128, n=128, k=64 * ranks)
    partials = [
        (a[:, k : k + 64].double() @ b[k : k + 64].double()).to(dtype) for k in range(0, 64 * ranks, 64)
    ]
    out = torch.stack(partials).float().sum(0).to(dtype)
    exact = (a.double() @ b.double()).to(dtype)
    assert not check(out, a, b, exact).ok
    assert check(out, a, b, exact, num_partials=ranks, partial_roundings=1).ok
    out[3, 5] += out[3, 5].abs() / 8 + 0.5
    found = check(out, a, b, exact, num_partials=ranks, partial_roundings=1)
    assert (found.num_bad, found.first_bad) == (1, (3, 5))
    # A baseline's error is no allowance then.
    assert check(out, a, b, out, num_partials=ranks, partial_roundings=1).first_bad == (3, 5)


def special(at_a: float, at_b: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands of random numbers with one element each replaced."""
    a, b = operands(torch.float32, 7)
    a[4, 9], b[9, 6] = at_a, at_b
    return a, b


@pytest.mark.parametrize("values", [(math.nan, 1.0), (math.inf, 1.0), (math.inf, -1.0), (math.inf, 0.0)])
def test_special_values_must_stand_where_the_baseline_has_them(values: tuple[float, float]) -> None:
    a, b = special(*values)
    baseline = torch.matmul(a, b)
    assert not baseline.isfinite().all()
    assert check(baseline.clone(), a, b, baseline).ok
    wrong = baseline.clone()
    wrong[4, 6] = 1.0
    found = check(wrong, a, b, baseline)
    assert (found.num_bad, found.first_bad, found.worst_ratio) == (1, (4, 6), math.inf)
    for value in (math.nan, math.inf, -math.inf):
        elsewhere = baseline.clone()
        elsewhere[0, 0] = value
        found = check(elsewhere, a, b, baseline)
        assert (found.num_bad, found.first_bad, found.max_error) == (1, (0, 0), math.inf)


def test_the_other_infinity_is_wrong() -> None:
    a, b = special(math.inf, 1.0)
    baseline = torch.matmul(a, b)
    wrong = baseline.clone()
    wrong[4, 6] = -baseline[4, 6]
    assert check(wrong, a, b, baseline).first_bad == (4, 6)


def test_overflow_of_the_output_dtype() -> None:
    # 300 * 300 is beyond float16: the baseline is inf though float64 is finite, and so must the output be.
    a = torch.full((2, 1), 300.0, dtype=torch.float16, device=target.device())
    b = torch.full((1, 2), 300.0, dtype=torch.float16, device=target.device())
    baseline = torch.matmul(a, b)
    assert baseline.isinf().all()
    assert check(baseline.clone(), a, b, baseline).ok
    assert check(torch.full_like(baseline, 65504.0), a, b, baseline).num_bad == 4


def test_no_iterations_and_no_elements() -> None:
    a, b = operands(torch.float16, 1, k=0)
    zeros = torch.zeros(M, N, dtype=torch.float16, device=a.device)
    assert check(zeros, a, b, zeros).ok
    assert check(zeros + 1e-3, a, b, zeros).num_bad == M * N
    for m, n in ((0, N), (M, 0)):
        a, b = operands(torch.float16, 1, m=m, n=n)
        found = check(torch.matmul(a, b), a, b, torch.matmul(a, b))
        assert (found.ok, found.num_elements) == (True, 0)


def test_transposed_output_and_operands() -> None:
    a, b = operands(torch.float32, 2)
    out = torch.matmul(b.T, a.T).T
    assert check(out, a.T.contiguous().T, b, torch.matmul(a, b)).ok
    wrong = out.clone()
    wrong[1, 0] += 1
    assert check(wrong, a, b, torch.matmul(a, b)).first_bad == (1, 0)


def test_compare_takes_any_reference() -> None:
    a, b = operands(torch.float32, 3)
    ref64 = (a.double() @ b.double()).relu()
    baseline = torch.matmul(a, b).relu()
    limit = bound(ref64, baseline, a.double().abs() @ b.double().abs(), K, torch.float32)
    assert compare(baseline, ref64, baseline, limit).ok
    assert not compare(torch.matmul(a, b), ref64, baseline, limit).ok


def test_bad_arguments() -> None:
    a, b = operands(torch.float32, 4)
    out = torch.matmul(a, b)
    with pytest.raises(ValueError, match=r"\[M, N\], \[M, K\], \[K, N\], \[M, N\], got"):
        check(out.T, a, b, out)
    with pytest.raises(TypeError, match=r"floating point, got torch\.int32"):
        check(out.int(), a, b, out)


def test_make_operand() -> None:
    device = target.device()
    made = make_operand((200, 300), torch.float32, 5, 1, tag="a", device=device)
    assert torch.equal(made, make_operand((200, 300), torch.float32, 5, 1, tag="a", device=device))
    for seed, rank, tag in ((6, 1, "a"), (5, 2, "a"), (5, 1, "b")):
        other = make_operand((200, 300), torch.float32, seed, rank, tag=tag, device=device)
        assert (made == other).float().mean() < 0.01
    assert abs(made.mean().item()) < 0.05
    assert abs(made.std().item() - 1) < 0.05
    half = make_operand((200, 300), torch.bfloat16, 5, 1, tag="a", device=device)
    assert torch.equal(half, made.bfloat16())


def test_accuracy_prints_what_matters() -> None:
    a, b = operands(torch.float32, 8)
    found = check(torch.matmul(a, b), a, b, torch.matmul(a, b))
    assert str(replace(found, max_error=0.5, bound_at_max=2.0, worst_ratio=0.25)) == (
        "max error 5.000e-01, bound there 2.000e+00, worst error/bound 0.250"
    )
