"""Groups: votes over every kind of group, and what each rank hears when another is missing, different, or gives up."""

import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pyrocshmem import (
    CallMismatch,
    Heap,
    InitTimeout,
    PeerAborted,
    ShmemError,
    ThreadGroup,
    as_group,
    spawn,
    timeouts,
)
from pyrocshmem import groups as bootstrap
from pyrocshmem.groups import Group
from pyrocshmem.stores import StoreBoard
from tests.ranks import run_ranks, values, wait_until_formed

TIER = 1
pytestmark = pytest.mark.cpu


def in_threads(groups, body):
    """body(group) in a thread each; a list of (value or exception, seconds)."""
    ends = [None] * len(groups)

    def run(index):
        start = time.monotonic()
        try:
            result = body(groups[index])
        except Exception as error:
            result = error
        ends[index] = (result, time.monotonic() - start)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return ends


def store_groups(num_ranks):
    """Groups over one HashStore: the torch store protocol without processes."""
    store = dist.HashStore()
    return [Group(StoreBoard(store), rank, num_ranks, "test") for rank in range(num_ranks)]


KINDS = pytest.mark.parametrize("make", [ThreadGroup.create, store_groups], ids=["threads", "store"])


@KINDS
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_exchange_gathers_in_rank_order(make, num_ranks):
    def body(group):
        rounds = []
        for number in range(20):
            payload = bytes([group.rank, number]) * (number * 100) + b"\0\xff"
            rounds.append(group.exchange(payload, f"round {number}"))
        return rounds

    expected = [
        [bytes([rank, number]) * (number * 100) + b"\0\xff" for rank in range(num_ranks)]
        for number in range(20)
    ]
    for result, _ in in_threads(make(num_ranks), body):
        assert result == expected


@KINDS
def test_different_calls_are_listed_and_the_group_stays_usable(make):
    def body(group):
        with pytest.raises(CallMismatch) as raised:
            group.exchange(b"", f"zeros({group.rank % 2})")
        return raised.value.calls, group.exchange(bytes([group.rank]), "again")

    for result, _ in in_threads(make(3), body):
        assert result == (["zeros(0)", "zeros(1)", "zeros(0)"], [b"\0", b"\1", b"\2"])


@KINDS
@pytest.mark.alone
def test_missing_ranks_are_named(make):
    groups = make(4)
    # Rank 0 would wait longer, but hears from rank 2 that it has given up, and for whom.
    seconds_of = {0: 20, 2: 0.5}
    ends = in_threads(
        [groups[0], groups[2]], lambda group: group.exchange(b"", "forming", timeout=seconds_of[group.rank])
    )
    for error, seconds in ends:
        assert isinstance(error, InitTimeout)
        assert (error.missing, error.world_size, error.what) == ([1, 3], 4, "forming")
        assert 0.5 <= seconds < 1.5
    # The one that comes late must not take the others' old calls for live ones, and needn't wait.
    error, seconds = in_threads([groups[1]], lambda group: group.exchange(b"", "forming", timeout=20))[0]
    assert isinstance(error, InitTimeout)
    assert error.missing == [0, 2]
    assert "given up" in str(error)
    assert seconds < 1
    with pytest.raises(InitTimeout):  # and a group that failed once stays failed, at once
        groups[0].exchange(b"", "forming")


@KINDS
@pytest.mark.alone
def test_abort_reaches_a_pending_exchange_with_its_message(make):
    groups = make(3)
    aborted_at = []

    def body(group):
        if group.rank == 1:
            time.sleep(0.4)
            aborted_at.append(time.monotonic())
            group.abort("KeyError: 'weights'")
            group.abort("a second reason")
            return None
        with pytest.raises(PeerAborted) as raised:
            group.exchange(b"", "a call")
        assert time.monotonic() - aborted_at[0] < 1
        return raised.value.peer, raised.value.message

    ends = [result for result, _ in in_threads(groups, body)]
    assert ends == [(1, "KeyError: 'weights'"), None, (1, "KeyError: 'weights'")]
    with pytest.raises(PeerAborted):
        groups[1].exchange(b"", "after its own abort")


