"""Layouts whose steps are predicted and measured on this machine, and how far the two orders agree."""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.train_contenders import RATE, Case, llama, make_rows, plan_of
from train.config.settings import Settings
from train.parallel.devices import Cluster, Device
from train.parallel.ranks import Ranks
from train.plan.search.search import Candidate, predict
from train.pretrain.step import Learner

CASE = Case("5M", llama(4096, 6, 192, (4, 4), 512), 8, 256)
"""Large enough that products count, small enough that what is sent and started does too."""
AGAIN, CHEAP = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
LAYOUTS: Mapping[int, Mapping[str, Mapping[str, Any]]] = {
    1: {
        "micro-batches of 8": {"micro_batch": 8},
        "micro-batches of 2": {"micro_batch": 2},
        "micro-batches of 1": {"micro_batch": 1},
        "layers again": {"micro_batch": 8} | AGAIN,
        "layers again, of 1": {"micro_batch": 1} | AGAIN,
        "cheap parts again, of 4": {"micro_batch": 4} | CHEAP,
    },
    2: {
        "ddp": {"data": "ddp", "micro_batch": 4},
        "zero2": {"data": "zero2", "micro_batch": 4},
        "zero3 of 1": {"micro_batch": 1},
        "zero3 of 1, layers again": {"micro_batch": 1} | AGAIN,
        "tensor": {"tensor": 2, "micro_batch": 8},
        "tensor of 2": {"tensor": 2, "micro_batch": 2},
        "context": {"context": 2, "micro_batch": 8},
        "pipeline of 2": {"pipeline": 2, "data": "zero2", "micro_batch": 2},
    },
    4: {
        "ddp": {"data": "ddp", "micro_batch": 2},
        "zero3 of 1": {"micro_batch": 1},
        "hsdp": {"replicate": 2, "micro_batch": 2},
        "tensor x shard": {"tensor": 2, "micro_batch": 4},
        "tensor": {"tensor": 4, "micro_batch": 8},
        "tensor of 2": {"tensor": 4, "micro_batch": 2},
        "pipeline": {"pipeline": 4, "data": "zero2", "micro_batch": 2},
    },
}
"""By number of ranks, then by name: the section `[layout]`."""


def sections(layout: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a recipe."""
    return {"train": {"seq_len": CASE.seq_len}, "layout": dict(layout)}


def predicted(device: Device, ranks: int) -> dict[str, Candidate]:
    """Every layout of so many ranks of one machine."""
    cluster = Cluster(device, ranks, 1)
    run = CASE.seq_len, CASE.rows
    return {
        name: predict(CASE.shape, Settings.model_validate(sections(layout)), run, cluster)
        for name, layout in LAYOUTS[ranks].items()
    }


def measured(ranks: Ranks, rounds: int) -> dict[str, float]:
    """Seconds of the quickest step of each layout; they take turns, so that other load hits all alike."""
    learners = {name: _learner(layout, ranks) for name, layout in LAYOUTS[ranks.world_size].items()}
    rows, best = make_rows(CASE, False), dict.fromkeys(learners, float("inf"))
    for number in range(1, rounds + 2):
        for name, learner in learners.items():
            here = learner.model.rows_here(CASE.rows)
            mine = rows.part(here.start, here.stop)
            ranks.total(0.0)
            begin = time.perf_counter()
            learner.update(RATE, learner.compute(number, mine, CASE.rows, float(CASE.tokens)))
            (seconds,) = ranks.total(time.perf_counter() - begin)
            if number > 1:  # the first makes buffers
                best[name] = min(best[name], seconds / ranks.world_size)
    return best


def _learner(layout: Mapping[str, Any], ranks: Ranks) -> Learner:
    learner = Learner(plan_of(CASE, sections(layout)), ranks, 2)
    learner.init_state()
    return learner


def agreement(expected: Sequence[float], found: Sequence[float], band: float) -> tuple[float, int]:
    """Share of the pairs in the order expected, and how many there are, of those that differ by more than `band`.

    `band` is a share of the smaller of what was found.
    """
    right = wrong = 0
    for (a, x), (b, y) in itertools.combinations(zip(expected, found, strict=True), 2):
        if abs(x - y) > band * min(x, y):
            right, wrong = (right + 1, wrong) if (a < b) == (x < y) else (right, wrong + 1)
    return (right / (right + wrong) if right + wrong else 1.0), right + wrong


def kendall(expected: Sequence[float], found: Sequence[float]) -> float:
    """Kendall's tau: 1 for the same order, -1 for the opposite."""
    return 2 * agreement(expected, found, 0.0)[0] - 1
