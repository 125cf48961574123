"""Search for documents: pages of hits that are read part by part, random documents, and the filters of a run.

A search reads at most MAX_ROWS rows, or MAX_TEXTS texts, and returns the position from which the next search continues.
"""

import functools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.browse.rows import BrowsedRun, JudgedBatch, Position, counts_of, judged_batches, parse_position, read_rows
from pipeline.browse.spans import Hits, json_value, snippet
from pipeline.engine.stage import Row
from pipeline.inspect.show import column_equals, host_below, parse_where, where_columns
from schemas.config import suggest_name
from schemas.errors import ConfigError
from schemas.tables import TABLES, VERDICT_COLUMNS

MAX_PAGE = 200
"""Maximum number of documents of a page."""
MAX_ROWS = 200_000
"""Maximum number of rows that one search reads."""
MAX_TEXTS = 10_000
"""Maximum number of texts that one search reads for `contains`."""
TEXTS_AT_ONCE = 256
"""Number of texts that are in memory at a time."""
VERDICTS = ("", "kept", "dropped")
DEFAULT_COLUMNS = ("language", "num_chars")
SHOWN_ALWAYS = ("url",)
MAX_VALUE_CHARS = 300
"""Maximum length of a value in a page; longer values are shortened."""


@dataclass(frozen=True)
class DocumentQuery:
    """A search for documents: every field that is not empty is a condition, and all conditions must hold."""

    where: str = ""
    """A condition as in `penstock show --where`."""
    contains: str = ""
    """Text that the raw title or text contains, in any case."""
    verdict: str = ""
    """`kept`, `dropped`, or empty for all documents."""
    rule: str = ""
    """`stage/rule` that dropped the document."""
    source: str = ""
    language: str = ""
    domain: str = ""
    """Domain of the document; documents of the hosts below it match too."""
    has_text: str = ""
    """Not empty: only documents from which text was extracted."""
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    """Columns that the page shows."""

    def terms(self) -> list[str]:
        """Return the conditions, except `contains` and `domain`, as conditions of `penstock show --where`."""
        terms = [self.where.strip()] if self.where.strip() else []
        stage, _, rule = self.rule.partition("/")
        named = {"drop_stage": stage, "drop_rule": rule, "source": self.source}
        named |= {"language": self.language}
        terms += [f"{name} = {value}" for name, value in named.items() if value]
        if self.verdict:
            terms.append(f"drop_stage {'is null' if self.verdict == 'kept' else 'is not null'}")
        return [*terms, "num_chars is not null"] if self.has_text else terms


@dataclass(frozen=True)
class SearchPage:
    """One page of hits, and how much of the run was read for it."""

    rows: list[Row]
    next: Position | None
    """The position from which the search continues; None if all parts were read."""
    rows_read: int
    texts_read: int
    parts_done: int
    """Number of parts that were read to their end, counted from the first part of the run."""


def make_query(run: BrowsedRun, values: Mapping[str, str]) -> DocumentQuery:
    """Return the query of the parameters of a request; other parameters are ignored.

    Raises ConfigError for an unknown column or verdict.
    """
    known = {field.name: values[field.name].strip() for field in fields(DocumentQuery) if field.name in values}
    columns = tuple(filter(None, known.pop("columns", ",".join(DEFAULT_COLUMNS)).split(",")))
    for name in columns:
        if name not in run.columns.names:
            raise ConfigError(
                f"columns: expected columns of this run, got {name[:80]!r}"
                f"{suggest_name(name[:80], run.columns.names)}. Choose columns from the list."
            )
    query = DocumentQuery(**known, columns=columns)
    if query.verdict not in VERDICTS:
        raise ConfigError(f"verdict: expected kept, dropped or nothing, got {query.verdict[:80]!r}. Correct it.")
    return query


