"""The order of steps as predicted, and as they turn out on this machine."""

from pathlib import Path

import pytest

from bench.search_layouts import agreement, measured, predicted
from tests.support.rank_pool import shared_pool
from train.calibrate.measure import calibrate
from train.parallel.devices import device_of

BAND, SHARE = 0.3, 0.7
"""Steps that differ by less are ties; of the others so many pairs must be in order: other load moves single steps."""


@pytest.mark.dist
@pytest.mark.slow
def test_the_order_of_steps_is_the_order_predicted(tmp_path: Path) -> None:
    """After a calibration, at 1, 2 and 4 processes; the bench shows the figures."""
    said: list[str] = []
    device = calibrate(tmp_path / "here.json", 2, 1, said.append)
    assert device_of(str(tmp_path / "here.json")) == device
    assert len(said) >= 5
    assert device.layer_seconds["tensor"] >= device.layer_seconds["plain"]
    right = pairs = 0.0
    for ranks in (1, 2, 4):
        expected = {name: each.step_seconds for name, each in predicted(device, ranks).items()}
        found = shared_pool().play(ranks, measured, 4)[0]
        share, number = agreement(list(expected.values()), [found[name] for name in expected], BAND)
        right, pairs = right + share * number, pairs + number
    assert right >= SHARE * pairs
