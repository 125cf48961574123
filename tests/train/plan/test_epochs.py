"""Tests of `train.epochs`: every source is read as often as asked, and the number of training tokens follows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import ConfigError
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from train.config.settings import load_settings
from train.data.order import (
    Mixture,
    nearest_counts,
    open_streams,
    samples_of_epochs,
    tokens_by_source,
)
from train.data.permutation import RowOrder
from train.data.shares import weights_of_epochs
from train.plan.make_plan import make_plan
from train.plan.plan import Plan, open_order
from train.plan.target import choose_target
from train.plan.text import print_plan

WEB, BOOKS = 128, 40
"""Samples of 64 tokens in the training streams of the tiny dataset."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_tiny_dataset(tmp_path_factory.mktemp("run"))


def planned(run: Store, epochs: dict[str, float], plan: dict[str, Any] | None = None, **train: Any) -> Plan:
    """Return the plan for the tiny dataset with these epochs, over sequences of 64 tokens."""
    raw = {"plan": plan or {}, "train": {"seq_len": 64, "epochs": epochs} | train}
    return make_plan(run, open_dataset(run), load_settings(raw, [], "test"))


def values(plan: Plan) -> dict[str, float]:
    return {figure.name: figure.value for figure in plan.figures}


@pytest.mark.parametrize(
    ("epochs", "samples"),
    [
        ({"web": 1, "books": 3}, {"books": 120, "web": 128}),
        ({"web": 0.5, "books": 4}, {"books": 160, "web": 64}),
        ({"web": 0, "books": 2.2}, {"books": 88}),
    ],
)
def test_every_source_is_read_as_often_as_asked(run: Store, epochs: dict[str, float], samples: dict[str, int]) -> None:
    plan = planned(run, epochs, global_batch=8)
    assert tokens_by_source(plan.stages) == {source: 64 * number for source, number in samples.items()}
    assert plan.num_tokens == 64 * sum(samples.values())
    order = open_order(run, open_dataset(run), plan)
    assert order.epochs() == {source: times for source, times in sorted(epochs.items()) if times}
    used = order.at(0, np.arange(plan.steps * 8)).source
    assert np.bincount(used).tolist() == list(samples.values())
    # At any prefix, the count of a source differs from its share by less than one sample.
    taken = np.cumsum(used[:, None] == np.arange(len(samples)), axis=0)
    target = np.arange(1, len(used) + 1)[:, None] * np.array(list(samples.values())) / sum(samples.values())
    assert np.abs(taken - target).max() < 1


def test_whole_passes_read_every_token_equally_often(run: Store) -> None:
    plan = planned(run, {"web": 1, "books": 3}, global_batch=8)
    order = open_order(run, open_dataset(run), plan)
    pieces = order.at(0, np.arange(plan.steps * 8)).pieces
    source = order.at(0, np.arange(plan.steps * 8)).source[pieces.row]
    for number, times in enumerate((3, 1)):
        stream = order.streams[number]
        reads = np.zeros(stream.num_units, np.int64)
        for begin, length in zip(pieces.start[source == number], pieces.length[source == number], strict=True):
            reads[begin : begin + length] += 1
        assert set(reads.tolist()) == {times}


def test_the_run_has_whole_steps_and_reads_nothing_oftener(run: Store) -> None:
    plan = planned(run, {"web": 1, "books": 4}, global_batch=7)
    assert plan.steps == (WEB + 4 * BOOKS) // 7 == 41
    found = values(plan)
    assert 3.95 < found["epochs.books"] <= 4
    assert 0.99 < found["epochs.web"] <= 1


