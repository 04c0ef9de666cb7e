"""A secret that ranks share: what a stranger writes into their store is an error that says so, never a rank's word."""

import os
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from pyrocshmem import Heap, PeerAborted, ShmemError, from_torchrun, launching, rank_process, secret
from pyrocshmem.groups import Group
from pyrocshmem.signed_records import Reason, pack_message
from pyrocshmem.stores import MemoryBoard, SignedBoard, StoreBoard
from tests.pyrocshmem.test_bootstrap import in_threads
from tests.ranks import run_ranks, values

TIER = 1
pytestmark = pytest.mark.cpu

FOREIGN = "somebody else wrote to the store"


def groups_on(board, keys):
    """A rank for each of `keys`, which is its secret, or None."""
    return [
        Group(board if key is None else SignedBoard(board, key), rank, len(keys), "g")
        for rank, key in enumerate(keys)
    ]


def votes(group):
    return group.exchange(bytes([group.rank]), "a call", timeout=10)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_votes_aborts_and_farewells_with_a_secret(num_ranks):
    groups = groups_on(StoreBoard(dist.HashStore()), [b"s" * 32] * num_ranks)
    expected = [bytes([rank]) for rank in range(num_ranks)]
    for _ in range(4):
        assert [end for end, _ in in_threads(groups, votes)] == [expected] * num_ranks
    if num_ranks > 1:
        groups[0].abort("planted")
        groups[0].leave("it ends")
        with pytest.raises(PeerAborted, match="rank 0 gave up: planted"):
            votes(groups[1])
        with pytest.raises(PeerAborted, match="rank 0 gave up: planted"):
            votes(groups[2])


def _as_another_rank(board, key):
    board.set("g/1/1", board.get_all(["g/1/2"])[0])


def _of_an_earlier_round(board, key):
    board.set("g/1/1", board.get_all(["g/0/1"])[0])


def _of_another_group(board, key):
    other = MemoryBoard()
    SignedBoard(other, key).set("h/1/1", pack_message("a call", b"x"))
    board.set("g/1/1", other.get_all(["h/1/1"])[0])


def _unsigned(board, key):
    board.set("g/1/1", pack_message("a call", b"x"))


def _unsigned_tombstone(board, key):
    board.set("g/1/1", Reason(peer=2, text="forged").pack())


def _with_another_secret(board, key):
    SignedBoard(board, b"t" * 32).set("g/1/1", pack_message("a call", b"x"))


def _changed(board, key):
    record = bytearray(board.get_all(["g/1/2"])[0])
    record[-1] ^= 1
    board.set("g/1/2", bytes(record))


def _truncated(board, key):
    board.set("g/1/2", board.get_all(["g/1/2"])[0][:20])


def _abort(board, key):
    board.set("g/abort", Reason(peer=2, text="forged").pack())


def _abort_of_an_earlier_channel(board, key):
    SignedBoard(board, key).set("g/votes0/abort", Reason(peer=2, text="old").pack())
    board.set("g/abort", board.get_all(["g/votes0/abort"])[0])


def _farewell(board, key):
    board.set("g/left/1", Reason(peer=1, text="forged").pack())


ATTACKS = {
    _as_another_rank: "rank 1's record 'g/1/1'",
    _of_an_earlier_round: "rank 1's record 'g/1/1'",
    _of_another_group: "rank 1's record 'g/1/1'",
    _unsigned: "rank 1's record 'g/1/1'",
    _unsigned_tombstone: "rank 1's record 'g/1/1'",
    _with_another_secret: "rank 1's record 'g/1/1'",
    _changed: "rank 2's record 'g/1/2'",
    _truncated: "rank 2's record 'g/1/2'",
    _abort: "the store's record 'g/abort'",
    _abort_of_an_earlier_channel: "the store's record 'g/abort'",
    _farewell: "rank 1's record 'g/left/1'",
}


def _attacked(attack, key):
    """How the second round ends for ranks 0 and 1, which come after rank 2 and the stranger."""
    board = MemoryBoard()
    groups = groups_on(board, [key] * 3)
    in_threads(groups, votes)
    # Rank 2 has posted, and waits.
    message = pack_message("a call", b"\2")
    (SignedBoard(board, key) if key else board).set("g/1/2", message)
    attack(board, key or b"s" * 32)
    ends = []
    for group in groups[:2]:
        start = time.monotonic()
        try:
            ends.append(votes(group))
        except ShmemError as error:
            ends.append(error)
        assert time.monotonic() - start < 5
    return ends


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_a_stranger_writes_is_an_error_on_all_ranks(attack):
    for end in _attacked(attack, b"s" * 32):
        assert type(end) is ShmemError, end
        assert re.match(f"{ATTACKS[attack]} .*{FOREIGN}", str(end)), end


