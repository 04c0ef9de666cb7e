"""The protocols of the ops as models: the order in which their kernels write, raise, wait and read.

R ranks make `calls` calls. Call n has epoch `FIRST_EPOCH + n`, so that epochs wrap around in the third. A place at
every peer is written, or raised, one peer after another: nothing says in which order a GPU does it.

guards, each of which can be left out:
    settle    a write arrives before the flag that is raised after it (`signal.settle`)
    epoch     a flag counts only in its window (`signal._is_up`)
    wrap      epochs are compared by their difference, not as they are
    entered   nobody writes where peers may still read: `signal.wait_entered` (LAG in `stream_k.local_gemm.kernel`)
    slots     what peers pull or sum, and messages, alternate between two places
    restore   a call puts the sentinel back into its slot (`message.restore`)
    abort     a wait watches the abort word
    tell      who gives up sets it at the peers
    heed      what a wait that gave up was for is left out
    end       the programs of a call look at the abort word once more when it ends (`signal.end`)
"""

from collections.abc import Callable

from tests.model.checker import EPOCHS, Model, Step

GUARDS = frozenset({"settle", "epoch", "wrap", "entered", "slots", "restore", "abort", "tell", "heed", "end"})
FIRST_EPOCH = 5

Builder = Callable[[int, int, frozenset[str]], Model]


class _Ranks:
    """A model that is being built."""

    def __init__(self, num_ranks: int, guards: frozenset[str]) -> None:
        self.model = Model(num_ranks, guards)
        self.model.word("first epoch", FIRST_EPOCH)
        self.num_ranks = num_ranks

    def peers(self, rank: int) -> list[int]:
        """Of `rank`, its neighbour first, as kernels walk them."""
        return [(rank + turn) % self.num_ranks for turn in range(1, self.num_ranks)]

    def epoch(self, call: int) -> int:
        return (FIRST_EPOCH + call) % EPOCHS

    def cell(self, rank: int, name: str) -> int:
        return self.model.word(f"rank {rank}'s {name}")

    def flag(self, rank: int, name: str) -> int:
        return self.model.word(f"rank {rank}'s {name}", FIRST_EPOCH)

    def slot(self, call: int) -> int:
        return call % 2 if "slots" in self.model.guards else 0

    def tell_peers(self, rank: int, name: str, call: int) -> list[Step]:
        """`name` is raised at every peer, by this rank."""
        return [
            Step("raise", (self.flag(peer, f"{name}[{rank}]"),), self.epoch(call))
            for peer in self.peers(rank)
        ]

    def wait_for_peers(self, rank: int, name: str, call: int, skips: int, lag: int = 0) -> list[Step]:
        """Until `name` has come from every peer. skips: the steps behind it that are left out when it gives up."""
        if name == "entered" and "entered" not in self.model.guards:
            return []
        words = tuple(self.flag(rank, f"{name}[{peer}]") for peer in self.peers(rank))
        heeded = skips if "heed" in self.model.guards else 0
        return [Step("wait", words, self.epoch(call - lag), heeded)]

    def add_thread(self, rank: int, calls: list[list[Step]]) -> None:
        """A thread of launches, one a call."""
        steps = []
        for call, body in enumerate(calls, 1):
            steps += [*body, Step("launch", (), call)]
        self.model.add_thread(rank, steps)


def pull_partials(num_ranks: int, calls: int, guards: frozenset[str]) -> Model:
    """`gemm_all_reduce`, one-shot, beside: the GEMM leaves its partial at home, the consumers of all pull it."""
    ranks = _Ranks(num_ranks, guards)
    for rank in range(num_ranks):
        gemm, consumer = [], []
        for call in range(1, calls + 1):
            slot = f"partial, slot {ranks.slot(call)}"
            push = [
                Step("put", (ranks.cell(rank, slot),), call),
                *ranks.tell_peers(rank, "ready", call),
            ]
            enter = ranks.tell_peers(rank, "entered", call)
            gemm.append([*enter, *ranks.wait_for_peers(rank, "entered", call, len(push), 1), *push])
            reads = [Step("read", (ranks.cell(peer, slot),), call) for peer in ranks.peers(rank)]
            consumer.append([*ranks.wait_for_peers(rank, "ready", call, len(reads)), *reads])
        ranks.add_thread(rank, gemm)
        ranks.add_thread(rank, consumer)
    return ranks.model


