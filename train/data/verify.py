"""Verify, before training, that every file of a dataset has the SHA-256 of its manifest.

A verified file is not read again while its size, its modification time, and its inode with the time of its last change
are unchanged. Several threads read files, each at the speed of SHA-256 (hashlib releases the interpreter lock). Results
are stored during the check, so that a killed check resumes. Machines that see the same files may share the check.
"""

import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as pafs

from schemas.errors import ContractError
from schemas.ids import canonical_json
from schemas.long_work import LongWork
from schemas.paths import check_own_folders
from schemas.storage import Store
from schemas.tokens import Dataset

VERIFIED_NAME = "train/verified.json"
RESULTS = r"verified(-\d+)?\.json"
"""Names of the files of results: VERIFIED_NAME, and those of `share_name`."""
SETTLED_SECONDS = 2.0
"""A file that was modified less than this time before it was read is read again by the next check [s]; file clocks are
coarse."""
SAVE_SECONDS = 1.0
"""Minimum time between two writes of the results [s]. A killed check loses at most the results of this time."""
BLOCK_BYTES = 8 << 20
"""Number of bytes read at a time, in one request to an object store. Measured: 1.7 GB/s of CPU time per core from the
page cache, the same as for bytes in memory; 1.6 with blocks of 256 KiB."""
STAT_THREADS = 32
"""Threads that ask for sizes and times at once; on storage over a network each request takes 0.2 to 1 ms."""
STAT_FILES = 128
"""Files that a thread asks for in sequence."""
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


def share_name(share: int) -> str:
    """Return the path, in a run, of the results of one of the machines that share a check; 0 = of the first."""
    return f"train/verified-{share}.json" if share else VERIFIED_NAME


class _Verified:
    """The files that a run has verified, stored in the run folder; any thread may add a file."""

    def __init__(self, run: Store, share: int = 0):
        """`share`: number of this machine among those that share the check; each stores its own results."""
        check_own_folders(run, VERIFIED_NAME.partition("/")[0])
        self._run, self._lock, self._name = run, threading.Lock(), share_name(share)
        self._marks: dict[str, list[Any]] = {}
        for name in _results(run):
            self._marks |= _read_marks(run, name)
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

    def keep(self, even_unchanged: bool = False) -> None:
        """Write the results to the run folder if they have changed."""
        if self._changed or even_unchanged:
            # A reader of a run that it may not write to verifies all files each time: the results only save time.
            with suppress(OSError):
                self._run.write_atomic(self._name, canonical_json(self._marks))
        self._changed, self._written_at = False, time.monotonic()


def _results(run: Store) -> list[str]:
    """Return the files of results, those of shares too. The folder is listed: a mounted folder may remember for a while
    that a name did not exist."""
    folder = run.path("train")
    listed = run.fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    return sorted(f"train/{info.base_name}" for info in listed if re.fullmatch(RESULTS, info.base_name))


def _read_marks(run: Store, name: str) -> dict[str, list[Any]]:
    marks: dict[str, list[Any]] = run.read_json(name)
    if not isinstance(marks, dict):
        raise ContractError(
            f"{run.uri}/{name}: expected a JSON object with an entry for each verified file, got "
            f"{marks!r:.40}. Delete this file; every file of the dataset is then verified again."
        )
    return marks


def join_shares(run: Store) -> None:
    """Join the results of machines that have shared a check in `<run>/train/verified.json`, and delete the others."""
    names = [name for name in _results(run) if name != VERIFIED_NAME]
    if names:
        _Verified(run).keep(even_unchanged=True)
    for name in names:
        run.delete(name)


def dataset_files(dataset: Dataset) -> list[ExpectedFile]:
    """Return the files of a dataset with its tokenizer's model file."""
    manifest = dataset.manifest
    files = [(dataset.folder, manifest.paths[entry.key], entry.sha256) for entry in manifest.content.files]
    return [*files, (dataset.tokenizer_folder, dataset.tokenizer_path, dataset.tokenizer.sha256)]


def verify_dataset(run: Store, dataset: Dataset, others: Iterable[ExpectedFile] = (), paranoid: bool = False) -> int:
    """Compare the SHA-256 of a dataset's files with the manifest; return the number of files that had to be read.

    The tokenizer's model file and `others` are compared too. See `verify_files`.
    """
    return verify_files(run, dataset.folder.uri, [*dataset_files(dataset), *others], paranoid)


def verify_share(run: Store, where: str, expected: Iterable[ExpectedFile], share: int, num_shares: int) -> int:
    """Verify every `num_shares`-th of these files as `verify_files` does, from number `share` on.

    Machines that see the same files call it with a share each, then `join_shares`. Shares have about the same size.
    """
    # All machines list the files in the same order, the largest first; sizes of a manifest need no request.
    files = sorted(expected, key=lambda file: (-getattr(file[1], "num_bytes", 0), file[0].path(file[1])))
    return _verify(where, files[share::num_shares], _Verified(run, share), paranoid=False)


def verify_files(run: Store, where: str, expected: Iterable[ExpectedFile], paranoid: bool = False) -> int:
    """Compare the SHA-256 of files with the expected one; return the number of files that had to be read.

    A file is not read if it has not changed since an earlier check. `paranoid`: every file is read. Results are stored
    in `<run>/train/verified.json`. Raises ContractError that lists up to MAX_SHOWN missing or different files; `where`
    is the name of all files in this error.
    """
    return _verify(where, list(expected), _Verified(run), paranoid)


def _verify(where: str, expected: Sequence[ExpectedFile], verified: _Verified, paranoid: bool) -> int:
    problems: list[str] = []
    files = list_files(expected, problems)
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


def list_files(expected: Sequence[ExpectedFile], problems: list[str]) -> list[_DatasetFile]:
    """Return the existing files to verify, with their sizes and times. The errors of others are added to `problems`."""
    blocks = [expected[first : first + STAT_FILES] for first in range(0, len(expected), STAT_FILES)]
    with ThreadPoolExecutor(STAT_THREADS) as pool:
        found = [file for block in pool.map(_describe_block, blocks) for file in block]
    problems += [file for file in found if isinstance(file, str)]
    return [file for file in found if not isinstance(file, str)]


def _describe_block(block: Sequence[ExpectedFile]) -> list[_DatasetFile | str]:
    return [_describe(*file) for file in block]


def _describe(folder: Store, path: str, sha256: str) -> _DatasetFile | str:
    """Return a file with its size and times, from one request; the error if there is no such file."""
    if folder.is_local:
        with suppress(OSError):
            status = os.stat(folder.path(path))
            if stat.S_ISREG(status.st_mode):
                return _DatasetFile(folder, path, sha256, status.st_size, status.st_mtime_ns, _change_of(status))
    else:
        info = folder.fs.get_file_info(folder.path(path))
        if info.type == pafs.FileType.File:
            return _DatasetFile(folder, path, sha256, int(info.size), info.mtime_ns, None)
    try:
        folder.size(path)  # raises the error of a missing file, or of a folder
    except ContractError as error:
        return str(error)
    return f"{folder.uri}/{path}: expected a file that stays, got one that was just written. Start again."


def _change_of(status: os.stat_result) -> tuple[int, int]:
    # Without the number of the device, which may change when a disk is mounted again.
    return status.st_ino, status.st_ctime_ns
