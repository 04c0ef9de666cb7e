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
WAITS, PULLS = 4, 5


class Pull(NamedTuple):
    """A step. arguments: of the launch that waits for it. copies: from the peers. own: from this rank."""

    arguments: tuple[Any, ...]
    copies: Sequence[RowCopy]
    own: Sequence[RowCopy] = ()


def pull(workspace: Workspace, launch: Launch, steps: Sequence[Pull], out: torch.Tensor) -> None:
    """Enqueue each step's wait on stream WAITS, then its copies into `out` on stream PULLS, own ones on WAITS.

    Comes after all that the peers wait for, which on the CPU target has then run, and on a GPU lies before it in every
    queue that streams may share.
    """
    with workspace.beside(WAITS):
        for step in steps:
            launch(step.arguments)
            workspace.fork(PULLS)
            with workspace.beside(PULLS):
                for copy in step.copies:
                    trace.copy(copy, out)
            for copy in step.own:
                trace.copy(copy, out)
