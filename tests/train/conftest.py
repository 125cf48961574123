"""Training in the process of a test computes on one thread, whatever the machine, and plans in that process."""

from collections.abc import Iterator
from unittest import mock

import pytest

from train.plan.layouts import plan_for_devices


@pytest.fixture(autouse=True, scope="session")
def one_thread_for_each_rank() -> Iterator[None]:
    """A run that `main` trains sets the threads of its process: two of them would remain for all later tests."""
    with mock.patch("train.pretrain.setup.default_threads", return_value=1):
        yield


@pytest.fixture(autouse=True, scope="session")
def planner_in_this_process() -> Iterator[None]:
    """Without the planner's own process, which imports torch for seconds: `tests/train/pretrain/test_setup.py` shows
    that it returns the same plans and errors."""
    with mock.patch("train.pretrain.setup.call_planner", plan_for_devices):
        yield
