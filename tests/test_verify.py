"""Tests of the check before training: one changed bit is refused, a file that merely moved is not."""

import os
from pathlib import Path

import pytest
from tiny_dataset import flip_byte, make_tiny_dataset

from schemas.errors import ContractError
from schemas.ids import canonical_json
from schemas.storage import Store
from schemas.tokens import open_dataset
from train.data.verify import VERIFIED_NAME, verify_dataset

TABLE = "tokens/v-tiny"


@pytest.fixture
def run(tmp_path: Path) -> Store:
    return make_tiny_dataset(tmp_path, {"web": 20})


def settle(run: Store) -> None:
    """Set every file's modification time to an hour ago, as if the dataset had been written then."""
    for name in run.walk():
        if name != VERIFIED_NAME:
            when = os.stat(run.path(name)).st_mtime - 3600
            os.utime(run.path(name), (when, when))


def test_every_file_is_read_once_while_it_stays_the_same(run: Store) -> None:
    settle(run)
    dataset = open_dataset(run)
    files = len(dataset.manifest.content.files) + 1
    assert [verify_dataset(run, dataset) for _ in range(2)] == [files, 0]
    path = run.path(f"{TABLE}/{dataset.streams['web/train'][0].path}")
    os.utime(path, (1, 1))
    assert [verify_dataset(run, dataset) for _ in range(2)] == [1, 0]


def test_a_file_that_was_just_written_is_read_again(run: Store) -> None:
    dataset = open_dataset(run)
    files = len(dataset.manifest.content.files) + 1
    assert [verify_dataset(run, dataset) for _ in range(2)] == [files, files]


@pytest.mark.parametrize("kind", ["path", "docs_path"])
def test_one_flipped_bit_is_refused_with_both_digests(run: Store, kind: str) -> None:
    settle(run)
    dataset = open_dataset(run)
    assert verify_dataset(run, dataset) > 0
    shard = dataset.streams["web/train"][1]
    name = f"{TABLE}/{getattr(shard, kind)}"
    flip_byte(run.path(name))
    promised = shard.sha256 if kind == "path" else shard.docs_sha256
    message = (
        rf"1 file\(s\) are not what .*{getattr(shard, kind)}: promised SHA-256 {promised}, found {run.sha256(name)}"
    )
    with pytest.raises(ContractError, match=f"(?s){message}"):
        verify_dataset(run, dataset)
    flip_byte(run.path(name))
    assert verify_dataset(run, dataset) == 1


def test_another_tokenizer_of_the_same_size_is_refused(run: Store) -> None:
    dataset = open_dataset(run)
    path = Path(run.path("tokenizer/v-tiny/tokenizer.json"))
    text = path.read_text()
    swapped = text.replace('"baba": 105', '"dada": 105').replace('"dada": 181', '"baba": 181')
    assert swapped != text
    assert len(swapped) == len(text)
    path.write_text(swapped)
    found = run.sha256("tokenizer/v-tiny/tokenizer.json")
    with pytest.raises(ContractError, match=f"promised SHA-256 {dataset.tokenizer.sha256}, found {found}"):
        verify_dataset(run, dataset)


def test_all_that_is_wrong_is_told_at_once(run: Store) -> None:
    dataset = open_dataset(run)
    first, second = dataset.streams["web/train"][:2]
    run.delete(f"{TABLE}/{first.path}")
    flip_byte(run.path(f"{TABLE}/{second.path}"))
    with pytest.raises(ContractError, match=rf"(?s)2 file\(s\).*{first.path}: promised by a manifest, found nothing"):
        verify_dataset(run, dataset)


def test_renamed_and_moved_shards_are_the_same_dataset(run: Store) -> None:
    before = open_dataset(run)
    manifest = run.child(TABLE).read_json("manifest.json")
    for number, (key, path) in enumerate(sorted(manifest["run"]["paths"].items())):
        manifest["run"]["paths"][key] = f"elsewhere/{number}.arrow"
        run.make_parent(f"{TABLE}/elsewhere/x")
        os.rename(run.path(f"{TABLE}/{path}"), run.path(f"{TABLE}/elsewhere/{number}.arrow"))
    run.write_atomic(f"{TABLE}/manifest.json", canonical_json(manifest))
    after = open_dataset(run)
    assert after.digest == before.digest
    assert after.streams["web/train"][0].path != before.streams["web/train"][0].path
    assert verify_dataset(run, after) == len(after.manifest.content.files) + 1
