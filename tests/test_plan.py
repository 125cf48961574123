"""Tests of the plan: sized from the manifest's tokens, every figure with formula and source, contradictions refused."""

import dataclasses
import math
from pathlib import Path

import pytest
from tiny_dataset import make_tiny_dataset

from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from schemas.tokens import Dataset, Shard, open_dataset
from train.config import PlanConfig, TrainConfig
from train.plan import PLAN_NAME, Plan, make_plan, print_plan, read_plan, write_plan
from train.shape import num_parameters

TRAIN = TrainConfig(seq_len=64)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_tiny_dataset(tmp_path_factory.mktemp("run"))


def of_size(run: Store, **tokens: int) -> Dataset:
    """A dataset that promises these many training tokens per source, in shards of at most 100 million."""
    streams = {}
    for source, total in tokens.items():
        sizes = [min(10**8, total - begin) for begin in range(0, total, 10**8)]
        streams[f"{source}/train"] = [
            Shard(f"{source}/train", number, "", "", size, 1, "", "") for number, size in enumerate(sizes)
        ]
    return dataclasses.replace(open_dataset(run), streams=streams, chunk_tokens=4096)


def values(plan: Plan) -> dict[str, float]:
    return {figure.name: figure.value for figure in plan.figures}


@pytest.mark.parametrize("total", [2 * 10**8, 2 * 10**9, 2 * 10**10, 6 * 10**11])
def test_a_large_dataset_is_read_about_once_at_twenty_tokens_per_parameter(run: Store, total: int) -> None:
    plan = make_plan(of_size(run, web=total), PlanConfig(), TrainConfig(seq_len=2048))
    found = values(plan)
    assert found["tokens_per_parameter"] == pytest.approx(20, rel=0.01)
    assert found["epochs.web"] == pytest.approx(1, rel=0.1)
    assert plan.num_params == num_parameters(plan.shape) == pytest.approx(total / 20, rel=0.1)
    assert plan.steps * plan.global_batch * 2048 == found["tokens"]
    assert found["flops"] == plan.flops_per_token * found["tokens"]
    assert found["flops"] > 6 * num_parameters(plan.shape, embeddings=False) * found["tokens"]
    assert plan.global_batch.bit_count() == 1
    # Kaplan's rule is stated below 1e10 parameters only.
    assert ("learning_rate.kaplan" in found) == (found["params_without_embeddings"] < 1e10)


def test_the_rules_meet_known_models(run: Store) -> None:
    """140B tokens ask for a 7B model like Llama's, with batch and learning rate of the DeepSeek rule."""
    plan = make_plan(of_size(run, web=140 * 10**9), PlanConfig(), TrainConfig(seq_len=4096))
    assert (plan.shape.d_model, plan.shape.num_heads, plan.shape.num_kv_heads, plan.shape.head_dim) == (
        4096,
        32,
        8,
        128,
    )
    compute = values(plan)["compute"]
    assert plan.learning_rate == pytest.approx(0.3118 * compute**-0.125, rel=5e-3)
    assert values(plan)["batch_tokens"] == pytest.approx(0.2920 * compute**0.3271, rel=0.42)
    assert plan.warmup_steps == pytest.approx(plan.num_params / values(plan)["batch_tokens"], abs=1)


def test_a_small_dataset_is_repeated_up_to_the_limit(run: Store) -> None:
    dataset = open_dataset(run)
    for limit in (1.0, 2.5, 4.0):
        plan = make_plan(dataset, PlanConfig(max_epochs=limit), TRAIN)
        found = values(plan)
        assert max(found["epochs.web"], found["epochs.books"]) <= limit
        assert (plan.steps + 1) * plan.global_batch > limit * 168
    assert found["unique_tokens"] == 168 * 64
    assert found["wanted_params"] == 200_000
    assert found["tokens.web"] == sum(shard.num_tokens for shard in dataset.streams["web/train"])


