"""The metrics of each step, as lines of metrics.jsonl, and the training manifest of a completed run.

Numbers are those of the global batch in any layout; rank 0 writes them. A step skipped because it was not finite has a
line too, with null for non-finite values, so every line is valid JSON. The field docstrings of `HeldoutMetrics` and
`StepMetrics` are written into metrics.parquet as column descriptions.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from schemas.errors import ContractError
from schemas.ids import canonical_json
from schemas.paths import METRICS_NAME
from schemas.storage import Store

MANIFEST_NAME = "train/manifest.json"


class HeldoutMetrics(BaseModel):
    """The held-out loss of one source."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    loss: float | None
    """Mean cross-entropy of its targets [nats/token]; None = not finite."""
    perplexity: float | None
    """exp(loss); None = not finite."""
    bits_per_byte: float | None = None
    """Σ cross-entropy / (ln 2 · bytes of text that the targets stand for); None = bytes unknown, or not finite."""
    accuracy: float | None = None
    """Token accuracy: share of the targets that have the largest logit, 0 to 1; None = not counted."""


class StepMetrics(BaseModel):
    """One line of metrics.jsonl; what was not measured is None or absent."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    step: int
    """Number of the update, 1 = first; a skipped one counts."""
    stage: int
    """Number of the stage, 1 = first."""
    loss: float | None
    """Mean cross-entropy of the global batch before the update [nats/token], without z_loss; None = not finite, in a
    skipped step."""
    grad_norm: float | None
    """Euclidean norm of the gradient before clipping, without loss scale; None = not finite, in a skipped step."""
    learning_rate: float
    """Learning rate of the update."""
    tokens: int
    """Targets of the global batch that count in the loss."""
    tokens_per_second: float
    """Those tokens over the duration of the step, all ranks together [1/s]."""
    step_seconds: float
    """Duration of the step, waiting for data included, evaluation and checkpoints left out [s]."""
    data_seconds: float
    """Time rank 0 waited for its rows [s]; reading during the step before is not waiting."""
    skipped: bool = False
    """Whether no update was made, because loss or gradient was not finite."""
    mfu: float | None = None
    """Model FLOPs utilisation, 0 to 1, see `flops_utilisation`; None = the peak of the device is unknown."""
    loss_scale: float | None = None
    """Factor of the loss in fp16; None = another precision."""
    bytes_sent: int | None = None
    """Bytes of compressed gradients that a rank sent; None = not compressed."""
    bytes_plain: int | None = None
    """Bytes the same gradients have uncompressed; None = not compressed."""
    checkpoint_stall: float | None = None
    """Time that training waited for checkpoints since the line before [s]; None = none was begun."""
    memory: int | None = None
    """Largest memory allocated on rank 0's device since the line before [bytes]; None = not CUDA."""
    accuracy: float | None = None
    """Token accuracy: share of the targets of the global batch that have the largest logit before the update, 0 to 1;
    None = not counted, which it is in every `train.log_every`-th step and in the last one."""
    heldout_loss: float | None = None
    """Mean cross-entropy of all held-out targets after the update [nats/token]; None = not measured, or not finite."""
    heldout_accuracy: float | None = None
    """Token accuracy of all held-out targets after the update, 0 to 1; None = not measured."""
    ema_heldout_loss: float | None = None
    """Mean cross-entropy of all held-out targets by the moving average of the weights (`optim.ema`) [nats/token].

    None = not measured, or not finite."""
    losses: dict[str, float] = {}
    """Mean cross-entropy of each source's targets [nats/token]; absent = it had none, or it is not finite."""
    source_tokens: dict[str, int] = {}
    """Targets of each source, Σ = tokens."""
    heldout: dict[str, HeldoutMetrics] = {}
    """The held-out sequences of each source."""
    model: dict[str, float] = {}
    """Figures that a model of `plan.model` reports, such as the load of the busiest expert of each layer."""

    @field_validator("losses", "model", mode="before")
    @classmethod
    def _finite(cls, losses: dict[str, float | None]) -> dict[str, float]:
        return {name: loss for name, loss in losses.items() if loss is not None and math.isfinite(loss)}

    @field_validator("loss", "grad_norm", "heldout_loss", "ema_heldout_loss", "mfu", mode="before")
    @classmethod
    def _number(cls, value: float | None) -> float | None:
        return finite(value)

    @model_validator(mode="after")
    def _skipped(self) -> "StepMetrics":
        if not self.skipped and (self.loss is None or self.grad_norm is None):
            raise ValueError(
                f"step {self.step}: expected finite loss and grad_norm unless it is skipped, got loss {self.loss} and "
                f"grad_norm {self.grad_norm}. Set skipped = true."
            )
        return self

    @property
    def wait_share(self) -> float:
        """Return the share of the step's duration that rank 0 waited for data, 0 to 1."""
        return self.data_seconds / self.step_seconds if self.step_seconds > 0 else 0.0

    def line(self) -> bytes:
        """Return the step as a line of JSON, without the newline."""
        return self.model_dump_json(exclude_defaults=True).encode()

    def flat(self, separator: str) -> dict[str, Any]:
        """Return the values of the step by name; `separator` joins the parts of names such as `loss.web`."""
        values = {name: getattr(self, name) for name in SCALARS}
        values |= {f"loss{separator}{name}": loss for name, loss in self.losses.items()}
        values |= {f"tokens{separator}{name}": number for name, number in self.source_tokens.items()}
        values |= {f"model{separator}{name}": figure for name, figure in self.model.items()}
        for name, measured in self.heldout.items():
            values |= {f"heldout{separator}{name}{separator}{key}": value for key, value in measured}
        return values

    def scalars(self) -> dict[str, float]:
        """Return the measured values of the step by tag, such as `loss/web`, as TensorBoard and W&B get them."""
        values = self.flat("/") | {"data/wait_share": self.wait_share}
        return {tag: value for tag, value in values.items() if tag != "step" and value is not None}


