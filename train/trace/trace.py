"""The trace of a run: which documents a step is trained on, and which steps are trained on a document.

Steps count from 1, as the trainer's do: step k uses batch k - 1 of the sample order. Nothing is iterated from the start
of the run: the rows of a step are computed, and so are the steps whose rows contain a token position of a document.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from schemas.tokens import TRAIN, Dataset, open_dataset
from train.checkpoint.folder import list_checkpoints, open_trained_order
from train.data.document_index import DocumentIndex, LocatedDocument, Row
from train.data.order import SampleOrder, Samples
from train.data.stages import SkipList
from train.plan.plan import Plan, read_plan

# Spans of documents in the rows of a step, and documents with all such spans.


@dataclass(frozen=True)
class Appearance:
    """A span of a document's tokens in a row of a step; the span is contiguous in the stored stream."""

    step: int
    """Step, from 1."""
    row: int
    """Row of the global batch, from 0."""
    piece: int
    """Number of the contiguous token range in the row that holds the span, from 0."""
    sample: int
    """Global sample index, as in a skip list."""
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
    """Start of the document's record in the input file [bytes]."""
    length: int
    """Length of the document's record in the input file [bytes]."""
    doc_start: int
    """First token of the span, counted in the document."""
    doc_stop: int
    """Token after the span, counted in the document."""
    row_start: int
    """First token of the span, counted in the row."""
    row_stop: int
    """Token after the span, counted in the row; the last token of the span may be a target only, and not an input."""
    cluster: str = ""
    """Duplicate cluster, hex; empty if it is not known."""
    language: str = ""
    """Most probable language of the document; empty if it is not known."""


@dataclass(frozen=True)
class TokenRange:
    """A range of a row's tokens that is contiguous in the stored stream.

    If the token after the last input is a target, the range includes it.
    """

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
        """Return the span of a document that lies in this range; the document begins at token `begin` of the stream."""
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
            language=document.get("language") or "",
        )


@dataclass(frozen=True)
class FoundDocument:
    """A document and all its spans in the batches of a plan."""

    stream: str
    """`<source>/train` or `<source>/heldout`; held-out documents are never trained on."""
    doc_id: str
    """Document, hex."""
    url: str
    """URL of the document, redacted."""
    split: str
    """Input file the document came from, such as a WARC file."""
    offset: int
    """Start of the document's record in the input file [bytes]."""
    length: int
    """Length of the document's record in the input file [bytes]."""
    num_tokens: int
    """Number of tokens of the document, separators included."""
    appearances: list[Appearance]
    """Spans of the document in training rows, by step and row."""
    cluster: str = ""
    """Duplicate cluster, hex; empty if it is not known."""


def id_to_hex(identifier: Any) -> str:
    """Return an id as hex; empty for None."""
    return "" if identifier is None else bytes(identifier).hex()


