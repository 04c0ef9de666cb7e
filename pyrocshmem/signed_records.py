"""What ranks write into their group's store, as bytes: messages, and reasons for which there will be no message.

    message      the length of the call's name (4 bytes), the name, the payload
    reason       ff ff ff ff, then JSON; in place of a message it is a tombstone: the round has no result
    signed       fe ff ff ff, then an HMAC, then one of these (`boards.SignedBoard`)

A record that can't be read is a `ShmemError` that names its key.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from pyrocshmem.errors import ShmemError

_REASON = b"\xff\xff\xff\xff"
SIGNED = b"\xfe\xff\xff\xff"


class Reason(NamedTuple):
    """Why a round has no result, or a rank takes part in none any more.

    missing: the ranks that somebody waited for in vain. peer: the rank that gave up or left, saying `text`. Without
    both, `text` is what is wrong with the store.
    """

    missing: tuple[int, ...] = ()
    peer: int | None = None
    text: str = ""

    def pack(self) -> bytes:
        return _REASON + json.dumps(self).encode()


def pack_message(call: str, payload: bytes) -> bytes:
    name = call.encode(errors="backslashreplace")  # what it quotes may be no text
    return len(name).to_bytes(4, "little") + name + payload


def unpack(key: str, record: bytes, num_ranks: int) -> tuple[str, bytes] | Reason:
    """The (call, payload) of a message, or the reason that stands in its place."""
    if record.startswith(_REASON):
        return unpack_reason(key, record, num_ranks)
    end = 4 + int.from_bytes(record[:4], "little")
    if len(record) < 4 or end > len(record):
        raise unreadable(key, record)
    try:
        return record[4:end].decode(), record[end:]
    except UnicodeDecodeError as error:
        raise unreadable(key, record) from error


def unpack_reason(key: str, record: bytes, num_ranks: int) -> Reason:
    try:
        missing, peer, text = json.loads(record.removeprefix(_REASON))
        ranks = range(num_ranks)
        # Never all of them: somebody has waited.
        sound = (
            len(set(missing)) < num_ranks
            and all(type(rank) is int and rank in ranks for rank in missing)
            and (peer is None or (type(peer) is int and peer in ranks))
            and type(text) is str
        )
    except (ValueError, TypeError) as error:
        raise unreadable(key, record) from error
    if not record.startswith(_REASON) or not sound:
        raise unreadable(key, record)
    return Reason(tuple(missing), peer, text)


def named(key: str) -> str:
    """A record in words: most keys end with the rank that is to write it."""
    rank = key.rpartition("/")[2]
    return f"rank {rank}'s record {key!r} in the store" if rank.isdecimal() else f"the store's record {key!r}"


def unreadable(key: str, record: bytes) -> ShmemError:
    why = "it is damaged, or somebody else wrote to the store"
    if record.startswith(SIGNED):
        why = "it has an HMAC: who wrote it was given a secret (PYROCSHMEM_SECRET), this rank was not"
    return ShmemError(f"{named(key)} can't be read: {why}")


def parsed(what: str, replies: Sequence[bytes]) -> list[dict[str, Any]]:
    """The JSON objects that are the ranks' payloads of the vote `what`."""
    found: list[dict[str, Any]] = []
    for rank, reply in enumerate(replies):
        try:
            facts = json.loads(reply)
        except ValueError:
            facts = None
        if not isinstance(facts, dict):
            raise unreadable_payload(what, rank)
        found.append(facts)
    return found


def unreadable_payload(what: str, rank: int) -> ShmemError:
    return ShmemError(
        f"{what}: what rank {rank} brings can't be read: it is damaged, or somebody else wrote to the store"
    )
