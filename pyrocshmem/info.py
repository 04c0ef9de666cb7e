"""`pyrocshmem info`: what this machine offers, in tables."""

import os
import platform
import shutil
from importlib import metadata

import torch
from rich.console import Console
from rich.table import Table

from pyrocshmem import entry, finegrained_alloc, target
from pyrocshmem.doctor import gib, why_fixed
from pyrocshmem.forming import default_bytes
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
    """Each memory backend: chosen or not, and why; and what a heap takes that isn't given a size."""
    table = Table("backend", "here", "", title="heap")
    for backend in finegrained_alloc.BACKENDS:
        try:
            usable, reason = finegrained_alloc.available(backend)
        except finegrained_alloc.NotBuilt as error:
            usable, reason = False, str(error)
        chosen = "used" if usable and backend == target.backend() else "usable" if usable else "no"
        table.add_row(backend, chosen, reason)
        if chosen == "used":
            size, problem = default_bytes(target.device()), why_fixed()
            grows = (
                f"{gib(size.fixed)} at once: {problem}"
                if problem
                else f"what it needs, up to {gib(size.limit)}"
            )
            table.add_row("", "takes", grows)
    return table


def versions_table() -> Table:
    """What runs here."""
    table = Table("software", "version", title="versions")
    table.add_row("pyrocshmem", entry.version())
    table.add_row("Python", platform.python_version())
    for package, names in _PACKAGES.items():
        found = [version for name in names if (version := _version(name))]
        table.add_row(package, found[0] if found else "not installed")
    runtime = torch.version.hip or torch.version.cuda
    table.add_row("ROCm" if torch.version.hip else "CUDA", runtime or "none")
    return table


def show(console: Console) -> None:
    """Print all of it."""
    console.print(f"[bold]Ranks run on:[/] {target.describe()}")
    for table in (devices_table(), peers_table(), heap_table(), versions_table()):
        if table is not None:
            console.print(table)
    if os.path.isdir("/dev/shm"):
        shm = shutil.disk_usage("/dev/shm")
        console.print(f"/dev/shm: {gib(shm.total)}, {gib(shm.free)} free (heaps of CPU ranks live there)")
