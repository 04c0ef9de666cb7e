"""`python -m pyrocshmem bench OP`: time an op beside its peers; `all` of them; `report` and `summary` of records."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pyrocshmem import options
from pyrocshmem.benchmarks.escape import visible
from pyrocshmem.benchmarks.models import takes_commit
from pyrocshmem.benchmarks.records import (
    NO_MULTICAST,
    File,
    begun,
    commit_measured,
    environment,
    files_changed,
    read_all,
    write_csv,
)
from pyrocshmem.benchmarks.shapes import LAYERS, MODELS, OPS, SETS
from pyrocshmem.benchmarks.sources import ROOT

# Commands that time more than one.
_ALONE = tuple(op.name for op in OPS.values() if op.kind == "collective")
_SEVERAL = {"all": tuple(OPS), "collectives": _ALONE, "layers": tuple(LAYERS)}
RESULTS = ROOT / "benchmarks" / "results"

app = options.app(
    help="Times an op beside its peers (cuBLAS + NCCL, PyTorch symmetric memory, ...), checks every timed output, "
    "and makes tables and plots of the records. Exits with 1 where a result is wrong, 2 for bad options.",
)


def _command(op: str) -> Callable[..., None]:
    def command(
        shapes: Annotated[
            str | None,
            typer.Option(
                help=f"{', '.join(SETS)}, models[:SEED], models:commit (the seed that is published), M,N,K of a "
                f"rank's product, bytes, or FILE.toml. Layers: {', '.join(MODELS)}, tiny."
            ),
        ] = None,
        dtype: Annotated[
            str | None,
            typer.Option(help="bfloat16, float16 or float32. Default: by set; on a CPU float16."),
        ] = None,
        providers: Annotated[
            str | None, typer.Option(help="Names with commas between them. Default: all.")
        ] = None,
        iters: Annotated[
            int | None, typer.Option(help="Samples a provider. Default: 30; of hundreds of cases 8.")
        ] = None,
        num_ranks: Annotated[
            int | None, typer.Option("-n", "--num-ranks", help="Ranks. Default: all GPUs, or 2 on a CPU.")
        ] = None,
        json_file: Annotated[
            Path | None, typer.Option("--json", help="Write the records to this file.")
        ] = None,
        csv_file: Annotated[Path | None, typer.Option("--csv", help="Write medians to this file.")] = None,
        plot: Annotated[Path | None, typer.Option(help="Draw plots into this folder.")] = None,
        commit: Annotated[str, typer.Option(help="The commit's hash, where git can't tell it.")] = "",
        resume: Annotated[
            bool,
            typer.Option(
                "--resume",
                help="Go on with the file of --json, which must be of the same code and machine; its commit counts.",
            ),
        ] = False,
    ) -> None:
        # Before torch, NCCL and the ranks read them.
        os.environ.update(NO_MULTICAST)
        try:
            name = options.check_dtype(dtype)
            options.check_count("iters", iters)
            if num_ranks is not None:
                options.check_ranks(num_ranks)
            for path in (json_file, csv_file):
                options.check_file(path)
            if resume and json_file is None:
                raise ValueError("--resume needs the file to go on with: --json FILE")
            ok = _run(
                op, shapes, name, providers, iters, num_ranks, json_file, csv_file, plot, commit, resume
            )
        except (ValueError, OSError) as error:
            options.refuse(error)
        raise typer.Exit(0 if ok else 1)

    return command


def _run(
    op: str,
    shapes: str | None,
    dtype: str | None,
    names: str | None,
    iters: int | None,
    num_ranks: int | None,
    json_file: Path | None,
    csv_file: Path | None,
    plot: Path | None,
    commit: str,
    resume: bool,
) -> bool:
    """Measure, print and write; whether every result is right and nothing of ours failed."""
    options.settle_target()
    from pyrocshmem import target
    from pyrocshmem.benchmarks import run, tables
    from pyrocshmem.reference.report import print_where

    ranks = num_ranks if num_ranks is not None else target.num_devices() or 2
    options.check_gpus(ranks)
    wanted = tuple(name.strip() for name in names.split(",")) if names else None
    before = begun(json_file, environment(ranks, commit)) if resume and json_file is not None else None
    if before is not None:
        commit = str(before.environment["commit"])
    if shapes is not None and takes_commit(shapes) and (changed := files_changed(commit)):
        raise ValueError(
            f"{shapes} is for what is committed: {len(changed)} files are changed, such as {changed[0]}"
        )
    cases = run.plan(list(_SEVERAL.get(op, (op,))), shapes, dtype, ranks, wanted, commit_measured(commit))
    run.refuse_large(cases)
    if plot is not None:
        from pyrocshmem.benchmarks import plots

        plot.mkdir(parents=True, exist_ok=True)
    console = Console()
    print_where(console)
    with tempfile.TemporaryDirectory() as folder:
        path = json_file if json_file is not None else Path(folder) / "records.jsonl"
        file = run.run(cases, wanted, iters, ranks, path, commit, before)
        if csv_file is not None:
            write_csv(csv_file, file.cases)
        if plot is not None:
            plots.draw([file], plot)
    console.print(tables.document([file]), soft_wrap=True, markup=False, highlight=False)
    problems = run.problems(file.cases)
    for text in problems:
        console.print(visible(text), style="red", markup=False, soft_wrap=True)
    return not problems


def _read(files: list[Path] | None) -> list[File]:
    """Records of these files, or all; ends the command where one can't be read, or there are none."""
    try:
        if not (found := read_all(files or sorted(RESULTS.glob("*.jsonl")))):
            raise ValueError("there are no records to read")
    except (OSError, ValueError) as error:
        options.refuse(error)
    return found


