"""Verify, before training, that every file of a dataset has the SHA-256 of its manifest.

A verified file is not read again while its size, its modification time, and its inode with the time of its last change
are unchanged. Several threads read files, each at the speed of SHA-256 (hashlib releases the interpreter lock). Results
are stored during the check, so that a killed check resumes.
"""

import hashlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from schemas.errors import ContractError
from schemas.ids import canonical_json
from schemas.long_work import LongWork
from schemas.paths import check_own_folders
from schemas.storage import Store
from schemas.tokens import Dataset

VERIFIED_NAME = "train/verified.json"
SETTLED_SECONDS = 2.0
"""A file that was modified less than this time before it was read is read again by the next check [s]; file clocks are
coarse."""
SAVE_SECONDS = 1.0
"""Minimum time between two writes of the results [s]. A killed check loses at most the results of this time."""
BLOCK_BYTES = 8 << 20
"""Number of bytes read at a time, in one request to an object store. Measured: 1.7 GB/s of CPU time per core from the
page cache, the same as for bytes in memory; 1.6 with blocks of 256 KiB."""
MAX_SHOWN = 10


@dataclass(frozen=True)
class _DatasetFile:
    """A file to verify: its expected SHA-256, and its size and times before it is read."""

    folder: Store
    path: str
    sha256: str
    size: int
    mtime_ns: int | None
    change: tuple[int, int] | None
    """Inode, and time of its last change [ns], of a local file: a program can set the modification time, but not this
    time, and a copy on another machine has another inode. None = the filesystem is not local."""

    @property
    def name(self) -> str:
        return self.folder.path(self.path)

    @property
    def mark(self) -> list[Any]:
        return [self.size, self.mtime_ns, self.sha256, *(self.change or ())]


ExpectedFile = tuple[Store, str, str]
"""Folder and path of a file, and its expected SHA-256."""


class _Verified:
    """The files that a run has verified, stored in the run folder; any thread may add a file."""

    def __init__(self, run: Store):
        check_own_folders(run, VERIFIED_NAME.partition("/")[0])
        self._run, self._lock = run, threading.Lock()
        self._marks: dict[str, list[Any]] = run.read_json(VERIFIED_NAME) if run.exists(VERIFIED_NAME) else {}
        if not isinstance(self._marks, dict):
            raise ContractError(
                f"{run.uri}/{VERIFIED_NAME}: expected a JSON object with an entry for each verified file, got "
                f"{self._marks!r:.40}. Delete this file; every file of the dataset is then verified again."
            )
        self._changed, self._written_at = False, time.monotonic()

    def holds(self, file: _DatasetFile) -> bool:
        """Return True if a file was verified and has not changed since."""
        return self._marks.get(file.name) == file.mark

    def forget(self, files: Iterable[_DatasetFile]) -> None:
        """Discard earlier results for these files."""
        before = len(self._marks)
        for file in files:
            self._marks.pop(file.name, None)
        self._changed = self._changed or len(self._marks) != before
        self.keep()

    def add(self, file: _DatasetFile, read_ns: int) -> None:
        """Add a verified file unless it was modified just before `read_ns`, the time at which reading it started."""
        if file.mtime_ns is None or file.mtime_ns >= read_ns - int(SETTLED_SECONDS * 1e9):
            return
        with self._lock:
            self._marks[file.name] = file.mark
            self._changed = True
            if time.monotonic() - self._written_at >= SAVE_SECONDS:
                self.keep()

    def keep(self) -> None:
        """Write the results to the run folder if they have changed."""
        if self._changed:
            # A reader of a run that it may not write to verifies all files each time: the results only save time.
            with suppress(OSError):
                self._run.write_atomic(VERIFIED_NAME, canonical_json(self._marks))
        self._changed, self._written_at = False, time.monotonic()


