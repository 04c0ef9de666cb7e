"""Symmetric heap for ranks of one machine: host API, device API (`pyrocshmem.device`), signals (`.signal`).

    import pyrocshmem

    def rank_main(rank, world_size):
        with pyrocshmem.Heap(1 << 20) as heap:      # the default process group
            x = heap.zeros(1024)
            heap.peer_view(x, (rank + 1) % world_size).fill_(rank)
            heap.barrier()
            return float(x[0])

    print(pyrocshmem.spawn(rank_main, 2))           # [1.0, 0.0]

Import this package before Triton: `pyrocshmem.target` decides whether kernels are compiled or interpreted.

In a process of the project's commands, which answer bad options before they import torch, the names load when one is
asked for. In every other process they load now.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyrocshmem.entry import checks_options_first, version

if TYPE_CHECKING or not checks_options_first():
    from pyrocshmem import target  # isort: skip  # before anything that imports Triton
    from pyrocshmem.endings import close_all
    from pyrocshmem.errors import (
        CallMismatch,
        HeapOutOfMemory,
        InitTimeout,
        PeerAborted,
        PeerTimeout,
        ShmemError,
        WorkspaceBusy,
    )
    from pyrocshmem.groups import Group, ThreadGroup, as_group
    from pyrocshmem.heap import Heap, Usage, heap_for
    from pyrocshmem.launching import RankResult, RanksFailed, from_torchrun, run_ranks, spawn, spawn_threads
else:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            for module in ("target", "endings", "errors", "groups", "heap", "launching"):
                loaded = import_module(f"pyrocshmem.{module}")
                if name in (module, *vars(loaded)):
                    return loaded if name == module else getattr(loaded, name)
        raise AttributeError(f"module 'pyrocshmem' has no attribute {name!r}")


__version__ = version()

__all__ = [
    "CallMismatch",
    "Group",
    "Heap",
    "HeapOutOfMemory",
    "InitTimeout",
    "PeerAborted",
    "PeerTimeout",
    "RankResult",
    "RanksFailed",
    "ShmemError",
    "ThreadGroup",
    "Usage",
    "WorkspaceBusy",
    "__version__",
    "as_group",
    "close_all",
    "from_torchrun",
    "heap_for",
    "run_ranks",
    "spawn",
    "spawn_threads",
    "target",
]
