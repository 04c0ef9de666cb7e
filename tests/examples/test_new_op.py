"""examples/new_op: an op from outside the library is right, differentiable, and known wherever ops are listed."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyrocshmem import CallMismatch, Heap, PeerTimeout, Workspace, stream_k
from pyrocshmem.calls.op import find, registered
from pyrocshmem.reference.accuracy import make_operand
from pyrocshmem.reference.operands import Operands
from pyrocshmem.reference.problems import problem_of
from tests.ranks import run_ranks, values

TIER = 2
TIMEOUT_S = 200
HEAP_BYTES = 16 << 20
M, N, K = 77, 150, 90


def op() -> Any:
    """Where it is used first, since importing it registers it."""
    from examples.new_op import gemm_broadcast

    return gemm_broadcast


def config(placement: str, dtype: torch.dtype, ranks: int, device: torch.device) -> stream_k.Config:
    return stream_k.choose("gemm_broadcast", M, N, K, dtype, ranks, device, placement=placement)


def operands(dtype: torch.dtype, rank: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """a, b, bias of a rank: all ranks' differ, so that another one's product would be noticed."""
    shapes = {"a": (M, K), "b": (K, N), "bias": (N,)}
    return tuple(make_operand(shape, dtype, 3, rank, tag=tag, device=device) for tag, shape in shapes.items())


def products(rank: int, world_size: int) -> list[str]:
    """What was wrong, of both placements, each rank as the root, several dtypes and kinds of results."""
    wrong, broadcast = [], op().gemm_broadcast
    with Heap(HEAP_BYTES) as heap:
        shared = heap.empty(M, N, dtype=torch.float16)
        for placement in ("push", "messages"):
            for root, dtype in enumerate((torch.float16, torch.float32, torch.bfloat16)[: world_size + 1]):
                root %= world_size
                chosen = config(placement, dtype, world_size, heap.device)
                mine = operands(dtype, rank, heap.device)
                a, b, bias = operands(dtype, root, heap.device)
                outs: list[Any] = [None, torch.empty(N, M, dtype=dtype, device=heap.device).t()]
                outs += [shared] if dtype == torch.float16 else []
                for out in outs:
                    if out is not None:
                        out.fill_(float("nan"))
                    for _ in range(2):  # planned, then looked up
                        c = broadcast(*mine[:2], root=root, group=heap, bias=mine[2], out=out, config=chosen)
                    heap.barrier()
                    whole = a.double() @ b.double() + bias.double()
                    terms = a.double().abs() @ b.double().abs() + bias.double().abs()
                    bound = K**0.5 * 2**-23 * terms + torch.finfo(dtype).eps / 2 * whole.abs()
                    if not ((c.double() - whole).abs() <= 1.001 * bound).all():
                        wrong.append(
                            f"{placement}, root {root}, {dtype}, {None if out is None else out.stride()}"
                        )
    return wrong


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.num_ranks(n)) for n in (2, 3)])
def test_right_in_both_placements(ranks: int) -> None:
    assert values(run_ranks(products, ranks, timeout=TIMEOUT_S)) == [[]] * ranks


def beside_its_reference(rank: int, world_size: int) -> list[bool]:
    """Whether the op and its reference are right, and whether a wrong element is seen, of the problem that the op's
    place in the registry describes."""
    with Heap(HEAP_BYTES) as heap:
        x = Operands(problem_of(op().OP), (M, N, K), torch.float16, 3, rank, world_size, heap.device)
        reference = x.reference()
        reference.call()
        c = op().gemm_broadcast(x.a, x.b, root=0, group=heap)
        heap.synchronize()
        found = [x.check(c).ok, x.check(reference.result(), **x.of_library()).ok]
        c[3, 5] *= 1.01
        return [*found, x.check(c).ok]


@pytest.mark.num_ranks(2)
def test_its_problem_is_known() -> None:
    assert values(run_ranks(beside_its_reference, 2, timeout=TIMEOUT_S)) == [[True, True, False]] * 2


def gradients(rank: int, world_size: int) -> list[float]:
    """The largest differences of A's and B's gradient from PyTorch's, which are the root's alone."""
    with Heap(HEAP_BYTES) as heap:
        a, b, bias = (x.requires_grad_() for x in operands(torch.float32, rank, heap.device))
        grad = make_operand((M, N), torch.float32, 5, 0, tag="grad", device=heap.device)
        op().gemm_broadcast(a, b, root=1, group=heap, bias=bias).backward(grad)
        mine = grad if rank == 1 else torch.zeros_like(grad)
        found = [(a.grad - mine @ b.detach().t()), (b.grad - a.detach().t() @ mine), bias.grad - mine.sum(0)]
        return [float(difference.abs().max()) for difference in found]


@pytest.mark.num_ranks(2)
def test_gradients_are_the_roots() -> None:
    for differences in values(run_ranks(gradients, 2, timeout=TIMEOUT_S)):
        assert max(differences) < 1e-3


def mistakes(rank: int, world_size: int) -> list[str]:
    """What is raised where roots differ, where the root is no rank, and, with the op's name, where it never calls."""
    found, broadcast = [], op().gemm_broadcast
    with Heap(HEAP_BYTES) as heap:
        a, b, _ = operands(torch.float16, rank, heap.device)
        for root in (rank, world_size):
            try:
                broadcast(a, b, root=root, group=heap)
            except (CallMismatch, ValueError) as error:
                found.append(f"{type(error).__name__}: {error}")
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=2)
        broadcast(a, b, root=0, group=heap, workspace=workspace)
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            with pytest.raises(
                PeerTimeout
            ) as raised:  # at once on a CPU, else by the time the device is done
                _ = broadcast(a, b, root=0, group=heap, workspace=workspace), heap.synchronize()
            found.append(str(raised.value))
            store.set("waited", "")
        store.wait(["waited"])  # rank 0 has not closed its heap before
    return found


@pytest.mark.num_ranks(2)
def test_faults_name_the_op() -> None:
    first, second = values(run_ranks(mistakes, 2, timeout=TIMEOUT_S))
    for found in (first, second):
        assert found[0].startswith("CallMismatch")
        assert "options=(1,)" in found[0]
        assert found[1] == "ValueError: root is 2, the group has ranks 0 to 1"
    assert second[2].startswith("gemm_broadcast")


def listed(rank: int, world_size: int) -> None:
    ours = op().OP
    assert find("gemm_broadcast") is ours
    numbers = [each.number for each in registered()]
    assert len(numbers) == len(set(numbers))
    assert ours.number in numbers
    cpu = torch.device("cpu")
    chosen = stream_k.choose("gemm_broadcast", 4096, 4096, 64, torch.float16, 2, cpu)
    assert chosen.placement == "push"
    assert stream_k.choose("gemm_broadcast", 8, 64, 64, torch.float16, 2, cpu).placement == "messages"
    explained = stream_k.explain("gemm_broadcast", 4096, 4096, 64, torch.float16, 2, cpu)
    assert explained.config == chosen
    with pytest.raises(ValueError, match="gemm_broadcast has messages, push"):
        stream_k.choose("gemm_broadcast", 8, 64, 64, torch.float16, 2, cpu, placement="copy_engine")
    assert torch.ops.new_op.gemm_broadcast is not None


def test_known_wherever_ops_are_listed() -> None:
    """By name, with a number that no other op has, its own placements and a reason for each."""
    # In a process of its own: other tests of this one count the library's ops.
    values(run_ranks(listed, 1, timeout=TIMEOUT_S))
