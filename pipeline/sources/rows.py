"""Rows with named fields as rows of `documents`: text, URL, date, licence and further fields of a line or row."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from functools import lru_cache
from json.encoder import encode_basestring as _quoted
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline.engine.stage import Drop, Row
from pipeline.sources.config import SourceConfig
from pipeline.sources.fields import MISSING, decoded, lookup, top_field, without
from pipeline.sources.provenance import encodable, new_row, set_text, set_title
from schemas.ids import DOC_ID_BYTES
from schemas.urls import resolved_host

MAX_PARENTS = 1_000
"""Maximum number of parents of a row."""
MAX_PARENT_CHARS = 2_048
"""Maximum length of the URL of a parent [code points]."""
DOC_ID = re.compile(rf"[0-9a-fA-F]{{{2 * DOC_ID_BYTES}}}")
MAX_META_DEPTH = 16
"""Maximum nesting depth of a field that is stored in `meta`; deeper values are left out."""
MAX_URL_CHARS = 1 << 16
"""Maximum length of the URL or id of a row [code points]; a longer one is a field like any other. Headers of records
in archives are limited to as many bytes."""
MAX_NAME = 64
"""Maximum length of the name of a field that the manifest counts [code points]."""
UNREADABLE_VALUE = object()
"""Takes the place of a value of a Parquet column that cannot be converted, such as a date after the year 9999."""
FREE_BYTES, BYTES_A_BYTE = 1 << 30, 1_000
"""Maximum size of the values of a file of a table, as texts: so many bytes, and so many for each byte of the file. Only
copies of a value take less. Rows that share one text of 4.9 MB take a bit each, and a second of a core."""
UNREADABLE = (pa.ArrowException, OSError, ValueError)
"""Errors of pyarrow on damaged files. One of the storage is raised again when the stream is finished."""
PARTIAL_DATE = re.compile(r"(\d{4})(?:-(\d\d))?")
NUMBER_OF_DATE = re.compile(r"[0-9]{9,10}(?:\.[0-9]+)?|[0-9]{6}|[0-9]{12,16}|[0-9]{18,19}")
"""A number of a date in a table whose values are all texts, such as CSV: seconds since 1970 from 1973 to 2286,
or parts of a second or a date of the calendar by the number of digits, as for other numbers."""
CALENDAR = {4: "%Y", 6: "%Y%m", 8: "%Y%m%d", 14: "%Y%m%d%H%M%S"}
"""Number of digits → form of a whole number that is a date of the calendar. As seconds since 1970, the shorter ones
would be times before 1974."""
FRACTIONS = {12: 10**3, 13: 10**3, 15: 10**6, 16: 10**6, 18: 10**9, 19: 10**9}
"""Number of digits before the point → parts of a second that a number counts since 1970; other numbers count seconds.
"""
NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,17})(?:\.\d{1,18})?(?:[eE][-+]?\d{1,2})?")
"""A text that is compared as a number; a leading zero makes it a code."""
MIN_INT, MAX_INT = -(1 << 63), (1 << 63) - 1
NUMBER_STARTS = frozenset("-0123456789")
"""The first character of such a text is one of these; most texts begin with another one."""


class RowMapping:
    """Turns rows with named fields into rows of `documents`, by the settings of the source."""

    def __init__(self, config: SourceConfig):
        self._config = config
        self._text = config.text_parts()
        self._text_paths = frozenset(self._text.paths)
        self._is_joined = config.text is not None

    def __call__(self, value: Mapping[str, Any]) -> tuple[Row, Drop | None]:
        """Return the row of `documents` of a row with named fields, with a Drop if it cannot be a document."""
        config = self._config
        url, stored = field_of(value, config.url_field), {*self._text_paths}
        origin = config.url_field
        if url is None or url == "":
            stored.add(config.url_field)
            url, origin = field_of(value, config.id_field), config.id_field
        if isinstance(url, (str, int)) and len(name := str(url)) <= MAX_URL_CHARS:  # A union takes three times as long.
            row = new_row("row", encodable(name))
            stored.add(origin)
        else:
            row = new_row("row")
        day = None if config.date_field is None else field_of(value, config.date_field)
        if config.date_field is not None and (found := date_of(day)) is not None:
            row["date"] = found
            stored.add(config.date_field)
        if config.licence_field is not None:
            licence = _licence(field_of(value, config.licence_field), config)
            if licence is not None:
                row["licence"] = licence
                stored.add(config.licence_field)
        if config.title_field is not None and isinstance(title := field_of(value, config.title_field), str):
            set_title(row, title)
            stored.add(config.title_field)
        wrong: Drop | None = None
        if config.parents_field is not None:
            wrong = set_parents(row, field_of(value, config.parents_field))
            stored.add(config.parents_field)
        row["meta"], row["_meta"] = meta_of(value, stored, config, day is not None and row["date"] is None)
        if wrong is not None:
            return row, wrong
        text = self._text.join(value) if self._is_joined else field_of(value, config.text_field)
        if not isinstance(text, str):
            return row, Drop("no_text_field")
        return row, set_text(row, text, config)

    def columns(self, names: Sequence[str]) -> list[str]:
        """Return the columns of a table to read, in their order; names that occur twice are left out."""
        config = self._config
        paths = {*self._text.paths, config.url_field, config.id_field, config.date_field, config.licence_field}
        paths |= {config.title_field, config.parents_field, *(config.meta_fields or ())}
        wanted = {top_field(path, names) for path in paths if path is not None}
        wanted |= {*(names if config.meta_fields is None else ())}
        return [name for name in names if name in wanted and names.count(name) == 1]


def field_of(value: Mapping[str, Any], path: str) -> Any:
    """Return the value of a field by its name or path; None if the row has no such field."""
    found = value.get(path)
    if found is None and "." in path and (found := lookup(value, path)) is MISSING:
        return None
    return decoded(found)


# The fields of a row beside text, URL and id.


class MetaNote(NamedTuple):
    """What the manifest counts of the fields of one row."""

    numbers: Mapping[str, bool]
    """Whether the value is a number, by the name of each field in `meta`; names over MAX_NAME are not counted."""
    cut: tuple[str, ...]
    """Causes for which fields were left out or not used: `too_large`, `too_deep`, `unreadable`, `no_date`."""


class _TooDeep(ValueError):
    """A value is nested deeper than MAX_META_DEPTH."""


def meta_of(
    value: Mapping[str, Any], stored: set[str], config: SourceConfig, is_undated: bool = False
) -> tuple[str | None, MetaNote | None]:
    """Return the JSON object of the fields to store in `meta` (None: no field), and what to count of them.

    `stored`: paths of fields that have a column of their own, which `meta` holds only if the recipe names them.
    `is_undated`: True if the row has a date that cannot be read.
    """
    if config.meta_fields is None:
        if "." in "".join(stored):
            value = without(value, sorted(stored))
        fields = [(name, item) for name, item in value.items() if name not in stored] if stored else [*value.items()]
    else:
        found = ((name, lookup(value, name)) for name in dict.fromkeys(config.meta_fields))
        fields = [(name, item) for name, item in found if item is not MISSING]
    size, max_bytes = 1, config.max_meta_bytes
    parts: list[str] = []
    numbers: dict[str, bool] = {}
    cut = {"no_date"} if is_undated else set()
    for name, plain in fields:
        key, counted = _key(name)
        if type(plain) is str:  # Most values are texts, which are JSON values already.
            part = key + _quoted(plain)
            numeric = plain[:1] in NUMBER_STARTS and is_number(plain)
        elif type(plain) is int and MIN_INT <= plain <= MAX_INT:
            part, numeric = f"{key}{plain}", True
        elif plain is True or plain is False:
            part, numeric = key + ("true" if plain else "false"), False
        elif plain is None:
            continue
        elif plain is UNREADABLE_VALUE:
            cut.add("unreadable")
            continue
        else:
            try:
                plain = plain_value(plain)
            except _TooDeep:
                cut.add("too_deep")
                continue
            if plain is None:
                continue
            part, numeric = key + _json(plain), is_number(plain)
        if part.isascii():  # JSON escapes NUL characters.
            added = len(part) + 1
        else:
            part = encodable(part)
            added = len(part.encode()) + 1
        if size + added > max_bytes:
            cut.add("too_large")
            continue
        size += added
        parts.append(part)
        if counted is not None:
            numbers[counted] = numeric
    note = MetaNote(numbers, tuple(sorted(cut)) if cut else ()) if numbers or cut else None
    return ("{" + ",".join(parts) + "}" if parts else None), note


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@lru_cache(maxsize=1 << 12)
def _key(name: str) -> tuple[str, str | None]:
    """Return the name of a field as the key of a JSON object, and as the manifest counts it; None if it does not."""
    return f"{_json(name)}:", (encodable(name) if len(name) <= MAX_NAME else None)


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
        return value if MIN_INT <= value <= MAX_INT else str(value)
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
    if isinstance(value, str):
        text = value.strip()
        number = NUMBER_OF_DATE.fullmatch(text) is not None
        value = (float(text) if "." in text else int(text)) if number else text.removesuffix(" UTC")
    try:
        if isinstance(value, datetime):
            found = value
        elif isinstance(value, date):
            found = datetime(value.year, value.month, value.day)
        elif isinstance(value, str) and (match := PARTIAL_DATE.fullmatch(value)):
            found = datetime(int(match[1]), int(match[2] or 1), 1)
        elif isinstance(value, str):
            found = datetime.fromisoformat(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found = _date_of_number(value)
        else:
            return None
        found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return None
    if type(found) is datetime and found.microsecond % 1000 == 0:
        return found
    # pandas dates have nanoseconds; the column has milliseconds.
    return datetime(*found.timetuple()[:6], found.microsecond // 1000 * 1000, UTC)


def _date_of_number(value: float) -> datetime:
    """Return the date of a number: of the calendar without signs, or the time since 1970. Raises as datetime does."""
    digits = len(str(abs(int(value))))
    if value > 0 and value == int(value) and digits in CALENDAR:
        return datetime.strptime(str(int(value)), CALENDAR[digits])
    return datetime.fromtimestamp(value / FRACTIONS[digits] if digits in FRACTIONS else value, UTC)


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


# The rows of record batches.


def most_bytes(size: int) -> int:
    """Return the maximum size of the values that are read of a file of a table with so many bytes [bytes]."""
    return FREE_BYTES + BYTES_A_BYTE * size


def value_bytes(value: Any) -> int:
    """Return the size of the texts and bytes in a value of a row [code points or bytes]."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(value_bytes, value.values()))
    return sum(map(value_bytes, value)) if isinstance(value, (list, tuple)) else 0


