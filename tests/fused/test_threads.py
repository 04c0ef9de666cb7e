"""Fused ops by ranks that are threads of one process: what they plan, capture and launch at the same time."""

from typing import Any

import pytest
import torch

from pyrocshmem import Heap, spawn_threads, stream_k
from pyrocshmem.calls.workspace import Workspace
from tests.stream_k.products import integers

TIER = 2
pytestmark = pytest.mark.gpu_a_rank("ranks are threads, which would wait for one another on the GPU")
# The second one outgrows the buffers of the first, which is then planned anew.
SHAPES = ((768, 512, 64), (1536, 1024, 64), (768, 512, 64))
OPS = ("gemm_reduce_scatter", "gemm_all_reduce", "gemm_all_scatter", "all_gather_gemm")
CALLS = 3


def every_op(group: Any) -> list[str]:
    """What was wrong of calls by copy engine, enqueued and replayed."""
    wrong = []
    with Heap(256 << 20, group) as heap:
        workspace, ranks = Workspace(heap, wait_seconds=20.0), range(heap.world_size)
        for M, N, K in SHAPES:
            a = [integers(M, K, torch.float16, rank).to(heap.device) for rank in ranks]
            b = [integers(K, N, torch.float16, 10 + rank).to(heap.device) for rank in ranks]
            total = sum(x.float() @ y.float() for x, y in zip(a, b, strict=True))
            assert isinstance(total, torch.Tensor)
            wanted = {
                "gemm_reduce_scatter": total.tensor_split(heap.world_size)[heap.rank],
                "gemm_all_reduce": total,
                "gemm_all_scatter": torch.cat([a[0].float() @ y.float() for y in b], 1),
                "all_gather_gemm": torch.cat(a).float() @ b[heap.rank].float(),
            }
            for op in OPS:
                rows = heap.world_size * M if op == "all_gather_gemm" else M
                config = stream_k.choose(
                    op, rows, N, K, torch.float16, heap.world_size, heap.device, placement="copy_engine"
                )
                x = a[0] if op == "gemm_all_scatter" else a[heap.rank]
                out = torch.empty_like(wanted[op], dtype=torch.float16)
                for call in range(CALLS):
                    out.fill_(float("nan"))
                    where: dict[str, Any] = {"group": heap, "workspace": workspace}
                    getattr(stream_k, op)(x, b[heap.rank], out=out, config=config, **where)
                    heap.synchronize()
                    if not torch.equal(out.float(), wanted[op]):
                        wrong.append(f"{op} {M} x {N} x {K}, call {call}")
    return wrong


@pytest.mark.num_gpus(2)
def test_copy_engines_of_threads() -> None:
    assert spawn_threads(every_op, 2, timeout=100.0) == [[], []]


def normed(group: Any) -> list[bool]:
    """Calls of a product with a norm: whether the ranks' columns together were the right rows."""
    with Heap(8 << 20, group) as heap:
        a, weight = integers(20, 48, torch.float32, 1).to(heap.device), torch.ones(12, device=heap.device)
        b = [integers(48, 12, torch.float32, 10 + rank).to(heap.device) for rank in range(heap.world_size)]
        rows = a.double() @ torch.cat(b, 1).double()
        wanted = torch.nn.functional.rms_norm(rows, rows.shape[1:], eps=1e-6).float()
        found = []
        for _ in range(CALLS):
            heap.barrier()  # so that their products come at the same time
            y = stream_k.gemm_rms_norm_all_scatter(a, b[heap.rank], weight, 1e-6, group=heap)
            heap.synchronize()
            found.append(torch.allclose(y, wanted, rtol=1e-5, atol=1e-6))
    return found


@pytest.mark.num_ranks(2)
def test_a_product_with_a_norm_of_threads() -> None:
    assert spawn_threads(normed, 2, timeout=60.0) == [[True] * CALLS] * 2


def backward(group: Any) -> list[bool]:
    """Gradients of a sum of products, which are products of each rank's own: whether they were right."""
    with Heap(8 << 20, group) as heap:
        ranks = range(heap.world_size)
        a = [integers(20, 24, torch.float32, rank).to(heap.device) for rank in ranks]
        b = [integers(24, 12, torch.float32, 10 + rank).to(heap.device) for rank in ranks]
        x, y = (each[heap.rank].clone().requires_grad_() for each in (a, b))
        grad, found = integers(20, 12, torch.float32, 20).to(heap.device), []
        for _ in range(CALLS):
            x.grad = y.grad = None
            out = stream_k.gemm_all_reduce(x, y, group=heap)
            heap.barrier()  # so that their products come at the same time
            out.backward(grad)
            heap.synchronize()
            assert x.grad is not None
            assert y.grad is not None
            found.append(
                torch.equal(x.grad, grad @ y.detach().t()) and torch.equal(y.grad, x.detach().t() @ grad)
            )
    return found


@pytest.mark.num_ranks(2)
def test_gradients_of_threads() -> None:
    assert spawn_threads(backward, 2, timeout=60.0) == [[True] * CALLS] * 2
