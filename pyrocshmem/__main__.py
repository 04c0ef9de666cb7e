"""The project's commands: `pyrocshmem`, or `python -m pyrocshmem`.

    pyrocshmem run          a fused op or a collective on this machine, checked and timed: what ./run.sh does
    pyrocshmem reference    the same with torch.distributed alone
    pyrocshmem bench        every op beside its peers
    pyrocshmem tune         measures configurations, for `stream_k.choose` to look up

What this machine offers, and what is wrong with it:

    pyrocshmem info         devices, links, the heap backend and why, versions
    pyrocshmem doctor       checks peers, links, IPC, /dev/shm, limits and clocks; ranks exchange data for 5 s

Exits 0 on a machine with no GPU: ranks then run on the CPU. The doctor exits 1 when ranks could not work here. Bad
options end every command with 2, before torch is imported.
"""

import sys
from importlib import import_module
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from pyrocshmem import __version__, options

# Commands of packages above this one, loaded when they are asked for: (the module of the typer app, what it does).
_COMMANDS = {
    "run": ("pyrocshmem.run_command", "A fused op or a collective on this machine, checked and timed."),
    "reference": ("pyrocshmem.reference.__main__", "The same with torch.distributed alone."),
    "bench": ("pyrocshmem.benchmarks.__main__", "Every op beside its peers; reports of the records."),
    "tune": ("pyrocshmem.benchmarks.tune_command", "Measure configurations, for stream_k.choose to look up."),
}

Plain = Annotated[bool, typer.Option("--plain", help="No colours, 120 columns: for logs.")]
app = options.app()


def _console(plain: bool) -> Console:
    return Console(no_color=True, width=120) if plain else Console()


@app.callback(invoke_without_command=True)
def default(
    context: typer.Context,
    plain: Plain = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Stream-K GEMMs fused with multi-GPU communication. Without a command: info."""
    if version:
        print(f"pyrocshmem {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        info(plain)


for _name, (_, _help) in _COMMANDS.items():
    # For the help, and for the names that are allowed: `main` goes past them.
    app.command(_name, help=_help)(lambda: None)


@app.command(cls=options.Command)
def info(plain: Plain = False) -> None:
    """Print what this machine offers."""
    options.settle_target()
    from pyrocshmem import info as tables

    tables.show(_console(plain))


@app.command(cls=options.Command)
def doctor(
    ranks: Annotated[
        int | None, typer.Option(help="Of the self-test, 1 to 8; default: every GPU, 2 on a CPU.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long the ranks of the self-test exchange data.")] = 5.0,
    plain: Plain = False,
) -> None:
    """Check what ranks need, each line with what to do about it. Exits 1 when one says FAULT."""
    try:
        if ranks is not None:
            options.check_ranks(ranks)
        if not 0 < seconds <= options.MOST_SECONDS:
            raise ValueError(f"seconds is {seconds:g}, allowed more than 0, at most {options.MOST_SECONDS:g}")
    except ValueError as error:
        options.refuse(error)
    options.settle_target()
    from pyrocshmem.doctor import FAULT, NOTE, OK, default_ranks, examine

    styles = {OK: "green", NOTE: "yellow", FAULT: "bold red"}
    console = _console(plain)
    found = []
    for finding in examine(ranks if ranks is not None else default_ranks(), seconds):
        found.append(finding)
        advice = f" -> {escape(finding.advice)}" if finding.advice else ""
        verdict = f"[{styles[finding.verdict]}]{finding.verdict:5}[/]"
        console.print(f"{verdict} {finding.check}: {escape(finding.found)}{advice}", soft_wrap=True)
    faults = sum(finding.verdict == FAULT for finding in found)
    console.print(f"{len(found)} checks, {faults} faults")
    raise typer.Exit(1 if faults else 0)


def main() -> None:
    """The console script `pyrocshmem`."""
    module, _ = _COMMANDS.get(sys.argv[1], ("", "")) if len(sys.argv) > 1 else ("", "")
    if module:
        import_module(module).app(sys.argv[2:], prog_name=options.program_name(sys.argv[1]))
    else:
        app(prog_name=options.program_name(""))


if __name__ == "__main__":
    main()
