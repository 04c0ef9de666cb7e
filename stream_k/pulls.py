"""Blocks of a result that a rank's copy engine fetches as they finish at its peers, straight into the caller's tensor.

Waits and copies have a stream each: a copy engine takes 15 us to start after a kernel, and none after another copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pyrocshmem import trace
from pyrocshmem.copies import RowCopy
from stream_k.launch import Launch
from stream_k.workspace import Workspace

# Streams beside those of `stream_k.row_plan`.
_WAITS, _PULLS = 4, 5


class Pull(NamedTuple):
    """A step. arguments: of the launch that waits for it. copies: from the peers. own: from this rank."""

    arguments: tuple[Any, ...]
    copies: Sequence[RowCopy]
    own: Sequence[RowCopy] = ()


class Pulls:
    """The steps of a plan. launch: what waits for one."""

    def __init__(self, workspace: Workspace, launch: Launch, steps: Sequence[Pull]) -> None:
        self.workspace, self.launch, self.steps = workspace, launch, steps

    def fork(self) -> None:
        """What comes next on the current stream is beside the pulls."""
        self.workspace.fork(_WAITS)

    def into(self, out: torch.Tensor) -> None:
        """Enqueue the pulls into `out`, from where `fork` was on, and join the current stream: each step's wait on one
        stream, own copies behind it, the peers' on another.

        To be called after all that the peers wait for, which on the CPU target has then run, and on a GPU lies before
        it in every queue that streams may share.
        """
        workspace = self.workspace
        with workspace.beside(_WAITS):
            for step in self.steps:
                self.launch(step.arguments)
                workspace.fork(_PULLS)
                with workspace.beside(_PULLS):
                    for copy in step.copies:
                        trace.copy(copy, out)
                for copy in step.own:
                    trace.copy(copy, out)
            workspace.join(_PULLS)
        workspace.join(_WAITS)
