"""A heap for planning alone: one process plays one rank of any number, votes pass, memory is plain and stays unread."""

from collections.abc import Callable
from typing import Any

import torch

from pyrocshmem import status
from pyrocshmem.heap import SYSTEM_WORDS, Heap
from pyrocshmem.heap_tensors import Plan


class PlanningHeap(Heap):
    """Rank 1 of `world_size` (0 of one), on the CPU; allocates, answers every question of an op that plans a call, and
    reaches nobody. Plans of a workspace on it are for one target."""

    def __init__(self, world_size: int) -> None:
        self._closed = True  # for `close` and `__del__`: there is nothing to leave
        self.rank, self.world_size = min(1, world_size - 1), world_size
        self.device = torch.device("cpu")
        self.base, self.bases = 0, (0,) * world_size
        self.heap_bases = torch.zeros(9, dtype=torch.int64)
        self.status = torch.zeros(status.NUM_WORDS, dtype=torch.int64)
        self._system = torch.zeros(SYSTEM_WORDS, dtype=torch.int32)
        self.workspace: Any = None
        self._mine: dict[int, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"PlanningHeap({self.world_size})"

    def _allocate(self, name: str, make_plan: Callable[[], Plan]) -> torch.Tensor:
        plan = make_plan()
        tensor = torch.empty(plan.shape, dtype=plan.dtype)
        if plan.fill is not None:
            plan.fill(tensor)
        self._mine[tensor.data_ptr()] = tensor
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        del self._mine[tensor.data_ptr()]

    def peer_view(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return tensor

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._mine

    def offset(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def vote(self, call: str, payload: bytes = b"") -> list[bytes]:
        return [payload] * self.world_size

    def synchronize(self) -> None:
        pass

    def check(self) -> None:
        pass

    def attach(self, caller: object) -> None:
        pass

    def new_ledger(self) -> None:
        return None
