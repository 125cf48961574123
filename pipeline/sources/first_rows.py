"""The first rows of input files: which fields they have, and whether a source has any text at all.

A wrong `source.text_field`, a wrong format or empty files make every row a drop. A run would notice it after reading
everything, so each part of `documents` watches its rows and stops the run early if no file has a text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.stage import Drop, Row, Split
from pipeline.sources.compression import FrameReader
from pipeline.sources.config import SourceConfig
from pipeline.sources.lines import BOM, LineReader, parse_object
from pipeline.sources.rows import UNREADABLE
from pipeline.sources.splits import open_stream
from pipeline.sources.tables.arrow_table import read_batches
from pipeline.sources.tables.csv_table import by_name, read_records
from schemas.errors import ConfigError

FIELD_ROWS = 100
"""Number of rows from which the fields of a file are listed."""
WATCHED_ROWS = 1000
"""Number of rows without a text after which a part reads the first rows of other files; also their number there."""
OTHER_FILES = 32
"""Maximum number of other files whose first rows are read, evenly spread over the source."""
SHOWN_FIELDS = 12
"""Maximum number of fields that a message lists."""
WITHOUT_TEXT = ("no_text_field", "bad_line", "bad_row", "ragged_row", "record_too_large")
"""Reasons of the source stage that leave open whether the file has texts."""

OpenSplit = Callable[[Split, Any, Any], Iterator[tuple[Row, Drop | None]]]
"""The function `open` of a source stage."""


@dataclass(frozen=True)
class FieldSample:
    """The values of one field in the first rows of a file."""

    kinds: tuple[str, ...]
    """Types of the values, such as `text` or `list`, without null, sorted."""
    chars: float
    """Mean length of the texts over all rows [code points]; 0 if no value is a text."""


def fields_of(split: Split, config: SourceConfig) -> dict[str, FieldSample]:
    """Return the fields in the first rows of a file of rows, such as JSON lines, in their order; empty for others.

    A file that cannot be read has no fields. Raises OSError if the storage fails.
    """
    if split.format not in ROWS_OF:
        return {}
    values: dict[str, list[Any]] = {}
    with closing(open_stream(split)) as stream:
        rows = list(islice(ROWS_OF[split.format](stream, split, config), FIELD_ROWS))
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: _sample_of(found, len(rows)) for name, found in values.items()}


def _sample_of(values: Sequence[Any], rows: int) -> FieldSample:
    kinds = {_kind(value) for value in values if value is not None}
    return FieldSample(tuple(sorted(kinds)), sum(len(value) for value in values if isinstance(value, str)) / rows)


def _kind(value: Any) -> str:
    names = {str: "text", bool: "boolean", int: "number", float: "number", list: "list", dict: "object"}
    return names.get(type(value), type(value).__name__)


def _json_rows(stream: Any, split: Split, config: SourceConfig) -> Iterator[Mapping[str, Any]]:
    for _, line in LineReader(FrameReader(stream, None), config.max_record_bytes):
        if isinstance(line, Drop):
            continue
        value = parse_object(line.removeprefix(BOM))
        if value is not None:
            yield value


def _parquet_rows(stream: Any, split: Split, config: SourceConfig) -> Iterator[Mapping[str, Any]]:
    try:
        file = pq.ParquetFile(stream, pre_buffer=False)
        for batch in file.iter_batches(batch_size=FIELD_ROWS):
            yield from batch.to_pylist()
    except (pa.ArrowException, ValueError):
        return


def _csv_rows(stream: Any, split: Split, config: SourceConfig) -> Iterator[Mapping[str, Any]]:
    names = [*config.csv.columns]
    for record in read_records(stream, split, config):
        if isinstance(record.fields, Drop):
            if not names:
                return  # The header is lost.
            continue
        if not names:
            names = record.fields
        elif len(record.fields) == len(names):
            yield by_name(names, record.fields)


def _arrow_rows(stream: Any, split: Split, config: SourceConfig) -> Iterator[Mapping[str, Any]]:
    try:
        for batch in read_batches(stream):
            yield from batch.slice(0, FIELD_ROWS).to_pylist()
    except UNREADABLE:
        return


def _shard_rows(stream: Any, split: Split, config: SourceConfig) -> Iterator[Mapping[str, Any]]:
    return (_parquet_rows if split.name.endswith(".parquet") else _arrow_rows)(stream, split, config)


ROWS_OF: Mapping[str, Callable[[Any, Split, SourceConfig], Iterator[Mapping[str, Any]]]] = {
    "jsonl": _json_rows,
    "parquet": _parquet_rows,
    "csv": _csv_rows,
    "arrow": _arrow_rows,
    "hf": _shard_rows,
}
"""Readers of rows with named fields, by format."""


def suggest_text_field(fields: Mapping[str, FieldSample]) -> str | None:
    """Return the field that most likely holds the text: the one with the longest texts; None if no field has texts."""
    texts = {name: sample.chars for name, sample in fields.items() if sample.chars > 0}
    return max(texts, key=lambda name: texts[name]) if texts else None


class TextWatch:
    """Watches the rows of one part until one of them shows that the source has texts.

    If the first WATCHED_ROWS rows of the part, or all of a shorter one, have no text, the first rows of up to
    OTHER_FILES other files are read. If one of these files has a text, the rows of this part are dropped as usual and
    the run continues: some files of a legitimate source may have no text. Otherwise the part raises ConfigError. The
    decision depends on the files alone, and not on the order in which parts are processed.
    """

    def __init__(self, splits: Sequence[Split], others: Sequence[Split], config: SourceConfig, open_split: OpenSplit):
        """`splits`: the files of the part. `others`: files of the source that may be read, as `spread` chooses them."""
        self._split, self._config, self._open = splits[0], config, open_split
        own = {split.key or split.name for split in splits}
        self._others = [other for other in others if (other.key or other.name) not in own]
        self._num_others = len(splits) - 1 + len(self._others)
        self._is_over = self._split.is_crawl  # its format is known, and other files would be fetched
        if (span := self._split.span) is not None:
            # The first range may have few rows. For the others, it decides.
            self._is_over |= span.number > 0
            self._others.append(replace(self._split, span=None))
        self._rows = 0
        self._rules: dict[str, int] = {}

    def see(self, row: Row) -> None:
        """Look at the next finished row. Raises ConfigError if the source has no text."""
        if self._is_over:
            return
        self._rows += 1
        rule = row.get("drop_rule") if row.get("drop_stage") == "source" else None
        if row["record_type"] != "gap" and rule not in WITHOUT_TEXT:
            self._is_over = True
            return
        self._rules[str(rule)] = self._rules.get(str(rule), 0) + 1
        if self._rows == WATCHED_ROWS:
            self._decide()

    def end(self) -> None:
        """Decide after the last row of a short part. Raises ConfigError if the source has no text."""
        if not self._is_over:
            self._decide()

    def _decide(self) -> None:
        self._is_over = True
        if any(self._has_text(other) for other in self._others):
            return
        raise ConfigError(self._message())

    def _has_text(self, split: Split) -> bool:
        alone = replace(split, companions=())  # Whether a row has a text does not depend on other files.
        with closing(open_stream(split)) as stream:
            for row, drop in islice(self._open(alone, stream, self._config), WATCHED_ROWS):
                if row["record_type"] != "gap" and (drop is None or drop.rule not in WITHOUT_TEXT):
                    return True
        return False

    def _message(self) -> str:
        """Return the error for a source whose rows have no text, by the most frequent cause."""
        cause = max(self._rules, key=lambda rule: self._rules[rule], default="empty_file")
        others = f" and {_count(self._num_others, 'other file')}" if self._num_others else ""
        where = f"{self._split.name}{others}"
        if cause == "no_text_field":
            return self._field_message(where)
        if cause == "bad_line":
            return (
                f"source.paths: expected a JSON object on each line of {where}, got none in "
                f"{_count(self._rows, 'line')}. Name other files, or set source.format."
            )
        why = f", only {', '.join(sorted(self._rules))}" if self._split.size and self._rules else ""
        return (
            f"source.paths: expected records in {where}, got none{why}. Name files that have records, or set "
            "source.format."
        )

    def _field_message(self, where: str) -> str:
        fields = fields_of(self._split, self._config)
        if self._config.text is not None:
            wanted, setting = ", ".join(self._config.text_parts().paths), "source.text"
        else:
            wanted, setting = self._config.text_field, "source.text_field"
        names = [*fields][:SHOWN_FIELDS]
        more = f" and {len(fields) - len(names)} more" if len(fields) > len(names) else ""
        best = suggest_text_field({name: sample for name, sample in fields.items() if name != wanted})
        fix = f"Set {setting}={best}." if best else "Name files that have texts in source.paths."
        if wanted in fields:
            kinds = " or ".join(fields[wanted].kinds) or "null"
            return (
                f"{setting}: expected text in the field `{wanted}` of {where}, got {kinds} in "
                f"{_count(self._rows, 'row')}. {fix}"
            )
        got = f"got the fields {', '.join(names)}{more}" if fields else "got rows without it"
        return f"{setting}: expected the field `{wanted}` in the rows of {where}, {got}. {fix}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def spread(splits: Sequence[Split], number: int = OTHER_FILES) -> tuple[Split, ...]:
    """Return at most `number` splits, evenly spread over all of them, the first and the last included."""
    if len(splits) <= number:
        return tuple(splits)
    return tuple(splits[place * (len(splits) - 1) // (number - 1)] for place in range(number))
