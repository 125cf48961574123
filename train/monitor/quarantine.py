"""The quarantine list `train/quarantine.jsonl`: documents that spikes are attributed to, excluded from training.

Each line is a JSON object, flushed to disk before the samples that hold the document are added to the skip list. The
file names documents and not samples, so another run over the same documents, or a takedown, can use it. Documents are
chosen by their loss relative to that of other documents of their source and language.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.errors import ContractError
from schemas.storage import Store
from train.monitor.guard import MIN_DEVIATION
from train.monitor.log_files import Journal
from train.monitor.metrics import StepMetrics

QUARANTINE_NAME = "train/quarantine.jsonl"


class Quarantined(BaseModel):
    """A document that training excludes from later batches, and the spike that is attributed to it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    doc_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Document, hex."""
    url: str
    """URL of the document, redacted."""
    source: str
    """Source of the document."""
    language: str = ""
    """Most probable language of the document; empty = unknown, or listed by an earlier version."""
    split: str
    """Input file the document came from."""
    offset: int
    """Start of the document's record in the input file [bytes]."""
    length: int
    """Length of the document's record in the input file [bytes]."""
    step: int
    """Step of the spike."""
    rewind: int
    """Number, in the run, of the rewind that followed the spike, from 1."""
    loss: float
    """Mean cross-entropy of the document's targets in `step`, before the update [nats/token]."""
    targets: int
    """Number of the document's prediction targets in `step`."""
    excess: float
    """Excess of `loss` over the level of the source and language, as `excess_of` computes it [nats/token]."""
    limit: float
    """Largest excess that is not an outlier in `step` [nats/token]."""
    why: str
    """The rule by which the document was chosen, in words."""
    at: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    """Time of the quarantine, UTC, ISO 8601."""


@dataclass(frozen=True)
class Exclusion:
    """The samples and documents that training excludes after a spike."""

    samples: tuple[int, ...]
    """Global sample indices that were added to the skip list."""
    documents: tuple[Quarantined, ...]
    """Documents that are in no later batch."""


def read_quarantine(run: Store) -> list[Quarantined]:
    """Return every document of a run's quarantine list, in order. Raises ContractError if a line is invalid.

    Lines that a killed process left incomplete are ignored.
    """
    if not run.exists(QUARANTINE_NAME):
        return []
    documents = []
    *whole, rest = run.read_bytes(QUARANTINE_NAME).split(b"\n")
    for number, line in enumerate([*whole, rest], start=1):
        try:
            documents.append(Quarantined.model_validate_json(line))
        except ValidationError as error:
            # A whole line ends with `"}`; the next process adds a newline to an incomplete one.
            is_half = not line or (line.startswith(b"{") and not line.rstrip().endswith(b'"}'))
            if not is_half or any(problem["type"] != "json_invalid" for problem in error.errors()):
                raise ContractError(
                    f"{run.uri}/{QUARANTINE_NAME}, line {number}: expected a document, got an entry that is not valid "
                    f"({error}). Remove the line."
                ) from error
    return documents


def quarantine(run: Store, documents: Iterable[Quarantined]) -> None:
    """Append documents to the quarantine list and flush them to disk. Raises OSError if the disk rejects them.

    On an object store the list is written anew.
    """
    if not run.is_local:
        known = run.read_bytes(QUARANTINE_NAME) if run.exists(QUARANTINE_NAME) else b""
        lines = "".join(f"{document.model_dump_json()}\n" for document in documents)
        run.write_atomic(QUARANTINE_NAME, known + lines.encode())
        return
    journal = Journal(run, QUARANTINE_NAME)
    try:
        for document in documents:
            journal.append(document.model_dump_json().encode())
        journal.sync()
    finally:
        journal.close()


# A spike is attributed to the documents of the batch whose loss is an outlier. A loss is compared with the level of the
# document's source and language, so that code and prose, and rare and common languages, are treated alike. The mean of
# few targets has less weight, since it varies by chance.

PRIOR_TARGETS = 32
"""Number of targets whose mean varies by chance about as much as the documents of a source differ: with a deviation of
3 nats/token between tokens and 0.5 between documents, (3 / 0.5)² = 36. A choice, not measured on a corpus."""
OUTLIER = 3.5
"""Deviations above the median beyond which a value is an outlier; one is MAD_TO_DEVIATION · median absolute deviation.
Source: Iglewicz and Hoaglin 1993, "How to detect and handle outliers", section 3.2.2 (modified z-score)."""
MAD_TO_DEVIATION = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""
MAX_SHARE = 0.1
"""Maximum share of a batch's documents that a spike is attributed to; at least one is always allowed."""


@dataclass(frozen=True)
class OwnLoss:
    """A document of a batch and the loss over all its spans in the batch."""

    doc_id: str
    """Document, hex."""
    source: str
    loss: float
    """Mean cross-entropy [nats/token]."""
    targets: int
    excess: float
    """Excess of `loss` over the level of the source and language, as `excess_of` computes it [nats/token]."""


