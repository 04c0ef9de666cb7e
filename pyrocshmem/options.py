"""What the commands' options have in common. Nothing here imports torch: bad options are answered in a fraction of a
second, each in one line on stderr that says what was typed and what is allowed, with exit status 2.

    app = options.app()
    app.command(**options.COMMAND)(main)                # a function with typer's annotations
    ranks = options.check_ranks(num_ranks)              # ValueError: options.refuse(error) ends the command
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

# Ranks of a heap: `pyrocshmem.signal.MAX_WORLD`.
MAX_RANKS = 8
# Of anything that takes as long as the user says: a day.
MOST_SECONDS = 86400.0
# Names of types of elements, and what else they are called.
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
# Of integers, which collectives alone take.
INTEGERS = ("int32", "int64", "uint8")

# Newer versions of typer have their own copy of click: of either, the class of all errors in options.
_OptionError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
_TYPED = "pyrocshmem.typed"


class Backend(StrEnum):
    """Where ranks run."""

    auto = "auto"
    gpu = "gpu"
    cpu = "cpu"


def _main(main: Callable[..., Any], arguments: tuple[Any, ...], more: dict[str, Any]) -> Any:
    """`main`, which is click's, with errors in one line."""
    standalone = more.pop("standalone_mode", True)
    try:
        status = main(*arguments, standalone_mode=False, **more)
    except _OptionError as error:
        print(f"error: {_text(error)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(1)
    if standalone:
        sys.exit(status if isinstance(status, int) else 0)
    return status


def _text(error: Any) -> str:
    """What was typed, and what is allowed."""
    context = error.ctx
    if type(error).__name__ == "NoSuchOption":
        names = (max(each.opts, key=len) for each in context.command.params if each.opts[0].startswith("-"))
        allowed = dict.fromkeys([*names, "--help"])
        return f"there is no option {error.option_name}, allowed are {', '.join(allowed)}"
    text = " ".join(error.format_message().split()).replace(": Value error, ", ": ")
    if value := _value(context, getattr(error, "param", None)):
        text += "" if value in text else f", got {value!r}"
    commands = getattr(context and context.command, "commands", None)
    return f"{text} Allowed are {', '.join(commands)}." if commands and "command" in text else text


def _value(context: Any, param: Any) -> str:
    """What was typed as the value of an option; "" where that is not known."""
    typed = context.meta.get(_TYPED, []) if context else []
    for name, value in itertools.pairwise(typed):
        if name in getattr(param, "opts", ()):
            return str(value)
    return ""


class Command(TyperCommand):
    """A command whose errors are one line each."""

    def main(self, *args: Any, **more: Any) -> Any:
        return _main(super().main, args, more)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_TYPED] = list(args)
        return super().parse_args(ctx, args)


class Group(TyperGroup):
    """Commands under one name; errors are one line each."""

    def main(self, *args: Any, **more: Any) -> Any:
        return _main(super().main, args, more)


HELP = {"help_option_names": ["-h", "--help"]}
# Arguments of `app.command`: `refuse_words` answers what is no option.
COMMAND: Mapping[str, Any] = {"cls": Command, "context_settings": HELP | {"allow_extra_args": True}}


def app(**more: Any) -> typer.Typer:
    """An empty application: plain text, which logs can hold, and `-h` beside `--help`."""
    plain = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}
    return typer.Typer(cls=Group, context_settings=HELP, **(plain | more))


def run(main: Callable[..., None]) -> None:
    """Run a program that is one function, with the options of its signature."""
    program = app()
    program.command(cls=Command, context_settings=HELP)(main)
    program()


def program_name(command: str) -> str:
    """How the user called this command: the script's name, or the module's."""
    script = os.environ.get("PYROCSHMEM_SCRIPT")
    installed = os.path.basename(sys.argv[0]) == "pyrocshmem"
    return script or f"{'pyrocshmem' if installed else 'python -m pyrocshmem'} {command}".rstrip()


def refuse(error: BaseException, status: int = 2) -> NoReturn:
    """End a command, as a rule one that was asked for what can't be done, with a line on stderr."""
    print(f"error: {error}", file=sys.stderr)
    raise typer.Exit(status) from None


