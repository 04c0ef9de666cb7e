"""The project's commands: `pyrocshmem`, or `python -m pyrocshmem`.

    pyrocshmem run          a fused op or a collective on this machine, checked and timed: what ./run.sh does
    pyrocshmem reference    the same with torch.distributed alone
    pyrocshmem bench        every op beside its peers
    pyrocshmem tune         measures configurations, for `stream_k.choose` to look up

What this machine offers, and what is wrong with it:

    pyrocshmem info         devices, links, the heap backend and why, versions
    pyrocshmem doctor       checks peers, links, IPC, /dev/shm, limits and clocks; ranks exchange data for 5 s

Exits 0 on a machine with no GPU: ranks then run on the CPU. The doctor exits 1 when ranks could not work here.
"""

import os
import platform
import shutil
import sys
from importlib import import_module, metadata
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pyrocshmem import finegrained_alloc, target
from pyrocshmem.doctor import FAULT, NOTE, OK, default_ranks, examine, gib
from pyrocshmem.machine import links

# A ROCm build of torch brings its Triton under a name of its own.
_PACKAGES = {"torch": ("torch",), "triton": ("triton", "pytorch-triton-rocm"), "numpy": ("numpy",)}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def devices_table() -> Table | None:
    """One row a GPU, or None without any."""
    count = torch.cuda.device_count()
    if not count:
        return None
    table = Table("GPU", "name", "architecture", "memory", "processors", title="devices")
    for index in range(count):
        about = torch.cuda.get_device_properties(index)
        architecture = (
            getattr(about, "gcnArchName", "") if torch.version.hip else f"sm_{about.major}{about.minor}"
        )
        memory = gib(about.total_memory)
        table.add_row(str(index), about.name, architecture, memory, str(about.multi_processor_count))
    return table


def peers_table() -> Table | None:
    """Who can reach whose memory, and over what; None with fewer than two GPUs."""
    count = torch.cuda.device_count()
    if count < 2:
        return None
    kinds = links()
    table = Table("GPU", *map(str, range(count)), title="peer access and links")
    for row in range(count):
        cells = []
        for column in range(count):
            reach = row == column or torch.cuda.can_device_access_peer(row, column)
            cells.append("-" if row == column else kinds.get((row, column), "yes") if reach else "no")
        table.add_row(str(row), *cells)
    return table


def heap_table() -> Table:
    """Each memory backend: chosen or not, and why."""
    table = Table("backend", "here", "", title="heap")
    for backend in finegrained_alloc.BACKENDS:
        try:
            usable, reason = finegrained_alloc.available(backend)
        except finegrained_alloc.NotBuilt as error:
            usable, reason = False, str(error)
        chosen = "used" if usable and backend == target.backend() else "usable" if usable else "no"
        table.add_row(backend, chosen, reason)
    return table


def versions_table() -> Table:
    """What runs here."""
    table = Table("software", "version", title="versions")
    table.add_row("Python", platform.python_version())
    for package, names in _PACKAGES.items():
        found = [version for name in names if (version := _version(name))]
        table.add_row(package, found[0] if found else "not installed")
    runtime = torch.version.hip or torch.version.cuda
    table.add_row("ROCm" if torch.version.hip else "CUDA", runtime or "none")
    return table


Plain = Annotated[bool, typer.Option("--plain", help="No colours, 120 columns: for logs.")]
app = typer.Typer(add_completion=False)


def _console(plain: bool) -> Console:
    return Console(no_color=True, width=120) if plain else Console()


@app.callback(invoke_without_command=True)
def default(context: typer.Context, plain: Plain = False) -> None:
    """Stream-K GEMMs fused with multi-GPU communication: `run`, `reference`, `bench`, `tune`, or, about this
    machine:"""
    if context.invoked_subcommand is None:
        info(plain)


@app.command()
def info(plain: Plain = False) -> None:
    """Print what this machine offers."""
    console = _console(plain)
    console.print(f"[bold]Ranks run on:[/] {target.describe()}")
    for table in (devices_table(), peers_table(), heap_table(), versions_table()):
        if table is not None:
            console.print(table)
    if os.path.isdir("/dev/shm"):
        shm = shutil.disk_usage("/dev/shm")
        console.print(f"/dev/shm: {gib(shm.total)}, {gib(shm.free)} free (heaps of CPU ranks live there)")


_STYLES = {OK: "green", NOTE: "yellow", FAULT: "bold red"}


@app.command()
def doctor(
    ranks: Annotated[
        int | None, typer.Option(help="Of the self-test; default: every GPU, 2 on a CPU.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long the ranks of the self-test exchange data.")] = 5.0,
    plain: Plain = False,
) -> None:
    """Check what ranks need, each line with what to do about it. Exits 1 when one says FAULT."""
    console = _console(plain)
    found = []
    for finding in examine(ranks if ranks is not None else default_ranks(), seconds):
        found.append(finding)
        advice = f" -> {escape(finding.advice)}" if finding.advice else ""
        verdict = f"[{_STYLES[finding.verdict]}]{finding.verdict:5}[/]"
        console.print(f"{verdict} {finding.check}: {escape(finding.found)}{advice}", soft_wrap=True)
    faults = sum(finding.verdict == FAULT for finding in found)
    console.print(f"{len(found)} checks, {faults} faults")
    raise typer.Exit(1 if faults else 0)


# Commands of packages above this one, loaded when they are asked for: (module, its typer app).
_COMMANDS = {
    "run": "pyrocshmem.stream_k.run.__main__",
    "reference": "pyrocshmem.reference.__main__",
    "bench": "pyrocshmem.benchmarks.__main__",
    "tune": "pyrocshmem.benchmarks.tune",
}


def main() -> None:
    """The console script `pyrocshmem`."""
    module = _COMMANDS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    if module is None:
        app(prog_name="pyrocshmem")
    else:
        import_module(module).app(sys.argv[2:], prog_name=f"pyrocshmem {sys.argv[1]}")


if __name__ == "__main__":
    main()
