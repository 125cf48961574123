"""Provenance of rows: their columns, id and registrable domain, and offsets and lengths that cover the whole file.

Each record or gap extends to the start of the next, so their lengths add up to the size of the file by construction.
If several records are in one gzip member, they have the same offset: the last has the length of the member, the others
0, and their ids include their number in the member.
"""

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cache, lru_cache
from typing import NamedTuple, Protocol
from urllib.parse import unquote

from tldextract import TLDExtract

from pipeline.engine.stage import Drop, Row, Split
from schemas.errors import ContractError
from schemas.ids import doc_id
from schemas.urls import ascii_host

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
    "licence",
    "meta",
    "http_status",
    "mime",
    "page_bytes",
    "text",
    "_payload",
    "_http_charset",
    "_rights_fields",
    "_meta",
)
_EMPTY_ROW: Row = dict.fromkeys(COLUMNS)
MAX_TITLE_CHARS = 1_000
FREE_ROWS, ROWS_A_BYTE = 100_000, 10
"""Maximum number of rows of a file: so many, and so many for each byte of the file. A text that no other row
has takes at least a byte, also compressed. Only rows without a text, and copies of one, take less: a column of nulls or
of one repeated value has 10^8 rows in 200 kB, each of which would cost time and an id in the tables of a run. So has a
compressed file of one repeated line."""
IP_ADDRESS = re.compile(r"\A\[|(?:\A|\.)(?:[0-9]+|0x[0-9a-f]*)\W*\Z")
"""A host that is an IPv6 address, or one that browsers read as an IPv4 address, since its last label is a number. Signs
may follow, as in an address that was taken from a text."""
HOST = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://(?:[^/?#\\]*@)?(\[[^\]/]*\]|[^/?#\\:]*)")


class SourceItem(NamedTuple):
    """A record or gap that starts at the offset `start` and extends to the next record or gap."""

    start: int
    row: Row
    drop: Drop | None


def new_row(record_type: str | None, url: str | None = None, date: datetime | None = None) -> Row:
    """Return a row with the columns that a source sets. Columns without a given value are None."""
    row = _EMPTY_ROW.copy()
    row["record_type"] = record_type
    if url:
        row["url"] = url
        row["domain"] = domain_of(url)
    row["date"] = date
    return row


def account_bytes(
    items: Iterator[SourceItem], split: Split, end: Callable[[], int], base: int = 0
) -> Iterator[tuple[Row, Drop | None]]:
    """Add id, offset and length to the rows of a file's records and gaps, and yield the rows.

    `end` is called after the last item and returns the size of the file. A file without records and gaps yields one gap
    of the file's size. `base`: offset of the first byte, if the items are those of one record of the file.

    Of a range of a file, `items` begin with its first row, and end with the file or after the range. Raises
    ContractError if no row begins where one did when the file was divided.
    """
    held: tuple[Row, Drop | None] | None = None
    (offset, part, resume), following = split.first, split.span.following if split.span else None
    source, name, snapshot = split.source, split.name, split.snapshot
    for start, row, drop in items:
        if held is None:
            start = _first_offset(split, start) if resume else 0
        else:
            part = part + 1 if start == offset else 0
            held[0]["length"] = start - offset
            yield held
            if following is not None and (start, part) >= following[:2]:
                if (start, part) == following[:2]:
                    return
                break
        offset = start
        row["doc_id"] = doc_id(source, name, base + offset, part)
        row["source"], row["split"], row["offset"], row["snapshot"] = source, name, base + offset, snapshot
        held = (row, drop)
    if following is not None:
        raise _changed_file(split, following.offset)
    if held is None:
        if resume:
            raise _changed_file(split, offset)
        yield from account_bytes(iter([SourceItem(0, new_row("gap"), Drop("empty_file"))]), split, end, base)
        return
    held[0]["length"] = end() - offset
    yield held


def most_rows(size: int) -> int:
    """Return the maximum number of rows or lines that are read of a file with so many bytes."""
    return FREE_ROWS + ROWS_A_BYTE * size


def too_many_rows(number: int, size: Callable[[], int]) -> Drop | None:
    """Return the Drop of the rest of a file of which so many rows are read; None if it may have more.

    `size` returns the number of bytes of the file as stored.
    """
    if number < FREE_ROWS or number < (most := most_rows(size())):
        return None
    return Drop("too_many_rows", float(number), float(most))


def _first_offset(split: Split, start: int) -> int:
    """Return the offset of the first row of a range. Raises ContractError if it is not `start`."""
    if start != split.first.offset:
        raise _changed_file(split, split.first.offset)
    return start


def _changed_file(split: Split, offset: int) -> ContractError:
    return ContractError(
        f"{split.uri}: expected a record at offset {offset}, where one was when the file was divided into ranges, got "
        "other bytes. Run `penstock run` again when the file no longer changes."
    )


def domain_of(url: str) -> str | None:
    """Return the registrable domain of a URL, by the public suffix list in the package tldextract.

    It is in ASCII, so that a domain has one name however pages write it. Return the host itself if it has no public
    suffix. Return None if the URL has no host, or an IP address, which is no domain and may be that of a person.
    """
    # The host is in front of the third slash, and a file has many URLs of one host.
    end = url.find("/", url.find("://") + 3)
    return _domain_of_start(url[:end] if end >= 0 else url)


@lru_cache(maxsize=1 << 16)
def _domain_of_start(start: str) -> str | None:
    match = HOST.match(start)
    return _domain(match.group(1)) if match else None


@lru_cache(maxsize=1 << 16)
def _domain(host: str) -> str | None:
    host = host.strip().rstrip(".").lower()
    if not host.isascii():
        host = ascii_host(host) or host
    if IP_ADDRESS.search(unquote(host)):
        return None
    return _public_suffixes().extract_str(host).top_domain_under_public_suffix or host or None


@cache
def _public_suffixes() -> TLDExtract:
    # A newer list is neither downloaded nor cached, so that every run uses the list in the package.
    return TLDExtract(suffix_list_urls=(), cache_dir=None)


# Rows that have a text from the start: WARC conversion records (WET), JSON lines and Parquet rows.


def encodable(text: str) -> str:
    """Return the text with U+FFFD in place of NUL characters and lone surrogates."""
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:  # UTF-8 cannot encode surrogates.
        # UTF-16 joins the two halves of a surrogate pair that JSON escaped separately.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class PageLimit(Protocol):
    """The setting of a source that limits the size of a text."""

    @property
    def max_page_bytes(self) -> int: ...


def set_text(row: Row, text: str, config: PageLimit) -> Drop | None:
    """Set the row's text and its size [bytes of UTF-8], and return None.

    If the text is empty or too large, only the size is set, and a Drop is returned.
    """
    if text.isascii() and "\0" not in text:
        size = len(text)
    else:
        text = encodable(text)
        size = len(text.encode())
    row["page_bytes"] = size
    if size > config.max_page_bytes:
        return Drop("page_too_large", float(size), float(config.max_page_bytes))
    if not text or text.isspace():
        return Drop("empty_page")
    row["text"] = text
    return None


def set_title(row: Row, title: str) -> None:
    """Set the row's title, on one line, unless it is empty."""
    if title := " ".join(encodable(title).split())[:MAX_TITLE_CHARS]:
        row["title"] = title
