"""Training stages: settings become steps, rounded once, and contradictory settings are rejected."""

import pytest
from pydantic import ValidationError

from schemas.errors import ConfigError
from tests.support.tiny_stages import staged
from train.config.train import TrainConfig
from train.data.stages import StagePlan, resolve_stages, stage_lengths, stage_weights

COUNTS = {"web": 1}


def steps_of(config: TrainConfig, tokens: int, batch: int = 4) -> list[tuple[int, int]]:
    counts = [COUNTS] * len(stage_lengths(config))
    return [(plan.first_step, plan.num_steps) for plan in resolve_stages(config, counts, batch, tokens)]


@pytest.mark.parametrize(("tokens", "steps"), [(2560, 10), (2560 + 128 - 1, 10), (2560 + 129, 11), (1, 1)])
def test_a_single_stage_has_the_tokens_of_the_plan(tokens: int, steps: int) -> None:
    assert steps_of(TrainConfig(seq_len=64), tokens) == [(0, steps)]


def test_given_steps_are_the_steps() -> None:
    assert steps_of(TrainConfig(seq_len=64, steps=3), 10**6) == [(0, 3)]
    assert steps_of(staged([{"tokens": 512}, {}], steps=9), 10**6) == [(0, 2), (2, 7)]


def test_the_last_stage_has_the_remaining_tokens() -> None:
    config = staged([{"tokens": 1000}, {"tokens": 2048, "seq_len": 128, "global_batch": 2}, {"seq_len": 32}])
    # 1000 / 256 rounds to 4 steps of 256 tokens, 2048 / 256 is 8 steps, and 1024 of 4096 tokens are 8 steps of 128.
    assert steps_of(config, 4096) == [(0, 4), (4, 8), (12, 8)]


@pytest.mark.parametrize(
    ("config", "tokens", "message"),
    [
        (
            staged([{"tokens": 100}, {}]),
            10_000,
            r"train.stages\[0\]: .* a step of 4 x 64 tokens, got 100 tokens\. Raise `tokens`",
        ),
        (
            staged([{"tokens": 2048}, {}]),
            2048,
            r"train.stages\[1\]: expected tokens left for this stage, got 2,048 of the run's 2,048",
        ),
        (staged([{"tokens": 2048}, {}], steps=8), 0, r"train.stages\[1\]: expected at least a step"),
        (
            staged([{"tokens": 2048}], steps=8),
            0,
            r"train.steps: .* got 8 steps and 2048 tokens in train.stages\[0\]\. Remove train.steps",
        ),
    ],
)
def test_stages_without_a_step_or_with_two_lengths_are_rejected(config: TrainConfig, tokens: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        steps_of(config, tokens)


def test_settings_of_a_stage_replace_those_of_the_run() -> None:
    config = staged([{"tokens": 1, "weights": {"a": 1.0}}, {"seq_len": 128}], weights={"b": 1.0})
    assert stage_lengths(config) == [64, 128]
    assert stage_weights(config) == [{"a": 1.0}, {"b": 1.0}]
    assert stage_weights(TrainConfig()) == [{}]


def test_sums_of_a_stage() -> None:
    plan = StagePlan(first_step=5, num_steps=10, seq_len=64, global_batch=3, counts=COUNTS)
    assert (plan.end, plan.num_samples, plan.num_tokens) == (15, 30, 1920)


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ({}, "expected 1 to 65536 samples in a block, got 0"),
        ({"a": 0}, "got 0"),
        ({"a": 1, "b": 10**9}, "expected 1 to 65536 samples in a block, got 1000000001"),
        ({"a": -1, "b": 2}, "greater than or equal to 0"),
    ],
)
def test_a_block_that_would_take_hours_is_refused(counts: dict[str, int], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        StagePlan(first_step=0, num_steps=1, seq_len=8, global_batch=1, counts=counts)
