"""What the ranks of test_library.py run.

Every rank makes the whole model in float64, differentiates it with PyTorch, and compares its shares. The loss is
sum(C * W) of the whole result, so that W is the gradient of C: whole on every rank where C is.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyrocshmem import Heap, stream_k
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.reference.accuracy import EPS32, make_operand
from pyrocshmem.reference.problems import PROBLEMS, Problem
from pyrocshmem.stream_k.ops import all_gather_gemm, gathered_rows
from pyrocshmem.stream_k.ops.op import Request
from tests.stopwatch import until
from tests.stream_k.products import ACTIVATIONS, device, random

HEAP_BYTES = 32 << 20
DELAY_S = 0.3
FACTORS = ("a", "b", "bias")
# No slope of an activation changes faster than this, nor is any steeper than that.
_BENT = 1.2
_STEEPEST = 1.13


@dataclasses.dataclass(frozen=True)
class Case:
    """A call and its gradients. op: a name of reference.problems, or "gemm" on each rank alone. M N K: global sizes.
    needs: the factors whose gradient is asked for. options: more arguments of the op."""

    op: str
    M: int
    N: int
    K: int
    dtype: torch.dtype
    bias: torch.dtype | None = None
    activation: str = "none"
    needs: tuple[str, ...] = FACTORS
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def problem(self) -> Problem | None:
        return None if self.op == "gemm" else PROBLEMS[self.op]

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(stream_k, self.op if self.problem is None else self.problem.op)  # type: ignore[no-any-return]


class Model:
    """The whole product, its gradients in float64, and which part of all that is one rank's."""

    def __init__(self, case: Case, rank: int, world_size: int, seed: int) -> None:
        def make(shape: tuple[int, ...], tag: str, dtype: torch.dtype) -> torch.Tensor:
            return make_operand(shape, dtype, seed, 0, tag=tag, device="cpu").to(device())

        self.case, self.rank, self.world_size = case, rank, world_size
        self.whole = {
            "a": make((case.M, case.K), "a", case.dtype),
            "b": make((case.K, case.N), "b", case.dtype),
        }
        if case.bias is not None:
            self.whole["bias"] = make((case.N,), "bias", case.bias)
        self.weight = make((case.M, case.N), "weight", case.dtype)
        a, b, bias = self.float64()
        z = a @ b + (bias if bias is not None else 0.0)
        result = ACTIVATIONS[case.activation](z)
        wanted = {"a": a, "b": b, "bias": bias}
        self.gradients = dict(
            zip(
                self.whole,
                torch.autograd.grad(result, [wanted[name] for name in self.whole], self.weight.double()),
                strict=True,
            )
        )
        # How far the gradient before the activation may be off, in units of the dtype, and what it is multiplied by.
        slope = self.weight.double().abs()
        self.result, self.slope = result.detach(), slope * _STEEPEST
        self.loose = slope * (2 + _BENT * z.detach().abs()) if case.activation != "none" else slope * 0

    def float64(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        a, b, bias = (self.whole[n].double().requires_grad_() if n in self.whole else None for n in FACTORS)
        assert a is not None
        assert b is not None
        return a, b, bias

    def shares(self, of: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's of things that are shaped as the factors."""
        problem = self.case.problem
        if problem is None:
            return dict(of)
        a, b = problem.shares(of["a"], of["b"], self.rank, self.world_size)
        found = {"a": a, "b": b}
        if "bias" in of:
            row, _ = of["bias"][None], None
            cut = problem.b_cut == "N"
            found["bias"] = (
                problem.shares(row.t(), row, self.rank, self.world_size)[1][0] if cut else of["bias"]
            )
        return found

    def part(self) -> tuple[slice, slice]:
        """Rows and columns of the result."""
        problem = self.case.problem
        if problem is None:
            return slice(0, self.case.M), slice(0, self.case.N)
        return problem.part((self.case.M, self.case.N, self.case.K), self.rank, self.world_size)

    def allowed(self) -> dict[str, torch.Tensor]:
        """How far each element of the gradients may be from float64: the sums' rounding in fp32, one of the result, of
        each rank's partial where those are rounded, and, with an activation, of what it bends."""
        unit = torch.finfo(self.case.dtype).eps
        a, b = self.whole["a"].double().abs(), self.whole["b"].double().abs()
        ones = torch.ones(1, self.case.M, dtype=torch.float64, device=a.device)
        wire = ELEMENTS[self.case.dtype].wire_dtype(dict(self.case.options).get("partial_dtype"))
        rounded = 0.0 if wire == torch.float32 or self.world_size == 1 else torch.finfo(wire).eps
        found = {}
        for name, product, length in (
            ("a", lambda x: x @ b.t(), self.case.N),
            ("b", lambda x: a.t() @ x, self.case.M),
            ("bias", lambda x: (ones @ x)[0], self.case.M),
        ):
            if name not in self.whole:
                continue
            each = 2 * max(length, 1) ** 0.5 * EPS32 + rounded
            rounding = torch.finfo(self.whole[name].dtype).eps
            found[name] = (
                rounding * self.gradients[name].abs()
                + each * product(self.slope)
                + unit * product(self.loose)
            )
        return found


def call(case: Case, factors: dict[str, torch.Tensor], group: Any, **more: Any) -> torch.Tensor:
    """The case's op on a rank's factors."""
    if case.problem is not None:
        more |= {"group": group, **case.problem.op_arguments((case.M, case.N, case.K)), **dict(case.options)}
    bias = factors.get("bias")
    return case.function(factors["a"], factors["b"], bias=bias, activation=case.activation, **more)  # type: ignore[no-any-return]


def gradient_errors(case: Case, group: Any, rank: int, world_size: int, seed: int) -> list[str]:
    """Make the call, differentiate it, and say what is wrong."""
    model = Model(case, rank, world_size, seed)
    factors = {
        name: share.clone().requires_grad_(name in case.needs)
        for name, share in model.shares(model.whole).items()
    }
    value = call(case, factors, group)
    rows, columns = model.part()
    errors = []
    if value.shape != model.result[rows, columns].shape:
        return [f"{case}: the result has the shape {tuple(value.shape)}"]
    value.backward(model.weight[rows, columns])
    expected, allowed = model.shares(model.gradients), model.shares(model.allowed())
    for name, factor in factors.items():
        if name not in case.needs:
            errors += [f"{case}: a gradient of {name}"] if factor.grad is not None else []
            continue
        if factor.grad is None or factor.grad.dtype != factor.dtype:
            errors.append(f"{case}: no gradient of {name} in {factor.dtype}")
            continue
        off = (factor.grad.double() - expected[name]).abs()
        if not (off <= allowed[name]).all():
            worst = (off / allowed[name]).max().item()
            errors.append(
                f"{case} (seed {seed}): {name}'s gradient is off by {worst:.3g} times what is allowed"
            )
        # The control: what a factor too many does.
        if (
            expected[name].any()
            and ((2 * factor.grad.double() - expected[name]).abs() <= allowed[name]).all()
        ):
            errors.append(f"{case}: twice {name}'s gradient would pass")
    return errors


def gradients(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    """A body: each case's errors."""
    with Heap(HEAP_BYTES) as heap:
        return [
            error
            for seed, case in enumerate(cases)
            for error in gradient_errors(case, heap, rank, world_size, seed)
        ]


class Ops(TorchDispatchMode):
    """Names of the ops of this package that go through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("stream_k", "collectives"):
            self.seen.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


# Each op once, with the ops of its backward where A's and B's gradients are needed.
BACKWARD = {
    Case("gemm", 9, 6, 5, torch.float32): ["gemm", "gemm"],
    Case("all_gather", 9, 6, 5, torch.float32): ["gemm_reduce_scatter", "gemm"],
    Case("all_gather", 9, 6, 5, torch.float32, options=(("save_gathered", False),)): [
        "all_gather_gemm",
        "gemm_reduce_scatter",
        "gemm",
    ],
    Case("reduce_scatter", 9, 6, 5, torch.float32): ["all_gather_gemm", "gemm"],
    Case("all_reduce", 9, 6, 5, torch.float32): ["gemm", "gemm"],
    Case("all_scatter", 9, 6, 5, torch.float32): ["gemm_all_reduce", "gemm"],
}


def eagerly(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """(what `run` returns, the ops of this package that go through the dispatcher, where no mode watches)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = run()
    names = [event.name.split("::") for event in profile.events()]
    return found, [name[1] for name in names if name[0] in ("stream_k", "collectives")]


def ways(rank: int, world_size: int) -> dict[int, Any]:
    """By the case's number: the ops that a call without a gradient, one with it, and its backward go through where a
    mode watches; those that an eager call and its backward do; whether these have other bits."""
    found = {}
    with Heap(HEAP_BYTES) as heap:
        for number, case in enumerate(BACKWARD):
            model = Model(case, rank, world_size, number)
            factors = {n: x.clone().requires_grad_() for n, x in model.shares(model.whole).items()}
            with Ops() as plain, torch.no_grad():
                call(case, factors, heap)
            with Ops() as detached:
                call(case, {name: x.detach() for name, x in factors.items()}, heap)
            with Ops() as forward:
                value = call(case, factors, heap)
            with Ops() as backward:
                value.sum().backward()
            watched = [value.detach(), *(x.grad for x in factors.values())]

            def step(case: Case = case, factors: dict[str, torch.Tensor] = factors) -> list[torch.Tensor]:
                value = call(case, factors, heap)
                return [value.detach(), *torch.autograd.grad(value.sum(), list(factors.values()))]

            results, through = eagerly(step)
            differ = not all(map(torch.equal, watched, results))
            found[number] = (plain.seen + detached.seen, forward.seen, backward.seen, through, differ)
    return found


def late_rows(rank: int, world_size: int, guarded: bool) -> int:
    """Rows gathered by no columns, rank 1's late after it has entered the call: how many calls have others' rows.
    Without the guard nothing waits for them."""
    honest = gathered_rows.trace.copy

    def late(copy: Any, argument: torch.Tensor) -> None:
        if rank == 1 and waits:
            time.sleep(DELAY_S)
        elif rank == 1:
            until(lambda: int(gathered_at) == seed + 1)  # the peer has gone on
        honest(copy, argument)

    gathered_rows.trace.copy = late
    wrong, waits = 0, True
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap)
        gathered_at = heap.zeros(1, dtype=torch.int32)
        at_1 = heap.peer_view(gathered_at, 1)
        heap.barrier()
        sizes = ("all_gather_gemm", 7, 0, 3, torch.float32, world_size, heap.device)
        config = stream_k.choose(*sizes, placement="copy_engine")
        for seed in range(3):
            whole = random(7, 3, torch.float32, seed)
            rows, none = whole.tensor_split(world_size)[rank], whole.new_empty(3, 0)
            more = {"num_rows": 7, "save_gathered": True}
            request = Request(rows, none, None, None, "none", False, False, config, **more)
            _, gathered = all_gather_gemm.run(all_gather_gemm.OP, request, heap, workspace)
            wrong += not torch.equal(gathered, whole)
            if rank == 0:
                at_1.fill_(seed + 1)
            if not guarded:
                waits = False
                for plan in workspace.plans.values():
                    plan.senders = 0
        heap.synchronize()
        heap.vote("done")
    return wrong
