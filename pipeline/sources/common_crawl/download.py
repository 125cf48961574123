"""Files on a server as streams: one request for a file, read ahead, which resumes where a connection breaks.

Bytes are delivered once and in order whatever a server does: it may refuse, wait, break off, send less or more than it
announced, or ignore or misread a range. After a break, the last bytes that were read are asked for again and compared.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from pipeline.sources.common_crawl.requests import (
    Answer,
    BusyError,
    ChangedFileError,
    RemoteFile,
    UnreachableFileError,
)

AHEAD_BYTES = 16 << 20
"""Bytes that are read ahead of the reader."""
BEHIND_BYTES = 4 << 20
"""Bytes that are kept after they were read, because readers go back by up to a block."""
JUMP_BYTES = 1 << 20
"""Distance to a position after the bytes that were read ahead, up to which a stream reads on to reach it."""
COMPARED_BYTES = 64
"""Bytes before a break that are read again and compared."""
MAX_WRONG_RANGES = 3
"""Number of wrong answers to a range after which the whole file is asked for, and its beginning passed over."""
PROGRESS_BYTES = 1 << 20
"""Bytes after which failures are counted from 0 again."""
SLOW_SECONDS, SLOW_RATE = 60.0, 1 << 10
"""A connection that delivers fewer bytes per second, over so long a time of waiting for it, counts as stalled."""
SIGN_SECONDS = 5.0
"""Interval at which a waiting reader calls `on_wait` [s]."""


@dataclass(frozen=True)
class Patience:
    """How long to ask again, and the clock of it."""

    seconds: float = 4 * 3600.0
    """Maximum time without progress, after which a file is unreachable [s]."""
    first: float = 1.0
    """Mean wait after the first failure [s]; it doubles with each further one."""
    most: float = 300.0
    """Largest mean wait [s]. A wait that the server asks for may be longer."""
    connects: int | None = None
    """Number of failed connections in a row after which a file is unreachable; None: only the time counts."""
    now: Callable[[], float] = time.monotonic
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait
    """(event, seconds) → True if the event was set before the time was over."""
    jitter: Callable[[], float] = random.random
    """Returns a number of [0, 1), from which a wait of 0.5 to 1.5 times its mean follows."""


PATIENCE = Patience()
IMPATIENCE = Patience(seconds=60.0, most=15.0, connects=3)
"""For the short files that a command reads before it starts: a busy server is waited for, no network is reported."""


class _StoppedError(Exception):
    """The stream was closed while it waited."""


@dataclass
class FileFacts:
    """What is known of a file from its first answer, and the counts of its transfers."""

    size: int | None = None
    etag: str | None = None
    counts: Counter[str] = field(default_factory=Counter)
    """Requests, bytes, waits, and failures by kind."""


class Download:
    """The bytes of a file, through as many requests as that takes."""

    def __init__(self, file: RemoteFile, facts: FileFacts, patience: Patience, stop: threading.Event):
        self._file, self._facts, self._patience, self._stop = file, facts, patience, stop
        self._tail = b""
        self._failures, self._since, self._mark, self._unconnected = 0, 0.0, 0, 0

    def blocks(self, first: int, end: int | None) -> Generator[bytes, None, None]:
        """Yield the bytes from `first` up to `end` (None: the last), fewer if the file ends before, in blocks.

        Raises UnreachableFileError, or ChangedFileError if the file is no longer the one of the first answer.
        """
        position, last, self._tail = first, end, b""
        self._failures, self._since, self._mark = 0, self._patience.now(), first
        while last is None or position < last:
            try:
                with closing(self._ask(position, end)) as answer:
                    last = answer.size if end is None else min(end, answer.size)
                    for block in self._body(answer, position, last):
                        position += len(block)
                        self._tail = (self._tail + block)[-COMPARED_BYTES:]
                        self._see_progress(position)
                        yield block
                if position < last:
                    raise BusyError(f"the connection ended at byte {position:,} of {last:,}", "truncated_answers")
            except BusyError as error:
                self._pause(error)

    def _ask(self, position: int, end: int | None) -> Answer:
        facts, start = self._facts, position - len(self._tail)
        if facts.counts["wrong_ranges"] >= MAX_WRONG_RANGES:
            start, end = 0, None
        facts.counts["requests"] += 1
        answer = self._file.get(start, end, facts.etag or "")
        if facts.etag is not None and (answer.etag, answer.size) != (facts.etag, facts.size):
            answer.close()
            got = f"one of {answer.size:,} bytes with the ETag {answer.etag or 'of none'}"
            raise ChangedFileError(self._file.uri, got)
        facts.etag, facts.size = answer.etag, answer.size
        if answer.start > start or (answer.start < start and answer.start):
            answer.close()
            raise BusyError(f"a range from byte {answer.start:,} in place of {start:,}", "wrong_ranges")
        return answer

    def _body(self, answer: Answer, position: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of an answer from `position` on, after it has repeated the last ones of the answer before."""
        at, compared = answer.start, position - len(self._tail)
        repeated, last = b"", min(end, answer.end)
        waited, received = 0.0, 0
        while at < last:
            began = self._patience.now()
            block = answer.read()[: last - at]
            waited, received = waited + self._patience.now() - began, received + len(block)
            if waited > SLOW_SECONDS:
                if received < waited * SLOW_RATE:
                    raise BusyError(f"{received:,} bytes in {waited:.0f} s", "stalls")
                waited, received = 0.0, 0
            if not block:
                return
            self._facts.counts["bytes"] += len(block)
            start, at = at, at + len(block)
            if start < position:
                repeated += block[max(0, compared - start) : position - start]
                if at >= position and repeated != self._tail:
                    raise BusyError("other bytes than those that were read before", "wrong_ranges")
                block = block[position - start :]
            if block:
                yield block

    def _see_progress(self, position: int) -> None:
        if position - self._mark >= PROGRESS_BYTES:
            self._failures, self._since, self._mark = 0, self._patience.now(), position

    def _pause(self, error: BusyError) -> None:
        """Wait before the next request. Raises UnreachableFileError if the patience is over."""
        counts, patience = self._facts.counts, self._patience
        counts[error.count] += 1
        self._failures += 1
        mean = min(patience.most, patience.first * 2.0 ** min(self._failures - 1, 30))
        seconds = max(mean * (0.5 + patience.jitter()), error.wait or 0.0)
        self._unconnected = self._unconnected + 1 if error.count == "broken_connections" else 0
        lasted = patience.now() - self._since
        if lasted + seconds > patience.seconds or self._unconnected == patience.connects:
            raise UnreachableFileError(
                self._file.uri, f"{error.cause} after {self._failures} request(s) in {lasted:,.0f} s"
            ) from error
        counts["waited_seconds"] += round(seconds)
        if patience.wait(self._stop, seconds):
            raise _StoppedError


