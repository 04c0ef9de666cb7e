"""`pyrocshmem tune`: the options, without torch; `benchmarks.tune` measures.

Exits with 1 where a configuration gave a wrong result, 2 for options that make no sense here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pyrocshmem import options


def main(
    out: Annotated[
        Path | None,
        typer.Option(
            help="The table; entries of the same kind and shape are replaced. Default: the user's cache, which "
            "stream_k.choose looks up."
        ),
    ] = None,
    num_ranks: Annotated[
        int | None, typer.Option("-n", "--num-gpus", help="Default: all GPUs; 2 on a CPU.")
    ] = None,
    ops: Annotated[str | None, typer.Option(help="Names with commas between them. Default: all.")] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            help="M,N,K of a rank's product, llama3, or models[:SEED]; repeatable. Default: llama3, on a CPU small."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: bfloat16, on a CPU float16.")] = None,
    partial_dtype: Annotated[
        str | None, typer.Option(help="What sums over ranks travel in. Default: float32, then 16 bits.")
    ] = None,
    iters: Annotated[int, typer.Option(help="Samples of each of the best.")] = 7,
    commit: Annotated[str, typer.Option(help="The commit, where git can't tell it.")] = "",
) -> None:
    """Measure configurations of ops, and put the fastest into a table for `stream_k.choose`."""
    try:
        if num_ranks is not None:
            options.check_ranks(num_ranks)
        options.check_count("iters", iters)
        name, partial = options.check_dtype(dtype), options.check_dtype(partial_dtype, "partial dtype")
        options.check_file(out)
        options.settle_target()
        from pyrocshmem.benchmarks import tune

        wrong = tune.run(out, num_ranks, ops, shapes or [], name, partial, iters, commit)
    except (ValueError, OSError) as error:
        options.refuse(error)
    for text in wrong:
        Console().print(text, style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1 if wrong else 0)


app = options.app()
app.command(cls=options.Command, context_settings=options.HELP)(main)
