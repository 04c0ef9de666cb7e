"""The project's commands: as a user starts them, or in this process, which has imported everything: 3 s less.

done = commands.start("pyrocshmem", "run", "-n", "2")   # python -m pyrocshmem run -n 2
done = commands.invoke(app, "-n", "2")                  # its typer app
assert done.returncode == 0, done.stdout + done.stderr
"""

import os
import subprocess
import sys
from typing import Any

from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.ranks import load_server

WIDTH = "200"  # of a terminal, so that no line is broken
TIMEOUT_S = 110


def start(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": WIDTH}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def invoke(app: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    """An exception that would end the command with a traceback is raised."""
    load_server()
    # --backend sets the variable: it is as before afterwards.
    environment = {"COLUMNS": WIDTH, "PYROCSHMEM_BACKEND": os.environ.get("PYROCSHMEM_BACKEND")}
    done = CliRunner().invoke(app, arguments, env=environment, catch_exceptions=False)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)
