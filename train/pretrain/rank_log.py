"""The figures of every rank: each measures its own, rank 0 gathers them and writes ranks.jsonl.

The gather is asynchronous and has about a hundred bytes a rank, once in `train.ranks_every` steps. Its result is read
at the next window, so no step waits for it.
"""

import math
import resource
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from schemas.errors import UNWRITABLE
from schemas.logs import LOGGER
from schemas.paths import RANKS_NAME
from schemas.storage import Store
from train.config.settings import Settings
from train.model.stopwatch import Stopwatch
from train.monitor.log_files import Journal
from train.monitor.metrics import StepMetrics
from train.monitor.rank_figures import KINDS, RankFigures, SlowRank, slow_ranks
from train.parallel.ranks import Ranks

NUMBERS = (
    *("step_seconds", "data_seconds", "compute_seconds", "blocked_seconds", "cpu_share", "utilization", "memory"),
    "host_memory",
)
"""Fields of a line that a rank measures, in the order in which they are sent; the bytes of `KINDS` follow."""
WHOLE = ("memory", "host_memory")
"""Those that are whole numbers."""


class RankLog:
    """The rank figures of a run; call it in the same order on every rank."""

    def __init__(self, run: Store, settings: Settings, ranks: Ranks, stage: int, stopwatch: Stopwatch):
        """`stage`: first pipeline stage of this rank. `stopwatch`: measures this rank's own computation."""
        self._ranks, self._stopwatch, self._every = ranks, stopwatch, settings.train.ranks_every
        self._guard, self._is_first = settings.guard, ranks.rank == 0
        places: list[Any] = [None] * ranks.world_size
        here = (socket.gethostname(), str(ranks.device), stage)
        if self._every:
            dist.all_gather_object(places, here, group=ranks.control)
        self._places: list[tuple[str, str, int]] = places
        self._journal: Journal | None = None
        if self._every and self._is_first:
            self._open(run)
        self._pending: tuple[int, int, Any, list[torch.Tensor]] | None = None
        self._busy_at = time.thread_time()
        self._restart()

    def _open(self, run: Store) -> None:
        try:
            self._journal = Journal(run, RANKS_NAME)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            LOGGER.warning(f"penstock: {run.path(RANKS_NAME)}: {UNWRITABLE[error.errno]}; no figures of ranks")

    def _restart(self) -> None:
        self._began, self._cpu_at = time.perf_counter(), time.process_time()
        self._steps, self._seconds, self._data, self._blocked, self._memory = 0, 0.0, 0.0, 0.0, 0

    def begin_step(self) -> None:
        """Note the CPU time of this thread at the start of a step."""
        self._busy_at = time.thread_time()

    def add(self, record: StepMetrics, last: bool, bytes_sent: Callable[[], dict[str, int]]) -> list[RankFigures]:
        """Add a step; at the end of a window, start to gather it, and return the figures of the window before.

        `record`: metrics of the step, with this rank's times. `last`: True for the last step of the run.
        `bytes_sent`: returns the bytes that this rank sends in a step, by kind.
        """
        if not self._every:
            return []
        busy_at = time.thread_time()
        blocked = record.step_seconds - record.data_seconds - (busy_at - self._busy_at)
        self._busy_at = busy_at
        self._steps += 1
        self._seconds += record.step_seconds
        self._data += record.data_seconds
        self._blocked += max(blocked, 0.0)
        self._memory = max(self._memory, record.memory or 0)
        if record.step % self._every and not last:
            return []
        before = self.finish()
        self._start(record.step, bytes_sent())
        return before

    def _start(self, step: int, sent: dict[str, int]) -> None:
        """Start to gather the window that ends with `step`."""
        cuda, wall = self._ranks.device.type == "cuda", time.perf_counter() - self._began
        mean = max(self._steps, 1)
        values = {
            "step_seconds": self._seconds / mean,
            "data_seconds": self._data / mean,
            "compute_seconds": self._stopwatch.take() / mean,
            "blocked_seconds": None if cuda else self._blocked / mean,
            "cpu_share": (time.process_time() - self._cpu_at) / max(wall, 1e-9),
            "utilization": device_utilization(self._ranks.device),
            "memory": self._memory if cuda else None,
            "host_memory": largest_resident(),
        }
        numbers = [values[name] for name in NUMBERS] + [sent.get(kind, 0) for kind in KINDS]
        own = torch.tensor([math.nan if number is None else number for number in numbers], dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in range(self._ranks.world_size)] if self._is_first else []
        work = dist.gather(own, gathered or None, dst=0, group=self._ranks.control, async_op=True)
        self._pending = step, self._steps, work, gathered
        self._restart()

    def finish(self) -> list[RankFigures]:
        """Wait for the pending gather; write its window and return it. Empty on other ranks than the first."""
        if self._pending is None:
            return []
        (step, steps, work, gathered), self._pending = self._pending, None
        work.wait()
        window = [
            figures_of(place, (step, steps, rank), numbers.tolist())
            for rank, (place, numbers) in enumerate(zip(self._places, gathered, strict=False))
        ]
        if self._journal is not None:
            for figures in window:
                self._journal.append(figures.line())
        return window

    def slow_ranks(self, window: Sequence[RankFigures]) -> list[SlowRank]:
        """Return the slow ranks of a window by the settings of `[guard]`; a window that is too short has none."""
        config = self._guard
        seconds = sum(window[0].steps * window[0].step_seconds for _ in window[:1])
        if config.straggler_factor is None or len(window) < 2 or seconds < config.straggler_seconds:
            return []
        return slow_ranks(window, config.straggler_factor)

    def close(self) -> None:
        """Close the file; a pending gather is dropped, since other ranks may have failed."""
        self._pending = None
        if self._journal is not None:
            self._journal.close()


def figures_of(place: tuple[str, str, int], window: tuple[int, int, int], numbers: Sequence[float]) -> RankFigures:
    """Return the figures of a rank from its gathered numbers. `window`: last step, number of steps, rank."""
    values: dict[str, Any] = {
        name: None if math.isnan(number) else int(number) if name in WHOLE else number
        for name, number in zip(NUMBERS, numbers, strict=False)
    }
    sent = {kind: int(number) for kind, number in zip(KINDS, numbers[len(NUMBERS) :], strict=True) if number}
    host, device, stage = place
    step, steps, rank = window
    return RankFigures(**values, sent=sent, step=step, steps=steps, rank=rank, host=host, device=device, stage=stage)


def largest_resident() -> int:
    """Return the largest resident memory of this process since it started [bytes]."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_utilization(device: torch.device) -> float | None:
    """Return the utilization of a GPU, 0 to 1, by NVML; None for a CPU, or where NVML cannot be read."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except (ImportError, RuntimeError):
        return None  # nvidia-ml-py is not installed, or the driver refuses the query: the field's docstring names both
