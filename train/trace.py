"""From a training step to the documents it was made of, and from a URL to the steps that saw it.

Both are computed from manifest, plan and skip list; nothing is logged while training. Steps count from 1, as the
trainer's do: step k is made of batch k - 1 of the order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from schemas.tokens import TRAIN, Dataset, open_dataset
from train.data.documents import Documents
from train.data.order import Order, Samples
from train.plan.planned import read_plan
from train.plan.standing import standing_order


@dataclass(frozen=True)
class Appearance:
    """A part of a document in one piece of one sequence of one step."""

    step: int
    """Step, from 1."""
    row: int
    """Row of the global batch, from 0."""
    piece: int
    """Piece of the row, from 0: contiguous in the stored stream."""
    sample: int
    """Global sample index, as a skip list counts."""
    source: str
    epoch: int
    """Pass over the source, from 0."""
    doc_id: str
    """Document, hex."""
    url: str
    """URL of the document, redacted."""
    split: str
    """Input file the document came from, such as a WARC file."""
    offset: int
    """Start of its record there [bytes]."""
    length: int
    """Length of its record there [bytes]."""
    doc_start: int
    """First token of the part, counted in the document."""
    doc_stop: int
    """Token after the part, counted in the document."""
    row_start: int
    """First token of the part, counted in the row. The token behind a piece is a target only: of its last input."""
    row_stop: int
    """Token after the part, counted in the row."""


@dataclass(frozen=True)
class FoundDocument:
    """A document of a URL and every time a run saw it."""

    stream: str
    """`<source>/train` or `<source>/heldout`; what is held out is never trained on."""
    doc_id: str
    """Document, hex."""
    url: str
    """URL, redacted."""
    split: str
    """Input file it came from, such as a WARC file."""
    offset: int
    """Start of its record there [bytes]."""
    length: int
    """Length of its record there [bytes]."""
    num_tokens: int
    """Length [tokens], separators included."""
    appearances: list[Appearance]
    """Every time it was seen, by step and row."""


class Trace:
    """The order of a run joined with the documents of its dataset."""

    def __init__(self, dataset: Dataset, order: Order, predicts_next: bool = True):
        """`predicts_next`: whether the token behind a piece is a target, as for objective = causal."""
        self._order, self._documents, self._behind = order, Documents(dataset), int(predicts_next)
        self.num_steps = order.stages[-1].end

    def documents_of_step(self, step: int) -> list[Appearance]:
        """Every part of a document in the global batch of a step, by row and place in the row.

        Raises ConfigError if the plan has no such step.
        """
        if not 1 <= step <= self.num_steps:
            raise ConfigError(
                f"--step: promised 1 to {self.num_steps}, the steps of the plan, found {step}; choose one of them"
            )
        found, samples = [], self._order.samples(step - 1)
        for piece in self._pieces(samples, [(step, row) for row in range(len(samples.index))]):
            stream = f"{piece.source}/{TRAIN}"
            for document, begin in self._documents.between(stream, piece.start, piece.stop):
                found.append(piece.appearance(document, begin))
        return found

    def steps_of_url(self, url: str) -> list[FoundDocument]:
        """Every document of a URL, as it is stored (redacted), with each of its appearances in the steps, in order.

        Empty if the dataset has no such URL.
        """
        found = []
        for stream, document, begin in self._documents.of_url(url):
            seen = sorted(
                self._appearances(stream, document, begin), key=lambda part: (part.step, part.row, part.piece)
            )
            named = {name: document[name] for name in ("url", "split", "offset", "length", "num_tokens")}
            found.append(FoundDocument(stream=stream, doc_id=document["doc_id"].hex(), appearances=seen, **named))
        return found

    def _appearances(self, stream: str, document: dict[str, Any], begin: int) -> Iterator[Appearance]:
        """Each time the steps see a document that begins at token `begin` of its stream."""
        (source, _, split), end = stream.rpartition("/"), begin + document["num_tokens"]
        if split != TRAIN or source not in self._order.sources:
            return
        # The document's first token may be the target behind a piece that ends just before it.
        for stage, numbers in self._order.find(source, max(0, begin - self._behind), end):
            plan, samples = self._order.stages[stage], self._order.at(stage, numbers)
            places = [divmod(number, plan.global_batch) for number in numbers.tolist()]
            for piece in self._pieces(samples, [(plan.first_step + step + 1, row) for step, row in places]):
                if piece.start < end and piece.stop > begin:
                    yield piece.appearance(document, begin)

    def _pieces(self, samples: Samples, places: Sequence[tuple[int, int]]) -> Iterator["_Piece"]:
        """The pieces of samples, which are used at these (step, row)."""
        pieces, last, number = samples.pieces, -1, 0
        columns = (pieces.row, pieces.column, pieces.epoch, pieces.start, pieces.length, pieces.closed)
        for row, column, epoch, start, length, closed in zip(*(one.tolist() for one in columns), strict=True):
            number = number + 1 if row == last else 0
            last, stop = row, start + length + (0 if closed else self._behind)
            source = self._order.sources[int(samples.source[row])]
            step, place = places[row]
            yield _Piece(step, place, number, int(samples.index[row]), source, epoch, column, start, stop)


@dataclass(frozen=True)
class _Piece:
    """A piece of a row, with the token behind it if that is a target."""

    step: int
    row: int
    piece: int
    sample: int
    source: str
    epoch: int
    column: int
    start: int
    stop: int

    def appearance(self, document: dict[str, Any], begin: int) -> Appearance:
        """The part of a document, which begins at token `begin` of its stream, in this piece."""
        first, stop = max(begin, self.start), min(begin + document["num_tokens"], self.stop)
        return Appearance(
            step=self.step,
            row=self.row,
            piece=self.piece,
            sample=self.sample,
            source=self.source,
            epoch=self.epoch,
            doc_id=document["doc_id"].hex(),
            url=document["url"],
            split=document["split"],
            offset=document["offset"],
            length=document["length"],
            doc_start=first - begin,
            doc_stop=stop - begin,
            row_start=self.column + first - self.start,
            row_stop=self.column + stop - self.start,
        )


def open_trace(run: Store) -> Trace:
    """The trace of a run's plan. Raises ContractError if plan and dataset do not belong together."""
    dataset = open_dataset(run)
    plan = read_plan(run, dataset)
    config = plan.settings.train
    order = standing_order(run, dataset, plan)
    if order.digest != plan.order:
        raise ContractError(
            f"{run.uri}: promised a plan with order {plan.order[:12]}, this version orders the samples as "
            f"{order.digest[:12]}; trace with the version that trained"
        )
    return Trace(dataset, order, config.objective == "causal")


