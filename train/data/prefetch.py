"""Prefetching: a thread reads the rows of the next step during the current step."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from train.data.rows import Rows


class Prefetch:
    """Prefetches one step. It keeps no position in the data: any step may be taken, and the next is then ready."""

    def __init__(self, read: Callable[[int], Rows], stop: int, device: str = "cpu"):
        """`read` returns the rows of a step and is called in one thread only; steps from `stop` are not prefetched.

        For `device` = "cuda" the rows are pinned, so that they can be copied asynchronously.
        """
        self._read, self._stop, self._pinned = read, stop, device == "cuda"
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rows")
        self._step = -1
        self._pending: Future[Rows] | None = None

    def take(self, step: int) -> tuple[Rows, float]:
        """Return the rows of a step, and the time that the caller waited for them [s]. Read errors are raised here."""
        begin = time.perf_counter()
        pending = self._pending if self._step == step else None
        self._pending = None
        rows = (pending or self._pool.submit(self._rows, step)).result()
        if step + 1 < self._stop:
            self._step, self._pending = step + 1, self._pool.submit(self._rows, step + 1)
        return rows, time.perf_counter() - begin

    def _rows(self, step: int) -> Rows:
        rows = self._read(step)
        return rows.pinned() if self._pinned else rows

    def close(self) -> None:
        """End the thread; rows that it is reading are discarded."""
        self._pending = None
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
