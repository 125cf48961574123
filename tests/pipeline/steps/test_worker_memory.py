"""The memory of a worker on the inputs that take most of it, measured in a process that runs the worker's code."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.recipe import read_recipe
from pipeline.engine.isolation import LIMITS, MEMORY_FACTOR
from pipeline.pii.stage import PII
from pipeline.sources.config import SourceConfig
from pipeline.stages import MEASURED
from schemas.errors import ConfigError
from tests.support.paths import ROOT
from tests.support.worst_inputs import CLEAN, DOCUMENTS, RECIPE, models_of

RECORD_MIB = SourceConfig(paths=("x",)).max_record_bytes >> 20
WORST_FACTOR = 32
"""The worst inputs take at most so many times the maximum size of a record."""
QUICK = ("chunks of one byte", "200 MB in br", "a table of 1 million cells")
"""Cases of every run of the tests; the others are slow."""


@pytest.fixture(scope="module", autouse=True)
def models() -> None:
    """Skip the tests on a machine without the models of the recipe."""
    try:
        models_of(read_recipe(str(RECIPE), ['source.paths=["x"]']), (*MEASURED, PII))
    except ConfigError as error:
        pytest.skip(str(error))


def run(*words: str) -> dict[str, Any]:
    """Run a command of `worst_inputs` in a process of its own, and return what it prints."""
    call = [sys.executable, "-m", "tests.support.worst_inputs", *words]
    return dict(json.loads(subprocess.run(call, cwd=ROOT, check=True, capture_output=True, text=True).stdout))


def documents(case: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    return run("documents", case, run("make", case, str(folder))["path"])


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The peak memory of a worker on a usual page, which is that of its code and models [MiB]."""
    found = documents("a usual page", tmp_path_factory.mktemp("usual") / "page")
    assert found["drops"] == {}
    return int(found["peak"])


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in DOCUMENTS]
)
def test_a_worker_that_reads_documents_stays_far_below_its_maximum(case: str, usual: int, tmp_path: Path) -> None:
    assert documents(case, tmp_path / "case")["peak"] < usual + WORST_FACTOR * RECORD_MIB


@pytest.mark.slow
@pytest.mark.parametrize("case", CLEAN)
def test_a_worker_that_cleans_texts_stays_far_below_its_maximum(case: str, usual: int) -> None:
    assert run("clean", case)["peak"] < usual + WORST_FACTOR * RECORD_MIB


def test_the_maximum_is_a_multiple_of_the_largest_record() -> None:
    assert LIMITS.memory_bytes == MEMORY_FACTOR * RECORD_MIB << 20
    assert WORST_FACTOR * 4 <= MEMORY_FACTOR
