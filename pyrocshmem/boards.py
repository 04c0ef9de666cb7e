"""The key-value stores under a `Group`: torch.distributed's for processes, a dictionary for threads."""

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol


def store_may_be_gone() -> contextlib.suppress:
    """For last words to the peers: the store ends with its host process, and then nobody listens."""
    return contextlib.suppress(RuntimeError, ValueError)


class Board(Protocol):
    """The key-value store under a group."""

    def set(self, key: str, value: bytes) -> None: ...

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

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        if not self._store.check(list(keys)):
            return None
        return [self._store.get(key) for key in keys]

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

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        with self._changed:
            return [self._values[key] for key in keys] if all(key in self._values for key in keys) else None

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)

    def pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)
