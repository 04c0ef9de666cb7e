"""What this machine offers: `python -m pyrocshmem` prints devices, links, the heap backend and why, and versions.

Exits 0 on a machine with no GPU: ranks then run on the CPU.
"""

import platform
import re
import shutil
import subprocess
from importlib import metadata
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import finegrained_alloc
from pyrocshmem import target

# A ROCm build of torch brings its Triton under a name of its own.
_PACKAGES = {"torch": ("torch",), "triton": ("triton", "pytorch-triton-rocm"), "numpy": ("numpy",)}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def parse_links(topology: str) -> dict[tuple[int, int], str]:
    """(GPU, GPU) -> kind of link, out of what `nvidia-smi topo -m` prints."""
    links = {}
    for line in _ESCAPES.sub("", topology).splitlines():
        words = line.split()
        if words and (match := re.fullmatch(r"GPU(\d+)", words[0])):
            for column, word in enumerate(words[1:]):
                if not re.fullmatch(r"X|NV\d+|SYS|NODE|PHB|PXB|PIX", word):
                    break
                links[int(match[1]), column] = word
    return links


def _links() -> dict[tuple[int, int], str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    try:
        done = subprocess.run(
            [program, "topo", "-m"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_links(done.stdout)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


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
        memory = _gib(about.total_memory)
        table.add_row(str(index), about.name, architecture, memory, str(about.multi_processor_count))
    return table


def peers_table() -> Table | None:
    """Who can reach whose memory, and over what; None with fewer than two GPUs."""
    count = torch.cuda.device_count()
    if count < 2:
        return None
    links = _links()
    table = Table("GPU", *map(str, range(count)), title="peer access and links")
    for row in range(count):
        cells = []
        for column in range(count):
            reach = row == column or torch.cuda.can_device_access_peer(row, column)
            cells.append("-" if row == column else links.get((row, column), "yes") if reach else "no")
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


def main(
    plain: Annotated[bool, typer.Option("--plain", help="No colours, 120 columns: for logs.")] = False,
) -> None:
    """Print what this machine offers."""
    console = Console(no_color=True, width=120) if plain else Console()
    console.print(f"[bold]Ranks run on:[/] {target.describe()}")
    for table in (devices_table(), peers_table(), heap_table(), versions_table()):
        if table is not None:
            console.print(table)
    shm = shutil.disk_usage("/dev/shm")
    console.print(f"/dev/shm: {_gib(shm.total)}, {_gib(shm.free)} free (heaps of CPU ranks live there)")


if __name__ == "__main__":
    typer.run(main)
