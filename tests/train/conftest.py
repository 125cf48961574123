"""Training in the process of a test computes on one thread, whatever the machine."""

from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread_for_each_rank() -> Iterator[None]:
    """A run that `main` trains sets the threads of its process: two of them would remain for all later tests."""
    with mock.patch("train.pretrain.setup.default_threads", return_value=1):
        yield
