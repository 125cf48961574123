"""The check before training that the bytes on disk are the bytes the manifest promised.

A file that was found right is not read again while its size and modification time stay the same.
"""

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from schemas.errors import ContractError
from schemas.ids import canonical_json
from schemas.storage import Store
from schemas.tokens import Dataset

VERIFIED_NAME = "train/verified.json"
SETTLED_SECONDS = 2.0
"""A file changed within this time of being read is read again next time: clocks of file systems are that coarse."""
SHOWN = 10


@dataclass(frozen=True)
class _File:
    """A file, what it promised, and what it looked like when it was (or will be) read."""

    folder: Store
    path: str
    sha256: str
    size: int
    mtime_ns: int | None

    @property
    def name(self) -> str:
        return self.folder.path(self.path)

    @property
    def mark(self) -> list[Any]:
        return [self.size, self.mtime_ns, self.sha256]


Promised = tuple[Store, str, str]
"""Folder and path of a file, and the SHA-256 that it promised."""


def verify_dataset(run: Store, dataset: Dataset, others: Iterable[Promised] = ()) -> int:
    """The number of files whose SHA-256 was taken now; the rest were right before and have not changed since.

    Covers every file of the dataset, the tokenizer's model file, and `others`. Updates `<run>/train/verified.json`.
    Raises ContractError with the promised and the found digest of every file that differs or is missing.
    """
    known: dict[str, list[Any]] = run.read_json(VERIFIED_NAME) if run.exists(VERIFIED_NAME) else {}
    problems: list[str] = []
    files = list(_promised(dataset, others, problems))
    started_ns = time.time_ns()
    to_read = [file for file in files if known.get(file.name) != file.mark]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = list(pool.map(lambda file: file.folder.sha256(file.path), to_read))
    for file, sha256 in zip(to_read, found, strict=True):
        if sha256 != file.sha256:
            problems.append(f"{file.name}: promised SHA-256 {file.sha256}, found {sha256}")
    if problems:
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ContractError(
            f"{dataset.folder.uri}: {len(problems)} file(s) are not what the manifest promised; restore them or run "
            "the stage that writes them again (a packing folder: remove it)\n  " + "\n  ".join(problems[:SHOWN]) + more
        )
    settled_ns = started_ns - int(SETTLED_SECONDS * 1e9)
    marks = {file.name: file.mark for file in files if file.mtime_ns is not None and file.mtime_ns < settled_ns}
    if marks != known:
        run.write_atomic(VERIFIED_NAME, canonical_json(marks))
    return len(to_read)


def _promised(dataset: Dataset, others: Iterable[Promised], problems: list[str]) -> Iterator[_File]:
    """Every file that exists; the missing ones go to `problems`."""
    entries = [
        (dataset.folder, dataset.manifest.run.paths[entry.key], entry.sha256)
        for entry in dataset.manifest.content.files
    ]
    for folder, path, sha256 in [
        *entries,
        *others,
        (dataset.tokenizer_folder, dataset.tokenizer_path, dataset.tokenizer.sha256),
    ]:
        try:
            size = folder.size(path)
        except ContractError as error:
            problems.append(str(error))
            continue
        info = folder.fs.get_file_info(folder.path(path))
        yield _File(folder, path, sha256, size, info.mtime_ns)
