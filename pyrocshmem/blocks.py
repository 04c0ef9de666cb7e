"""`Block`: a piece of a heap, to which the storages of its tensors refer; and whether a tensor's was freed."""

import weakref
from dataclasses import dataclass

import torch

from pyrocshmem.forming import SharedMemory


@dataclass(eq=False)
class Block:
    """An allocation of a heap; the storages of its tensors refer to it."""

    memory: SharedMemory
    offset: int
    nbytes: int
    live: bool = True

    def retire(self) -> None:
        """From now on its bytes may be another's."""
        self.live = False
        _retired.add(weakref.ref(self, _retired.discard))


# Those whose tensors live on. There are none as a rule, which is what a call that is repeated asks first.
_retired: set[weakref.ref[Block]] = set()


def is_freed(x: torch.Tensor) -> bool:
    """Whether `x` lies in a block that its heap has freed. False where functorch wraps `x`, and its memory can't be
    seen: what the call then comes to is checked in its turn."""
    if not _retired or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    owner = getattr(x.untyped_storage(), "pyrocshmem_owner", None)
    return isinstance(owner, Block) and not owner.live