@pytest.mark.parametrize("attack", [_as_another_rank, _abort])
def test_control_without_a_secret_a_stranger_s_word_counts(attack):
    """Rank 0 takes it for a rank's; rank 1 alone can tell that it has written no message."""
    board = MemoryBoard()
    groups = groups_on(board, [None] * 3)
    board.set("g/0/2", pack_message("a call", b"\2"))
    attack(_Moved(board), None)
    if attack is _abort:
        with pytest.raises(PeerAborted, match="forged"):
            votes(groups[0])
    else:
        assert votes(groups[0]) == [b"\0", b"\2", b"\2"]


class _Moved:
    """The attacks of the second round, in the first."""

    def __init__(self, board):
        self._board = board

    def set(self, key, value):
        self._board.set(key.replace("/1/", "/0/"), value)

    def get_all(self, keys):
        return self._board.get_all([key.replace("/1/", "/0/") for key in keys])


@pytest.mark.parametrize(
    ("keys", "said_by_first", "said_by_second"),
    [
        (
            (b"s" * 32, None),
            "rank 1's record 'g/0/1' .* was given no secret",
            "rank 0's .* this rank was not",
        ),
        (
            (None, b"s" * 32),
            "rank 1's record 'g/0/1' .* this rank was not",
            "rank 0's .* was given no secret",
        ),
        ((b"s" * 32, b"t" * 32), "rank 1's .* given another secret", "rank 0's .* given another secret"),
    ],
)
def test_ranks_with_different_secrets_say_so(keys, said_by_first, said_by_second):
    ends = in_threads(groups_on(MemoryBoard(), keys), votes)
    for (end, seconds), words in zip(ends, (said_by_first, said_by_second), strict=True):
        assert type(end) is ShmemError
        assert re.search(words, str(end)), end
        assert "PYROCSHMEM_SECRET" in str(end)
        assert seconds < 5


def test_every_vote_abort_farewell_and_ledger_record_of_a_job_is_signed():
    for unsigned, signed in values(run_ranks(_looks_at_its_store, 2)):
        assert unsigned == []
        assert {"heap", "ledger", "abort", "left", "process"} <= signed


def _looks_at_its_store(rank, world_size):
    """What `pyrocshmem` writes, key by key: (keys of values without an HMAC, words of the keys of those with one)."""
    unsigned, signed = [], set()
    for name in ("set", "set_once"):
        honest = getattr(StoreBoard, name)

        def watched(board, key, value, honest=honest):
            if not value.startswith(b"\xfe\xff\xff\xff"):
                unsigned.append(key)
            signed.update(re.split(r"[\d./]+", key))
            return honest(board, key, value)

        setattr(StoreBoard, name, watched)
    with Heap(1 << 16) as heap:
        heap.group.introduce()
        heap.new_ledger()
        heap.barrier()
        # As `rank_main` does when a rank fails.
        heap.group.subgroup([rank]).abort("planted")
        rank_process._tell_peers("planted")
    return unsigned, signed


def _port_of(group):
    store = group._board._board._store
    while not isinstance(store, dist.TCPStore):
        store = store.underlying_store
    return store.port


@pytest.mark.parametrize("garbage", [b"{not json", Reason(peer=1, text="forged").pack()])
def test_a_stranger_at_the_store_of_a_job_can_end_it_but_not_speak_for_a_rank(garbage):
    found = values(run_ranks(_waits_for_stranger, 2, garbage))
    kind, text = found[0]
    assert kind is ShmemError
    assert re.match(f"the store's record '[^']*/abort' .*{FOREIGN}", text), text


def _waits_for_stranger(rank, world_size, garbage):
    group = rank_process.groups.as_group(None)
    group.barrier("both know the group")
    if rank == 0:
        with pytest.raises(ShmemError) as raised:
            group.barrier("a call")
        return raised.type, str(raised.value)
    client = dist.TCPStore("127.0.0.1", _port_of(group), is_master=False, timeout=timedelta(seconds=5))
    place = next(key for key in client.list_keys() if key.endswith(f"/{group.name}/0/1"))
    client.set(place.removesuffix("0/1") + "abort", garbage)
    return None


def test_a_job_s_secret_is_nowhere_that_another_user_can_read():
    for key, _, seen in values(run_ranks(_where_it_is, 2)):
        assert len(key) == 32
        assert not any(key in text or key.hex().encode() in text for text in seen)
    assert "secret" not in repr(rank_process.Job(0, 1, 2, b"", None, None, b"secret"))


def _where_it_is(rank, world_size):
    processes = (os.getpid(), os.getppid())
    seen = [Path(f"/proc/{number}/cmdline").read_bytes() for number in processes]
    return secret.current(), rank, [*seen, Path("/proc/self/environ").read_bytes()]


