"""What may be given as a tensor, as PyTorch's collectives have it: parameters, subclasses, memory of NumPy; and what
may not, with what to give instead."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from pyrocshmem import Heap, collectives, target  # before Triton
from tests.collectives.test_tensors import HEAP_BYTES, TIMEOUT_S
from tests.ranks import run_ranks, values

TIER = 2


class Derived(torch.Tensor):
    """Of a class of its own, which PyTorch's operators keep."""


def subclasses(heap: Heap) -> list[str]:
    """Kept, as by PyTorch's own operators, in new, given and joined results."""
    wrong, rank, world = [], heap.rank, heap.world_size
    plain = torch.arange(4.0, device=heap.device) + rank
    parts = [plain - rank + r for r in range(world)]
    x = plain.as_subclass(Derived)
    for name, found, right in (
        ("new", collectives.all_reduce(x, group=heap, op="max"), parts[-1]),
        ("gathered", collectives.all_gather(x, group=heap), torch.cat(parts)),
        ("integers", collectives.all_gather(x.int(), group=heap), torch.cat(parts).int()),
        ("given", collectives.all_reduce(x, group=heap, out=torch.empty_like(x)), sum(parts)),
        ("in place", collectives.all_reduce_(x.clone(), group=heap), sum(parts)),
    ):
        heap.synchronize()
        if type(found) is not Derived or not torch.equal(found.as_subclass(torch.Tensor), right):
            wrong.append(f"{name}: {found}")
    weight = torch.nn.Parameter(plain.clone())
    with torch.no_grad():
        collectives.broadcast_(weight, world - 1, group=heap)
        copied = collectives.all_reduce(weight, group=heap, op="avg")
    heap.synchronize()
    if type(copied) is not torch.Tensor or not torch.equal(copied, weight.detach()):
        wrong.append(f"a parameter: {copied}")
    # What PyTorch's functional collectives return is waited for.
    pending = functional.all_reduce(plain, "sum", dist.group.WORLD)
    if not torch.equal(collectives.all_reduce(pending, group=heap), world * sum(parts)):
        wrong.append("a tensor that is waited for")
    return wrong


def memory_of_numpy(heap: Heap) -> list[str]:
    """Without a copy, also where elements don't begin at multiples of their size."""
    wrong = []
    for dtype in (np.int32, np.int64, np.uint8, np.float32):
        raw = np.frombuffer(bytearray(range(1 + 8 * 8)), dtype=np.uint8)[1:].view(dtype)
        x = torch.from_numpy(raw)
        found = collectives.all_gather(x, group=heap)
        out = torch.from_dlpack(np.zeros(2 * len(raw), dtype=dtype))
        collectives.all_gather(x, group=heap, out=out)
        if found.tolist() != 2 * raw.tolist() or not torch.equal(found, out):
            wrong.append(str(dtype))
    return wrong


def refused(heap: Heap) -> None:
    x = torch.ones(4, device=heap.device)
    mesh = init_device_mesh(heap.device.type, (heap.world_size,))
    cases: tuple[tuple[Any, str], ...] = (
        (np.ones(3), r"x is a ndarray, a torch\.Tensor is needed; torch\.from_dlpack\(x\) makes one"),
        ([1.0], r"x is a list, a torch\.Tensor is needed$"),
        (distribute_tensor(x, mesh, [Replicate()]), r"x is a DTensor, .*; give x\.to_local\(\)"),
        (x.to(torch.complex64), r"x is torch\.complex64, a tensor is needed of torch\.float16"),
        (x.to_sparse(), r"of layout torch\.sparse_coo; dense ones"),
        (torch.nested.nested_tensor([x, x[:2]]), "a tensor is nested; dense ones"),
    )
    for call in (
        collectives.all_reduce,
        collectives.all_reduce_,
        collectives.all_gather,
        collectives.reduce_scatter,
        collectives.broadcast,
        collectives.broadcast_,
    ):
        for given, text in cases:
            with pytest.raises(TypeError, match=text):
                call(given, group=heap)
    with pytest.raises(TypeError, match=r"out is a DTensor, which has no memory of its own"):
        collectives.all_reduce(x, group=heap, out=cases[2][0])


def kinds(rank: int, world_size: int) -> list[str]:
    with Heap(HEAP_BYTES) as heap:
        refused(heap)
        found = subclasses(heap)
        return found + memory_of_numpy(heap) if target.interpreted() else found


@pytest.mark.num_ranks(2)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_kinds_of_tensors() -> None:
    assert values(run_ranks(kinds, 2, timeout=TIMEOUT_S)) == [[], []]
