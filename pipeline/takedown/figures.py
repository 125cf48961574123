"""The counts in a table's figures without removed documents, such as characters, languages, toxicity and marks.

What the steps count for each row is counted again for the removed rows, and subtracted. Figures that follow from all
rows together stay as they were measured, such as distributions of signals, sizes of clusters, cut-offs and the audit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from pipeline.engine.step import BY_SOURCE, add_figures
from pipeline.language import LANGUAGE
from pipeline.toxicity.stage import MEASURED_BY
from schemas.entries import NAME, VALUE
from schemas.planted import DOCUMENTS, LINES, PLANTED
from schemas.tables import DERIVED, PARENTS, Table
from schemas.takedown import RULE, STAGE

TOXIC_WORDS = "toxic_word_counts"
"""Column of `documents` with the listed words by what they measure."""
COLUMNS = (
    "doc_id",
    "source",
    "language",
    "second_language",
    "charset",
    "num_chars",
    "body_chars",
    "num_bytes",
    "pii_counts",
    PLANTED,
    PARENTS.name,
    MEASURED_BY,
    TOXIC_WORDS,
    "marked_by",
    "drop_stage",
    "drop_rule",
)
"""Columns of removed rows that are counted, where a table has them."""
MEASURED_AGAIN = "body_chars"
"""Column of `documents`, and of tables with cuts, by which later steps count the characters of a document."""
ALWAYS = ("rows_in", "rows_kept", "kept_chars")
"""Names in the counts of a source that are there also if their number is 0."""
UNKNOWN = "?"
"""Name of the language of a document without one."""


@dataclass(frozen=True)
class Facts:
    """What is known of a removed document from the tables that were rewritten before."""

    source: str
    language: str | None
    chars: int
    """Length of its text as the next step reads it [code points]."""


def facts_of(facts: Mapping[bytes, Facts], table: str, rows: Iterable[Mapping[str, Any]]) -> dict[bytes, Facts]:
    """Return the facts of removed documents that a table adds or changes; `rows` are its removed rows."""
    found: dict[bytes, Facts] = {}
    for row in rows:
        document, chars = row.get("doc_id", b""), row.get(MEASURED_AGAIN)
        if table == "documents":
            found[row["doc_id"]] = Facts(row["source"], row["language"], chars or 0)
        elif document in facts and chars is not None:
            found[document] = replace(facts[document], chars=chars)
    return found


def counts_of(table: Table, rows: Iterable[Mapping[str, Any]], facts: Mapping[bytes, Facts]) -> dict[str, Any]:
    """Return what the step of a table counted for these rows, with the same names as in the figures of its manifest."""
    counted: dict[str, Any] = {}
    for row in rows if table.has_verdicts else ():
        counted = add_figures(counted, _counts_of_row(table.name, row, facts))
    return counted


def removed_rows(rows: pa.Table) -> list[dict[str, Any]]:
    """Return the counted columns of removed rows."""
    found: list[dict[str, Any]] = rows.select([name for name in COLUMNS if name in rows.schema.names]).to_pylist()
    return found


def without(figures: Mapping[str, Any], counted: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """Return the figures of a table minus what was counted for removed rows; other figures do not change.

    Blanked rows of a table with verdicts count as dropped by the takedown. A language or the like whose count becomes 0
    is left out.
    """
    blanked = table.blank_keeps and table.has_verdicts
    left = {name: _minus(value, counted[name]) if name in counted else value for name, value in figures.items()}
    if blanked and BY_SOURCE in left:
        for source, own in counted.get(BY_SOURCE, {}).items():
            reason = f"{STAGE}/{RULE}"
            numbers = left[BY_SOURCE][source]
            dropped = {**numbers["dropped"], reason: numbers["dropped"].get(reason, 0) + own["rows_in"]}
            numbers |= {"rows_in": numbers["rows_in"] + own["rows_in"], "dropped": dropped}
    return left


def _minus(value: Any, counted: Any) -> Any:
    if not isinstance(value, Mapping):
        return value - counted
    left = {name: _minus(own, counted[name]) if name in counted else own for name, own in value.items()}
    return {name: own for name, own in left.items() if own != 0 or name in ALWAYS}


def _counts_of_row(table: str, row: Mapping[str, Any], facts: Mapping[bytes, Facts]) -> dict[str, Any]:
    known = facts.get(row["doc_id"])
    source = row.get("source") or (known.source if known else None)
    kept = row.get("drop_stage") is None
    chars = _chars(table, row, known, kept)
    reason = f"{row.get('drop_stage')}/{row.get('drop_rule')}"
    counted: dict[str, Any] = {"kept_chars": chars} if kept else {"dropped_chars": {reason: chars}}
    own = {"rows_in": 1, "rows_kept": int(kept), **counted, "dropped": {} if kept else {reason: 1}}
    if source is not None:
        counted[BY_SOURCE] = {source: own}
    return counted | _groups(table, row, known, (kept, chars))


def _chars(table: str, row: Mapping[str, Any], known: Facts | None, kept: bool) -> int:
    """Return the characters that a step counted for a row."""
    if table == "documents" or (table == "clean" and kept):
        return row["num_chars"] or 0
    if table == "repeats" and kept:
        return row["body_chars"] or 0
    return known.chars if known else 0


def _groups(
    table: str, row: Mapping[str, Any], known: Facts | None, verdict: tuple[bool, int]
) -> dict[str, dict[str, int]]:
    """Return the counts of a row by language, source and the like."""
    kept, chars = verdict
    if table == "documents":
        names = {"languages": row.get("language"), "charsets": row.get("charset")}
        found = {figure: {name: 1} for figure, name in names.items() if name is not None}
        if kept and row.get("second_language") is not None:
            found["mixed_languages"] = {f"{row['language']}+{row['second_language']}": 1}
        if row.get("drop_stage") == LANGUAGE.name and row["num_chars"] is None:
            found["dropped_early"] = {row["language"]: 1}
        if kept and row.get(PARENTS.name):
            found[DERIVED] = {row["source"]: 1}
        return found | (_toxicity(row) if kept else {})
    if table == "verdicts" and kept and known is not None:
        language = known.language or UNKNOWN
        return {
            **({"marked": dict.fromkeys(row["marked_by"], 1)} if row.get("marked_by") else {}),
            "kept_languages": {language: 1},
            "kept_language_chars": {language: chars},
            "kept_sources": {known.source: 1},
            "kept_source_chars": {known.source: chars},
        }
    if table == "clean":
        values = {entry[NAME]: entry[VALUE] for entry in (row.get("pii_counts") if kept else None) or ()}
        found = {"pii": values}
        if values:
            total, language = sum(values.values()), row["language"] or UNKNOWN
            found |= {"pii_languages": {language: total}, "pii_sources": {row["source"]: total}}
            found["pii_documents"] = {row["source"]: 1}
        if kept:
            found |= {
                "kept_bytes": {row["source"]: row["num_bytes"]},
                "kept_documents": {row["source"]: 1},
                "kept_languages": {row["language"] or UNKNOWN: 1},
            }
        if row.get(PLANTED):
            found |= {DOCUMENTS: {row["source"]: 1}, LINES: {row["source"]: row[PLANTED]}}
        return found
    return {}


def _toxicity(row: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return the counts of a kept row by what measured toxicity, and by what its listed words measure."""
    found, words = {}, {entry[NAME]: entry[VALUE] for entry in row.get(TOXIC_WORDS) or ()}
    if row.get(MEASURED_BY) is not None:
        found[MEASURED_BY] = {f"{row['language'] or UNKNOWN}/{row[MEASURED_BY]}": 1}
    if words:
        found |= {"toxic_documents": dict.fromkeys(words, 1), "toxic_words": words}
    return found
