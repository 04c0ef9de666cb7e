"""Kernels of several threads in Triton's interpreter, whose state (which program runs, what `triton.language`
does) belongs to the process: threads take turns, and a kernel that waits for another's passes its turn on.

    with turns.taken(kernel):        # around a launch on the CPU target
        kernel[grid](...)
    turns.pass_on(seconds)           # inside a kernel, between two polls of a wait

One thread at a time executes programs. Ranks that are threads can't deadlock here: a wait polls, and each poll
passes the turn on; a thread that is outside of kernels needs none. A kernel that is resumed finds the numbers of
its program as they were. The interpreter replaces functions of `triton.language` when a kernel starts and puts
them back when it ends: with kernels that overlap, the first to end would put them back under the others, so they
are replaced once more around all of them, by the first and for as long as any kernel runs.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from triton.runtime import interpreter

_turn = threading.Lock()
_owner: int | None = None  # the thread whose turn it is
_running = 0  # kernels that have begun and not ended
_replaced: Any = None


def _take() -> None:
    global _owner
    _turn.acquire()
    _owner = threading.get_ident()


def _give() -> None:
    global _owner
    _owner = None
    _turn.release()


@contextlib.contextmanager
def taken(kernel: Any) -> Iterator[None]:
    """This thread's turn, for one launch of `kernel` (a jit kernel of the interpreter)."""
    global _running, _replaced
    _take()
    try:
        if _running == 0:
            _replaced = interpreter._patch_lang(kernel.fn)
        _running += 1
        try:
            yield
        finally:
            _running -= 1
            if _running == 0:
                _replaced.restore()
    finally:
        _give()


def pass_on(seconds: float) -> None:
    """Let other threads, and other processes, run for `seconds` at least, then go on as before."""
    if _owner != threading.get_ident():
        # A kernel launched without `taken`: it has the interpreter for itself.
        time.sleep(seconds)
        return
    builder = interpreter.interpreter_builder
    program = builder.grid_dim, builder.grid_idx
    _give()
    time.sleep(seconds)
    _take()
    builder.grid_dim, builder.grid_idx = program
