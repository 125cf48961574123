"""The verification of a dataset on all machines of a run: machines that see the same files share them.

The first rank of each machine takes part. Machines with the same files are found by the inodes and change times of
manifests, which all machines see alike on a mounted folder, and which a copy on another disk does not have.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from schemas.errors import ContractError
from schemas.manifest import MANIFEST_NAME, RUN_NAME
from schemas.storage import Store
from schemas.tokens import Dataset
from train.data.verify import ExpectedFile, dataset_files, join_shares, verify_share
from train.parallel.ranks import FirstRankFailed, Ranks, torchrun_placement

View = tuple[tuple[int, int] | None, ...]
"""Inode and change time of each file that tells the copies of a dataset apart; None = it is not on a local path."""


def verify_on_ranks(run: Store, dataset: Dataset, others: Iterable[ExpectedFile], ranks: Ranks) -> int:
    """Compare the files of a dataset, and `others`, with their SHA-256; return how many files had to be read.

    All ranks call it together. Machines that see the same files read a share each. A machine with copies of its own
    reads its own. Raises ContractError on the first rank that sees a wrong file, and FirstRankFailed on the others.
    """
    place = torchrun_placement()
    takes_part = not ranks.rank or (place is not None and place[0] == 0)
    views = _gathered(view_of(run, dataset) if takes_part else None, ranks)
    mine = [rank for rank, view in enumerate(views) if view is not None and view == views[ranks.rank]]
    number, problem = 0, ""
    if takes_part:
        try:
            files = [*dataset_files(dataset), *others]
            number = verify_share(run, dataset.folder.uri, files, mine.index(ranks.rank), len(mine))
        except ContractError as error:
            problem = str(error)
    results: list[tuple[int, str]] = _gathered((number, problem), ranks)
    if mine and ranks.rank == mine[0]:
        join_shares(run)
        if problems := [text for text in (results[rank][1] for rank in mine) if text]:
            raise ContractError("\n".join(problems))
    if failed := next((text for _, text in results if text), ""):
        raise FirstRankFailed(failed)
    return sum(number for number, _ in results)


def view_of(run: Store, dataset: Dataset) -> View:
    """Return what tells this machine's copies of a run and its dataset apart from others."""
    folders = (dataset.folder, dataset.tokenizer_folder, *(member.folder for member in dataset.members))
    files = [(run, RUN_NAME), *((folder, MANIFEST_NAME) for folder in folders)]
    return tuple(_mark(folder, name) for folder, name in files)


def _mark(folder: Store, name: str) -> tuple[int, int] | None:
    if not folder.is_local or not folder.exists(name):
        return None
    status = os.stat(folder.path(name))
    return status.st_ino, status.st_ctime_ns


def _gathered(value: object, ranks: Ranks) -> list[Any]:
    """Return the values of all ranks, by rank."""
    values: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(values, value, group=ranks.control)
    return values
