"""Parsers of record headers (WARC, ARC) and of archived HTTP responses: status, media type and the decoded page.

Crawlers store responses as received, decoded but with the original headers, or truncated. If a body is clearly not in
its declared encoding, it is treated as already decoded. The size of a decoded page is limited.
"""

import io
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import brotli
from fastwarc.stream_io import ZstdReader

from pipeline.engine.stage import Drop
from pipeline.rights.preferences import Fields, rights_fields
from pipeline.sources.compression import DECODED_A_BYTE, REPEATED_GROWTH
from pipeline.sources.config import SourceConfig

# Record headers of WARC (all versions) and ARC (v1, v2) are parsed leniently into a RecordHeader. Real archives contain
# folded lines, bare line feeds, NUL bytes, invalid UTF-8 and lower-case types; records with these are read. Only if a
# record's length cannot be determined is its header rejected.

MAX_HEADER_BYTES = 64 << 10
WARC_VERSION = re.compile(rb"(?i:WARC)/\d")
# URL, IP address, date, media type (may be empty), in v2 five more fields, length.
# Source: Internet Archive, ARC file format, 1996, "URL-record".
ARC_LINE = re.compile(
    rb"([A-Za-z][A-Za-z0-9+.\-]{1,15}:[^\r\n]{0,8000}) ([0-9A-Fa-f.:]{2,45}|-) (\d{8,14}) ([^\r\n ]*)"
    rb"(?: [^\r\n]{0,500})? (\d{1,15})\r?\n"
)
# To find a record among other bytes, the pattern is stricter: a version line and a known field, or a whole ARC line
# after a line end. Both start with a literal, which lets the search skip ahead (30 times as fast on zeros).
RECORD_START = re.compile(
    rb"WARC/\d\.\d{1,2}\r?\n(?i:WARC|Content)-[A-Za-z\-]{1,100}[ \t]*:"
    rb"|\n[A-Za-z][A-Za-z0-9+.\-]{1,15}:[^\r\n]{0,8000} \d{1,3}(?:\.\d{1,3}){3} \d{14} [^\r\n]{0,600}\d(?=\r?\n)"
)
PARTIAL_DATE = re.compile(r"(\d{4})(?:-(\d\d))?", re.ASCII)
TARGET = re.compile(r"^<(.*)>$")
DIGITS = re.compile(r"\d{1,15}")
_TYPE = re.compile(r"[A-Za-z0-9_-]{1,32}")


@dataclass(slots=True)
class RecordHeader:
    """The header fields of a WARC or ARC record."""

    kind: str | None
    """WARC-Type in lower case; `arc_header` for the first record of an ARC file."""
    length: int
    """Declared length of the block [bytes]."""
    url: str | None
    date: datetime | None
    content_type: str | None
    """Content-Type of the block, parameters included."""
    truncated: str | None = None
    """The reason why the crawler truncated the block, if it did (WARC-Truncated)."""
    block_digest: str | None = None
    payload_digest: str | None = None
    arc: bool = False


def starts_with_record(data: bytes) -> bool:
    """Return True if the bytes start with a WARC version line or an ARC record line."""
    return WARC_VERSION.match(data) is not None or ARC_LINE.match(data) is not None


def parse_warc_header(block: bytes) -> RecordHeader | None:
    """Parse a WARC header, from its version line to the blank line. None if the header declares no valid length."""
    fields = parse_fields(block)
    length = fields.get("content-length", "")
    if not DIGITS.fullmatch(length):
        return None
    target = fields.get("warc-target-uri")
    return RecordHeader(
        kind=_kind(fields.get("warc-type", "")),
        length=int(length),
        url=TARGET.sub(r"\1", target) if target else None,
        date=parse_date(fields.get("warc-date", "")),
        content_type=fields.get("content-type"),
        truncated=fields.get("warc-truncated"),
        block_digest=fields.get("warc-block-digest"),
        payload_digest=fields.get("warc-payload-digest"),
    )


BODY_FREE = 64 << 10
"""Bytes that any body with a coding may decode to, beside DECODED_A_BYTE for each of its bytes."""
MAX_CODINGS = 4
COMPRESSED = frozenset(("gzip", "x-gzip", "deflate", "br", "zstd"))
"""Codings that can make a body larger when it is decoded."""
LISTS = frozenset(("content-encoding", "transfer-encoding"))
"""Fields whose lines are one list. A line that is repeated counts once: such a body is coded once."""


