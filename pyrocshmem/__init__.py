"""Symmetric heap for ranks of one machine: host API, device API (`pyrocshmem.device`), signals (`.signal`).

    import pyrocshmem

    def rank_main(rank, world_size):
        with pyrocshmem.Heap(1 << 20) as heap:      # the default process group
            x = heap.zeros(1024)
            heap.peer_view(x, (rank + 1) % world_size).fill_(rank)
            heap.barrier()
            return float(x[0])

    print(pyrocshmem.spawn(rank_main, 2))           # [1.0, 0.0]

Kernels of one's own (docs/device-kernels.md) take their context and flags from a `Workspace`, name themselves by an
`op_number`, and are started by `launch`.

Import this package before Triton: `pyrocshmem.target` decides whether kernels are compiled or interpreted.
"""

from typing import TYPE_CHECKING, Any

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
from pyrocshmem.status import op_number

if TYPE_CHECKING:
    from pyrocshmem.calls.kernels import launch
    from pyrocshmem.calls.workspace import Workspace

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
    "Workspace",
    "WorkspaceBusy",
    "as_group",
    "close_all",
    "from_torchrun",
    "heap_for",
    "launch",
    "op_number",
    "run_ranks",
    "spawn",
    "spawn_threads",
    "target",
]


def __getattr__(name: str) -> Any:
    """What imports Triton's language and interpreter, when it is first asked for: forming heaps needs neither."""
    if name == "Workspace":
        from pyrocshmem.calls.workspace import Workspace as found
    elif name == "launch":
        from pyrocshmem.calls.kernels import launch as found  # type: ignore[assignment]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found
