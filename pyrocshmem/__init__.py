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

In a process of the project's commands, which answer bad options before they import torch, the names load when one is
asked for. In every other process they load now.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyrocshmem.entry import checks_options_first
from pyrocshmem.versions import version

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
    from pyrocshmem.hosts import Hosts, hosts_for
    from pyrocshmem.launching import RankResult, RanksFailed, from_torchrun, run_ranks, spawn, spawn_threads
    from pyrocshmem.status import op_number

if TYPE_CHECKING:
    from pyrocshmem.calls.invariance import batch_invariant
    from pyrocshmem.calls.kernels import launch
    from pyrocshmem.calls.workspace import Workspace
    from pyrocshmem.warming import warm_up

__version__ = version()

__all__ = [
    "CallMismatch",
    "Group",
    "Heap",
    "HeapOutOfMemory",
    "Hosts",
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
    "__version__",
    "as_group",
    "batch_invariant",
    "close_all",
    "from_torchrun",
    "heap_for",
    "hosts_for",
    "launch",
    "op_number",
    "run_ranks",
    "spawn",
    "spawn_threads",
    "target",
    "warm_up",
]


# What imports Triton's language and interpreter, which forming a heap needs not: loaded when it is first asked for.
_LATE = {
    "Workspace": "calls.workspace",
    "batch_invariant": "calls.invariance",
    "launch": "calls.kernels",
    "warm_up": "warming",
}
_PACKAGES = (
    "benchmarks",
    "collectives",
    "finegrained_alloc",
    "reference",
    "stream_k",
    "testing",
    "torch_ops",
)
_MODULES = ("target", "endings", "errors", "groups", "heap", "hosts", "launching", "status")


def __getattr__(name: str) -> Any:
    found: Any
    if name in _PACKAGES or (name in _MODULES and name in __all__):
        found = import_module(f"pyrocshmem.{name}")
    elif name in __all__:
        modules = (import_module(f"pyrocshmem.{module}") for module in (_LATE.get(name), *_MODULES) if module)
        found = next(getattr(module, name) for module in modules if hasattr(module, name))
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found
