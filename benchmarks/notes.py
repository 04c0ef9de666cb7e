"""What people wrote about the records: benchmarks/results/notes.md, which docs/results takes in.

A section of the file is an op's, `## gemm_reduce_scatter`. Its text stands before the op's tables; but lines that begin
so are reasons, and stand where a case is listed as behind a peer:

    - at `4096 x 8192 x *`, `256 MiB`: the link is full
    - at `2 KiB` behind `unfused`, `nccl_window`: reason not known

Shapes are as the tables write them, * for anything. The first line that fits counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

_REASON = re.compile(r"- at (`[^`]+`(?:, `[^`]+`)*)(?: behind (`[^`]+`(?:, `[^`]+`)*))?: (.+?)\.?")


@dataclass(frozen=True)
class Reason:
    """Why ours is behind. shapes: patterns. peers: names, none for any."""

    shapes: tuple[str, ...]
    peers: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Notes:
    """By op: words, and reasons."""

    words: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, list[Reason]] = field(default_factory=dict)

    def text(self, op: str) -> str:
        """What is said of `op`, "" for nothing."""
        return self.words.get(op, "")

    def reason(self, op: str, shape: str, peer: str) -> str:
        """Why ours is behind `peer` there; "" where nobody wrote it down."""
        for each in self.reasons.get(op, ()):
            fits = any(fnmatchcase(shape, pattern) for pattern in each.shapes)
            if fits and (not each.peers or peer in each.peers):
                return each.text
        return ""


NO_NOTES = Notes()


def read(path: Path) -> Notes:
    """The notes of a file; none where there is no file. Raises ValueError for a line that looks like a reason and is
    none, and for a file that is not in UTF-8."""
    if not path.exists():
        return NO_NOTES
    found = Notes()
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}, allowed is text in UTF-8") from None
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        op, _, body = section.partition("\n")
        op, words = op.strip(), []
        for line in body.splitlines():
            if not line.startswith("- at "):
                words.append(line)
                continue
            fits = _REASON.fullmatch(line)
            if fits is None:
                raise ValueError(f"{path}: {line!r} must be: - at `SHAPE`, .. [behind `PEER`, ..]: reason")
            shapes, peers = (tuple(re.findall("`([^`]+)`", group or "")) for group in fits.groups()[:2])
            found.reasons.setdefault(op, []).append(Reason(shapes, peers, fits[3]))
        found.words[op] = "\n".join(words).strip()
    return found
