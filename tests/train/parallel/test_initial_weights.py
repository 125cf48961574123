"""Initial weights: the same in every layout although each rank draws its part, and in runs of older versions."""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from schemas.checkpoints import METADATA_NAME
from schemas.ids import digest_of
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.layout_cases import Case
from tests.support.rank_pool import shared_pool
from tests.support.tiny_runs import cut_back, make_run, notes, state_at, trained
from train.checkpoint.folder import INITIAL_WEIGHTS, rule_of_weights
from train.config.settings import load_settings
from train.model.draw import BY_POSITION, BY_TENSOR
from train.model.transformer import initial_weight
from train.parallel.parallelize import SplitModel
from train.plan.make_plan import make_plan
from train.plan.plan import read_plan, verify_plan, write_plan

pytestmark = pytest.mark.dist

LAYOUTS = {
    "uneven shards": Case(3),
    "tensor x shard": Case(4, {"tensor": 2}),
    "pipeline x tied": Case(2, {"pipeline": 2}, {"tie_embeddings": True}),
    "replicas of shards": Case(4, {"replicate": 2}, {"positions": "relative", "bias": True}),
}


def differing(ranks, case: Case, rule: int) -> list[str]:
    """Return the parameters whose initial values differ from those of the whole tensor."""
    model = SplitModel(case.of_shape(), load_settings(case.settings(), [], "test"), ranks, 1, [(32, 8)])
    model.set_initial_weights(7, rule)
    wrong = []
    for name, parameter in model.parameters.items():
        actual = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if not torch.equal(actual.detach(), initial_weight(name, parameter.shape, case.of_shape(), 7, rule=rule)):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("rule", [BY_POSITION, BY_TENSOR])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_starts_with_the_same_weights(name: str, rule: int) -> None:
    case = LAYOUTS[name]
    assert shared_pool().play(case.ranks, differing, case, rule) == [[]] * case.ranks


def as_an_older_version(run: Path) -> None:
    """Change the plan and the checkpoints of a run to what version 0.1.0 writes."""
    store = Store(str(run))
    write_plan(store, read_plan(store).model_copy(update={"initial_weights": BY_TENSOR}))
    plan = store.read_json("train/plan.json")
    del plan["initial_weights"]
    plan["digest"] = digest_of({name: value for name, value in plan.items() if name != "digest"})
    store.write_atomic("train/plan.json", json.dumps(plan).encode())
    for note in notes(run):
        content = store.read_json(f"{note.name}/{METADATA_NAME}")
        content.pop("digest", None)
        content["identity"]["settings"].pop(INITIAL_WEIGHTS)
        store.write_atomic(f"{note.name}/{METADATA_NAME}", json.dumps(content).encode())


def test_a_run_of_an_older_version_keeps_its_rule(tmp_path: Path) -> None:
    settings = {"checkpoint": {"first": True, "every": 2}, "train": {"steps": 4}}
    run = trained(make_run(tmp_path / "run", settings), 1)
    store, dataset = Store(str(run)), open_dataset(Store(str(run)))
    assert read_plan(store).initial_weights == rule_of_weights(store) == BY_POSITION
    as_an_older_version(run)
    assert rule_of_weights(store) == BY_TENSOR
    plan = read_plan(store)
    verify_plan(store, dataset, plan)
    assert make_plan(store, dataset, plan.settings).initial_weights == BY_TENSOR
    # It resumes, also in another layout, which needs another plan.
    trained(cut_back(run, 2), 1, "layout.micro_batch=3")
    assert read_plan(store).initial_weights == BY_TENSOR
    assert [note.step for note in notes(run)] == [0, 2, 4]
    # From step 0 it starts with the weights of the older version.
    before = {name: value for name, value in state_at(run, 0).items() if name.startswith("model.")}
    for step in (0, 2, 4):
        store.delete(f"train/checkpoints/step-{step:06d}/{METADATA_NAME}")
    trained(run, 1)
    for name, value in before.items():
        own = name.removeprefix("model.")
        after = state_at(run, 0)[name]
        assert torch.equal(after, initial_weight(own, value.shape, plan.shape, 0, rule=BY_TENSOR))
        assert value.ndim == 1 or not torch.equal(after, value)
