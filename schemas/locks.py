"""Locks on a run folder: each is released when the process that holds it ends, even if that process is killed.

A lock is an advisory `flock` on a small file of the run folder. Its holders write their process id and command to that
file. An attempt to lock what another process holds raises an error at once. On S3 a lock is a lease; see `leases.py`.
Nothing is locked on other object stores, which a warning says: pyarrow.fs has no conditional writes for them. Nor is it
on filesystems without `flock`, and in folders without write permission. On some network filesystems a lock is visible
only on one machine.
"""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from schemas.errors import UNWRITABLE, ContractError
from schemas.leases import hold_lease, hold_reader
from schemas.lock_files import EXPORT_LOCK, TABLES_LOCK, TRAIN_LOCK, describe_holders
from schemas.logs import LOGGER
from schemas.s3_requests import SCHEME
from schemas.storage import Store, open_own
from schemas.takedown import check_no_pending_takedown
from schemas.versions import source_runs

LOCKLESS_ERRORS = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM),
    *(errno.EROFS, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP),
)
"""Error codes of a missing folder, a folder without write permission, or a filesystem without locks."""


@contextmanager
def lock_tables(run: Store, what: str, others: Sequence[Store] = ()) -> Iterator[None]:
    """Hold an exclusive lock on the tables of a run, and shared locks on the tables of other runs that it reads.

    `what`: the name of this command in the errors of other processes. `others`: further runs that the command reads.
    Raises ContractError if another process holds a
    lock.
    """
    with ExitStack() as locks:
        _take(locks, run, TABLES_LOCK, what)
        reads = (source for reader in (run, *others) for source in (reader, *source_runs(reader)))
        sources = {source.uri: source for source in reads if source.uri != run.uri}
        for source in sources.values():
            _take(locks, source, TABLES_LOCK, what, shared=True)
        yield


@contextmanager
def lock_training(run: Store, what: str, others: Sequence[Store] = ()) -> Iterator[None]:
    """Hold an exclusive lock on training in a run folder, and shared locks on the tables that the training reads.

    `what`: the name of this command in the errors of other processes. `others`: runs whose tables `run` will use.
    Raises ContractError if another process holds a lock, or if a takedown of these tables was interrupted.
    """
    with ExitStack() as locks:
        _take(locks, run, TRAIN_LOCK, what)
        sources = {source.uri: source for own in (run, *others) for source in (own, *source_runs(own))}
        for source in sources.values():
            _take(locks, source, TABLES_LOCK, what, shared=True)
            # The certificate of an unfinished takedown would not list the checkpoints that are trained now.
            check_no_pending_takedown(source)
        yield


@contextmanager
def lock_checkpoints(run: Store, what: str) -> Iterator[None]:
    """Hold the exclusive lock on training in a run folder alone, for a command that holds that on its tables too.

    `what`: the name of this command in the errors of other processes. Raises ContractError if another process holds the
    lock.
    """
    with ExitStack() as locks:
        _take(locks, run, TRAIN_LOCK, what)
        yield


@contextmanager
def lock_export(out: Store, what: str) -> Iterator[None]:
    """Hold an exclusive lock on the folder of an export, which is made, and removed at the end if nothing was written.

    `what`: the name of this command in the errors of other processes. Raises ContractError if another process holds the
    lock.
    """
    folder = Path(out.root) if out.is_local else None
    with ExitStack() as locks:
        if folder is not None and not folder.exists():
            out.make_parent(EXPORT_LOCK)
            locks.callback(_remove_empty, folder)
        _take(locks, out, EXPORT_LOCK, what)
        yield


def _remove_empty(folder: Path) -> None:
    """Remove a folder without files."""
    with suppress(OSError):  # it has files
        folder.rmdir()


def _take(locks: ExitStack, run: Store, name: str, what: str, *, shared: bool = False) -> None:
    """Acquire the lock file `name` of a run until `locks` is closed.

    Does nothing if the filesystem does not support file locks. Raises ContractError if another process holds the lock.
    """
    if run.uri.startswith(SCHEME):
        locks.enter_context((hold_reader if shared else hold_lease)(run, name, what))
    elif not run.is_local and not shared:
        LOGGER.warning(
            f"penstock: {run.uri}: this store has no locks, so nothing keeps two processes from writing this run "
            "folder. Run one at a time."
        )
    if not run.is_local:
        return
    try:
        file = _locked(Path(run.path(name)), shared)
    except OSError as error:
        if error.errno in LOCKLESS_ERRORS:
            return
        if error.errno != errno.EWOULDBLOCK:
            raise
        holders = describe_holders(Path(run.path(name)))
        raise ContractError(
            f"{run.uri}/{name}: expected a free lock for `{what}`, got one held by {holders}. "
            "Wait until that process ends, or stop it."
        ) from error
    locks.callback(_release, file, Path(run.path(name)))
    if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        return  # the file of another user
    if not shared:
        os.ftruncate(file, 0)  # removes the lines of killed processes
    since = datetime.now(UTC).isoformat(timespec="seconds")
    own = {"what": what, "pid": os.getpid(), "host": socket.gethostname(), "since": since}
    try:
        os.write(file, json.dumps(own).encode() + b"\n")
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        # The lock is held all the same, so that `penstock gc` can free a full disk.


def _locked(path: Path, shared: bool) -> int:
    """Open and lock a lock file, and return its file descriptor. Raises BlockingIOError if the lock is held."""
    while True:
        file = _opened(path)
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.stat()):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # the process that held the lock last has removed the file meanwhile, so open it again


def _opened(path: Path) -> int:
    """Open a lock file, or make it. One of another user is opened for reading, which is enough to lock it."""
    try:
        return open_own(str(path), os.O_RDWR | os.O_APPEND)
    except PermissionError:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path)) from error
            raise


def _release(file: int, path: Path) -> None:
    """Unlock a lock file, and remove the file if no other process holds the lock."""
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    finally:
        os.close(file)
