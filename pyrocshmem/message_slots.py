"""The memory of messages, as hosts see it: `pyrocshmem.message` says what is in it.

A head whose first word is the number of the next call, two slots of quads, two sets of notes behind them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# What an empty slot holds in every word, as int32.
SENTINEL = 0xFFF3FFF3 - (1 << 32)
QUAD_BYTES = 16
# Calls use them in turn.
NUM_SLOTS = 2
# A cache line.
HEAD_WORDS = 32

_FEWEST_QUADS, _FEWEST_NOTES = 1 << 16, 1 << 13


class Room(NamedTuple):
    """How much fits: quads in a slot, and notes of a call."""

    quads: int = 0
    notes: int = 0

    @property
    def words(self) -> int:
        """int32 words in all: the head, both slots, both sets of notes."""
        return HEAD_WORDS + NUM_SLOTS * (4 * self.quads + 2 * self.notes)

    def has(self, other: Room) -> bool:
        """Whether `other` fits in it."""
        return self.quads >= other.quads and self.notes >= other.notes

    def grown(self, needed: Room) -> Room:
        """Room for both, grown by an eighth at least: every growth costs the ranks a vote."""
        return Room(
            max(self.quads, _rounded_up(needed.quads, _FEWEST_QUADS)),
            max(self.notes, _rounded_up(needed.notes, _FEWEST_NOTES)),
        )


def _rounded_up(count: int, fewest: int) -> int:
    step = max(fewest, (1 << count.bit_length()) // 8)
    return -(-count // step) * step


def clear(messages: torch.Tensor) -> None:
    """No calls so far, nothing in the slots, no notes."""
    messages.fill_(SENTINEL)
    messages[:HEAD_WORDS] = 0
