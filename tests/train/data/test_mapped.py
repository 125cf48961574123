"""A mapped dataset: equal to the dataset that it was written from, in the memory of a file."""

import tempfile
from pathlib import Path

import pytest

from schemas.errors import ContractError
from schemas.storage import Store
from schemas.takedown import positions_digest
from schemas.tokens import Dataset, open_dataset
from tests.support.rank_pool import shared_pool
from tests.support.tiny_dataset import make_tiny_dataset
from train.data.mapped import MappedDataset, map_dataset, with_manifest, write_mapped
from train.dataset_history import digests_at_same_positions
from train.pretrain.setup import open_dataset_once


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("mapped") / "run"
    make_tiny_dataset(folder)
    return open_dataset(Store(str(folder)))


def test_a_mapped_dataset_is_the_same(dataset: Dataset, tmp_path: Path) -> None:
    write_mapped(dataset, tmp_path / "file")
    mapped = map_dataset(tmp_path / "file")
    (tmp_path / "file").unlink()
    assert {name: [*shards] for name, shards in mapped.streams.items()} == dict(dataset.streams)
    first = next(iter(dataset.streams))
    assert mapped.streams[first][-1] == dataset.streams[first][-1]
    assert mapped.streams[first][0].path.sha256 == dataset.streams[first][0].path.sha256
    assert mapped.streams[first][0].docs_path.num_bytes == dataset.streams[first][0].docs_path.num_bytes
    assert mapped.streams[first][:1] == dataset.streams[first][:1]
    for name in ("digest", "copies", "chunk_tokens", "tokenizer", "tokenizer_path"):
        assert getattr(mapped, name) == getattr(dataset, name)
    assert [mapped.num_tokens(split) for split in ("train", "heldout")] == [
        dataset.num_tokens(split) for split in ("train", "heldout")
    ]
    assert mapped.members[0].shards == dataset.members[0].shards
    assert mapped.members[0].folder.uri == dataset.members[0].folder.uri
    assert not mapped.manifest.content.files
    assert mapped.manifest.digest == dataset.manifest.digest
    assert positions_digest(mapped.manifest) == positions_digest(dataset.manifest)
    assert digests_at_same_positions(mapped) == digests_at_same_positions(dataset)
    whole = with_manifest(mapped, dataset)
    assert (whole.manifest, whole.by_url) == (dataset.manifest, dataset.by_url)
    with pytest.raises(IndexError):
        mapped.streams[first][len(dataset.streams[first])]


def test_a_dataset_that_was_written_meanwhile_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    write_mapped(dataset, tmp_path / "file")
    mapped = map_dataset(tmp_path / "file")
    object.__setattr__(mapped, "of_manifest", "0" * 64)
    with pytest.raises(ContractError, match="Start the run again"):
        with_manifest(mapped, dataset)
    with pytest.raises(FileExistsError):  # a file of another program is not overwritten
        write_mapped(dataset, tmp_path / "file")


def opened(ranks, run: str, folder: str) -> tuple[str, bool, int, int]:
    """Return the digest of a run's dataset, whether it is mapped, and its files in the manifest and in streams."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        dataset = open_dataset_once(Store(run), ranks)
    finally:
        tempfile.tempdir = before
    shards = sum(len([*own]) for own in dataset.streams.values())
    return dataset.digest, isinstance(dataset, MappedDataset), len(dataset.manifest.content.files), shards


@pytest.mark.dist
def test_one_rank_reads_the_manifest_and_the_other_maps_it(dataset: Dataset, tmp_path: Path) -> None:
    run, files = dataset.folder.child("../..").root, len(dataset.manifest.content.files)
    shards = sum(map(len, dataset.streams.values()))
    first, second = shared_pool().play(2, opened, run, str(tmp_path))
    assert first == (dataset.digest, True, files, shards)
    assert second == (dataset.digest, True, 0, shards)
    assert not [*tmp_path.iterdir()]


@pytest.mark.dist
def test_without_space_for_the_file_each_rank_reads_the_manifest(dataset: Dataset, tmp_path: Path) -> None:
    run, files = dataset.folder.child("../..").root, len(dataset.manifest.content.files)
    everywhere = shared_pool().play(2, opened, run, str(tmp_path / "missing"))
    assert [each[1:3] for each in everywhere] == [(False, files)] * 2
