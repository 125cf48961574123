"""Links between web pages as a table: from the link lists of WAT files and from Reddit submissions with their scores.

A pure function reads one file; files are read by several processes, and their rows are joined in the order of the file
names. So the table is the same for any number of processes. Sources: Common Crawl, WAT format (ia-web-commons); the
fields of Reddit submissions in Pushshift's dumps.
"""

import json
import multiprocessing
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.stage import Drop, Split
from pipeline.sources.compression import ByteStream, FrameReader
from pipeline.sources.crawl.warc import RECORD_STARTS, DecodedWindow, read_records
from pipeline.sources.lines import LineReader
from pipeline.sources.provenance import domain_of, encodable
from pipeline.sources.splits import WAT, find_files, open_stream
from schemas.errors import ConfigError
from schemas.storage import Store
from schemas.tables import field as column

REDDIT = re.compile(r"(?:\.(?:jsonl|ndjson|json)(?:\.(?:gz|zst|bz2))?|(?:^|/)RS_[\w.-]+)$", re.IGNORECASE)
LINKS = pa.schema(
    [
        column("url", pa.string(), "target of the link, absolute"),
        column("domain", pa.string(), "registrable domain of the target"),
        column("from_url", pa.string(), "page that has the link"),
        column("from_domain", pa.string(), "registrable domain of that page"),
        column("text", pa.string(), "text of the link, or title of the submission; null: none"),
        column("rel", pa.string(), "value of the attribute rel, such as nofollow; null: none"),
        column("score", pa.int32(), "score of the submission; null: the link is none", "votes"),
    ]
)
MAX_RECORD_BYTES = 32 << 20
MAX_LINKS = 10_000
"""Maximum number of links of one page that are written."""
MAX_TEXT_CHARS, MAX_URL_CHARS = 1_000, 4_096
BATCH_ROWS = 50_000
_WEB = re.compile(r"https?://", re.IGNORECASE)


