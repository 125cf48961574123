"""Samples of the documents that each rule dropped, with personal data replaced, for checking the rule by eye.

The sample is the same in every report of a run: among the first rows, the documents whose doc_id has the smallest hash.
Text is returned only after personal data in it has been replaced.
"""

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.stage import Row
from pipeline.pii.stage import Redactor, load_name_finder
from pipeline.report.facts import RunFacts
from pipeline.tokens.streams import TOKENS
from schemas.errors import ConfigError
from schemas.ids import shuffle_key
from schemas.tables import DROPPED_BEFORE, LATER_VERDICTS, VERDICT_COLUMNS

MAX_ROWS = 20_000
"""Maximum number of rows of `documents` from which samples are drawn, starting at the first part."""
PER_RULE = 3
SHOWN_CHARS = 300
READ_CHARS = 4000
"""Number of characters in which personal data is searched: far more than are shown, so that no value is cut before
redaction where it would be shown."""
VERDICT = ["doc_id", *VERDICT_COLUMNS]


@dataclass(frozen=True)
class DroppedSample:
    """One dropped document with personal data replaced."""

    url: str
    title: str
    text: str
    """The first characters of the text; empty if there is no text."""
    why_empty: str
    """The reason why `text` is empty; empty if it is not."""
    language: str
    value: float | None
    limit: float | None


@dataclass(frozen=True)
class DrawnSamples:
    """Samples of dropped documents, by `stage/rule`."""

    by_rule: Mapping[str, list[DroppedSample]]
    rows_read: int
    """Number of rows of `documents` that were searched for samples."""
    refused: str = ""
    """The reason if no sample can be shown, else empty."""


def draw_samples(facts: RunFacts) -> DrawnSamples:
    """Return up to PER_RULE samples of every rule that dropped a document."""
    if "documents" not in facts.tables or "text" not in facts.tables:
        return DrawnSamples({}, 0)
    try:
        redactor = _redactor(facts)
    except (OSError, zipfile.BadZipFile, ConfigError):
        return DrawnSamples({}, 0, "the name recognition model of the run is not at the path in its recipe")
    chosen: dict[str, list[tuple[int, int, Row]]] = {}
    rows_read = part = 0
    while rows_read < MAX_ROWS and part < facts.num_parts("documents"):
        for row in _rows_of_part(facts, part, MAX_ROWS - rows_read):
            rows_read += 1
            if row["drop_stage"] is not None:
                group = chosen.setdefault(f"{row['drop_stage']}/{row['drop_rule']}", [])
                group.append((shuffle_key(0, row["doc_id"]), part, row))
                group.sort(key=lambda entry: entry[0])
                del group[PER_RULE:]
        part += 1
    texts = _texts(facts, [(part, row["doc_id"]) for group in chosen.values() for _, part, row in group])
    return DrawnSamples(
        {name: [_sample(row, texts.get(row["doc_id"], {}), redactor) for _, _, row in chosen[name]] for name in chosen},
        rows_read,
    )


def _redactor(facts: RunFacts) -> Redactor:
    """Return a redactor that replaces all types of personal data, even types that the run did not replace.

    Names are replaced only if the run used a model that recognizes names.
    """
    if "ner" not in facts.models("pii"):
        return Redactor()
    path = facts.recipe.get("pii", {}).get("ner_model") or ""
    return Redactor(find_names=load_name_finder(path, facts.settings("pii")["ner_labels"]))


def _rows_of_part(facts: RunFacts, part: int, limit: int) -> Iterator[Row]:
    """Yield up to `limit` rows of one part of `documents` with their final verdicts."""
    later: dict[bytes, Row] = {}
    for name in LATER_VERDICTS:
        if name in facts.tables:
            rows = (row for row in facts.read_part(name, part, VERDICT) if row["drop_stage"] is not None)
            later |= {row["doc_id"]: row for row in rows if row["drop_rule"] != DROPPED_BEFORE}
    for identifier, drop in facts.left_out(part).items():
        values = (identifier, TOKENS.name, drop.rule, drop.value, drop.limit)
        later[identifier] = dict(zip(VERDICT, values, strict=True))
    columns = [*VERDICT, "url", "language", "num_chars"]
    for number, row in enumerate(facts.read_part("documents", part, columns)):
        if number == limit:
            return
        yield row | later.get(row["doc_id"], {})


def _texts(facts: RunFacts, documents: list[tuple[int, bytes]]) -> dict[bytes, Row]:
    """Return the row with title and text of each document, by doc_id.

    `documents` has (part number, doc_id) of each document.
    """
    texts: dict[bytes, Row] = {}
    for part in sorted({part for part, _ in documents}):
        missing = {identifier for number, identifier in documents if number == part}
        with facts.open_part("text", part) as stream:
            file = pq.ParquetFile(stream)
            for group in range(file.num_row_groups):
                ids = file.read_row_group(group, columns=["doc_id"]).column("doc_id").to_pylist()
                indices = [index for index, identifier in enumerate(ids) if identifier in missing]
                if indices:
                    table = file.read_row_group(group, columns=["doc_id", "title", "text"])
                    texts |= {row["doc_id"]: row for row in table.take(pa.array(indices)).to_pylist()}
                    missing.difference_update(ids)
                if not missing:
                    break
    return texts


def _sample(row: Row, text: Row, redactor: Redactor) -> DroppedSample:
    language = row["language"]
    shown = {
        name: printable(redactor.redact((value or "")[:READ_CHARS], language)[0])
        for name, value in (("url", row["url"]), ("title", text.get("title")), ("text", text.get("text")))
    }
    why_empty = "" if shown["text"] else "no text was extracted" if row["num_chars"] is None else "the text is empty"
    if text.get("text") is None and row["num_chars"] is not None:
        why_empty = "the recipe does not store the text of dropped documents"
    return DroppedSample(
        **{name: shorten(value) for name, value in shown.items()},
        why_empty=why_empty,
        language=language or "",
        value=row["drop_value"],
        limit=row["drop_limit"],
    )


def printable(text: str) -> str:
    """Return the text on one line without unprintable characters: controls, bidirectional marks, lone surrogates."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())


def shorten(text: str) -> str:
    """Return at most SHOWN_CHARS characters of a text, cut between words if possible."""
    if len(text) <= SHOWN_CHARS:
        return text
    head = text[: SHOWN_CHARS - 1]
    return (head.rpartition(" ")[0] if " " in head[SHOWN_CHARS // 2 :] else head) + "…"
