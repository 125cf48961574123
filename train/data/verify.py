"""The check before training that the bytes on disk are the bytes the manifest states.

A file that was found right is not read again while its size and modification time stay the same. Files are read by
several threads, each at the speed of SHA-256 (hashlib leaves the interpreter free meanwhile), and what is right is
remembered as it is found, so a check that was killed goes on where it was.
"""

import hashlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from schemas.errors import ContractError
from schemas.ids import canonical_json
from schemas.storage import Store
from schemas.tokens import Dataset
from train.monitor.progress import LongWork

VERIFIED_NAME = "train/verified.json"
SETTLED_SECONDS = 2.0
"""A file changed within this time of being read is read again next time: clocks of file systems are that coarse."""
KEPT_SECONDS = 1.0
"""Least time between two writes of what was found right: what a killed check has to read again, and its large files."""
BLOCK_BYTES = 8 << 20
"""Bytes read at once: a request each on an object store. Measured: 1.7 GB/s of CPU time a core from the page cache, as
for bytes that lie in memory; blocks of 256 KiB 1.6."""
SHOWN = 10


@dataclass(frozen=True)
class _File:
    """A file, what it states, and what it looked like when it was (or will be) read."""

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
"""Folder and path of a file, and the SHA-256 that it states."""


class _Verified:
    """The marks of files that were found right, in the run folder; any thread may add one."""

    def __init__(self, run: Store):
        self._run, self._lock = run, threading.Lock()
        self._marks: dict[str, list[Any]] = run.read_json(VERIFIED_NAME) if run.exists(VERIFIED_NAME) else {}
        if not isinstance(self._marks, dict):
            raise ContractError(
                f"{run.uri}/{VERIFIED_NAME}: expected files by name, got {self._marks!r:.40}. Remove it."
            )
        self._changed, self._kept = False, time.monotonic()

    def holds(self, file: _File) -> bool:
        """Whether a file was right and has not changed since."""
        return self._marks.get(file.name) == file.mark

    def forget(self, files: Iterable[_File]) -> None:
        """Trust no earlier check of these files."""
        before = len(self._marks)
        for file in files:
            self._marks.pop(file.name, None)
        self._changed = self._changed or len(self._marks) != before
        self.keep()

    def add(self, file: _File, read_ns: int) -> None:
        """Remember a file that was found right, read from `read_ns` on."""
        if file.mtime_ns is None or file.mtime_ns >= read_ns - int(SETTLED_SECONDS * 1e9):
            return
        with self._lock:
            self._marks[file.name] = file.mark
            self._changed = True
            if time.monotonic() - self._kept >= KEPT_SECONDS:
                self.keep()

    def keep(self) -> None:
        """Write what is new."""
        if self._changed:
            self._run.write_atomic(VERIFIED_NAME, canonical_json(self._marks))
        self._changed, self._kept = False, time.monotonic()


def verify_dataset(run: Store, dataset: Dataset, others: Iterable[Promised] = (), paranoid: bool = False) -> int:
    """The number of files whose SHA-256 was taken now; the rest were right before and have not changed since.

    Covers every file of the dataset, the tokenizer's model file, and `others`; `paranoid`: earlier checks are forgotten
    and every file is read. Updates `<run>/train/verified.json` as it goes. Raises ContractError with the expected and
    the found digest of every file that differs or is missing.
    """
    problems: list[str] = []
    files = list(_promised(dataset, others, problems))
    verified = _Verified(run)
    if paranoid:
        verified.forget(files)
    to_read = [file for file in files if not verified.holds(file)]
    with LongWork("verify", sum(file.size for file in to_read), "B") as work:

        def check(file: _File) -> str | None:
            started_ns = time.time_ns()
            found = file_digest(file.folder, file.path, work)
            if found != file.sha256:
                return f"{file.name}: expected SHA-256 {file.sha256}, got {found}"
            verified.add(file, started_ns)
            return None

        # The largest first: no thread is left with a large file when the others are done.
        pool = ThreadPoolExecutor(max_workers=os.cpu_count())
        try:
            order = sorted(to_read, key=lambda file: (-file.size, file.name))
            problems += sorted(filter(None, pool.map(check, order)))
        finally:
            pool.shutdown(cancel_futures=True)
            verified.keep()
    if problems:
        raise _not_as_promised(dataset, problems)
    return len(to_read)


def file_digest(folder: Store, path: str, work: LongWork | None = None) -> str:
    """The SHA-256 (hex) of a file. Raises ContractError if it cannot be read."""
    digest = hashlib.sha256()
    try:
        # Not memory-mapped: a file that is cut meanwhile would end the process, not this check.
        with folder.fs.open_input_file(folder.path(path)) as stream:
            block = memoryview(bytearray(BLOCK_BYTES))
            while size := stream.readinto(block):
                digest.update(block[:size])
                if work is not None:
                    work.add(size)
    except OSError as error:
        raise ContractError(f"{folder.uri}/{path}: expected a file, got {error}. Restore it.") from error
    return digest.hexdigest()


def _not_as_promised(dataset: Dataset, problems: list[str]) -> ContractError:
    more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return ContractError(
        f"{dataset.folder.uri}: {len(problems)} file(s) are not what the manifest expected. Restore them or run "
        "the stage that writes them again (a packing folder: remove it)\n  ." + "\n  ".join(problems[:SHOWN]) + more
    )


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
