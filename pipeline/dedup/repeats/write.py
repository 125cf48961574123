"""The cuts of one part: what stands elsewhere goes, what is left is judged again, and the table gets its rows."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.dedup.keys import scopes_of
from pipeline.dedup.repeats.config import DROPPED_BEFORE, NOTHING_LEFT, REPEATED_SHARE, REPEATS, RepeatsConfig
from pipeline.dedup.repeats.cut import Cut, cuts_in_whole_text, cuts_of
from pipeline.dedup.repeats.keys import (
    NO_ORDER,
    SUBSTRING,
    Document,
    KnownRepeats,
    Reevaluator,
    RepeatsTask,
    known_repeats,
)
from pipeline.dedup.repeats.units import Tokens, covered_runs, grams, scoped, units_of
from pipeline.engine.parquet import TEXTS_AT_ONCE, apply_cuts, read_measured
from pipeline.engine.part import DropCounter, PartOutput, PartResult, PartTarget, TableTarget, set_verdict, write_part
from pipeline.engine.stage import Drop, Row
from pipeline.text.spans import Span, complement, without
from schemas.tables import REPEATS as REPEATS_SCHEMA

ANY = "any"
"""In the figures: documents with a cut of whatever kind."""


def passages_of(
    document: Document, units: KnownRepeats, windows: KnownRepeats, config: RepeatsConfig
) -> list[tuple[str, list[Span]]]:
    """The spans of a document that stand elsewhere, by kind in the order of the settings [code points]."""
    found: list[tuple[str, list[Span]]] = []
    for kind in config.units:
        if kind == SUBSTRING:
            spans = repeated_runs(document, windows, config)
        else:
            all_units = units_of(document.body, kind, config)
            keys = scoped(all_units.keys, kind, document.scope)
            gone = units.is_repeat(keys[:, None], all_units.starts, document.doc_id)
            spans = list(zip(all_units.starts[gone].tolist(), all_units.ends[gone].tolist()))
        found.append((kind, spans))
    return found


def repeated_runs(document: Document, windows: KnownRepeats, config: RepeatsConfig) -> list[Span]:
    """The spans of a document that windows cover which stand elsewhere [code points]."""
    if not len(windows):
        return []
    tokens = Tokens(document.body, config.substring_unit)
    prints = scoped(grams(tokens.codes, config.length), SUBSTRING, document.scope)
    near = np.flatnonzero(windows.has_first_number(prints))
    keys = np.stack([prints[near], tokens.checks(near, config.length)], axis=1)
    gone = windows.is_repeat(keys, near, document.doc_id)
    return tokens.chars(covered_runs(near[gone], config.length))


def write_repeats(task: RepeatsTask, rows: Iterable[pa.RecordBatch], retried: bool) -> PartResult:
    """Cut and re-evaluate one part, given its repeats (key, part, first), and write it."""
    units, windows = known_repeats(rows, (1, 2))

    def fill(output: PartOutput) -> None:
        judge = task.make_reevaluator(task.recipe, task.models, task.cutoffs, "scores" in task.part.paths, retried)
        output.books = DropCounter([(REPEATS.name, REPEATS.reasons), *judge.reasons], raises=False)
        try:
            for batch in read_measured(task.part, columns_for(task, judge), TEXTS_AT_ONCE):
                written = rows_of(batch, task, units, windows)
                reevaluate(written, batch, judge)
                for row in written:
                    count_row(row, output.books)
                    output.write(row)
        finally:
            judge.close()
        output.errors.update(judge.errors)

    return write_part(PartTarget(task.part.ordinal, {REPEATS.name: TableTarget(task.folder, REPEATS_SCHEMA)}), fill)


def columns_for(task: RepeatsTask, judge: Reevaluator) -> dict[str, Sequence[str]]:
    """The stored columns that cutting and judging look at, by table."""
    own = ["body_chars", "num_bytes", *task.dedup.scope, *judge.columns["documents"]]
    others = {name: columns for name, columns in judge.columns.items() if name != "documents"}
    return {"documents": own, "text": ["text", "cuts"], "dedup": ["drop_stage"], **others}


def rows_of(batch: pa.RecordBatch, task: RepeatsTask, units: KnownRepeats, windows: KnownRepeats) -> list[Row]:
    """The rows of a batch with their cuts; those to be judged again have `_rest`, what is left, and `_without`."""
    columns = ["doc_id", "text", "cuts", "body_chars", "num_bytes", "drop_stage"]
    rows: list[Row] = []
    for stored, scope in zip(batch.select(columns).to_pylist(), scopes_of(batch, task.dedup)):
        row: dict[str, Any] = {"doc_id": stored["doc_id"], "_chars": stored["body_chars"]}
        rows.append(row)
        if stored["drop_stage"] is not None:
            set_verdict(row, REPEATS.name, Drop(DROPPED_BEFORE))
            continue
        row |= {"cuts": [], "body_chars": stored["body_chars"], "num_bytes": stored["num_bytes"]}
        body = apply_cuts(stored["text"], stored["cuts"] or [])
        document = Document(stored["doc_id"], body, scope, NO_ORDER)
        passages = passages_of(document, units, windows, task.config)
        if task.config.on_substring == "drop":
            passages = without_runs(row, passages, len(body), task.config)
        cuts = cuts_of(body, passages)
        if cuts:
            visible = complement([(cut["start"], cut["end"]) for cut in stored["cuts"] or []], len(stored["text"]))
            cut_row(row, stored["text"], body, (cuts, cuts_in_whole_text(cuts, visible)))
            left = row["body_chars"]
            if left < task.config.min_left_chars:
                set_verdict(row, REPEATS.name, Drop(NOTHING_LEFT, left, task.config.min_left_chars))
    return rows


def without_runs(
    row: Row, passages: list[tuple[str, list[Span]]], size: int, config: RepeatsConfig
) -> list[tuple[str, list[Span]]]:
    """The passages but runs, for which the document is dropped if they make too large a share of its `size`."""
    runs = dict(passages)[SUBSTRING]
    share = sum(end - start for start, end in runs) / max(1, size)
    if share > config.max_repeated_share:
        set_verdict(row, REPEATS.name, Drop(REPEATED_SHARE, share, config.max_repeated_share))
        return []
    return [(kind, spans) for kind, spans in passages if kind != SUBSTRING]


def cut_row(row: Row, text: str, body: str, cuts: tuple[list[Cut], list[Cut]]) -> None:
    """Fill in what the cuts leave of a document, given them as places of its body and of its text."""
    in_body, in_text = ([(start, end) for start, end, _ in some] for some in cuts)
    row["cuts"] = cuts[1]
    row["_rest"], row["_without"] = without(body, in_body), without(text, in_text)
    row["body_chars"] = len(row["_rest"])
    row["num_bytes"] = len(row["_rest"].encode("utf-8", "surrogatepass"))


def reevaluate(rows: list[Row], batch: pa.RecordBatch, judge: Reevaluator) -> None:
    """Signals and verdicts of the rows of a batch that were cut and not dropped for it."""
    again = [number for number, row in enumerate(rows) if "_rest" in row and row.get("drop_stage") is None]
    names = list(dict.fromkeys(["doc_id", *(name for columns in judge.columns.values() for name in columns)]))
    stored = batch.select(names).take(pa.array(again, pa.int64())).to_pylist()
    judged = [
        known | {"text": rows[number]["_without"], "_rest": rows[number]["_rest"], "drop_stage": None}
        for number, known in zip(again, stored)
    ]
    if judged:
        judge(judged)
    for number, row in zip(again, judged):
        kept = ("cuts", "body_chars", "num_bytes")
        rows[number] |= {name: row[name] for name in REPEATS_SCHEMA.names if name in row and name not in kept}


def count_row(row: Row, books: DropCounter) -> None:
    """Count one row, and what was cut from it by kind of unit."""
    kept = row.get("drop_stage") is None
    books.enter(row, row["body_chars"] if kept else row["_chars"])
    cuts = row.get("cuts") or []
    for start, end, kind in cuts:
        books.tally("cut_spans", kind)
        books.tally("cut_chars", kind, end - start)
    for kind in {kind for _, _, kind in cuts} | ({ANY} if cuts else set()):
        books.tally("cut_documents", kind)