def parse_fields(block: bytes) -> dict[str, str]:
    """Return the fields of a WARC or HTTP header by lower-case name.

    If a name occurs twice, the last value is used; of LISTS, all values. Source: RFC 9110, section 5.3.
    """
    fields: dict[str, list[str]] = {}
    name = ""
    for line in block.decode("utf-8", "replace").split("\n")[1:]:
        if line[:1] in " \t" and name:
            fields[name].append(line.strip())
            continue
        name, colon, value = line.partition(":")
        name, value = name.strip().lower() if colon else "", value.strip()
        if name in LISTS and name in fields:
            is_new = value not in fields[name] and len(fields[name]) <= 2 * MAX_CODINGS
            fields[name] += [",", value] if is_new else []
        elif name:
            fields[name] = [value]
    return {name: " ".join(filter(None, parts)) for name, parts in fields.items()}


def parse_arc_line(line: bytes) -> RecordHeader | None:
    """Parse the header line of an ARC record. None if the line is not such a header line."""
    match = ARC_LINE.match(line)
    if match is None:
        return None
    url, _, date, mime, length = (field.decode("utf-8", "replace") for field in match.groups())
    return RecordHeader(
        kind="arc_header" if url.startswith("filedesc:") else "response",
        length=int(length),
        url=url,
        date=parse_date(date),
        content_type=mime or None,
        arc=True,
    )


def _kind(text: str) -> str | None:
    """Return a record type in lower case: a name as standards have them, or `other`; None if there is none."""
    return (text.lower() if _TYPE.fullmatch(text) else "other") if text else None


