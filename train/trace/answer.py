"""The answers of `penstock trace`: the documents of a step or the steps of a document, with title, signals and text."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from schemas.document_ids import resolve_doc_ids
from schemas.errors import ConfigError
from schemas.long_work import LongWork
from schemas.storage import Store
from schemas.text import printable, printable_lines, text_table, to_json_value
from schemas.tokens import Dataset, open_dataset
from schemas.urls import parse_domain
from train.ancestors import saw_before
from train.data.document_index import DocumentIndex
from train.monitor.events import read_events, skipped_steps
from train.plan.plan import Plan, read_plan
from train.takedown_replay import Span
from train.trace.documents import DetailReader, DocumentDetail, Texts, documents_containing
from train.trace.layouts import layout_of_step
from train.trace.trace import (
    Appearance,
    Exposure,
    FoundDocument,
    Trace,
    checkpoint_steps,
    exposure_of,
    open_trace,
)


@dataclass(frozen=True)
class AnswerOptions:
    """What an answer contains for each document besides its spans."""

    details: bool = True
    """Title and signals."""
    text: bool = False
    """Text: for a step only the span that its batch contains, else the whole document."""


@dataclass(frozen=True)
class RowSelection:
    """A selection of rows of a global batch by the rank and micro-batch that read them."""

    rank: int | None = None
    """Rank that reads the rows; None = all ranks."""
    micro_batch: int | None = None
    """Micro-batch of the rank, from 0; None = all."""
    ranks: int | None = None
    """Number of ranks on which to apply the plan's layout; None = use the recorded layout of the step."""