def condition_of(run: BrowsedRun, query: DocumentQuery) -> pc.Expression | None:
    """Return the filter of a query without `contains`; None if every document meets it.

    Raises ConfigError if `where` is not a valid condition.
    """
    stage, _, rule = query.rule.partition("/")
    named = {"drop_stage": stage, "drop_rule": rule, "source": query.source}
    named |= {"language": query.language}
    terms = [parse_where(query.where, run.columns)] if query.where else []
    terms += [host_below(query.domain)] if query.domain else []
    terms += [column_equals(name, value) for name, value in named.items() if value]
    if query.verdict:
        is_kept = pc.field("drop_stage").is_null()
        terms.append(is_kept if query.verdict == "kept" else ~is_kept)
    terms += [~pc.field("num_chars").is_null()] if query.has_text else []
    return functools.reduce(operator.and_, terms) if terms else None


def columns_read(run: BrowsedRun, query: DocumentQuery) -> list[str]:
    """Return the columns that a query needs: those it shows, filters by, or names in its condition."""
    named = where_columns(query.where, run.columns) if query.where else frozenset()
    filters = [name for name in ("source", "language", "domain") if getattr(query, name)]
    filters += ["num_chars"] if query.has_text else []
    wanted = {*query.columns, *SHOWN_ALWAYS, *named, *filters} - {"doc_id", *VERDICT_COLUMNS}
    return [name for name in run.columns.names if name in wanted]


def search(run: BrowsedRun, query: DocumentQuery, start: Position, limit: int) -> SearchPage:
    """Return up to `limit` documents from a position on that meet the query, in the order of the run.

    The page may have fewer documents if MAX_ROWS rows or MAX_TEXTS texts were read; `next` then continues the search.
    Raises ConfigError if the query is not valid.
    """
    condition, columns = condition_of(run, query), columns_read(run, query)
    hits: list[Row] = []
    rows_read = texts_read = 0
    for part in range(start.part, run.num_parts):
        first = start.row if part == start.part else 0
        if run.part_rows[part] <= first:
            continue
        for batch in judged_batches(run, part, columns):
            end = batch.first_row + batch.rows.num_rows
            if end <= first:
                continue
            rows_read += end - max(first, batch.first_row)
            for chunk in _candidates(batch, condition, first, TEXTS_AT_ONCE if query.contains else end):
                texts_read += chunk.rows.num_rows if query.contains else 0
                for row in _hits_of(run, query, part, chunk):
                    hits.append(row)
                    if len(hits) == limit:
                        return SearchPage(hits, _after(run, part, _row_of(row)), rows_read, texts_read, part)
                if texts_read >= MAX_TEXTS:
                    last = int(chunk.numbers[-1])
                    return SearchPage(hits, _after(run, part, last), rows_read, texts_read, part)
            if rows_read >= MAX_ROWS:
                return SearchPage(hits, _after(run, part, end - 1), rows_read, texts_read, part)
    return SearchPage(hits, None, rows_read, texts_read, run.num_parts)


def _after(run: BrowsedRun, part: int, row: int) -> Position | None:
    """Return the position after a row; None if it was the last row of the run."""
    if row + 1 < run.part_rows[part]:
        return Position(part, row + 1)
    return Position(part + 1, 0) if part + 1 < run.num_parts else None


def _row_of(hit: Row) -> int:
    return parse_position(hit["at"], "at").row


@dataclass(frozen=True)
class _Candidates:
    """Rows of one part that meet the condition, and their numbers in the part."""

    numbers: npt.NDArray[np.int64]
    rows: pa.Table


def _candidates(batch: JudgedBatch, condition: pc.Expression | None, first: int, size: int) -> Iterator[_Candidates]:
    """Yield the rows of a batch from row `first` on that meet the condition, at most `size` at a time."""
    numbers = np.arange(batch.first_row, batch.first_row + batch.rows.num_rows)
    rows = batch.rows.append_column(_NUMBER, pa.array(numbers)).slice(max(0, first - batch.first_row))
    rows = rows if condition is None else rows.filter(condition)
    for start in range(0, rows.num_rows, size):
        chunk = rows.slice(start, size)
        yield _Candidates(chunk.column(_NUMBER).to_numpy(), chunk.drop_columns([_NUMBER]))


