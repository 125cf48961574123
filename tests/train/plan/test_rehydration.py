"""Tests of rehydration: an epoch reads a document of weight n exactly n times, in every way to mix the sources."""

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import ConfigError
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from train.config.settings import load_settings
from train.data.order import SampleOrder, tokens_by_source
from train.data.shares import reads_of_epochs, shares_of_weights, weights_of_epochs
from train.plan.make_plan import make_plan
from train.plan.plan import Plan, open_order

COPIES = {"web+x3": 3, "web+x8": 8}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_tiny_dataset(tmp_path_factory.mktemp("run"), {"web": 40, "web+x3": 24, "books": 20})


def planned(run: Store, plan: dict[str, Any] | None = None, **train: Any) -> Plan:
    raw = {"plan": plan or {}, "train": {"seq_len": 64, "global_batch": 4} | train}
    return make_plan(run, open_dataset(run), load_settings(raw, [], "test"))


def reads(run: Store, plan: Plan) -> tuple[SampleOrder, Mapping[str, set[int]]]:
    """Return the order of a plan, and how often it reads the tokens of each source: all numbers that occur."""
    order = open_order(run, open_dataset(run), plan)
    samples = order.at(0, np.arange(plan.steps * plan.global_batch))
    source = samples.source[samples.pieces.row]
    numbers = {}
    for index, name in enumerate(order.sources):
        counts = np.zeros(order.streams[index].num_units, np.int64)
        mine = source == index
        for start, length in zip(samples.pieces.start[mine], samples.pieces.length[mine], strict=True):
            counts[start : start + length] += 1
        numbers[name] = set(counts.tolist())
    return order, numbers


