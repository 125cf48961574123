"""The trace of a run: its order joined with the documents of its dataset, in both directions.

Steps count from 1, as the trainer's do: step k is made of batch k - 1 of the order. Nothing is iterated from the start
of the run: a step's rows are computed, and a document's steps are those whose rows hold its place in the stream.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from schemas.tokens import TRAIN, Dataset, open_dataset
from train.checkpoint.folder import list_checkpoints
from train.data.document_index import DocumentIndex, LocatedDocument, Row
from train.data.order import SampleOrder, Samples
from train.data.stages import SkipList
from train.plan.plan import Plan, read_plan, standing_order

# A part of a document in a row of a step, and a document with every such part.


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
    cluster: str = ""
    """Duplicate cluster, hex; empty if it is not known."""


@dataclass(frozen=True)
class TokenRange:
    """A piece of a row of a step, with the token behind it if that is a target."""

    step: int
    row: int
    piece: int
    sample: int
    source: str
    epoch: int
    column: int
    start: int
    stop: int

    def appearance(self, document: Row, begin: int) -> Appearance:
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
            cluster=id_to_hex(document.get("cluster")),
        )


@dataclass(frozen=True)
class FoundDocument:
    """A document and every time a run saw it, up to the last step of its plan."""

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
    cluster: str = ""
    """Duplicate cluster, hex; empty if it is not known."""


def id_to_hex(identifier: Any) -> str:
    """An id as hex; empty for None."""
    return "" if identifier is None else bytes(identifier).hex()


class Trace:
    """The order of a run joined with the documents of its dataset."""

    def __init__(self, dataset: Dataset, order: SampleOrder, predicts_next: bool = True):
        """`predicts_next`: whether the token behind a piece is a target, as for objective = causal."""
        self._order, self._behind = order, int(predicts_next)
        self.documents = DocumentIndex(dataset)
        self.num_steps = order.stages[-1].end

    def check_step(self, step: int) -> None:
        """Raises ConfigError if the plan has no such step."""
        if not 1 <= step <= self.num_steps:
            raise ConfigError(
                f"--step: expected 1 to {self.num_steps}, the steps of the plan, got {step}. Choose one of them."
            )

    def documents_of_step(self, step: int, rows: range | None = None) -> list[Appearance]:
        """Every part of a document in some rows of a step's global batch (None = all), by row and place in the row.

        Raises ConfigError if the plan has no such step.
        """
        self.check_step(step)
        samples = self._order.samples(step - 1, rows)
        first = rows.start if rows else 0
        pieces = list(self._pieces(samples, [(step, first + row) for row in range(len(samples.index))]))
        covering = {source: self._covering(source, pieces) for source in {piece.source for piece in pieces}}
        found = []
        for piece in pieces:
            documents, begins, ends = covering[piece.source]
            for number in range(bisect_right(ends, piece.start), bisect_left(begins, piece.stop)):
                found.append(piece.appearance(documents[number][0], begins[number]))
        return found

    def samples_with(self, doc_ids: Iterable[bytes], after: int) -> list[int]:
        """The global indices of the samples behind step `after` that see a token of documents, in ascending order."""
        placed = [found for doc_id in doc_ids if (found := self.documents.of_id(doc_id)) is not None]
        return sorted({part.sample for one in placed for part in self._appearances(one) if part.step > after})

    def num_samples(self, after: int) -> int:
        """Samples of the steps behind `after`."""
        return sum(max(0, plan.end - max(after, plan.first_step)) * plan.global_batch for plan in self._order.stages)

    def skipping(self, samples: Sequence[int]) -> "Trace":
        """The same trace with more samples skipped, by global index."""
        order = self._order
        streams, skip = dict(zip(order.sources, order.streams, strict=True)), SkipList((*order.skip.indices, *samples))
        found = copy(self)
        found._order = SampleOrder(streams, order.stages, skip, order.seed)
        return found

    def found(self, placed: LocatedDocument) -> FoundDocument:
        """A document of the index with each of its appearances in the steps, in order."""
        stream, document, _ = placed
        key = lambda part: (part.step, part.row, part.piece)  # noqa: E731
        named = {name: document[name] for name in ("url", "split", "offset", "length", "num_tokens")}
        return FoundDocument(
            stream=stream,
            doc_id=document["doc_id"].hex(),
            appearances=sorted(self._appearances(placed), key=key),
            cluster=id_to_hex(document.get("cluster")),
            **named,
        )

    def steps_of_url(self, url: str) -> list[FoundDocument]:
        """Every document of a URL, as it is stored (redacted), with each of its appearances in the steps, in order.

        If none is stored so, those of the same page; empty if the dataset has none of these either.
        """
        return [self.found(placed) for placed in self.documents.of_url(url)]

    def steps_of_document(self, doc_id: bytes) -> list[FoundDocument]:
        """The document of an id with each of its appearances in the steps; empty if the dataset has none."""
        placed = self.documents.of_id(doc_id)
        return [] if placed is None else [self.found(placed)]

    def steps_of_domain(self, host: str) -> Iterator[FoundDocument]:
        """Every document of a registrable domain, or of a host and those below it, by SURT."""
        return (self.found(placed) for placed in self.documents.of_host(host))

    def _covering(
        self, source: str, pieces: Sequence[TokenRange]
    ) -> tuple[list[tuple[Row, int]], list[int], list[int]]:
        """The documents that pieces of a source touch, and where each begins and ends in the stream."""
        ranges = [(piece.start, piece.stop) for piece in pieces if piece.source == source]
        documents = self.documents.covering(f"{source}/{TRAIN}", ranges)
        begins = [begin for _, begin in documents]
        return documents, begins, [begin + row["num_tokens"] for row, begin in documents]

    def _appearances(self, placed: LocatedDocument) -> Iterator[Appearance]:
        """Each time the steps see a document that begins at a token of its stream."""
        stream, document, begin = placed
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

    def _pieces(self, samples: Samples, places: Sequence[tuple[int, int]]) -> Iterator[TokenRange]:
        """The pieces of samples, which are used at these (step, row)."""
        pieces, last, number = samples.pieces, -1, 0
        columns = (pieces.row, pieces.column, pieces.epoch, pieces.start, pieces.length, pieces.closed)
        for row, column, epoch, start, length, closed in zip(*(one.tolist() for one in columns), strict=True):
            number = number + 1 if row == last else 0
            last, stop = row, start + length + (0 if closed else self._behind)
            source = self._order.sources[int(samples.source[row])]
            step, place = places[row]
            yield TokenRange(step, place, number, int(samples.index[row]), source, epoch, column, start, stop)


def open_trace(run: Store, dataset: Dataset | None = None, plan: Plan | None = None) -> Trace:
    """The trace of a run's plan; None = the run's own. Raises ContractError if plan and dataset do not belong
    together, or if there is no plan."""
    dataset = dataset or open_dataset(run)
    plan = plan or read_plan(run, dataset)
    config = plan.settings.train
    order = standing_order(run, dataset, plan)
    if order.digest != plan.order:
        raise ContractError(
            f"{run.uri}: expected a plan with order {plan.order[:12]}, this version orders the samples as "
            f"{order.digest[:12]}. Trace with the version that trained."
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


# Which steps, epochs and checkpoints of a run saw documents, and which checkpoint is the last that did not.


@dataclass(frozen=True)
class Exposure:
    """When a run sees something, by its plan, and what that means for its checkpoints that stand."""

    steps: tuple[int, ...]
    """Every step that sees it, in order, up to the end of the plan."""
    epochs: tuple[int, ...]
    """Passes over the source in which it is seen, from 0."""
    trained: int | None
    """Step of the newest checkpoint that stands; steps behind it are only planned. None = no checkpoint stands."""
    first_checkpoint: int | None
    """Step of the first checkpoint that saw it; None = none did."""
    last_checkpoint: int | None
    """Step of the last checkpoint that saw it: what was seen stays in the weights."""
    last_clean: int | None
    """Step of the last checkpoint that had not seen it; None = none stands, only training from the beginning is."""

    def describe(self) -> str:
        """The same in words."""
        if not self.steps:
            return "in no step of the plan: every checkpoint is clean"
        steps, epochs = self.steps, ", ".join(map(str, self.epochs))
        words = [f"{len(steps)} step(s), {steps[0]} to {steps[-1]}; epoch(s) {epochs}"]
        if self.trained is None:
            return "; ".join([*words, "no checkpoint stands"])
        if self.first_checkpoint is None:
            return "; ".join([*words, f"no checkpoint saw it yet, the last clean one is {self.last_clean}"])
        words.append(f"first checkpoint that saw it {self.first_checkpoint}, last {self.last_checkpoint}")
        clean = "none stands, train from the beginning" if self.last_clean is None else str(self.last_clean)
        return "; ".join([*words, f"last clean checkpoint {clean}"])


def exposure_of(appearances: Iterable[Appearance], checkpoints: Iterable[int]) -> Exposure:
    """When a run sees something, from all its appearances and the steps of the checkpoints that stand.

    A checkpoint of step s has made s updates, so it saw a step k if k <= s.
    """
    found = [(part.step, part.epoch) for part in appearances]
    steps, standing = sorted({step for step, _ in found}), sorted(checkpoints)
    saw = [step for step in standing if steps and step >= steps[0]]
    clean = [step for step in standing if not steps or step < steps[0]]
    return Exposure(
        steps=tuple(steps),
        epochs=tuple(sorted({epoch for _, epoch in found})),
        trained=standing[-1] if standing else None,
        first_checkpoint=saw[0] if saw else None,
        last_checkpoint=saw[-1] if saw else None,
        last_clean=clean[-1] if clean else None,
    )


def checkpoint_steps(run: Store) -> list[int]:
    """The steps of the checkpoints that stand in a run, oldest first; only mounted storage has any."""
    return [note.step for note in list_checkpoints(run)] if run.is_local else []