def parse_date(text: str) -> datetime | None:
    """Parse a WARC-Date (ISO 8601, also of a year or month) or ARC date (YYYYMMDD[hhmmss]); None if it is invalid.

    The result is in UTC, truncated to milliseconds.
    """
    try:
        if partial := PARTIAL_DATE.fullmatch(text):
            date = datetime(int(partial[1]), int(partial[2] or 1), 1)
        elif text.isdecimal():
            date = datetime.strptime(text[:14].ljust(14, "0"), "%Y%m%d%H%M%S")
        else:
            date = datetime.fromisoformat(text)
        date = date.astimezone(UTC) if date.tzinfo else date.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None
    return date.replace(microsecond=date.microsecond // 1000 * 1000)


BLANK_LINE = re.compile(rb"\r{0,2}\n\r{0,2}\n")
STATUS_LINE = re.compile(rb"HTTP/\d(?:\.\d)?[ \t]+(\d{3})(?!\d)")
MIME = re.compile(r"[ \t\"]*([\w!#$%&'*+.^`|~-]{1,127}/[\w!#$%&'*+.^`|~-]{1,127})", re.ASCII)
UNKNOWN = frozenset(("*/*", "unknown/unknown", "application/unknown"))
"""Media types for which browsers look at the first bytes of a page, as for a missing one."""
INTERIM = frozenset((b"100", b"102", b"103"))
"""Status codes after which the same server sends another response."""
MAX_INTERIM = 4
CHARSET = re.compile(r"""charset[ \t]*=[ \t]*["']?([^"';\s]+)""", re.IGNORECASE)
CHUNK = re.compile(rb"[ \t]*0{0,64}([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]{0,4096})?\r?\n")
# Source: WHATWG MIME Sniffing, section 7.1, the patterns of text/html; section 3, binary data bytes.
HTML = re.compile(
    rb"(?:\xef\xbb\xbf)?[\t\n\x0c\r ]*<(?:(?:!doctype html|html|head|script|iframe|h1|div|font|table|a|style|title"
    rb"|b|body|br|p)[ >]|!--[ >])",
    re.IGNORECASE,
)
BINARY = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")
UNDECODABLE = {"compress", "x-compress", "sdch", "dcb", "dcz", "pack200-gzip", "exi", "aes128gcm"}
SLICE_BYTES = 64 << 10
SNIFF_BYTES = 1445
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_MAGIC = {"gzip": GZIP_MAGIC, "x-gzip": GZIP_MAGIC, "zstd": ZSTD_MAGIC}
"""First bytes of a body, by its coding."""
MAX_ZSTD_FRAMES = 10_000
"""Maximum number of zstd frames in a body; a body with more counts as one that cannot be decoded."""


@dataclass(slots=True)
class HttpPage:
    """An HTTP response: its header fields, and its page or the reason why the page is missing."""

    status: int | None = None
    mime: str | None = None
    charset: str | None = None
    body: bytes | None = None
    drop: Drop | None = None
    rights: Fields = ()
    """The header fields about rights, in their order; a name may occur several times."""


class _EncodingError(Exception):
    """The body cannot be decoded with the content coding or transfer coding that the HTTP header declares."""


class _TooLargeError(Exception):
    """The decoded body is larger than the limit."""


def compressed_size(block: bytes) -> int | None:
    """Return the size of the body of an HTTP response that is compressed; None if the response does not say so.

    0 if it says so and the bytes do not look like it: many crawlers decode a body and keep the field.
    """
    if not block.startswith(b"HTTP/"):
        return None
    block = _without_interim(block)
    blank = BLANK_LINE.search(block, 0, MAX_HEADER_BYTES)
    if blank is None or b"-encoding" not in (head := block[: blank.start()]).lower():
        return None
    codings = codings_of(parse_fields(head))
    coding = next((coding for coding in reversed(codings) if coding in COMPRESSED), None)
    if coding is None:
        return None
    start = blank.end()
    if "chunked" in codings and (chunk := CHUNK.match(block, start)):
        start = chunk.end()
    magic = _MAGIC.get(coding)
    is_coded = block.startswith(magic, start) if magic else BINARY.search(block, start, start + SNIFF_BYTES)
    return len(block) - start if is_coded else 0


def codings_of(fields: Mapping[str, str]) -> list[str]:
    """Return the content and transfer codings that HTTP header fields name, in the order in which they were applied."""
    codings = f"{fields.get('content-encoding', '')},{fields.get('transfer-encoding', '')}".lower().split(",")
    return [name for coding in codings if (name := coding.partition(";")[0].strip(" \t\"'"))]


def read_response(block: bytes, config: SourceConfig, is_repeated: bool = False) -> HttpPage:
    """Parse the block of a response record as HTTP; the result has a page, or the reason why there is none.

    `is_repeated`: see `set_body`. Invalid content never raises an error.
    """
    page = HttpPage()
    if not block.startswith(b"HTTP/"):
        page.drop = Drop("no_http_header")
        return page
    block = _without_interim(block)
    blank = BLANK_LINE.search(block, 0, MAX_HEADER_BYTES)
    head_end, body_start = (blank.start(), blank.end()) if blank else (len(block), len(block))
    status = STATUS_LINE.match(block)
    if status is None or head_end > MAX_HEADER_BYTES:
        page.drop = Drop("bad_http")
        return page
    head = block[:head_end]
    fields = parse_fields(head)
    page.rights = rights_fields(head)
    page.status = int(status.group(1))
    page.mime, page.charset = split_content_type(fields.get("content-type"))
    if page.status not in config.http_statuses:
        page.drop = Drop("http_status", float(page.status))
    elif page.mime is not None and page.mime not in config.mime_types:
        page.drop = Drop("not_html")
    else:
        set_body(page, memoryview(block)[body_start:], codings_of(fields), config, is_repeated)
    return page


def _without_interim(block: bytes) -> bytes:
    """Return a response without the interim ones before it, such as `103 Early Hints`, that some crawlers store."""
    start = 0
    for _ in range(MAX_INTERIM):
        status = STATUS_LINE.match(block, start)
        blank = BLANK_LINE.search(block, start, start + MAX_HEADER_BYTES)
        if status is None or status[1] not in INTERIM or blank is None or not block.startswith(b"HTTP/", blank.end()):
            break
        start = blank.end()
    return block[start:]


def set_body(
    page: HttpPage, stored: memoryview, codings: list[str], config: SourceConfig, is_repeated: bool = False
) -> None:
    """Decode a body, and set `body` or `drop` of the page.

    `codings` are the content and transfer codings, in the order in which the server applied them. `is_repeated`: the
    frame of the record repeats bodies with codings, so that REPEATED_GROWTH limits it. See NestedCodings.
    """
    limit = config.max_page_bytes
    most = REPEATED_GROWTH * len(stored) if is_repeated else BODY_FREE + DECODED_A_BYTE * len(stored)
    try:
        if len(codings) > MAX_CODINGS:
            raise _EncodingError
        for coding in reversed(codings):
            stored = memoryview(_decode(stored, coding, min(limit, most)))
    except _EncodingError:
        page.drop = Drop("bad_encoding")
    except _TooLargeError:
        is_page = limit <= most
        page.drop = Drop("page_too_large" if is_page else "decoded_too_large", None, float(min(limit, most)))
    else:
        if len(stored) > limit:
            page.drop = Drop("page_too_large", float(len(stored)), float(limit))
        elif not len(stored):
            page.drop = Drop("empty_page")
        elif page.mime is None and not HTML.match(stored[:SNIFF_BYTES]):
            page.drop = Drop("not_html")
        else:
            page.body = bytes(stored)


def split_content_type(value: str | None) -> tuple[str | None, str | None]:
    """Return the media type in lower case and the charset of a Content-Type; each is None if absent or unknown.

    Of several types, which servers join by commas, the last one counts, and a charset that was named for it before.
    Source: WHATWG Fetch, "extract a MIME type"; the types of UNKNOWN, WHATWG MIME Sniffing, section 7.
    """
    mime: str | None = None
    charset: str | None = None
    for part in value.split(",") if value is not None else ():
        match = MIME.match(part)
        found = match[1].lower() if match is not None and match[1].lower() not in UNKNOWN else None
        named = CHARSET.search(part)
        if found is not None or mime is None:
            charset = named[1] if named else charset if found == mime else None
            mime = found
    return mime, charset


def _decode(stored: memoryview, coding: str, limit: int) -> bytes | bytearray | memoryview:
    match coding:
        case "chunked":
            return _dechunk(stored)
        case "gzip" | "x-gzip":
            return _gunzip(stored, limit) if stored[:2] == GZIP_MAGIC else _already_decoded(stored)
        case "deflate":
            return _inflate(stored, limit)
        case "br":
            return _unbrotli(stored, limit)
        case "zstd":
            return _unzstd(stored, limit) if stored[:4] == ZSTD_MAGIC else _already_decoded(stored)
    if coding in UNDECODABLE:
        raise _EncodingError
    return stored  # As in browsers, values that are not a coding ("identity", "utf-8", "none") are ignored.


def _already_decoded(stored: memoryview) -> memoryview:
    if BINARY.search(stored[:SNIFF_BYTES]):
        raise _EncodingError
    return stored


def _dechunk(stored: memoryview) -> bytearray | memoryview:
    """Return the data of a body in HTTP chunked transfer coding.

    A body that does not start with a chunk is returned unchanged. A body without the last chunk is accepted if its
    earlier chunks are complete. Source: RFC 9112, section 7.1.
    """
    header = CHUNK.match(stored)
    if header is None:  # The crawler has already decoded the body.
        return stored
    data = bytearray()  # not a list of chunks: of chunks of 1 byte, each would take 49 bytes
    position = 0
    while header is not None and (size := int(header.group(1), 16)):
        start = header.end()
        if start + size > len(stored):
            raise _EncodingError
        data += stored[start : start + size]
        position = start + size
        position += 2 if bytes(stored[position : position + 2]) == b"\r\n" else 1
        header = CHUNK.match(stored, position)
    if header is None and position < len(stored):
        raise _EncodingError
    return data


def _gunzip(stored: memoryview, limit: int) -> bytes:
    parts: list[bytes] = []
    position = size = 0
    while stored[position : position + 2] == GZIP_MAGIC:
        data, position = _zlib(stored, position, 31, limit - size)
        parts.append(data)
        size += len(data)
    return b"".join(parts)


def _inflate(stored: memoryview, limit: int) -> bytes | memoryview:
    # "deflate" means the zlib format, but many servers send the raw deflate format.
    for window_bits in (15, -15):
        try:
            return _zlib(stored, 0, window_bits, limit)[0]
        except _EncodingError:
            continue
    return _already_decoded(stored)


def _zlib(stored: memoryview, position: int, window_bits: int, limit: int) -> tuple[bytes, int]:
    """Decode the zlib, gzip or deflate stream that starts at `position`; return its data and the position after it."""
    decoder = zlib.decompressobj(window_bits)
    parts: list[bytes] = []
    size = 0
    while not decoder.eof:
        chunk = stored[position : position + SLICE_BYTES]
        try:
            data = decoder.decompress(chunk, limit + 1 - size)
        except zlib.error as error:
            raise _EncodingError from error
        parts.append(data)
        size += len(data)
        if size > limit:
            raise _TooLargeError
        if not chunk and not data and not decoder.eof:
            raise _EncodingError
        position += len(chunk) - len(decoder.unused_data if decoder.eof else decoder.unconsumed_tail)
    return b"".join(parts), position


def _unbrotli(stored: memoryview, limit: int) -> bytes | memoryview:
    coded = bytes(stored)
    # Some servers send a line end after the body.
    tries = (_brotli_data(data, limit) for data in dict.fromkeys((coded, coded.rstrip(b"\r\n"))))
    data = next((data for data in tries if data is not None), None)
    return _already_decoded(stored) if data is None else data


def _brotli_data(coded: bytes, limit: int) -> bytes | None:
    """Return the data of a brotli stream; None if the bytes are not exactly one."""
    decoder = brotli.Decompressor()
    parts: list[bytes] = []
    size = 0
    try:
        data = decoder.process(coded, output_buffer_limit=limit + 1)
        while data and size <= limit:
            parts.append(data)
            size += len(data)
            data = decoder.process(b"", output_buffer_limit=limit + 1)
    except brotli.error:
        return None
    if size > limit:
        raise _TooLargeError
    return b"".join(parts) if decoder.is_finished() else None


def _unzstd(stored: memoryview, limit: int) -> bytes:
    # An empty frame of 9 bytes takes 8 us, so that a megabyte of them would take a second.
    if bytes(stored).count(ZSTD_MAGIC) > MAX_ZSTD_FRAMES:
        raise _EncodingError
    reader = ZstdReader(io.BytesIO(stored))
    try:
        data: bytes = reader.read(limit + 1)
        while len(data) <= limit and (more := reader.read(limit + 1 - len(data))):
            data += more
    except OSError as error:
        raise _EncodingError from error
    if len(data) > limit:
        raise _TooLargeError
    return data
