"""How ranks ended: `RankResult`, one a rank, and `RanksFailed`, what `spawn` raises."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RankResult:
    """How a rank ended: with `value`; with `exception` and its `traceback`; or dead, with an `exitcode`
    alone."""

    rank: int
    value: Any = None
    exception: BaseException | None = None
    traceback: str = ""
    exitcode: int | None = None

    @property
    def ok(self) -> bool:
        return self.exception is None and self.exitcode is None

    def describe(self) -> str:
        """A paragraph for a person."""
        if self.ok:
            return f"rank {self.rank}: finished"
        if self.exception is None:
            died = f"exit code {self.exitcode}"
            if self.exitcode is not None and self.exitcode < 0:
                died = f"signal {signal.Signals(-self.exitcode).name}"
            return f"rank {self.rank}: died ({died})"
        return f"rank {self.rank}: {self.traceback or repr(self.exception)}"


class RanksFailed(RuntimeError):
    """Ranks failed. `results` are all ranks' ends; `__cause__` is the exception that came first."""

    def __init__(self, results: Sequence[RankResult]) -> None:
        self.results = list(results)
        failed = [result for result in self.results if not result.ok]
        super().__init__(
            f"{len(failed)} of {len(self.results)} ranks failed\n" + "\n".join(r.describe() for r in failed)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Made of results, not of its text: it may travel, too, from a rank that has started ranks.
        return RanksFailed, (self.results,)
