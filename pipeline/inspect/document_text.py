"""Documents as text, in a short form or with every column, and as JSON (`penstock show`).

The text of a kept document is that of the table `clean`, in which personal data is replaced. A dropped document has
only its raw text, in which the spans that were cut are marked.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipeline.engine.stage import Row
from pipeline.inspect.show import COLUMNS
from pipeline.quality.rules import SIGNALS_OF
from pipeline.text.spans import union
from schemas.entries import NAME, VALUE, to_mapping
from schemas.tables import LICENCE, META, META_PREFIX, PROVENANCE, TABLES
from schemas.text import printable, printable_json, printable_lines

ORIGIN = {*(field.name for field in PROVENANCE), "record_type", LICENCE.name, META.name, "http_status", "mime"}
TEXT_FACTS = {
    *("page_bytes", "charset", "charset_from", "num_chars", "body_chars", "num_bytes"),
    *("unicode_repairs", "mojibake", "replacement_chars"),
    *("language", "language_score", "language_share", "second_language"),
}
QUALITY_SIGNALS = {signal.name for signals in SIGNALS_OF.values() for signal in signals}
CUT_COLUMNS = ("text.cuts", "paragraphs.cuts", "repeats.cuts")
"""Columns of a found document with spans that were cut from its raw text."""
NEW_CUTS = "templates.text_cuts"
"""Column with spans that replace `text.cuts` in a document from which templates were cut."""
Meanings = Mapping[str, str]
"""`stage/reason` → what it means."""


def format_document(row: Row, with_text: bool, columns: pa.Schema = COLUMNS, meanings: Meanings | None = None) -> str:
    """Format a document as text: its verdict, then every measured column with its unit, in groups.

    Columns of a group that are zero or empty are named in one line. `with_text` adds the clean text, or the raw text of
    a dropped document with marked cuts. `columns` has the units of columns that are in no standard table.
    """
    fields = {
        field.name: field
        for schema in (columns, *(table.schema or () for table in TABLES.values()))
        for field in schema
    }
    groups: dict[str, list[str]] = {}
    empty: dict[str, list[str]] = {}
    for name, value in row.items():
        if value is None or name == "doc_id" or name.split(".")[-1].startswith("drop_"):
            continue
        if name == "clean.text" or name.startswith("text."):
            continue
        group = group_of(name)
        lines = groups.setdefault(group, [])
        if name == "meta":
            stored = json.loads(value).items()
            lines += [f"  {printable(META_PREFIX + own):<26} {printable(_shown(item))}" for own, item in stored]
        elif group != "provenance" and not isinstance(value, bool) and value in (0, []):
            empty.setdefault(group, []).append(name)
        else:
            field = fields.get(name.split(".")[-1])
            unit = ((field.metadata if field else None) or {}).get(b"unit", b"").decode()
            lines.append(f"  {name:<26} {printable(_shown(value))}{' ' + unit if unit and unit != 'ratio' else ''}")
    lines = [_first_line(row, meanings)]
    for group, listed in groups.items():
        lines += [group, *listed]
        lines += [f"  zero or none: {', '.join(empty[group])}"] if group in empty else []
    return "\n".join([*lines, *(_text_lines(row) if with_text else ())])


def group_of(column: str) -> str:
    """Return the heading under which a column of a found document is printed, such as `quality signals`."""
    table, dot, _ = column.partition(".")
    if dot and table in TABLES:
        return f"table {table}"
    if column in ORIGIN:
        return "provenance"
    if column in TEXT_FACTS:
        return "text and language"
    return "quality signals" if column in QUALITY_SIGNALS else "other columns"


def format_summary(row: Row, with_text: bool, meanings: Meanings | None = None) -> str:
    """Format a document in a few lines: verdict, the copy that is kept in its place, URL, title, language and length.

    `with_text` adds the text as in `format_document`. A title that is only in the raw text is a part of the text.
    """
    survivor = row.get("dedup.survivor") if row.get("drop_stage") == "dedup" else None
    similarity = row.get("drop_value")  # of a document of the same URL it is null
    alike = f", similarity {similarity:.2f}" if similarity is not None else ""
    chars = row.get("body_chars") if row.get("body_chars") is not None else row.get("num_chars")
    score = f" ({row['language_score']:.2f})" if row.get("language_score") is not None else ""
    values = {
        "kept copy": f"{survivor.hex()}{alike}" if survivor not in (None, row["doc_id"]) else None,
        "url": row.get("url"),
        "title": row.get("clean.title"),
        "language": f"{row['language']}{score}" if row.get("language") else None,
        "source": row.get("source"),
        "length": f"{chars:,} code points" if chars is not None else None,
    }
    lines = [f"  {name:<10} {printable(value)}" for name, value in values.items() if value]
    return "\n".join([_first_line(row, meanings), *lines, *(_text_lines(row) if with_text else ())])


def _first_line(row: Row, meanings: Meanings | None) -> str:
    return f"document {row['doc_id'].hex()}  {verdict_of(row, meanings)}"


def has_raw_text(row: Row) -> bool:
    """Return True if the text of a found document is raw, so that it may hold personal data."""
    return row.get("clean.text") is None and row.get("text.text") is not None


def _text_lines(row: Row) -> Iterator[str]:
    yield ""
    if row.get("clean.text") is not None:
        yield from (f"  | {line}" for line in printable_lines(row["clean.text"]))
    elif not has_raw_text(row):
        yield "  no text is stored: the record has none, or `text.dropped` or a takedown left it out"
    else:
        cuts = raw_cuts(row)
        yield "  raw text" + ("; [- and -] enclose the spans that were cut" if cuts else "")
        if row.get("text.title"):
            yield f"  title: {printable(row['text.title'])}"
        yield from (f"  | {line}" for line in printable_lines(mark_spans(row["text.text"], cuts)))


def raw_cuts(row: Row) -> list[tuple[int, int]]:
    """Return the spans that were cut from the raw text of a found document, by any rule [code points]."""
    columns = (NEW_CUTS, *CUT_COLUMNS[1:]) if row.get(NEW_CUTS) else CUT_COLUMNS
    cuts = [cut for name in columns for cut in row.get(name) or ()]
    return union([(cut["start"], cut["end"]) for cut in cuts], [])


def mark_spans(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Return the text with `[-` and `-]` around each of the sorted, disjoint spans [code points]."""
    pieces, end = [], 0
    for start, stop in spans:
        pieces += [text[end:start], "[-", text[start:stop], "-]"]
        end = stop
    return "".join([*pieces, text[end:]])


