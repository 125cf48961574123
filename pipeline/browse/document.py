"""One document as `penstock browse` shows it: its verdict in words, its signals and limits, its texts, and its copies.

Texts and their comparison are bounded, so that no document can fill the memory of the page.
"""

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.browse.rows import (
    BrowsedRun,
    Position,
    find_position,
    judged_batches,
    part_batches,
    read_row,
)
from pipeline.browse.search import describe_field, verdict_json
from pipeline.browse.spans import Hits, Mark, divide, json_value, spans_of_cuts
from pipeline.engine.stage import EVERY, Row
from pipeline.inspect.document_text import verdict_of
from pipeline.inspect.show import JOINED
from pipeline.text.spans import Span, difference, union, without
from schemas.errors import ConfigError
from schemas.tables import PROVENANCE, TABLES, VERDICT_COLUMNS
from schemas.text import format_short

MAX_TEXT_CHARS = 400_000
"""Maximum number of characters of a text that a page shows."""
MAX_COMPARED_WORDS = 4_000
"""Maximum number of words of each text that are compared."""
MAX_MEMBERS = 50
"""Maximum number of documents of a cluster that a page lists."""
MAX_MEMBER_ROWS = 2_000_000
"""Maximum number of rows that one request reads to find the documents of a cluster."""
HIDDEN = (
    "signature",
    "paragraphs",
    "paragraph_perplexity",
    "cuts",
    "text",
    "title",
    "leader",
    "survivor",
    "blocks",
    "text_cuts",
)
"""Columns that are not in the list of signals: bytes, long lists, and values that are shown elsewhere."""
ORIGIN = (*(field.name for field in PROVENANCE), "record_type", "charset")
"""Columns of the provenance of a document."""
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]\s*|[^\s\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+\s*|\s+")
"""A word with the whitespace after it; a character in scripts that are written without spaces."""


def document_json(run: BrowsedRun, doc_id: bytes, hint: Position | None, contains: str) -> dict[str, Any]:
    """Return everything that a page shows of a document, as a JSON value; hits of `contains` are marked.

    `hint` is the position where a search returned the document; None = all parts may be searched. Raises ConfigError if
    the run has no such document.
    """
    position = find_position(run, doc_id, hint)
    read = {name: read_row(run, name, position.part, doc_id) for name in ("documents", *JOINED, "text")}
    rows = {name: row for name, row in read.items() if row is not None}
    documents = rows["documents"] | _final_verdict(run, position)
    text, clean, identifier = rows.get("text", {}), rows.get("clean", {}), doc_id.hex()
    hits = Hits(contains)
    whole = text.get("text")
    cuts = _cuts(run, rows)
    return {
        "doc": identifier,
        "at": str(position),
        "title": text.get("title"),
        "url": documents.get("url"),
        "verdict": verdict_json(documents) | _verdict_words(run, documents),
        "provenance": [_named_value(run, name, documents[name]) for name in ORIGIN],
        "signals": list(_signals(run, rows, documents)),
        "text": _text_json(whole, [*cuts, *hits.marks((whole or "")[:MAX_TEXT_CHARS])]),
        "cut_chars": sum(end - start for start, end in union([(cut.start, cut.end) for cut in cuts], [])),
        "num_hits": len(hits.marks(whole or "")),
        "clean": _clean_json(clean, hits),
        "cluster": _cluster_json(rows),
        "commands": [run.command("show", "--doc", identifier), run.command("show", "--doc", identifier, "--text")],
    }


def _final_verdict(run: BrowsedRun, position: Position) -> Row:
    with closing(judged_batches(run, position.part, [])) as batches:
        for batch in batches:
            if position.row < batch.first_row + batch.rows.num_rows:
                row: Row = batch.rows.slice(position.row - batch.first_row, 1).to_pylist()[0]
                return {name: row[name] for name in VERDICT_COLUMNS}
    return {}


def _verdict_words(run: BrowsedRun, documents: Row) -> dict[str, Any]:
    """Return the verdict as a sentence, and the meaning, setting and measured column of its rule."""
    stage, rule = documents.get("drop_stage"), documents.get("drop_rule")
    if stage is None:
        return {"sentence": "Kept: no rule dropped this document.", "text": "kept"}
    name, value, limit = f"{stage}/{rule}", documents.get("drop_value"), documents.get("drop_limit")
    checks: Mapping[str, Any] = run.figures("verdicts").get("limits", {})
    check = next((check for key, check in checks.items() if key.partition(" ")[0] == name), None)
    words = f"Dropped by the rule {rule} of the stage {stage}"
    if check is not None and value is not None and limit is not None:
        side = "minimum" if check["side"] == "min" else "maximum"
        words += f": {check['column']} is {format_value(value)}, and the {side} is {format_value(limit)}"
    elif value is not None:
        words += f": the measured value is {format_value(value)}"
        words += f", and the limit is {format_value(limit)}" if limit is not None else ""
    details = {"sentence": f"{words}.", "text": verdict_of(documents), "meaning": run.rules.meanings.get(name, "")}
    return details | ({"setting": check["setting"], "column": check["column"]} if check else {})


def format_value(value: float) -> str:
    """Return a number with at most four significant digits, or whole if it is a whole number."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return format_short(value, "") if abs(value) >= 1e6 else f"{value:.4g}"


def _field_of(run: BrowsedRun, name: str) -> pa.Field | None:
    schemas = (run.columns, *(table.schema for table in TABLES.values() if table.schema is not None))
    return next((schema.field(name) for schema in schemas if name in schema.names), None)


def _named_value(run: BrowsedRun, name: str, value: Any) -> dict[str, Any]:
    field = _field_of(run, name)
    described = {"meaning": "", "unit": ""} if field is None else describe_field(field)
    return {"name": name, "value": json_value(value), **described}


def _signals(run: BrowsedRun, rows: Mapping[str, Row], documents: Row) -> Iterator[dict[str, Any]]:
    """Yield every measured value of a document with its unit, meaning and table, and with the limit of its check."""
    limits: dict[str, list[dict[str, Any]]] = {}
    for rule, check in run.figures("verdicts").get("limits", {}).items():
        limit = check["limits"].get(documents.get("language") or EVERY, check["limits"].get(EVERY))
        if limit is not None and documents.get("source") in check.get("sources", [documents.get("source")]):
            item = {"rule": rule, "side": check["side"], "limit": limit, "setting": check["setting"]}
            limits.setdefault(check["column"], []).append(item)
    known = {*ORIGIN, *VERDICT_COLUMNS, *HIDDEN}
    again = rows.get("templates", {})  # its values are compared in place of those of `documents`
    for table, row in rows.items():
        for name, value in row.items() if table != "text" else ():
            if value is None or name in known or (table == "clean" and name in documents):
                continue
            checks = [check | {"broken": _breaks(value, check)} for check in limits.get(name, [])]
            decides = table != "repeats" and (table != "documents" or again.get(name) is None)
            yield _named_value(run, name, value) | {"table": table, "checks": checks if decides else []}
        if not TABLES[table].measured_again:
            known |= {*row} if table != "documents" else set()


def _breaks(value: Any, check: Mapping[str, Any]) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    measured, limit = np.float32(value), np.float32(check["limit"])
    return bool(measured < limit if check["side"] == "min" else measured > limit)


def _cuts(run: BrowsedRun, rows: Mapping[str, Row]) -> list[Mark]:
    """Return all cuts of a document's text as marks with their reasons."""
    config = run.tables["documents"].manifest.content.config
    lines = ", ".join(config.get("quality", {}).get("cut_lines", ()))
    reasons = [f"line rules of {lines}"] if lines else []
    reasons += ["n-grams of evaluation sets"] if config.get("decontaminate", {}).get("cut") else []
    marks = spans_of_cuts(_line_cuts(rows), " or ".join(reasons) or "line rules")
    marks += spans_of_cuts(rows.get("templates", {}).get("cuts"), "template")
    paragraphs = rows.get("paragraphs", {}).get("cuts") or ()
    marks += spans_of_cuts(
        [cut | {"reason": f"paragraph: {cut['reason'].replace('_', ' ')}"} for cut in paragraphs], "paragraph"
    )
    return marks + spans_of_cuts(
        [cut | {"reason": f"repeated {cut['reason']}"} for cut in rows.get("repeats", {}).get("cuts") or ()], "repeated"
    )


def _line_cuts(rows: Mapping[str, Row]) -> Sequence[Mapping[str, Any]]:
    """Return the cuts of line rules: those of the text without the templates if there are any."""
    templates: Mapping[str, Any] = rows.get("templates", {})
    if not templates.get("cuts"):
        return rows.get("text", {}).get("cuts") or ()
    spans = difference(_pairs(templates["text_cuts"]), _pairs(templates["cuts"]))
    return [{"start": start, "end": end} for start, end in spans]


def _text_json(text: str | None, marks: Sequence[Mark]) -> dict[str, Any] | None:
    if text is None:
        return None
    shown = text[:MAX_TEXT_CHARS]
    return {"pieces": divide(shown, marks), "chars": len(text), "shown_chars": len(shown)}


def _clean_json(clean: Row, hits: Hits) -> dict[str, Any] | None:
    """Return the clean text with its placeholders and hits marked; None if the document has no clean text."""
    if clean.get("text") is None:
        return None
    names = [entry["name"].upper() for entry in clean.get("pii_counts") or ()]
    text: str = clean["text"][:MAX_TEXT_CHARS]
    marks = hits.marks(text)
    if names:
        pattern = re.compile(f"<({'|'.join(map(re.escape, names))})(?:_[a-p]+)?>")
        marks += [
            Mark(match.start(), match.end(), "pii", f"replaced {match[1].lower()}") for match in pattern.finditer(text)
        ]
    shown = _text_json(clean["text"], marks)
    return None if shown is None else shown | {"title": clean.get("title"), "url": clean.get("url")}


def _cluster_json(rows: Mapping[str, Row]) -> dict[str, Any] | None:
    """Return the cluster of a document, its size and its survivor; None if the document was not measured."""
    own = rows.get("dedup") or rows.get("clusters")
    if own is None:
        return None
    names = ("cluster", "cluster_size", "survivor", "similarity")
    return {name: json_value(own.get(name)) for name in names} | {
        "joined_with": json_value(rows.get("clusters", {}).get("leader"))
    }


# The members of a cluster, and two of them side by side.


def cluster_members(run: BrowsedRun, cluster: bytes, start: Position) -> dict[str, Any]:
    """Return documents of a cluster as a JSON value, from a position in the table `dedup` (or `clusters`) on.

    At most MAX_MEMBERS documents are returned, and at most about MAX_MEMBER_ROWS rows are read; `next` is the position
    from which the search continues, or None. Raises ConfigError if the run has no clusters.
    """
    table = "dedup" if "dedup" in run.tables else "clusters"
    if table not in run.tables:
        raise ConfigError(f"{run.address}: expected a run with clusters, got none. Run `penstock run` to its end.")
    members: list[dict[str, Any]] = []
    total = {"parts": run.num_parts}
    rows_read = 0
    for part in range(start.part, run.num_parts):
        chosen: list[Row] = []
        row_number = 0
        for batch in part_batches(run, table, part, ["doc_id", "cluster", "similarity"]):
            rows_read += batch.num_rows
            is_member = pc.equal(batch.column("cluster"), cluster).to_numpy(zero_copy_only=False)
            for index in np.flatnonzero(is_member).tolist():
                if part > start.part or row_number + index >= start.row:
                    chosen.append(batch.slice(index, 1).to_pylist()[0] | {"number": row_number + index})
            row_number += batch.num_rows
            if len(members) + len(chosen) >= MAX_MEMBERS:
                chosen = chosen[: MAX_MEMBERS - len(members)]
                next_position = Position(part, chosen[-1]["number"] + 1)
                return {
                    "members": members + _members(run, part, chosen),
                    "next": str(next_position),
                    "parts_done": part,
                } | total
        members += _members(run, part, chosen)
        if rows_read >= MAX_MEMBER_ROWS and part + 1 < run.num_parts:
            return {"members": members, "next": str(Position(part + 1, 0)), "parts_done": part + 1} | total
    return {"members": members, "next": None, "parts_done": run.num_parts} | total


def _members(run: BrowsedRun, part: int, chosen: Sequence[Row]) -> list[dict[str, Any]]:
    """Return documents of a cluster in one part, with title, URL and verdict."""
    members = []
    similarities = {row["doc_id"]: row["similarity"] for row in chosen}
    wanted = pa.array([*similarities], pa.binary(16))
    for batch in judged_batches(run, part, ["url", "num_chars"]) if chosen else ():
        is_member = pc.is_in(batch.rows.column("doc_id"), value_set=wanted).to_numpy()
        for index in np.flatnonzero(is_member).tolist():
            row = batch.rows.slice(index, 1).to_pylist()[0]
            text = read_row(run, "text", part, row["doc_id"]) or {}
            members.append(
                {
                    "doc": row["doc_id"].hex(),
                    "at": str(Position(part, batch.first_row + index)),
                    "title": text.get("title"),
                    "url": row["url"],
                    "num_chars": row["num_chars"],
                    "similarity": json_value(similarities[row["doc_id"]]),
                    "verdict": verdict_json(row),
                }
            )
    return members


@dataclass(frozen=True)
class ComparedText:
    """The text of a document after all cuts, bounded for comparison."""

    words: list[str]
    is_whole: bool
    """False if the text has more than MAX_COMPARED_WORDS words."""


def compare_documents(
    run: BrowsedRun, a: tuple[bytes, Position | None], b: tuple[bytes, Position | None]
) -> dict[str, Any]:
    """Return the texts of two documents after all cuts, with the words that only one of them has marked.

    Each document is given by its doc_id and the position at which a search returned it. Raises ConfigError if the run
    has no such document or its text is not stored.
    """
    texts = [_compared_text(run, *document) for document in (a, b)]
    left, right, equal = word_differences(texts[0].words, texts[1].words)
    total = len(texts[0].words) + len(texts[1].words)
    return {
        "a": left,
        "b": right,
        "equal_share": 2 * equal / total if total else 1.0,
        "is_whole": all(text.is_whole for text in texts),
        "max_words": MAX_COMPARED_WORDS,
    }


def _compared_text(run: BrowsedRun, doc_id: bytes, hint: Position | None) -> ComparedText:
    part = find_position(run, doc_id, hint).part
    text = read_row(run, "text", part, doc_id) or {}
    if text.get("text") is None:
        raise ConfigError(
            f"{run.address}: expected the stored text of {doc_id.hex()}, got none: the run did not extract it or does "
            "not store it. Compare another document."
        )
    later = [(read_row(run, table, part, doc_id) or {}).get("cuts") for table in ("paragraphs", "repeats")]
    first = (read_row(run, "templates", part, doc_id) or {}).get("text_cuts") or text.get("cuts")
    cuts = union(_pairs(first), [span for stored in later for span in _pairs(stored)])
    words = WORD.finditer(without(text["text"], cuts))
    taken = [word[0] for word in itertools.islice(words, MAX_COMPARED_WORDS)]
    return ComparedText(taken, next(words, None) is None)


def _pairs(cuts: Sequence[Mapping[str, int]] | None) -> list[Span]:
    return [(cut["start"], cut["end"]) for cut in cuts or ()]


def word_differences(a: Sequence[str], b: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """Return two texts as pieces in which differing words are marked, and the number of equal words.

    Whitespace after a word is not compared.
    """
    keys = [[word.strip() for word in words] for words in (a, b)]
    # autojunk keeps the time bounded: words that are more than 1 % of a text do not start a match, but extend one.
    matcher = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=True)
    left: list[dict[str, Any]] = []
    right: list[dict[str, Any]] = []
    equal = 0
    for tag, a_start, a_end, b_start, b_end in matcher.get_opcodes():
        is_equal = tag == "equal"
        equal += a_end - a_start if is_equal else 0
        for pieces, words, kind in ((left, a[a_start:a_end], "removed"), (right, b[b_start:b_end], "added")):
            if words:
                pieces.append({"text": "".join(words), "marks": {} if is_equal else {kind: ""}})
    return left, right, equal
