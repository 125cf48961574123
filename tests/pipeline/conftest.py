"""Fixtures of the stages."""

from collections.abc import Iterator

import pytest

from pipeline.text import native
from tests.support.native import python_only


@pytest.fixture(scope="module", params=["native", "python"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """The tests of a module run with the native module, and again in Python alone."""
    if request.param == "python":
        with python_only():
            yield request.param
    elif native.module is None:
        pytest.skip("the native module is not built from these sources (pip install -e .)")
    else:
        yield request.param
