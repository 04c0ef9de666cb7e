"""Ops that begin with a GEMM, over several hosts: made of the same ops inside a host, and blocks between hosts.

H hosts of L ranks, R = H L, M N K of the whole GEMM. Whatever crosses between hosts does so beside a GEMM; a rank sends
the ranks of its number on the other hosts, each

    all_gather_gemm       its rows of A, M K / R, while the rows of its own host are gathered and multiplied
    gemm_reduce_scatter   its host's sum of their rows, M N / R, while the next host's rows are multiplied, the own
                          host's last
    gemm_all_reduce       in pieces of rows, its host's sum of a share: M N / L of two hosts; of more, M N / R twice. A
                          piece travels while the next one is multiplied, then its total is gathered inside the host
    gemm_all_scatter      in pieces of rows, its columns, M N / R, while the next piece is multiplied

Sums: ranks of one host as in the op there; its result is rounded to the dtype of the whole's, which is what crosses;
those of the hosts are added in fp32 in an order that their number gives (`collectives.host_sums`), get bias, activation
and residual, and are rounded once. So a row's bits don't depend on the pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pyrocshmem import status
from pyrocshmem.calls.op import find
from pyrocshmem.collectives.epilogue import Finish, activation_number
from pyrocshmem.collectives.host_sums import host_sum
from pyrocshmem.collectives.over_hosts import (
    Pending,
    Sent,
    arriving,
    begin_sum,
    end_sum,
    inside,
    rows_of_host,
    sent_to_each_host,
    terms_of_hosts,
)
from pyrocshmem.hosts import Hosts
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.ops.op import GemmOp, Request, run

# What a piece of rows is to give a network interface, at least; pieces, at most.
PIECE_BYTES, _MOST_PIECES = 4 << 20, 8


def gathered(hosts: Hosts, request: Request, M: int, out: torch.Tensor) -> torch.Tensor | None:
    """`all_gather_gemm`; returns the gathered A where it is asked for."""
    a = request.a.contiguous()
    keeps = request.save_gathered
    whole = a.new_empty(M, a.shape[1]) if keeps else None

    def rows(host: int) -> int:
        first, last = shard_range(M, hosts.rank_on(host), hosts.world_size)
        return last - first

    for host, block in arriving(hosts, a, sent_to_each_host(hosts, a, rows)):
        begin, end = rows_of_host(hosts, host, M)
        part = request._replace(a=block, out=out[begin:end], num_rows=end - begin)
        found = _inside("all_gather_gemm", part, hosts)
        if whole is not None:
            whole[begin:end] = found[1]
    return whole


def summed_rows(hosts: Hosts, request: Request, M: int, out: torch.Tensor) -> None:
    """`gemm_reduce_scatter`."""

    def term(host: int) -> torch.Tensor:
        begin, end = rows_of_host(hosts, host, M)
        return _term(hosts, request, begin, end)

    total = out if out.is_contiguous() else out.new_empty(out.shape)
    terms = terms_of_hosts(hosts, term, total)
    host_sum(terms, total, finish=Finish.of(request.bias), columns=out.shape[1], activation=_number(request))
    if total is not out:
        out.copy_(total)


def summed_everywhere(hosts: Hosts, request: Request, M: int, out: torch.Tensor) -> None:
    """`gemm_all_reduce`."""
    op, columns, bias, residual = status.Op.GEMM_ALL_REDUCE, out.shape[1], request.bias, request.residual

    def finish(begin: int, end: int, pending: Pending) -> None:
        first, last = shard_range(end - begin, hosts.local_rank, hosts.local_size)
        added = None if residual is None else residual[begin + first : begin + last]
        share = -(-(end - begin) // hosts.local_size)
        total = out.new_zeros(share, columns)
        how = Finish.of(bias)._replace(residual=added)
        end_sum(hosts, pending, total[: last - first], "sum", how, columns, _number(request))
        whole = out.new_empty(hosts.local_size, share, columns)
        inside(hosts, op, "all_gather", total, whole)
        blocks = (shard_range(end - begin, rank, hosts.local_size) for rank in range(hosts.local_size))
        for block, (first, last) in zip(whole, blocks, strict=True):
            out[begin + first : begin + last] = block[: last - first]

    def start(begin: int, end: int) -> Pending:
        return begin_sum(hosts, _term(hosts, request, begin, end))

    _in_pieces(_pieces(M, out.nbytes // hosts.local_size, hosts.local_size), start, finish)


def scattered(hosts: Hosts, request: Request, M: int, out: torch.Tensor) -> None:
    """`gemm_all_scatter`."""
    op, columns = status.Op.GEMM_ALL_SCATTER, request.b.shape[1]
    places = out.tensor_split(hosts.num_hosts, dim=1)

    def start(begin: int, end: int) -> list[Sent]:
        part = _inside("gemm_all_scatter", request._replace(a=request.a[begin:end], out=None), hosts)
        places[hosts.host][begin:end] = part
        own = part[:, hosts.local_rank * columns :][:, :columns].contiguous()
        return sent_to_each_host(hosts, own)

    def finish(begin: int, end: int, sent: list[Sent]) -> None:
        for host, block, leg in sent:
            hosts.wait(leg)
            side_by_side = out.new_empty(end - begin, hosts.local_size * columns)
            inside(hosts, op, "all_scatter", block, side_by_side)
            places[host][begin:end] = side_by_side

    _in_pieces(_pieces(M, out.nbytes // hosts.world_size), start, finish)


def _inside(name: str, request: Request, hosts: Hosts) -> Any:
    """A call of an op of the ranks of this host."""
    op = find(name)
    assert isinstance(op, GemmOp)
    return run(op, request, hosts.heap, None)


def _term(hosts: Hosts, request: Request, begin: int, end: int) -> torch.Tensor:
    """This host's term of a sum, of rows [begin, end): this rank's share of them, contiguous."""
    part = request._replace(a=request.a[begin:end], out=None, bias=None, activation="none", residual=None)
    return _inside("gemm_reduce_scatter", part, hosts).contiguous()


def _number(request: Request) -> int:
    return activation_number(request.activation)


def _pieces(M: int, nbytes: int, grain: int = 1) -> list[tuple[int, int]]:
    """Rows [begin, end) of pieces, of a result of which a rank sends `nbytes` in all: whole multiples of `grain`."""
    count = max(1, min(_MOST_PIECES, nbytes // PIECE_BYTES))
    step = max(1, -(-M // (count * grain))) * grain
    return [(begin, min(begin + step, M)) for begin in range(0, M, step)]


def _in_pieces(
    pieces: list[tuple[int, int]], start: Callable[[int, int], Any], finish: Callable[[int, int, Any], None]
) -> None:
    """Start each piece, then finish the one before it, which was on its way meanwhile."""
    before: tuple[int, int, Any] | None = None
    for begin, end in pieces:
        started = start(begin, end)
        if before is not None:
            finish(*before)
        before = begin, end, started
    if before is not None:
        finish(*before)
