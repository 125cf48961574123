"""The learning rate against values computed by hand, on both sides of every boundary, and rejected settings."""

import itertools
import math
import subprocess
import sys

import pytest
from pydantic import ValidationError

from train.config.optim import OptimConfig
from train.optim.schedule import ScheduleInputs, StageSchedule, learning_rate

COURSE = ScheduleInputs(steps=12, warmup_steps=4, peak_rate=2e-3)
Curve = list[tuple[int, float]]


def rates(course: ScheduleInputs, steps: range, **settings: object) -> list[float]:
    config = OptimConfig(**settings)
    return [learning_rate(step, course, config) for step in steps]


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        (
            {"schedule": "cosine"},
            [(4, 1.0), (5, 0.1 + 0.9 * (1 + math.cos(math.pi / 8)) / 2), (8, 0.55), (12, 0.1), (13, 0.1)],
        ),
        ({"schedule": "cosine", "final_lr_share": 0.0}, [(8, 0.5), (12, 0.0)]),
        ({"schedule": "cosine", "final_lr_share": 1.0}, [(8, 1.0), (12, 1.0)]),
        ({"schedule": "linear"}, [(4, 1.0), (5, 1 - 0.9 / 8), (8, 0.55), (11, 0.1 + 0.9 / 8), (12, 0.1)]),
        ({"schedule": "constant"}, [(4, 1.0), (5, 1.0), (12, 1.0)]),
        # The last quarter of 12 updates: 9 is the last update at the peak.
        ({"schedule": "wsd", "decay_share": 0.25}, [(5, 1.0), (9, 1.0), (10, 0.7), (11, 0.4), (12, 0.1)]),
        # 0.3 x 12 = 3.6 updates: the decay begins between 8 and 9.
        ({"schedule": "wsd", "decay_share": 0.3, "final_lr_share": 0.0}, [(8, 1.0), (9, 3 / 3.6), (12, 0.0)]),
        # The whole run: the decay begins after the warm-up.
        ({"schedule": "wsd", "decay_share": 1.0}, [(4, 1.0), (8, 0.55), (12, 0.1)]),
        ({"schedule": "inverse_sqrt"}, [(4, 1.0), (5, math.sqrt(4 / 5)), (9, 2 / 3), (12, math.sqrt(1 / 3))]),
        (
            {"schedule": "step", "decay_steps": (6, 9), "decay_factor": 0.1},
            [(5, 1.0), (6, 1.0), (7, 0.1), (9, 0.1), (10, 0.01), (12, 0.01)],
        ),
    ],
    ids=lambda value: value["schedule"] if isinstance(value, dict) else "",
)
def test_schedules_after_a_warm_up(settings: dict[str, object], shares: Curve) -> None:
    config = OptimConfig(**settings)
    assert [learning_rate(step, COURSE, config) for step in (1, 2, 3)] == pytest.approx([5e-4, 1e-3, 1.5e-3])
    actual = [learning_rate(step, COURSE, config) for step, _ in shares]
    assert actual == pytest.approx([2e-3 * share for _, share in shares], rel=1e-12, abs=1e-18)


@pytest.mark.parametrize(
    ("schedule", "warmup", "steps", "step", "expected"),
    [
        ("cosine", 0, 2, 1, 0.55),
        ("cosine", 0, 2, 2, 0.1),
        ("linear", 0, 1, 1, 0.1),
        ("linear", 3, 3, 3, 1.0),
        ("wsd", 3, 3, 3, 1.0),
        ("constant", 0, 1, 1, 1.0),
        ("inverse_sqrt", 0, 9, 1, 1.0),
        ("inverse_sqrt", 0, 9, 9, 1 / 3),
    ],
)
def test_without_room(schedule: str, warmup: int, steps: int, step: int, expected: float) -> None:
    actual = learning_rate(step, ScheduleInputs(steps, warmup, 1.0), OptimConfig(schedule=schedule))
    assert actual == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
def test_continuous_schedules_have_no_jump(schedule: str) -> None:
    """Per update, a rate of 1 over 2000 updates changes by at most a hundredth: the slope of the warm-up, or of wsd."""
    actual = rates(ScheduleInputs(2000, 100, 1.0), range(1, 2001), schedule=schedule)
    assert max(abs(left - right) for left, right in itertools.pairwise(actual)) <= 0.01 + 1e-12
    assert min(actual) > 0


HELDOUT = [(2, 3.0), (4, 2.0), (6, 2.0), (8, 2.5), (10, 1.9), (12, 1.95), (14, 1.96), (16, 1.97), (18, math.nan)]


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (1, 1.0),  # nothing measured
        (8, 1.0),  # 2.0 again is no new minimum: the first without
        (9, 0.5),  # 2.5, measured before update 9, is the second
        (11, 0.5),  # 1.9 is a new minimum
        (14, 0.5),
        (15, 0.25),  # 1.95 and 1.96
        (18, 0.25),  # 1.97: the count was reset
        (19, 0.125),  # NaN is no minimum
        (500, 0.125),
    ],
)
def test_plateau(step: int, factor: float) -> None:
    config = OptimConfig(schedule="plateau", plateau_patience=2)
    course = ScheduleInputs(500, 0, 2.0)
    assert learning_rate(step, course, config, HELDOUT) == 2.0 * factor
    before = [entry for entry in HELDOUT if entry[0] < step]
    assert learning_rate(step, course, config, before) == 2.0 * factor


