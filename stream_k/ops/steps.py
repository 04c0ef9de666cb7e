"""The small programs between a call's products and copies, which wait for flags and raise them: launches of
`collectives.row_blocks.step_kernel`, shared by all plans of a workspace."""

from __future__ import annotations

from typing import Any

import torch

from pyrocshmem import trace
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives import row_blocks


def step_launch(
    workspace: Workspace, op: int, *, enters: bool = False, ends: bool = False, between: bool = False
) -> Launch:
    """That of `op` (a `status.Op`) whose machine code these say all of, for `Launch.compile_once`: a call of other rows
    finds it made and compiled."""
    key = "step", op, enters, ends, between, trace.recorder() is not None
    shared = workspace.plans.shared
    found: Launch | None = shared.get(key)
    if found is None:
        constants = {
            "OP": op,
            "WORLD": workspace.world_size,
            "ENTERS": enters,
            "ENDS": ends,
            "BETWEEN": between,
        }
        found = shared[key] = Launch(row_blocks.step_kernel, 1, constants, 4, 1, waits=True)
    return found


def step_arguments(
    workspace: Workspace,
    flags: torch.Tensor,
    tile_flags: torch.Tensor | None = None,
    raised: int = 0,
    receivers: int = 0,
    tiles: tuple[int, int] = (0, 0),
    awaited: int = 0,
    senders: int = 0,
) -> tuple[Any, ...]:
    """Those of `collectives.row_blocks.step_kernel`. tile_flags: None where it waits for no tiles."""
    own = flags if tile_flags is None else tile_flags
    return flags, own, raised, receivers, *tiles, awaited, senders, workspace.context
