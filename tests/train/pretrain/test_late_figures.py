"""Figures read one step late, as on a GPU: everything that a run computes, writes and stores has the same bits."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import tiny_runs
from tests.support.tiny_runs import (
    assert_same_bits,
    copied,
    cut_back,
    events,
    metrics,
    notes,
    signalled,
    trained,
)
from tests.train.pretrain.test_survive import make_run, poisoned
from train.config.settings import Settings
from train.pretrain.run import TrainingRun
from train.pretrain.step import Learner, StepResult

pytestmark = pytest.mark.dist

STEPS = 20


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Make ranks on CPUs read the figures of a step while the next step computes."""
    with mock.patch.object(TrainingRun, "defers", True):
        yield


LATE = (deferred, ())


def settings_of(**sections: Any) -> Settings:
    return Settings.model_validate(sections)


@pytest.mark.parametrize(
    ("device", "sections", "expected"),
    [
        ("cuda", {}, True),
        ("cuda", {"train": {"precision": "bf16"}, "guard": {"patience": 3}}, True),
        ("cpu", {}, False),
        ("cuda", {"guard": {"spike_sigmas": 6.0}}, False),
        ("cuda", {"guard": {"grad_sigmas": 6.0}}, False),
        ("cuda", {"train": {"precision": "fp16"}}, False),
        ("cuda", {"layout": {"data": "ddp", "compress": "powersgd"}}, False),
    ],
)
def test_figures_are_late_where_no_decision_waits_for_them(
    device: str, sections: dict[str, Any], expected: bool
) -> None:
    run = SimpleNamespace(
        setup=SimpleNamespace(settings=settings_of(**sections)),
        _ranks=SimpleNamespace(device=torch.device(device)),
    )
    assert TrainingRun.defers.fget(run) is expected  # type: ignore[attr-defined]


RUNS: dict[str, tuple[int, dict[str, dict[str, Any]], tuple[str, ...]]] = {
    "one rank": (1, {}, ()),
    "two ranks, each step saved": (2, {"checkpoint": {"every": 1, "keep": 30}}, ("layout.data=zero3",)),
    "nothing saved or evaluated": (
        2,
        {"checkpoint": {"every": 0}, "train": {"eval_every": 0, "eval_sequences": None}},
        (),
    ),
    "zero1, sync saves": (2, {"checkpoint": {"mode": "sync"}}, ("layout.data=zero1",)),
    "muon": (2, {"optim": {"optimizer": "muon"}}, ("layout.data=zero2",)),
}


