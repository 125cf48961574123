"""The time that a device computes in a part of the step that runs no collective, so that ranks can be compared.

All ranks of a step wait for the slowest one in its collectives, so the whole step takes equally long on all of them.
Parts without collectives do not: they show which rank is slow. Source of the idea: Jiang et al. 2024 (MegaScale), arXiv
2402.15627, section 5.1.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Sums the time of `with stopwatch.running():` blocks; on CUDA that of the kernels which the blocks launch."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._pending: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return the context of a block whose time is added. Nothing waits for the device."""
        if not self._cuda:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._pending.append((begin, end))

    def take(self) -> float:
        """Return the time since the last call [s]. Blocks that a device still computes are left for the next call."""
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.pop(0)
            self._seconds += begin.elapsed_time(end) / 1000
        seconds, self._seconds = self._seconds, 0.0
        return seconds
