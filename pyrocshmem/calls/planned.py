"""Kernels that are launched on their own: planned by all ranks the first time, looked up afterwards."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from pyrocshmem import trace
from pyrocshmem.calls import planning
from pyrocshmem.calls.call_name import CallName
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.workspace import Workspace

NUM_WARPS = 8


def run(
    workspace: Workspace,
    key: Hashable,
    call: CallName,
    kernel: Any,
    constants: dict[str, Any],
    programs: int,
    args: tuple[Any, ...],
) -> None:
    """Launch `kernel`. The first call of a kind is compared between ranks, compiled and loaded by all."""
    # A kernel that marks its stages is another one; all ranks record, or none.
    recorded = trace.recorder() is not None
    key, call = (key, recorded), call._replace(text=f"{call.text}, recorded") if recorded else call
    launch: Launch | None = workspace.plans.get(key)
    if launch is None:
        launch = Launch(kernel, programs, constants, NUM_WARPS, 1)
        workspace.planned_together(call, lambda _: launch.compile(args))
        if planning.keeps_plans():
            workspace.plans[key] = launch
    if planning.here.mode is not None:
        return
    with workspace.begin(call):
        launch(args)


def agree(workspace: Workspace, call: CallName) -> None:
    """Compare a call that launches nothing between ranks, the first time it is made."""
    if call.text not in workspace.agreed:
        workspace.compare(call)
        workspace.agreed[call.text] = 0