PER_SOURCE = ("losses", "source_tokens", "heldout", "model")
SCALARS = tuple(name for name in StepMetrics.model_fields if name not in PER_SOURCE)
"""Fields of a step that are a single value."""


class TrainManifest(BaseModel):
    """The content of `train/manifest.json`, which marks a completed run and is written last."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    dataset: str
    """Digest of the dataset that the model was trained on."""
    tokenizer: str
    """Digest of the tokenizer contract."""
    plan: str
    """Digest of everything that decides the weights: shape, data order and optimizer settings."""
    skip_list: str
    """Digest of the skip list."""
    steps: int
    """Number of optimizer steps."""
    loss: float | None
    """Loss of the last step [nats/token]; None if that step was skipped."""
    heldout_loss: float | None
    """Held-out loss after the last step [nats/token]; None if the dataset holds nothing out."""
    checkpoint: str
    """Folder of the last checkpoint, relative to the run."""


def finite(value: float | None) -> float | None:
    """Return the value, or None if it is infinite or not a number."""
    return None if value is None or not math.isfinite(value) else value


def metrics_by_source(
    names: Sequence[str], sums: Sequence[float], counts: Sequence[float]
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the mean loss and the number of targets of each source that has targets in the global batch.

    `sums`, `counts`: summed cross-entropy [nats] and number of targets of each source in `names`.
    """
    numbers = {name: round(count) for name, count in zip(names, counts, strict=True) if count}
    totals = dict(zip(names, sums, strict=True))
    return {name: totals[name] / number for name, number in numbers.items()}, numbers


def heldout_by_source(
    names: Sequence[str],
    sums: Sequence[float],
    counts: Sequence[float],
    num_bytes: Sequence[float] | None,
    right: Sequence[float] | None = None,
) -> dict[str, HeldoutMetrics]:
    """Return the held-out metrics of each source that has targets.

    `sums`, `counts`, `num_bytes`, `right`: cross-entropy [nats], targets, bytes of text, and targets that have the
    largest logit, of each source in `names`.
    """
    figures = {}
    for number, (name, total, count) in enumerate(zip(names, sums, counts, strict=True)):
        if count:
            size = num_bytes[number] if num_bytes else 0
            bits = total / (math.log(2) * size) if size else None
            figures[name] = HeldoutMetrics(
                loss=finite(total / count),
                perplexity=_exp(total / count),
                bits_per_byte=finite(bits),
                accuracy=right[number] / count if right else None,
            )
    return figures


def _exp(loss: float) -> float | None:
    try:
        return finite(math.exp(loss))
    except OverflowError:
        return None


def flops_utilisation(
    positions_per_second: float, flops_per_token: float, ranks: int, peak_flops: float | None
) -> float | None:
    """Return model FLOPs utilization, 0 to 1; None = the peak is not known.

    `positions_per_second`: positions of global batches, with or without a target. `flops_per_token`: FLOPs in rows of
    their length, without a discount for the causal mask and without recomputation. `peak_flops`: dense bf16 peak of a
    GPU [FLOPs/s], in every precision.
    Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B.
    """
    return None if peak_flops is None else flops_per_token * positions_per_second / (ranks * peak_flops)