def fetch_range(file: RemoteFile, first: int, end: int | None, patience: Patience = PATIENCE) -> bytes:
    """Return the bytes from `first` up to `end` (None: the last); fewer if the file ends before."""
    return b"".join(Download(file, FileFacts(), patience, threading.Event()).blocks(first, end))


@dataclass
class _Reading:
    """The bytes from an offset on that a thread reads ahead."""

    start: int
    """Offset of the first byte of `data`."""
    data: bytearray = field(default_factory=bytearray)
    stop: threading.Event = field(default_factory=threading.Event)
    is_done: bool = False
    error: Exception | None = None

    @property
    def end(self) -> int:
        """Offset after the last byte of `data`."""
        return self.start + len(self.data)


class RemoteStream:
    """A file on a server as a seekable file object, which a thread reads ahead of its reader; `close` after use.

    Bytes that are not in memory are asked for by a new request. The thread starts with the first `read`, so a process
    may be forked before.
    """

    def __init__(self, file: RemoteFile, patience: Patience = PATIENCE):
        self._file, self._patience = file, patience
        self.facts = FileFacts()
        self.on_wait: Callable[[], None] | None = None
        """Called about every SIGN_SECONDS while a reader waits for bytes."""
        self._changed = threading.Condition()
        self._reading: _Reading | None = None
        self._position = 0

    @property
    def transfers(self) -> Counter[str]:
        """Counts of requests, bytes, waits and failures."""
        return self.facts.counts

    def read(self, size: int = -1, /) -> bytes:
        """Return 1 to `size` bytes from the current position, none at the end; all bytes if `size` is negative.

        Raises UnreachableFileError or ChangedFileError.
        """
        if size < 0:
            return b"".join(iter(lambda: self.read(BEHIND_BYTES), b""))
        if not size:
            return b""
        reading = self._reading_at(self._position)
        self._wait_for(reading, lambda: reading.end > self._position)
        with self._changed:
            first = self._position - reading.start
            data = bytes(memoryview(reading.data)[first : first + size])
            self._position += len(data)
            if surplus := max(0, self._position - reading.start - BEHIND_BYTES):
                del reading.data[:surplus]
                reading.start += surplus
            self._changed.notify_all()
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to another position and return it. The end of the file is known after its first answer."""
        if whence == 2 and self.facts.size is None:
            reading = self._reading_at(self._position)
            self._wait_for(reading, lambda: self.facts.size is not None)
        self._position = max(0, offset + (0, self._position, self.facts.size or 0)[whence])
        return self._position

    def tell(self) -> int:
        """Return the position of the next byte to read."""
        return self._position

    def close(self) -> None:
        """Stop reading ahead."""
        with self._changed:
            if self._reading is not None:
                self._reading.stop.set()
            self._reading = None
            self._changed.notify_all()

    def _reading_at(self, position: int) -> _Reading:
        """Return the bytes that are read ahead, which reach or will soon reach a position."""
        reading = self._reading
        if reading is not None and reading.start <= position <= reading.end + JUMP_BYTES:
            return reading
        self.close()
        reading = self._reading = _Reading(position)
        threading.Thread(target=self._read_ahead, args=(reading,), name="download", daemon=True).start()
        return reading

    def _wait_for(self, reading: _Reading, is_there: Callable[[], bool]) -> None:
        """Wait until a condition is true or the file has ended. Raises the error of the thread."""
        while True:
            with self._changed:
                if is_there():
                    return
                if reading.error is not None:
                    raise reading.error
                if reading.is_done:
                    return
                self._changed.wait(SIGN_SECONDS)
            if self.on_wait is not None:
                self.on_wait()

    def _read_ahead(self, reading: _Reading) -> None:
        download = Download(self._file, self.facts, self._patience, reading.stop)
        try:
            with closing(download.blocks(reading.start, None)) as blocks:
                for block in blocks:
                    if not self._append(reading, block):
                        return
        except _StoppedError:
            return
        except Exception as error:
            reading.error = error
        finally:
            with self._changed:
                reading.is_done = True
                self._changed.notify_all()

    def _append(self, reading: _Reading, block: bytes) -> bool:
        """Append a block when there is room for it. Return False if the stream was closed or moved away."""
        with self._changed:
            while not reading.stop.is_set() and reading.end - max(self._position, reading.start) >= AHEAD_BYTES:
                self._changed.wait()
            if reading.stop.is_set():
                return False
            reading.data += block
            self._changed.notify_all()
            return True


class RandomAccessFile:
    """A file on a server as a seekable file object that asks for the bytes of each `read`, for Parquet files."""

    def __init__(self, file: RemoteFile, patience: Patience = PATIENCE):
        self.closed = False
        self._position, self._facts = 0, FileFacts()
        self._download = Download(file, self._facts, patience, threading.Event())
        self._read(0, 1)  # the answer has the size of the file

    def _read(self, first: int, end: int) -> bytes:
        return b"".join(self._download.blocks(first, end))

    def read(self, size: int = -1, /) -> bytes:
        """Return `size` bytes from the current position, fewer at the end; all bytes if `size` is negative."""
        end = self._facts.size or 0
        end = min(end, self._position + size) if size >= 0 else end
        data = self._read(self._position, end)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to another position and return it."""
        self._position = max(0, offset + (0, self._position, self._facts.size or 0)[whence])
        return self._position

    def tell(self) -> int:
        """Return the position of the next byte to read."""
        return self._position

    def readable(self) -> bool:
        """Return True; pyarrow calls this."""
        return True

    def seekable(self) -> bool:
        """Return True; pyarrow calls this."""
        return True

    def close(self) -> None:
        """Close the file; no connection is open."""
        self.closed = True