def test_the_epochs_hold_over_all_training_stages(run: Store) -> None:
    stages = [{"tokens": 64 * 64}, {"seq_len": 32, "global_batch": 16}]
    plan = planned(run, {"web": 1, "books": 3}, global_batch=8, stages=stages)
    assert [stage.num_steps for stage in plan.stages] == [8, (248 - 64) * 64 // (16 * 32)]
    drawn = tokens_by_source(plan.stages)
    # Each of the two stages is less than one sample off.
    assert abs(drawn["books"] - 120 * 64) < 64 + 32
    assert abs(drawn["web"] - 128 * 64) < 64 + 32


def test_the_model_follows_from_the_tokens_of_the_epochs(run: Store) -> None:
    tokens = 64 * (WEB + 3 * BOOKS)
    free = planned(run, {"web": 1, "books": 3}, plan={"min_params": 500}, global_batch=8)
    assert values(free)["wanted_params"] == round(tokens / 20)
    assert planned(run, {"web": 1, "books": 3}, plan={"params": 300_000}, global_batch=8).num_tokens == tokens
    # A budget sizes the model for these tokens, whether the law would ask for fewer of them or for more.
    sizing = load_settings({"plan": {"min_params": 500}}, [], "test").plan
    for params in (tokens / 25, tokens / 10):
        bought = choose_target(sizing, 512, 64 * (WEB + BOOKS), tokens, 6 * params * tokens, fixed=True)
        assert (bought.tokens, bought.params) == (tokens, pytest.approx(params))


def test_the_plan_prints_the_epochs(run: Store) -> None:
    plan = planned(run, {"web": 1, "books": 3}, global_batch=8)
    text = print_plan(plan)
    assert "D of the source / U, train.epochs = 3" in text
    assert "D / (B · L), D = Σ train.epochs · U, rounded down" in text
    assert values(plan)["epochs.books"] == 3
    assert any("draws 15,872 tokens from 10,752 unique ones (books 3 times, web 1 times)" in s for s in plan.advice)
    assert not any("max_epochs" in sentence for sentence in plan.advice)


def test_small_epochs_of_a_long_run_are_near(run: Store) -> None:
    class Long:
        def __init__(self, samples: int):
            self.num_units = 64 * samples

        def width(self, seq_len: int) -> int:
            return seq_len

    streams: dict[str, RowOrder] = {"web": Long(10**8 + 7), "wiki": Long(10**5 + 3)}  # type: ignore[dict-item]
    config = load_settings({"train": {"epochs": {"web": 1, "wiki": 3}}}, [], "test").train
    samples = samples_of_epochs(streams, config, 64, {})
    assert samples == {"web": 10**8 + 7, "wiki": 3 * (10**5 + 3)}
    counts = nearest_counts(samples, "train.epochs")
    taken = dict(zip(counts, Mixture(counts).taken(sum(samples.values())), strict=True))
    assert taken["wiki"] / samples["wiki"] == pytest.approx(1, rel=1e-5)
    with pytest.raises(ConfigError, match=r"train\.epochs: .* got wiki \(1e-06\)\. Set each of these sources to 0"):
        nearest_counts({"web": 10**6, "wiki": 1}, "train.epochs")


def test_shares_of_epochs(run: Store) -> None:
    dataset = open_dataset(run)
    tokens = dataset.num_tokens()
    assert weights_of_epochs({"web": 0.5, "books": 3}, dataset) == {
        "web": tokens["web"] / 2,
        "books": 3 * tokens["books"],
    }
    assert open_streams(dataset, load_settings({"train": {"seq_len": 64}}, [], "").train).keys() == tokens.keys()


@pytest.mark.parametrize(
    ("train", "plan", "message"),
    [
        ({"epochs": {"wbe": 1, "web": 1}}, {}, r"train\.epochs: .* 'wbe' is no source \(did you mean 'web'\?\)"),
        ({"epochs": {"web": 1}}, {}, r"train\.epochs: .* 'books' is not named \(0 excludes it\)"),
        ({"epochs": {"web": -1, "books": 1}}, {}, "expected epochs of 0 or more"),
        ({"epochs": {"web": 0, "books": 0}}, {}, "expected epochs of 0 or more, with at least one above 0"),
        ({"epochs": {"web": 1, "books": 5}}, {}, r"plan\.max_epochs = 4 passes over a source, got books 5 times"),
        ({"epochs": {"web": 1, "books": 1}, "weights": {"web": 1, "books": 1}}, {}, "epochs and weights exclude"),
        ({"epochs": {"web": 1, "books": 1}, "steps": 9}, {}, "epochs decide .*, and steps = 9 too"),
        ({"stages": [{"tokens": 640}]}, {}, "and stages with tokens in the last one too"),
        ({"stages": [{"weights": {"web": 1, "books": 1}}]}, {}, "stages without their own weights"),
        ({"global_batch": 999}, {}, r"got 10752 tokens left of train\.epochs\. Lower train\.global_batch"),
        ({}, {"compute": 1e12, "inference_tokens": 1e9}, r"train\.epochs: .* got plan\.inference_tokens = 1e\+09 too"),
        (
            {},
            {"compute": 1e12, "num_layers": 2, "d_model": 32},
            r"plan\.compute, train\.epochs: expected one number of training tokens, got .* and 10,752 of train\.epochs",
        ),
        ({}, {"compute": 1e13, "min_params": 500}, r"2 times the 10,752 tokens of train\.epochs, got one for"),
    ],
)
def test_contradictions_are_refused(run: Store, train: dict[str, Any], plan: dict[str, Any], message: str) -> None:
    both = {"epochs": {"web": 1, "books": 1}} | train
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        planned(run, both.pop("epochs"), plan, **both)


def test_weights_on_the_command_line_replace_epochs(run: Store, tmp_path: Path) -> None:
    raw = {"train": {"epochs": {"web": 1, "books": 3}}}
    settings = load_settings(raw, ["train.weights={web=1, books=1}"], "test")
    assert (settings.train.epochs, settings.train.weights) == ({}, {"web": 1, "books": 1})
    assert "train.epochs" not in settings.content()