@dataclass
class LinkCounts:
    """What was read and written; records read = pages + records left out, by cause."""

    records: int = 0
    pages: int = 0
    """Records with a list of links, and submissions."""
    links: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Records without links, by cause: `no_html`, `bad_json`, or the reason of the source stage for damaged bytes."""
    links_left_out: Counter[str] = field(default_factory=Counter)
    """Links by cause: `same_domain`, `not_web`, `no_domain`, `too_long`, `over_limit`."""

    def add(self, other: "LinkCounts") -> None:
        """Add the counts of another file."""
        self.records += other.records
        self.pages += other.pages
        self.links += other.links
        self.left_out += other.left_out
        self.links_left_out += other.links_left_out


def write_links(paths: Sequence[str], out: str, internal: bool = False, processes: int = 1) -> LinkCounts:
    """Write the links in WAT files and files of Reddit submissions to one Parquet file, and return the counts.

    `internal`: True to write links within a domain too. Raises ConfigError if a file is of another kind.
    """
    splits = find_files(paths)
    if wrong := [split.name for split in splits if not WAT.search(split.name) and not REDDIT.search(split.name)]:
        raise ConfigError(
            f"files: expected WAT files (.wat.gz) or Reddit submissions (.jsonl, RS_…), got {', '.join(wrong[:5])}. "
            "Name other files."
        )
    total = LinkCounts()
    with tempfile.TemporaryDirectory() as folder:
        work = partial(write_part, folder=folder, internal=internal)
        if processes > 1 and len(splits) > 1:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(min(processes, len(splits)), context) as pool:
                parts = list(pool.map(work, splits))
        else:
            parts = [work(split) for split in splits]
        for counts in parts:
            total.add(counts)
        _join([f"{folder}/{split.ordinal:08}.parquet" for split in splits], out)
    return total


def write_part(split: Split, folder: str, internal: bool) -> LinkCounts:
    """Write the links in one file to a Parquet file in `folder`, and return the counts."""
    counts = LinkCounts()
    with (
        closing(open_stream(split)) as stream,
        pq.ParquetWriter(f"{folder}/{split.ordinal:08}.parquet", LINKS, compression="zstd") as writer,
    ):
        rows: list[dict[str, Any]] = []
        for row in read_links(split.name, stream, internal, counts):
            rows.append(row)
            if len(rows) == BATCH_ROWS:
                writer.write_table(pa.Table.from_pylist(rows, LINKS))
                rows = []
        writer.write_table(pa.Table.from_pylist(rows, LINKS))
    return counts


def _join(parts: Sequence[str], out: str) -> None:
    parent, _, name = out.rpartition("/")
    store = Store(parent or ("/" if out.startswith("/") else "."))
    unfinished = f"{name}.partial"
    with store.open_output(unfinished) as stream, pq.ParquetWriter(stream, LINKS, compression="zstd") as writer:
        for part in parts:
            file = pq.ParquetFile(part)
            for group in range(file.num_row_groups):
                writer.write_table(file.read_row_group(group))
            file.close()
            Path(part).unlink()
    store.sync(unfinished)
    store.move(unfinished, name)


def read_links(name: str, stream: ByteStream, internal: bool, counts: LinkCounts) -> Iterator[dict[str, Any]]:
    """Yield the links in a file as rows of LINKS, in its order, and add to `counts`. Damage is counted."""
    pages = _wat_pages(stream, counts) if WAT.search(name) else _submissions(stream, counts)
    for links in pages:
        counts.pages += 1
        for number, row in enumerate(links):
            cause = "over_limit" if number >= MAX_LINKS else _problem(row, internal)
            if cause is not None:
                counts.links_left_out[cause] += 1
                continue
            counts.links += 1
            yield row


def _problem(row: dict[str, Any], internal: bool) -> str | None:
    if not _WEB.match(row["url"]):
        return "not_web"
    if len(row["url"]) > MAX_URL_CHARS:
        return "too_long"
    row["domain"] = domain_of(row["url"])
    if row["domain"] is None:
        return "no_domain"
    return "same_domain" if row["domain"] == row["from_domain"] and not internal else None


def _row(url: str, page: str | None, text: Any, rel: Any = None, score: Any = None) -> dict[str, Any]:
    number = score if isinstance(score, int) and -(1 << 31) <= score < 1 << 31 else None
    return {
        "url": encodable(url),
        "domain": None,
        "from_url": page,
        "from_domain": domain_of(page) if page else None,
        "text": _words(text),
        "rel": _words(rel),
        "score": number,
    }


def _words(text: Any) -> str | None:
    return " ".join(encodable(text).split())[:MAX_TEXT_CHARS] or None if isinstance(text, str) else None


# WAT: a metadata record in JSON for each record of a WARC file.


def _wat_pages(stream: ByteStream, counts: LinkCounts) -> Iterator[Iterator[dict[str, Any]]]:
    for record in read_records(DecodedWindow(FrameReader(stream, RECORD_STARTS)), MAX_RECORD_BYTES):
        counts.records += 1
        if record.header is None or record.drop is not None:
            counts.left_out[record.drop.rule if record.drop else "unreadable_gap"] += 1
            continue
        value = _json_object(record.block) if record.header.kind == "metadata" else {}
        if value is None:
            counts.left_out["bad_json"] += 1
            continue
        html = _path(value, "Envelope", "Payload-Metadata", "HTTP-Response-Metadata", "HTML-Metadata")
        page = _path(value, "Envelope", "WARC-Header-Metadata").get("WARC-Target-URI") or record.header.url
        if not html or not isinstance(page, str):
            counts.left_out["no_html"] += 1
            continue
        yield _page_links(html, encodable(page))


def _page_links(html: dict[str, Any], page: str) -> Iterator[dict[str, Any]]:
    declared = _path(html, "Head").get("Base")
    base = _absolute(page, declared) if isinstance(declared, str) else page
    links = html.get("Links")
    for link in links if isinstance(links, list) else ():
        # Other paths are images, scripts, forms and the like.
        if not isinstance(link, dict) or link.get("path") != "A@/href" or not isinstance(link.get("url"), str):
            continue
        yield _row(_absolute(base, link["url"]), page, link.get("text"), link.get("rel"))


def _absolute(base: str, url: str) -> str:
    try:
        return urljoin(base, url.strip())
    except ValueError:
        return ""


def _path(value: Any, *names: str) -> dict[str, Any]:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


# Reddit: a submission in JSON on each line.


def _submissions(stream: ByteStream, counts: LinkCounts) -> Iterator[Iterator[dict[str, Any]]]:
    for _, line in LineReader(FrameReader(stream, None), MAX_RECORD_BYTES):
        if not isinstance(line, Drop) and not line.strip():
            continue
        counts.records += 1
        value = None if isinstance(line, Drop) else _json_object(line)
        if isinstance(line, Drop) or value is None:
            counts.left_out[line.rule if isinstance(line, Drop) else "bad_json"] += 1
        elif value.get("is_self") or not isinstance(value.get("url"), str):
            counts.left_out["no_link"] += 1
        else:
            page = value.get("permalink")
            shown = f"https://www.reddit.com{encodable(page)}" if isinstance(page, str) else "https://www.reddit.com/"
            yield iter([_row(value["url"].strip(), shown, value.get("title"), None, value.get("score"))])


def _json_object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