_NUMBER = "\0row"
"""Name of the column of row numbers while rows are filtered; no column of a table has it."""


def _hits_of(run: BrowsedRun, query: DocumentQuery, part: int, chunk: _Candidates) -> Iterator[Row]:
    """Yield the candidates that contain the text of the query, as rows of a page, with their titles."""
    if not chunk.rows.num_rows:
        return
    if not query.contains:
        # Titles are read only for the rows that the caller takes.
        for start in range(0, chunk.rows.num_rows, MAX_PAGE):
            numbers, rows = chunk.numbers[start : start + MAX_PAGE], chunk.rows.slice(start, MAX_PAGE)
            titles = _texts(run, part, numbers.tolist(), ["doc_id", "title"])
            for number, row, title in zip(numbers.tolist(), rows.to_pylist(), titles.column("title").to_pylist()):
                yield page_row(run, query, Position(part, number), row | {"title": title})
        return
    texts = _texts(run, part, chunk.numbers.tolist(), ["doc_id", "title", "text"])
    is_hit = np.zeros(chunk.rows.num_rows, bool)
    for name in ("title", "text"):
        contains = pc.match_substring(texts.column(name), query.contains, ignore_case=True)
        is_hit |= pc.fill_null(contains, False).to_numpy()
    for index in np.flatnonzero(is_hit).tolist():
        row, text = chunk.rows.slice(index, 1).to_pylist()[0], texts.slice(index, 1).to_pylist()[0]
        shown = page_row(run, query, Position(part, int(chunk.numbers[index])), row | {"title": text["title"]})
        yield shown | {"snippet": snippet(text["text"] or "", Hits(query.contains))}


def _texts(run: BrowsedRun, part: int, numbers: list[int], columns: list[str]) -> pa.Table:
    if "text" in run.tables:
        return read_rows(run, "text", part, numbers, columns)
    return pa.table({name: pa.nulls(len(numbers), pa.string()) for name in columns})


def page_row(run: BrowsedRun, query: DocumentQuery, position: Position, row: Row) -> Row:
    """Return a document as a page of the browser shows it, as a JSON value."""
    return {
        "doc": row["doc_id"].hex(),
        "at": str(position),
        "title": _short(row.get("title")),
        "url": _short(row.get("url")),
        "verdict": verdict_json(row),
        "values": {name: _short(json_value(row.get(name))) for name in query.columns},
    }


def verdict_json(row: Row) -> dict[str, Any]:
    """Return the verdict columns of a row as a JSON value."""
    return {
        "kept": row.get("drop_stage") is None,
        **{name.removeprefix("drop_"): json_value(row.get(name)) for name in VERDICT_COLUMNS},
    }


def _short(value: Any) -> Any:
    return f"{value[:MAX_VALUE_CHARS]}…" if isinstance(value, str) and len(value) > MAX_VALUE_CHARS else value


# Random documents: the order is a hash of the seed and the position, so one seed always draws the same documents.


