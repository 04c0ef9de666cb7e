"""The accuracy bound that every GEMM here must keep, checked elementwise against float64.

Usage::

    a, b = make_operand((M, K), dtype, seed, 0, tag="a"), make_operand((K, N), dtype, seed, 0, tag="b")
    result = check(out, a, b, baseline=torch.matmul(a, b))
    print(result); assert result.ok

For an op over ranks, `a` and `b` are the full matrices (every rank can rebuild its peers' shards with
`make_operand`), `baseline` is what the reference op gave, and K is the global K.

The bound, for each element, with ref64 = A @ B in float64 and baseline the reference implementation:

    |out - ref64| <= |baseline - ref64| + sqrt(K) * 2**-23 * (|A| @ |B|) + one rounding of the output dtype

That is also the bound of a sum over ranks whose partial sums travel in fp32, the strict mode. By default those of a
16-bit result travel in its dtype, each rounded once; then, with P_r the exact partial sum of rank r:

    |out - ref64| <= one rounding of each P_r + sqrt(K) * 2**-23 * (|A| @ |B|) + one rounding of the output dtype

One rounding is the dtype's unit roundoff (2**-11 of float16, 2**-8 of bfloat16) times the absolute value, plus half its
smallest subnormal (2**-25 of float16), which each P_r has of its own. Where the baseline is NaN or infinite the bound
means nothing: there `out` must be NaN, or the same infinity, and nowhere else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from pyrocshmem.shards import shard_range

EPS32 = 2.0**-23

# Elements of a float64 block held at once (256 MiB): a few such blocks fit beside the operands on any GPU.
BLOCK_ELEMENTS = 1 << 25


@dataclass(frozen=True)
class Accuracy:
    """How far an output is from float64, and how far it may be.

    max_error: the largest |out - ref64| (inf where NaN or infinity is misplaced); bound_at_max: what is
    allowed at that element; worst_ratio: the largest error / bound of all elements, at most 1 when right;
    num_bad: elements over their bound, of num_elements; first_bad: (row, column) of the first, row by row.
    """

    max_error: float
    bound_at_max: float
    worst_ratio: float
    num_bad: int
    num_elements: int
    first_bad: tuple[int, int] | None

    @property
    def ok(self) -> bool:
        """Whether every element is within its bound."""
        return self.num_bad == 0

    def moved(self, row: int, column: int = 0) -> Accuracy:
        """The same of a block that begins at (row, column), in the coordinates of the whole."""
        first = self.first_bad and (self.first_bad[0] + row, self.first_bad[1] + column)
        return replace(self, first_bad=first)

    def __str__(self) -> str:
        text = f"max error {self.max_error:.3e}, bound there {self.bound_at_max:.3e}, worst error/bound"
        text = f"{text} {self.worst_ratio:.3f}"
        if self.ok:
            return text
        return f"{text}; {self.num_bad} of {self.num_elements} elements bad, the first at {self.first_bad}"


class Partials(NamedTuple):
    """The ranks' terms of a sum, as they were rounded before they were added: of each element the sum over ranks of
    their exact absolute values, in float64; how many terms these are; and to what they were rounded."""

    size: torch.Tensor
    terms: float | torch.Tensor
    dtype: torch.dtype

    def times(self, roundings: int) -> Partials:
        """The same terms, rounded so many times each."""
        return Partials(roundings * self.size, roundings * self.terms, self.dtype)


@dataclass(frozen=True)
class Truth:
    """What a result must be, where it is looked at, and how far it may be off; all [m, n] in float64.

    value: exact. slack: what sums in fp32 may add up to. own: of what the op itself rounds to its dtype on the way, the
    error that one unit of it makes of the result; partials: the same of every rank's partial result, and count: what
    the result moves by where each of these does by one; typical: of a value of typical size, |A| @ |B| / sqrt(K).
    moved: values are only moved, so that no error is allowed.
    """

    value: torch.Tensor
    slack: torch.Tensor
    own: torch.Tensor
    partials: torch.Tensor
    count: torch.Tensor
    typical: torch.Tensor
    moved: bool = False

    def check(
        self,
        out: torch.Tensor,
        *,
        roundings: int = 0,
        partial_dtype: torch.dtype | None = None,
        library: int = 0,
    ) -> Accuracy:
        """Hold a result [m, n] to the bound with the best baseline there can be, the exact result rounded.

        roundings: of each partial result, to `partial_dtype`, None: out's; 1 in our sums over ranks where that has 16
        bits, R where a library rounds after every addition. library: roundings of a value of typical size that are
        allowed besides: libraries may round while they add, within a rank too (split-K in 16 bits).
        """
        if not out.dtype.is_floating_point:
            return compare(out, self.value, self.value, torch.zeros_like(self.value))
        unit = torch.finfo(out.dtype).eps / 2
        rounded = self.value.to(out.dtype)
        terms = Partials(self.partials, self.count, partial_dtype or out.dtype).times(roundings)
        allowed = bound(
            self.value, rounded, torch.zeros_like(self.value), 0, out.dtype, terms if roundings else None
        )
        allowed += self.slack + unit * (self.own + library * self.typical)
        return compare(out, self.value, rounded, torch.zeros_like(allowed) if self.moved else allowed)


def of_matrix_unit(root: torch.Tensor, terms: int, fast: bool) -> torch.Tensor:
    """The most that a sum of so many products of 8-bit numbers may be off by in NVIDIA's matrix units, elementwise, as
    docs/float8.md has measured it. root: of the sum of the squared products. fast: with `use_fast_accum`."""
    return (math.sqrt(terms) * 2.0**-11 if fast else 2.0**-8) * root


def rounding(size: torch.Tensor, dtype: torch.dtype, count: float | torch.Tensor = 1) -> torch.Tensor:
    """The most that rounding to `dtype` may move the sum of `count` values whose absolute values add up to `size`,
    elementwise, float64."""
    info = torch.finfo(dtype)
    return info.eps / 2 * size + info.smallest_normal * info.eps / 2 * count


def bound(
    ref64: torch.Tensor,
    baseline: torch.Tensor,
    magnitude: torch.Tensor,
    k: int,
    dtype: torch.dtype,
    partials: Partials | None = None,
) -> torch.Tensor:
    """The largest allowed |out - ref64|, elementwise, float64; unless partials are rounded, inf or NaN where the
    baseline is.

    ref64: the result in float64. baseline: the reference implementation's, any floating dtype. magnitude:
    |A| @ |B| in float64. All of one shape. k: the global K. dtype: the output's, whose rounding is allowed. partials:
    of a sum over ranks; None, or of float32: the strict mode.
    """
    if partials is None or partials.dtype == torch.float32:
        off = (baseline.double() - ref64).abs()
    else:
        off = rounding(partials.size, partials.dtype, partials.terms)
    return off + math.sqrt(k) * EPS32 * magnitude + rounding(ref64.abs(), dtype)


def root_mean_square(out: torch.Tensor, ref64: torch.Tensor) -> float:
    """Of out - ref64, over all elements."""
    return float((out.double() - ref64).square().mean().sqrt())


def compare(
    out: torch.Tensor, ref64: torch.Tensor, baseline: torch.Tensor, allowed: torch.Tensor
) -> Accuracy:
    """Hold `out` [m, n] against `ref64`, given what is `allowed` (from `bound`) and the `baseline`.

    For results that are not a plain product (a bias, an activation): the caller brings ref64 and magnitude.
    """
    if out.numel() == 0:
        return Accuracy(0.0, 0.0, 0.0, 0, 0, None)
    value, expected = out.double(), baseline.double()
    error = (value - ref64).abs()
    special = ~torch.isfinite(expected)
    same = (value == expected) | (value.isnan() & expected.isnan())
    misplaced = torch.where(special, ~same, ~torch.isfinite(value))
    error = torch.where(misplaced, math.inf, torch.where(special, 0.0, error))
    allowed = torch.where(special, 0.0, allowed)
    ratio = torch.where(error == 0, 0.0, error / allowed)
    bad = error > allowed
    num_bad = int(bad.sum())
    at = int(error.argmax())
    # argmax of a byte tensor is the first 1: the first bad element in row-major order.
    first = divmod(int(bad.flatten().byte().argmax()), out.shape[1]) if num_bad else None
    return Accuracy(
        float(error.flatten()[at]),
        float(allowed.flatten()[at]),
        float(ratio.max()),
        num_bad,
        out.numel(),
        first,
    )


def check(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    baseline: torch.Tensor,
    *,
    num_partials: int = 1,
    partial_roundings: int = 0,
    partial_dtype: torch.dtype | None = None,
    block_elements: int = BLOCK_ELEMENTS,
) -> Accuracy:
    """Hold `out` [M, N] against the full a [M, K] @ b [K, N], and the reference's `baseline` [M, N].

    num_partials, partial_roundings: for sums over ranks whose partial products travel in `partial_dtype`, None: the
    output's, with so many roundings of each (K cut by `shard_range`): 1 where partials are rounded to be sent and
    added in fp32, R where a library rounds after every addition. By default 0: the bound of the strict mode.

    Works on out's device, in blocks of about `block_elements` float64 elements, so that large shapes fit; the
    operands may lie elsewhere. Raises ValueError for shapes that don't fit one another, TypeError for an
    output that is not floating.
    """
    if not out.dtype.is_floating_point:
        raise TypeError(f"out must be floating point, got {out.dtype}")
    shapes = [tuple(t.shape) for t in (out, a, b, baseline)]
    rows, columns, depth = a.shape[0], b.shape[-1], a.shape[-1]
    if shapes != [(rows, columns), (rows, depth), (depth, columns), (rows, columns)]:
        raise ValueError(f"out, a, b, baseline must be [M, N], [M, K], [K, N], [M, N], got {shapes}")
    step_n = max(1, min(columns, block_elements // max(depth, 1)))
    step_m = max(1, min(rows, block_elements // max(depth, step_n)))
    results = []
    for n in range(0, columns, step_n):
        b64 = b[:, n : n + step_n].to(out.device, torch.float64)
        for m in range(0, rows, step_m):
            a64 = a[m : m + step_m].to(out.device, torch.float64)
            part = (slice(m, m + step_m), slice(n, n + step_n))
            expected = baseline[part].to(out.device)
            ref64, sizes = sum_of_partials(a64, b64, num_partials)
            terms = Partials(sizes, num_partials, partial_dtype or out.dtype).times(partial_roundings)
            rounded = terms if partial_roundings else None
            allowed = bound(ref64, expected, a64.abs() @ b64.abs(), depth, out.dtype, rounded)
            results.append(compare(out[part], ref64, expected, allowed).moved(m, n))
    return merged(results)


def make_operand(
    shape: Sequence[int],
    dtype: torch.dtype,
    seed: int,
    rank: int,
    *,
    tag: str = "",
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Standard normal data [shape], the same on every process for the same (seed, rank, tag, kind of device). Of an
    integer dtype numbers of which it holds the sum of 8.

    tag: tells operands of one rank apart ("a", "b"), which would otherwise begin with the same numbers.
    """
    digest = hashlib.sha256(f"{seed}/{rank}/{tag}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:7], "little"))
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        # Those of 64 bits so that float64 holds their sums.
        low, high = max(info.min, -(2**52)) // 8, min(info.max, 2**52) // 8
        return torch.randint(low, high, tuple(shape), dtype=dtype, device=device, generator=generator)
    return torch.randn(tuple(shape), dtype=torch.float32, device=device, generator=generator).to(dtype)


def sum_of_partials(a: torch.Tensor, b: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """a @ b as the sum of `count` products over shards of K, and the sum of their absolute values."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    absolute = torch.zeros_like(total)
    for rank in range(count):
        begin, end = shard_range(a.shape[1], rank, count)
        partial = a[:, begin:end] @ b[begin:end]
        total += partial
        absolute += partial.abs()
    return total, absolute


def merged(parts: list[Accuracy]) -> Accuracy:
    """One Accuracy for blocks that together are the output (none: an empty output, which is right)."""
    if not parts:
        return Accuracy(0.0, 0.0, 0.0, 0, 0, None)
    worst = max(parts, key=lambda part: part.max_error)
    return Accuracy(
        worst.max_error,
        worst.bound_at_max,
        max(part.worst_ratio for part in parts),
        sum(part.num_bad for part in parts),
        sum(part.num_elements for part in parts),
        min((part.first_bad for part in parts if part.first_bad is not None), default=None),
    )