@dataclass(frozen=True)
class RecordRange:
    """The bytes from `first` up to `end` of a file."""

    first: int
    end: int


MAX_GAP_BYTES = 1 << 20
"""Distance of two ranges up to which one request reads both."""
WHOLE_SHARE = 0.3
"""Share of a file above which the whole file is read by one request."""


def coalesce(ranges: Sequence[RecordRange], size: int | None) -> list[list[RecordRange]]:
    """Return ascending ranges in groups, each of which one request reads. `size`: that of the file, if it is known."""
    if size is not None and sum(span.end - span.first for span in ranges) > WHOLE_SHARE * size:
        return [list(ranges)]
    groups: list[list[RecordRange]] = []
    for span in ranges:
        if groups and span.first - groups[-1][-1].end < MAX_GAP_BYTES:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def read_ranges(download: Download, groups: Sequence[Sequence[RecordRange]]) -> Iterator[tuple[RecordRange, bytes]]:
    """Yield each range with its bytes, in order; fewer bytes if the file ends before."""
    for group in groups:
        held, at = bytearray(), group[0].first
        with closing(download.blocks(at, group[-1].end)) as blocks:
            for span in group:
                while at + len(held) < span.end and (block := next(blocks, None)) is not None:
                    held += block
                    if passed := max(0, min(span.first - at, len(held))):
                        del held[:passed]
                        at += passed
                if passed := max(0, min(span.first - at, len(held))):
                    del held[:passed]
                    at += passed
                data = bytes(held[: span.end - span.first]) if at == span.first else b""
                yield span, data