def push_partials(num_ranks: int, calls: int, guards: frozenset[str]) -> Model:
    """`gemm_all_reduce`, two-shot, inside: partials into the owner's slot, its sum into every rank's result."""
    ranks = _Ranks(num_ranks, guards)
    for rank in range(num_ranks):
        launches = []
        for call in range(1, calls + 1):
            slot = ranks.slot(call)
            push = [
                step
                for owner in ranks.peers(rank)
                for step in (
                    Step("put", (ranks.cell(owner, f"slot {slot} for rank {rank}"),), call),
                    Step("raise", (ranks.flag(owner, f"ready[{rank}]"),), ranks.epoch(call)),
                )
            ]
            reduce = [
                *(
                    Step("read", (ranks.cell(rank, f"slot {slot} for rank {peer}"),), call)
                    for peer in ranks.peers(rank)
                ),
                *(
                    Step("put", (ranks.cell(peer, f"result from rank {rank}"),), call)
                    for peer in ranks.peers(rank)
                ),
                *ranks.tell_peers(rank, "done", call),
            ]
            use = [
                Step("read", (ranks.cell(rank, f"result from rank {peer}"),), call)
                for peer in ranks.peers(rank)
            ]
            launches.append([
                *ranks.tell_peers(rank, "entered", call),
                *ranks.wait_for_peers(rank, "entered", call, len(push), 1),
                *push,
                *ranks.wait_for_peers(rank, "ready", call, len(reduce)),
                *reduce,
                *ranks.wait_for_peers(rank, "done", call, len(use)),
                *use,
            ])  # fmt: skip
        ranks.add_thread(rank, launches)
    return ranks.model


def scatter(num_ranks: int, calls: int, guards: frozenset[str]) -> Model:
    """`gemm_all_scatter`, inside: tiles into every rank's result, once it has entered the call."""
    ranks = _Ranks(num_ranks, guards)
    for rank in range(num_ranks):
        launches = []
        for call in range(1, calls + 1):
            places = [ranks.cell(peer, f"result from rank {rank}") for peer in ranks.peers(rank)]
            push = [
                *(Step("put", (place,), call) for place in places),
                *ranks.tell_peers(rank, "arrived", call),
            ]
            use = [
                Step("read", (ranks.cell(rank, f"result from rank {peer}"),), call)
                for peer in ranks.peers(rank)
            ]
            launches.append([
                *ranks.tell_peers(rank, "entered", call),
                *ranks.wait_for_peers(rank, "entered", call, len(push)),
                *push,
                *ranks.wait_for_peers(rank, "arrived", call, len(use)),
                *use,
            ])  # fmt: skip
        ranks.add_thread(rank, launches)
    return ranks.model


def messages(num_ranks: int, calls: int, guards: frozenset[str]) -> Model:
    """`collectives`: data that are there when they are not the sentinel, in two slots (`pyrocshmem.message`). A call
    pushes into its peers' slots and empties its own when it has taken what came."""
    ranks = _Ranks(num_ranks, guards)
    for rank in range(num_ranks):
        launches = []
        for call in range(1, calls + 1):
            slot, peers = f"message slot {ranks.slot(call)}", ranks.peers(rank)
            theirs = [ranks.cell(peer, f"{slot} from rank {rank}") for peer in peers]
            own = tuple(ranks.cell(rank, f"{slot} from rank {peer}") for peer in peers)
            push = [Step("put", (place,), call) for place in theirs]
            take = Step("take", own, call)
            empty = [Step("put", (place,), 0) for place in own]
            launches.append([*push, take, *(empty if "restore" in guards else [])])
        ranks.add_thread(rank, launches)
    return ranks.model


def copy_rows(num_ranks: int, calls: int, guards: frozenset[str]) -> Model:
    """`all_gather_gemm`: a stream waits until the peers are in the call, then copies rows and flags; the GEMM takes
    them as they come. Copies can't be called off: they run although the wait before them gave up."""
    ranks = _Ranks(num_ranks, guards)
    for rank in range(num_ranks):
        gemm, copies = [], []
        for call in range(1, calls + 1):
            takes = []
            for peer in ranks.peers(rank):
                heeded = 1 if "heed" in guards else 0
                flag = ranks.flag(rank, f"rows[{peer}]")
                takes.append(Step("wait", (flag,), ranks.epoch(call), heeded))
                takes.append(Step("read", (ranks.cell(rank, f"rows of rank {peer}"),), call))
            gemm.append([*ranks.tell_peers(rank, "entered", call), *takes])
            side = ranks.wait_for_peers(rank, "entered", call, 0)
            for peer in ranks.peers(rank):
                side.append(Step("put", (ranks.cell(peer, f"rows of rank {rank}"),), call))
                side.append(Step("raise", (ranks.flag(peer, f"rows[{rank}]"),), ranks.epoch(call)))
            copies.append(side)
        ranks.add_thread(rank, gemm)
        ranks.add_thread(rank, copies)
    return ranks.model


def pull_columns(num_ranks: int, calls: int, guards: frozenset[str]) -> Model:
    """`gemm_all_scatter`, copy engine: the own columns stay at home, in one place, and copies of all ranks pull them;
    they run although the wait before them gave up."""
    ranks = _Ranks(num_ranks, guards)
    for rank in range(num_ranks):
        launches = []
        for call in range(1, calls + 1):
            store = [
                Step("put", (ranks.cell(rank, "columns"),), call),
                *ranks.tell_peers(rank, "ready", call),
            ]
            launches.append([
                *ranks.tell_peers(rank, "entered", call),
                *ranks.wait_for_peers(rank, "entered", call, len(store)),
                *store,
                *ranks.wait_for_peers(rank, "ready", call, 0),
                *(Step("read", (ranks.cell(peer, "columns"),), call) for peer in ranks.peers(rank)),
            ])  # fmt: skip
        ranks.add_thread(rank, launches)
    return ranks.model