def rows_of_batch(batch: pa.RecordBatch, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a record batch with these columns. A value that cannot be converted is UNREADABLE_VALUE."""
    if not columns:
        yield from ({} for _ in range(batch.num_rows))
    values = [_values(batch.column(batch.schema.get_field_index(name))) for name in columns]
    for row in zip(*values, strict=True):
        yield dict(zip(columns, row, strict=True))


UNCONVERTIBLE = (ValueError, OverflowError, LookupError, pa.ArrowException)
"""Errors of values that Python cannot hold, such as a time in a time zone that is not known."""


def _values(column: pa.Array) -> list[Any]:
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            return [_value(column, row) for row in range(len(column))]
        stored = column.cast(pa.large_binary()).to_pylist()
        return [None if value is None else value.decode("utf-8", "replace") for value in stored]
    except UNCONVERTIBLE:
        return [_value(column, row) for row in range(len(column))]


def _value(column: pa.Array, row: int) -> Any:
    try:
        return column[row].as_py()
    except UNCONVERTIBLE:
        return UNREADABLE_VALUE  # counted as a field that is left out of `meta`; the row itself is read


# The parents of a row: the documents that its text was made from, such as the original of a translation. A row whose
# parents cannot be read is dropped, because a takedown of a parent could not find it.


def set_parents(row: Row, value: Any) -> Drop | None:
    """Set the parents of a row, in their order without repetitions, and return None.

    `value` is one text or a list of texts. None, an empty list and an empty text name no parent. If it names too many
    parents, or another thing than ids and URLs, nothing is set, and a Drop is returned.
    """
    if value is None or value == "":
        return None
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, list | tuple):
        return Drop("bad_parents")
    if len(named) > MAX_PARENTS:
        return Drop("too_many_parents", float(len(named)), float(MAX_PARENTS))
    parents = dict.fromkeys(_parent(name) for name in named)
    if None in parents:
        return Drop("bad_parents")
    if parents:
        row["parents"] = [*parents]
    return None


def _parent(name: Any) -> str | None:
    """Return an id in lower case, or a URL without white space around it; None if the value is neither."""
    if not isinstance(name, str) or len(name) > MAX_PARENT_CHARS:
        return None
    text: str = encodable(name.strip())
    if DOC_ID.fullmatch(text):
        return text.lower()
    return text if "://" in text and resolved_host(text) else None
