"""From a training step to the documents it was made of, and from a URL to the steps that saw it.

Both are computed from manifest, plan and skip list; nothing is logged while training. Steps count from 1, as the
trainer's do: step k is made of batch k - 1 of the order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import ConfigError, ContractError
from schemas.ids import shuffle_key
from schemas.storage import Store
from schemas.tokens import TRAIN, Dataset, Shard, open_dataset
from train.order import Ints, Order, make_order
from train.plan import Plan, read_plan
from train.skips import read_skip_list

DOCUMENT = ("doc_id", "source", "url", "split", "offset", "length", "token_offset", "num_tokens")


@dataclass(frozen=True)
class Appearance:
    """A part of a document in one sequence of one step."""

    step: int
    """Step, from 1."""
    row: int
    """Row of the global batch, from 0."""
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
    """First token of the part, counted in the sequence of seq_len + 1 tokens; the last one is a target only."""
    row_stop: int
    """Token after the part, counted in the sequence."""


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


class _Documents:
    """The document index of one shard."""

    def __init__(self, dataset: Dataset, shard: Shard):
        self._table = _read_table(dataset.folder, shard.docs_path)

    @cached_property
    def _begins(self) -> Ints:
        return np.asarray(self._table.column("token_offset").to_numpy(), np.int64)

    def between(self, start: int, stop: int) -> list[dict[str, Any]]:
        """The documents that have a token in [start, stop) of the shard."""
        first = int(np.searchsorted(self._begins, start, side="right")) - 1
        last = int(np.searchsorted(self._begins, stop, side="left"))
        return _rows(self._table.slice(first, last - first))

    def of_id(self, doc_id: bytes) -> list[dict[str, Any]]:
        """The document with this id."""
        chosen = pc.equal(self._table.column("doc_id"), pa.scalar(doc_id, pa.binary(16)))
        return _rows(self._table.filter(chosen))


def _rows(documents: pa.Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = documents.select(DOCUMENT).to_pylist()
    return rows


class _Run:
    """A run's dataset, plan and order, with the document indexes read so far."""

    def __init__(self, run: Store):
        self.dataset = open_dataset(run)
        self.plan: Plan = read_plan(run, self.dataset)
        config = self.plan.train_config
        self.order: Order = make_order(self.dataset, config, read_skip_list(run, config.skip_file))
        if self.order.digest != self.plan.order:
            raise ContractError(
                f"{run.uri}: promised a plan with order {self.plan.order[:12]}, this version orders the samples as "
                f"{self.order.digest[:12]}; trace with the version that trained"
            )
        self._indexes: dict[tuple[str, int], _Documents] = {}

    def documents(self, stream: str, number: int) -> _Documents:
        """The document index of a shard."""
        if (stream, number) not in self._indexes:
            self._indexes[stream, number] = _Documents(self.dataset, self.dataset.streams[stream][number])
        return self._indexes[stream, number]

    def begins(self, stream: str) -> Ints:
        """First token of every shard in its stream, and the end of the stream."""
        return np.cumsum([0, *(shard.num_tokens for shard in self.dataset.streams[stream])])

    def appearance(self, document: dict[str, Any], begin: int, sample: dict[str, int]) -> Appearance:
        """The part of a document, which begins at token `begin` of its stream, in a sample."""
        start = sample["start"]
        first, stop = max(begin, start), min(begin + document["num_tokens"], start + self.order.seq_len + 1)
        step, row = divmod(sample["number"], self.plan.global_batch)
        return Appearance(
            step=step + 1,
            row=row,
            sample=sample["index"],
            source=document["source"],
            epoch=sample["epoch"],
            doc_id=document["doc_id"].hex(),
            url=document["url"],
            split=document["split"],
            offset=document["offset"],
            length=document["length"],
            doc_start=first - begin,
            doc_stop=stop - begin,
            row_start=first - start,
            row_stop=stop - start,
        )