@KINDS
@pytest.mark.alone
def test_abort_of_a_group_reaches_its_channels_but_not_the_other_way_round(make):
    groups = make(2)

    def one_channel_down(group):
        broken, sound = group.channel("heap"), group.channel("heap")
        if group.rank == 0:
            broken.abort("only this heap")
        else:
            with pytest.raises(PeerAborted, match="only this heap"):
                broken.exchange(b"", "a call")
        return sound.exchange(b"", "a call"), sound

    ends = in_threads(groups, one_channel_down)
    sound = [result[1] for result, _ in ends]
    groups[0].abort("everything")
    error, seconds = in_threads([sound[1]], lambda group: group.exchange(b"", "next"))[0]
    assert isinstance(error, PeerAborted)
    assert (error.peer, error.message) == (0, "everything")
    assert seconds < 1


@KINDS
@pytest.mark.alone
def test_a_rank_that_left_is_not_waited_for(make):
    def body(group):
        group.exchange(b"", "first")
        if group.rank == 0:
            group.leave("it closed the heap")
            return group.wait_until_all_left(0.3), "waited"
        with pytest.raises(PeerAborted, match="rank 0 gave up: it closed the heap"):
            group.exchange(b"", "second")
        return None

    ends = in_threads(make(3), body)
    assert ends[0][0] == (False, "waited")
    assert all(seconds < 1 for _, seconds in ends)


class _Hooked:
    """A board that calls `hook` when a look for all of several keys has been in vain, before that is told."""

    def __init__(self, board, hook):
        self._board, self._hook = board, hook

    def __getattr__(self, name):
        return getattr(self._board, name)

    def get_all(self, keys):
        found = self._board.get_all(keys)
        if found is None and len(keys) > 1:
            self._hook()
        return found


@KINDS
def test_a_complete_vote_reports_no_abort(make):
    """Rank 1 finds a message missing; before it looks for an abort, the peers post, have the result, and abort."""
    groups = make(3)
    ends = {}

    def complete():
        time.sleep(0.01)  # long enough for rank 1 to look for an abort
        if not ends:
            for rank, (end, _) in zip((0, 2), in_threads([groups[0], groups[2]], exchange), strict=True):
                ends[rank] = end
            groups[0].abort("planted")

    def exchange(group):
        return group.exchange(bytes([group.rank]), "a call", timeout=10)

    groups[1]._board = _Hooked(groups[1]._board, complete)
    ends[1] = in_threads([groups[1]], exchange)[0][0]
    assert all(ends[rank] == [b"\0", b"\1", b"\2"] for rank in range(3)), ends
    for group in groups:  # and of the abort all hear at their next call
        with pytest.raises(PeerAborted, match="planted"):
            group.exchange(b"", "the next call", timeout=10)


@KINDS
def test_a_rank_that_comes_as_time_runs_out_has_come_for_all(make):
    """Rank 1's time is up; between its last look and its list of who is missing, rank 0 comes."""
    groups = make(2)
    thread, ends = [], {}

    def exchange(group, timeout):
        try:
            ends[group.rank] = group.exchange(bytes([group.rank]), "a call", timeout=timeout)
        except ShmemError as error:
            ends[group.rank] = error

    def comes():
        if not thread:
            time.sleep(0.1)
            thread.append(threading.Thread(target=exchange, args=(groups[0], 10.0), daemon=True))
            thread[0].start()
            while groups[0]._board.get_all([groups[0]._key("0/0")]) is None:
                time.sleep(0.001)

    groups[1]._board = _Hooked(groups[1]._board, comes)
    exchange(groups[1], 0.05)
    thread[0].join(30)
    assert ends == {0: [b"\0", b"\1"], 1: [b"\0", b"\1"]}


