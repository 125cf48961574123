"""A cache of token shards on a local disk, of bounded size, which all ranks of a machine share.

A file in the cache is whole and has the SHA-256 of its manifest: it gets its name after it was compared. A reader holds
a shared lock on a file for as long as it maps the file, and only unlocked files are removed. A process that is killed
leaves its locks released, and at most an incomplete file, which the next process removes. To make room, the cache
removes the file whose next use is the latest (Belady 1966, "A study of replacement algorithms"); training knows the
order in which it will read.
"""

import errno
import fcntl
import hashlib
import math
import mmap
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.errors import ConfigError, ContractError
from schemas.ids import digest_of
from schemas.storage import CheckedPath, Store
from schemas.tokens import Dataset
from train.remote.transfer import download

FILES = "files"
"""Folder of the cache with a folder for each dataset, whose files have the names of their SHA-256."""
PARTIAL = ".partial"
OWN_FOLDER, OWN_FILE = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}"), re.compile(rf"[0-9a-f]{{64}}({re.escape(PARTIAL)})?")
"""Names of the folders and files that a cache makes; others are neither counted nor removed."""
LOCK = "lock"
FREE_SHARE = 0.8
"""Share of the free disk space that a cache without a bound may fill."""
ROOM_SECONDS = 600.0
"""Time after which a reader gives up waiting for room in the cache [s]."""
POLL_SECONDS = 0.05