@dataclass(frozen=True)
class Attribution:
    """The documents that a spike is attributed to."""

    documents_blamed: tuple[OwnLoss, ...]
    """The documents, by excess, the worst first."""
    limit: float
    """Largest excess that is not an outlier [nats/token]."""
    why: str
    """The rule by which they were chosen, in words."""


class SourceLevels:
    """The mean loss of each source over some steps [nats/token]."""

    def __init__(self, records: Iterable[StepMetrics]):
        """`records`: metrics of the steps."""
        sums, counts = dict[str, float](), dict[str, int]()
        for record in records:
            for source, loss in record.losses.items():
                tokens = record.source_tokens.get(source, 0)
                sums[source] = sums.get(source, 0.0) + loss * tokens
                counts[source] = counts.get(source, 0) + tokens
        self._levels = {source: sums[source] / count for source, count in counts.items() if count}
        self._all = sum(sums.values()) / max(1, sum(counts.values()))

    def of(self, source: str) -> float:
        """Return the mean loss of a source [nats/token]; without targets of the source, that of all sources."""
        return self._levels.get(source, self._all)


MIN_REFERENCES = 8
"""Number of reference documents of a source and language from which on their median alone is the level."""


class GroupLevels:
    """The level of each source and language: the loss with which its documents are compared [nats/token].

    It is the median loss of n reference documents. With n < MIN_REFERENCES, it is (n · median + (MIN_REFERENCES - n) ·
    level of the source) / MIN_REFERENCES. The level of a source, also for documents without a language, is the median
    over its reference documents of all languages. Without MIN_REFERENCES of them, it is the mean loss of the source in
    previous steps.
    """

    def __init__(self, losses: Iterable[tuple[str, str, float]], sources: SourceLevels):
        """`losses`: source, language and mean loss [nats/token] of each reference document."""
        groups, whole = dict[tuple[str, str], list[float]](), dict[str, list[float]]()
        for source, language, loss in losses:
            groups.setdefault((source, language), []).append(loss)
            whole.setdefault(source, []).append(loss)
        self._groups = {group: (len(own), statistics.median(own)) for group, own in groups.items()}
        self._whole = {source: statistics.median(own) for source, own in whole.items() if len(own) >= MIN_REFERENCES}
        self._sources = sources

    def of(self, source: str, language: str) -> float:
        """Return the level of a source and language [nats/token]; an empty language is unknown."""
        level = self._whole.get(source, self._sources.of(source))
        number, median = self._groups.get((source, language), (0, 0.0))
        number = min(number, MIN_REFERENCES)
        return (number * median + (MIN_REFERENCES - number) * level) / MIN_REFERENCES


def excess_of(loss: float, targets: int, level: float) -> float:
    """Return the excess of a document's mean loss over `level`, that of its source and language [nats/token].

    The excess is (loss - level) · √(targets / (targets + 32)), so that a mean over few targets weighs less.
    """
    return (loss - level) * math.sqrt(targets / (targets + PRIOR_TARGETS))


def merge_parts(parts: Iterable[tuple[str, str, float | None, int, float | None]]) -> list[OwnLoss]:
    """Return the loss of each document from the losses of its spans; spans without targets are left out.

    `parts`: (doc_id, source, loss, targets, level of the source and language) of each span.
    """
    sums: dict[tuple[str, str], tuple[float, int, float]] = {}
    for doc_id, source, loss, targets, level in parts:
        if loss is not None and targets and level is not None:
            total, number, _ = sums.get((doc_id, source), (0.0, 0, level))
            sums[doc_id, source] = total + loss * targets, number + targets, level
    return [
        OwnLoss(doc_id, source, total / number, number, excess_of(total / number, number, level))
        for (doc_id, source), (total, number, level) in sums.items()
    ]


def attribute_spike(documents: Sequence[OwnLoss]) -> Attribution:
    """Attribute a spike to the documents whose excess is an outlier, at most a tenth of `documents`.

    Without an outlier, choose the document with the largest excess. If no excess is above 0, choose none.
    Raises ValueError if `documents` is empty.
    """
    if not documents:
        raise ValueError("documents: expected at least 1, got 0. Pass the documents of the spike's batch.")
    excesses = [document.excess for document in documents]
    median = statistics.median(excesses)
    deviation = MAD_TO_DEVIATION * statistics.median(abs(excess - median) for excess in excesses)
    limit = median + OUTLIER * max(deviation, MIN_DEVIATION)
    ranked = sorted(documents, key=lambda document: (-document.excess, document.doc_id))
    above = [document for document in ranked if document.excess > max(limit, 0.0)]
    most = max(1, math.floor(MAX_SHARE * len(documents)))
    if ranked[0].excess <= 0:
        return Attribution((), limit, "none lies above its source")
    if not above:
        return Attribution((ranked[0],), limit, "the worst of its batch, in which none is an outlier")
    more = "" if len(above) <= most else f"; of {len(above)} such the worst {most}"
    return Attribution(tuple(above[:most]), limit, f"an outlier among {len(documents)} documents{more}")
