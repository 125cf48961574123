"""Where a row comes from: its columns, its id, its registrable domain, and the account of every byte of its file.

A file is cut at the starts of its records and gaps: each one reaches to the start of the next, so their lengths add up
to the size by construction. Records that share a start (several in one gzip member) are numbered as parts of it; the
last of them carries the member's length, the others have none.
"""

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cache, lru_cache
from typing import NamedTuple

from tldextract import TLDExtract

from pipeline.engine.stage import Drop, Row, Split
from pipeline.sources.config import SourceConfig
from schemas.ids import doc_id

COLUMNS = (
    "doc_id",
    "source",
    "split",
    "offset",
    "length",
    "url",
    "domain",
    "date",
    "snapshot",
    "record_type",
    "http_status",
    "mime",
    "page_bytes",
    "text",
    "_payload",
    "_http_charset",
)
HOST = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://(?:[^/?#\\]*@)?(\[[^\]/]*\]|[^/?#\\:]*)")


class SourceItem(NamedTuple):
    """A record or gap that starts at `start` and reaches to the next item."""

    start: int
    row: Row
    drop: Drop | None


def new_row(record_type: str | None, url: str | None = None, date: datetime | None = None) -> Row:
    """A row of every column, those that are not known yet being None."""
    row: Row = dict.fromkeys(COLUMNS)
    row["record_type"] = record_type
    if url:
        row["url"] = url
        row["domain"] = domain_of(url)
    row["date"] = date
    return row


def account_bytes(
    items: Iterator[SourceItem], split: Split, end: Callable[[], int]
) -> Iterator[tuple[Row, Drop | None]]:
    """The rows of a file with id, offset and length; `end()` is its size, asked for last. A file without any item
    gives one gap of its whole size."""
    held: tuple[Row, Drop | None] | None = None
    offset = part = 0
    for start, row, drop in items:
        if held is None:
            start = 0
        else:
            part = part + 1 if start == offset else 0
            held[0]["length"] = start - offset
            yield held
        offset = start
        row["doc_id"] = doc_id(split.source, split.name, offset, part)
        row["source"], row["split"], row["offset"] = split.source, split.name, offset
        row["snapshot"] = split.snapshot
        held = (row, drop)
    if held is None:
        yield from account_bytes(iter([SourceItem(0, new_row("gap"), Drop("empty_file"))]), split, end)
        return
    held[0]["length"] = end() - offset
    yield held


def domain_of(url: str) -> str | None:
    """The registrable domain of a URL by the bundled public suffix list; of an address or a name without a public
    suffix the host itself; None where there is no host."""
    found = HOST.match(url)
    return _domain(found.group(1)) if found else None


@lru_cache(maxsize=1 << 16)
def _domain(host: str) -> str | None:
    host = host.strip().rstrip(".").lower()
    return _public_suffixes().extract_str(host).top_domain_under_public_suffix or host or None


@cache
def _public_suffixes() -> TLDExtract:
    # No address to fetch a newer list from and no cache: the snapshot in the package, the same for every run.
    return TLDExtract(suffix_list_urls=(), cache_dir=None)


# Text that needs no extraction: conversion records, JSON lines and Parquet rows.


def encodable(text: str) -> str:
    """The text as UTF-8 can hold it: lone surrogates become U+FFFD, and so does NUL, as it does in HTML."""
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        # Through UTF-16, so that the two halves of a pair that were escaped one by one are joined.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def set_text(row: Row, text: str, config: SourceConfig) -> Drop | None:
    """Set the row's text and its size [bytes of UTF-8], or return why it cannot be used."""
    text = encodable(text)
    size = len(text.encode())
    row["page_bytes"] = size
    if size > config.max_page_bytes:
        return Drop("page_too_large", float(size), float(config.max_page_bytes))
    if not text or text.isspace():
        return Drop("empty_page")
    row["text"] = text
    return None
