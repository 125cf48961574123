"""The documents that spikes were blamed on, in `train/quarantine.jsonl`: an append-only list that training keeps out.

One JSON object a line, on the disk before the samples that hold them enter the skip list. The file names documents and
not samples, so it can be handed on: to another run over the same documents, or to a takedown.
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
    """A document that is in no later batch, and what it was blamed for."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    doc_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Document, hex."""
    url: str
    """URL of the document, redacted."""
    source: str
    """Source of the document."""
    split: str
    """Input file the document came from."""
    offset: int
    """Start of its record there [bytes]."""
    length: int
    """Length of its record there [bytes]."""
    step: int
    """Step of the spike."""
    rewind: int
    """Which rewind of the run the spike led to, from 1."""
    loss: float
    """Mean cross-entropy of its targets in that step, before the update [nats/token]."""
    targets: int
    """Number of these targets."""
    excess: float
    """How far that lies above what its source had, as `excess_of` measures it [nats/token]."""
    limit: float
    """Largest excess that was no outlier in that step [nats/token]."""
    why: str
    """The rule that chose it."""
    at: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    """When, UTC, ISO 8601."""


def read_quarantine(run: Store) -> list[Quarantined]:
    """Every line of the list, in order; what a killed process left of a line is passed over: `{` and no `"}`.

    Raises ContractError if any other line is none.
    """
    if not run.exists(QUARANTINE_NAME):
        return []
    found = []
    *whole, rest = run.read_bytes(QUARANTINE_NAME).split(b"\n")
    for number, line in enumerate([*whole, rest], start=1):
        try:
            found.append(Quarantined.model_validate_json(line))
        except ValidationError as error:
            is_half = not line or (line.startswith(b"{") and not line.rstrip().endswith(b'"}'))
            if not is_half or any(problem["type"] != "json_invalid" for problem in error.errors()):
                raise ContractError(
                    f"{run.uri}/{QUARANTINE_NAME}, line {number}: expected a document, got {error}. Correct the line."
                ) from error
    return found


def quarantine(run: Store, documents: Iterable[Quarantined]) -> None:
    """Append documents, and return once the disk has them. Raises OSError if it refuses."""
    journal = Journal(run, QUARANTINE_NAME)
    try:
        for document in documents:
            journal.append(document.model_dump_json().encode())
        journal.sync()
    finally:
        journal.close()


# Which documents of a batch stand out by their own loss, and which of them a spike is blamed on.
#
# A loss is compared with what the document's source had in the steps before, so that code and prose are judged alike;
# and the mean of few targets counts for less, as it scatters by chance.

PRIOR_TARGETS = 32
"""Targets of which a mean scatters by chance about as much as documents of a source do among each other: with 3
nats/token between tokens and 0.5 between documents, (3 / 0.5)² = 36. A choice, not measured on a corpus."""
OUTLIER = 3.5
"""Deviations above the median beyond which a value is an outlier, a deviation being NORMAL · the median absolute one.
Source: Iglewicz and Hoaglin 1993, "How to detect and handle outliers", section 3.2.2 (modified z-score)."""
MAD_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
MAX_SHARE = 0.1
"""Share of a batch's documents that may be blamed at most, though always one."""


@dataclass(frozen=True)
class OwnLoss:
    """A document of a batch and the loss of all its parts there."""

    doc_id: str
    """Document, hex."""
    source: str
    loss: float
    """Mean cross-entropy [nats/token]."""
    targets: int
    excess: float
    """See `excess_of` [nats/token]."""


@dataclass(frozen=True)
class Attribution:
    """The documents that a spike is blamed on."""

    documents_blamed: tuple[OwnLoss, ...]
    """The worst first."""
    limit: float
    """Largest excess that is no outlier [nats/token]."""
    why: str
    """The rule that chose them."""


class SourceLevels:
    """What sources had in some steps [nats/token]."""

    def __init__(self, records: Iterable[StepMetrics]):
        """A source that these steps have no targets of counts as all sources together do."""
        sums, counts = dict[str, float](), dict[str, int]()
        for record in records:
            for source, loss in record.losses.items():
                tokens = record.source_tokens.get(source, 0)
                sums[source] = sums.get(source, 0.0) + loss * tokens
                counts[source] = counts.get(source, 0) + tokens
        self._levels = {source: sums[source] / count for source, count in counts.items() if count}
        self._all = sum(sums.values()) / max(1, sum(counts.values()))

    def of(self, source: str) -> float:
        """The mean loss of a source."""
        return self._levels.get(source, self._all)


def excess_of(loss: float, targets: int, level: float) -> float:
    """How far the mean loss of so many targets lies above a level: the difference · √(targets / (targets + 32))."""
    return (loss - level) * math.sqrt(targets / (targets + PRIOR_TARGETS))


def merge_parts(parts: Iterable[tuple[str, str, float | None, int]], levels: SourceLevels) -> list[OwnLoss]:
    """The documents that parts belong to, given by (doc_id, source, loss, targets); without targets it is none."""
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for doc_id, source, loss, targets in parts:
        if loss is not None and targets:
            total, number = sums.get((doc_id, source), (0.0, 0))
            sums[doc_id, source] = total + loss * targets, number + targets
    return [
        OwnLoss(doc_id, source, total / number, number, excess_of(total / number, number, levels.of(source)))
        for (doc_id, source), (total, number) in sums.items()
    ]


def attribute_spike(documents: Sequence[OwnLoss]) -> Attribution:
    """Whom a spike is blamed on: outliers by their excess, at most a tenth of the documents; without any, the worst.

    Nobody, if no document lies above its source. Raises ValueError without documents.
    """
    if not documents:
        raise ValueError("no document to blame")
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