class Trace:
    """Finds the documents of a step and the steps of a document, from the sample order and the document index."""

    def __init__(self, dataset: Dataset, order: SampleOrder, predicts_next: bool = True):
        """`predicts_next`: True if the token after the last input is a target, as with train.objective = causal."""
        self._order, self._lookahead = order, int(predicts_next)
        self.documents = DocumentIndex(dataset)
        self.num_steps = order.stages[-1].end

    def check_step(self, step: int) -> None:
        """Raise ConfigError if the plan has no such step."""
        if not 1 <= step <= self.num_steps:
            raise ConfigError(
                f"--step: expected 1 to {self.num_steps}, the steps of the plan, got {step}. Set --step to one of them."
            )

    def documents_of_step(self, step: int, rows: range | None = None) -> list[Appearance]:
        """Return the document spans in some rows of a step's global batch (None = all), by row and position.

        Raises ConfigError if the plan has no such step.
        """
        self.check_step(step)
        samples = self._order.samples(step - 1, rows)
        first = rows.start if rows else 0
        pieces = list(self._pieces(samples, [(step, first + row) for row in range(len(samples.index))]))
        covering = {source: self._covering(source, pieces) for source in {piece.source for piece in pieces}}
        spans = []
        for piece in pieces:
            documents, begins, ends = covering[piece.source]
            for number in range(bisect_right(ends, piece.start), bisect_left(begins, piece.stop)):
                spans.append(piece.appearance(documents[number][0], begins[number]))
        return spans

    def samples_with(self, doc_ids: Iterable[bytes], after: int) -> list[int]:
        """Return the global indices of the samples after step `after` that contain tokens of the documents, sorted."""
        located = [placed for doc_id in doc_ids for placed in self.documents.all_of_id(doc_id)]
        return sorted({part.sample for placed in located for part in self._appearances(placed) if part.step > after})

    def num_samples(self, after: int) -> int:
        """Return the number of samples in the steps after `after`."""
        return sum(max(0, plan.end - max(after, plan.first_step)) * plan.global_batch for plan in self._order.stages)

    def skipping(self, samples: Sequence[int]) -> "Trace":
        """Return a copy of this trace in which `samples` (global indices) are added to the skip list."""
        order = self._order
        streams, skip = dict(zip(order.sources, order.streams, strict=True)), SkipList((*order.skip.indices, *samples))
        trace = copy(self)
        trace._order = SampleOrder(streams, order.stages, skip, order.seed)
        return trace

    def _with_appearances(self, placed: LocatedDocument) -> FoundDocument:
        """Return a document of the index with all its spans in batches, by step and row."""
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
        """Return every document with this URL, with all its spans by step and row; empty if the dataset has none.

        `url`: the URL as the dataset stores it, after redaction. If no document has it, documents with the same
        canonical URL are returned.
        """
        return [self._with_appearances(placed) for placed in self.documents.of_url(url)]

    def steps_of_document(self, doc_id: bytes) -> list[FoundDocument]:
        """Return the document with this id and all its spans, once for each member of the dataset that has it."""
        return [self._with_appearances(placed) for placed in self.documents.all_of_id(doc_id)]

    def steps_of_domain(self, host: str) -> Iterator[FoundDocument]:
        """Yield every document of a domain, the hosts below it included, with all its spans."""
        return (self._with_appearances(placed) for placed in self.documents.of_host(host))

    def _covering(
        self, source: str, pieces: Sequence[TokenRange]
    ) -> tuple[list[tuple[Row, int]], list[int], list[int]]:
        """Return the documents in the token ranges of a source, and lists of the documents' start and end tokens.

        `pieces`: token ranges; those of other sources are ignored.
        """
        ranges = [(piece.start, piece.stop) for piece in pieces if piece.source == source]
        documents = self.documents.covering(f"{source}/{TRAIN}", ranges)
        begins = [begin for _, begin in documents]
        return documents, begins, [begin + row["num_tokens"] for row, begin in documents]

    def _appearances(self, placed: LocatedDocument) -> Iterator[Appearance]:
        """Yield the spans of a document in the batches of the plan."""
        stream, document, begin = placed
        (source, _, split), end = stream.rpartition("/"), begin + document["num_tokens"]
        if split != TRAIN or source not in self._order.sources:
            return
        # The first token of the document may be the target of a range that ends just before it.
        for stage, numbers in self._order.find(source, max(0, begin - self._lookahead), end):
            plan, samples = self._order.stages[stage], self._order.at(stage, numbers)
            places = [divmod(number, plan.global_batch) for number in numbers.tolist()]
            for piece in self._pieces(samples, [(plan.first_step + step + 1, row) for step, row in places]):
                if piece.start < end and piece.stop > begin:
                    yield piece.appearance(document, begin)

    def _pieces(self, samples: Samples, places: Sequence[tuple[int, int]]) -> Iterator[TokenRange]:
        """Yield the contiguous token ranges of samples; `places`: step and row of each sample."""
        pieces, last, number = samples.pieces, -1, 0
        columns = (pieces.row, pieces.column, pieces.epoch, pieces.start, pieces.length, pieces.closed)
        for row, column, epoch, start, length, closed in zip(*(array.tolist() for array in columns), strict=True):
            number = number + 1 if row == last else 0
            last, stop = row, start + length + (0 if closed else self._lookahead)
            source = self._order.sources[int(samples.source[row])]
            step, place = places[row]
            yield TokenRange(step, place, number, int(samples.index[row]), source, epoch, column, start, stop)


def open_trace(run: Store, dataset: Dataset | None = None, plan: Plan | None = None) -> Trace:
    """Return the trace of a plan; `dataset`, `plan`: None = those of the run.

    Raises ContractError if there is no plan, if it was made for a different dataset, or if it or its skip list does not
    continue the newest checkpoint.
    """
    dataset = dataset or open_dataset(run, even_replaced=True)
    plan = plan or read_plan(run, dataset)
    config = plan.settings.train
    order = open_trained_order(run, dataset, plan)
    if order.digest != plan.order:
        raise ContractError(
            f"{run.uri}: expected the plan's sample order with digest {plan.order[:12]}, got {order.digest[:12]}. Run "
            "this command with the version of Penstock that made the plan."
        )
    return Trace(dataset, order, config.objective == "causal")


