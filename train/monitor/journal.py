"""A file that grows by whole lines, written by one process and read by anyone at any time.

A disk that is full does not end a run: what it refuses waits in memory, said once, and is written with the next line.
What a killed process left of a line is closed by the next process that opens the file, and read by nobody.
"""

import os
import sys

from schemas.errors import UNWRITABLE
from schemas.storage import Store

NEWLINE = b"\n"


class Journal:
    """An open file of a run on the local disk; `close` after use."""

    def __init__(self, run: Store, name: str):
        run.make_parent(name)
        self._waiting, self._refused = b"", False
        # Without a buffer of Python's own: a line that was appended is the kernel's, and outlives a killed process.
        self._file = open(run.path(name), "a+b", buffering=0)  # noqa: SIM115 (stays open for the run)
        size = self._file.seek(0, os.SEEK_END)
        if size:
            self._file.seek(size - 1)
            self._waiting = b"" if self._file.read(1) == NEWLINE else NEWLINE

    def append(self, line: bytes, durable: bool = False) -> None:
        """Append a line, given without its end; `durable` also flushes it to the disk."""
        self._waiting += line + NEWLINE
        try:
            if durable:
                self.sync()
            else:
                self._write()
        except OSError as error:
            self._say(error)

    def sync(self) -> None:
        """Make every line so far durable. Raises OSError if the disk refuses."""
        self._write()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; lines that the disk still refuses are lost, loudly."""
        try:
            self._write()
        except OSError as error:
            self._refused = False
            self._say(error, "lost")
        self._file.close()

    def _write(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]
        self._refused = False

    def _say(self, error: OSError, fate: str = "kept in memory until it can be written") -> None:
        if error.errno not in UNWRITABLE:
            raise error
        if not self._refused:
            lines = f"{self._waiting.count(NEWLINE)} line(s) {fate}"
            print(f"penstock: {self._file.name}: {UNWRITABLE[error.errno]}; {lines}", file=sys.stderr, flush=True)
        self._refused = True