def documents_of_step(run: Store, step: int) -> list[Appearance]:
    """Every part of a document in the global batch of a step, by row and place in the row.

    Raises ConfigError if the plan has no such step, ContractError if plan and dataset do not belong together.
    """
    opened = _Run(run)
    plan, order = opened.plan, opened.order
    if not 1 <= step <= plan.steps:
        raise ConfigError(
            f"--step: promised 1 to {plan.steps}, the steps of the plan, found {step}; choose one of them"
        )
    first = (step - 1) * plan.global_batch
    samples = order.samples(first, plan.global_batch)
    found = []
    for row in range(plan.global_batch):
        stream = f"{order.sources[int(samples.source[row])]}/{TRAIN}"
        start = int(samples.start[row])
        sample = {"number": first + row, "start": start, "epoch": int(samples.epoch[row])}
        sample["index"] = int(samples.index[row])
        for document, begin in _documents_between(opened, stream, start, start + order.seq_len + 1):
            found.append(opened.appearance(document, begin, sample))
    return found


def _documents_between(opened: _Run, stream: str, start: int, stop: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Documents with a token in [start, stop) of a stream, each with its own first token in the stream."""
    begins = opened.begins(stream)
    first = int(np.searchsorted(begins, start, side="right")) - 1
    last = int(np.searchsorted(begins, stop, side="left"))
    for number in range(first, last):
        begin, end = int(begins[number]), int(begins[number + 1])
        if begin < end:
            part = opened.documents(stream, number).between(max(start, begin) - begin, min(stop, end) - begin)
            yield from ((document, begin + document["token_offset"]) for document in part)


def steps_of_url(run: Store, url: str) -> list[FoundDocument]:
    """Every document of a URL, as it is stored (redacted), with each of its appearances in the plan's steps, in order.

    Empty if the dataset has no such URL. Raises ContractError if plan and dataset do not belong together.
    """
    opened = _Run(run)
    found = []
    for row in _rows_of_url(opened.dataset, url):
        stream, number = row["stream"], row["shard"]
        begin_of_shard = int(opened.begins(stream)[number])
        for document in opened.documents(stream, number).of_id(row["doc_id"]):
            seen = list(_appearances(opened, stream, document, begin_of_shard + document["token_offset"]))
            seen.sort(key=lambda appearance: (appearance.step, appearance.row))
            named = {name: document[name] for name in ("url", "split", "offset", "length", "num_tokens")}
            found.append(FoundDocument(stream=stream, doc_id=document["doc_id"].hex(), appearances=seen, **named))
    return found


def _rows_of_url(dataset: Dataset, url: str) -> list[dict[str, Any]]:
    """The rows of the index by URL; its registrable domain is an ending of its host, so few buckets are read."""
    labels = _host(url).split(".")
    domains = {".".join(labels[first:]) for first in range(len(labels))} | {""}
    buckets = {shuffle_key(0, domain.encode()) % len(dataset.by_url) for domain in domains} if dataset.by_url else set()
    rows = []
    for bucket in sorted(buckets):
        table = _read_table(dataset.folder, dataset.manifest.run.paths[f"by_url/{bucket:05d}"])
        rows += table.filter(pc.equal(table.column("url"), url)).to_pylist()
    return rows


def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _appearances(opened: _Run, stream: str, document: dict[str, Any], begin: int) -> Iterator[Appearance]:
    """Each time the plan's steps see a document that begins at token `begin` of its stream."""
    source, _, split = stream.rpartition("/")
    order, drawn = opened.order, opened.plan.steps * opened.plan.global_batch
    if split != TRAIN or source not in order.sources:
        return
    shape = order.streams[order.sources.index(source)]
    # A sequence overlaps the next by one token, its last target: that token's document is in both.
    first = max(0, (begin - 1) // order.seq_len)
    last = min((begin + document["num_tokens"] - 1) // order.seq_len, shape.num_samples - 1)
    start = np.arange(first, last + 1) * order.seq_len
    last_index = int(order.samples(drawn - 1, 1).index[0])
    epoch = 0
    while start.size:
        index, number = order.find(source, epoch, start)
        if index.min() > last_index:
            return
        for place in np.flatnonzero((number >= 0) & (number < drawn)).tolist():
            sample = {"number": int(number[place]), "index": int(index[place]), "epoch": epoch}
            yield opened.appearance(document, begin, sample | {"start": int(start[place])})
        epoch += 1


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


def _read_table(folder: Store, path: str) -> pa.Table:
    try:
        return pa.ipc.open_file(folder.open_input(path)).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise ContractError(f"{folder.uri}/{path}: promised an index file, found {error}; restore it") from error