@dataclass(frozen=True)
class TracedDocument:
    """A document, or one of its spans in a batch, with title, signals and text."""

    place: Appearance | FoundDocument
    detail: DocumentDetail
    text: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object; `text` is left out if it was not requested."""
        values = asdict(self.place) | {"title": self.detail.title, "signals": to_json_value(self.detail.signals)}
        return values | ({} if self.text is None else {"text": self.text})


@dataclass(frozen=True)
class StepAnswer:
    """The document spans in the global batch of a step, or in some of its rows."""

    step: int
    rows: range
    """Selected rows of the global batch."""
    layout: str | None
    """Where the layout that assigns rows to ranks comes from, such as a resume; None if no rank is selected."""
    parts: list[TracedDocument]
    """Spans of the listed documents, by row and position."""
    num_spans: int
    """Number of spans in the rows; `parts` may hold fewer."""
    num_documents: int
    """Number of documents in the rows."""
    skipped: bool = False
    """True if the step made no update, because its loss or gradient was not finite."""

    def to_json(self) -> dict[str, Any]:
        """Return the answer as a JSON object; `rows` is [first, end], `parts` the spans of the listed documents."""
        parts = [part.to_json() for part in self.parts]
        place = {"step": self.step, "rows": [self.rows.start, self.rows.stop], "layout": self.layout}
        counts = {"num_spans": self.num_spans, "num_documents": self.num_documents, "skipped": self.skipped}
        return place | counts | {"parts": parts}


@dataclass(frozen=True)
class DocumentsAnswer:
    """Documents, and the steps and checkpoints that were trained on them."""

    num_documents: int
    """Number of matching documents; `documents` may hold fewer."""
    seen: Exposure
    """Steps and checkpoints that were trained on any matching document."""
    documents: list[tuple[TracedDocument, Exposure]]

    def to_json(self) -> dict[str, Any]:
        """Return the answer as a JSON object with the keys num_documents, seen and documents."""
        documents = [document.to_json() | {"seen": asdict(seen)} for document, seen in self.documents]
        return {"num_documents": self.num_documents, "seen": asdict(self.seen), "documents": documents}


class TraceAnswers:
    """Answers the queries of `penstock trace` on a run; files are opened when they are first needed."""

    def __init__(self, run: Store, options: AnswerOptions):
        """Open the trace of a run. Raises ContractError if its plan is missing or was made for a different dataset."""
        self.run, self._options, self._known = run, options, dict[str, DocumentDetail]()
        self.dataset: Dataset = open_dataset(run, even_replaced=True)
        self._plan: Plan = read_plan(run, self.dataset)
        self.trace: Trace = open_trace(run, self.dataset, self._plan)

    @cached_property
    def details(self) -> DetailReader:
        """The reader of the title and signals of each document, from the tables that the dataset was made from."""
        return DetailReader(self.dataset)

    def step(self, step: int, place: RowSelection, limit: int | None = None) -> StepAnswer:
        """Return the document spans in the selected rows of a step.

        `limit`: maximum number of documents whose spans are listed, in the order of the rows; None = all.
        Raises ConfigError if there is no such step, rank or micro-batch.
        """
        self.trace.check_step(step)
        stage = next(stage for stage in self._plan.stages if stage.first_step < step <= stage.end)
        rows, origin = range(stage.global_batch), None
        if place.rank is not None:
            layout = layout_of_step(self.run, self._plan, step, place.ranks)
            rows, origin = layout.rows(stage.global_batch, place.rank, place.micro_batch), layout.named
        parts = self.trace.documents_of_step(step, rows) if rows else []
        documents = list(dict.fromkeys(part.doc_id for part in parts))
        chosen = {*documents[:limit]}
        listed = [part for part in parts if part.doc_id in chosen]
        with LongWork("details", len(listed), "parts") as work:
            described = [self._describe(part, work) for part in listed]
        skipped = step in skipped_steps(read_events(self.run))
        return StepAnswer(step, rows, origin, described, len(parts), len(documents), skipped)

    def url(self, url: str) -> DocumentsAnswer:
        """Return the documents with a URL, and the steps and checkpoints that were trained on them."""
        return self._documents(self.trace.steps_of_url(url), None)

    def document(self, doc_id: str) -> DocumentsAnswer:
        """Return the document with the id `doc_id`, and the steps and checkpoints trained on it.

        `doc_id` has 32 hex digits, or the first 12 or more. Raises ConfigError if it is not the id of one document.
        """
        (whole,) = resolve_doc_ids(self.run, {doc_id: "--doc"})
        identifier = bytes.fromhex(whole)
        return self._documents(self.trace.steps_of_document(identifier), None)

    def documents(self, doc_ids: Iterable[bytes]) -> DocumentsAnswer:
        """Return those of the documents with these ids that the dataset has, and the steps trained on them."""
        return self._documents((found for doc_id in doc_ids for found in self.trace.steps_of_document(doc_id)), None)

    def domain(self, host: str, limit: int | None) -> DocumentsAnswer:
        """Return the documents of a domain, the hosts below it included; at most `limit` of them are listed.

        Raises ConfigError if `host` is not the name of a host.
        """
        return self._documents(self.trace.steps_of_domain(parse_domain(host)), limit)

    def containing(self, text: str, limit: int | None) -> DocumentsAnswer:
        """Return the documents whose text contains a string; the scan ends after `limit` of them.

        Raises ConfigError if the string is empty.
        """
        if not text:
            raise ConfigError("--contains: expected a string to look for, got an empty one. Set --contains to a text.")
        ids = islice(documents_containing(self.dataset, text), limit)
        return self._documents((document for doc_id in ids for document in self.trace.steps_of_document(doc_id)), limit)

    def _documents(self, matches: Iterable[FoundDocument], limit: int | None) -> DocumentsAnswer:
        checkpoints, documents, parts = (
            checkpoint_steps(self.run),
            list[tuple[TracedDocument, Exposure]](),
            list[Appearance](),
        )
        found = list[FoundDocument]()
        number = 0
        for document in matches:
            number += 1
            parts += document.appearances
            found.append(document)
            if limit is None or number <= limit:
                seen = exposure_of(document.appearances, checkpoints, self._seen_before([document]))
                documents.append((self._describe(document), seen))
        return DocumentsAnswer(number, exposure_of(parts, checkpoints, self._seen_before(found)), documents)

    def _seen_before(self, documents: Sequence[FoundDocument]) -> bool | None:
        """Return True if the weights that training began from had read one of the documents; None = not known."""
        if self._plan.origin is None or not documents:
            return False
        ids, urls = {bytes.fromhex(own.doc_id) for own in documents}, {own.url for own in documents if own.url}

        def spans_of(dataset: Dataset) -> list[Span]:
            index = DocumentIndex(dataset)
            found = [place for own in ids for place in index.all_of_id(own)]
            found += [place for url in urls for place in index.of_url(url)]
            return [(stream, begin, row["num_tokens"]) for stream, row, begin in found]

        return saw_before(self._plan.origin, frozenset(ids), spans_of)

    def _describe(self, place: Appearance | FoundDocument, work: LongWork | None = None) -> TracedDocument:
        detail = self._known.get(place.doc_id, DocumentDetail())
        if self._options.details and place.doc_id not in self._known:
            detail = self._known[place.doc_id] = self.details.of(place.split, place.offset, place.doc_id)
        text = self._text(place) if self._options.text else None
        if work is not None:
            work.add(1)
        return TracedDocument(place, detail, text)

    @cached_property
    def _texts(self) -> Texts:
        return Texts(self.dataset)

    def _text(self, place: Appearance | FoundDocument) -> str:
        placed = self.trace.documents.of_id(bytes.fromhex(place.doc_id))
        if placed is None:
            return ""
        stream, row, begin = placed
        first, stop = (place.doc_start, place.doc_stop) if isinstance(place, Appearance) else (0, row["num_tokens"])
        return self._texts.read(stream, begin + first, begin + stop)


# The answers of a trace as text: a table of spans or steps, then title, signals and text of each document.

LISTED = 40
"""Maximum number of spans listed for a document; further spans are only counted."""


def print_documents(appearances: Sequence[Appearance]) -> str:
    """Return the document spans of a step as a text table."""
    rows = [("row", "tokens of row", "source", "document", "tokens of document", "cluster", "record", "url")]
    for seen in appearances:
        row_part, doc_part = span(seen.row_start, seen.row_stop), span(seen.doc_start, seen.doc_stop)
        place = (str(seen.row), row_part, seen.source, seen.doc_id[:12], doc_part, seen.cluster[:12])
        rows.append((*place, record_of(seen), seen.url or ""))
    return table(rows)


def print_steps(documents: Sequence[FoundDocument], listed: int = LISTED) -> str:
    """Return documents and the steps that were trained on them as text.

    `listed`: maximum number of spans of each document.
    """
    if not documents:
        return "no document of the dataset has this URL; URLs are stored there with personal data replaced"
    blocks = []
    for document in documents:
        head = f"{document.doc_id}  {document.stream}  {document.num_tokens} tokens  {record_of(document)}"
        blocks.append(printable(f"{head}  {document.url or ''}".rstrip()))
        rows = [("step", "row", "sample", "epoch", "tokens of document", "tokens of row")]
        for seen in document.appearances[:listed]:
            place = (str(seen.step), str(seen.row), str(seen.sample), str(seen.epoch))
            rows.append((*place, span(seen.doc_start, seen.doc_stop), span(seen.row_start, seen.row_stop)))
        blocks += [table(rows)] if document.appearances else []
        if rest := len(document.appearances) - listed:
            blocks += [f"  and {rest} more spans"] * (rest > 0)
    return "\n".join(blocks)


def record_of(document: Appearance | FoundDocument) -> str:
    """Return the location of a document's record: file, offset and length [bytes]."""
    return f"{document.split}@{document.offset}+{document.length}"


