"""Model files that are replaced during a run: no task reads another file than the one that was recorded."""

import os
import pickle
from pathlib import Path

import pytest

from jobs.recipe import read_recipe
from pipeline.engine.model_files import ModelFile, path_here, state_of
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.errors import ContractError
from schemas.ids import file_sha256
from schemas.storage import Store
from tests.support.demo_run import RECIPE, SMALL


@pytest.fixture
def model(tmp_path: Path) -> ModelFile:
    path = tmp_path / "words.txt"
    path.write_text("one\n")
    return pickle.loads(pickle.dumps(ModelFile(str(path), state_of(str(path)), file_sha256(path))))


def replace_file(path: str, text: str) -> None:
    """Replace a file by another one of the same size and time."""
    other, found = Path(f"{path}.new"), os.stat(path)
    other.write_text(text)
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    other.replace(path)


def never() -> str:
    raise AssertionError("no copy is needed")


def test_an_unchanged_file_and_an_equal_one_are_read(model: ModelFile) -> None:
    assert path_here(model, None) == path_here(model, never) == str(model)
    replace_file(model, "one\n")
    assert path_here(model, never) == str(model)


@pytest.mark.parametrize("change", ["replaced", "gone"])
def test_of_a_changed_file_only_the_shipped_copy_is_read(model: ModelFile, tmp_path: Path, change: str) -> None:
    copy = tmp_path / "copy"
    copy.write_text("one\n")
    if change == "gone":
        Path(model).unlink()
    else:
        replace_file(model, "two\n")
    assert path_here(model, lambda: str(copy)) == str(copy)
    with pytest.raises(ContractError, match=f"expected {model} as it was when the run was prepared, got a changed"):
        path_here(model, lambda: "nowhere")


def test_a_secret_file_is_compared_by_its_state(model: ModelFile) -> None:
    secret = ModelFile(str(model), model.state, None)
    assert path_here(secret, None) == str(model)
    replace_file(model, "one\n")
    with pytest.raises(ContractError, match="got a changed file"):
        path_here(secret, None)


def test_other_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("")
    assert path_here(str(tmp_path / "here"), never) == str(tmp_path / "here")
    assert path_here(str(tmp_path / "gone"), lambda: "copy") == "copy"


@pytest.mark.spark
def test_a_run_whose_word_list_is_replaced_ends_and_commits_nothing(spark, crawl: Path, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("zzzz\n")
    settings = [f'source.paths=["{crawl}/*.warc.gz"]', *SMALL, f'toxicity.wordlists={{en="{words}"}}']
    prepared = prepare(read_recipe(str(RECIPE), settings), "documents")
    replace_file(str(words), "the \n")
    with pytest.raises(ContractError, match=f"models: expected {words} as it was when the run was prepared"):
        run_steps(spark, prepared, Store(str(tmp_path / "run")), 2)
    assert not [*tmp_path.glob("run/documents/*/manifest.json")]
    assert not [*tmp_path.glob("run/finished_parts/documents/*.json")]
