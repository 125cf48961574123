"""The modules of `bench` can be imported: no test executes most of them, and what they measure moves."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", MODULES)
def test_a_bench_can_be_imported(name: str) -> None:
    module = importlib.import_module(f"bench.{name}")
    assert module.__doc__