def samples_of(run: Store) -> dict[str, int]:
    """Return the number of samples of 64 tokens of each source."""
    return {source: (tokens - 1) // 256 * 4 for source, tokens in open_dataset(run).num_tokens().items()}


def test_the_dataset_names_its_copies(run: Store) -> None:
    assert open_dataset(run).copies == {"web+x3": 3}
    assert open_dataset(run).num_tokens().keys() == {"books", "web", "web+x3"}


def test_an_epoch_reads_every_document_by_its_weight(run: Store) -> None:
    plan = planned(run, epochs={"web": 1, "books": 2}, global_batch=1)
    order, numbers = reads(run, plan)
    assert numbers == {"books": {2}, "web": {1}, "web+x3": {3}}
    # The steps that read a token are found: three samples of the only epoch of `web`.
    ((_, found),) = order.find("web+x3", 70, 71)
    assert len(found) == 3
    ((_, once),) = order.find("web", 70, 71)
    assert len(once) == 1


def test_without_weights_a_pass_reads_every_document_by_its_weight(run: Store) -> None:
    samples = samples_of(run)
    steps = samples["books"] + samples["web"] + 3 * samples["web+x3"]
    plan = planned(run, plan={"max_epochs": 1}, steps=steps, global_batch=1)
    assert reads(run, plan)[1] == {"books": {1}, "web": {1}, "web+x3": {3}}
    with pytest.raises(ConfigError, match=r"1 passes over a source, got .*web\+x3 3"):
        planned(run, plan={"max_epochs": 1}, steps=steps + 4, global_batch=1)
    found = {figure.name: figure for figure in plan.figures}
    assert found["epochs.web+x3"].value == 3
    assert found["epochs.web+x3"].formula == "D of the source / U, 3 in an epoch (dedup.rehydration)"
    assert found["unique_tokens"].value == 64 * sum(samples.values())


def test_a_weight_covers_the_documents_of_any_weight(run: Store) -> None:
    samples, steps = samples_of(run), 60
    drawn = tokens_by_source(planned(run, weights={"web": 1, "books": 1}, steps=steps).stages)
    assert abs(drawn["books"] - 64 * 4 * steps / 2) <= 64
    part = Fraction(3 * samples["web+x3"], samples["web"] + 3 * samples["web+x3"])
    assert abs(drawn["web+x3"] - 64 * 4 * steps / 2 * part) <= 64
    own = tokens_by_source(planned(run, weights={"web": 1, "web+x3": 0, "books": 1}, steps=steps).stages)
    assert own == {"books": 64 * 2 * steps, "web": 64 * 2 * steps}


def test_only_epochs_of_the_source_count_for_the_limit(run: Store) -> None:
    plan = planned(run, epochs={"web": 4, "books": 1}, global_batch=1)
    assert {figure.name: figure.value for figure in plan.figures}["epochs.web+x3"] == 12
    with pytest.raises(ConfigError, match="got web 5 times"):
        planned(run, epochs={"web": 5, "books": 1})
    with pytest.raises(ConfigError, match=r"sources \['books', 'web'\], got \['books'\]: 'web' is not named"):
        planned(run, epochs={"books": 1})
    with pytest.raises(ConfigError, match=r"'web\+x4' is no source \(did you mean 'web\+x3'\?\)"):
        planned(run, weights={"books": 1, "web": 1, "web+x4": 1})


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_too_few_tokens_for_a_chunk_are_left_out_with_a_sentence(tmp_path: Path, packing: str) -> None:
    run = make_tiny_dataset(tmp_path, {"web": 40, "web+x8": 2})
    tokens = open_dataset(run).num_tokens()["web+x8"]
    assert tokens <= 256
    for shares in ({}, {"weights": {"web": 1}}, {"weights": {"web": 1, "web+x8": 1}}):
        plan = planned(run, packing=packing, **shares)
        assert tokens_by_source(plan.stages).keys() == {"web"}
        assert any(f"web+x8 is not read: its {tokens} tokens are no whole chunk of 256." in s for s in plan.advice)


def test_a_stage_needs_a_source_that_can_be_read(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path, {"web": 40, "web+x8": 2})
    stages = [{"tokens": 2560}, {"weights": {"web": 0, "web+x8": 1}}]
    with pytest.raises(ConfigError, match=r"train\.stages\[1\]\.weights: expected a weight above 0 for one of web, "):
        planned(run, stages=stages)


def test_shares_of_weights_by_hand() -> None:
    units = {"books": 10, "web": 40, "web+x3": 20, "web+x8": 5}
    # An epoch of web has 40 + 60 + 40.
    assert shares_of_weights({}, units, COPIES) == {"books": 10, "web": 40, "web+x3": 60, "web+x8": 40}
    assert shares_of_weights({"web": 0.7, "books": 0.3}, units, COPIES) == {
        "books": Fraction(3, 10),
        "web": Fraction(2, 10),
        "web+x3": Fraction(3, 10),
        "web+x8": Fraction(2, 10),
    }
    assert shares_of_weights({"web": 1, "books": 0, "web+x3": 2}, units, COPIES) == {
        "web": Fraction(1, 2),
        "web+x3": 2,
        "web+x8": Fraction(1, 2),
    }
    # No document of web is read only once.
    assert shares_of_weights({"web": 5}, {"web+x3": 20, "web+x8": 5}, COPIES) == {"web+x3": 3, "web+x8": 2}


def test_reads_of_epochs_by_hand(run: Store) -> None:
    sources = ["books", "web", "web+x3", "web+x8"]
    assert reads_of_epochs({"web": 0.5, "books": 0}, sources, COPIES) == {
        "web": Fraction(1, 2),
        "web+x3": Fraction(3, 2),
        "web+x8": 4,
    }
    assert reads_of_epochs({"web": 2, "books": 1, "web+x8": 1}, sources, COPIES) == {
        "books": 1,
        "web": 2,
        "web+x3": 6,
        "web+x8": 1,
    }
    tokens = open_dataset(run).num_tokens()
    assert weights_of_epochs({"web": 2, "books": 1}, open_dataset(run)) == {
        "web": 2 * tokens["web"] + 6 * tokens["web+x3"],
        "books": tokens["books"],
    }