def test_the_source_that_repeats_soonest_decides(run: Store) -> None:
    dataset = of_size(run, web=10**9, books=10**7)
    plan = make_plan(dataset, PlanConfig(), TrainConfig(seq_len=2048, weights={"web": 1, "books": 1}))
    found = values(plan)
    assert 3.5 < found["epochs.books"] <= 4
    assert found["epochs.web"] == pytest.approx(found["epochs.books"] / 100, rel=1e-3)
    repeats = found["epochs.books"] - 1
    worth = 1e7 * (1 + 15.387756 * (1 - math.exp(-repeats / 15.387756)))
    assert found["worth_in_unique_tokens"] == pytest.approx(found["tokens"] / 2 + worth, rel=1e-3)


def test_what_is_given_is_never_changed(run: Store) -> None:
    train = TrainConfig(seq_len=32, global_batch=5, steps=11, learning_rate=0.002, warmup_steps=0)
    plan = make_plan(open_dataset(run), PlanConfig(num_layers=2, d_model=32, num_heads=2), train)
    assert (plan.global_batch, plan.steps, plan.learning_rate, plan.warmup_steps) == (5, 11, 0.002, 0)
    assert (plan.shape.num_layers, plan.shape.d_model, plan.shape.num_heads) == (2, 32, 2)
    sources = {figure.name: figure.source for figure in plan.figures}
    assert {sources[name] for name in ("global_batch", "steps", "learning_rate", "warmup_steps")} == {"recipe"}


@pytest.mark.parametrize(("steps", "fits"), [(168, True), (169, False)])
def test_more_passes_than_allowed_are_refused(run: Store, steps: int, fits: bool) -> None:
    """168 samples in four passes are 672, which are 168 steps of 4."""
    train = TrainConfig(seq_len=64, global_batch=4, steps=steps)
    if fits:
        assert make_plan(open_dataset(run), PlanConfig(), train).steps == steps
    else:
        with pytest.raises(ConfigError, match=r"max_epochs = 4 passes, which are 672 samples, found 169 steps of 4"):
            make_plan(open_dataset(run), PlanConfig(), train)


def test_a_micro_batch_beyond_the_device_is_refused(run: Store) -> None:
    plan = make_plan(open_dataset(run), PlanConfig(world_sizes=(1, 4)), TRAIN)
    found = values(plan)
    fixed = sum(found[f"memory.4.{name}"] for name in ("gathered", "activations", "logits"))
    assert found["memory.4"] == fixed + found["memory.4.states"]
    assert make_plan(open_dataset(run), PlanConfig(device_memory=fixed), TRAIN).steps == plan.steps
    with pytest.raises(
        ConfigError, match=rf"device_memory = {fixed - 1} bytes, found that 8 sequences of 64 need {fixed} "
    ):
        make_plan(open_dataset(run), PlanConfig(device_memory=fixed - 1), TRAIN)


def test_every_figure_says_where_it_comes_from(run: Store) -> None:
    plan = make_plan(open_dataset(run), PlanConfig(), TrainConfig(seq_len=64, peak_flops=1e12))
    text = print_plan(plan)
    for figure in plan.figures:
        assert figure.formula
        assert figure.source
        assert figure.name in text
    assert len({figure.name for figure in plan.figures}) == len(plan.figures)
    found = values(plan)
    assert found["seconds_at_peak"] == found["flops"] / 1e12
    for name in ("params", "steps", "warmup_steps", "global_batch", "learning_rate", "flops_per_token"):
        assert found[name] == getattr(plan, {"params": "num_params"}.get(name, name))


def test_a_plan_is_read_back_and_belongs_to_its_dataset(run: Store, tmp_path: Path) -> None:
    plan = make_plan(open_dataset(run), PlanConfig(), TRAIN)
    with pytest.raises(ContractError, match=r"found no train/plan.json; make it with `penstock plan`"):
        read_plan(run)
    write_plan(run, plan)
    assert read_plan(run) == plan
    assert make_plan(open_dataset(run), PlanConfig(), TRAIN) == plan
    other = make_tiny_dataset(tmp_path, seed=1)
    write_plan(other, plan)
    with pytest.raises(
        ContractError, match=f"promised dataset {plan.dataset}, the run now holds {open_dataset(other).digest}"
    ):
        read_plan(other)
    other.write_atomic(PLAN_NAME, b'{"dataset": "x"}')
    with pytest.raises(ContractError, match=r"(?s)plan.json: does not hold together: .*tokenizer"):
        read_plan(other)
