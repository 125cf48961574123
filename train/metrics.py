"""What a run tells: one line per step in metrics.jsonl, TensorBoard events, the progress line, the closing manifest.

Only rank 0 writes. Lines after the step that a run resumes from are dropped, so the file has each step once.
"""

import json
import time

from pydantic import BaseModel, ConfigDict

from schemas.errors import ContractError
from schemas.ids import canonical_json
from schemas.storage import Store

METRICS_NAME = "train/metrics.jsonl"
TENSORBOARD_NAME = "train/tensorboard"
MANIFEST_NAME = "train/manifest.json"


class StepMetrics(BaseModel):
    """One line of metrics.jsonl."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    step: int
    """Number of the update, 1 = first."""
    loss: float
    """Mean cross-entropy of the global batch before the update [nats/token]."""
    grad_norm: float
    """Euclidean norm of the gradient before clipping."""
    learning_rate: float
    """Learning rate of the update."""
    tokens: int
    """Targets of the global batch that count in the loss."""
    tokens_per_second: float
    """Those tokens over the duration of the step, all ranks together [1/s]."""
    data_seconds: float
    """Time rank 0 spent on reading its rows [s]."""
    heldout_loss: float | None = None
    """Mean cross-entropy of the held-out sequences after the update [nats/token]; None where it was not measured."""


class TrainManifest(BaseModel):
    """`train/manifest.json`: a run that reached its last step; written last."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    dataset: str
    """Digest of the dataset the model was trained on."""
    tokenizer: str
    """Digest of the tokenizer contract."""
    plan: str
    """Digest of what decides the weights: shape, data order and optimiser settings."""
    skip_list: str
    """Digest of the skip list."""
    steps: int
    """Number of updates made."""
    loss: float
    """Loss of the last step [nats/token]."""
    heldout_loss: float | None
    """Held-out loss after the last step [nats/token]; None if the dataset holds nothing out."""
    checkpoint: str
    """Folder of the last checkpoint, relative to the run."""


class MetricsLog:
    """The open metrics file and event file of a run; `close` after use."""

    def __init__(self, run: Store, after_step: int):
        from torch.utils.tensorboard import SummaryWriter

        kept = [line for line in read_metrics(run) if line.step <= after_step]
        run.write_atomic(METRICS_NAME, b"".join(_line(record) for record in kept))
        self._run = run
        self._file = open(run.path(METRICS_NAME), "ab")  # noqa: SIM115 (stays open for the run)
        self._events = SummaryWriter(run.path(TENSORBOARD_NAME), purge_step=after_step + 1)

    def write(self, record: StepMetrics) -> None:
        """Append one step."""
        self._file.write(_line(record))
        self._file.flush()
        for name, value in record.model_dump(exclude={"step"}, exclude_none=True).items():
            self._events.add_scalar(name, value, record.step)

    def sync(self) -> None:
        """Make every line so far durable: a checkpoint must not be ahead of its metrics."""
        self._run.sync(METRICS_NAME)
        self._events.flush()

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        self._events.close()


def read_metrics(run: Store) -> list[StepMetrics]:
    """Every step of a run's metrics file, in order; a line that a killed process left unfinished ends the list."""
    if not run.exists(METRICS_NAME):
        return []
    lines = run.read_bytes(METRICS_NAME).split(b"\n")
    return [StepMetrics.model_validate_json(line) for line in lines[:-1]]


def last_metrics(run: Store, step: int) -> StepMetrics:
    """The metrics of the last step. Raises ContractError if that is not `step`."""
    records = read_metrics(run)
    if not records or records[-1].step != step:
        found = f"step {records[-1].step}" if records else "none"
        raise ContractError(
            f"{run.uri}/{METRICS_NAME}: promised a last line for step {step}, found {found}; restore it"
        )
    return records[-1]


def _line(record: StepMetrics) -> bytes:
    return json.dumps(record.model_dump(exclude_none=True)).encode() + b"\n"


def write_train_manifest(run: Store, manifest: TrainManifest) -> None:
    """Commit the end of a run."""
    run.write_atomic(MANIFEST_NAME, canonical_json(manifest.model_dump(mode="json")))


class Progress:
    """The progress line: speed over the steps since the last line, time left at that speed."""

    def __init__(self, steps: int, after_step: int, log_every: int, peak_rate: float | None):
        """`peak_rate` is the tokens per second that the devices' peak would allow; None = unknown, no MFU is shown."""
        self._steps, self._log_every, self._peak_rate = steps, log_every, peak_rate
        self._step, self._tokens, self._since = after_step, 0, time.monotonic()

    def show(self, record: StepMetrics) -> None:
        """Print the line for this step if it is due; call once for every step."""
        self._tokens += record.tokens
        last = record.step == self._steps
        if last or record.heldout_loss is not None or record.step % self._log_every == 0:
            print(self._line(record), flush=True)

    def _line(self, record: StepMetrics) -> str:
        now = time.monotonic()
        seconds, steps = max(now - self._since, 1e-9), record.step - self._step
        rate = self._tokens / seconds
        parts = [f"step {record.step:,}/{self._steps:,}", f"loss {record.loss:.4f}"]
        if record.heldout_loss is not None:
            parts.append(f"held-out {record.heldout_loss:.4f}")
        parts.append(f"{rate:,.0f} tokens/s")
        if self._peak_rate is not None:
            parts.append(f"MFU {rate / self._peak_rate:.1%}")
        parts.append(f"{_duration(seconds / steps * (self._steps - record.step))} left")
        self._step, self._tokens, self._since = record.step, 0, now
        return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
