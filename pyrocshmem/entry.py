"""How this process was started, without torch: a command of this project, or a program that imports it."""

import os
import sys
from multiprocessing import parent_process
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
# Folders of the examples.
_EXAMPLES = {("examples", "rms"), ("examples", "training"), ("examples", "device")}


def _module() -> str:
    """The module of `python -m MODULE`, so long as its package is imported, before its own code; otherwise ""."""
    if sys.argv[0] != "-m" or "-m" not in sys.orig_argv:
        return ""
    return sys.orig_argv[sys.orig_argv.index("-m") + 1]


def _is_console_script() -> bool:
    """Whether this is the script `pyrocshmem` that an installation puts beside this Python."""
    folder, name = os.path.split(os.path.abspath(sys.argv[0]))
    beside = os.path.dirname(os.path.abspath(sys.executable))
    return name == "pyrocshmem" and os.path.realpath(folder) == os.path.realpath(beside)


def checks_options_first() -> bool:
    """Whether this is `pyrocshmem ...` or `python -m pyrocshmem ...`, which answer bad options without torch. The
    processes that it starts import all at once, as programs do."""
    if parent_process() is not None or not sys.argv:
        return False
    return _module() in ("pyrocshmem", "pyrocshmem.__main__") or _is_console_script()


def is_command() -> bool:
    """Whether this process runs a command or an example of this project, not a program that imports it."""
    if sys.argv[0] == "-m":
        return _module().partition(".")[0] == "pyrocshmem"
    if _is_console_script():
        return True
    script = Path(sys.argv[0]).resolve()
    folder, above = script.parent, script.parent.parent
    if script.name == "__main__.py":
        return _PACKAGE in script.parents
    return (above.name, folder.name) in _EXAMPLES
