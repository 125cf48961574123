"""Tests of train/plan/advice.py, on both sides of every limit."""

import math
from pathlib import Path

import pytest

from schemas.origin import CHECKPOINT, ModelOrigin
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import documents_of, take_down
from train.config.settings import load_settings
from train.model.shape import num_parameters
from train.plan.advice import heldout_read_before, tombstones, unusual_proportions
from train.plan.make_plan import make_plan
from train.plan.plan import Plan


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("proportions")
    make_tiny_dataset(folder)
    run = Store(str(folder))
    raw = {
        "plan": {"num_layers": 4, "d_model": 96, "num_heads": 4, "max_epochs": 100},
        "train": {"seq_len": 32, "global_batch": 4, "steps": 100},
    }
    return make_plan(run, open_dataset(run), load_settings(raw, [], "test"))


def reading(plan: Plan, ratio: float) -> Plan:
    """The plan with just enough sequences in a step to read at least `ratio` tokens for each parameter."""
    (stage,) = plan.stages
    one = stage.model_copy(update={"global_batch": 1}).num_tokens
    return plan.model_copy(
        update={"stages": (stage.model_copy(update={"global_batch": math.ceil(ratio * plan.active_params / one)}),)}
    )


def test_what_is_in_proportion_needs_no_word(plan: Plan) -> None:
    assert 1 - num_parameters(plan.shape, False) / plan.num_params < 0.5
    assert list(unusual_proportions(reading(plan, 20))) == []


@pytest.mark.parametrize(
    ("ratio", "found"),
    [(1.70, []), (1.69, ["fewer than in any"]), (59_990, []), (60_010, ["more than in any published run (60,000 in"])],
)
def test_tokens_for_a_parameter(plan: Plan, ratio: float, found: list[str]) -> None:
    sentences = list(unusual_proportions(reading(plan, ratio)))
    said = [line for line in sentences if "for each of" in line]
    assert len(said) == len(found)
    assert all(part in line for line, part in zip(said, found, strict=True))


def test_few_steps_and_large_embeddings(plan: Plan) -> None:
    stage = plan.stages[0].model_copy(update={"num_steps": 99})
    assert [
        line for line in unusual_proportions(plan.model_copy(update={"stages": (stage,)})) if "99 steps are few" in line
    ]
    shape = plan.shape.model_copy(update={"num_layers": 1})
    half = num_parameters(shape, False) // (2 * shape.d_model)  # tokens whose two vectors are half of all parameters
    for tokens, said in ((half, False), (half + 1, True)):
        sized = shape.model_copy(update={"vocab_size": tokens})
        text = " ".join(unusual_proportions(plan.model_copy(update={"shape": sized})))
        assert (f"% of the parameters are embeddings of {tokens:,} tokens" in text) == said


def test_held_out_documents_that_the_weights_may_have_read(plan: Plan) -> None:
    def found(**origin: object) -> str:
        weights = ModelOrigin.model_validate({"path": "old", "digest": "d", "vocab_size": 9, **origin})
        return " ".join(heldout_read_before(plan.model_copy(update={"origin": weights})))

    assert list(heldout_read_before(plan)) == []
    same = {"format": CHECKPOINT, "dataset": plan.dataset}
    assert found(**same) == ""
    assert "`penstock evaluate` leaves those out." in found(format=CHECKPOINT, dataset="another")
    assert "Nothing can say which." in found(format="llama")
    assert "Nothing can say which." in found(
        **same, origin={"path": "", "format": "gpt2", "digest": "", "vocab_size": 9}
    )
    settings = plan.settings.model_copy(update={"train": plan.settings.train.model_copy(update={"eval_every": 0})})
    weights = ModelOrigin(path="old", digest="d", vocab_size=9, format="llama")
    assert list(heldout_read_before(plan.model_copy(update={"origin": weights, "settings": settings}))) == []


def test_tokens_in_the_place_of_removed_documents_are_named(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path / "run")
    dataset = open_dataset(run)
    assert [*tombstones(dataset)] == []
    rows = [row for row in documents_of(dataset) if row["stream"] == "web/train"]
    assert take_down(run.uri, doc=[row["doc_id"].hex() for row in rows[:5]]) == 0
    removed, total = sum(row["num_tokens"] for row in rows[:5]), sum(row["num_tokens"] for row in rows)
    (line,) = tombstones(open_dataset(run))
    assert line.startswith(
        f"{removed:,} of {total:,} tokens of web are in the place of documents that a takedown removed."
    )
