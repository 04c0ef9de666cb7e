"""The key-value stores under a `Group`: torch.distributed's for processes, a dictionary for threads."""

import contextlib
import hashlib
import hmac
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from pyrocshmem.errors import ShmemError
from pyrocshmem.signed_records import SIGNED, named

_TAG_BYTES = hashlib.sha256().digest_size


def store_may_be_gone() -> contextlib.suppress:
    """For last words to the peers: the store ends with its host process, and then nobody listens."""
    return contextlib.suppress(RuntimeError, ValueError)


class Board(Protocol):
    """The key-value store under a group. Values are never empty."""

    def set(self, key: str, value: bytes) -> None: ...

    def set_once(self, key: str, value: bytes) -> bytes:
        """Set a key that isn't there, and return what it holds now: `value`, or what was there before."""

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """The values, or None while one is missing."""

    def delete(self, key: str) -> None: ...

    def pause(self, seconds: float) -> None:
        """Sleep for at most so long; may return sooner when something changed."""


class StoreBoard:
    """A `torch.distributed.Store`."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def set_once(self, key: str, value: bytes) -> bytes:
        # Nothing is expected, so nothing that is there is replaced.
        found: bytes = self._store.compare_set(key, b"", value)
        return found

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        if not self._store.check(list(keys)):
            return None
        found: list[bytes] = self._store.multi_get(list(keys))
        return found

    def delete(self, key: str) -> None:
        self._store.delete_key(key)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class MemoryBoard:
    """A dictionary shared by threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def set_once(self, key: str, value: bytes) -> bytes:
        with self._changed:
            if key not in self._values:
                self.set(key, value)
            return self._values[key]

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        with self._changed:
            return [self._values[key] for key in keys] if all(key in self._values for key in keys) else None

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)

    def pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)


class SignedBoard:
    """A board whose values are signed with a secret that its ranks share: HMAC-SHA256 over key and value.

    A key names the group, the round and the rank, and has one value at most while it matters: so what a stranger
    copies from one place to another, or from an earlier round, is not taken for a rank's. `ShmemError` for it.
    """

    def __init__(self, board: Board, secret: bytes) -> None:
        self._board, self._secret = board, secret

    def set(self, key: str, value: bytes) -> None:
        self._board.set(key, self._sign(key, value))

    def set_once(self, key: str, value: bytes) -> bytes:
        return self._verified(key, self._board.set_once(key, self._sign(key, value)))

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        found = self._board.get_all(keys)
        return found and [self._verified(key, record) for key, record in zip(keys, found, strict=True)]

    def delete(self, key: str) -> None:
        self._board.delete(key)

    def pause(self, seconds: float) -> None:
        self._board.pause(seconds)

    def _sign(self, key: str, value: bytes) -> bytes:
        return SIGNED + self._tag(key, value) + value

    def _tag(self, key: str, value: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._secret, len(name).to_bytes(4, "little") + name + value, hashlib.sha256)

    def _verified(self, key: str, record: bytes) -> bytes:
        if not record.startswith(SIGNED):
            raise ShmemError(
                f"{named(key)} has no HMAC: somebody else wrote to the store, or one who is of this job was given no "
                "secret (PYROCSHMEM_SECRET, the same for all ranks)"
            )
        start = len(SIGNED) + _TAG_BYTES
        value = record[start:]
        if not hmac.compare_digest(record[len(SIGNED) : start], self._tag(key, value)):
            raise ShmemError(
                f"{named(key)} has a wrong HMAC: somebody else wrote to the store, or one who is of this job was given "
                "another secret (PYROCSHMEM_SECRET, the same for all ranks)"
            )
        return value


def store_board(store: Any, secret: bytes | None) -> Board:
    """For ranks that share `secret`, None: that have none."""
    board = StoreBoard(store)
    return board if secret is None else SignedBoard(board, secret)
