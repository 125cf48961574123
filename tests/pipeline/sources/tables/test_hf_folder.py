"""Hugging Face dataset folders: the files of a split are found in every layout, and each is read by its kind."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.sources.config import SourceConfig
from pipeline.sources.source import open_split, refetch
from pipeline.sources.splits import find_splits, open_stream
from schemas.errors import ConfigError


def write(path: Path, *texts: str) -> None:
    """A Parquet file or an Arrow stream of these texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": texts})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)


def texts(folder: Path, **settings: Any) -> list[str]:
    config = SourceConfig.model_validate({"paths": str(folder), **settings})
    splits = find_splits(config)
    assert {split.format for split in splits} == {"hf"}
    return [row["text"] for split in splits for row, _ in open_split(split, open_stream(split), config)]


def test_a_copy_of_a_repository(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train-00000-of-00002.parquet", "a", "b")
    write(tmp_path / "data" / "train-00001-of-00002.parquet", "c")
    write(tmp_path / "data" / "test-00000-of-00001.parquet", "t")
    (tmp_path / "README.md").write_text("# data")
    assert texts(tmp_path) == ["a", "b", "c"]
    assert texts(tmp_path, hf={"split": "test"}) == ["t"]
    assert texts(tmp_path, format="hf", hf={"split": "all"}) == ["t", "a", "b", "c"]
    with pytest.raises(ConfigError, match=r"no file of the split 'tests' \(did you mean 'test'\?\)\. Correct"):
        find_splits(SourceConfig.model_validate({"paths": str(tmp_path), "hf": {"split": "tests"}}))


def test_a_saved_dataset_with_splits_of_other_names(tmp_path: Path) -> None:
    write(tmp_path / "extra" / "data-00000-of-00001.arrow", "e")
    write(tmp_path / "train" / "data-00000-of-00001.arrow", "a")
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "extra"]}))
    assert texts(tmp_path) == ["a"]
    assert texts(tmp_path, hf={"split": "extra"}) == ["e"]


def test_subsets_cache_files_and_files_without_a_split(tmp_path: Path) -> None:
    write(tmp_path / "en" / "squad-train.arrow", "en")
    write(tmp_path / "de" / "squad-train-00000-of-00001.arrow", "de")
    write(tmp_path / "de" / "squad-validation.arrow", "no")
    write(tmp_path / "de" / "cache-0123.arrow", "no")
    write(tmp_path / "data-00000-of-00001.arrow", "rest")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert texts(tmp_path, format="hf") == ["rest", "de", "en"]
    assert texts(tmp_path, format="hf", hf={"subset": "de"}) == ["de"]
    with pytest.raises(ConfigError, match=r"in a folder fr\. Correct source\.hf\.subset"):
        texts(tmp_path, format="hf", hf={"subset": "fr"})


@pytest.mark.parametrize(
    "name",
    [
        "default/partial-test/0000.parquet",
        "data/squad-test-00000-of-00001-0123456789abcdef.parquet",
        "data/questions_test_clean-00000-of-00001.parquet",
        "data/testing-00000-of-00001.parquet",
        "data/TEST-00000-of-00001.parquet",
        "data/Test/0.parquet",
        "data/test0.parquet",
        "plain_text/evaluation.v2/0000.parquet",
        "data/devtest-00000-of-00001.parquet",
        "data/unsupervised-00000-of-00001-0123456789abcdef.parquet",
    ],
)
def test_files_of_other_splits_are_not_in_train(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, "no")
    for kept in ("data/train-00000-of-00001.parquet", "default/partial-train/0000.parquet", "latest.parquet"):
        write(tmp_path / kept, kept)
    assert texts(tmp_path, format="hf") == [
        *("data/train-00000-of-00001.parquet", "default/partial-train/0000.parquet", "latest.parquet")
    ]


def test_numbered_files_of_another_name_are_in_train_if_no_file_names_a_split(tmp_path: Path) -> None:
    write(tmp_path / "data" / "corpus-00000-of-00001.parquet", "a")
    assert texts(tmp_path) == ["a"]


def test_a_path_that_is_no_dataset(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", "a")
    for path in (f"{tmp_path}/a.parquet", f"{tmp_path}/none", "s3://bucket/data"):
        with pytest.raises(ConfigError, match="got no local folder"):
            find_splits(SourceConfig(paths=(path,), format="hf"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no Parquet or Arrow file in this folder"):
        find_splits(SourceConfig(paths=(f"{tmp_path}/empty",), format="hf"))


@pytest.mark.parametrize("name", ["train.parquet", "train.arrow"])
def test_a_row_is_read_again(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, "one", "three")
    config = SourceConfig(paths=(str(tmp_path),), format="hf")
    (split,) = find_splits(config)
    _, second = [row for row, _ in open_split(split, open_stream(split), config)]
    assert refetch(split, second, config).changes == ()
    assert refetch(split, second | {"offset": 0}, config).changes == ("page_bytes: expected 5, got 3",)
