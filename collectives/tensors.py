"""What the collectives on whole tensors share: dtypes, agreeing, launching."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from pyrocshmem import trace
from stream_k.config import num_multiprocessors
from stream_k.launch import Launch
from stream_k.workspace import Workspace

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

NUM_WARPS = 8


def run(
    workspace: Workspace,
    key: Hashable,
    call: str,
    kernel: Any,
    constants: dict[str, Any],
    blocks: int,
    args: tuple[Any, ...],
    programs: int | None = None,
    copied: tuple[torch.Tensor, torch.Tensor] | None = None,
    before: Callable[[], None] | None = None,
) -> None:
    """Launch `kernel` with at most `blocks` programs, and at most `programs` (one a multiprocessor unless given). The
    first call of a kind is compared between ranks, compiled and loaded by all. copied: (to, from), what is then copied
    out of the workspace, before it is another call's. before: enqueues what the kernel reads of the workspace."""
    heap = workspace.heap
    assert heap is not None
    # A kernel that marks its stages is another one; all ranks record, or none.
    recorded = trace.recorder() is not None
    key, call = (key, recorded), f"{call}, recorded" if recorded else call
    launch: Launch | None = workspace.plans.get(key)
    if launch is None:
        launch = Launch(
            kernel, min(blocks, programs or num_multiprocessors(heap.device)), constants, NUM_WARPS, 1
        )
        workspace.planned_together(call, lambda: launch.compile(args))
        workspace.plans[key] = launch
    with workspace.begin(call):
        if before is not None:
            before()
        launch(args)
        if copied is not None:
            copied[0].copy_(copied[1])


def agree(workspace: Workspace, call: str) -> None:
    """Compare a call that launches nothing between ranks, the first time it is made."""
    if call not in workspace.agreed:
        workspace.compare(call)
        workspace.agreed[call] = 0
