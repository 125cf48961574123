"""The documents that spikes were blamed on, in `train/quarantine.jsonl`: an append-only list that training keeps out.

One JSON object a line, on the disk before the samples that hold them enter the skip list. The file names documents and
not samples, so it can be handed on: to another run over the same documents, or to a takedown.
"""

from collections.abc import Iterable
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.errors import ContractError
from schemas.storage import Store
from train.monitor.journal import Journal

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
                    f"{run.uri}/{QUARANTINE_NAME}, line {number}: promised a document, found {error}; correct the line"
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