def document_json(row: Row, with_text: bool) -> str:
    """Return a found document as one line of JSON with ids and digests in hex and without null values.

    `with_text` adds the text: `clean.text`, or `text.text`, which is raw, with its `text.cuts`.
    """
    values: Row = {}
    for name, value in row.items():
        if value is None or (name in ("clean.text", "text.text", "text.title", "text.cuts") and not with_text):
            continue
        is_entries = isinstance(value, list) and value and isinstance(value[0], dict) and {*value[0]} == {NAME, VALUE}
        values[name] = json.loads(value) if name == "meta" else to_mapping(value) if is_entries else value
    return printable_json(values)


def verdict_of(row: Row, meanings: Meanings | None = None) -> str:
    """Return the verdict of a row as text: `kept`, or `dropped by` with stage, rule, value, limit and meaning."""
    if row.get("drop_stage") is None:
        return "kept"
    value, limit = row.get("drop_value"), row.get("drop_limit")
    measured = f" ({value:g}, limit {limit:g})" if value is not None and limit is not None else ""
    rule = f"{row['drop_stage']}/{row['drop_rule']}"
    meaning = (meanings or {}).get(rule)
    return f"dropped by {rule}{measured}{f': {meaning}' if meaning else ''}"


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    if isinstance(value, dict) and NAME in value:
        return f"{value[NAME]} {_shown(value[VALUE])}"
    if isinstance(value, dict) and "start" in value:  # a span; some have a reason or a number of pages
        more = f" {value['reason']}" if "reason" in value else f" on {value['pages']} pages" if "pages" in value else ""
        return f"{value['start']}-{value['end']}{more}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | bool) else str(value)
