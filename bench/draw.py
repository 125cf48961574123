"""Bench of initial weights and step sums: `python -m bench.draw`.

Prints nanoseconds of one core's CPU time for a normal number, by position and by torch's generator, best of five rounds
in turns; and the milliseconds of a sum over 2, 4 and 8 ranks of this machine, by recursive doubling and by gloo's ring.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tests.support.rank_pool import shared_pool
from train.model.draw import normal_part

SIDE, ROUNDS, SUMS = 4096, 5, 60


def seconds(work: Callable[[], Any]) -> float:
    """CPU time of a call [s]."""
    started = time.process_time()
    work()
    return time.process_time() - started


def sums(ranks: Any, number: int) -> tuple[float, float]:
    """Return the median time of a sum by recursive doubling and by gloo's ring [s]."""
    times: tuple[list[float], list[float]] = [], []
    values = torch.ones(3, dtype=torch.float64)
    for _ in range(number):
        started = time.perf_counter()
        ranks.total(1.0, 2.0, 3.0)
        middle = time.perf_counter()
        dist.all_reduce(values, group=ranks.control)
        times[0].append(middle - started)
        times[1].append(time.perf_counter() - middle)
    return median(times[0]), median(times[1])


def main() -> None:
    """Print the times."""
    torch.set_num_threads(1)
    whole, columns = slice(0, SIDE), slice(512, 1024)
    plain = torch.empty(SIDE, SIDE)
    works: dict[str, tuple[int, Callable[[], Any]]] = {
        "by position": (SIDE * SIDE, lambda: normal_part((0, "w"), (SIDE, SIDE), (whole, whole), 1.0)),
        "columns of a split": (SIDE * 512, lambda: normal_part((0, "w"), (SIDE, SIDE), (whole, columns), 1.0)),
        "torch": (SIDE * SIDE, plain.normal_),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, (_, work) in works.items():
            times[name].append(seconds(work))
    for name, (number, _) in works.items():
        print(f"{name:<20} {min(times[name]) / number * 1e9:.1f} ns a number")
    for world_size in (2, 4, 8):
        doubling, ring = shared_pool().play(world_size, sums, SUMS)[0]
        print(f"{world_size} ranks: {1e3 * doubling:.2f} ms by recursive doubling, {1e3 * ring:.2f} ms as a ring")


if __name__ == "__main__":
    main()
