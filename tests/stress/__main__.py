"""Random calls for a time, every result checked; what fails is made smaller and printed.

    python -m tests.stress --minutes 10
    python -m tests.stress --op gemm_all_reduce --op all_reduce --minutes 0.5 --seed 7 --json counts.json
    python -m tests.stress --ranks 4 --ranks-a-gpu 2        # on two GPUs

Exits with 0 when nothing was wrong, 1 when something was, 2 for options that make no sense here.
"""

import json as json_format
import secrets
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pyrocshmem import options, target  # before Triton
from tests.stress.episode import PLANTS
from tests.stress.ops import OPS
from tests.stress.runner import Options, Report, hunt


def main(
    op: Annotated[list[str] | None, typer.Option(help=f"one of {', '.join(OPS)}; repeat it; all if left out")] = None,
    minutes: Annotated[float, typer.Option(help="how long")] = 2.0,
    seed: Annotated[int | None, typer.Option(help="of everything random; another one each time if left out")] = None,
    ranks: Annotated[int, typer.Option(help="1 to 8; 0: another number for each start of ranks")] = 0,
    ranks_a_gpu: Annotated[int, typer.Option(help="more than 1: ranks may share GPUs, taking turns")] = 1,
    shrink_seconds: Annotated[float, typer.Option(help="for making what fails smaller")] = 120.0,
    plant: Annotated[str | None, typer.Option(help=f"a mistake to find (CPU): {', '.join(PLANTS)}")] = None,
    json: Annotated[Path | None, typer.Option(help="write counts, and what failed, here")] = None,
) -> None:  # fmt: skip
    console = Console(soft_wrap=True)
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    try:
        options.check_ranks(ranks, least=0)
        options.check_file(json)
        if plant is not None and (plant not in PLANTS or not target.interpreted()):
            raise ValueError(f"plant is {plant!r}, allowed on the CPU target {', '.join(PLANTS)}")
        chosen = Options(minutes, seed, tuple(op or OPS), ranks, shrink_seconds, plant, ranks_a_gpu)
    except (ValueError, OSError) as error:
        options.refuse(error)
    console.print(f"{target.describe()}; seed {seed}")
    report = hunt(chosen, lambda text: console.print(text, markup=False))
    _show(console, report)
    if json is not None:
        json.write_text(json_format.dumps(report.as_json(), indent=1) + "\n")
    raise typer.Exit(0 if report.failure is None else 1)


def _show(console: Console, report: Report) -> None:
    table = Table("what", "times on rank 0", title=f"{report.rounds} rounds in {report.seconds:.0f} s")
    for name, count in sorted(report.counts.items()):
        table.add_row(name, str(count))
    console.print(table)
    failure = report.failure
    if failure is None:
        console.print("nothing was wrong")
        return
    lines = [f"WRONG, seed {report.options.seed}, {failure.ranks} ranks, episode seed {failure.seed}:"]
    lines += failure.wrong
    if failure.smallest is None:
        lines.append(f"its last round did not fail by itself; all {len(failure.rounds)}:")
        lines += [str(each) for each in failure.rounds]
    else:
        lines += ["the smallest round that still fails:", str(failure.smallest), *failure.smallest_wrong]
    console.print("\n".join(lines), markup=False)


if __name__ == "__main__":
    options.run(main)
