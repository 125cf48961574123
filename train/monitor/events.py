"""The events of a run, such as spikes, rewinds and resumes, in the append-only file `train/events.jsonl`.

Each line is a JSON object, flushed to disk before training continues. The file is never truncated: events that happen
again after a resume or a rewind appear twice, with that resume or rewind in between.
"""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from schemas.errors import ContractError
from schemas.storage import Store
from train.monitor.guard import Quantity
from train.monitor.log_files import Journal
from train.monitor.metrics import StepMetrics, finite

EVENTS_NAME = "train/events.jsonl"


Text = Annotated[str, BeforeValidator(lambda text: str(text).encode("utf-8", "replace").decode())]
"""Text in which characters that JSON cannot encode are replaced, so that an event is never rejected for its text."""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class _Event(BaseModel):
    """The fields of every event."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    step: int
    """The step of the event or, if it happened between steps, the last completed step."""
    at: str = Field(default_factory=_now)
    """Time of the event, UTC, ISO 8601."""


class Skipped(_Event):
    """A step whose loss or gradient was not finite: no update was made."""

    kind: Literal["skipped"] = "skipped"
    loss: float | None
    """Loss [nats/token]; None = not finite."""
    grad_norm: float | None
    """Gradient norm; None = not finite."""
    loss_scale: float | None = None
    """Factor of the loss in fp16, before it was lowered; None = another precision."""

    _number = field_validator("loss", "grad_norm", mode="before")(finite)


class SpikeDocument(BaseModel):
    """A span of a document's tokens in the batch of a spike, as `penstock trace` shows it, with its loss."""

    model_config = ConfigDict(frozen=True, extra="ignore", from_attributes=True, use_attribute_docstrings=True)

    row: int
    """Row of the global batch, from 0."""
    sample: int
    """Global sample index, as in a skip list."""
    source: str
    """Source of the document."""
    language: str = ""
    """Most probable language of the document; empty = unknown."""
    doc_id: str
    """Document, hex."""
    url: str
    """URL of the document, redacted."""
    split: str
    """Input file the document came from."""
    offset: int
    """Start of the document's record in the input file [bytes]."""
    length: int
    """Length of the document's record in the input file [bytes]."""
    doc_start: int
    """First token of the span, counted in the document."""
    doc_stop: int
    """Token after the span, counted in the document."""
    loss: float | None = None
    """Mean cross-entropy of the span's targets under the weights before the update [nats/token]; None = no targets."""
    targets: int = 0
    """Number of tokens of the span that are prediction targets."""
    level: float | None = None
    """Loss with which `loss` is compared: that of the source and language, as `GroupLevels` has it [nats/token]."""
    excess: float | None = None
    """Excess of `loss` over `level`, as `excess_of` computes it [nats/token]."""

    _number = field_validator("loss", "level", "excess", mode="before")(finite)


class Spike(_Event):
    """A loss or gradient norm above the limit set by the previous steps."""

    kind: Literal["spike"] = "spike"
    left: tuple[Quantity, ...] = ("loss",)
    """The quantities above their limits."""
    loss: float
    """Loss of the step [nats/token]."""
    mean: float
    """Mean of the first quantity of `left` in the window of previous steps."""
    deviation: float
    """Standard deviation of that quantity in that window."""
    limit: float
    """Largest value of that quantity that is not a spike."""
    grad_norm: float | None = None
    """Gradient norm before clipping; None = not recorded."""
    grad_limit: float | None = None
    """Largest norm that is not a spike; None = the gradient is not watched, or its window is not full yet."""
    documents: tuple[SpikeDocument, ...] = ()
    """Every document span in the step's batch, by `excess`, the worst first; those without targets last."""


class Rewound(_Event):
    """A rewind from `step` to a checkpoint, which excludes some samples from training."""

    kind: Literal["rewound"] = "rewound"
    to_step: int
    """Step of the checkpoint; later steps are undone."""
    checkpoint: str
    """Folder of the checkpoint, relative to the run."""
    samples: tuple[int, ...]
    """Global sample indices that all later steps skip."""
    quarantined: tuple[str, ...] = ()
    """Ids of documents, hex, that are in no later batch."""


class Undone(_Event):
    """A step that a rewind undid, with the line that it had in metrics.jsonl."""

    kind: Literal["undone"] = "undone"
    metrics: StepMetrics
    """Metrics of the step."""


class FailedSave(_Event):
    """A checkpoint that could not be written; training continued."""

    kind: Literal["failed_save"] = "failed_save"
    error: Text
    """The storage error."""


class EarlyStop(_Event):
    """The end of a run whose held-out loss stopped falling."""

    kind: Literal["early_stop"] = "early_stop"
    heldout_loss: float | None
    """Held-out loss of the step [nats/token]; None = not finite."""
    best: float | None
    """Lowest held-out loss of the run [nats/token]."""
    since_best: int
    """Held-out losses measured since the lowest."""

    _number = field_validator("heldout_loss", mode="before")(finite)


