"""What a run prints: the same tables for the reference and for the fused ops, from plain data.

Usage::

    console = Console()
    print_facts(console, "problem", {"M x N x K": "512 x 512 x 512", "dtype": "float16"})
    print_errors(console, [accuracy_of_rank_0, accuracy_of_rank_1])
    print_times(console, [Timing("fused", samples), Timing("reference", others)], 2 * M * N * K)
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pyrocshmem import target
from pyrocshmem.reference.accuracy import Accuracy
from pyrocshmem.text import format_seconds


@dataclass(frozen=True)
class Timing:
    """Samples of one provider in seconds, at least one; each the maximum over ranks of one call."""

    name: str
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median sample, in seconds."""
        return statistics.median(self.samples)


def slowest(samples_of_ranks: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The samples of a call on all ranks, joined: call i took as long as it did on its slowest rank."""
    return tuple(max(call) for call in zip(*samples_of_ranks, strict=True))


def print_where(console: Console) -> None:
    """On a CPU: what times there are worth."""
    if target.backend() == "host":
        console.print(
            "On this CPU Triton's interpreter runs the kernels: times here mean nothing.", soft_wrap=True
        )


def print_step(text: str) -> None:
    """What begins now: a line on stderr, at once, in a log as on a terminal."""
    print(f"{text} ...", file=sys.stderr, flush=True)


def step_of(rank: int) -> Callable[[str], None]:
    """`print_step` on rank 0, silence on the others."""
    return print_step if rank == 0 else lambda text: None


def print_verdict(console: Console, results: Sequence[Accuracy]) -> bool:
    """The last line of a run: all ranks are right, or which are wrong. Whether all are right."""
    wrong = [str(rank) for rank, found in enumerate(results) if not found.ok]
    count = len(results)
    if not wrong:
        text = f"all {count} ranks right" if count > 1 else "the one rank is right"
        console.print(f"[green]{text}[/green]")
    else:
        ranks = f"rank {wrong[0]} is" if len(wrong) == 1 else f"ranks {', '.join(wrong)} are"
        console.print(f"[red]{ranks} WRONG, of {count}[/red]", soft_wrap=True)
    return not wrong


def print_facts(console: Console, title: str, facts: Mapping[str, object]) -> None:
    """A table of names and values, one a row; values are printed with str."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, str(value))
    console.print(table)


def print_errors(console: Console, results: Sequence[Accuracy]) -> None:
    """The error of every rank's output beside its bound, one rank a row, and whether it is right."""
    table = Table(title="accuracy against float64", title_justify="left")
    for header in ("rank", "max error", "bound there", "worst error/bound", "verdict"):
        table.add_column(header, justify="left" if header == "verdict" else "right")
    for rank, found in enumerate(results):
        wrong = f"{found.num_bad} of {found.num_elements} bad, the first at {found.first_bad}"
        verdict = "[green]right[/green]" if found.ok else f"[red]WRONG: {wrong}[/red]"
        numbers = (f"{found.max_error:.3e}", f"{found.bound_at_max:.3e}", f"{found.worst_ratio:.3f}")
        table.add_row(str(rank), *numbers, verdict)
    console.print(table)


def print_times(
    console: Console, timings: Sequence[Timing], amount: float, unit: str = "GFLOP/s, all ranks"
) -> None:
    """Median and fastest time of each provider, and its rate for `amount` units in all; `unit` is the column's title.

    With several providers a last column has the last one's median over this one's: above 1 is faster than it. Not on a
    CPU, where kernels are interpreted.
    """
    calls, last = len(timings[0].samples), timings[-1]
    compared = len(timings) > 1 and target.backend() != "host"
    table = Table(title=f"time of one call ({calls} samples, slowest rank)", title_justify="left")
    table.add_column("")
    for header in ("median", "fastest", unit):
        table.add_column(header, justify="right")
    if compared:
        table.add_column(f"speed over {last.name}", justify="right")
    for timing in timings:
        speed = [f"{last.median / timing.median:.3f}"] if compared else []
        times = (format_seconds(timing.median), format_seconds(min(timing.samples)))
        table.add_row(timing.name, *times, f"{amount / timing.median / 1e9:.1f}", *speed)
    console.print(table)


def write_json(
    path: Path, facts: Mapping[str, object], results: Sequence[Accuracy], timings: Sequence[Timing]
) -> None:
    """Write one JSON object to `path`: `facts`, then per-rank `accuracy` and per-provider `seconds` samples.

    Infinities and NaNs are written as strings, since JSON has none. Raises OSError where it can't write.
    """
    accuracy = [{name: _plain(value) for name, value in asdict(found).items()} for found in results]
    seconds = {timing.name: list(timing.samples) for timing in timings}
    ok = all(found.ok for found in results)
    document = {**facts, "ok": ok, "accuracy": accuracy, "seconds": seconds}
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")


def _plain(value: object) -> object:
    # `value - value` is 0 for finite numbers only.
    return str(value) if isinstance(value, float) and value - value != 0 else value
