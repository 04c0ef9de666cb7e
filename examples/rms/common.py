"""What the RMSNorm examples share: mixed-precision calls on one rank, their check, the table and the exit code.

Columns of x, residual and weight are spread over ranks, in shares that differ by one where the ranks don't divide
them. Every rank checks its results, sharded and replicated, against float64, beside PyTorch's on whole rows, and the
gradients of x, weight and residual against float64.
"""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from pyrocshmem import Heap, collectives, options, target
from pyrocshmem.json_objects import all_gather_json
from pyrocshmem.reference import rms_norm as reference
from pyrocshmem.reference.accuracy import Accuracy, bound, compare
from pyrocshmem.shards import shard_range

EPS = 1e-6
SEED = 7

Ranks = Annotated[int | None, typer.Option("-n", "--ranks", help="Default: the GPUs, at most 8; 4 on a CPU.")]
Rows = Annotated[int, typer.Option(min=1, help="Rows, as many on every rank.")]
Hidden = Annotated[int, typer.Option(min=1, help="Columns of all ranks.")]


@dataclass(frozen=True)
class Mix:
    """Types of x, the weight, the residual (None: there is none) and the result."""

    x: torch.dtype
    weight: torch.dtype
    residual: torch.dtype | None
    out: torch.dtype

    def __str__(self) -> str:
        return " ".join(str(t).removeprefix("torch.") for t in (self.x, self.weight, self.residual, self.out))


MIXES = (
    Mix(torch.float32, torch.float32, None, torch.float32),
    Mix(torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    Mix(torch.float16, torch.float32, torch.float32, torch.bfloat16),
    Mix(torch.bfloat16, torch.float32, None, torch.float16),
)

# What was checked, and how it came out.
Findings = list[tuple[str, Accuracy]]


def default_ranks(ranks: int | None) -> int:
    """`ranks`, or as many as this machine offers."""
    if ranks is not None:
        try:
            options.check_ranks(ranks)
        except ValueError as error:
            options.refuse(error)
    return ranks or (min(8, target.num_devices()) if target.num_devices() else 4)


def check_rank(group: Any, rows: int, hidden: int) -> Findings:
    """Every mix of types, sharded and replicated, on this rank of `group`: what `pyrocshmem.as_group` takes."""
    findings = []
    with Heap(64 << 20, group) as heap:
        for mix in MIXES:
            for replicated in (False, True):
                findings += _check_call(heap, rows, hidden, mix, replicated)
    return findings


def _check_call(heap: Heap, rows: int, hidden: int, mix: Mix, replicated: bool) -> Findings:
    # Of its own: ranks that are threads share the generator of the process.
    generator = torch.Generator().manual_seed(SEED)
    x, weight, residual, g = (
        torch.randn(shape, generator=generator).to(dtype or mix.x).to(heap.device)
        for shape, dtype in (
            ((rows, hidden), mix.x),
            ((hidden,), mix.weight),
            ((rows, hidden), mix.residual),
            ((rows, hidden), mix.out),
        )
    )
    mine = slice(*shard_range(hidden, heap.rank, heap.world_size))
    columns = slice(None) if replicated else mine
    h = x if mix.residual is None else (x.float() + residual.float()).to(mix.residual)
    expected = functional.rms_norm(h.float(), (hidden,), weight.float(), EPS).to(mix.out)[:, columns]
    whole = [t.double().requires_grad_() for t in (h, weight)]
    exact = torch.autograd.grad((reference.in_float64(whole[0], whole[1], EPS) * g.double()).sum(), whole)

    leaves = [t[..., mine].clone().requires_grad_() for t in (x, weight, residual)]
    found = collectives.rms_norm(
        leaves[0],
        leaves[1],
        EPS,
        group=heap,
        residual=None if mix.residual is None else leaves[2],
        replicated=replicated,
        hidden=hidden,
        out_dtype=mix.out,
    )
    heap.synchronize()
    out, updated = found if isinstance(found, tuple) else (found, h[:, mine])
    inputs = leaves[: 2 if mix.residual is None else 3]
    gradients = torch.autograd.grad(out, inputs, g[:, columns])
    heap.synchronize()

    name = f"{mix}, {'replicated' if replicated else 'sharded'}"
    findings = [(f"{name}: result", reference.check(out.detach(), h, weight, EPS, expected, columns))]
    if mix.residual is not None:
        exactly = torch.zeros_like(updated, dtype=torch.float64)
        findings.append((f"{name}: x + residual", _against(updated.detach(), h[:, mine].double(), exactly)))
    scale = torch.rsqrt(h.double().square().mean(1, keepdim=True) + EPS)
    normal, product = (h.double() * scale).abs(), (g.double() * weight.double()).abs()
    sizes = (
        scale * (product + normal * (product * normal).mean(1, keepdim=True)),
        (g.double().abs() * normal).sum(0),
    )
    for what, gradient in zip(("x", "weight", "residual"), gradients, strict=False):
        which = what == "weight"
        ref64, size = exact[which][..., mine], sizes[which][..., mine]
        terms = hidden + 16 + rows * which
        allowed = bound(ref64, ref64.to(gradient.dtype), size, terms, gradient.dtype)
        findings.append((f"{name}: gradient of {what}", _against(gradient, ref64, allowed)))
    return findings


def _against(found: Tensor, ref64: Tensor, allowed: Tensor) -> Accuracy:
    """`found` [n] or [m, n] held to `allowed`."""
    found, ref64, allowed = (torch.atleast_2d(t) for t in (found, ref64, allowed))
    return compare(found, ref64, ref64, allowed)


def print_findings(of_ranks: list[Findings]) -> bool:
    """A row for each thing checked, with the worst of all ranks; whether all were right."""
    table = Table(title=f"RMSNorm on {len(of_ranks)} ranks, {target.describe()}", title_justify="left")
    for header in ("x, weight, residual, result", "worst error/bound", "verdict"):
        table.add_column(header)
    for checked in zip(*of_ranks, strict=True):
        worst = max(accuracy.worst_ratio for _, accuracy in checked)
        wrong = [f"rank {rank}: {accuracy}" for rank, (_, accuracy) in enumerate(checked) if not accuracy.ok]
        verdict = "right on every rank" if not wrong else "WRONG, " + "; ".join(wrong)
        table.add_row(checked[0][0], f"{worst:.3f}", verdict)
    Console().print(table)
    return all(accuracy.ok for findings in of_ranks for _, accuracy in findings)


def _rebuilt(facts: dict[str, Any]) -> Accuracy:
    """From `asdict` and JSON, which has no tuples."""
    return Accuracy(**facts | {"first_bad": facts["first_bad"] and tuple(facts["first_bad"])})


def finish(findings: Findings) -> None:
    """On every process of the default process group: rank 0 prints, all exit with 1 when any rank was wrong."""
    of_ranks: list[Findings] = [
        [(what, _rebuilt(facts)) for what, facts in found]
        for found in all_gather_json([(what, asdict(accuracy)) for what, accuracy in findings], "findings")
    ]
    dist.barrier()  # rank 0 may host the store at which they met
    ok = all(accuracy.ok for each in of_ranks for _, accuracy in each)
    if dist.get_rank() == 0:
        print_findings(of_ranks)
    dist.destroy_process_group()
    if not ok:
        raise SystemExit(1)