def documents_of_step(run: Store, step: int) -> list[Appearance]:
    """Every part of a document in the global batch of a step, by row and place in the row.

    Raises ConfigError if the plan has no such step, ContractError if plan and dataset do not belong together.
    """
    return open_trace(run).documents_of_step(step)


def steps_of_url(run: Store, url: str) -> list[FoundDocument]:
    """Every document of a URL, as it is stored (redacted), with each of its appearances in the plan's steps, in order.

    Empty if the dataset has no such URL. Raises ContractError if plan and dataset do not belong together.
    """
    return open_trace(run).steps_of_url(url)


def print_documents(appearances: list[Appearance]) -> str:
    """A step's documents as a table of text."""
    rows = [("row", "tokens of row", "source", "document", "tokens of document", "record", "url")]
    for seen in appearances:
        row_part, doc_part = _span(seen.row_start, seen.row_stop), _span(seen.doc_start, seen.doc_stop)
        record = f"{seen.split}@{seen.offset}+{seen.length}"
        rows.append((str(seen.row), row_part, seen.source, seen.doc_id[:12], doc_part, record, seen.url))
    return _table(rows)


def print_steps(found: list[FoundDocument]) -> str:
    """The documents of a URL and the steps that saw them as text."""
    if not found:
        return "no document has this URL; URLs are stored with personal data replaced, compare with `penstock show`"
    blocks = []
    for document in found:
        record = f"{document.split}@{document.offset}+{document.length}"
        blocks.append(_shown(f"{document.doc_id[:12]}  {document.stream}  {document.num_tokens} tokens  {record}"))
        rows = [("step", "row", "sample", "epoch", "tokens of document", "tokens of row")]
        for seen in document.appearances:
            place = (str(seen.step), str(seen.row), str(seen.sample), str(seen.epoch))
            rows.append((*place, _span(seen.doc_start, seen.doc_stop), _span(seen.row_start, seen.row_stop)))
        blocks.append(_table(rows) if document.appearances else "  in no step of the plan")
    return "\n".join(blocks)


def _span(start: int, stop: int) -> str:
    return f"[{start}, {stop})"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    shown = [[_shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in shown)
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _shown(text: str) -> str:
    """Text from the web without control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
