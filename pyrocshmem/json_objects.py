"""Objects from all ranks, as JSON: what a peer sends is read, never run.

    parts = all_gather_json({"seconds": 0.5}, "seconds of a step")      # on every rank, in rank order

`torch.distributed.all_gather_object` and its kin unpickle what comes, so that whoever can write to the ranks' store, or
to one of their sockets, runs code on all of them.
"""

import json
from typing import Any

from pyrocshmem.errors import ShmemError
from pyrocshmem.groups import as_group


def all_gather_json(value: Any, what: str, group: Any = None, timeout: float | None = None) -> list[Any]:
    """Every rank's `value`, in rank order. Collective.

    Args:
        value: None, bool, int, float (NaN and infinities, too), str, and lists and dicts of these. Tuples arrive as
            lists, keys as str.
        what: the call in words, alike on all ranks.
        group: what `as_group` takes.
        timeout: seconds to wait for the last rank, `init_seconds()` when None.

    Raises as `Group.exchange` does; `TypeError` for a value that JSON has no place for, `ShmemError` for a message that
    is no JSON. The ranks meet at the group's store: whose process hosts it must stay until all have returned.
    """
    replies = as_group(group).exchange(json.dumps(value).encode(), what, timeout)
    found = []
    for rank, reply in enumerate(replies):
        try:
            found.append(json.loads(reply))
        except (ValueError, RecursionError) as error:
            raise ShmemError(f"{what}: what rank {rank} sent is no JSON: {error}") from None
    return found
