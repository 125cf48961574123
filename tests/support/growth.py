"""How the work of a function grows with its input: CPU time, the best of several runs, on inputs of two sizes."""

import time
from collections.abc import Callable
from typing import Any

FACTOR = 4
"""Ratio of the two sizes: a linear function takes 4 times as long, a quadratic one 16 times."""
MOST = 9.0
"""Ratio of CPU times that no test accepts."""
NOTHING = 0.05
"""CPU time of the larger input below which nothing is compared [s]: caches and garbage collection count more."""


def cpu_seconds(call: Callable[[], Any], runs: int) -> float:
    """The CPU time of a call: the least of several runs."""
    times = []
    for _ in range(runs):
        started = time.thread_time()
        call()
        times.append(time.thread_time() - started)
    return min(times)


def growth(function: Callable[[Any], Any], make: Callable[[int], Any], size: int) -> float:
    """The ratio of the CPU times on `make(FACTOR * size)` and `make(size)`; 1 if the larger takes next to nothing."""
    small, large = make(size), make(FACTOR * size)
    few, many = cpu_seconds(lambda: function(small), 3), cpu_seconds(lambda: function(large), 1)
    if many < NOTHING:
        return 1.0
    if many > MOST * few:  # another process may have taken the caches: measure again
        few, many = min(few, cpu_seconds(lambda: function(small), 3)), cpu_seconds(lambda: function(large), 2)
    return many / max(few, 1e-4)