@app.command(cls=options.Command)
def report(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Records. Default: all in benchmarks/results.")
    ] = None,
) -> None:
    """Write docs/results.md and docs/results, docs/img/speedup.svg, and the table of README.md."""
    from pyrocshmem.benchmarks import documents, notes, plots, searches

    found = _read(files)
    try:
        said, searched = notes.read(RESULTS / "notes.md"), searches.read(RESULTS)
        # Elsewhere first: what is in docs/ stays whole until all is made.
        with tempfile.TemporaryDirectory() as folder:
            drawn = plots.draw(found, Path(folder))
            documents.write(found, drawn, ROOT, said, plots.FRONT, searched)
    except (OSError, ValueError) as error:
        options.refuse(error)
    typer.echo(f"wrote docs/results.md, docs/results, {len(drawn)} pictures and the table of README.md")


@app.command(cls=options.Command)
def summary(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Records. Default: all in benchmarks/results.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Geometric means and worst cases of each op and set of shapes."""
    records = _read(files)  # before torch is imported: what can't be read is said at once
    from pyrocshmem.benchmarks import stats, tables

    found = stats.summary(records)
    typer.echo(json.dumps(found, indent=2) if as_json else tables.summary_table(found))


@app.command(cls=options.Command)
def scale(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Records of one host. Default: those of drawn shapes on 8 GPUs."),
    ] = None,
    hosts: Annotated[int, typer.Option(help="Up to so many, 1 to 1024.")] = 64,
    gbit: Annotated[float, typer.Option(help="Gb/s of the network interface of a GPU, each way.")] = 400.0,
    latency_us: Annotated[float, typer.Option(help="Microseconds of a trip between hosts.")] = 10.0,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this file, .svg.")] = None,
) -> None:
    """Predict the fused ops over several hosts, beside a flat collective of the engine."""
    try:
        if not 1 <= hosts <= 1024:
            raise ValueError(f"hosts is {hosts}, allowed are 1 to 1024")
        if not (gbit > 0 and latency_us >= 0):
            raise ValueError(
                f"gbit is {gbit:g}, latency_us {latency_us:g}: more than 0, and 0 or more, are needed"
            )
        options.check_file(plot)
    except (ValueError, OSError) as error:
        options.refuse(error)
    records = _read(files or sorted(RESULTS.glob("*-8xH200-models.jsonl")))
    from pyrocshmem.benchmarks import scale as model

    network = model.Network(latency_us, gbit * 1e9 / 8)
    try:
        found = model.predictions(records, hosts, network)
    except ValueError as error:
        options.refuse(error)
    model.show(Console(), found)
    if plot is not None:
        model.draw(found, network, plot)


for _name in (*OPS, *LAYERS, *_SEVERAL):
    _what = {
        "all": "every op at its own sets of shapes",
        "collectives": "every collective alone",
        "layers": "a transformer layer",
    }.get(_name, _name)
    app.command(_name, cls=options.Command, help=f"Time {_what} beside its peers.")(_command(_name))


if __name__ == "__main__":
    app(prog_name=options.program_name("bench"))
