"""No process group where there should be one: whatever takes a group raises, and nothing is computed alone."""

import inspect
import os

import pytest
import torch
import torch.distributed as dist

import pyrocshmem
from pyrocshmem import Heap, ThreadGroup, as_group, collectives, heap_for, stream_k
from pyrocshmem.calls import timeline
from pyrocshmem.stream_k import nn
from tests.ranks import run_ranks, values
from tests.stream_k.products import device

TIER = 1
MIB = 1 << 20


def calls():
    """Everything public that takes a group, called without one."""
    a, b, rows, weight = (torch.ones(shape, device=device()) for shape in ((4, 8), (8, 4), (4, 8), (8,)))
    norm = {"residual": None, "weight": weight, "eps": 1e-6}
    return {
        Heap: lambda: Heap(MIB),
        as_group: as_group,
        heap_for: heap_for,
        pyrocshmem.hosts_for: pyrocshmem.hosts_for,
        pyrocshmem.warm_up: lambda: pyrocshmem.warm_up(("all_reduce", 8, 0), rows=4, dtype=torch.float32),
        stream_k.gemm_all_reduce: lambda: stream_k.gemm_all_reduce(a, b),
        stream_k.gemm_reduce_scatter: lambda: stream_k.gemm_reduce_scatter(a, b),
        stream_k.gemm_all_scatter: lambda: stream_k.gemm_all_scatter(a, b),
        stream_k.all_gather_gemm: lambda: stream_k.all_gather_gemm(a, b),
        stream_k.gemm_all_reduce_rms_norm: lambda: stream_k.gemm_all_reduce_rms_norm(
            a, b, None, weight[:4], 1e-6
        ),
        stream_k.gemm_rms_norm_all_scatter: lambda: stream_k.gemm_rms_norm_all_scatter(
            a, b, weight[:4], 1e-6
        ),
        collectives.all_reduce: lambda: collectives.all_reduce(rows),
        collectives.all_reduce_: lambda: collectives.all_reduce_(rows),
        collectives.all_gather: lambda: collectives.all_gather(rows),
        collectives.all_scatter: lambda: collectives.all_scatter(rows),
        collectives.reduce_scatter: lambda: collectives.reduce_scatter(rows),
        collectives.broadcast: lambda: collectives.broadcast(rows),
        collectives.broadcast_: lambda: collectives.broadcast_(rows),
        collectives.barrier: collectives.barrier,
        collectives.rms_norm: lambda: collectives.rms_norm(rows, weight, 1e-6),
        collectives.all_reduce_rms_norm: lambda: collectives.all_reduce_rms_norm(rows, **norm),
        collectives.rms_norm_pair: lambda: collectives.rms_norm_pair(rows, rows, weight, weight, 1e-6),
        nn.ColumnParallelLinear: lambda: nn.ColumnParallelLinear(8, 4),
        nn.RowParallelLinear: lambda: nn.RowParallelLinear(8, 4),
        nn.ParallelMLP: lambda: nn.ParallelMLP(8, 16),
        nn.ParallelAttention: lambda: nn.ParallelAttention(8, 2),
        nn.RMSNorm: lambda: nn.RMSNorm(8, sequence_parallel=True).to(rows.device)(rows),
        nn.sum_gradient: lambda: nn.sum_gradient(rows),
        timeline.record: lambda: timeline.record().__enter__(),
        timeline.record_call: lambda: timeline.record_call(lambda: None),
    }


def with_gradient():
    """Products whose operands want a gradient: these calls go by way of torch.library."""
    a, b = torch.ones(4, 8, device=device()), torch.ones(8, 4, device=device(), requires_grad=True)
    return [lambda op=op: op(a, b) for op in (stream_k.gemm_all_reduce, stream_k.all_gather_gemm)]


def said_by(some_calls):
    """What each of them raises: only RuntimeError, which nothing of this library's faults is here."""
    said = []
    for call in some_calls:
        with pytest.raises(RuntimeError) as raised:
            call()
        assert type(raised.value) is RuntimeError, raised.value
        said.append(str(raised.value))
    return said


def test_every_public_function_with_a_group_is_called_here():
    found = set()
    for module in (pyrocshmem, stream_k, collectives, nn, timeline):
        names = getattr(module, "__all__", ("record", "record_call"))
        members = [getattr(module, name) for name in names]
        for member in members:
            if callable(member) and not (isinstance(member, type) and issubclass(member, BaseException)):
                found |= {member} if "group" in inspect.signature(member).parameters else set()
    assert found == set(calls())


def test_a_rank_without_a_process_group_computes_nothing_alone(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for text in said_by([*calls().values(), *with_gradient()]):
        assert "WORLD_SIZE is 2, but this process has no process group" in text
        assert "pyrocshmem.from_torchrun()" in text
        assert "torch.distributed.init_process_group()" in text


def test_what_needs_no_group_works_without_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    a, b = torch.rand(4, 8, device=device()), torch.rand(8, 4, device=device())
    assert torch.allclose(stream_k.gemm(a, b), a @ b)
    with Heap(MIB, ThreadGroup.create(1)[0]) as heap:
        x = torch.rand(5, device=device())
        assert torch.equal(collectives.all_reduce(x, group=heap), x)


@pytest.mark.parametrize("text", [None, "", "1", " 1", "0", "-2", "abc", "2.0", "9" * 5000])
def test_alone_where_nothing_says_otherwise(monkeypatch, text):
    if text is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", text)
    assert as_group(None).world_size == 1


def _destroyed(rank, world_size, used):
    """What is said after the process group was destroyed, and the ranks of one that is made again."""
    shared = dist.distributed_c10d._get_default_store()
    if used:
        as_group(None).barrier()
        with Heap(MIB) as heap:
            heap.barrier()
    dist.barrier()
    dist.destroy_process_group()
    assert "WORLD_SIZE" not in os.environ
    said = said_by([*calls().values(), *with_gradient()])
    store = dist.PrefixStore("again", shared)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return said, as_group(None).exchange(bytes([rank]), "call")


@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("used", [True, False])
def test_nothing_is_computed_alone_once_the_process_group_was_destroyed(used):
    for said, replies in values(run_ranks(_destroyed, 2, used)):
        assert replies == [b"\0", b"\1"]
        for text in said:
            assert "the process group of this process was destroyed" in text
            assert "torch.distributed.init_process_group()" in text
