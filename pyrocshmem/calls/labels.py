"""Labels: strings that stand for objects of this process, as graphs that torch.compile made can hold them.

    heap.label                   # "Heap 3"
    find("Heap 3")               # the heap, while it lives

An attribute, not a table: what is traced can read it on every torch of the supported window.
"""

import itertools
import weakref
from typing import Any

_numbers = itertools.count()
_things: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()


def label(thing: Any) -> str:
    """A label of its own for `thing`, which keeps it in its attribute `label`."""
    made = f"{type(thing).__name__} {next(_numbers)}"
    _things[made] = thing
    return made


def find(name: str) -> Any:
    """What has that label; None when it is gone, or never was."""
    return _things.get(name)
