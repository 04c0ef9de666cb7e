"""Ops that begin with a GEMM, over several hosts: made of the same ops inside a host, and blocks between hosts.

H hosts of L ranks, R = H L, M N K of the whole GEMM. Whatever crosses between hosts does so beside a GEMM; a rank sends
the ranks of its number on the other hosts, each

    all_gather_gemm       its rows of A, M K / R, while the rows of its own host are gathered and multiplied
    gemm_reduce_scatter   its host's sum of their rows, M N / R, while the next host's rows are multiplied, the own
                          host's last
    gemm_all_reduce       in pieces of rows, its host's sum of a share: M N / L of two hosts; of more, M N / R twice. A
                          piece travels while the next one is multiplied, then its total is gathered inside the host
    gemm_all_scatter      in pieces of rows, its columns, M N / R, while the next piece is multiplied

Of few rows (`in_one_call`) the first two are one GEMM, after or before which everything travels.

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
    num_rows,
    rows_of_host,
    sent_to_each_host,
    terms_of_hosts,
)
from pyrocshmem.hosts import Hosts
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.local_gemm.scales import Operand, Scaled
from pyrocshmem.stream_k.ops.op import GemmOp, Request, run
from pyrocshmem.stream_k.ops.scaled_rows import ScaledRows

# What a piece of rows is to give a network interface, at least; pieces, at most.
PIECE_BYTES, _MOST_PIECES = 4 << 20, 8
# Rows of each host for which a GEMM of its own is worth reading B once more.
ROWS_OF_A_HOST = 512


def gathered(hosts: Hosts, request: Request, M: int, out: torch.Tensor) -> Operand | None:
    """`all_gather_gemm`; returns the gathered A where it is asked for. 8-bit rows travel as words, with scales."""
    a, scaling, scaled = request.a, request.scaling, None
    if scaling is not None:
        scaled = ScaledRows.of(a, scaling.a)
        a = scaled.words(Scaled(a, scaling.a))
    a = a.contiguous()
    whole = a.new_empty(M, a.shape[1]) if request.save_gathered else None

    def multiply(block: torch.Tensor, rows: int, into: torch.Tensor) -> torch.Tensor | None:
        """Of the rows of this host's ranks, each of which has a block."""
        part = request._replace(a=block, out=into, num_rows=rows)
        if scaled is not None and scaling is not None:
            data, scale = scaled.operand(block)
            part = part._replace(a=data, scaling=scaling._replace(a=scale))
        found = _inside("all_gather_gemm", part, hosts)
        if not request.save_gathered:
            return None
        return found[1] if scaled is None else scaled.words(found[1])

    sent = sent_to_each_host(hosts, a, lambda host: num_rows(hosts, host, M))
    if in_one_call(M, hosts.num_hosts):
        longest = -(-M // hosts.world_size)
        blocks = a.new_zeros(hosts.num_hosts, longest, a.shape[1])
        for host, block in arriving(hosts, a, sent):
            blocks[host, : len(block)] = block
        product = out.new_empty(hosts.world_size * longest, out.shape[1])
        every = multiply(blocks.view(-1, a.shape[1]), len(product), product)
        _take(product, hosts, out)
        if whole is not None and every is not None:
            _take(every, hosts, whole)
        return whole if scaled is None or whole is None else scaled.operand(whole)
    for host, block in arriving(hosts, a, sent):
        begin, end = rows_of_host(hosts, host, M)
        every = multiply(block, end - begin, out[begin:end])
        if whole is not None and every is not None:
            whole[begin:end] = every
    return whole if scaled is None or whole is None else scaled.operand(whole)


def summed_rows(hosts: Hosts, request: Request, M: int, out: torch.Tensor) -> None:
    """`gemm_reduce_scatter`."""
    total = out if out.is_contiguous() else out.new_empty(out.shape)
    if in_one_call(M, hosts.num_hosts):
        # This rank's rows of every host lie together.
        a, scaling = _by_ranks(request.a, hosts), request.scaling
        if scaling is not None and scaling.a.numel() > 1:
            scaling = scaling._replace(a=_by_ranks(scaling.a, hosts))
        every = _term(hosts, request._replace(a=a, scaling=scaling), 0, len(a)).view(
            hosts.num_hosts, -1, out.shape[1]
        )

        def term(host: int) -> torch.Tensor:
            return every[host, : num_rows(hosts, host, M)]
    else:

        def term(host: int) -> torch.Tensor:
            return _term(hosts, request, *rows_of_host(hosts, host, M))

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
        part = _inside("gemm_all_scatter", _rows(request, begin, end)._replace(out=None), hosts)
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
    part = _rows(request, begin, end)._replace(out=None, bias=None, activation="none", residual=None)
    return _inside("gemm_reduce_scatter", part, hosts).contiguous()


def _rows(request: Request, begin: int, end: int) -> Request:
    """The call of rows [begin, end) of A."""
    scaling = request.scaling
    if scaling is not None and scaling.a.numel() > 1:
        scaling = scaling._replace(a=scaling.a[begin:end])
    return request._replace(a=request.a[begin:end], scaling=scaling)


def _number(request: Request) -> int:
    return activation_number(request.activation)


def in_one_call(M: int, num_hosts: int) -> bool:
    """Whether a gather or a scatter multiplies the rows of all hosts in one GEMM, beside which nothing travels."""
    return ROWS_OF_A_HOST * num_hosts > M


def _by_ranks(x: torch.Tensor, hosts: Hosts) -> torch.Tensor:
    """The rows of the first rank of each host, of the second one, .., each rank's with zeros to the longest."""
    (rows, columns), ranks = x.shape, hosts.world_size
    shortest, longer = divmod(rows, ranks)
    longest = -(-rows // ranks)
    blocks = x.new_zeros(ranks, longest, columns)
    middle = longer * longest
    blocks[:longer] = x[:middle].reshape(longer, longest, columns)
    blocks[longer:, :shortest] = x[middle:].reshape(ranks - longer, shortest, columns)
    by_hosts = blocks.view(hosts.num_hosts, hosts.local_size, -1, columns)
    return by_hosts.transpose(0, 1).reshape(-1, columns)


def _take(x: torch.Tensor, hosts: Hosts, out: torch.Tensor) -> None:
    """Write rows that lie as `_by_ranks` puts them to `out`, in the order of the ranks."""
    by_ranks = x.view(hosts.local_size, hosts.num_hosts, -1, x.shape[1])
    for rank in range(hosts.world_size):
        host, number = divmod(rank, hosts.local_size)
        begin, end = shard_range(len(out), rank, hosts.world_size)
        out[begin:end] = by_ranks[number, host, : end - begin]


def num_pieces(nbytes: int) -> int:
    """Of a call in which a rank sends so many bytes in all."""
    return max(1, min(_MOST_PIECES, nbytes // PIECE_BYTES))


def _pieces(M: int, nbytes: int, grain: int = 1) -> list[tuple[int, int]]:
    """Rows [begin, end) of pieces, of a result of which a rank sends `nbytes` in all: whole multiples of `grain`."""
    step = max(1, -(-M // (num_pieces(nbytes) * grain))) * grain
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
