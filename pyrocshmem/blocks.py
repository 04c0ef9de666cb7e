"""`Block`: a piece of a heap; `Owner`: what the storages of its tensors refer to; and whether a tensor's was freed."""

import weakref
from dataclasses import dataclass

import torch

from pyrocshmem.forming import SharedMemory


@dataclass(eq=False)
class Block:
    """An allocation of a heap. offered: whether the peers know that this rank has dropped it. holder: who has it, in
    words."""

    memory: SharedMemory
    offset: int
    nbytes: int
    live: bool = True
    offered: bool = False
    holder: str = "tensors"
    _owner: "weakref.ref[Owner] | None" = None

    def own(self) -> "Owner":
        """What the storages of its tensors are to refer to."""
        owner = Owner(self)
        self._owner = weakref.ref(owner)
        return owner

    @property
    def dropped(self) -> bool:
        """Whether no tensor of this rank is on it any more, nor one of a peer's at the same place."""
        return self._owner is not None and self._owner() is None

    def retire(self) -> None:
        """From now on its bytes may be another's."""
        self.live = False
        retired.add(weakref.ref(self, retired.discard))


class Owner:
    """Lives as long as any storage on its block: the heap holds the block, the storages hold this."""

    __slots__ = ("__weakref__", "block")

    def __init__(self, block: Block) -> None:
        self.block = block


def block_under(storage: torch.UntypedStorage) -> Block | None:
    """The block that `storage` was made on, None where it wasn't made by a heap on this rank's own memory."""
    owner = getattr(storage, "pyrocshmem_owner", None)
    return owner.block if isinstance(owner, Owner) else None


def held_by(tensor: torch.Tensor, holder: str) -> None:
    """Say who has the block of `tensor`, for `Heap.usage`. Nothing where it is none of a heap."""
    if (block := block_under(tensor.untyped_storage())) is not None:
        block.holder = holder


# Those whose tensors live on. There are none as a rule, which is what a call that is repeated asks first.
retired: set[weakref.ref[Block]] = set()


def is_freed(x: torch.Tensor) -> bool:
    """Whether `x` lies in a block that its heap has freed. False where functorch wraps `x`, and its memory can't be
    seen: what the call then comes to is checked in its turn."""
    if not retired or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    block = block_under(x.untyped_storage())
    return block is not None and not block.live