@KINDS
def test_the_first_reason_is_the_one_that_all_hear(make):
    groups = make(3)
    groups[0].abort("the cause")
    for group in groups[1:]:  # the second one finds what the first one left in its place
        with pytest.raises(PeerAborted) as raised:
            group.exchange(b"", "a call", timeout=10)
        assert (raised.value.peer, raised.value.message) == (0, "the cause")
        group.abort("a consequence")
    assert groups[2].abort_record() == (0, "the cause")


@KINDS
def test_a_message_that_somebody_else_wrote_is_noticed_by_its_rank(make):
    """Without a secret the peers can't tell: they hear of it at their next call."""
    groups = make(2)
    groups[1]._board.set(groups[1]._key("0/1"), b"\6\0\0\0a callforged")
    ends = in_threads(groups, lambda group: group.exchange(b"own", "a call", timeout=10))
    assert type(ends[1][0]) is ShmemError
    assert "rank 1's record 'test/0/1'" in str(ends[1][0]).replace("threads", "test")
    with pytest.raises(
        PeerAborted, match="was there before that rank came: somebody else wrote to the store"
    ):
        groups[0].exchange(b"", "next", timeout=10)


def _damage_abort(groups):
    groups[1]._board.set(groups[1]._key("abort"), b"{not json")
    return "'[^']*/abort'"


def _damage_farewell(groups):
    groups[1]._board.set(groups[1]._key("left/1"), b"\xff\xfe")
    return "rank 1's record '[^']*/left/1'"


def _huge_length(groups):
    groups[1]._board.set(groups[1]._key("0/1"), b"\xff\xff\xff\x7f" + b"A" * 1000)
    return "rank 1's record '[^']*/0/1'"


def _no_text(groups):
    groups[1]._board.set(groups[1]._key("0/1"), b"\2\0\0\0\xff\xff")
    return "rank 1's record '[^']*/0/1'"


def _forged_tombstone(reason):
    def damage(groups):
        groups[1]._board.set(groups[1]._key("0/1"), b"\xff\xff\xff\xff" + reason)
        return "rank 1's record '[^']*/0/1'"

    return damage


@KINDS
@pytest.mark.parametrize(
    "damage",
    [
        _damage_abort,
        _damage_farewell,
        _huge_length,
        _no_text,
        *map(
            _forged_tombstone,
            (
                b"",
                b"{}",
                b"[[], null]",
                b'[[7], null, ""]',
                b'[[0, 1], null, ""]',
                b'[["1"], null, ""]',
                b"[[], 9, 2]",
            ),
        ),
    ],
)
def test_a_record_that_does_not_parse_is_named(make, damage):
    """Never the text of a parser, nor that the store has gone; and the other rank hears it, too."""
    groups = make(2)
    which = damage(groups)
    for group in groups:
        error, seconds = in_threads([group], lambda group: group.exchange(b"", "a call", timeout=10))[0]
        assert type(error) is ShmemError
        assert re.search(f"{which} .*: .* somebody else wrote to the store", str(error)), error
        assert seconds < 5


@pytest.mark.parametrize("record", [b"{", b"3", b"[1]", b'["self", "x"]', b"[[], {}]"])
def test_a_damaged_record_of_a_process_leaves_the_time_out_as_it_is(record):
    groups = ThreadGroup.create(2)
    groups[0]._board.set(groups[0]._key("process/1"), record)
    with pytest.raises(InitTimeout) as raised:
        groups[0].channel("votes").exchange(b"", "a call whose name is no text: \udcff", timeout=0.01)
    assert (raised.value.missing, raised.value.ended) == ([1], {})


