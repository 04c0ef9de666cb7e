"""Variables of the environment that something reads at a moment of its own: child processes, libraries that start."""

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

_lock = threading.Lock()


@contextlib.contextmanager
def changed_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Inside, variables have these values; None: there is none. One thread at a time."""
    with _lock:
        before = {name: os.environ.get(name) for name in changes}
        try:
            _set(changes)
            yield
        finally:
            _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
