"""Memory that peers can map: fine-grained on AMD GPUs, plain on NVIDIA GPUs, nameless files in /dev/shm on a CPU.

One rank allocates and exports, its peers open, all of them read and write while kernels run::

    with finegrained_alloc.alloc(1 << 20, "host") as memory:
        handle = memory.export()                        # fixed-length bytes, sent by any means
        ...
        with finegrained_alloc.open_handle(handle) as view:   # at the peer
            view.ptr, view.nbytes

    with finegrained_alloc.pool():                      # any PyTorch tensor on such memory
        x = torch.empty(4096, device="cuda")

    with finegrained_alloc.reserve(1 << 30, "host") as space:     # memory that grows without moving
        first = finegrained_alloc.alloc(2 << 20, "host", at=space.ptr)
        second = finegrained_alloc.alloc(4 << 20, "host", at=space.ptr + (2 << 20))

Protocol: the owner may ``seal()`` once all peers have opened, after which no other can; peers close before the owner
frees. Nothing is left behind when a rank is killed, whenever that is. The work is done by a C library without
dependencies, built by ``finegrained_alloc/build.sh``; it is loaded at the first call, not at import.
"""

from .library import BACKENDS, NotBuilt, StaleHandle, Unavailable, available, load
from .memory import (
    PIECE,
    Allocation,
    Mapping,
    Space,
    Stats,
    alloc,
    can_access_peer,
    copy_rows,
    device_count,
    enable_peer_access,
    export_pointer,
    handle_bytes,
    live,
    open_handle,
    reserve,
)
from .torch_pool import pool

__all__ = [
    "BACKENDS",
    "PIECE",
    "Allocation",
    "Mapping",
    "NotBuilt",
    "Space",
    "StaleHandle",
    "Stats",
    "Unavailable",
    "alloc",
    "available",
    "can_access_peer",
    "copy_rows",
    "device_count",
    "enable_peer_access",
    "export_pointer",
    "handle_bytes",
    "live",
    "load",
    "open_handle",
    "pool",
    "reserve",
]
