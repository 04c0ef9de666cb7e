"""The secret that the ranks of a job may share. With one, nobody else can write what they read in their store.

`spawn` makes one for its ranks. Processes that were started otherwise find theirs in `PYROCSHMEM_SECRET`, or in the
file that `PYROCSHMEM_SECRET_FILE` names; without either they have none.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Sequence

SHORTEST = 16
_NONCE_BYTES = 16
_LONGEST = 4096

_of_job: bytes | None = None


def make() -> bytes:
    return secrets.token_bytes(32)


def nonce() -> bytes:
    """What a rank brings to `of_ranks`."""
    return secrets.token_bytes(_NONCE_BYTES)


def of_ranks(secret: bytes, nonces: Sequence[bytes]) -> bytes:
    """A secret of these ranks alone: what was recorded of an earlier job with the same one is worth nothing."""
    return hmac.digest(secret, b"".join(nonces), hashlib.sha256)


def use(secret: bytes) -> None:
    """From now on this process' groups use it."""
    global _of_job
    _of_job = secret


def current() -> bytes | None:
    """What this process' groups use: what it was given, else what the environment has, else None."""
    return _of_job if _of_job is not None else from_environment()


def from_environment() -> bytes | None:
    """`ValueError` for a secret of less than SHORTEST bytes, two of them, or a file that others can read."""
    text, path = (os.environ.get(name) for name in ("PYROCSHMEM_SECRET", "PYROCSHMEM_SECRET_FILE"))
    if text is not None and path is not None:
        raise ValueError("PYROCSHMEM_SECRET and PYROCSHMEM_SECRET_FILE are both set, allowed is one of them")
    if text is not None:
        return _long_enough("PYROCSHMEM_SECRET", os.fsencode(text))
    return None if path is None else _long_enough(f"PYROCSHMEM_SECRET_FILE={path!r}", _contents(path))


def _contents(path: str) -> bytes:
    try:
        # A pipe without a writer would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"PYROCSHMEM_SECRET_FILE={path!r} can't be read: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"PYROCSHMEM_SECRET_FILE={path!r} is no file")
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(
                f"PYROCSHMEM_SECRET_FILE={path!r} belongs to user {found.st_uid} and has mode "
                f"{stat.S_IMODE(found.st_mode):o}, allowed is a file of yours that nobody else can use (chmod 600)"
            )
        return os.read(descriptor, _LONGEST).strip()
    finally:
        os.close(descriptor)


def _long_enough(name: str, secret: bytes) -> bytes:
    if len(secret) < SHORTEST:
        raise ValueError(f"{name} holds {len(secret)} bytes, allowed are {SHORTEST} or more")
    return secret