def refuse_words(context: typer.Context, names: Collection[str], given: bool) -> None:
    """ValueError where a word is no option; with the right command where it is the collective, and none is `given`."""
    if not context.args:
        return
    word, typed = context.args[0], list(context.meta[_TYPED])
    if word not in names or given:
        raise ValueError(f"{word!r} is no option: see {context.command_path} --help")
    typed.insert(len(typed) - 1 - typed[::-1].index(word), "-c")
    raise ValueError(f"{word!r} is no option; did you mean: {context.command_path} {shlex.join(typed)}")


def settle_target(backend: Backend = Backend.auto) -> None:
    """Decide where kernels run, before any import of Triton, as importing `pyrocshmem` does in other processes. Imports
    torch. The ranks inherit the choice. ValueError where that was decided before, in another way."""
    if backend is not Backend.auto:
        os.environ["PYROCSHMEM_BACKEND"] = backend.value
    from pyrocshmem import target

    if backend is not Backend.auto and (backend is Backend.gpu) != (target.backend() != "host"):
        raise ValueError(f"--backend {backend}, but this process runs kernels on {target.describe()}")


def check_ranks(ranks: int, least: int = 1) -> int:
    """`ranks`; ValueError where so many can't share a heap."""
    if not least <= ranks <= MAX_RANKS:
        raise ValueError(f"{ranks} ranks asked for, allowed are {least} to {MAX_RANKS}")
    return ranks


def check_gpus(ranks: int) -> None:
    """ValueError where kernels run on GPUs, and this machine has fewer than `ranks`. Where they run must be settled."""
    from pyrocshmem import target

    if target.backend() != "host" and ranks > target.num_devices():
        raise ValueError(f"{ranks} GPUs asked for, this machine has {target.num_devices()}")


def check_count(name: str, count: int | None) -> None:
    """ValueError for a number below 1."""
    if count is not None and count < 1:
        raise ValueError(f"{name} is {count}, allowed 1 or more")


def check_dtype(text: str | None, name: str = "dtype", integers: bool = False) -> str | None:
    """The full name of a type, one of `integers` or not; ValueError with the names that there are for any other."""
    if text is None or text in DTYPES or (integers and text in INTEGERS):
        return text
    for full, short in DTYPES.items():
        if text == short:
            return full
    allowed = ", ".join(
        (*(f"{full} ({short})" for full, short in DTYPES.items()), *(INTEGERS if integers else ()))
    )
    raise ValueError(f"{name} is {text!r}, allowed {allowed}")


def check_file(path: Path | None) -> None:
    """ValueError or OSError, before anything is measured, for a file that can't be written. What it holds stays."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path} can't be written: there is no folder {path.parent}")
    new = not os.path.lexists(path)
    if new or path.is_file() or path.is_dir():  # a pipe takes one writer
        path.open("a").close()
    if new:
        path.unlink()


def check_name(collective: str, names: Collection[str]) -> None:
    """ValueError, with the names that there are, for any other."""
    if collective not in names:
        raise ValueError(f"collective is {collective!r}, allowed {', '.join(names)}")


def parse_shape(text: str) -> tuple[int, int, int]:
    """(M, N, K) from "M,N,K"; ValueError with what was got for anything else."""
    M, N, K = parse_sizes(text, "MNK")
    return M, N, K


def parse_sizes(text: str, *letters: str, option: str = "--shape", least: int = 0) -> tuple[int, ...]:
    """As many sizes as one of `letters` has; ValueError with what was got for anything else."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= least for part in parts) or len(parts) not in map(
        len, letters
    ):
        names = " or ".join(",".join(each) for each in letters)
        count = f"{len(letters[0])} " if len(letters) == 1 else ""
        raise ValueError(f"{option} must be {names}, {count}sizes of {least} or more, got {text!r}")
    return tuple(map(int, parts))


def collectives(usage: str) -> dict[str, tuple[str, ...]]:
    """The collectives that a help text lists, and the letters of their sizes: "MNK" under a heading that speaks of
    A x B, otherwise "MN". A test holds them equal to the ops that there are."""
    found: dict[str, tuple[str, ...]] = {}
    letters = ""
    for line in usage.splitlines():
        if not line.startswith(" "):
            heading = re.match("Collectives|Without a ", line)
            letters = ("MNK" if "A x B" in line else "MN") if heading else ""
        elif letters and (names := re.match(r"  ((?:\w+, )*\w+)(?:\s|$)", line)):
            for name in names[1].split(", "):
                found[name] = (*found.get(name, ()), letters)
    return found
