"""Pains of resumed training: other data, another loss, another number of ranks, and a silent start from nothing."""

import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support import tiny_runs
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_runs import (
    assert_equal_up_to_rounding,
    assert_same_bits,
    copied,
    cut_back,
    events,
    make_run,
    metrics,
    notes,
    signalled,
    state_at,
    trained,
)

pytestmark = pytest.mark.dist

VOCABULARY, KEPT, END = 509, 4, 8
RECIPE = {
    "train": {"steps": END, "eval_every": 0, "eval_sequences": 4},
    "optim": {"warmup_steps": 8},
    "checkpoint": {"every": KEPT, "keep": 9},
}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Return a function that makes an untrained run over a dataset of 509 tokens, which no number of ranks divides."""
    dataset = tmp_path_factory.mktemp("dataset") / "run"
    make_tiny_dataset(dataset, vocab_size=VOCABULARY)

    def make() -> Path:
        with mock.patch("tests.support.tiny_runs._dataset", return_value=dataset):
            return make_run(tmp_path_factory.mktemp("run") / "run", RECIPE)

    return make


@pytest.fixture(scope="module")
def whole(fresh: Callable[[], Path]) -> Callable[[int], Path]:
    """Return a function from a number of ranks to a run that was never interrupted; tests do not change it."""
    return cache(lambda ranks: trained(fresh(), ranks))


def test_a_resume_has_the_losses_of_an_undisturbed_run(whole: Callable[[int], Path], tmp_path: Path) -> None:
    """torchtitan: with a vocabulary that the number of ranks does not divide, the loss after a resume was worse than in
    an undisturbed run.

    https://github.com/pytorch/torchtitan/issues/1136

    Shards of 255 and 254 rows are stored and read back: losses, gradient norms, weights and optimizer state are equal
    in every bit.
    """
    assert state_at(whole(2), END)["model.embedding.weight"].shape[0] == VOCABULARY
    run = cut_back(copied(whole(2), tmp_path / "run"), KEPT)
    assert_same_bits(trained(run, 2), whole(2))


def test_a_third_resume_continues_where_the_second_stopped(
    fresh: Callable[[], Path], whole: Callable[[int], Path]
) -> None:
    """torchtitan: the first resume was right, but its checkpoints held a stale position of the loader. The second
    resume began the data again.

    https://github.com/pytorch/torchtitan/issues/3907

    A run that is stopped and resumed three times reads the data of an undisturbed run and ends with its bits.
    """
    run = fresh()
    for step in (2, 3, 6):
        results = tiny_runs.train(run, 2, during=[(signalled, (step, int(signal.SIGTERM), 1))])
        assert [item.code for item in results] == [0, 0]
        assert notes(run)[-1].step == step
    trained(run, 2)
    assert [event.step for event in events(run, "resumed")] == [2, 3, 6]
    assert_same_bits(run, whole(2))


@pytest.mark.parametrize(("before", "after"), [(1, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_a_checkpoint_is_resumed_on_more_ranks(
    whole: Callable[[int], Path], tmp_path: Path, before: int, after: int
) -> None:
    """torchtitan: a checkpoint of 8 GPUs could not be loaded on 16.

    https://github.com/pytorch/torchtitan/issues/811

    Twice as many ranks continue with the same batches: losses differ by rounding only.
    """
    run = cut_back(copied(whole(before), tmp_path / "run"), KEPT)
    (run / "train/plan.json").unlink()  # it holds the layout of the smaller world
    assert_equal_up_to_rounding(trained(run, after), whole(before))
    assert events(run, "resumed")[0].layout["ranks"] == after


def test_a_checkpoint_is_resumed_on_fewer_ranks_without_losing_their_data(
    whole: Callable[[int], Path], tmp_path: Path
) -> None:
    """torchtitan: on half as many ranks, a resume silently left out the data positions of the other half; it was
    changed to refuse.

    https://github.com/pytorch/torchtitan/pull/816

    A batch belongs to the step and not to a rank, so fewer ranks read all of it.
    """
    run = cut_back(copied(whole(2), tmp_path / "run"), KEPT)
    (run / "train/plan.json").unlink()
    assert_equal_up_to_rounding(trained(run, 1), whole(2))
    assert [line.tokens for line in metrics(run)] == [line.tokens for line in metrics(whole(2))]


def test_an_unfinished_checkpoint_is_passed_over(whole: Callable[[int], Path], tmp_path: Path) -> None:
    """prime-rl: one of two processes had made the folder of a step, and the other never saved. The next start chose
    this folder and failed.

    https://github.com/PrimeIntellect-ai/prime-rl/pull/1825

    A checkpoint exists with its metadata only, which is written last: the one before is resumed from.
    """
    run = cut_back(copied(whole(1), tmp_path / "run"), KEPT)
    half = run / "train/checkpoints/step-000006"
    shutil.copytree(run / notes(run)[-1].name, half)
    (half / "checkpoint.json").unlink()
    results = tiny_runs.train(run, 1)
    assert f"resuming from step {KEPT}, exactly" in results[0].out
    assert_same_bits(run, whole(1))


def test_no_setting_makes_a_resume_begin_again(whole: Callable[[int], Path], tmp_path: Path) -> None:
    """prime-rl: a review found that a start that was asked to resume, without settings for checkpoints, would silently
    train from step 0.

    https://github.com/PrimeIntellect-ai/prime-rl/pull/3268

    A run resumes from what is in its folder, even if it saves no more. What does not fit the checkpoint is refused.
    """
    run = cut_back(copied(whole(1), tmp_path / "run"), KEPT)
    before = (run / "train/metrics.jsonl").read_bytes()
    (refused,) = tiny_runs.train(run, 1, "train.seed=7")
    assert "train.seed: expected 0, got 7" in refused.error
    assert (run / "train/metrics.jsonl").read_bytes() == before
    (result,) = tiny_runs.train(run, 1, "checkpoint.every=0")
    assert f"resuming from step {KEPT}, exactly" in result.out
    assert_same_bits(run, whole(1))


def test_weights_after_a_resume_are_those_that_were_saved(whole: Callable[[int], Path], tmp_path: Path) -> None:
    """torchtitan: after each resume from a checkpoint, the losses were far from those of the run before.

    https://github.com/pytorch/torchtitan/issues/809

    The first step after a resume has the loss of the undisturbed run, so neither data nor state jumps.
    """
    run = trained(cut_back(copied(whole(1), tmp_path / "run"), KEPT), 1)
    first, expected = metrics(run)[KEPT], metrics(whole(1))[KEPT]
    assert (first.step, first.loss, first.grad_norm) == (KEPT + 1, expected.loss, expected.grad_norm)
    assert first.losses == expected.losses
    saved, original = state_at(run, KEPT), state_at(whole(1), KEPT)
    assert all(torch.equal(saved[name], original[name]) for name in original)
