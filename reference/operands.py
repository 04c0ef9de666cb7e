"""A problem on one rank: the tensors that it brings, the call of the reference, and what it must hold at the end.

    x = Operands(find_problem("all_reduce"), (M, N, K), torch.float16, seed, rank, num_ranks, device)
    run = x.reference()                                  # by torch.distributed, on the default process group
    run.call()
    x.check(run.result(), **x.of_library()).ok           # every element against float64
    x.truth(*x.sample()).check(...)                      # or a sample of them

Every rank can make its peers' operands, of which it computes the truth: nothing is sent for that.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pyrocshmem.reference import ops, rms_norm
from pyrocshmem.reference.accuracy import BLOCK_ELEMENTS, EPS32, Accuracy, Truth, make_operand, merged
from pyrocshmem.reference.problems import EPS, ROOT, Problem, Shape
from pyrocshmem.reference.timing import Run, cold_copies, poison

# Rows of a result that a sample has, spread evenly over it, and columns of each; all of them up to this many.
SAMPLED_ROWS = 192
SAMPLED_COLUMNS = 1 << 20
# A library's roundings of a value of typical size, on each rank.
LIBRARY_ROUNDINGS = 16

Block = tuple[torch.Tensor, torch.Tensor]


class Operands:
    """Random normal operands of one rank, the same for the same seed: a and b of a GEMM, or x; with a norm its weight,
    and a residual where there is one.

    residual: whether `rms_norm`, which can do without, has one. num_weights: copies of b that calls read in turn.
    """

    def __init__(
        self,
        problem: Problem,
        shape: Shape,
        dtype: torch.dtype,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        device: torch.device | str = "cpu",
        *,
        residual: bool = True,
    ) -> None:
        self.problem, self.shape, self.dtype, self.seed = problem, shape, dtype, seed
        self.rank, self.num_ranks, self.device = rank, num_ranks, torch.device(device)
        self.with_residual = problem.norm == "sum" or (problem.op == "rms_norm" and residual)
        self.num_weights = 0
        self._weights: Iterator[torch.Tensor] = iter(())
        if problem.norm:
            self.weight = self.weight_of(rank)
        self.residual = self.residual_of(rank) if self.with_residual else None
        if problem.gemm:
            self.a = self.a_of(rank)
            self.num_weights, self._weights = 1, itertools.repeat(self.b_of(rank))
        elif problem.joins != "meet":
            self.x = self.x_of(rank)

    @property
    def b(self) -> torch.Tensor:
        """This rank's of B; once they are `cooled`, another copy for each call."""
        return next(self._weights)

    def cool_weights(self, calls: int) -> None:
        """From now on so many calls in a row read copies of B that no cache holds."""
        if self.num_weights:
            copies = cold_copies(self.b, calls)
            self.num_weights, self._weights = len(copies), itertools.cycle(copies)

    def hold_weights(self) -> None:
        """From now on every call reads the same copy of B."""
        if self.num_weights:
            self._weights = itertools.repeat(self.b)

    def arguments(self) -> tuple[Any, ...]:
        """What follows A and B, or x, in the op's arguments, and in the reference's."""
        if self.problem.norm == "sum":
            return self.residual, self.weight, EPS
        return (self.weight, EPS) if self.problem.norm else ()

    def keywords(self) -> dict[str, Any]:
        """Those of the op's keyword arguments that say what to compute."""
        if self.problem.op != "rms_norm":
            return dict(self.problem.op_arguments(self.shape))
        more = {"residual": self.residual} if self.with_residual else {}
        return {"hidden": self.shape[1], "replicated": not self.problem.out_cut} | more

    def new(self, *shape: int) -> torch.Tensor:
        """An ordinary tensor like them."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def result_shape(self) -> tuple[int, int]:
        """Rows and columns of this rank's result."""
        return self.problem.result_shape(self.shape, self.rank, self.num_ranks)

    # -- what any rank brings --

    def a_of(self, rank: int) -> torch.Tensor:
        """That rank's of A."""
        rows, _, depth = self._sizes(self.problem.a_cut, rank)
        return self._random((rows, depth), "a", rank if self.problem.a_cut else 0)

    def b_of(self, rank: int) -> torch.Tensor:
        """That rank's of B."""
        _, columns, depth = self._sizes(self.problem.b_cut, rank)
        return self._random((depth, columns), "b", rank if self.problem.b_cut else 0)

    def x_of(self, rank: int) -> torch.Tensor:
        """That rank's x."""
        rows, columns = self._sizes(self.problem.b_cut, rank)
        return self._random((rows, columns), "x", rank)

    def weight_of(self, rank: int) -> torch.Tensor:
        """Of the norm: [N], or that rank's columns."""
        cut = self.problem.norm == "columns"
        return self._random(self._sizes("N" if cut else "", rank)[1:2], "weight", rank if cut else 0)

    def residual_of(self, rank: int) -> torch.Tensor:
        """[M, N], or that rank's columns."""
        cut = self.problem.norm == "columns"
        return self._random(self._sizes("N" if cut else "", rank)[:2], "residual", rank if cut else 0)

    def whole_a(self) -> torch.Tensor:
        """A of the local GEMM: where ranks have shares of its rows, those of all."""
        if self.problem.a_cut != "M" or self.num_ranks == 1:
            return self.a
        return torch.cat([self.a_of(rank) for rank in range(self.num_ranks)])

    def whole_weight(self) -> torch.Tensor:
        """Of the norm: [N]."""
        if self.problem.norm == "sum":
            return self.weight
        return torch.cat([self.weight_of(rank) for rank in range(self.num_ranks)])

    def absolute(self) -> Operands:
        """The same GEMM of absolute values: its result is the size of what is added."""
        found = copy.copy(self)
        found.a, found._weights = self.a.abs(), itertools.repeat(self.b.abs())
        return found

    def _sizes(self, cut: str, rank: int) -> Shape:
        return tuple(
            part.stop - part.start for part in self.problem.slices(cut, self.shape, rank, self.num_ranks)
        )

    def _random(self, shape: Shape, tag: str, rank: int) -> torch.Tensor:
        return make_operand(shape, self.dtype, self.seed, rank, tag=tag, device=self.device)

    # -- the reference --

    def reference(self) -> Run:
        """The call of the default process group. It allocates nothing but where a norm is last, or where rows don't
        divide by the ranks. ValueError for a barrier, which has nothing to look at without a heap."""
        problem, more = self.problem, self.arguments()
        if problem.joins == "meet":
            raise ValueError(f"{problem.name} needs a heap")
        if problem.in_place:
            return self._in_place()
        function = problem.reference
        if not isinstance(function, str):  # of an op from outside
            return Run(lambda: first(function(self.a, self.b)), None, returns=True)
        if problem.norm:
            return self._normed(getattr(rms_norm, function), more)
        return self._written(getattr(ops, function))

    def _written(self, function: Callable[..., Any]) -> Run:
        """A function that writes a result that it is given."""
        problem = self.problem
        lengths = dict(zip("MNK", self.shape, strict=False))
        lengths |= {"R": self.num_ranks, "W": -(-lengths["N"] // self.num_ranks)}
        out = self.new(*self.result_shape())
        options: dict[str, Any] = {name: lengths[letter] for name, letter in problem.sizes.items()}
        for name, letters in problem.scratch.items():
            options[name] = self.new(*(lengths[letter] for letter in letters))
        # What is sent lies in a tensor made here: in the memory pool that the caller has chosen.
        if not problem.gemm:
            given = self._given()
            return Run(lambda: function(given, out=out, **options), out)
        a = self.new(*self.a.shape).copy_(self.a)
        return Run(lambda: function(a, self.b, out=out, **options), out)

    def _normed(self, function: Callable[..., Any], more: tuple[Any, ...]) -> Run:
        if self.problem.op == "rms_norm":
            given, out, keywords = self._given(), self.new(*self.result_shape()), self.keywords()
            return Run(lambda: function(given, *more, out=out, **keywords), out)
        if self.problem.gemm:
            return Run(lambda: first(function(self.a, self.b, *more)), None, returns=True)
        return Run(lambda: first(function(self.x, *more)), None, returns=True)

    def _in_place(self) -> Run:
        """A collective that torch.distributed has in place, on a tensor that is filled again before each call."""
        given, root = self._given(), self.problem.joins == "root"

        def restore() -> None:
            if root and self.rank != ROOT:
                poison(given)
            else:
                given.copy_(self.x)

        call = partial(dist.broadcast, given, ROOT) if root else partial(dist.all_reduce, given)
        return Run(call, given, prepare=restore)

    def _given(self) -> torch.Tensor:
        return self.new(*self.x.shape).copy_(self.x)

    # -- the truth --

    def of_library(self) -> dict[str, int]:
        """What is allowed to a library besides, as `check` takes it: it rounds partial results before it adds them and
        after each addition; PyTorch's norm rounds what it normalizes, and before the weight."""
        roundings = (self.num_ranks if self.problem.sums else 0) + (2 if self.problem.norm else 0)
        return {"roundings": roundings, "library": LIBRARY_ROUNDINGS * self.num_ranks}

    def check(self, out: torch.Tensor, **allowed: Any) -> Accuracy:
        """Hold every element of this rank's result to the bound; `allowed` as in `Truth.check`. In blocks of rows, so
        that large ones fit."""
        rows, columns = self.result_shape()
        if tuple(out.shape) != (rows, columns):
            raise ValueError(f"out must be {rows} x {columns}, got {tuple(out.shape)}")
        step = max(1, BLOCK_ELEMENTS // max(1, columns, *self.shape[2:]))
        found = []
        for begin in range(0, rows, step):
            block = torch.arange(begin, min(begin + step, rows), device=self.device)
            found.append(self.truth(block).check(out[begin : begin + step], **allowed).moved(begin))
        return merged(found)

    def sample(self, whole: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows, and columns (None: all), of this rank's result, evenly spread, at another place in each step: every row
        of tiles and every place in a tile is met. Not whole: of the local GEMM's."""
        rows, columns = self.result_shape() if whole else (self.shape[0], 0)
        picked = self._spread(columns, SAMPLED_COLUMNS) if columns > SAMPLED_COLUMNS else None
        return self._spread(rows, SAMPLED_ROWS), picked

    def _spread(self, size: int, most: int) -> torch.Tensor:
        if size <= most:
            return torch.arange(size, device=self.device)
        jitter = torch.rand(most, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        found = ((torch.arange(most) + jitter) * (size / most)).long().clamp_(max=size - 1)
        return found.to(self.device)

    def truth(self, rows: torch.Tensor, columns: torch.Tensor | None = None) -> Truth:
        """These rows and columns (None: all) of this rank's result. It looks at the operands of all ranks."""
        problem = self.problem
        if problem.joins == "meet":
            # Of every rank, whether what it did before is seen.
            seen = torch.ones(1, self.num_ranks, dtype=torch.float64, device=self.device)
            return _exact(seen)
        if problem.out_cut == "M":
            rows = rows + problem.part(self.shape, self.rank, self.num_ranks)[0].start
        # Blocks are as large as the result: of these only what is asked for is made.
        early = columns if problem.joins in ("sum", "root") and not problem.norm else None
        if problem.moves:
            found = _exact(self._gathered(rows, early))
        else:
            found = self._summed(rows, early)
        if columns is not None and early is None:
            found = _of_columns(found, columns)
        return found

    def local_truth(self, rows: torch.Tensor) -> Truth:
        """These rows of the GEMM that this rank computes."""
        value, magnitude = self._block(self.rank, rows)
        return _of_terms(value, magnitude, value.abs(), 1, self._sizes(self.problem.b_cut, self.rank)[2])

    def _gathered(self, rows: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
        """What is only moved."""
        picked = slice(None) if columns is None else columns
        if self.problem.joins == "root":
            return self.x_of(ROOT)[rows][:, picked].double()
        parts = (self.x_of(rank) for rank in range(self.num_ranks))
        if self.problem.joins == "columns":
            return torch.cat([x[rows].double() for x in parts], dim=1)
        found = torch.empty(len(rows), self.shape[1], dtype=torch.float64, device=self.device)
        for rank, x in enumerate(parts):
            mine = rows // max(self.shape[0], 1) == rank
            found[mine] = x[rows[mine] - rank * self.shape[0]].double()
        return found

    def _summed(self, rows: torch.Tensor, columns: torch.Tensor | None) -> Truth:
        """What is multiplied, added or normalized."""
        problem = self.problem
        if problem.joins == "sum":
            value, magnitude = self._block(0, rows, columns)
            partials = value.abs()
            for rank in range(1, self.num_ranks):
                part, size = self._block(rank, rows, columns)
                value += part
                magnitude += size
                partials += part.abs_()
            count, terms = self.num_ranks, self.shape[2] if problem.gemm else self.num_ranks
        else:
            ranks = range(self.num_ranks) if problem.joins == "columns" else (self.rank,)
            blocks = [self._block(rank, rows, columns) for rank in ranks]
            value, magnitude = (torch.cat(each, dim=1) for each in zip(*blocks, strict=True))
            partials, count, terms = value.abs(), 1, self.shape[2] if problem.gemm else 0
        if not problem.norm:
            return _of_terms(value, magnitude, partials, count, terms)
        if problem.norm == "sum":
            residual = self.residual_of(self.rank)[rows].double()
            value, magnitude = value + residual, magnitude + residual.abs()
        return self._normalized(_of_terms(value, magnitude, partials, count, terms), terms > 0)

    def _normalized(self, before: Truth, rounded: bool) -> Truth:
        """RMSNorm of whole rows, `before`. rounded: sums and GEMMs are, before it, which moves value and root."""
        weight, h = self.whole_weight(), before.value
        value = rms_norm.in_float64(h, weight, EPS)
        passed = partial(rms_norm.passed, h=h, weight=weight, eps=EPS)
        own = passed(h.abs()) if rounded else torch.zeros_like(h)
        slack = passed(before.slack) + math.sqrt(h.shape[1] + 16) * EPS32 * value.abs()
        terms = passed(before.partials), passed(before.count)
        found = Truth(value, slack, own, *terms, passed(before.typical))
        if self.problem.out_cut != "N":
            return found
        mine = self.problem.part(self.shape, self.rank, self.num_ranks)[1]
        return _of_columns(found, mine)

    def _block(self, rank: int, rows: torch.Tensor, columns: torch.Tensor | None = None) -> Block:
        """That rank's block of what is joined, and the magnitude of its terms."""
        picked = slice(None) if columns is None else columns
        if self.problem.gemm:
            a = (self.whole_a() if self.problem.a_cut == "M" else self.a_of(rank))[rows].double()
            b = self.b_of(rank)[:, picked].double()
            return a @ b, self._magnitude(a, b)
        x = self.x_of(rank)[rows][:, picked]
        if self.problem.norm != "columns":
            return x.double(), x.double().abs_()
        if self.with_residual:
            # What is normalized is rounded by definition.
            x = (x.float() + self.residual_of(rank)[rows].float()).to(self.dtype)
        return x.double(), torch.zeros_like(x, dtype=torch.float64)

    def _magnitude(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """By which the error of a @ b goes: the sum of its terms' absolute values. Overwrites both."""
        return a.abs_() @ b.abs_()


def first(made: Any) -> torch.Tensor:
    """The result of an op that may return more."""
    found: torch.Tensor = made[0] if isinstance(made, tuple) else made
    return found


def _exact(value: torch.Tensor) -> Truth:
    nothing = torch.zeros_like(value)
    return Truth(value, nothing, nothing, value.abs(), torch.ones_like(value), nothing, moved=True)


def _of_terms(
    value: torch.Tensor, magnitude: torch.Tensor, partials: torch.Tensor, count: int, terms: int
) -> Truth:
    """Sums of so many terms in fp32, rounded once, of `count` ranks."""
    slack, typical = math.sqrt(terms) * EPS32 * magnitude, magnitude / math.sqrt(max(terms, 1))
    return Truth(value, slack, torch.zeros_like(value), partials, torch.full_like(value, count), typical)


def _of_columns(truth: Truth, columns: torch.Tensor | slice) -> Truth:
    parts = (truth.value, truth.slack, truth.own, truth.partials, truth.count, truth.typical)
    value, slack, own, partials, count, typical = (part[:, columns] for part in parts)
    return Truth(value, slack, own, partials, count, typical, truth.moved)