def push_rows(ranks: _Ranks, rank: int, call: int) -> list[Step]:
    """The stream beside the GEMMs of a call that sums rows: partials to their owners once these are in the call, though
    the wait for that may have given up."""
    pushes = ranks.wait_for_peers(rank, "entered", call, 0)
    for owner in ranks.peers(rank):
        pushes.append(Step("put", (ranks.cell(owner, f"partial of rank {rank}"),), call))
        pushes.append(Step("raise", (ranks.flag(owner, f"ready[{rank}]"),), ranks.epoch(call)))
    return pushes


def sum_partials(ranks: _Ranks, rank: int, call: int, then: list[Step]) -> list[Step]:
    """Both GEMMs of such a call: the first tells that the rank is in it, the second waits for nothing but the partials.
    then: what it does with them."""
    partials = [ranks.cell(rank, f"partial of rank {peer}") for peer in ranks.peers(rank)]
    reads = [Step("read", (place,), call) for place in partials]
    return [
        *ranks.tell_peers(rank, "entered", call),
        *ranks.wait_for_peers(rank, "ready", call, len(reads) + len(then)),
        *reads,
        *then,
    ]


def sum_rows(num_ranks: int, calls: int, guards: frozenset[str]) -> Model:
    """`gemm_reduce_scatter`, copy engine: partials are pushed to their owner, whose second GEMM adds them."""
    ranks = _Ranks(num_ranks, guards)
    numbers = range(1, calls + 1)
    for rank in range(num_ranks):
        ranks.add_thread(rank, [sum_partials(ranks, rank, call, []) for call in numbers])
        ranks.add_thread(rank, [push_rows(ranks, rank, call) for call in numbers])
    return ranks.model


def pull_sums(num_ranks: int, calls: int, guards: frozenset[str]) -> Model:
    """`gemm_all_reduce`, copy engine: the same, but that the sums stay at home, in one place, and are pulled by copies.
    An owner hears from every peer before it sums: that peer pulls no more of the call before. Pulls tell the peers, and
    run, although the wait for the own sums may have given up."""
    ranks = _Ranks(num_ranks, guards)
    numbers = range(1, calls + 1)
    for rank in range(num_ranks):
        own, sums, pulls = ranks.cell(rank, "sums"), [], []
        tile = (ranks.flag(rank, "tile"),)
        for call in numbers:
            announce = Step("raise", tile, ranks.epoch(call))
            sums.append([*sum_partials(ranks, rank, call, [Step("put", (own,), call)]), announce])
            pulls.append([
                Step("wait", tile, ranks.epoch(call)),
                *ranks.tell_peers(rank, "summed", call),
                *ranks.wait_for_peers(rank, "summed", call, 0),
                *(Step("read", (ranks.cell(peer, "sums"),), call) for peer in ranks.peers(rank)),
            ])  # fmt: skip
        for thread in (sums, [push_rows(ranks, rank, call) for call in numbers], pulls):
            ranks.add_thread(rank, thread)
    return ranks.model


def split_tile(num_ranks: int, calls: int, guards: frozenset[str]) -> Model:
    """Stream-K in front of `pull_partials`: a program's partial is finished by another one of its rank, which wait
    each for themselves until the peers have entered. The wait of the fix-up is not heeded."""
    ranks = _Ranks(num_ranks, guards)
    for rank in range(num_ranks):
        first, second = [], []
        for call in range(1, calls + 1):
            slot = f"partial, slot {ranks.slot(call)}"
            split, fixed = ranks.cell(rank, "workspace"), ranks.flag(rank, "fix-up")
            contributes = [Step("put", (split,), call), Step("raise", (fixed,), ranks.epoch(call))]
            enter = ranks.tell_peers(rank, "entered", call)
            first.append([
                *enter,
                *ranks.wait_for_peers(rank, "entered", call, len(contributes), 1),
                *contributes,
            ])  # fmt: skip
            finishes = [
                Step("wait", (fixed,), ranks.epoch(call)),
                Step("read", (split,), call),
                Step("put", (ranks.cell(rank, slot),), call),
                *ranks.tell_peers(rank, "ready", call),
            ]
            reads = [Step("read", (ranks.cell(peer, slot),), call) for peer in ranks.peers(rank)]
            second.append([
                *ranks.wait_for_peers(rank, "entered", call, len(finishes), 1),
                *finishes,
                *ranks.wait_for_peers(rank, "ready", call, len(reads)),
                *reads,
            ])  # fmt: skip
        ranks.add_thread(rank, first)
        ranks.add_thread(rank, second)
    return ranks.model


PROTOCOLS: dict[str, Builder] = {
    "pull_partials": pull_partials,
    "push_partials": push_partials,
    "scatter": scatter,
    "messages": messages,
    "copy_rows": copy_rows,
    "pull_columns": pull_columns,
    "sum_rows": sum_rows,
    "pull_sums": pull_sums,
    "split_tile": split_tile,
}