def test_plateau_by_a_patience_of_one_and_by_a_factor() -> None:
    config = OptimConfig(schedule="plateau", plateau_patience=1, decay_factor=0.1)
    actual = [learning_rate(step, ScheduleInputs(500, 0, 1.0), config, HELDOUT) for step in (5, 7, 9, 11, 13)]
    assert actual == pytest.approx([1.0, 0.1, 0.01, 0.01, 0.001])


STAGED = ScheduleInputs(
    steps=20,
    warmup_steps=2,
    peak_rate=1.0,
    stages=(
        StageSchedule(1, 8),
        StageSchedule(9, 4, learning_rate=0.5, schedule="cosine", final_lr_share=0.2),
        StageSchedule(13, 2, learning_rate=0.1, schedule="constant"),
        StageSchedule(15, 2),
        StageSchedule(17, 4, learning_rate=0.4),
    ),
)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (1, 0.5),
        (2, 1.0),
        (8, 0.7),  # the run's: linear from 1 at 2 to 0.1 at 20
        (9, 0.5 * (0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)),
        (10, 0.3),
        (12, 0.1),
        (13, 0.1),
        (14, 0.1),
        (15, 0.35),  # the run's schedule continues, as if there had been no other
        (16, 0.3),
        (17, 0.3),
        (19, 0.1),
        (20, 0.0),
    ],
)
def test_stages(step: int, expected: float) -> None:
    actual = learning_rate(step, STAGED, OptimConfig(schedule="linear"))
    assert actual == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_a_stage_from_the_rate_reached_continues_without_a_jump() -> None:
    """The first of four updates from 0.55 to zero has a quarter of the decay."""
    course = ScheduleInputs(12, 4, 1.0, (StageSchedule(1, 8), StageSchedule(9, 4, learning_rate=0.55)))
    actual = rates(course, range(8, 13), schedule="linear")
    assert actual == pytest.approx([0.55, 0.4125, 0.275, 0.1375, 0.0])


def test_a_first_stage_with_its_own_rate_is_warmed_up() -> None:
    course = ScheduleInputs(10, 4, 1.0, (StageSchedule(1, 6, learning_rate=0.8), StageSchedule(7, 4)))
    actual = rates(course, range(1, 8), schedule="constant")
    assert actual == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.4, 0.0, 1.0])


def test_a_stage_of_one_update_ends_at_once() -> None:
    course = ScheduleInputs(
        3, 0, 1.0, (StageSchedule(1, 2), StageSchedule(3, 1, learning_rate=0.5, final_lr_share=0.5))
    )
    assert rates(course, range(2, 4), schedule="constant") == [1.0, 0.25]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay_share": 0.2}, "decay_share: expected schedule = wsd, got cosine. Remove decay_share, or set"),
        ({"decay_steps": (1,)}, "decay_steps: expected schedule = step, got cosine"),
        ({"schedule": "wsd", "decay_factor": 0.2}, "decay_factor: expected schedule = step or plateau, got wsd"),
        ({"schedule": "step", "decay_steps": (1,), "plateau_patience": 2}, "expected schedule = plateau, got step"),
        (
            {"schedule": "constant", "final_lr_share": 0.2},
            "expected schedule = cosine or linear or wsd, got constant. Remove final_lr_share, or set schedule.",
        ),
        ({"momentum": 0.9}, "muon, got adamw. Remove momentum, or set optimizer."),
        ({"muon_precision": "bf16"}, "muon_precision: expected optimizer = muon or normuon, got adamw"),
        ({"optimizer": "adafactor", "beta1": 0.8}, "adamw or lamb or muon or normuon, got adafactor. Remove beta1, or"),
        ({"optimizer": "adafactor", "beta2": 0.8}, "adamw or lamb or muon or normuon, got adafactor. Remove beta2, or"),
        ({"optimizer": "adafactor", "eps": 1e-6}, "adamw or lamb or muon or normuon, got adafactor. Remove eps, or"),
        ({"schedule": "step"}, "decay_steps: expected at least one step for schedule = step, got none. Set"),
        ({"schedule": "step", "decay_steps": (5, 5)}, "decay_steps: expected ascending steps from 1, got [5, 5]"),
        ({"schedule": "step", "decay_steps": (0, 5)}, "decay_steps: expected ascending steps from 1, got [0, 5]"),
        ({"initial_loss_scale": 0.5}, "greater than or equal to 1"),
        ({"initial_loss_scale": 2.0**25}, "less than or equal to 16777216"),
    ],
)
def test_ignored_settings_are_rejected(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        OptimConfig(**settings)
    assert message in str(caught.value)


def test_schedules_need_no_torch() -> None:
    code = "import sys, train.optim.schedule, train.optim.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
