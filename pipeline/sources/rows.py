"""Rows with named fields as rows of `documents`: text, URL, date, licence and further fields of a line or row."""

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Any, NamedTuple

from pipeline.engine.stage import Drop, Row
from pipeline.sources.config import SourceConfig
from pipeline.sources.provenance import encodable, new_row, set_text

MAX_META_DEPTH = 16
"""Maximum nesting depth of a field that is stored in `meta`; deeper values are left out."""
MAX_NAME = 64
"""Maximum length of the name of a field that the manifest counts [code points]."""
UNREADABLE_VALUE = object()
"""Takes the place of a value of a Parquet column that cannot be converted, such as a date after the year 9999."""
PARTIAL_DATE = re.compile(r"(\d{4})(?:-(\d\d))?")
NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,17})(?:\.\d{1,18})?(?:[eE][-+]?\d{1,2})?")
"""A text that is compared as a number; a leading zero makes it a code."""


def row_of(value: dict[str, Any], config: SourceConfig) -> tuple[Row, Drop | None]:
    """Return the row of `documents` of a row with named fields, with a Drop if it cannot be a document."""
    url, stored = value.get(config.url_field), {config.text_field}
    origin = config.url_field
    if url is None or url == "":
        stored.add(config.url_field)
        url, origin = value.get(config.id_field), config.id_field
    row = new_row("row", encodable(str(url)) if isinstance(url, str | int) else None)
    stored |= {origin} if isinstance(url, str | int) else set()
    if config.date_field is not None and (found := date_of(value.get(config.date_field))) is not None:
        row["date"] = found
        stored.add(config.date_field)
    if config.licence_field is not None and (licence := _licence(value.get(config.licence_field), config)) is not None:
        row["licence"] = licence
        stored.add(config.licence_field)
    row["meta"], row["_meta"] = meta_of(value, stored, config)
    text = value.get(config.text_field)
    if not isinstance(text, str):
        return row, Drop("no_text_field")
    return row, set_text(row, text, config)


# The fields of a row beside text, URL and id.


class MetaNote(NamedTuple):
    """What the manifest counts of the fields of one row."""

    numbers: Mapping[str, bool]
    """Whether the value is a number, by the name of each field in `meta`; names over MAX_NAME are not counted."""
    cut: tuple[str, ...]
    """Causes for which fields were left out or not used: `too_large`, `too_deep`, `unreadable`, `no_date`."""


class _TooDeep(ValueError):
    """A value is nested deeper than MAX_META_DEPTH."""


def meta_of(value: Mapping[str, Any], stored: set[str], config: SourceConfig) -> tuple[str | None, MetaNote | None]:
    """Return the JSON object of the fields to store in `meta` (None: no field), and what to count of them."""
    if config.meta_fields is None:
        names = [name for name in value if name not in stored]
    else:
        names = [name for name in config.meta_fields if name in value]
    size, parts, numbers, cut = 1, [], {}, set()
    is_dated = config.date_field is None or config.date_field in stored or value.get(config.date_field) is None
    cut |= set() if is_dated else {"no_date"}
    for name in names:
        if value[name] is None:
            continue
        if value[name] is UNREADABLE_VALUE:
            cut.add("unreadable")
            continue
        try:
            plain = plain_value(value[name])
        except _TooDeep:
            cut.add("too_deep")
            continue
        if plain is None:
            continue
        part = encodable(f"{json.dumps(name, ensure_ascii=False)}:{_json(plain)}")
        if size + len(part.encode()) + 1 > config.max_meta_bytes:
            cut.add("too_large")
            continue
        size += len(part.encode()) + 1
        parts.append(part)
        if len(name) <= MAX_NAME:
            numbers[encodable(name)] = is_number(plain)
    note = MetaNote(numbers, tuple(sorted(cut))) if numbers or cut else None
    return (f"{{{','.join(parts)}}}" if parts else None), note


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def is_number(value: Any) -> bool:
    """Return True if a value of `meta` is compared as a number: a number, or a text that is written as one."""
    if isinstance(value, str):
        return NUMBER.fullmatch(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


def plain_value(value: Any, depth: int = 0) -> Any:
    """Return a value of a line or row as a JSON value. Numbers that are not finite are None.

    Whole numbers beyond 64 bits, and values without a JSON type, such as dates, become texts. Bytes become hexadecimal.
    Raises ValueError if the value is nested deeper than MAX_META_DEPTH.
    """
    if depth > MAX_META_DEPTH:
        raise _TooDeep(f"expected at most {MAX_META_DEPTH} levels, got more")
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 63 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain_value(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item, depth + 1) for item in value]
    if isinstance(value, datetime | date):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)


def date_of(value: Any) -> datetime | None:
    """Return the date of a row in UTC; None if the value is no date that the column can hold."""
    try:
        if isinstance(value, datetime):
            found = value
        elif isinstance(value, date):
            found = datetime(value.year, value.month, value.day)
        elif isinstance(value, str) and (match := PARTIAL_DATE.fullmatch(value.strip())):
            found = datetime(int(match[1]), int(match[2] or 1), 1)
        elif isinstance(value, str):
            found = datetime.fromisoformat(value.strip())
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found = datetime.fromtimestamp(value, UTC)
        else:
            return None
        found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return None
    # pandas dates have nanoseconds; the column has milliseconds.
    return datetime(*found.timetuple()[:6], found.microsecond // 1000 * 1000, UTC)


def _licence(value: Any, config: SourceConfig) -> str | None:
    """Return the licence of a row as text; None if there is none or it does not fit into `max_meta_bytes`."""
    try:
        plain = plain_value(None if value is UNREADABLE_VALUE else value)
    except _TooDeep:
        return None
    if plain is None or plain == "":
        return None
    text = encodable(plain if isinstance(plain, str) else _json(plain))
    return text if len(text.encode()) <= config.max_meta_bytes else None
