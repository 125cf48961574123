"""Files that stages compile from lists: kept for later runs, but none that is damaged or that other code has made."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from pipeline import prepare
from pipeline.decontaminate import index
from pipeline.decontaminate.stage import DECONTAMINATE, DecontaminateConfig
from pipeline.engine.step import Model
from pipeline.models import ModelsConfig
from pipeline.urls.stage import URLS

NAME = "index"


@pytest.fixture
def config(tmp_path: Path) -> DecontaminateConfig:
    (tmp_path / "items.jsonl").write_text(f'{{"text": "{" ".join(map(str, range(60)))}"}}\n')
    return DecontaminateConfig(evaluation_sets={"exam": str(tmp_path / "items.jsonl")})


@pytest.fixture
def builds() -> Iterator[mock.Mock]:
    """The function that builds an index, whose calls are counted."""
    with mock.patch.object(index, "build_index", wraps=index.build_index) as build:
        yield build


def index_of(config: DecontaminateConfig, cache: Path) -> Model:
    return prepare.models_of_stage(DECONTAMINATE, config, ModelsConfig(cache=str(cache)))[NAME]


def test_a_later_run_takes_the_file_of_an_earlier_one(
    config: DecontaminateConfig, builds: mock.Mock, tmp_path: Path
) -> None:
    first = index_of(config, tmp_path / "cache")
    assert index_of(config, tmp_path / "cache") == first
    assert builds.call_count == 1


@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "note", "note of another kind"])
def test_a_damaged_file_is_compiled_again(
    config: DecontaminateConfig, builds: mock.Mock, tmp_path: Path, damage: str
) -> None:
    first = index_of(config, tmp_path / "cache")
    path = Path(first.path)
    (note,) = (tmp_path / "cache").rglob(prepare.COMPILED)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    elif damage.startswith("note"):
        note.write_text("[]" if damage.endswith("kind") else "{")
    else:
        path.write_bytes(data if damage == "bit" else data[:-1])
    assert index_of(config, tmp_path / "cache").sha256 == first.sha256
    assert builds.call_count == 2
    assert index_of(config, tmp_path / "cache").sha256 == first.sha256
    assert builds.call_count == 2


def test_a_stage_without_lists_leaves_no_folder(tmp_path: Path) -> None:
    words = URLS.config(banned_words="builtin")
    assert [*prepare.models_of_stage(URLS, words, ModelsConfig(cache=str(tmp_path)))] == ["banned_words"]
    assert not [*tmp_path.glob("compiled/*/*")]


@pytest.mark.parametrize("name", ["code_digest", "libraries_digest"])
def test_a_file_that_other_code_or_libraries_made_is_compiled_again(
    config: DecontaminateConfig, builds: mock.Mock, tmp_path: Path, name: str
) -> None:
    with mock.patch.object(prepare, name, return_value="other"):
        index_of(config, tmp_path / "cache")
    index_of(config, tmp_path / "cache")
    assert builds.call_count == 2