OFTEN = ("one rank", "zero1, sync saves")
"""The runs of every test run; the others are long."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in RUNS])
def test_a_late_run_is_the_same_bit_for_bit(tmp_path: Path, name: str) -> None:
    """With four steps that are not finite, of which one is saved and one evaluated."""
    ranks, changes, overrides = RUNS[name]
    bad = (poisoned, ((4, 5, 7, 13), "loss"))
    prompt = trained(make_run(tmp_path / "prompt", changes), ranks, *overrides, during=[bad])
    late = trained(make_run(tmp_path / "late", changes), ranks, *overrides, during=[bad, LATE])
    assert_same_bits(late, prompt)
    assert [record.step for record in metrics(late) if record.skipped] == [4, 5, 7, 13]
    assert notes(late)[-1].progress.guard.skipped == 4
    assert [(item.step, item.progress) for item in notes(late)] == [
        (item.step, item.progress) for item in notes(prompt)
    ]
    for item in notes(late):
        state, other = tiny_runs.state_at(late, item.step), tiny_runs.state_at(prompt, item.step)
        assert [key for key in other if not torch.equal(state[key], other[key])] == []
    assert [item.step for item in events(late, "skipped")] == [4, 5, 7, 13]
    # A killed process loses the figures that it had not read; a resume computes those steps again.
    if notes(late)[0].step < 15 <= notes(late)[-1].step and len(notes(late)) > 1:
        at = notes(late)[-2].step
        again = cut_back(copied(late, tmp_path / "again"), at)
        trained(again, ranks, *overrides, during=[bad, LATE])
        assert_same_bits(again, prompt)


@contextlib.contextmanager
def order_of_reading(folder: str) -> Iterator[None]:
    """Record when the work of a step is launched and when its figures are read."""
    order: list[str] = []
    compute, update, read = Learner.compute, Learner.update, StepResult._figures.func

    def computing(self: Learner, step: int, *arguments: Any) -> StepResult:
        measured = compute(self, step, *arguments)
        measured.step = step
        return measured

    def updating(self: Learner, rate: float, measured: Any) -> None:
        update(self, rate, measured)
        order.append(f"launched {measured.step}")

    def reading(self: Any) -> list[float]:
        order.append(f"read {self.step}")
        return read(self)

    with (
        mock.patch.object(Learner, "compute", computing),
        mock.patch.object(Learner, "update", updating),
        mock.patch.object(StepResult, "_figures", property(reading)),
    ):
        yield
    Path(folder, "order.txt").write_text("\n".join(dict.fromkeys(order)))


def test_the_next_step_is_launched_before_figures_are_read(tmp_path: Path) -> None:
    """But before an evaluation (3), a checkpoint (4) and the end (6) they are read at once."""
    changes = {"train": {"steps": 6, "eval_every": 3}, "checkpoint": {"every": 4}}
    steps = {"late": "L1 L2 R1 L3 R2 R3 L4 R4 L5 L6 R5 R6", "prompt": "R1 L1 R2 L2 R3 L3 R4 L4 R5 L5 R6 L6"}
    for name, expected in steps.items():
        during = [LATE] if name == "late" else []
        trained(make_run(tmp_path / name, changes), 1, during=[*during, (order_of_reading, (str(tmp_path),))])
        words = (tmp_path / "order.txt").read_text().splitlines()
        actual = " ".join(f"{'L' if word.startswith('launched') else 'R'}{word.rpartition(' ')[2]}" for word in words)
        assert actual == expected


def test_a_late_run_stops_with_the_same_files(tmp_path: Path) -> None:
    """One step late: the error names the step, and lines and checkpoints of the two runs are equal."""
    actual = {}
    for name, during in (("prompt", []), ("late", [LATE])):
        run = make_run(tmp_path / name, {"guard": {"max_non_finite": 2}})
        answers = tiny_runs.train(run, 2, during=[*during, (poisoned, ((2, 3, 7, 8, 9), "loss"))])
        actual[name] = [item.error for item in answers], tiny_runs.computed(run), [item.step for item in notes(run)]
        assert [event.step for event in events(run, "stopped")] == [9]
    assert actual["late"] == actual["prompt"]
    assert actual["late"][2] == [5]
    trained(tmp_path / "late", 2, during=[LATE])
    trained(tmp_path / "prompt", 2)
    assert_same_bits(tmp_path / "late", tmp_path / "prompt")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_stops_a_late_run_with_all_its_lines(tmp_path: Path, number: signal.Signals) -> None:
    run = make_run(tmp_path / "run")
    answers = tiny_runs.train(run, 2, during=[LATE, (signalled, (11, int(number), 1))])
    assert [item.code for item in answers] == [0 if number == signal.SIGTERM else 130] * 2
    assert [record.step for record in metrics(run)] == list(range(1, 12))
    assert [item.step for item in notes(run)] == [10, 11]
    trained(run, 2, during=[LATE])
    assert_same_bits(run, trained(make_run(tmp_path / "whole"), 2))


EARLY = {
    "train": {"eval_every": 2},
    "guard": {"patience": 2, "min_improvement": 5.0},
    "optim": {"schedule": "plateau", "plateau_patience": 1},
}


def test_held_out_losses_are_measured_and_followed_at_the_same_steps(tmp_path: Path) -> None:
    """A plateau lowers the rate and patience ends the run; the request for the step after its end is dropped."""
    prompt, late = make_run(tmp_path / "prompt", EARLY), make_run(tmp_path / "late", EARLY)
    trained(prompt, 2)
    trained(late, 2, during=[LATE])
    assert_same_bits(late, prompt)
    assert [record.step for record in metrics(late)] == list(range(1, 7))
    assert len(events(late, "early_stop")) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_step_on_a_gpu_never_waits_for_it() -> None:
    """Torch raises where the host would wait, once kernels are loaded."""
    from tests.support.layout_cases import CASES
    from tests.train.parallel.test_layouts import BATCH, RATES, SOURCES, batch_of, plan_of
    from train.parallel.ranks import open_ranks

    case = CASES["one rank"]
    with open_ranks() as ranks:
        learner = Learner(plan_of(case), ranks, SOURCES)
        learner.init_state()
        waiting = []
        for step in range(1, 4):
            rows = batch_of(step, case).pinned()
            torch.cuda.set_sync_debug_mode("default" if step == 1 else "error")
            try:
                measured = learner.compute(step, rows, BATCH, float(rows.num_targets))
                learner.update(RATES[0], measured)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            waiting.append(measured)
        assert all(measured.finite for measured in waiting)
