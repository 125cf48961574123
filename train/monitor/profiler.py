"""The profiler of a few steps: writes a Chrome trace and the most expensive operators to the run's `train/profile`.

Nothing is imported, wrapped or timed outside the steps of the setting `train.profile`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from schemas.errors import describe_storage_error
from schemas.logs import LOGGER
from schemas.storage import Store
from train.config.train import ProfileWindow

PROFILE_FOLDER = "train/profile"
NUM_OPERATORS = 30
"""Number of operators in the table."""


class StepProfiler:
    """Profiles a range of steps; leaving the context writes the profile of the steps recorded so far.

    A run that resumes within the range records the rest of the range. File names contain the recorded steps.
    """

    def __init__(self, run: Store, window: ProfileWindow | None):
        """`window`: the steps to record; None = record nothing, as on every rank but the first."""
        self._run, self._window = run, window
        self._profiler: Any = None
        self._recorded: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._finish()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Return a context manager for a step; the step is recorded if it is in the range to record."""
        if self._window is None or not self._window.first <= number <= self._window.last:
            self._finish()  # After a rewind out of the window, no further steps may be added to the recording.
            yield
            return
        from torch.profiler import record_function

        self._start()
        self._recorded.append(number)
        with record_function(f"step {number}"):
            yield
        if number == self._window.last:
            self._finish()

    def _start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if self._profiler is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities, record_shapes=True)
            self._profiler.start()

    def _finish(self) -> None:
        if self._profiler is None:
            return
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.stop()
        profiler, self._profiler, self._window = self._profiler, None, None
        name = f"{PROFILE_FOLDER}/steps-{self._recorded[0]}-{self._recorded[-1]}"
        self._run.make_parent(name)
        try:
            partial = self._run.path(f"{name}.partial.json.gz")
            profiler.export_chrome_trace(partial)
            os.replace(partial, self._run.path(f"{name}.json.gz"))
            order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
            table = profiler.key_averages().table(sort_by=order, row_limit=NUM_OPERATORS)
            self._run.write_atomic(f"{name}.txt", table.encode())
        except OSError as error:
            if describe_storage_error(error) is None:
                raise
            LOGGER.warning(f"penstock: {self._run.path(name)}: not written: {error}")
