"""Which memory events reach which, in PTX and in GCN assembly: basic blocks, and a walk over them.

Blocks don't lie in the text in the order in which they run: a store moved to the end of a function may run before a
release that stands above it. So the rules follow the branches.
"""

import re
from dataclasses import dataclass, field

# Of one line: where it can branch to, and whether it can go on to the next line.
_LABEL = re.compile(r"^(\$L__BB\w+|\.LBB\w+):")
_BRANCH = re.compile(r"\b(?:bra|bra\.uni|s_branch|s_cbranch_\w+)\s+(\$L__BB\w+|\.LBB\w+)")
_ENDS = re.compile(r"^\s*(?:bra(?:\.uni)?\s|s_branch\s|ret;|exit;|trap;|s_endpgm\b|s_setpc_b64\b)")
_UNREADABLE = re.compile(r"^\s*(?:@\S+\s+)?(?:brx\.idx|call|s_swappc_b64|s_call_b64)\b")
# A branch too far for the instruction: the address is computed from the label, then jumped to.
_FAR = re.compile(r"\((\.LBB\w+)-\.Lpost_getpc")


@dataclass
class Block:
    """Events (kind, line) in order, and the labels of the blocks that may follow."""

    events: list[tuple[str, str]] = field(default_factory=list)
    successors: list[str] = field(default_factory=list)


def blocks_of(text: str, kinds: dict[str, re.Pattern[str]]) -> dict[str, Block]:
    """The blocks of the one kernel in `text`, the first one under ""; events are lines that match a pattern of `kinds`.

    Raises ValueError at calls and jump tables, which the kernels don't have and this reader doesn't know.
    """
    blocks = {"": Block()}
    current: Block | None = blocks[""]
    far: str | None = None
    for line in text.splitlines():
        if label := _LABEL.match(line):
            name = label.group(1)
            if current is not None:
                current.successors.append(name)
            current = blocks.setdefault(name, Block())
            continue
        if current is None:
            continue  # behind an end, before the next label
        if _UNREADABLE.match(line):
            raise ValueError(f"a call or a jump table: {line.strip()}")
        for kind, pattern in kinds.items():
            if pattern.search(line):
                current.events.append((kind, line.strip()))
        far = found.group(1) if (found := _FAR.search(line)) else far
        if branch := _BRANCH.search(line):
            current.successors.append(branch.group(1))
        if _ENDS.match(line):
            if far is not None and "s_setpc_b64" in line:
                current.successors.append(far)
            current, far = None, None
        elif branch:
            # What follows a conditional branch is a block of its own, with no label.
            rest = f"{id(current)}+{len(blocks)}"
            current.successors.append(rest)
            current = blocks.setdefault(rest, Block())
    return blocks


def unsettled(blocks: dict[str, Block]) -> list[str]:
    """The "release" events that some path reaches with no "drain" and then "barrier" since its last "store".

    The state of a path is 0 (a write may be on its way), 1 (drained: this thread's writes are done) or 2 (settled: all
    threads' are, as at the kernel's start). Where paths meet, the worst counts.
    """
    states: dict[str, tuple[int, str]] = {"": (2, "")}
    wrong: dict[str, str] = {}
    pending = [""]
    while pending:
        name = pending.pop()
        state, since = states[name]
        for kind, line in blocks[name].events:
            if kind == "store":
                state, since = 0, line
            elif kind == "drain":
                state = max(state, 1)
            elif kind == "barrier":
                state = 2 if state >= 1 else 0
            elif kind == "release" and state < 2:
                wrong.setdefault(line, since)
        for successor in blocks[name].successors:
            if successor not in states or state < states[successor][0]:
                states[successor] = (state, since)
                pending.append(successor)
    return [f"{release!r} is not settled after {store!r}" for release, store in wrong.items()]
