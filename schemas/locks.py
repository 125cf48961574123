"""Who works on a run folder: locks that end with the process that took them, however it ends.

A lock is an advisory `flock` on a small file of the run folder, in which its holders say who they are; nobody waits for
one. Object stores have no such locks, and some network filesystems keep theirs to one machine or have none: there, and
in folders that a process may not write to, nothing is guarded.
"""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from schemas.errors import ContractError
from schemas.manifest import read_run
from schemas.storage import Store
from schemas.takedown import check_no_pending_takedown

TABLES_LOCK = "tables.lock"
"""Alone: who writes or removes tables. Shared: who reads them for long."""
TRAIN_LOCK = "train.lock"
"""Alone: who trains, or moves checkpoints."""
LOCKLESS_ERRORS = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""No folder, or one that may not be written to, or a filesystem without locks."""


@contextmanager
def lock_tables(run: Store, what: str) -> Iterator[None]:
    """This process alone writes or removes tables of a run; those of other runs that it stands on stay meanwhile.

    Raises ContractError, naming who holds them, if it does not get them at once.
    """
    with ExitStack() as held:
        _take(held, run, TABLES_LOCK, what)
        for home in _homes(run):
            _take(held, home, TABLES_LOCK, what, shared=True)
        yield


@contextmanager
def lock_training(run: Store, what: str) -> Iterator[None]:
    """This process alone trains in a run folder, and the tables that it reads, here or in other runs, stay meanwhile.

    Raises ContractError, naming who holds them, if it does not get them at once, or if a takedown of them was broken
    off: what is trained before its end is not in its certificate.
    """
    with ExitStack() as held:
        _take(held, run, TRAIN_LOCK, what)
        for home in (run, *_homes(run)):
            _take(held, home, TABLES_LOCK, what, shared=True)
            check_no_pending_takedown(home)
        yield


def _homes(run: Store) -> list[Store]:
    """The runs whose tables a run stands on."""
    ways = [f"{name}/{way}" for name, way in read_run(run).tables.items() if "/" in way]
    return [*{home.uri: home for way in ways for home in [run.child(f"{way}/../..")]}.values()]


def _take(held: ExitStack, run: Store, name: str, what: str, *, shared: bool = False) -> None:
    """Take a lock that `held` lets go. Raises ContractError if another process has it."""
    if not run.is_local:
        return
    try:
        file = _locked(Path(run.path(name)), shared)
    except OSError as error:
        if error.errno in LOCKLESS_ERRORS:
            return
        if error.errno != errno.EWOULDBLOCK:
            raise
        raise ContractError(
            f"{run.uri}/{name}: expected to `{what}` a run that nobody else works on, got {_holders(run, name)}. "
            "Wait for its end, or stop it."
        ) from error
    held.callback(_let_go, file, Path(run.path(name)))
    if not shared:
        os.ftruncate(file, 0)  # of holders that were killed
    since = datetime.now(UTC).isoformat(timespec="seconds")
    own = {"what": what, "pid": os.getpid(), "host": socket.gethostname(), "since": since}
    os.write(file, json.dumps(own).encode() + b"\n")


def _locked(path: Path, shared: bool) -> int:
    """The lock file, open and locked. Raises BlockingIOError if another process has it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.stat()):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # its last holder has removed it meanwhile


def _let_go(file: int, path: Path) -> None:
    """Unlock a lock file, and remove it where nobody else holds it."""
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    finally:
        os.close(file)


def _holders(run: Store, name: str) -> str:
    """Who holds a lock, as they have said it themselves; killed ones may have left their lines."""
    try:
        lines = [json.loads(line) for line in run.read_bytes(name).splitlines()]
    except (OSError, ValueError):
        lines = []
    alive = [one for one in lines if one["host"] != socket.gethostname() or _lives(one["pid"])]
    said = (f"`{one['what']}` (process {one['pid']} on {one['host']}, since {one['since']})" for one in alive or lines)
    return " and ".join(said) or "one that has not said who it is yet"


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
