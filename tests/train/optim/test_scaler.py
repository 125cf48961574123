"""The factor of the fp16 loss, step by step."""

import dataclasses
import json

import pytest

from train.config.optim import OptimConfig
from train.optim.schedule import LossScale, first_loss_scale


def course(scale: LossScale, steps: str) -> list[tuple[float, int]]:
    """Return (factor, finite steps) after each step; + is a finite gradient, - one that is not finite."""
    states = []
    for step in steps:
        scale = scale.after(step == "+")
        states.append((scale.scale, scale.finite_steps))
    return states


@pytest.mark.parametrize(
    ("scale", "steps", "expected"),
    [
        (LossScale(8.0, 0, 3), "+++++", [(8.0, 1), (8.0, 2), (16.0, 0), (16.0, 1), (16.0, 2)]),
        (LossScale(8.0, 2, 3), "-+++", [(4.0, 0), (4.0, 1), (4.0, 2), (8.0, 0)]),
        (LossScale(2.0, 2, 3), "---", [(1.0, 0), (1.0, 0), (1.0, 0)]),
        (LossScale(1.5, 0, 3), "-+", [(1.0, 0), (1.0, 1)]),
        (LossScale(2.0**23, 0, 1), "++-", [(2.0**24, 0), (2.0**24, 0), (2.0**23, 0)]),
    ],
)
def test_course(scale: LossScale, steps: str, expected: list[tuple[float, int]]) -> None:
    assert course(scale, steps) == expected


def test_first_scale_is_restored_from_a_file() -> None:
    scale = first_loss_scale(OptimConfig(initial_loss_scale=1024.0, loss_scale_steps=7)).after(True)
    assert scale == LossScale(1024.0, 1, 7)
    assert LossScale(**json.loads(json.dumps(dataclasses.asdict(scale)))) == scale
