"""An op is data: what `torch.library`, the command lines, the references, benchmarks, tests and documents know of it.

    OP = register(Op(name="gemm_all_reduce", package="stream_k", schema="(Tensor a, ...) -> Tensor", run=..., ...))
    find("gemm_all_reduce").number              # by which kernels name it in the record of a wait

Whoever imports the module of an op has registered it; a program may register ops of its own in the same way. Ops that
a GEMM begins with are `stream_k.ops.op.GemmOp`, which adds how A, B and C are cut, the placements and the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from pyrocshmem import status
from pyrocshmem.calls.operators import define
from pyrocshmem.calls.workspace import Workspace


class Sizes(NamedTuple):
    """Of calls that are to be made ready: `rows`, of all ranks, at most; N and K of a rank's GEMM [M, K] x [K, N], or N
    columns of this rank where there is no GEMM. workspace: of the calls; of one device where the op has no peers."""

    N: int
    K: int
    rows: int
    dtype: torch.dtype
    workspace: Workspace

    def empty(self, *shape: int) -> torch.Tensor:
        """An operand whose values nobody reads."""
        return torch.empty(shape, dtype=self.dtype, device=self.workspace.device)


@dataclass(frozen=True, kw_only=True)
class Op:
    """What tells one op from another.

    name: of the public function and of the operator. package: where the function is, and the operator's namespace.
    holds, result: what a rank gives and what it gets, for tables, in words and letters (M N K global sizes, R ranks).
    schema: of the operator, which has all that a call is, groups by name; "" where torch.library has no such op.
    run: makes the call, by the schema's arguments. shapes: its results, for tracing. keep, backward: of its gradient,
    as `torch.library.register_autograd` takes them; None: it has none. ordered: graphs keep each call and their order.
    command: its name on the command line, `./run.sh -c`; "" where it has none. steps: how torch.distributed does it.
    reference: that function, or its name in the package `pyrocshmem.reference.ops`.
    sized: by the sizes of its operands, makes a function that calls it with so many rows of all ranks.
    """

    name: str
    package: str
    holds: str
    result: str
    schema: str = ""
    run: Callable[..., Any] | None = None
    shapes: Callable[..., Any] | None = None
    keep: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None
    ordered: bool = True
    command: str = ""
    steps: str = ""
    reference: Callable[..., Any] | str = ""
    sized: Callable[[Sizes], Callable[[int], object]] | None = None

    @property
    def number(self) -> int:
        """By which kernels name the op in the record of a wait that gave up."""
        return status.op_number(self.name)


_ops: dict[str, Op] = {}
AnyOp = TypeVar("AnyOp", bound=Op)


def register(op: AnyOp) -> AnyOp:
    """Make `op` known, and an operator of it where it has a schema. Returns it; ValueError for a name that is taken."""
    if op.name in _ops:
        raise ValueError(f"there is an op {op.name!r} already, of {_ops[op.name].package}")
    status.op_number(op.name)
    if op.schema:
        assert op.run is not None
        assert op.shapes is not None
        name = f"{op.package}::{op.name}"
        define(name, op.schema, op.run, op.shapes, op.keep, op.backward, ordered=op.ordered)
    _ops[op.name] = op
    return op


def lookup(name: str) -> Op | None:
    """The op of that name, if there is one."""
    return _ops.get(name)


def find(name: str) -> Op:
    """The op of that name; ValueError with the names there are for any other."""
    if name not in _ops:
        raise ValueError(f"op is {name!r}, allowed are {', '.join(_ops)}")
    return _ops[name]


def registered() -> Iterator[Op]:
    """All ops that have been registered, in order."""
    yield from _ops.values()
