"""The check of a dataset by several machines: shares of the same files, each machine its own copies."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest

from schemas.errors import PenstockError
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.rank_pool import shared_pool
from tests.support.tiny_dataset import flip_byte, make_tiny_dataset, settle
from train.data import verify
from train.data.verify import VERIFIED_NAME, dataset_files, join_shares, share_name, verify_dataset, verify_share
from train.pretrain.setup import open_dataset_once, verify_on_ranks

pytestmark = pytest.mark.dist


def checked(ranks: Any, *folders: str) -> tuple[int, list[str], str]:
    """Verify as the only rank of a machine with the folder of this rank; return counts, files read and the error."""
    run, read = Store(folders[ranks.rank % len(folders)]), list[str]()
    digest = verify.file_digest

    def reading(folder: Store, path: str, *work: Any) -> str:
        read.append(path)
        return digest(folder, path, *work)

    ranks = replace(ranks, leads_node=True)
    with (
        TemporaryDirectory() as own,
        mock.patch.object(tempfile, "tempdir", own),
        mock.patch.object(verify, "file_digest", reading),
    ):
        try:
            return verify_on_ranks(run, open_dataset_once(run, ranks), [], ranks), read, ""
        except PenstockError as error:
            return 0, read, f"{type(error).__name__}: {error}"


@pytest.fixture
def run(tmp_path: Path) -> Store:
    run = make_tiny_dataset(tmp_path / "run", {"web": 60})
    settle(run)
    return run


def names(run: Store) -> list[str]:
    return sorted(path.name for path in Path(run.path("train")).glob("verified*"))


def test_machines_that_see_the_same_files_read_a_share_each(run: Store) -> None:
    number = len(dataset_files(open_dataset(run)))
    (total, first, error), (other, second, _) = shared_pool().play(2, checked, run.uri)
    assert (error, total, other) == ("", number, number)
    assert not {*first} & {*second}
    assert len(first) + len(second) == number
    assert abs(len(first) - len(second)) <= 1
    assert names(run) == ["verified.json"]
    assert len(run.read_json(VERIFIED_NAME)) == number
    assert verify_dataset(run, open_dataset(run)) == 0
    assert [result[:2] for result in shared_pool().play(2, checked, run.uri)] == [(0, []), (0, [])]


def test_a_killed_share_is_not_read_again_on_any_number_of_machines(run: Store) -> None:
    files = dataset_files(open_dataset(run))
    assert verify_share(run, run.uri, files, 2, 3) == len(files) // 3
    assert names(run) == [Path(share_name(2)).name]
    assert verify_share(run, run.uri, files, 0, 1) == len(files) - len(files) // 3
    join_shares(run)
    assert names(run) == ["verified.json"]
    assert len(run.read_json(VERIFIED_NAME)) == len(files)
    assert verify_dataset(run, open_dataset(run)) == 0


def test_a_machine_with_copies_of_its_own_reads_them_all(run: Store, tmp_path: Path) -> None:
    shutil.copytree(run.uri, tmp_path / "copy")
    copy, number = Store(str(tmp_path / "copy")), len(dataset_files(open_dataset(run)))
    settle(copy)
    results = shared_pool().play(2, checked, run.uri, copy.uri)
    assert [(total, len(read), error) for total, read, error in results] == [(2 * number, number, "")] * 2
    assert names(run) == names(copy) == ["verified.json"]
    shard = open_dataset(copy).streams["web/train"][0]
    flip_byte(open_dataset(copy).folder.path(shard.path))
    (_, _, other), (_, _, error) = shared_pool().play(2, checked, run.uri, copy.uri)
    assert error.startswith(f"ContractError: {open_dataset(copy).folder.uri}: expected the files of the manifest")
    assert f"{shard.path}: expected SHA-256 {shard.sha256}, got " in error
    assert other.startswith("FirstRankFailed: ")


def test_the_first_rank_names_what_any_machine_has_seen(run: Store) -> None:
    dataset = open_dataset(run)
    wrong = [dataset.folder.path(shard.docs_path) for shard in dataset.streams["web/train"]]
    for path in wrong:
        flip_byte(path)
    (_, _, error), (_, _, other) = shared_pool().play(2, checked, run.uri)
    assert all(path in error for path in wrong)
    assert error.startswith("ContractError: ")
    assert other.startswith("FirstRankFailed: ")
