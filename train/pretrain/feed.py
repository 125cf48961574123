"""The rows of each step and the sums over all ranks that it needs, requested while the step before computes.

The sums are the number of targets in the global batch, which every loss is divided by, and the number of ranks that
were asked to stop. They are requested one step ahead, so that no step waits for the slowest rank; a signal that arrives
after the request takes effect one step later.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from train.data.prefetch import Prefetch
from train.data.rows import Rows
from train.parallel.ranks import Ranks, Total

Asked = Callable[[], tuple[bool, bool]]
"""Whether this process was asked to stop by SIGTERM, and by SIGINT."""


@dataclass(frozen=True)
class Fed:
    """What a step begins with."""

    rows: Rows
    """Rows of this rank."""
    num_targets: float
    """Targets of the global batch."""
    by_sigterm: bool
    """Whether a rank was asked to stop by SIGTERM."""
    by_sigint: bool
    """Whether a rank was asked to stop by SIGINT."""

    @property
    def stops(self) -> bool:
        """Whether the run is to stop before this step, on every rank."""
        return self.by_sigterm or self.by_sigint


@dataclass(frozen=True)
class Ahead:
    """A step that was requested."""

    step: int
    rows: Rows | Exception
    total: Total


class Feed:
    """Rows and sums, one step ahead. Every rank requests the same steps in the same order."""

    def __init__(self, rows: Prefetch, ranks: Ranks, counts: bool, asked: Asked):
        """`counts`: whether this rank's rows count, rather than those of another rank that reads the same."""
        self._rows, self._ranks, self._counts, self._asked = rows, ranks, counts, asked
        self._ahead: Ahead | None = None
        self._waited = 0.0

    def request(self, step: int) -> Ahead:
        """Take the rows of a step (0 = first) as soon as they are read, and start its sums; returns both.

        An error of reading is raised by `take`: the sums are started all the same, since every rank takes part in them.
        """
        rows: Rows | Exception
        try:
            rows, seconds = self._rows.take(step)
            self._waited += seconds
        except Exception as error:
            rows = error
        number = rows.num_targets if isinstance(rows, Rows) and self._counts else 0
        self._ahead = Ahead(step, rows, self._ranks.start_total(number, *self._asked()))
        return self._ahead

    def take(self, step: int) -> Fed:
        """What a step (0 = first) begins with, requested now if it was not before."""
        ahead = self._ahead
        if ahead is None or ahead.step != step:
            self.drop()
            ahead = self.request(step)
        self._ahead = None
        if isinstance(ahead.rows, Exception):
            raise ahead.rows
        num_targets, by_sigterm, by_sigint = ahead.total.wait()
        return Fed(ahead.rows, num_targets, bool(by_sigterm), bool(by_sigint))

    def drop(self) -> None:
        """Drop what was requested; on every rank, and returns once all have requested it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.total.wait()

    def waited(self) -> float:
        """Time that rows were waited for since the last call [s]."""
        seconds, self._waited = self._waited, 0.0
        return seconds

    def close(self) -> None:
        """End the reading; nothing is waited for, since another rank may have failed."""
        self._ahead = None
        self._rows.close()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