def verify_dataset(run: Store, dataset: Dataset, others: Iterable[ExpectedFile] = (), paranoid: bool = False) -> int:
    """Compare the SHA-256 of a dataset's files with the manifest; return the number of files that had to be read.

    The tokenizer's model file and `others` are compared too. See `verify_files`.
    """
    manifest = dataset.manifest
    files = [(dataset.folder, manifest.paths[entry.key], entry.sha256) for entry in manifest.content.files]
    tokenizer = (dataset.tokenizer_folder, dataset.tokenizer_path, dataset.tokenizer.sha256)
    return verify_files(run, dataset.folder.uri, [*files, *others, tokenizer], paranoid)


def verify_files(run: Store, where: str, expected: Iterable[ExpectedFile], paranoid: bool = False) -> int:
    """Compare the SHA-256 of files with the expected one; return the number of files that had to be read.

    A file is not read if it has not changed since an earlier check. `paranoid`: every file is read. Results are stored
    in `<run>/train/verified.json`. Raises ContractError that lists up to MAX_SHOWN missing or different files; `where`
    is the name of all files in this error.
    """
    problems: list[str] = []
    files = list(_list_files(expected, problems))
    verified = _Verified(run)
    if paranoid:
        verified.forget(files)
    to_read = [file for file in files if not verified.holds(file)]
    with LongWork("verify", sum(file.size for file in to_read), "bytes") as work:

        def check(file: _DatasetFile) -> str | None:
            started_ns = time.time_ns()
            digest = file_digest(file.folder, file.path, work)
            if digest != file.sha256:
                return f"{file.name}: expected SHA-256 {file.sha256}, got {digest}"
            verified.add(file, started_ns)
            return None

        # The largest files come first, so that no thread still reads a large file when the others have finished.
        pool = ThreadPoolExecutor(max_workers=os.cpu_count())
        try:
            order = sorted(to_read, key=lambda file: (-file.size, file.name))
            problems += sorted(filter(None, pool.map(check, order)))
        finally:
            pool.shutdown(cancel_futures=True)
            verified.keep()
    if problems:
        raise _mismatch_error(where, problems)
    return len(to_read)


def file_digest(folder: Store, path: str, work: LongWork | None = None) -> str:
    """Return the SHA-256 (hex) of a file. Raises ContractError if it cannot be read."""
    digest = hashlib.sha256()
    try:
        # Not memory-mapped: truncation of the file meanwhile would kill the process instead of raising an error.
        with folder.fs.open_input_file(folder.path(path)) as stream:
            block = memoryview(bytearray(BLOCK_BYTES))
            while size := stream.readinto(block):
                digest.update(block[:size])
                if work is not None:
                    work.add(size)
    except OSError as error:
        raise ContractError(
            f"{folder.uri}/{path}: expected a readable file, got an error: {error}. Restore the file from a backup."
        ) from error
    return digest.hexdigest()


def _mismatch_error(where: str, problems: list[str]) -> ContractError:
    more = f"\n  and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
    return ContractError(
        f"{where}: expected the files of the manifest, got {len(problems)} file(s) that differ. Run `penstock repair` "
        "on the run, which builds them again; for a file under train/packing, remove its folder.\n  "
        + "\n  ".join(problems[:MAX_SHOWN])
        + more
    )


def _list_files(expected: Iterable[ExpectedFile], problems: list[str]) -> Iterator[_DatasetFile]:
    """Yield the existing files to verify. The errors of missing files are appended to `problems`."""
    for folder, path, sha256 in expected:
        try:
            size = folder.size(path)
        except ContractError as error:
            problems.append(str(error))
            continue
        info = folder.fs.get_file_info(folder.path(path))
        yield _DatasetFile(folder, path, sha256, size, info.mtime_ns, _change_of(folder, path))


def _change_of(folder: Store, path: str) -> tuple[int, int] | None:
    # Without the number of the device, which may change when a disk is mounted again.
    if not folder.is_local:
        return None
    status = os.stat(folder.path(path))
    return status.st_ino, status.st_ctime_ns
