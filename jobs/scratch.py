"""The private folder of a Spark session on this machine, for its messages and temporary files.

Shuffle files hold addresses as they were crawled, and Spark makes them readable for everybody. So they lie in a folder
that only this user can open. It is removed at the end of the session. If its processes are killed, the next session
removes it: a lock shows that none of them runs.
"""

import fcntl
import json
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from schemas.logs import HANDLER, LOGGER
from schemas.text import printable_json

PREFIX = "penstock-spark-"
OWNER = "owner.lock"
"""The file that the processes of a session hold locked. A folder without it is left as it is."""
LOCAL = "local"
"""The folder of Spark's temporary files inside a private folder."""


class Scratch:
    """The private folders of a session, one below each folder for temporary files."""

    def __init__(self, folders: Sequence[Path], locks: Sequence[int]):
        self.folders = tuple(folders)
        self.locks = tuple(locks)
        """File descriptors of the locked files; the JVM inherits them."""

    @property
    def log(self) -> Path:
        """The file for the messages of the JVM."""
        return self.folders[0] / "spark.log"

    @property
    def local_folders(self) -> tuple[Path, ...]:
        """The folders for Spark's temporary files."""
        return tuple(folder / LOCAL for folder in self.folders)

    def keep_log(self) -> None:
        """Leave the file `log` when the session ends; later sessions do not remove it."""
        (self.folders[0] / OWNER).unlink()


@contextmanager
def open_scratch(parents: Sequence[Path]) -> Iterator[Scratch]:
    """Make a private folder (mode 0700) in each of these folders, and remove it after the block.

    Folders that sessions of this user left there, whose processes have all ended, are removed first.
    """
    with ExitStack() as held:
        folders, locks = [], []
        for parent in parents:
            remove_abandoned(parent)
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            held.callback(_remove, folder)
            locks.append(_lock_new(folder))  # first: a folder without it is never removed
            held.callback(os.close, locks[-1])
            (folder / LOCAL).mkdir()
            folders.append(folder)
        yield Scratch(folders, locks)


SPARK_LOGGER = LOGGER.getChild("spark")
"""The logger of the messages of Spark, if the log is JSON."""
READ_SECONDS = 0.5
"""Time between two looks at the file with the messages of the JVM [s]."""
OF_A_WORKER = f'"logger": "{LOGGER.name}'
"""Part of a line of a worker."""
LEVEL = re.compile(r"\S+ \S+ (WARN|ERROR|FATAL) ")
"""The level in a message of Spark."""


@contextmanager
def followed(log: Path, everything: bool) -> Iterator[None]:
    """Log the lines of workers that arrive in the file with the messages of the JVM, as JSON lines, during a block.

    `everything`: log the messages of the JVM too.
    """
    ended = threading.Event()

    def follow() -> None:
        rest = b""
        with log.open("rb") as file:
            while True:
                is_last = ended.wait(READ_SECONDS)  # first: what has been written by then is read once more
                *lines, rest = (rest + file.read()).split(b"\n")
                for line in lines:
                    _log_line(line.decode(errors="replace"), everything)
                if is_last:
                    _log_line(rest.decode(errors="replace"), everything)
                    return

    log.touch()
    thread = threading.Thread(target=follow, name="messages of Spark", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _log_line(line: str, everything: bool) -> None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if isinstance(values, dict) and str(values.get("logger")).startswith(LOGGER.name):
        HANDLER.write(printable_json(values))
    elif (everything or OF_A_WORKER in line) and line.strip():  # a message of the JVM may divide a line of a worker
        level = LEVEL.match(line)
        names = {"WARN": logging.WARNING, "ERROR": logging.ERROR, "FATAL": logging.CRITICAL}
        SPARK_LOGGER.log(names[level[1]] if level else logging.INFO, line)


def _lock_new(folder: Path) -> int:
    """Return a descriptor of the locked file OWNER of a new folder. It is never there without its lock."""
    unlocked = folder / f"{OWNER}.new"
    lock = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unlocked.rename(folder / OWNER)
    return lock


def _remove(folder: Path) -> None:
    if (folder / OWNER).exists():
        shutil.rmtree(folder, ignore_errors=True)
    else:  # the messages are kept
        shutil.rmtree(folder / LOCAL, ignore_errors=True)


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove the private folders of sessions of this user whose processes have all ended, and return them."""
    removed = []
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            state = folder.lstat()
            if state.st_uid != os.getuid() or folder.is_symlink():
                continue
            lock = os.open(folder / OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # it has no lock file, or has just been removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a process of the session runs, or the filesystem has no locks
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        finally:
            os.close(lock)
    return removed
