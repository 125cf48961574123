"""What happened to a run beside its steps, in `train/events.jsonl`: an append-only record that nothing cuts.

One JSON object a line, on the disk before training goes on. What was done twice, because a run went back to a
checkpoint, stands there twice, with the resume or the rewind in between.
"""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from schemas.errors import ContractError
from schemas.storage import Store
from train.monitor.guard import Quantity
from train.monitor.log_files import Journal
from train.monitor.metrics import StepMetrics, finite

EVENTS_NAME = "train/events.jsonl"


Text = Annotated[str, BeforeValidator(lambda text: str(text).encode("utf-8", "replace").decode())]
"""What a storage or a file name may hold and JSON may not is replaced: an event is never refused for its words."""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class _Event(BaseModel):
    """What every event has."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    step: int
    """The step it happened in or, where nothing was being done, the last one that was made."""
    at: str = Field(default_factory=_now)
    """When, UTC, ISO 8601."""


class Skipped(_Event):
    """A step whose loss or gradient was not finite: no update was made."""

    kind: Literal["skipped"] = "skipped"
    loss: float | None
    """Loss [nats/token]; None = not finite."""
    grad_norm: float | None
    """Norm of the gradient; None = not finite."""
    loss_scale: float | None = None
    """Factor of the loss in fp16, before it was lowered; None = another precision."""

    _number = field_validator("loss", "grad_norm", mode="before")(finite)


class SpikeDocument(BaseModel):
    """A part of a document in the batch of a spike, as `penstock trace` shows it, and its own loss."""

    model_config = ConfigDict(frozen=True, extra="ignore", from_attributes=True, use_attribute_docstrings=True)

    row: int
    """Row of the global batch, from 0."""
    sample: int
    """Global sample index, as a skip list counts."""
    source: str
    """Source of the document."""
    doc_id: str
    """Document, hex."""
    url: str
    """URL of the document, redacted."""
    split: str
    """Input file the document came from."""
    offset: int
    """Start of its record there [bytes]."""
    length: int
    """Length of its record there [bytes]."""
    doc_start: int
    """First token of the part, counted in the document."""
    doc_stop: int
    """Token after the part, counted in the document."""
    loss: float | None = None
    """Mean cross-entropy of its targets under the weights before the update [nats/token]; None = it has none."""
    targets: int = 0
    """Its tokens that were to be predicted."""
    excess: float | None = None
    """How far that loss lies above what its source had, as `excess_of` measures it [nats/token]."""

    _number = field_validator("loss", "excess", mode="before")(finite)


class Spike(_Event):
    """A loss or a gradient above the limit that those before it set."""

    kind: Literal["spike"] = "spike"
    left: tuple[Quantity, ...] = ("loss",)
    """What left its band."""
    loss: float
    """Loss of the step [nats/token]."""
    mean: float
    """Mean of the window before it, of the first quantity of `left`."""
    deviation: float
    """Standard deviation of that window."""
    limit: float
    """Largest value that would have been no spike."""
    grad_norm: float | None = None
    """Norm of the gradient before clipping; None = not recorded."""
    grad_limit: float | None = None
    """Largest norm that would have been no spike; None = the gradient is not watched, or not yet."""
    documents: tuple[SpikeDocument, ...] = ()
    """Every part of a document in the step's batch, by `excess`, the worst first; those without targets last."""


class Rewound(_Event):
    """Training went back from `step` to a checkpoint, to go on without some samples."""

    kind: Literal["rewound"] = "rewound"
    to_step: int
    """Step of the checkpoint; the steps after it are undone."""
    checkpoint: str
    """Folder of the checkpoint, relative to the run."""
    samples: tuple[int, ...]
    """Global sample indices that are skipped from now on."""
    quarantined: tuple[str, ...] = ()
    """Documents, hex, that are in no batch from now on."""


class Undone(_Event):
    """A step that a rewind undid, as it stood in metrics.jsonl."""

    kind: Literal["undone"] = "undone"
    metrics: StepMetrics
    """What it had measured."""


class FailedSave(_Event):
    """A checkpoint that could not be written; training went on."""

    kind: Literal["failed_save"] = "failed_save"
    error: Text
    """What the storage answered."""


class EarlyStop(_Event):
    """The end of a run whose held-out loss no longer fell."""

    kind: Literal["early_stop"] = "early_stop"
    heldout_loss: float | None
    """Held-out loss of the step [nats/token]; None = not finite."""
    best: float | None
    """Lowest held-out loss of the run [nats/token]."""
    since_best: int
    """Measurements since that one."""

    _number = field_validator("heldout_loss", mode="before")(finite)


class Started(_Event):
    """A process that began a run, without a checkpoint; what events there are before belong to another one."""

    kind: Literal["begun"] = "begun"
    layout: dict[str, Any]
    """The layout that it begins with, as JSON."""


class Resumed(_Event):
    """A process that went on with a run, from the checkpoint of `step`."""

    kind: Literal["resumed"] = "resumed"
    checkpoint: str
    """Folder of the checkpoint, relative to the run."""
    layout: dict[str, Any]
    """The layout that it goes on with, as JSON."""
    layout_before: dict[str, Any]
    """The layout that wrote the checkpoint, as JSON."""


class Interrupted(_Event):
    """A run that was asked to stop from outside, behind `step`."""

    kind: Literal["interrupted"] = "interrupted"
    signal: str
    """Name of the signal, such as SIGTERM."""
    checkpoint: str | None
    """Folder of the checkpoint that stands, relative to the run; None = none."""


class Stopped(_Event):
    """A run that ended itself with an error."""

    kind: Literal["stopped"] = "stopped"
    reason: Text
    """The error, as the user reads it."""


Event = Started | Skipped | Spike | Rewound | Undone | FailedSave | EarlyStop | Resumed | Interrupted | Stopped
_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


class EventLog:
    """The open file of a run's events; `close` after use. Only rank 0 has one."""

    def __init__(self, run: Store):
        self._journal = Journal(run, EVENTS_NAME)

    def append(self, *events: Event) -> None:
        """Append events, durably; a full disk keeps them waiting in memory and is said."""
        for event in events:
            self._journal.append(event.model_dump_json().encode(), durable=event is events[-1])

    def close(self) -> None:
        """Close the file."""
        self._journal.close()


def read_events(run: Store) -> list[Event]:
    """Every event of a run, in order; what a killed process left of a line is passed over.

    Raises ContractError if a line is JSON but no event.
    """
    if not run.exists(EVENTS_NAME):
        return []
    found = []
    for number, line in enumerate(run.read_bytes(EVENTS_NAME).split(b"\n"), start=1):
        try:
            found.append(_ADAPTER.validate_python(json.loads(line)))
        except (json.JSONDecodeError, UnicodeDecodeError):
            continue
        except ValidationError as error:
            raise ContractError(
                f"{run.uri}/{EVENTS_NAME}, line {number}: expected an event, got {error}. Restore the file."
            ) from error
    return found


def count_rewinds(events: Iterable[Event]) -> int:
    """How often a run was rewound, also when the process was killed before its next checkpoint could say so."""
    rewinds = 0
    for event in events:
        rewinds = 0 if isinstance(event, Started) else rewinds + isinstance(event, Rewound)
    return rewinds
