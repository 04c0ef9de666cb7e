"""The collectives on whole tensors over several hosts: inside a host by messages, between hosts by an engine.

H hosts of L ranks, R = H L. Each byte that a host needs of another crosses between them once, by the rank that has the
same number on its host, so that all network interfaces share the work. What a rank sends to other hosts:

    all-gather, all-scatter   its own x to each; then inside, one host's tensors after the other's, the own first
    reduce-scatter            the sum of its host for the rank of its number on each other host: x / R of each
    all-reduce                the same for a part of x / L; each rank adds a share of that, x / R, and sends it to each:
                              two trips. Of two hosts, and of few bytes, the part of x / L to each: one trip
    broadcast                 the root's host: 1 / L of x to each; inside, these parts are gathered

Sums: each host's is rounded to the dtype of x, then those of the hosts are added in fp32 (`collectives.host_sums`) and
rounded once. Averages are averages of those of the hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from pyrocshmem import status
from pyrocshmem.calls import planning
from pyrocshmem.calls.workspace import workspace_for
from pyrocshmem.collectives.epilogue import PLAIN, Finish
from pyrocshmem.collectives.exchange import exchange
from pyrocshmem.collectives.host_sums import host_sum
from pyrocshmem.hosts import Hosts
from pyrocshmem.network import Leg
from pyrocshmem.shards import shard_range

# What a rank sends in one trip, at most, where two would send less: a trip between hosts takes some 20 us.
ONE_TRIP_BYTES = 1 << 20


def exchange_over_hosts(
    hosts: Hosts,
    op: int,
    kind: str,
    x: torch.Tensor,
    out: torch.Tensor,
    root: int = 0,
    reduction: str = "sum",
    dim: int = 0,
    shape: torch.Size | None = None,
    finish: Finish = PLAIN,
) -> None:
    """As `collectives.exchange.exchange`, of the ranks of all hosts. finish: of the sums of an all-reduce, without a
    bias; its residual like x."""
    if planning.here.mode is not None:
        raise ValueError(f"{hosts!r}: calls over several hosts can't be made ready before they are made")
    sizes = tuple(x.shape if shape is None else shape)
    how = f"{kind}, {reduction or 'moved'} along {dim}, root {root}"
    how += ", with a residual" if finish.residual is not None else ""
    with hosts.call(f"{status.Op(op).name.lower()} of {sizes} {x.dtype}: {how}"):
        if x.numel() == 0:
            return
        if kind in ("all_gather", "all_scatter"):
            _gather(hosts, op, kind, x, out)
        elif kind == "reduce_scatter":
            _reduce_scatter(hosts, op, x, out, reduction)
        elif kind == "broadcast":
            _broadcast(hosts, op, x, out, root)
        else:
            _all_reduce(hosts, op, x, out, reduction, finish)


def inside(
    hosts: Hosts,
    op: int,
    kind: str,
    x: torch.Tensor,
    out: torch.Tensor,
    root: int = 0,
    reduction: str = "sum",
) -> None:
    """The exchange of contiguous tensors between the ranks of this host."""
    if x.numel() == 0:
        return
    if hosts.local_size == 1:
        out.view(-1).copy_(x.view(-1))
    else:
        exchange(workspace_for(hosts.heap), op, kind, x, out, root, reduction)


class Sent(NamedTuple):
    """What comes from `host` while the own block goes elsewhere."""

    host: int
    block: torch.Tensor
    leg: Leg


def sent_to_each_host(hosts: Hosts, x: torch.Tensor, rows: Callable[[int], int] | None = None) -> list[Sent]:
    """Send contiguous x to the rank of this number on each other host, which does the same. rows: of that of a host;
    None: as many as x has."""
    sent = []
    for to, of in hosts.turns():
        block = torch.empty_like(x) if rows is None else x.new_empty(rows(of), *x.shape[1:])
        sent.append(Sent(of, block, hosts.network.swap({to: x}, {of: block})))
    return sent


def arriving(hosts: Hosts, x: torch.Tensor, sent: list[Sent]) -> Iterator[tuple[int, torch.Tensor]]:
    """(host, block) of each host, the own `x` first, the others as they come."""
    yield hosts.host, x
    for host, block, leg in sent:
        hosts.wait(leg)
        yield host, block


def _gather(hosts: Hosts, op: int, kind: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """All ranks' x, one below the other or, in "all_scatter", side by side, while what comes next is on its way."""
    by_columns = kind == "all_scatter"
    places = (
        out.view(-1, hosts.num_hosts, hosts.local_size * x.shape[-1]).unbind(1)
        if by_columns
        else out.view(hosts.num_hosts, -1).unbind(0)
    )
    for host, block in arriving(hosts, x, sent_to_each_host(hosts, x)):
        place = places[host]
        found = (
            place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
        )
        inside(hosts, op, kind, block, found)
        if found is not place:
            place.copy_(found)


def rows_of_host(hosts: Hosts, host: int, rows: int) -> tuple[int, int]:
    """[begin, end) of `rows` of all ranks that the ranks of `host` hold."""
    first, last = host * hosts.local_size, (host + 1) * hosts.local_size - 1
    begin, _ = shard_range(rows, first, hosts.world_size)
    return begin, shard_range(rows, last, hosts.world_size)[1]


def num_rows(hosts: Hosts, host: int, rows: int) -> int:
    """How many of `rows` of all ranks the rank of this number on `host` holds."""
    begin, end = shard_range(rows, hosts.rank_on(host), hosts.world_size)
    return end - begin