def test_payloads_that_do_not_parse_are_named(monkeypatch):
    """Of the votes in which a heap forms, allocates and recovers."""
    honest, damaged = Group.exchange, []

    def exchange(group, payload, what, timeout=None):
        replies = honest(group, payload, what, timeout)
        return [replies[0], *damaged] if damaged and b"{" in payload else replies

    def body(group):
        damaged.clear()
        heap = Heap(1 << 16, group)
        group.barrier()
        said = []
        for garbage in (b"{not json", b"[3]", b"\xff", bytes(8) + b"[3]"):
            damaged[:] = [garbage]
            group.barrier()
            for call in (lambda: Heap(1 << 16, group), lambda: heap.zeros(3), heap.recover):
                with pytest.raises(ShmemError) as raised:
                    call()
                said.append((raised.type, str(raised.value)))
                group.barrier()
            damaged.clear()
            heap.recover()
        return said

    monkeypatch.setattr(Group, "exchange", exchange)
    for said, _ in in_threads(ThreadGroup.create(2), body):
        assert len(said) == 12, said
        for kind, text in said:
            assert kind is ShmemError
            assert "rank 1" in text
            assert "can't be read: it is damaged, or somebody else wrote to the store" in text


def test_old_keys_are_deleted():
    store = dist.HashStore()
    groups = [Group(StoreBoard(store), rank, 2, "test") for rank in range(2)]
    in_threads(groups, lambda group: [group.exchange(b"x" * 1000, "call") for _ in range(50)] and None)
    assert store.num_keys() <= 2 * 2 + 1


def test_store_that_goes_away_is_an_error_not_a_hang():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    group = Group(StoreBoard(client), 0, 2, "test")
    servers = [server]
    del server
    threading.Timer(0.4, servers.clear).start()
    with pytest.raises(ShmemError, match="its host process ended"):
        group.exchange(b"", "call", timeout=20)


@pytest.mark.parametrize("text", ["soon", "0", "-3", "inf", "1e10"])
def test_bad_init_seconds(monkeypatch, text):
    monkeypatch.setenv("PYROCSHMEM_INIT_SECONDS", text)
    with pytest.raises(ValueError, match="PYROCSHMEM_INIT_SECONDS"):
        timeouts.init_seconds()
    with pytest.raises(ValueError, match="PYROCSHMEM_INIT_SECONDS"):  # before any rank is started
        spawn(len, 1)


@pytest.mark.parametrize("text", ["soon", "0", "-3", "inf", "2148"])
def test_bad_wait_seconds(monkeypatch, text):
    monkeypatch.setenv("PYROCSHMEM_WAIT_SECONDS", text)
    with pytest.raises(ValueError, match=r"PYROCSHMEM_WAIT_SECONDS=.* at most 2147"):
        spawn(len, 1)


def test_alone_without_a_process_group():
    group = as_group(None)
    assert (group.rank, group.world_size) == (0, 1)
    assert as_group(None) is group is as_group(group)
    assert group.exchange(b"x", "call") == [b"x"]


@pytest.mark.parametrize("wrong", ["world", 3, torch.device("cpu")])
def test_not_a_group(wrong):
    with pytest.raises(TypeError, match="allowed: None, ProcessGroup, 1-D DeviceMesh"):
        as_group(wrong)


def _torch_groups(rank, world_size):
    default = as_group(None)
    assert default is as_group(dist.group.WORLD)
    found = {"default": (default.rank, default.exchange(bytes([rank]), "default"))}
    # Overlapping subgroups, in which ranks differ from the global ones.
    for members in ([0, 2], [1, 2, 3]):
        made = dist.new_group(members)
        if rank in members:
            group = as_group(made)
            assert group is as_group(made)
            reply = group.exchange(bytes([10 + rank]), "subgroup")
            found[str(members)] = (group.rank, reply, group.global_ranks)
        else:
            with pytest.raises(ValueError, match="not a member"):
                as_group(made)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"2 dimensions; give one of them, as in mesh\['dp'\]"):
        as_group(mesh)
    group = as_group(mesh["tp"])
    found["tp"] = (group.rank, group.exchange(bytes([20 + rank]), "mesh"), group.global_ranks)
    # The default group again: its rounds go on where they stopped.
    assert default.exchange(b"z", "default") == [b"z"] * world_size
    return found


