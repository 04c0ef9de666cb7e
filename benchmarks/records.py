"""Records of a run: one JSON object a line, first the environment, then a case each.

A case has: op, shapes (the set's name), M, N, K of the local product, dtype, ranks, timing ("eager", or "graph":
replays of many calls), device, us {provider: samples of the slowest rank}, host_us, error {provider: error beside
its bound}, wrong [providers], skipped and failed {provider: reason}, config {provider: configuration}, link_bytes,
floor_us, efficiency {provider: floor / median}. Since November 23, 2026 also: bits {our provider: runs, and how many
distinct results they gave}, workspace_bytes {our provider: bytes} and workspace_allowed_bytes, clocks_mhz {provider: SM
clock of each rank}, clock_mhz [least, largest], power_w, dropped: why the case doesn't count, or "". Since November 25,
2026, in format 3, schedule {our provider: what its configuration chose}, and other names of our providers
(`benchmarks.older_records`). Since November 27, 2026 environments have sources, a digest of the code
(`benchmarks.sources`): runs of the same may go on with one another's files. `benchmarks.schema` says what each may
hold. `read` adds run: the environment of the case.
"""

from __future__ import annotations

import contextlib
import csv
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pyrocshmem.benchmarks.escape import visible
from pyrocshmem.benchmarks.older_records import as_today
from pyrocshmem.benchmarks.schema import (
    FORMAT,
    FORMATS,
    check_case,
    check_environment,
    check_together,
    timed_as,
)
from pyrocshmem.benchmarks.sources import ROOT, digest

Record = dict[str, Any]

# Multicast stays off for everyone: some machines must not use it, and comparisons are without it.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
# Far beyond any: what is larger is no file of records.
_MOST_BYTES = 256 << 20
_GPU_FIELDS = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"


def output_of(*command: str) -> str:
    """What a command prints; nothing where it can't run or fails."""
    with contextlib.suppress(OSError):
        found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        return found.stdout.strip() if found.returncode == 0 else ""
    return ""


def gpus_now() -> list[str]:
    """A line a GPU: name, driver, clocks, power, temperature."""
    return output_of("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader").splitlines()


def commit_measured(told: str) -> str:
    """The commit that a run measures: the one it is told, or git's; "" where neither is known."""
    return told or output_of("git", "rev-parse", "HEAD")


def files_changed(told: str) -> list[str]:
    """Files that are not of that commit, as `git status` has them. None where the commit is told: what git sees then is
    another's tree."""
    return [] if told else output_of("git", "status", "--porcelain", "--untracked-files=no").splitlines()