def read_metrics(run: Store) -> list[StepMetrics]:
    """Return every step of a run's metrics file, in order; an unfinished last line of a killed process is ignored.

    Raises ContractError if another line is not a step.
    """
    if not run.exists(METRICS_NAME):
        return []
    run.size(METRICS_NAME)  # raises for a folder or a pipe, which could not be read
    lines = run.read_bytes(METRICS_NAME).split(b"\n")[:-1]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(StepMetrics.model_validate_json(line))
        except (ValidationError, TypeError) as error:
            raise ContractError(
                f"{run.uri}/{METRICS_NAME}, line {number}: expected the metrics of a step, got an entry that is "
                f"not valid ({error}). "
                "Restore the file from a backup."
            ) from error
    return records


# The end of the file is enough for a resume or a spike: a file of 625,000 steps has 255 MB.

BLOCK_BYTES = 1 << 16
"""Bytes that are read at a time; about 160 lines of metrics."""
MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line; a line of metrics has some hundred bytes for each source."""


def lines_backwards(run: Store, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the position of each line in a file of a run, and the line without its newline, the last one first.

    An unfinished last line is left out. Yields nothing if the file does not exist. Raises ContractError for a folder or
    a pipe, and for a line of more than MAX_LINE_BYTES.
    """
    if not run.exists(name):
        return
    begin, text, is_complete = run.size(name), b"", False  # `size` raises for a folder or a pipe
    with run.fs.open_input_file(run.path(name)) as stream:
        while begin:
            size = min(BLOCK_BYTES, begin)
            begin -= size
            text = bytes(stream.read_at(size, begin)) + text
            if not is_complete:
                cut = text.rfind(b"\n")
                is_complete, text = cut >= 0, text[:cut] if cut >= 0 else text
            while is_complete and (cut := text.rfind(b"\n")) >= 0:
                yield begin + cut + 1, text[cut + 1 :]
                text = text[:cut]
            if len(text) > MAX_LINE_BYTES:
                raise ContractError(
                    f"{run.uri}/{name}: expected lines of at most {MAX_LINE_BYTES} bytes, got a longer one. Restore "
                    "the file from a backup."
                )
        if is_complete:
            yield 0, text


def metrics_backwards(run: Store) -> Iterator[tuple[int, StepMetrics]]:
    """Yield the end of each line of a run's metrics file [bytes], and its step, the last one first.

    Only the end of the file is read, as far as the caller iterates. Raises ContractError if a line is not a step.
    """
    for position, line in lines_backwards(run, METRICS_NAME):
        try:
            yield position + len(line) + 1, StepMetrics.model_validate_json(line)
        except (ValidationError, TypeError) as error:
            raise ContractError(
                f"{run.uri}/{METRICS_NAME}, byte {position}: expected the metrics of a step, got an entry that is not "
                f"valid ({error}). Restore the file from a backup."
            ) from error


def metrics_after(run: Store, step: int) -> list[StepMetrics]:
    """Return the metrics of the steps after `step`, in order."""
    return [record for _, record in takewhile(lambda item: item[1].step > step, metrics_backwards(run))][::-1]


def last_metrics(run: Store, step: int) -> StepMetrics:
    """Return the metrics of the last step. Raises ContractError if the last step in the file is not `step`."""
    last = next((record for _, record in metrics_backwards(run)), None)
    if last is None or last.step != step:
        raise ContractError(
            f"{run.uri}/{METRICS_NAME}: expected step {step} in the last line, got "
            f"{f'step {last.step}' if last else 'none'}. Restore the file from a backup."
        )
    return last


def write_train_manifest(run: Store, manifest: TrainManifest) -> None:
    """Write the manifest of a completed run."""
    run.write_atomic(MANIFEST_NAME, canonical_json(manifest.model_dump(mode="json")))


def read_train_manifest(run: Store) -> TrainManifest:
    """Return the manifest of a completed run. Raises ContractError if the file is not a valid manifest."""
    try:
        return TrainManifest.model_validate(run.read_json(MANIFEST_NAME))
    except ValidationError as error:
        raise ContractError(
            f"{run.uri}/{MANIFEST_NAME}: expected a training manifest, got one that is not valid ({error}). "
            "Remove the file, then run `penstock train` again."
        ) from error
