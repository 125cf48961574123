"""Record headers of WARC (all versions) and ARC (v1, v2), read leniently into one form.

Real archives hold folded lines, bare line feeds, NUL bytes, invalid UTF-8 and lower-case types; none of them makes a
record unreadable. Only a record whose length cannot be known has no header.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime

MAX_HEADER_BYTES = 64 << 10
WARC_VERSION = re.compile(rb"(?i:WARC)/\d")
# URL, IP address, date, media type (may be empty), in v2 five more fields, length.
# Source: Internet Archive, ARC file format, 1996, "URL-record".
ARC_LINE = re.compile(
    rb"([A-Za-z][A-Za-z0-9+.\-]{1,15}:[^\r\n]{0,8000}) ([0-9A-Fa-f.:]{2,45}|-) (\d{8,14}) ([^\r\n ]*)"
    rb"(?: [^\r\n]{0,500})? (\d{1,15})\r?\n"
)
# Among other bytes the start of a record is looked for more strictly: a version line and a known field, or a whole ARC
# line behind a line end. Both begin with a literal, which lets the search skip ahead (30 times as fast on zeros).
RECORD = re.compile(
    rb"WARC/\d\.\d{1,2}\r?\n(?i:WARC|Content)-[A-Za-z\-]{1,100}[ \t]*:"
    rb"|\n[A-Za-z][A-Za-z0-9+.\-]{1,15}:[^\r\n]{0,8000} \d{1,3}(?:\.\d{1,3}){3} \d{14} [^\r\n]{0,600}\d(?=\r?\n)"
)
TARGET = re.compile(r"^<(.*)>$")
DIGITS = re.compile(r"\d{1,15}")


@dataclass(slots=True)
class Header:
    """What a record says of itself."""

    kind: str | None
    """WARC-Type in lower case; `arc_header` for the first record of an ARC file."""
    length: int
    """Declared length of the block [bytes]."""
    url: str | None
    date: datetime | None
    content_type: str | None
    """Content-Type of the block, parameters included."""
    truncated: str | None = None
    """Why the crawler cut the block short, if it did (WARC-Truncated)."""
    block_digest: str | None = None
    payload_digest: str | None = None
    arc: bool = False


def begins_record(data: bytes) -> bool:
    """Whether the bytes begin with a WARC version line or an ARC record line."""
    return WARC_VERSION.match(data) is not None or ARC_LINE.match(data) is not None


def parse_warc_header(block: bytes) -> Header | None:
    """The header in the bytes from the version line to the blank line; None if it declares no length."""
    fields = parse_fields(block)
    length = fields.get("content-length", "")
    if not DIGITS.fullmatch(length):
        return None
    target = fields.get("warc-target-uri")
    return Header(
        kind=fields.get("warc-type", "").lower() or None,
        length=int(length),
        url=TARGET.sub(r"\1", target) if target else None,
        date=parse_date(fields.get("warc-date", "")),
        content_type=fields.get("content-type"),
        truncated=fields.get("warc-truncated"),
        block_digest=fields.get("warc-block-digest"),
        payload_digest=fields.get("warc-payload-digest"),
    )


def parse_fields(block: bytes) -> dict[str, str]:
    """Fields of a WARC or HTTP header by lower-case name, the first line left out; of several the last one wins."""
    fields: dict[str, str] = {}
    name = ""
    for line in block.decode("utf-8", "replace").split("\n")[1:]:
        if line[:1] in " \t" and name:
            fields[name] = f"{fields[name]} {line.strip()}".strip()
            continue
        name, colon, value = line.partition(":")
        name = name.strip().lower() if colon else ""
        if name:
            fields[name] = value.strip()
    return fields


def parse_arc_line(line: bytes) -> Header | None:
    """The header in an ARC record line; None if it is not one."""
    found = ARC_LINE.match(line)
    if found is None:
        return None
    url, _, date, mime, length = (part.decode("utf-8", "replace") for part in found.groups())
    return Header(
        kind="arc_header" if url.startswith("filedesc:") else "response",
        length=int(length),
        url=url,
        date=parse_date(date),
        content_type=mime or None,
        arc=True,
    )


def parse_date(text: str) -> datetime | None:
    """A WARC-Date (ISO 8601) or ARC date (YYYYMMDD[hhmmss]) in UTC, cut to milliseconds; None if it is neither."""
    try:
        if text.isdecimal():
            date = datetime.strptime(text[:14].ljust(14, "0"), "%Y%m%d%H%M%S")
        else:
            date = datetime.fromisoformat(text)
        date = date.astimezone(UTC) if date.tzinfo else date.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None
    return date.replace(microsecond=date.microsecond // 1000 * 1000)
