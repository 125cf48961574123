"""The answers of a trace: a step's documents or a document's steps, with what the tables and the shards say of them."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from schemas.errors import ConfigError
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from train.monitor.progress import LongWork
from train.plan.plan import Plan, read_plan
from train.trace.documents import DetailReader, DocumentDetail, Texts, documents_containing
from train.trace.layout import layout_of_step
from train.trace.trace import Appearance, Exposure, FoundDocument, Trace, checkpoint_steps, exposure_of, open_trace


@dataclass(frozen=True)
class AnswerOptions:
    """What is wanted of every document beside its place."""

    details: bool = True
    """Title and signals."""
    text: bool = False
    """The text: of a step the part that was read, else all of it."""


@dataclass(frozen=True)
class RowSelection:
    """The part of a step's global batch that is asked for."""

    rank: int | None = None
    """None = all ranks."""
    micro_batch: int | None = None
    """Micro-batch of the rank, from 0; None = all."""
    ranks: int | None = None
    """Number of ranks to take the layout of the plan on; None = the layout that checkpoints tell of."""


@dataclass(frozen=True)
class TracedDocument:
    """A part or a document with what was wanted of it."""

    place: Appearance | FoundDocument
    detail: DocumentDetail
    text: str | None

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values, without what was not asked for."""
        found = asdict(self.place) | {"title": self.detail.title, "signals": to_json_value(self.detail.signals)}
        return found | ({} if self.text is None else {"text": self.text})


@dataclass(frozen=True)
class StepAnswer:
    """The documents of a step, or of a part of it."""

    step: int
    rows: range
    """Rows of the global batch that were asked for."""
    layout: str | None
    """Where the layout is written that rank and micro-batch were taken by."""
    parts: list[TracedDocument]

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        parts = [part.to_json() for part in self.parts]
        return {"step": self.step, "rows": [self.rows.start, self.rows.stop], "layout": self.layout, "parts": parts}


@dataclass(frozen=True)
class DocumentsAnswer:
    """Documents and when they are seen."""

    num_documents: int
    """How many were found; `documents` may be fewer."""
    seen: Exposure
    """When any of them is seen."""
    documents: list[tuple[TracedDocument, Exposure]]

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        documents = [told.to_json() | {"seen": asdict(seen)} for told, seen in self.documents]
        return {"num_documents": self.num_documents, "seen": asdict(self.seen), "documents": documents}


class TraceAnswers:
    """Answers about a run; what they need is opened when first needed."""

    def __init__(self, run: Store, wanted: AnswerOptions):
        """Raises ContractError if there is no plan, or it does not belong to the dataset."""
        self.run, self._wanted, self._known = run, wanted, dict[str, DocumentDetail]()
        self.dataset: Dataset = open_dataset(run)
        self._plan: Plan = read_plan(run, self.dataset)
        self.trace: Trace = open_trace(run, self.dataset, self._plan)

    @cached_property
    def details(self) -> DetailReader:
        """The tables behind the dataset."""
        return DetailReader(self.dataset)

    def step(self, step: int, place: RowSelection) -> StepAnswer:
        """The documents of a step. Raises ConfigError if there is no such step, rank or micro-batch."""
        self.trace.check_step(step)
        stage = next(stage for stage in self._plan.stages if stage.first_step < step <= stage.end)
        rows, named = range(stage.global_batch), None
        if place.rank is not None:
            layout = layout_of_step(self.run, self._plan, step, place.ranks)
            rows, named = layout.rows(stage.global_batch, place.rank, place.micro_batch), layout.named
        parts = self.trace.documents_of_step(step, rows) if rows else []
        with LongWork("details", len(parts), "parts") as work:
            told = [self._told(part, work) for part in parts]
        return StepAnswer(step, rows, named, told)

    def url(self, url: str) -> DocumentsAnswer:
        """The documents of a URL."""
        return self._documents(self.trace.steps_of_url(url), None)

    def document(self, doc_id: str) -> DocumentsAnswer:
        """The document of an id in hex. Raises ConfigError if it is none."""
        try:
            identifier = bytes.fromhex(doc_id)
        except ValueError as error:
            raise ConfigError(f"--doc: expected 32 hex digits, got {doc_id!r}. {error}.") from error
        if len(identifier) != 16:
            raise ConfigError(f"--doc: expected 32 hex digits, got {doc_id!r} of {len(doc_id)}. Give the whole id.")
        return self._documents(self.trace.steps_of_document(identifier), None)

    def domain(self, host: str, limit: int | None) -> DocumentsAnswer:
        """The documents of a domain or host; at most `limit` of them are told of one by one.

        Raises ConfigError if it is not the name of a host.
        """
        name = host.strip().rstrip(".").lower()
        if not name or set(name) & set("/:@ "):
            raise ConfigError(f"--domain: expected a host such as example.com, got {host!r}. For a URL there is --url.")
        return self._documents(self.trace.steps_of_domain(name), limit)

    def containing(self, text: str, limit: int | None) -> DocumentsAnswer:
        """The documents whose text contains a string; the scan ends at `limit` of them. Raises ConfigError for none."""
        if not text:
            raise ConfigError("--contains: expected a string to look for, got an empty one. Give some of the text.")
        ids = islice(documents_containing(self.dataset, text), limit)
        return self._documents((found for one in ids for found in self.trace.steps_of_document(one)), limit)

    def _documents(self, found: Iterable[FoundDocument], limit: int | None) -> DocumentsAnswer:
        checkpoints, documents, parts = (
            checkpoint_steps(self.run),
            list[tuple[TracedDocument, Exposure]](),
            list[Appearance](),
        )
        number = 0
        for document in found:
            number += 1
            parts += document.appearances
            if limit is None or number <= limit:
                documents.append((self._told(document), exposure_of(document.appearances, checkpoints)))
        return DocumentsAnswer(number, exposure_of(parts, checkpoints), documents)

    def _told(self, place: Appearance | FoundDocument, work: LongWork | None = None) -> TracedDocument:
        detail = self._known.get(place.doc_id, DocumentDetail())
        if self._wanted.details and place.doc_id not in self._known:
            detail = self._known[place.doc_id] = self.details.of(place.split, place.offset, place.doc_id)
        text = self._text(place) if self._wanted.text else None
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


def to_json_value(value: Any) -> Any:
    """A value of a table as a JSON value; what is not finite is null, bytes are hex."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(name): to_json_value(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(one) for one in value]
    return value if isinstance(value, int | str | bool | None) else str(value)