class ShardCache:
    """The files of one dataset in a cache folder. Several processes and threads may use the same folder."""

    def __init__(self, folder: Path, dataset: Dataset, num_bytes: int | None):
        """`num_bytes`: maximum size of all files in the folder; None = FREE_SHARE of the free disk space."""
        self.root, self._origin = folder / FILES, dataset.folder
        self.folder = self.root / folder_name(dataset)
        self._make_folders()
        self.num_bytes = num_bytes or int(FREE_SHARE * (shutil.disk_usage(self.root).free + self._used()))
        self.next_use: Callable[[str], float] = lambda sha256: math.inf
        """Returns the next step that reads the file with this SHA-256; infinity = none."""
        self.on_full: Callable[[], None] = lambda: None
        """Called when there is no room, so that this process closes files."""

    def open(self, path: CheckedPath) -> pa.BufferReader:
        """Return a shard from the cache, memory-mapped; download it if it is missing.

        Raises ContractError if the store has no such file, or if there is no room for the file.
        """
        while (content := self._mapped(path)) is None:
            self._fetch(path, None)
        return pa.BufferReader(content)

    def fetch(self, path: CheckedPath, first_use: float) -> bool:
        """Download a shard that a later step reads first; return False if there is no room for the shard yet.

        Only files with a later next use than `first_use` are removed for the shard.
        """
        return self.has(path) or self._fetch(path, first_use)

    def has(self, path: CheckedPath) -> bool:
        """Return True if a shard is in the cache."""
        return self._place(path).exists()

    def remove_older(self) -> None:
        """Remove the files of other versions of this dataset, such as the one before a takedown."""
        own = self.folder.name.partition("-")[0]
        for folder in [each for each in self._folders() if each != self.folder and each.name.startswith(f"{own}-")]:
            for file in _own_files(folder):
                _remove_unlocked(file)
            with suppress(OSError):  # not empty: another process reads a file
                folder.rmdir()

    def _make_folders(self) -> None:
        for own in (self.root, self.folder):
            make_private(own)

    def _place(self, path: CheckedPath) -> Path:
        return self.folder / path.sha256

    def _mapped(self, path: CheckedPath) -> pa.Buffer | None:
        """Return the content of a file, which stays locked as long as the content is referenced; None if it is missing.

        The memory map duplicates the descriptor, so that the kernel releases the lock when the map ends.
        """
        try:
            file = os.open(self._place(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            state = os.fstat(file)
            if not state.st_nlink:
                return None  # removed before it was locked
            if state.st_size != path.num_bytes:
                os.unlink(self._place(path))
                return None
            return pa.py_buffer(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(file)

    def _fetch(self, path: CheckedPath, first_use: float | None) -> bool:
        """Download a file, or wait until another process has; return False if `first_use` must wait for room."""
        self._make_folders()  # someone may have deleted the cache
        place = self._place(path)
        partial = place.with_name(place.name + PARTIAL)
        file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # A blocking lock could wait for a reader: the incomplete file gets its final name under this lock.
            while not _is_locked(file):
                if place.exists():
                    return True
                time.sleep(POLL_SECONDS)
            if place.exists() or not os.fstat(file).st_nlink:
                return True  # another process was faster, or has removed this incomplete file
            os.ftruncate(file, 0)  # what a killed process has left
            try:
                if not self._reserve(file, path.num_bytes, first_use):
                    partial.unlink()
                    return False
                download(self._origin, path, file)
                os.fsync(file)
                with self._locked():  # a process that counts the files finds one of the two names
                    os.rename(partial, place)
            except BaseException as error:
                partial.unlink(missing_ok=True)
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise self._disk_full(path) from error
                raise
            return True
        finally:
            os.close(file)

    def _reserve(self, file: int, num_bytes: int, first_use: float | None) -> bool:
        """Allocate the bytes of an incomplete file, after other files were removed for it."""
        deadline = time.monotonic() + ROOM_SECONDS
        while True:
            with self._locked():
                if self._make_room(num_bytes, first_use):
                    os.posix_fallocate(file, 0, num_bytes)
                    return True
            if first_use is not None:
                return False
            self.on_full()
            if time.monotonic() > deadline:
                raise ContractError(
                    f"{self.root}: expected room for a shard of {num_bytes:,} bytes in a cache of "
                    f"{self.num_bytes:,} bytes, got only files in use. Raise train.cache_bytes."
                )
            time.sleep(POLL_SECONDS)

    def _make_room(self, num_bytes: int, first_use: float | None) -> bool:
        """Remove files, those with the latest next use first; return True if there is room. The caller holds LOCK."""
        files = [*self._list()]
        excess = sum(size for _, size in files) + num_bytes - self.num_bytes
        if excess <= 0:
            return True
        uses = {place: self._next_use(place) for place, _ in files}
        for place, size in sorted(files, key=lambda each: -uses[each[0]]):
            if (first_use is None or uses[place] > first_use) and _remove_unlocked(place):
                excess -= size
            if excess <= 0:
                return True
        return False

    def _next_use(self, place: Path) -> float:
        """Return the next use of a file; infinity for one of another dataset, and for an incomplete one.

        An incomplete file is locked while it is downloaded. One that is not locked is of a killed process.
        """
        is_own = place.parent == self.folder and not place.name.endswith(PARTIAL)
        return self.next_use(place.name) if is_own else math.inf

    def _list(self) -> Iterator[tuple[Path, int]]:
        """Yield every file in the cache folder, of all datasets, with its size."""
        for folder in self._folders():
            for place in _own_files(folder):
                with suppress(FileNotFoundError):
                    yield place, place.lstat().st_size

    def _folders(self) -> list[Path]:
        """Return the folders of all datasets."""
        found = [each for each in self.root.iterdir() if OWN_FOLDER.fullmatch(each.name)]
        return [each for each in found if each.is_dir() and not each.is_symlink()]

    def _used(self) -> int:
        return sum(size for _, size in self._list())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock under which files are removed, and room is reserved."""
        file = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _disk_full(self, path: CheckedPath) -> ConfigError:
        return ConfigError(
            f"{self.root}: expected {path.num_bytes:,} bytes of free disk space for a shard, got a full disk. Free "
            "disk space, or lower train.cache_bytes."
        )


class CachedFolder(Store):
    """The folder of a dataset, whose token shards are read from a cache. Other files are read as in any folder."""

    def __init__(self, folder: Store, cache: ShardCache, shards: frozenset[str]):
        """`shards`: the paths of the token shards."""
        self.__dict__.update(vars(folder))
        self.origin = folder
        self._cache, self._shards, self._compared = cache, shards, set[str]()

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.address,)

    @property
    def repair_fix(self) -> str:
        """The last sentence of an error on a damaged file: it is the copy, which was compared when it was made."""
        return f"Delete the folder {self._cache.folder}, which is filled again."

    def open_unchecked(self, name: str) -> Any:
        """Open a file; a token shard is memory-mapped from the cache."""
        if isinstance(name, CheckedPath) and name in self._shards:
            return self._cache.open(name)
        return super().open_unchecked(name)

    def open_input(self, path: CheckedPath) -> Any:
        """Open a file of the dataset. The first time that a process opens a shard here, its SHA-256 is compared."""
        if path not in self._shards:
            return super().open_input(path)
        file = self._cache.open(path)
        if path not in self._compared:
            self._compare(path, hashlib.sha256(file.read_buffer()).hexdigest())
            file.seek(0)
            self._compared.add(path)
        return file


def cached(dataset: Dataset, cache: ShardCache) -> Dataset:
    """Return the same dataset with its token shards read from a cache."""
    shards = frozenset(str(shard.path) for own in dataset.streams.values() for shard in own)
    return replace(dataset, folder=CachedFolder(dataset.folder, cache, shards))


def uncached(dataset: Dataset) -> Dataset:
    """Return the same dataset with its token shards read where they are."""
    folder = dataset.folder
    return replace(dataset, folder=folder.origin) if isinstance(folder, CachedFolder) else dataset


def folder_name(dataset: Dataset) -> str:
    """Return the name of a dataset's folder in a cache: of the run that holds the dataset, then of its content."""
    return f"{digest_of(dataset.folder.child('../..').uri)[:16]}-{dataset.digest[:16]}"


def make_private(folder: Path) -> None:
    """Make a folder of this user, with the mode 0700.

    Raises ConfigError if it cannot be made, or if it exists and another user can write to it: the checksums of record
    batches are compared once, so no one else may change the files later.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"train.cache_dir: expected a folder that can be written to, got {error.strerror or error} for {folder}. "
            "Name a folder on a local disk."
        ) from error
    others = state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or others:
        got = (
            "a link" if stat.S_ISLNK(state.st_mode) else f"mode {stat.S_IMODE(state.st_mode):o} and user {state.st_uid}"
        )
        raise ConfigError(
            f"train.cache_dir: expected a folder that only user {os.geteuid()} can write to, got {got} for {folder}. "
            "Name another folder, or remove this one."
        )


def _own_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a dataset's folder that a cache made."""
    with suppress(FileNotFoundError):  # another process has removed the folder
        yield from (place for place in folder.iterdir() if OWN_FILE.fullmatch(place.name))


def _is_locked(file: int) -> bool:
    """Lock an open file exclusively; return False if another holds a lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_unlocked(place: Path) -> bool:
    """Remove a file that no process has locked; return False if one has."""
    try:
        file = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if not _is_locked(file):
            return False
        place.unlink(missing_ok=True)
        return True
    finally:
        os.close(file)
