"""Figures of every rank of a real run: gathered, written, and a rank that is stopped again and again is named."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from schemas.storage import Store
from tests.support.tiny_runs import copied, events, make_run, metrics, train, trained
from train.monitor.rank_figures import read_ranks
from train.pretrain.step import Learner

pytestmark = pytest.mark.dist

PULSES = """
import os, signal, sys, time
while os.getppid() == int(sys.argv[1]):
    os.kill(int(sys.argv[1]), signal.SIGSTOP); time.sleep(0.097)
    os.kill(int(sys.argv[1]), signal.SIGCONT); time.sleep(0.003)
"""
"""Stops the process that started it for 97 % of the time, as a machine that is overloaded does."""


@contextlib.contextmanager
def slowed(rank: int, from_step: int) -> Iterator[None]:
    """Slow the process of a rank down from a step on."""
    compute, pulses = Learner.compute, list[subprocess.Popen[bytes]]()

    def computing(self: Learner, step: int, *arguments: Any) -> Any:
        if step == from_step and torch.distributed.get_rank() == rank:
            pulses.append(subprocess.Popen([sys.executable, "-c", PULSES, str(os.getpid())]))
        return compute(self, step, *arguments)

    with mock.patch.object(Learner, "compute", computing):
        try:
            yield
        finally:
            for process in pulses:
                process.kill()
                process.wait()


ALARM = ("train.ranks_every=10", "guard.straggler_seconds=0", "guard.straggler_factor=8")


def test_a_slow_rank_is_named_and_the_figures_of_all_are_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    results = train(run, 2, *ALARM, "layout.data=zero3", during=[(slowed, (1, 11))])
    assert [item.code for item in results] == [0, 0], results
    lines = read_ranks(Store(str(run)))
    assert [(line.step, line.steps, line.rank) for line in lines] == [
        (10, 10, 0),
        (10, 10, 1),
        (20, 10, 0),
        (20, 10, 1),
    ]
    assert all(0 < line.compute_seconds < line.step_seconds for line in lines)
    assert all(0 <= line.blocked_seconds <= line.step_seconds for line in lines)  # type: ignore[operator]
    assert all((line.memory, line.utilization, line.device) == (None, None, "cpu") for line in lines)
    assert all(line.host_memory > 10**8 for line in lines)  # type: ignore[operator]
    # The first window has an alarm only where the machine itself makes a rank eight times as slow.
    (event,) = [event for event in events(run, "straggler") if event.step == 20]
    assert (event.steps, event.rank, event.cause) == (10, 1, "compute")
    assert event.factor > 8
    assert event.share == pytest.approx(1 - 1 / event.factor)
    # Rank 0 waits for it.
    assert lines[2].blocked_seconds > 0.5 * lines[2].step_seconds  # type: ignore[operator]
    (line,) = [line for line in results[0].out.splitlines() if line.startswith("step 20: rank 1 on")]
    assert "computes" in line
    assert "the others wait for it" in line
    assert metrics(run)[9].accuracy is not None


def test_without_the_setting_nothing_is_gathered_and_the_weights_are_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    other = copied(run, tmp_path / "other")
    trained(run, 1, "train.ranks_every=0", "train.log_every=1000")
    trained(other, 1, "train.ranks_every=7", "train.log_every=1")
    assert not (run / "train/ranks.jsonl").exists()
    lines = [json.loads(line) for line in (other / "train/ranks.jsonl").read_text().splitlines()]
    assert [(line["step"], line["steps"]) for line in lines] == [(7, 7), (14, 7), (20, 6)]
    actual, expected = metrics(other), metrics(run)
    assert [(line.loss, line.grad_norm, line.losses) for line in actual] == [
        (line.loss, line.grad_norm, line.losses) for line in expected
    ]
    assert [line.accuracy is None for line in expected] == [True] * 19 + [False]
    assert None not in [line.accuracy for line in actual]
