"""The table of robots.txt by host: built once from archives of robots.txt, and memory-mapped by every worker.

Records are distributed over BUCKETS files by the key of their host, so that memory holds one bucket at a time; a
look-up is a binary search in one batch. Of several records of a host the latest counts. A key is 8 bytes, so two of a
thousand million hosts share one with a probability of 3 %.
"""

import hashlib
import re
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.stage import Split
from pipeline.rights.robots import RobotsFile, parse_robots, reduce_robots, reduce_tdmrep
from pipeline.sources.compression import FrameReader
from pipeline.sources.config import SourceConfig
from pipeline.sources.crawl.http import (
    BLANK_LINE,
    MAX_HEADER_BYTES,
    STATUS_LINE,
    HttpPage,
    RecordHeader,
    parse_fields,
    set_body,
)
from pipeline.sources.crawl.warc import RECORD_STARTS, read_records
from pipeline.sources.crawl.window import DecodedWindow
from pipeline.sources.splits import find_files, open_stream
from schemas.errors import ContractError
from schemas.storage import Store
from schemas.tables import field as column
from schemas.urls import ascii_host

BUCKETS = 256
MAX_RECORD_BYTES = 32 << 20
MAX_BODY_BYTES = 8 << 20
"""Maximum size of a decoded file, of which 500 KiB are read."""
CACHED_FILES = 32
"""Number of parsed files that a worker keeps; the largest takes some 10 MB."""
ROBOTS, TDMREP = 0, 1
_FILE = re.compile(
    r"https?://(?:[^/?#@]*@)?([^/?#]+)/(robots\.txt|\.well-known/tdmrep\.json)(?:[?#]|\Z)", re.IGNORECASE
)
_PORT = re.compile(r"\.?(?::(?:80|443)?)?\Z|\.(?=:)")
_HOST = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#@\\]*@)?([^/?#\\]*)")
_TABLE = pa.schema(
    [
        column("key", pa.uint64(), "first 8 bytes of the SHA-256 of the host, with a port other than 80 and 443"),
        column("kind", pa.uint8(), "0: robots.txt; 1: tdmrep.json"),
        column("text", pa.large_binary(), "lines of the file that have a meaning"),
    ]
)
"""Batches 0..BUCKETS-1; a batch has the keys of a range, sorted by key and kind."""
_RECORDS = pa.schema([*_TABLE, column("date", pa.int64(), "date of the record", "ms since 1970")])
BATCH_ROWS = 10_000


@dataclass
class RobotsCounts:
    """What was read and written; records read = files of hosts + records left out, by cause."""

    records: int = 0
    hosts: int = 0
    """Hosts with a robots.txt in the table."""
    tdm_hosts: int = 0
    """Hosts with a tdmrep.json in the table."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Records by cause: `not_a_response`, `other_address`, `redirect`, `server_error`, `bad_http`, `earlier` (the host
    has a later record), or the reason of the source stage for damaged bytes."""

    def add(self, other: "RobotsCounts") -> None:
        """Add the counts of another file."""
        self.records += other.records
        self.left_out += other.left_out