def environment(num_ranks: int, commit: str) -> dict[str, Any]:
    """What the records depend on. commit: where git can't tell it."""
    import torch
    import triton

    from pyrocshmem import target

    on_gpu = target.backend() != "host"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None
    return {
        "format": FORMAT,
        "command": " ".join(["python -m pyrocshmem", *sys.argv[1:]]),
        "commit": commit_measured(commit),
        "uncommitted": files_changed(commit),
        "sources": digest(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "num_ranks": num_ranks,
        "target": target.describe(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nccl": nccl,
        "multicast": False,
        "environment": NO_MULTICAST,
        "gpus": gpus_now(),
    }


def in_words(module: str, num_ranks: int, commit: str) -> list[str]:
    """For the end of a table that a module of `pyrocshmem.benchmarks` prints: its command, and where it ran with what.
    num_ranks, commit: as of `environment`."""
    found = environment(num_ranks, commit)
    command = " ".join([f"python -m pyrocshmem.benchmarks.{module}", *sys.argv[1:]])
    kept = [
        "commit",
        "uncommitted",
        "sources",
        "started",
        "target",
        "python",
        "torch",
        "triton",
        "nccl",
        "gpus",
    ]
    return [f"command: {command}", *(f"{name}: {found[name]}" for name in kept)]


# What two runs have in common whose cases may stand in one file.
_ALIKE = ("format", "sources", "num_ranks", "target", "python", "torch", "triton", "nccl")


def begun(path: Path, header: dict[str, Any]) -> File | None:
    """The records that a run like that of `header` left in `path` when it ended, or was ended; None where there is no
    such file. ValueError where there are others, which are not to be lost."""
    if not path.exists() or not path.stat().st_size:
        return None
    drop_cut_line(path)
    file = read(path)
    other = [name for name in _ALIKE if file is None or file.environment.get(name) != header[name]]
    if other:
        raise ValueError(
            f"{visible(str(path))} has records of other {', '.join(other)}; go on in another file, or delete this one"
        )
    return file


def start(path: Path, header: dict[str, Any]) -> None:
    """Begin a file of records. Raises, before anything is measured, OSError where it can't be written, ValueError for a
    header that `read` would refuse."""
    check_environment(header)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    append(path, header)


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line: a run that breaks off keeps what it had. Infinities and NaNs become strings: JSON has none."""
    with path.open("a") as file:
        file.write(json.dumps(_plain(record), allow_nan=False) + "\n")


@dataclass(frozen=True)
class File:
    """A file of records: its environment, of the last run where there are several, and the commands of all; its
    cases."""

    path: Path
    environment: dict[str, Any]
    cases: list[Record]


def drop_cut_line(path: Path) -> None:
    """Take away what follows the last line break: the line that a writer had begun when it was killed."""
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def read(path: Path) -> File | None:
    """The records of a file; None for one in another format. Raises OSError, and ValueError for a line that can't be
    used: FILE:LINE, what is wrong, and what is allowed (`benchmarks.schema`)."""
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    where = visible(str(path))
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{where} is larger than {_MOST_BYTES >> 20} MiB, allowed for records")
    texts = content.split(b"\n")
    found: dict[str, Any] = {}
    run: dict[str, Any] = {}
    commands, cases = [], []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = _parsed(text, number == len(texts))
            if not found and line.get("format") not in FORMATS:
                return None
            if found and "op" in line:
                check_case(line)
                case = as_today(line) if run["format"] == 2 else line
                check_together(case)
                cases.append(case | {"run": run})
                continue
            check_environment(line)
        except ValueError as error:
            raise ValueError(f"{where}:{number}: {error}") from None
        found |= line
        if "command" in line:
            run = line
            commands.append(line["command"])
    if not found:
        raise ValueError(f"{where}:1: the file is empty, allowed are lines of JSON, first the environment")
    return File(path, found | {"commands": commands}, cases)


def _parsed(text: bytes, is_last: bool) -> dict[str, Any]:
    """The object of a line. is_last: of the file, without a line break behind it."""
    allowed = "allowed is an object in JSON, in UTF-8"
    try:
        line = json.loads(text.decode(), parse_constant=_no_number)
    except RecursionError:
        raise ValueError(f"it nests too deep; {allowed}") from None
    except ValueError as error:
        cut = ", and the file ends there, as a killed run leaves it: delete this line" if is_last else ""
        raise ValueError(f"{getattr(error, 'msg', error)}{cut}; {allowed}") from None
    if not isinstance(line, dict):
        raise ValueError(f"it is a {type(line).__name__}; {allowed}")
    return line


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def read_all(paths: Iterable[Path]) -> list[File]:
    """The files that can be read, the oldest records first, which give way to newer ones of the same cases; says on
    stderr which ones are in an older format."""
    files = []
    for path in paths:
        file = read(path)
        if file is None:
            allowed = " or ".join(map(str, FORMATS))
            print(f"{visible(path.name)}: not in format {allowed}, left out", file=sys.stderr)
        else:
            files.append(file)
    return sorted(files, key=lambda file: str(file.environment["started"]))


def median(record: Record, provider: str) -> float | None:
    """Median microseconds of a provider; None where neither it nor one that does the same was timed."""
    samples = record["us"].get(timed_as(record, provider))
    return statistics.median(samples) if samples else None


def write_csv(path: Path, records: list[Record]) -> None:
    """A row for each case and provider."""
    names = ("op", "shapes", "M", "N", "K", "dtype", "ranks", "timing", "device")
    header = (*names, "provider", "median_us", "min_us", "max_us", "efficiency", "worst_error_ratio", "wrong")
    more_names = ("host_us", "workspace_bytes", "workspace_allowed_bytes", "dropped", "schedule")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*header, *more_names))
        for record in records:
            for provider, samples in record["us"].items():
                values = (provider, median(record, provider), min(samples), max(samples))
                error = record["error"][provider]["worst_ratio"]
                efficiency = record["efficiency"].get(provider)
                row = (*(record[name] for name in names), *values, efficiency, error)
                held = (record.get("workspace_bytes") or {}).get(provider)
                more = (record["host_us"].get(provider), held, record.get("workspace_allowed_bytes"))
                last = (record.get("dropped", ""), record.get("schedule", {}).get(provider))
                writer.writerow((*row, provider in record["wrong"], *more, *last))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # `value - value` is 0 for finite numbers only.
    if isinstance(value, float):
        return str(value) if value - value != 0 else float(f"{value:.6g}")
    return value
