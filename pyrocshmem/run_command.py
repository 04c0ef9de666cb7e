"""`./run.sh -n 4 -c all_reduce`, or `pyrocshmem run ...`: run a fused op on this machine, check it, time it beside the
reference.

This module has the options, and answers bad ones without torch; `pyrocshmem.stream_k.run.command` does the work. Exits
with 0 when every rank's result is right, 1 when one is wrong or fails, 2 for options that make no sense here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pyrocshmem import options
from pyrocshmem.options import Backend

USAGE = Path(__file__).parent / "stream_k" / "run" / "usage.txt"


def main(
    context: typer.Context,
    num_gpus: Annotated[int | None, typer.Option("-n", "--num-gpus")] = None,
    collective: Annotated[str | None, typer.Option("-c", "--collective")] = None,
    hosts: Annotated[int, typer.Option("--hosts")] = 1,
    shape: Annotated[str | None, typer.Option("--shape")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype")] = None,
    backend: Annotated[Backend, typer.Option("--backend")] = Backend.auto,
    block: Annotated[str | None, typer.Option("--block")] = None,
    placement: Annotated[str, typer.Option("--placement")] = "auto",
    partial_dtype: Annotated[str | None, typer.Option("--partial-dtype")] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    iters: Annotated[int | None, typer.Option("--iters")] = None,
    json: Annotated[Path | None, typer.Option("--json")] = None,
    trace: Annotated[Path | None, typer.Option("--trace")] = None,
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant")] = False,
    tp_invariant: Annotated[bool, typer.Option("--tp-invariant")] = False,
    help_: Annotated[bool, typer.Option("-h", "--help")] = False,
) -> None:
    """Run a fused op; `usage.txt` has the options."""
    usage = USAGE.read_text()
    if help_:
        sys.stdout.write(usage)
        return
    names = options.collectives(usage)
    try:
        options.refuse_words(context, names, given=collective is not None)
        collective = collective or "all_scatter"
        options.check_name(collective, names)
        if num_gpus is not None:
            options.check_ranks(num_gpus)
        sizes = options.parse_sizes(shape, *names[collective], least=1) if shape else None
        tile = options.parse_sizes(block, "MNK", option="--block") if block else None
        dtype = options.check_dtype(dtype, integers=True)
        partial_dtype = options.check_dtype(partial_dtype, "partial dtype")
        options.check_count("iters", iters)
        options.check_count("hosts", hosts)
        for path in (json, trace):
            options.check_file(path)
        options.settle_target(backend)
        from pyrocshmem.stream_k.run import command

        ok = command.run(
            num_ranks=num_gpus,
            hosts=hosts,
            collective=collective,
            sizes=sizes,
            dtype=dtype,
            block=tile,
            placement=placement,
            partial_dtype=partial_dtype,
            seed=seed,
            iters=iters,
            json_path=json,
            trace_path=trace,
            batch_invariant=batch_invariant,
            tp_invariant=tp_invariant,
        )
    except (ValueError, OSError) as error:
        options.refuse(error)
    except RuntimeError as failed:
        from pyrocshmem.errors import InitTimeout

        if not isinstance(failed.__cause__, InitTimeout):
            raise
        options.refuse(failed.__cause__, 1)  # why there is no heap: the ranks' tracebacks add nothing to it
    raise typer.Exit(0 if ok else 1)


app = options.app()
app.command(**options.COMMAND, add_help_option=False)(main)