def test_what_was_recorded_of_an_earlier_job_with_the_same_secret_is_worth_nothing():
    boards = [StoreBoard(dist.HashStore()) for _ in range(2)]
    keys = []
    for board in boards:
        groups = groups_on(board, [b"s" * 32] * 2)
        nonces = [
            nonces for nonces, _ in in_threads(groups, lambda group: group.exchange(secret.nonce(), "start"))
        ]
        assert nonces[0] == nonces[1]
        keys.append(secret.of_ranks(b"s" * 32, nonces[0]))
    assert keys[0] != keys[1]
    # Of the exchange of nonces itself: rank 1 finds its place taken, and rank 0's own nonce is a fresh one.
    replayed = StoreBoard(dist.HashStore())
    replayed.set("g/0/1", boards[0].get_all(["g/0/1"])[0])
    ends = in_threads(
        groups_on(replayed, [b"s" * 32] * 2), lambda group: group.exchange(secret.nonce(), "start")
    )
    assert FOREIGN in str(ends[1][0])
    assert secret.of_ranks(b"s" * 32, ends[0][0]) not in keys


def _as_torchrun_starts_it(rank, world_size, port, environments):
    """What a process makes of its environment; the group that it had is gone."""
    dist.barrier()
    dist.destroy_process_group()
    secret._of_job = None
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.environ |= environments[rank]
    from_torchrun()
    with Heap(1 << 16) as heap:
        heap.barrier()
        return type(heap.group._board), secret.current()


def test_under_torchrun_the_environment_or_a_file_gives_the_secret(tmp_path):
    text = "an agreed secret of some length"
    file = tmp_path / "secret"
    file.write_text(text + "\n")
    file.chmod(0o600)
    environments = [{"PYROCSHMEM_SECRET": text}, {"PYROCSHMEM_SECRET_FILE": str(file)}]
    store, port = launching._listen()  # as torchrun's agent does
    found = values(run_ranks(_as_torchrun_starts_it, 2, port, environments))
    assert found[0] == found[1]
    board, key = found[0]
    assert board is SignedBoard
    assert key not in (None, text.encode())  # but one of this job's alone
    del store


def test_under_torchrun_a_rank_without_the_secret_is_told():
    store, port = launching._listen()
    environments = [{"PYROCSHMEM_SECRET": "an agreed secret of some length"}, {}]
    ends = run_ranks(_as_torchrun_starts_it, 2, port, environments)
    assert "was given no secret (PYROCSHMEM_SECRET" in str(ends[0].exception)
    assert "was given a secret (PYROCSHMEM_SECRET), this rank was not" in str(ends[1].exception)
    del store


def test_a_secret_from_a_file_of_one_s_own(tmp_path, monkeypatch):
    monkeypatch.delenv("PYROCSHMEM_SECRET", raising=False)
    file = tmp_path / "secret"
    monkeypatch.setenv("PYROCSHMEM_SECRET_FILE", str(file))
    with pytest.raises(ValueError, match="can't be read: No such file"):
        secret.from_environment()
    file.write_bytes(b"  0123456789abcdef\n")
    for mode in (0o640, 0o604, 0o620, 0o601, 0o660):
        file.chmod(mode)
        with pytest.raises(ValueError, match=f"has mode {mode:o}, allowed is a file of yours"):
            secret.from_environment()
    for mode in (0o600, 0o400):
        file.chmod(mode)
        assert secret.from_environment() == b"0123456789abcdef"
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    with pytest.raises(ValueError, match="belongs to user"):
        secret.from_environment()


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_secret_from_what_is_no_file(tmp_path, monkeypatch, kind):
    path = tmp_path / "secret"
    os.mkfifo(path, 0o600) if kind == "pipe" else path.mkdir(0o700)
    monkeypatch.setenv("PYROCSHMEM_SECRET_FILE", str(path))
    with pytest.raises(ValueError, match="is no file"):
        secret.from_environment()


def test_a_secret_must_be_long_and_there_must_be_one(monkeypatch):
    monkeypatch.delenv("PYROCSHMEM_SECRET_FILE", raising=False)
    monkeypatch.delenv("PYROCSHMEM_SECRET", raising=False)
    assert secret.from_environment() is None
    monkeypatch.setenv("PYROCSHMEM_SECRET", "x" * 15)
    with pytest.raises(ValueError, match="PYROCSHMEM_SECRET holds 15 bytes, allowed are 16 or more"):
        secret.from_environment()
    monkeypatch.setenv("PYROCSHMEM_SECRET", "x" * 16)
    assert secret.from_environment() == b"x" * 16
    monkeypatch.setenv("PYROCSHMEM_SECRET_FILE", "/anywhere")
    with pytest.raises(ValueError, match="both set"):
        secret.from_environment()