def test_groups_of_torch():
    found = values(run_ranks(_torch_groups, 4))
    for rank in range(4):
        assert found[rank]["default"] == (rank, [b"\0", b"\1", b"\2", b"\3"])
        pair = [rank & 2, rank | 1]
        assert found[rank]["tp"] == (rank & 1, [bytes([20 + r]) for r in pair], tuple(pair))
    assert found[2]["[0, 2]"] == (1, [b"\x0a", b"\x0c"], (0, 2))
    assert found[3]["[1, 2, 3]"] == (2, [b"\x0b", b"\x0c", b"\x0d"], (1, 2, 3))
    assert "[0, 2]" not in found[1]


def _waits_for_the_dead(rank, world_size):
    """Rank 1 dies before it has made any call; the others wait for it in a vote, and for a heap."""
    wait_until_formed(rank, world_size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ["PYROCSHMEM_INIT_SECONDS"] = "1"
    said = []
    for wait in (
        lambda: as_group(None).subgroup([0, 1]).exchange(b"", "a call", timeout=0.5),
        lambda: Heap(1 << 16),
    ):
        with pytest.raises(InitTimeout) as raised:
            wait()
        said.append((raised.value.missing, str(raised.value)))
    return said


def test_a_time_out_says_that_the_process_of_a_missing_rank_has_ended():
    ends = run_ranks(_waits_for_the_dead, 2)
    assert ends[1].exitcode == -signal.SIGKILL
    for missing, text in values(ends[:1])[0]:
        assert missing == [1]
        assert re.search(r"Rank 1's process \d+ has ended: look at its exit status and its log", text), text


def _made_again(rank, world_size, guarded):
    shared = dist.distributed_c10d._get_default_store()
    bootstrap.store_board = lambda store, secret: StoreBoard(
        shared
    )  # as if torch gave every group the same keys
    replies = []
    wait_until_formed(rank, world_size)
    for number in range(3):
        dist.destroy_process_group()
        store = dist.PrefixStore(f"made{number}", shared)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        if not guarded:
            bootstrap._names_used.clear()
        dist.barrier()
        if rank == 1:
            time.sleep(0.2)
        replies.append(as_group(None).exchange(bytes([number]), "call"))
        dist.barrier()
    return replies


def test_a_process_group_made_again_reads_no_old_keys():
    expected = [[bytes([number])] * 2 for number in range(3)]
    assert values(run_ranks(_made_again, 2, True)) == [expected, expected]
    for end in run_ranks(_made_again, 2, False):
        assert isinstance(end.exception, ShmemError), "the check above can't fail"
        assert "was there before that rank came" in str(end.exception)


def test_a_subgroup_is_independent_of_what_its_group_went_through():
    groups = ThreadGroup.create(3)
    groups[1].abort("it died")

    def body(group):
        inner = group.subgroup([2, 0])
        assert (inner.world_size, inner.global_ranks) == (2, (0, 2))
        return inner.rank, inner.exchange(str(group.rank).encode(), "survivors", 10.0)

    ends = [value for value, _ in in_threads([groups[0], groups[2]], body)]
    assert ends == [(0, [b"0", b"2"]), (1, [b"0", b"2"])]
    with pytest.raises(PeerAborted, match="it died"):
        groups[0].exchange(b"", "all", 10.0)
    for ranks, words in (
        ([0, 3], "allowed are different ones of 0..2"),
        ([0, 0], "different"),
        ([1, 2], "not one of"),
    ):
        with pytest.raises(ValueError, match=words):
            groups[0].subgroup(ranks)


def test_a_rank_that_left_a_group_is_not_waited_for_on_its_channels():
    groups = ThreadGroup.create(2)
    channels = [group.channel("votes") for group in groups]
    groups[1].leave("it closed")
    with pytest.raises(PeerAborted, match="it closed"):
        channels[0].exchange(b"", "vote", 10.0)