def documents_of_step(run: Store, step: int) -> list[Appearance]:
    """Return the document spans in the global batch of a step, by row and position in the row.

    Raises ConfigError if the plan has no such step, ContractError if the plan was made for a different dataset.
    """
    return open_trace(run).documents_of_step(step)


def steps_of_url(run: Store, url: str) -> list[FoundDocument]:
    """Return every document with this URL, with all its spans by step and row; empty if the dataset has none.

    `url`: the URL as the dataset stores it, after redaction. Raises ContractError if the plan was made for a different
    dataset.
    """
    return open_trace(run).steps_of_url(url)


# The steps, epochs and checkpoints of a run that were trained on documents, and the last checkpoint that was not.


@dataclass(frozen=True)
class Exposure:
    """The steps of a plan whose batches contain documents of a set, and the checkpoints trained on such batches."""

    steps: tuple[int, ...]
    """Every step whose batch contains a document of the set, in order, up to the end of the plan."""
    epochs: tuple[int, ...]
    """Passes over the source in which these steps lie, from 0."""
    trained: int | None
    """Step of the newest checkpoint; steps after it are only planned. None = there is no checkpoint."""
    first_checkpoint: int | None
    """Step of the first checkpoint that saw the set; None = none did."""
    last_checkpoint: int | None
    """Step of the last checkpoint that saw the set: every checkpoint after the first that saw it has seen it too."""
    last_clean: int | None
    """Step of the last checkpoint that had not seen the set; None = there is none, so train from step 0."""
    saw_before: bool | None = False
    """True if the weights that training began from had seen the set, so no checkpoint is clean; None = not known."""

    def describe(self) -> str:
        """Return the steps, epochs and checkpoints as one line of text."""
        if self.saw_before is False:
            return self._describe_steps()
        own = replace(self, saw_before=False)._describe_steps().replace(": every checkpoint is clean", "")
        own = own.partition("last clean checkpoint")[0].rstrip(" ;,")
        if self.saw_before:
            return f"{own}; no checkpoint is clean: the weights that training began from had seen it"
        return f"{own}; it is NOT KNOWN whether the weights that training began from had seen it"

    def _describe_steps(self) -> str:
        if not self.steps:
            return "in no step of the plan: every checkpoint is clean"
        steps, epochs = self.steps, ", ".join(map(str, self.epochs))
        words = [f"{len(steps)} step(s), {steps[0]} to {steps[-1]}; epoch(s) {epochs}"]
        if self.trained is None:
            return "; ".join([*words, "there is no checkpoint"])
        if self.first_checkpoint is None:
            return "; ".join([*words, f"no checkpoint saw it yet, last clean checkpoint {self.last_clean}"])
        words.append(f"first checkpoint that saw it {self.first_checkpoint}, last {self.last_checkpoint}")
        clean = "none, train from step 0" if self.last_clean is None else str(self.last_clean)
        return "; ".join([*words, f"last clean checkpoint {clean}"])


def exposure_of(
    appearances: Iterable[Appearance], checkpoints: Iterable[int], saw_before: bool | None = False
) -> Exposure:
    """Return the steps and checkpoints that were trained on any document of a set.

    `appearances`: the documents' spans in batches; `checkpoints`: steps of the existing checkpoints; `saw_before`: True
    if the weights that training began from had seen the set, None = not known.
    """
    uses = [(part.step, part.epoch) for part in appearances]
    steps, saved = sorted({step for step, _ in uses}), sorted(checkpoints)
    # A checkpoint of step s is the result of updates 1 to s.
    saw = [step for step in saved if steps and step >= steps[0]]
    clean = [step for step in saved if (not steps or step < steps[0]) and saw_before is False]
    return Exposure(
        steps=tuple(steps),
        epochs=tuple(sorted({epoch for _, epoch in uses})),
        trained=saved[-1] if saved else None,
        first_checkpoint=saw[0] if saw else None,
        last_checkpoint=saw[-1] if saw else None,
        last_clean=clean[-1] if clean else None,
        saw_before=saw_before,
    )


def checkpoint_steps(run: Store) -> list[int]:
    """Return the steps of the complete checkpoints of a run, oldest first."""
    return [note.step for note in list_checkpoints(run)]
