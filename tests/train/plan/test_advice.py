"""Tests of train/plan/advice.py, on both sides of every limit."""

import pytest

from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from train.config.settings import load_settings
from train.model.shape import num_parameters
from train.plan.advice import unusual_proportions
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


def test_what_is_in_proportion_needs_no_word(plan: Plan) -> None:
    assert 1 - num_parameters(plan.shape, False) / plan.num_params < 0.5
    assert list(unusual_proportions(plan.model_copy(update={"num_params": plan.num_tokens // 20}))) == []


@pytest.mark.parametrize(
    ("params", "found"),
    [(1.70, []), (1.69, ["fewer than in any"]), (59_990, []), (60_010, ["more than in any published run (60,000 in"])],
)
def test_tokens_for_a_parameter(plan: Plan, params: float, found: list[str]) -> None:
    stage = plan.stages[0].model_copy(update={"global_batch": 10**9})
    wanted = round(stage.num_tokens / params)
    sentences = list(unusual_proportions(plan.model_copy(update={"num_params": wanted, "stages": (stage,)})))
    said = [line for line in sentences if "for each of" in line]
    assert len(said) == len(found)
    assert all(part in line for line, part in zip(said, found, strict=True))


def test_few_steps_and_large_embeddings(plan: Plan) -> None:
    stage = plan.stages[0].model_copy(update={"num_steps": 99})
    assert [
        line for line in unusual_proportions(plan.model_copy(update={"stages": (stage,)})) if "99 steps are few" in line
    ]
    shape = plan.shape.model_copy(update={"num_layers": 1})
    body = num_parameters(shape, False)
    for params, said in ((2 * body, False), (2 * body + 2, True)):
        text = " ".join(unusual_proportions(plan.model_copy(update={"shape": shape, "num_params": params})))
        assert ("% of the parameters are embeddings" in text) == said