class RobotsTable:
    """A memory-mapped table of robots.txt by host."""

    def __init__(self, path: str):
        try:
            file = pa.ipc.open_file(pa.memory_map(path))
        except (OSError, pa.ArrowException) as error:
            raise _no_table(path, str(error).rstrip(".")) from error
        if file.schema.names != _TABLE.names or file.num_record_batches != BUCKETS:
            raise _no_table(path, f"{file.num_record_batches} batches of the columns {', '.join(file.schema.names)}")
        self._file = file
        self._bucket = lru_cache(BUCKETS)(self._read_bucket)  # reading all of them takes 0.2 s
        self._parsed = lru_cache(CACHED_FILES)(self._of_key)

    def of_url(self, url: str) -> tuple[RobotsFile, bool]:
        """Return what is known of the host of a URL, and whether its robots.txt is known."""
        host = host_of(url)
        return self._parsed(_key_of(host)) if host else (RobotsFile(), False)

    def _of_key(self, key: int) -> tuple[RobotsFile, bool]:
        keys, batch = self._bucket(key // ((1 << 64) // BUCKETS))
        first, end = (int(np.searchsorted(keys, np.uint64(key), side)) for side in ("left", "right"))
        if first == end:
            return RobotsFile(), False
        rows = batch.slice(first, end - first)
        texts = rows.column("text").to_pylist()
        return parse_robots(b"\n".join(texts)), ROBOTS in rows.column("kind").to_pylist()

    def _read_bucket(self, number: int) -> tuple[npt.NDArray[np.uint64], pa.RecordBatch]:
        batch = self._file.get_batch(number)
        return batch.column("key").to_numpy(), batch


def _no_table(path: str, got: str) -> ContractError:
    return ContractError(
        f"rights.robots: expected a table of robots.txt, got {path}: {got}. Write the table with `penstock robots`."
    )


def host_of(url: str) -> str:
    """Return the host of a URL in lower case, with a port other than 80 and 443; empty if there is none."""
    match = _HOST.match(url)
    return "" if match is None else _normal(match[1])


def _normal(host: str) -> str:
    plain = host.lower()
    if "%" in plain or not plain.isascii():  # one key for all forms of a name, as for its addresses
        plain = unquote(plain)
        plain = ascii_host(plain) or plain
    return _PORT.sub("", plain)


def _key_of(host: str) -> int:
    return int.from_bytes(hashlib.sha256(host.encode("utf-8", "surrogatepass")).digest()[:8])


def write_robots(paths: Sequence[str], out: str, processes: int = 1) -> RobotsCounts:
    """Write the robots.txt and tdmrep.json files in WARC archives to a table, and return the counts.

    The table is the same for any number of processes and any order of the files.
    """
    splits = find_files(paths)
    total = RobotsCounts()
    with tempfile.TemporaryDirectory() as folder:
        work = partial(write_part, folder=folder)
        if processes > 1 and len(splits) > 1:
            with ProcessPoolExecutor(min(processes, len(splits)), get_context("spawn")) as pool:
                parts = list(pool.map(work, splits))
        else:
            parts = [work(split) for split in splits]
        for counts in parts:
            total.add(counts)
        for split in splits:
            _distribute(f"{folder}/{split.ordinal:08}.parquet", Path(folder))
        parent, _, name = out.rpartition("/")
        store = Store(parent or ("/" if out.startswith("/") else "."))
        unfinished = f"{name}.{uuid.uuid4().hex[:8]}.partial"
        with store.open_output(unfinished) as stream, pa.ipc.new_file(stream, _TABLE) as writer:
            for bucket in range(BUCKETS):
                writer.write_batch(_batch_of(Path(folder) / f"bucket-{bucket}", total))
        store.sync(unfinished)
        store.move(unfinished, name)
    return total


def write_part(split: Split, folder: str) -> RobotsCounts:
    """Write the files in one archive to a Parquet file in `folder`, and return the counts."""
    counts = RobotsCounts()
    path = f"{folder}/{split.ordinal:08}.parquet"
    with closing(open_stream(split)) as stream, pq.ParquetWriter(path, _RECORDS, compression="zstd") as writer:
        rows: list[tuple[int, int, bytes, int]] = []
        for row in _files(DecodedWindow(FrameReader(stream, RECORD_STARTS)), counts):
            rows.append(row)
            if len(rows) == BATCH_ROWS:
                writer.write_batch(_records(rows))
                rows = []
        writer.write_batch(_records(rows))
    return counts


def _records(rows: Sequence[tuple[int, int, bytes, int]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * len(_RECORDS)
    return pa.RecordBatch.from_arrays(
        [pa.array(values, kind.type) for values, kind in zip(columns, _RECORDS, strict=True)], schema=_RECORDS
    )


def _files(window: DecodedWindow, counts: RobotsCounts) -> Iterator[tuple[int, int, bytes, int]]:
    """Yield (key, kind, text, date) of each robots.txt and tdmrep.json, and count the records."""
    for record in read_records(window, MAX_RECORD_BYTES):
        counts.records += 1
        header = record.header
        if record.drop is not None or header is None:
            counts.left_out[record.drop.rule if record.drop is not None else "unreadable_gap"] += 1
            continue
        name = _FILE.match(header.url or "") if header.kind == "response" else None
        if name is None:
            counts.left_out["other_address" if header.kind == "response" else "not_a_response"] += 1
            continue
        kind = ROBOTS if name[2].lower() == "robots.txt" else TDMREP
        body, cause = _body(header, record.block)
        if body is None:
            counts.left_out[cause] += 1
            continue
        date = 0 if header.date is None else int(header.date.timestamp() * 1000)
        text = reduce_robots(body) if kind == ROBOTS else reduce_tdmrep(body)
        yield _key_of(_normal(name[1])), kind, text, date


def _body(header: RecordHeader, block: bytes) -> tuple[bytes | None, str]:
    """Return the file in the block of a response, or the reason why there is none.

    A file that does not exist (4xx) is empty, which allows everything. Source: RFC 9309, section 2.3.1.
    """
    blank = BLANK_LINE.search(block, 0, MAX_HEADER_BYTES)
    status = STATUS_LINE.match(block)
    if blank is None or status is None:
        return None, "bad_http"
    number = int(status[1])
    if 400 <= number < 500:
        return b"", ""
    if number != 200:
        return None, "redirect" if 300 <= number < 400 else "server_error"
    fields = parse_fields(block[: blank.start()])
    codings = f"{fields.get('content-encoding', '')},{fields.get('transfer-encoding', '')}".lower().split(",")
    page = HttpPage(mime="text/plain")
    named = [coding.strip() for coding in codings if coding.strip()]
    set_body(page, memoryview(block)[blank.end() :], named, _LIMITS)
    if page.drop is not None and page.drop.rule == "empty_page":
        return b"", ""
    return (page.body, "") if page.drop is None else (None, page.drop.rule)


_LIMITS = SourceConfig.model_validate({"paths": ("robots",), "max_page_bytes": MAX_BODY_BYTES})
"""Limits of the decoding of a file."""


def _distribute(path: str, folder: Path) -> None:
    """Append the rows of a part to the files of their buckets, and delete the part."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(BATCH_ROWS):
            buckets = batch.column("key").to_numpy() // np.uint64((1 << 64) // BUCKETS)
            for bucket in np.unique(buckets).tolist():
                rows = pa.array(np.flatnonzero(buckets == bucket))
                with (folder / f"bucket-{bucket}").open("ab") as target, pa.ipc.new_stream(target, _RECORDS) as writer:
                    writer.write_batch(batch.take(rows))
    Path(path).unlink()


def _batch_of(path: Path, counts: RobotsCounts) -> pa.RecordBatch:
    """Return the batch of a bucket: the latest record of each host and kind. The file may be missing."""
    latest: dict[tuple[int, int], tuple[int, bytes]] = {}
    for batch in _streams(path):
        for key, kind, text, date in zip(*(values.to_pylist() for values in batch.columns), strict=True):
            known = latest.get((key, kind))
            if known is not None:
                counts.left_out["earlier"] += 1
            if known is None or (date, text) > known:
                latest[key, kind] = date, text
    places = sorted(latest)
    counts.hosts += sum(kind == ROBOTS for _, kind in places)
    counts.tdm_hosts += sum(kind == TDMREP for _, kind in places)
    columns = ([key for key, _ in places], [kind for _, kind in places], [latest[place][1] for place in places])
    arrays = [pa.array(values, own.type) for values, own in zip(columns, _TABLE, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_TABLE)


def _streams(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of the streams that follow each other in a file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        size = path.stat().st_size
        while file.tell() < size:
            yield from pa.ipc.open_stream(file)