def terms_of_hosts(hosts: Hosts, term: Callable[[int], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Every host's term of a sum that this rank makes, [H, ...] like `like`.

    term: makes this host's, of the sum that the rank of this number makes on a host: of the other hosts first, so that
    each is on its way while the next one is made.
    """
    terms = like.new_empty(hosts.num_hosts, *like.shape)
    legs = []
    for to, of in hosts.turns():
        legs.append(hosts.network.swap({to: term(to)}, {of: terms[of]}))
    terms[hosts.host] = term(hosts.host)
    for leg in legs:
        hosts.wait(leg)
    return terms


def _reduce_scatter(hosts: Hosts, op: int, x: torch.Tensor, out: torch.Tensor, reduction: str) -> None:
    rows, *rest = x.shape

    def term(host: int) -> torch.Tensor:
        begin, end = rows_of_host(hosts, host, rows)
        part = x.new_empty(num_rows(hosts, host, rows), *rest)
        inside(hosts, op, "reduce_scatter", x[begin:end], part, reduction=reduction)
        return part

    # Along another dimension x has been put in order, and out is of another shape.
    total = out.view(num_rows(hosts, hosts.host, rows), *rest)
    host_sum(terms_of_hosts(hosts, term, total), total, reduction)


def _all_reduce(
    hosts: Hosts, op: int, x: torch.Tensor, out: torch.Tensor, reduction: str, finish: Finish
) -> None:
    n, share = x.numel(), -(-x.numel() // hosts.local_size)

    def padded(given: torch.Tensor) -> torch.Tensor:
        """Flat, with as many elements for each rank of this host."""
        missing = share * hosts.local_size - n
        return given.view(-1) if missing == 0 else torch.cat((given.view(-1), given.new_zeros(missing)))

    part, total = x.new_empty(share), x.new_empty(share)
    inside(hosts, op, "reduce_scatter", padded(x), part, reduction=reduction)
    if finish.residual is not None:
        own = padded(finish.residual)[hosts.local_rank * share :][:share]
        finish = finish._replace(residual=own)
    end_sum(hosts, begin_sum(hosts, part), total, reduction, finish)
    if n == share * hosts.local_size:
        inside(hosts, op, "all_gather", total, out.view(-1))
        return
    found = x.new_empty(share * hosts.local_size)
    inside(hosts, op, "all_gather", total, found)
    out.view(-1).copy_(found[:n])


class Pending(NamedTuple):
    """A sum over hosts whose terms are on their way. terms: [H, n], n elements of each host's `part`: all of them, or
    this rank's share; own: of these the own one's place in `part`."""

    part: torch.Tensor
    terms: torch.Tensor
    own: tuple[int, int]
    leg: Leg


def begin_sum(hosts: Hosts, part: torch.Tensor) -> Pending:
    """Send the terms of a sum over hosts of contiguous `part`, one of each, of which every host needs the result."""
    n, flat = part.numel(), part.view(-1)
    shares = [(0, n)] * hosts.num_hosts
    if hosts.num_hosts > 2 and (hosts.num_hosts - 1) * part.nbytes >= ONE_TRIP_BYTES:
        shares = [shard_range(n, host, hosts.num_hosts) for host in range(hosts.num_hosts)]
    begin, end = own = shares[hosts.host]
    terms = part.new_empty(hosts.num_hosts, end - begin)
    others = hosts.others()
    send = {host: flat[slice(*shares[host])] for host in others}
    leg = hosts.network.swap(send, {host: terms[host] for host in others})
    return Pending(flat, terms, own, leg)


def end_sum(
    hosts: Hosts,
    pending: Pending,
    total: torch.Tensor,
    reduction: str = "sum",
    finish: Finish = PLAIN,
    columns: int = 1,
    activation: int = 0,
) -> None:
    """Add the terms into contiguous `total`, like the part; of shares, with a trip that brings those of the others.
    finish: of rows of `columns` elements, its residual like the total."""
    part, terms, (begin, end), leg = pending
    terms[hosts.host].copy_(part[begin:end])
    hosts.wait(leg)
    flat = total.view(-1)
    if finish.residual is not None:
        finish = finish._replace(residual=finish.residual.view(-1)[begin:end])
    host_sum(terms, flat[begin:end], reduction, finish, columns, begin % columns, activation)
    if end - begin == flat.numel():
        return
    others = hosts.others()
    shares = {host: flat[slice(*shard_range(flat.numel(), host, hosts.num_hosts))] for host in others}
    hosts.wait(hosts.network.swap(dict.fromkeys(others, flat[begin:end]), shares))


def _broadcast(hosts: Hosts, op: int, x: torch.Tensor, out: torch.Tensor, root: int) -> None:
    home, number = divmod(root, hosts.local_size)
    n, share = x.numel(), -(-x.numel() // hosts.local_size)
    whole = x.new_zeros(share * hosts.local_size)
    part = whole[hosts.local_rank * share :][:share]
    if hosts.host == home:
        inside(hosts, op, "broadcast", x, out, number)
        whole[:n] = out.view(-1)
        hosts.wait(hosts.network.swap(dict.fromkeys(hosts.others(), part), {}))
        return
    part = torch.empty_like(part)
    hosts.wait(hosts.network.swap({}, {home: part}))
    inside(hosts, op, "all_gather", part, whole)
    out.view(-1).copy_(whole[:n])
