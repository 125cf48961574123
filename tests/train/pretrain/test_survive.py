"""Failures of clusters and data that a run survives: killed ranks, signals, non-finite numbers, spikes, a full disk.

Tests of the command itself start it as a cluster does; everything else runs on the ranks of the shared pool.
"""

import contextlib
import errno
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from schemas.checkpoints import METADATA_NAME
from schemas.paths import PLAN_NAME
from schemas.storage import Store
from tests.support import tiny_runs
from tests.support.tiny_runs import (
    assert_same_bits,
    computed,
    copied,
    events,
    metrics,
    notes,
    opened,
    signalled,
    state_at,
    trained,
)
from train.data.rows import Rows
from train.data.stages import append_to_skip_list
from train.model.loss import LossTally
from train.parallel.parallelize import SplitModel
from train.plan.plan import read_plan
from train.pretrain.__main__ import main
from train.pretrain.step import Learner, StepResult
from train.trace import documents_of_step

pytestmark = pytest.mark.dist

STEPS = 20
DDP = {"layout": {"data": "ddp"}}
"""The layout of a run here unless its test names another: its steps take two thirds of the time of sharded ones."""


def make_run(folder: Path, changes: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
    """Return an untrained run folder with these changes by section."""
    return tiny_runs.make_run(folder, DDP | dict(changes or {}))


# ---------------------------------------------------------------------------------------------------- the real command


def torchrun(run: Path, *options: str, program: str = "torch.distributed.run") -> subprocess.Popen[str]:
    """Start the command on two ranks with one thread each, like the pool: the number changes the last bits."""
    cores = set(sorted(os.sched_getaffinity(0))[:2])
    command = [sys.executable, "-m", program, "--standalone", "--nproc-per-node", "2", *options]
    return subprocess.Popen(
        [*command, "-m", "train.pretrain", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of the ranks, in the order of their start."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    actual = [int(child) for child in children]
    return [pid for pid in actual if b"train.pretrain" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for(run: Path, steps: int, process: subprocess.Popen[str], checkpoint: int | None = None) -> None:
    """Return once a run has logged that many steps, and has a checkpoint; fail if the process ends earlier."""
    path = run / "train/metrics.jsonl"
    saved = run / f"train/checkpoints/step-{checkpoint:06d}" / METADATA_NAME if checkpoint else run
    limit = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < limit:
        with contextlib.suppress(FileNotFoundError):
            if path.read_bytes().count(b"\n") >= steps and saved.exists():
                return
        time.sleep(0.005)
    pytest.fail(f"{steps} steps in {path} were not seen: {process.communicate()[0]}")


# So slow that a signal finds it: a step of five rows takes 10 ms, one of these five times as long.
SLOW = {
    "train": {"steps": 24, "global_batch": 12, "eval_every": 12},
    "layout": {"data": "ddp", "micro_batch": 1, "activation_checkpointing": "full"},
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on two ranks of the pool; nothing may change it."""
    return trained(make_run(tmp_path_factory.mktemp("whole") / "run", SLOW), 2)


def test_torchrun_restarts_a_run_that_lost_a_rank_and_it_ends_with_the_same_curve(
    uninterrupted: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", SLOW)
    (run / "train").mkdir()
    shutil.copy(uninterrupted / PLAN_NAME, run / PLAN_NAME)  # the next test has a plan made by a process of its own
    process = torchrun(run, "--max-restarts", "2")
    try:
        wait_for(run, 7, process, checkpoint=5)
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        out, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, out
    results = events(run, "resumed")
    assert len(results) == 1
    assert results[0].step >= 5
    assert results[0].step % 5 == 0
    assert f"resuming from step {results[0].step}, exactly" in out
    assert [record.step for record in metrics(run)] == list(range(1, 25))
    assert_same_bits(run, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["rank", "torchrun"])
def test_sigterm_makes_a_checkpoint_and_the_run_resumes_exactly(
    uninterrupted: Path, tmp_path: Path, target: str
) -> None:
    run = make_run(tmp_path / "run", SLOW)
    process = torchrun(run)
    try:
        wait_for(run, 8, process)
        pids = ranks_of(process)
        os.kill(pids[1] if target == "rank" else process.pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    results = events(run, "interrupted")
    step = notes(run)[-1].step
    assert [(event.signal, event.step, event.checkpoint) for event in results] == [
        ("SIGTERM", step, notes(run)[-1].name)
    ]
    assert 8 <= step < 24
    assert [record.step for record in metrics(run)] == list(range(1, step + 1))
    assert f"stopped after step {step} of 24; {notes(run)[-1].name} is kept" in out
    # torchrun itself ends with an error when it is the one that is asked to stop; its ranks do not.
    assert (process.returncode == 0) == (target == "rank")
    assert not (run / "train/manifest.json").exists()
    assert_same_bits(trained(run, 2), uninterrupted)


def test_ranks_stop_when_torchrun_was_killed(tmp_path: Path) -> None:
    """Nothing would restart or stop them; they write a checkpoint, as after SIGTERM."""
    run = make_run(tmp_path / "run", SLOW | {"train": SLOW["train"] | {"steps": 200}, "plan": {"max_epochs": 1000}})
    process = torchrun(run)
    try:
        wait_for(run, 3, process)
        ranks = ranks_of(process)
        process.kill()
        out, _ = process.communicate(timeout=120)  # the ranks have the same output, so it ends when they do
    finally:
        process.kill()
    step = notes(run)[-1].step
    assert 3 <= step < 200
    assert "the process that started this rank has ended\n" in out
    assert f"stopped after step {step} of 200; {notes(run)[-1].name} is kept; the same command resumes from it" in out
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists() and b"train" in cmdline(pid)]


@pytest.mark.parametrize("moment", ["the ranks start", "the ranks look for each other"])
def test_ranks_end_if_torchrun_is_killed_while_they_start(tmp_path: Path, moment: str) -> None:
    """They would wait for its store for half an hour."""
    process = torchrun(make_run(tmp_path / "run"), program="train.launch")
    try:
        while len(ranks := ranks_of(process)) < 2:
            time.sleep(0.01)
        while moment != "the ranks start" and not any("/torch/" in maps(pid) for pid in ranks):
            time.sleep(0.01)
        process.kill()
        out, _ = process.communicate(timeout=60)  # the ranks have the same output, so it ends when they do
    finally:
        process.kill()
    assert out.count("the process that started this rank has ended\n") == 2


def maps(pid: int) -> str:
    """Return the mapped files of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text()
    return ""


def cmdline(pid: int) -> bytes:
    """Return the command line of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


# ------------------------------------------------------------------------------------------------------------- signals


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks to its end; nothing may change it."""
    return trained(make_run(tmp_path_factory.mktemp("whole") / "run"), 2)


@pytest.mark.parametrize(
    ("number", "code", "rank"),
    [
        (signal.SIGTERM, 0, 1),
        (signal.SIGINT, 130, 0),
        pytest.param(signal.SIGTERM, 0, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, 1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_one_rank_stops_all_after_the_step(
    whole: Path, tmp_path: Path, number: signal.Signals, code: int, rank: int
) -> None:
    run = make_run(tmp_path / "run")
    results = tiny_runs.train(run, 2, during=[(signalled, (11, int(number), rank))])
    assert [item.code for item in results] == [code, code]
    assert "stopped after step 11 of 20; train/checkpoints/step-000011 is kept" in results[0].out
    assert [note.step for note in notes(run)] == [10, 11]
    assert [(event.step, event.signal) for event in events(run, "interrupted")] == [(11, number.name)]
    assert [record.step for record in metrics(run)] == list(range(1, 12))
    again = tiny_runs.train(run, 2)
    assert "resuming from step 11, exactly" in again[0].out
    assert_same_bits(run, whole)


def test_a_signal_in_the_last_step_comes_too_late(whole: Path, tmp_path: Path) -> None:
    run = trained(make_run(tmp_path / "run"), 2, during=[(signalled, (STEPS, int(signal.SIGTERM), 0))])
    assert events(run, "interrupted") == []
    assert_same_bits(run, whole)


# -------------------------------------------------------------------------------------------------- not finite, spikes


@contextlib.contextmanager
def poisoned(steps: Sequence[int], kind: str) -> Iterator[None]:
    """Make loss or gradient of some steps non-finite on one rank's rows, as from a broken product."""
    compute, backward, here = Learner.compute, SplitModel.backward, [0]

    def computing(self: Learner, step: int, *arguments: Any) -> StepResult:
        here[0] = step
        return compute(self, step, *arguments)

    def backwards(self: SplitModel, *arguments: Any) -> LossTally:
        tally = backward(self, *arguments)
        if here[0] in steps:
            for parameter in self.parameters.values():
                parameter.grad.mul_(math.nan)
            tally.losses_S.mul_(math.nan if kind == "loss" else 1.0)
        return tally

    with mock.patch.object(Learner, "compute", computing), mock.patch.object(SplitModel, "backward", backwards):
        yield


@contextlib.contextmanager
def bad_samples(rows: Any, factor: float) -> Iterator[None]:
    """Multiply the loss of batches with one of these rows by a factor, and with it the gradient."""
    compute, backward, here = Learner.compute, SplitModel.backward, [torch.zeros(())]

    def computing(self: Learner, step: int, part: Rows, *arguments: Any) -> StepResult:
        here[0] = (part.inputs_BT[:, None] == rows[None]).all(-1).any().float()
        torch.distributed.all_reduce(here[0])
        return compute(self, step, part, *arguments)

    def backwards(self: SplitModel, *arguments: Any) -> LossTally:
        tally = backward(self, *arguments)
        tally.losses_S.mul_(factor if here[0] else 1.0)
        return tally

    with mock.patch.object(Learner, "compute", computing), mock.patch.object(SplitModel, "backward", backwards):
        yield


@pytest.mark.parametrize(("kind", "layout"), [("loss", "layout.data=zero3"), ("gradient", "layout.data=zero1")])
def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path: Path, kind: str, layout: str) -> None:
    changes = {"checkpoint": {"every": 1, "keep": 30}, "train": {"steps": 9, "eval_every": 0, "eval_sequences": None}}
    changes["optim"] = {"learning_rate": 0.01}
    run = trained(make_run(tmp_path / "run", changes), 2, layout, during=[(poisoned, ((4, 5, 8), kind))])
    actual = metrics(run)
    assert [record.step for record in actual if record.skipped] == [4, 5, 8]
    assert [record.loss is None for record in actual] == [step in (4, 5, 8) and kind == "loss" for step in range(1, 10)]
    assert [record.grad_norm is None for record in actual] == [step in (4, 5, 8) for step in range(1, 10)]
    results = events(run, "skipped")
    assert [(event.step, event.loss is None, event.grad_norm) for event in results] == [
        (step, kind == "loss", None) for step in (4, 5, 8)
    ]
    before = state_at(run, 2)
    for step in range(3, 10):
        after = state_at(run, step)
        same = sum(torch.equal(before[name], after[name]) for name in after)
        assert same == (len(after) if step in (4, 5, 8) else 0)
        before = after
    guard = notes(run)[-1].progress.guard
    assert (guard.skipped, guard.non_finite) == (3, 0)
    assert actual[8].loss < actual[0].loss


def test_too_many_steps_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"guard": {"max_non_finite": 2}})
    results = tiny_runs.train(run, 2, during=[(poisoned, ((2, 3, 7, 8, 9), "loss"))])
    text = (
        "step 9: expected at most guard.max_non_finite = 2 steps in a row whose loss or gradient is not finite, got 3"
    )
    assert [item.error.partition(": ")[0] for item in results] == ["ContractError", "FirstRankFailed"]
    assert text in results[0].error
    assert [text in event.reason for event in events(run, "stopped")] == [True]
    assert notes(run)[-1].step == 5
    assert [record.step for record in metrics(run)] == list(range(1, 9))
    # Without the poison the same command resumes.
    trained(run, 2)
    assert [record.skipped for record in metrics(run)] == [step in (2, 3) for step in range(1, STEPS + 1)]


def test_a_learning_rate_that_is_too_high_ends_the_run(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", {"optim": {"learning_rate": 1e30, "warmup_steps": 0, "clip_norm": None}})
    assert main(["--run", str(run)]) == 2
    captured = capsys.readouterr()
    steps = [record.step for record in metrics(run)]
    assert f"penstock: step {len(steps) + 1}: expected at most guard.max_non_finite = 3 steps in a row" in captured.err
    assert f"step {len(steps)}/20  loss not finite" in captured.out


WATCHED = {"guard": {"spike_sigmas": 6.0, "spike_window": 8}}
REWINDING = {"guard": WATCHED["guard"] | {"on_spike": "rewind"}}


def rows_of_step(run: Path, step: int) -> torch.Tensor:
    """Return the rows of a step of a run that has a plan."""
    return opened(run).batch(step - 1).inputs_BT


def test_a_spike_is_reported_with_the_documents_of_its_batch(whole: Path, tmp_path: Path) -> None:
    bad = rows_of_step(whole, 13)
    run = make_run(tmp_path / "run", WATCHED)
    results = tiny_runs.train(run, 2, during=[(bad_samples, (bad[3:4], 3.0))])
    assert [item.code for item in results] == [0, 0]
    (event,) = events(run, "spike")
    losses = [record.loss for record in metrics(run)][4:12]
    mean = math.fsum(losses) / 8
    deviation = math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses) / 7)
    assert (event.step, event.loss) == (13, metrics(run)[12].loss)
    assert (event.mean, event.deviation, event.limit) == pytest.approx((mean, deviation, mean + 6 * deviation))
    expected = [asdict(part) for part in documents_of_step(Store(str(run)), 13)]
    actual = [document.model_dump(exclude={"loss", "targets", "level", "excess"}) for document in event.documents]
    place = lambda part: (part["row"], part["doc_start"], part["doc_id"])  # noqa: E731
    expected_value = [{name: part[name] for name in actual[0]} for part in expected]
    assert sorted(actual, key=place) == sorted(expected_value, key=place)
    assert {document["row"] for document in actual} == set(range(5))
    assert (
        f"step 13: loss {event.loss:.4f} is above {event.limit:.4f}; its batch holds {len(actual)} parts"
        in results[0].out
    )
    assert "<- spike" in results[0].out
    # It was reported and learned from: the weights are those of a run that was not watched.
    state, other = state_at(run, STEPS), state_at(whole, STEPS)
    assert all(torch.equal(state[name], other[name]) for name in other)


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_a_spike_is_rewound_and_its_samples_are_skipped(whole: Path, tmp_path: Path, mode: str) -> None:
    changes = REWINDING | {"checkpoint": {"mode": mode, "keep": 9}}
    bad = rows_of_step(whole, 13)
    run = make_run(tmp_path / "run", changes)
    results = tiny_runs.train(run, 2, during=[(bad_samples, (bad[3:4], 3.0))])
    assert [item.code for item in results] == [0, 0]
    samples = list(range(60, 65))
    (event,) = events(run, "rewound")
    assert (event.step, event.to_step, event.checkpoint) == (13, 10, "train/checkpoints/step-000010")
    assert list(event.samples) == samples
    undone = events(run, "undone")
    assert [(event.step, event.metrics.step) for event in undone] == [(11, 11), (12, 12)]
    assert [event.step for event in events(run, "spike")] == [13]
    lines = (run / "train/skips.txt").read_text().splitlines()
    assert lines == [f"{sample}  # spike in step 13" for sample in samples]
    assert "step 13: back to step 10, 5 samples are skipped from now on" in results[0].out
    # From the checkpoint on, and in all, it is the run that skipped these samples from its beginning.
    knowing = make_run(tmp_path / "knowing", changes)
    append_to_skip_list(Store(str(knowing)), "skips.txt", samples, "known to be bad")
    trained(knowing, 2)
    assert computed(run) == computed(knowing)
    state, other = state_at(run, STEPS), state_at(knowing, STEPS)
    assert [name for name in other if not torch.equal(state[name], other[name])] == []
    guard, known = notes(run)[-1].progress.guard, notes(knowing)[-1].progress.guard
    assert guard == known.model_copy(update={"rewinds": 1, "rewound": guard.rewound})
    assert len(guard.rewound) == 1
    assert computed(run)[:12] == computed(whole)[:12]
    assert computed(run)[12:] != computed(whole)[12:]
    assert notes(run)[-1].identity.skip_length == 5


def test_a_rewind_without_a_checkpoint_begins_again(whole: Path, tmp_path: Path) -> None:
    changes = REWINDING | {"checkpoint": {"every": 0}}
    run = make_run(tmp_path / "run", changes)
    overrides = ("layout.data=ddp", "layout.compress=powersgd")
    results = tiny_runs.train(run, 2, *overrides, during=[(bad_samples, (rows_of_step(whole, 9)[:1], 3.0))])
    assert [item.code for item in results] == [0, 0]
    assert [(event.step, event.to_step, event.checkpoint) for event in events(run, "rewound")] == [
        (9, 0, "the beginning")
    ]
    knowing = make_run(tmp_path / "knowing", changes)
    append_to_skip_list(Store(str(knowing)), "skips.txt", list(range(40, 45)), "known to be bad")
    trained(knowing, 2, *overrides)
    assert computed(run) == computed(knowing)
    state, other = state_at(run, STEPS), state_at(knowing, STEPS)
    assert [name for name in other if not torch.equal(state[name], other[name])] == []


def test_a_second_spike_is_traced_under_the_skip_list_that_grew(whole: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", REWINDING)
    # Step 17 of the first order: after a rewind its rows are in step 16.
    bad = torch.cat([rows_of_step(whole, 13)[:1], rows_of_step(whole, 17)[2:3]])
    results = tiny_runs.train(run, 2, during=[(bad_samples, (bad, 3.0))])
    assert [item.code for item in results] == [0, 0]
    first, second = events(run, "spike")
    assert (first.step, second.step) == (13, 16)
    assert {document.sample for document in second.documents} == set(range(80, 85))
    assert [list(event.samples) for event in events(run, "rewound")] == [list(range(60, 65)), list(range(80, 85))]
    assert notes(run)[-1].progress.guard.rewinds == 2


def test_rewinds_are_counted_over_restarts_and_end(whole: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"guard": REWINDING["guard"] | {"max_rewinds": 1}})
    bad = torch.cat([rows_of_step(whole, step)[:1] for step in (13, 17)])
    results = tiny_runs.train(run, 2, during=[(bad_samples, (bad, 3.0)), (signalled, (14, int(signal.SIGTERM), 0))])
    assert [item.code for item in results] == [0, 0]
    results = tiny_runs.train(run, 2, during=[(bad_samples, (bad, 3.0))])
    text = (
        "step 16: expected at most guard.max_rewinds = 1 rewinds in guard.rewind_window = 1000 steps, got another spike"
    )
    assert [text in item.error for item in results] == [True, True]
    assert len(events(run, "rewound")) == 1
    assert text in events(run, "stopped")[0].reason
    assert (run / "train/skips.txt").read_text().count("\n") == 5
    # The spike after the last rewind is logged with its documents, and the fix in the error message works.
    assert [bool(event.documents) for event in events(run, "spike")] == [True, True]
    results = tiny_runs.train(run, 2, "guard.max_rewinds=2", during=[(bad_samples, (bad, 3.0))])
    assert [item.error for item in results] == ["", ""]
    assert len(events(run, "rewound")) == 2


# ------------------------------------------------------------------------------------------------------ early stopping

EARLY = {
    "train": {"eval_every": 2},
    "optim": {"learning_rate": 1e-3},
    "guard": {"patience": 2, "min_improvement": 5.0},
}


def test_a_run_ends_where_its_held_out_loss_no_longer_falls(whole: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", EARLY)
    results = tiny_runs.train(run, 2)
    assert [item.code for item in results] == [0, 0]
    # The first measurement is the best, and no other one is lower by 5 nats.
    (event,) = events(run, "early_stop")
    assert (event.step, event.since_best) == (6, 2)
    assert event.best == metrics(run)[1].heldout_loss
    assert event.heldout_loss == metrics(run)[5].heldout_loss
    assert "step 6: the held-out loss has not fallen for 2 measurements; the run ends" in results[0].out
    manifest = json.loads((run / "train/manifest.json").read_text())
    assert (manifest["steps"], manifest["checkpoint"]) == (6, "train/checkpoints/step-000006")
    assert [record.step for record in metrics(run)] == list(range(1, 7))
    assert tiny_runs.train(run, 2)[0].out == "already trained to the end\n"
    # Killed between its last checkpoint and its manifest, it ends there all the same.
    killed = copied(run, tmp_path / "killed")
    (killed / "train/manifest.json").unlink()
    trained(killed, 2)
    assert json.loads((killed / "train/manifest.json").read_text()) == manifest
    assert computed(killed) == computed(run)


# ----------------------------------------------------------------------------------------------------------- full disk


@contextlib.contextmanager
def files_at_most(size: int, first: int, last: int, awaited: str = "") -> Iterator[None]:
    """Limit the size of files from step `first` to step `last`, as on a full disk.

    Before that, wait for the file `awaited`, which a thread writes beside the steps. Afterwards, wait until the thread
    has removed what it wrote of the next checkpoint.
    """
    compute = Learner.compute
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def computing(self: Learner, step: int, *arguments: Any) -> StepResult:
        limit = time.monotonic() + 60
        while step == first and awaited and not Path(awaited).exists() and time.monotonic() < limit:
            time.sleep(0.01)
        if awaited and first <= step <= last:
            time.sleep(0.1)
        while step == last + 1 and awaited and _next_to(awaited).exists() and time.monotonic() < limit:
            time.sleep(0.01)
        if step in (first, last + 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size if step == first else before[0], before[1]))
        return compute(self, step, *arguments)

    try:
        with mock.patch.object(Learner, "compute", computing):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _next_to(metadata: str) -> Path:
    """Return the folder of the checkpoint five steps after the one with this metadata file."""
    folder = Path(metadata).parent
    return folder.with_name(f"step-{int(folder.name.removeprefix('step-')) + 5:06d}")


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_training_continues_while_the_disk_is_full(whole: Path, tmp_path: Path, mode: str) -> None:
    run = make_run(tmp_path / "run", {"checkpoint": {"mode": mode, "keep": 9}})
    results = tiny_runs.train(
        run, 2, during=[(files_at_most, (100_000, 9, 14, f"{run}/train/checkpoints/step-000005/checkpoint.json"))]
    )
    assert [item.code for item in results] == [0, 0]
    assert [note.step for note in notes(run)] == [5, 15, 20]
    (event,) = events(run, "failed_save")
    assert event.step == 10
    assert "expected a checkpoint, got" in event.error
    assert "File too large" in event.error
    assert "penstock: training continues without a checkpoint of step 10, failure 1: " in results[0].err
    assert not (run / "train/checkpoints/step-000010").exists()
    assert_same_bits(run, whole)


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_a_last_save_that_fails_is_an_error(whole: Path, tmp_path: Path, mode: str) -> None:
    run = make_run(tmp_path / "run", {"checkpoint": {"mode": mode}})
    results = tiny_runs.train(run, 2, during=[(files_at_most, (100_000, 17, STEPS + 1))])
    assert [item.error.partition(": ")[0] for item in results] == ["ContractError", "FirstRankFailed"]
    assert "step-000020: expected a checkpoint, got" in results[0].error
    assert [event.step for event in events(run, "failed_save")][-1] == 20  # the save before may still be under way
    assert not (run / "train/manifest.json").exists()
    assert notes(run)[-1].step < STEPS
    # With room again, the same command ends the run.
    trained(run, 2)
    assert_same_bits(run, whole)


def test_the_command_ends_with_code_2_if_its_last_save_fails(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", {"train": {"steps": 3}})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        assert main(["--run", str(run)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    message = capsys.readouterr().err
    assert "penstock: training continues without a checkpoint of step 3, failure 1: " in message
    assert message.splitlines()[-1].startswith(f"penstock: {run}/train/checkpoints/step-000003: expected a checkpoint")
    assert len(metrics(run)) == 3
    assert read_plan(Store(str(run))).steps == 3


def test_a_rank_explains_an_error_of_the_storage(tmp_path: Path, capsys: Any) -> None:
    """A rank that torchrun starts has no other command around it."""
    run = make_run(tmp_path / "run")
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("train.pretrain.__main__.train", side_effect=full):
        assert main(["--run", str(run)]) == 2
    assert capsys.readouterr().err == (
        "penstock: the run folder: expected writable storage, got an error: the disk is full. Resolve it and run the "
        "same command again.\n"
    )