def mixed_hash(values: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Return a uniform 64-bit hash of each value. Source: Steele et al. 2014, SplitMix64 (doi 10.1145/2660193.2660195).

    A document's own id is not a fair key for a sample: the smallest id of a cluster is the cluster's name.
    """
    with np.errstate(over="ignore"):
        state = values + np.uint64((seed * 0x9E3779B97F4A7C15) & (2**64 - 1)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: npt.NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed


def hash_ids(ids: pa.Array, seed: int) -> npt.NDArray[np.uint64]:
    """Return a uniform 64-bit hash of each doc_id of an array without nulls."""
    return mixed_hash(np.frombuffer(b"".join(id_[:8] for id_ in ids.to_pylist()), "<u8").astype(np.uint64), seed)


def random_documents(run: BrowsedRun, query: DocumentQuery, seed: int, limit: int) -> SearchPage:
    """Return up to `limit` documents that meet the query, drawn by a hash of the seed and the document.

    Whole parts are read in an order that depends on the seed, until MAX_ROWS rows were read. `contains` is not
    supported here. Raises ConfigError if the query is not valid.
    """
    if query.contains:
        raise ConfigError("contains: expected no text for random documents, got one. Empty the field, or search.")
    condition, columns = condition_of(run, query), columns_read(run, query)
    order = np.argsort(mixed_hash(np.arange(run.num_parts, dtype=np.uint64), seed)).tolist()
    drawn: list[tuple[int, Position, Row]] = []
    rows_read = parts_read = 0
    for part in order:
        for batch in judged_batches(run, part, columns):
            rows_read += batch.rows.num_rows
            for chunk in _candidates(batch, condition, 0, batch.rows.num_rows):
                keys = hash_ids(chunk.rows.column("doc_id"), seed)
                for index in np.argsort(keys)[:limit].tolist():
                    row = chunk.rows.slice(index, 1).to_pylist()[0]
                    drawn.append((int(keys[index]), Position(part, int(chunk.numbers[index])), row))
            drawn = sorted(drawn, key=lambda item: item[0])[:limit]
        parts_read += 1
        if rows_read >= MAX_ROWS:
            break
    rows = []
    for _, position, row in drawn:
        title = _texts(run, position.part, [position.row], ["doc_id", "title"]).column("title")[0].as_py()
        rows.append(page_row(run, query, position, row | {"title": title}))
    return SearchPage(rows, None, rows_read, 0, parts_read)


# The facts of a run by which a page filters.


def run_facts(run: BrowsedRun) -> dict[str, Any]:
    """Return what a page shows about a run: its tables, rules, languages, sources and columns, as a JSON value."""
    documents = run.tables["documents"].manifest
    figures = run.figures("verdicts")
    meanings = run.rules.meanings
    dropped: dict[str, int] = {}
    for table in run.tables.values():
        if TABLES[table.manifest.content.table].has_verdicts or table.manifest.content.table == "tokens":
            for name, count in counts_of(table.manifest).items():
                dropped[name] = dropped.get(name, 0) + count
    sources = {*figures.get("kept_sources", {}), *run.figures("clean").get("kept_documents", {})}
    languages: Mapping[str, int] = documents.content.figures.get("languages", {})
    return {
        "address": run.address,
        "name": run.store.uri.rstrip("/").rpartition("/")[2],
        "parts": run.num_parts,
        "rows": documents.content.counts.rows_in,
        "kept": documents.content.counts.rows_in - sum(dropped.values()),
        "tables": [{"name": name, "digest": table.manifest.digest[:12]} for name, table in run.tables.items()],
        "rules": [
            {"name": name, "count": count, "meaning": meanings.get(name, "")}
            for name, count in sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
        ],
        "languages": sorted(languages.items(), key=lambda item: (-item[1], item[0])),
        "sources": sorted(sources),
        "columns": [
            {"name": field.name, "type": str(field.type), **describe_field(field)}
            for field in run.columns
            if field.name != "doc_id"
        ],
        "default_columns": list(DEFAULT_COLUMNS),
        "max_rows": MAX_ROWS,
        "max_texts": MAX_TEXTS,
    }


def describe_field(field: pa.Field) -> dict[str, str]:
    """Return the meaning and unit of a column."""
    metadata: Mapping[bytes, bytes] = field.metadata or {}
    return {name: metadata.get(name.encode(), b"").decode() for name in ("meaning", "unit")}


def page_json(run: BrowsedRun, query: DocumentQuery, page: SearchPage) -> dict[str, Any]:
    """Return a page of hits as a JSON value, with the command that prints the same documents."""
    words = [word for term in query.terms() for word in ("--where", term)]
    words += ["--domain", query.domain] if query.domain else []
    return {
        "rows": page.rows,
        "next": None if page.next is None else str(page.next),
        "rows_read": page.rows_read,
        "texts_read": page.texts_read,
        "parts_done": page.parts_done,
        "parts": run.num_parts,
        "command": run.command("show", *words) if words else None,
    }
