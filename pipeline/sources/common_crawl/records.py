"""The records of an archive that `source.where` chooses, read by ranges of the file.

The list of the ranges is a Parquet file in the folder of the run, which the step `documents` writes. Neighbouring
records are read by one request; if a large share of the archive is wanted, one request reads all of it.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.stage import Split
from pipeline.sources.common_crawl.download import (
    PATIENCE,
    SIGN_SECONDS,
    Download,
    FileFacts,
    RecordRange,
    coalesce,
    read_ranges,
)
from pipeline.sources.common_crawl.listing import open_crawl_file
from pipeline.sources.common_crawl.requests import RemoteFile, remote_file
from schemas.storage import resolve_uri

RANGES = pa.schema([("archive", pa.int32()), ("first", pa.int64()), ("end", pa.int64())])
"""Columns of a list of ranges: number of the part of the archive, and the bytes of a record in it."""


def read_range_list(split: Split) -> list[RecordRange]:
    """Return the records of a split to read, in order."""
    fs, path = resolve_uri(split.ranges)
    with fs.open_input_file(path) as stream:
        table = pq.read_table(stream, schema=RANGES, filters=[("archive", "=", split.ordinal)])
    return [RecordRange(row["first"], row["end"]) for row in table.to_pylist()]


class ChosenRecords:
    """The chosen records of an archive, in place of the stream of the whole file; `close` after use."""

    def __init__(self, split: Split):
        self._uri, self._ranges = split.uri, read_range_list(split)
        self._facts, self._stop = FileFacts(), threading.Event()
        self._digest, self._read, self._position = hashlib.sha256(), 0, 0
        self.closed = False
        self.on_read: Callable[[], None] | None = None
        """Called whenever bytes were read, and while the server is waited for: a sign of progress."""

    @property
    def transfers(self) -> Counter[str]:
        """Counts of requests, bytes, waits and failures."""
        return self._facts.counts

    def records(self, max_bytes: int) -> Iterator[tuple[RecordRange, bytes | None]]:
        """Yield the place and the bytes of each record; None in place of more than `max_bytes` bytes.

        Raises UnreachableFileError or ChangedFileError.
        """
        wanted = [span for span in self._ranges if span.end - span.first <= max_bytes]
        found = iter(self._read_all(wanted))
        for span in self._ranges:
            data = None if span.end - span.first > max_bytes else next(found)[1]
            if data is not None:
                self._digest.update(f"{span.first} {span.end}\n".encode() + data)
                self._read += len(data)
            self._position = span.end
            self.see_progress()
            yield span, data

    def _read_all(self, wanted: list[RecordRange]) -> Iterator[tuple[RecordRange, bytes]]:
        file = remote_file(self._uri)
        if file is not None:
            yield from self._requested(file, wanted)
            return
        with closing(open_crawl_file(self._uri)) as stream:
            size = stream.size()
            for span in wanted:
                stream.seek(min(span.first, size))
                yield span, bytes(stream.read(span.end - span.first))

    def _requested(self, file: RemoteFile, wanted: list[RecordRange]) -> Iterator[tuple[RecordRange, bytes]]:
        download = Download(file, self._facts, replace(PATIENCE, wait=self._wait), self._stop)
        size = wanted[-1].end if wanted else None  # about that of the file, which is not known before a request
        yield from read_ranges(download, coalesce(wanted, size))

    def _wait(self, stop: threading.Event, seconds: float) -> bool:
        deadline = PATIENCE.now() + seconds
        while (left := deadline - PATIENCE.now()) > 0:
            self.see_progress()
            if stop.wait(min(left, SIGN_SECONDS)):
                return True
        return False

    def see_progress(self) -> None:
        """Call `on_read`."""
        if self.on_read is not None:
            self.on_read()

    def digest_so_far(self) -> tuple[str, int]:
        """Return the SHA-256 (hex) of the places and bytes of the records that were read, and the number of bytes."""
        return self._digest.hexdigest(), self._read

    def finish(self) -> tuple[str, int]:
        """Return the same as `digest_so_far`, after all records were read."""
        return self.digest_so_far()

    def tell(self) -> int:
        """Return the offset after the last record."""
        return self._position

    def seek(self, offset: int, whence: int = 0, /) -> Any:
        """Return the offset after the last record; records are only read in order."""
        return self._position

    def close(self) -> None:
        """End the request."""
        self.closed = True
        self._stop.set()
