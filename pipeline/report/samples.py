"""A few dropped documents for every rule, personal data replaced: what a reader looks at before trusting a rule.

The sample is the same for every report of a run: of the rows in the first parts, those with the smallest hash of
doc_id. Raw text leaves this module only through the redactor.
"""

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.stage import Row
from pipeline.pii.stage import Redactor, load_name_finder
from pipeline.report.facts import EARLIER_DROPS, RunFacts
from pipeline.tokens.streams import TOKENS
from schemas.errors import ConfigError
from schemas.ids import shuffle_key

MAX_ROWS = 20_000
"""Rows of `documents` that are looked at, from the first part on."""
PER_RULE = 3
SHOWN_CHARS = 300
READ_CHARS = 4000
"""Head of a text that the redactor sees: far more than is shown, so that no value is cut where it would be seen."""
VERDICT = ["doc_id", "drop_stage", "drop_rule", "drop_value", "drop_limit"]


@dataclass(frozen=True)
class DroppedSample:
    """One dropped document, redacted."""

    url: str
    title: str
    text: str
    """Head of the text; empty where there is none to show."""
    why_empty: str
    language: str
    value: float | None
    limit: float | None


@dataclass(frozen=True)
class DrawnSamples:
    """The samples by `stage/rule`, how many rows they were drawn from, and why there are none if so."""

    by_rule: Mapping[str, list[DroppedSample]]
    rows_read: int
    refused: str = ""


def draw_samples(facts: RunFacts) -> DrawnSamples:
    """Up to three samples of every rule that dropped something."""
    if "documents" not in facts.tables or "text" not in facts.tables:
        return DrawnSamples({}, 0)
    try:
        redactor = _redactor(facts)
    except (OSError, zipfile.BadZipFile, ConfigError):
        return DrawnSamples({}, 0, "the pipeline that found names in the run is not where its recipe says")
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
    """Every type that is known, whatever the run replaced; names as well where the run looked for them."""
    if "ner" not in facts.models("pii"):
        return Redactor()
    path = facts.recipe.get("pii", {}).get("ner_model") or ""
    return Redactor(find_names=load_name_finder(path, facts.settings("pii")["ner_labels"]))


def _rows_of_part(facts: RunFacts, part: int, limit: int) -> Iterator[Row]:
    """Up to `limit` rows of one part of `documents`, with the verdict that any table gave them."""
    later: dict[bytes, Row] = {}
    for name in ("verdicts", "dedup", "repeats", "clean"):
        if name in facts.tables:
            rows = (row for row in facts.read_part(name, part, VERDICT) if row["drop_stage"] is not None)
            later |= {
                row["doc_id"]: row for row in rows if f"{row['drop_stage']}/{row['drop_rule']}" not in EARLIER_DROPS
            }
    for identifier, drop in facts.left_out(part).items():
        values = (identifier, TOKENS.name, drop.rule, drop.value, drop.limit)
        later[identifier] = dict(zip(VERDICT, values, strict=True))
    columns = [*VERDICT, "url", "language", "num_chars"]
    for number, row in enumerate(facts.read_part("documents", part, columns)):
        if number == limit:
            return
        yield row | later.get(row["doc_id"], {})


def _texts(facts: RunFacts, wanted: list[tuple[int, bytes]]) -> dict[bytes, Row]:
    """Title and text of the wanted documents by id; of each part only the row groups up to the last wanted one."""
    found: dict[bytes, Row] = {}
    for part in sorted({part for part, _ in wanted}):
        missing = {identifier for number, identifier in wanted if number == part}
        with facts.open_part("text", part) as stream:
            file = pq.ParquetFile(stream)
            for group in range(file.num_row_groups):
                ids = file.read_row_group(group, columns=["doc_id"]).column("doc_id").to_pylist()
                places = [place for place, identifier in enumerate(ids) if identifier in missing]
                if places:
                    table = file.read_row_group(group, columns=["doc_id", "title", "text"])
                    found |= {row["doc_id"]: row for row in table.take(pa.array(places)).to_pylist()}
                    missing.difference_update(ids)
                if not missing:
                    break
    return found


def _sample(row: Row, text: Row, redactor: Redactor) -> DroppedSample:
    language = row["language"]
    shown = {
        name: printable(redactor.redact((value or "")[:READ_CHARS], language)[0])
        for name, value in (("url", row["url"]), ("title", text.get("title")), ("text", text.get("text")))
    }
    why_empty = "" if shown["text"] else "no text was extracted" if row["num_chars"] is None else "the text is empty"
    if text.get("text") is None and row["num_chars"] is not None:
        why_empty = "the text was left out of the run, as its recipe says"
    return DroppedSample(
        **{name: shorten(value) for name, value in shown.items()},
        why_empty=why_empty,
        language=language or "",
        value=row["drop_value"],
        limit=row["drop_limit"],
    )


def printable(text: str) -> str:
    """The text on one line, without what has no glyph: controls, marks that turn the direction, lone surrogates."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())


def shorten(text: str) -> str:
    """At most SHOWN_CHARS characters of a text, cut between words where there are any."""
    if len(text) <= SHOWN_CHARS:
        return text
    head = text[: SHOWN_CHARS - 1]
    return (head.rpartition(" ")[0] if " " in head[SHOWN_CHARS // 2 :] else head) + "…"