def span(start: int, stop: int) -> str:
    """Return a half-open range as text."""
    return f"[{start}, {stop})"


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return cells aligned in columns, one line per row."""
    return "\n".join(text_table([tuple(map(printable, row)) for row in rows], indent="  "))


def present_step(answer: StepAnswer) -> str:
    """Return a `StepAnswer` as text: the table of spans, then the title, signals and text that were requested."""
    rows = answer.rows
    head = [f"step {answer.step}, rows {rows.start} to {rows.stop - 1} of the global batch, {answer.num_spans} spans"]
    if not rows:
        head = [f"step {answer.step}: no row of the global batch, only padding to match the other ranks"]
    if answer.layout is not None:
        head.append(f"layout of {answer.layout}")
    if answer.skipped:
        head.append("the step was skipped, because it was not finite: its documents did not change the weights")
    if len(answer.parts) < answer.num_spans:
        listed = len({described.place.doc_id for described in answer.parts})
        head.append(f"those of {listed} of {answer.num_documents} documents are listed")
    parts = [described.place for described in answer.parts if isinstance(described.place, Appearance)]
    blocks = ["; ".join(head)] + [print_documents(parts)] * bool(parts)
    known: set[str] = set()
    for described in answer.parts:
        # Several spans of a document share title and signals; each has its own text.
        blocks += _describe(described, with_signals=described.place.doc_id not in known)
        known.add(described.place.doc_id)
    return "\n".join(blocks)


def present_documents(answer: DocumentsAnswer, nothing: str) -> str:
    """Return a `DocumentsAnswer` as text; `nothing` = the text for an answer without documents."""
    if not answer.documents:
        return nothing
    blocks = []
    for described, seen in answer.documents:
        if isinstance(described.place, FoundDocument):
            blocks += [print_steps([described.place]), f"  {seen.describe()}"]
        blocks += _describe(described, with_signals=True)
    if answer.num_documents > 1:
        rest = answer.num_documents - len(answer.documents)
        more = f", {rest} of them not listed" if rest else ""
        blocks.append(f"all {answer.num_documents} document(s){more}: {answer.seen.describe()}")
    return "\n".join(blocks)


def _describe(described: TracedDocument, with_signals: bool) -> Iterator[str]:
    """Yield the lines of a document's title, signals and text, as far as they are known."""
    place, detail = described.place, described.detail
    if with_signals and (detail.title or detail.signals):
        yield f"{place.doc_id[:12]}  {printable(detail.title or 'no title')}"
        yield from _wrapped(f"{name} {_value(value)}" for name, value in detail.signals.items())
    if described.text is not None:
        part = f" [{place.doc_start}, {place.doc_stop})" if isinstance(place, Appearance) else ""
        yield f"{place.doc_id[:12]}{part} text:"
        yield from (f"  | {line}" for line in printable_lines(described.text))


def _wrapped(words: Iterator[str], width: int = 116) -> Iterator[str]:
    """Yield words separated by commas in lines of at most `width` characters."""
    line = ""
    for word in words:
        if line and len(line) + len(word) + 2 > width:
            yield f"    {line},"
            line = ""
        line += f", {word}" if line else word
    if line:
        yield f"    {line}"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return printable(" ".join(f"{name} {_value(item)}" for name, item in value.items())) or "none"
    if isinstance(value, list | tuple):
        return " ".join(_value(item) for item in value) or "none"
    return printable(str(value))