class Straggler(_Event):
    """A rank that was slower than the others in a window of steps, so that they waited for it."""

    kind: Literal["straggler"] = "straggler"
    steps: int
    """Number of steps in the window, which ends with `step`."""
    rank: int
    """Number of the rank, from 0."""
    host: Text
    """Name of the rank's machine."""
    cause: Literal["compute", "data"]
    """compute: its computation took longer; data: it waited longer for its rows."""
    factor: float
    """Its time over that of the median rank of its pipeline stage."""
    share: float
    """Share of each step in which the other ranks waited for it, 0 to 1, computed from the factor."""


class Started(_Event):
    """The start of a run without a checkpoint; earlier events in the file belong to an earlier run."""

    kind: Literal["begun"] = "begun"
    layout: dict[str, Any]
    """The layout of the start, as JSON."""


class Resumed(_Event):
    """A resume of a run from the checkpoint of `step`."""

    kind: Literal["resumed"] = "resumed"
    checkpoint: str
    """Folder of the checkpoint, relative to the run."""
    layout: dict[str, Any]
    """The layout after the resume, as JSON."""
    layout_before: dict[str, Any]
    """The layout that wrote the checkpoint, as JSON."""


class Interrupted(_Event):
    """A run that a signal stopped after `step`."""

    kind: Literal["interrupted"] = "interrupted"
    signal: str
    """Name of the signal, such as SIGTERM."""
    checkpoint: str | None
    """Folder of the newest checkpoint, relative to the run; None = no checkpoint."""


class Stopped(_Event):
    """The end of a run that the guard stopped with an error."""

    kind: Literal["stopped"] = "stopped"
    reason: Text
    """The error message."""


Event = (
    Started | Skipped | Spike | Rewound | Undone | FailedSave | EarlyStop | Straggler | Resumed | Interrupted | Stopped
)
_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


class EventLog:
    """The open event file of a run; `close` after use. Only rank 0 has one."""

    def __init__(self, run: Store):
        self._journal = Journal(run, EVENTS_NAME)

    def append(self, *events: Event) -> None:
        """Append events durably; on a full disk, keep them in memory and print a warning."""
        for event in events:
            self._journal.append(event.model_dump_json().encode(), durable=event is events[-1])

    def close(self) -> None:
        """Close the file."""
        self._journal.close()


def read_events(run: Store) -> list[Event]:
    """Return every event of a run, in order; incomplete lines of killed processes are ignored.

    Raises ContractError if a line is JSON but not an event.
    """
    if not run.exists(EVENTS_NAME):
        return []
    run.size(EVENTS_NAME)  # raises for a folder or a pipe, which could not be read
    events: list[Event] = []
    for number, line in enumerate(run.read_bytes(EVENTS_NAME).split(b"\n"), start=1):
        try:
            events.append(_ADAPTER.validate_python(json.loads(line)))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            continue
        except ValidationError as error:
            raise ContractError(
                f"{run.uri}/{EVENTS_NAME}, line {number}: expected an event, got an entry that is not valid ({error}). "
                "Restore the file from a backup."
            ) from error
    return events


def skipped_steps(events: Iterable[Event]) -> set[int]:
    """Return the steps of the run, as it is now, that made no update because they were not finite."""
    steps: set[int] = set()
    for event in events:
        if isinstance(event, Skipped):
            steps.add(event.step)
        elif isinstance(event, Started | Resumed | Rewound):
            # Later steps were taken again.
            last = 0 if isinstance(event, Started) else event.to_step if isinstance(event, Rewound) else event.step
            steps = {step for step in steps if step <= last}
    return steps


def rewound_steps(events: Iterable[Event]) -> list[int]:
    """Return the steps of the spikes that caused rewinds since the run last started without a checkpoint.

    Rewinds after which no checkpoint was written are included.
    """
    steps: list[int] = []
    for event in events:
        if isinstance(event, Started):
            steps = []
        elif isinstance(event, Rewound):
            steps.append(event.step)
    return steps


class LayoutChange(NamedTuple):
    """The layout of the steps after `after`, up to the next change."""

    after: int
    """Number of steps before the first one in this layout."""
    start: Started | Resumed
    """The start or resume of the process that computed these steps."""


def layout_changes(events: Iterable[Event]) -> list[LayoutChange]:
    """Return the changes of layout over all steps that no later resume or rewind has undone, in the order of steps."""
    changes: list[LayoutChange] = []
    start: Started | Resumed | None = None
    for event in events:
        if not isinstance(event, Started | Resumed | Rewound):
            continue
        after = event.to_step if isinstance(event, Rewound) else event.step
        start = start if isinstance(event, Rewound) else event
        changes = [] if isinstance(event, Started) else [change for change in changes if change.after < after]
        if start is not None:
            changes.append(LayoutChange(after, start))
    return changes
