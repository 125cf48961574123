"""The difference of the training of two runs: settings of plan and model, and the figures by which users choose one.

Plan and metrics are read from the JSON files that the trainer writes, since this package must not import its code.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pipeline.report.facts import Training, read_training
from pipeline.report.losses import by_source
from schemas.storage import Store
from schemas.versions import PinnedRun

NAMES = ("A", "B")


@dataclass(frozen=True)
class PairRow:
    """One figure of both runs; None where a run does not have it."""

    name: str
    a: float | None
    b: float | None
    meaning: str = ""

    @property
    def change(self) -> float | None:
        """B minus A; None if a run does not have the figure."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def share(self) -> float | None:
        """The change as a share of A; None if A is zero."""
        return None if self.change is None or not self.a else self.change / self.a


@dataclass(frozen=True)
class TrainedRun:
    """The training of one of the two runs."""

    name: str
    """`A` or `B`."""
    training: Training
    tokenizer: str
    """Digest of the tokenizer that the dataset was written with; empty = the run has no dataset."""
    note: str = ""
    """What the run lacks, as one sentence; empty = nothing."""


@dataclass(frozen=True)
class TrainingDifference:
    """The settings and figures in which the training of two runs, A and B, differ."""

    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Settings that differ: name → (value in A, value in B). None = not set, so that its default applies."""
    figures: list[PairRow] = field(default_factory=list)
    """Size, speed and losses of both runs; empty if neither has a plan."""
    notes: list[str] = field(default_factory=list)
    """What one of the runs lacks, one sentence each."""


def read_trained_run(name: str, run: Store, dataset: str | None, tokenizer: str) -> TrainedRun:
    """Read plan and metrics of a run. `dataset`: digest of its dataset; None = there is none yet.

    The training of an earlier version is left out if it was on another dataset. Raises ContractError if a file of
    training is not valid.
    """
    training = read_training(run)
    if training.plan is None:
        return TrainedRun(name, training, tokenizer, f"{name} has no plan, so it has no figures of training.")
    other = training.plan.dataset[:12]
    if training.plan.dataset != dataset and isinstance(run, PinnedRun):
        empty = Training(None, (), (), None, ())
        return TrainedRun(name, empty, tokenizer, f"{name} is a version that was not trained on: its run used {other}.")
    if training.plan.dataset != dataset:
        note = f"{name} has a plan for dataset {other}, which is not its current one."
    else:
        note = "" if training.steps else f"{name} is planned and not trained yet, so it has no losses."
    return TrainedRun(name, training, tokenizer, note)


def compare_training(a: TrainedRun, b: TrainedRun) -> TrainingDifference:
    """Return the differences of the training of two runs; empty if neither run has a plan."""
    sides = (a, b)
    if all(side.training.plan is None for side in sides):
        return TrainingDifference()
    notes = [side.note for side in sides if side.note]
    if a.tokenizer != b.tokenizer and all(side.training.steps for side in sides):
        notes.append("The tokenizers differ: compare bits per byte, not losses for each token.")
    figures = [dict(_figures(side.training)) for side in sides]
    names = [name for name in ORDER if name in figures[0] or name in figures[1]]
    by_name = sorted({*figures[0], *figures[1]} - {*ORDER}, key=lambda name: (_kind(name), name))
    rows = [PairRow(name, figures[0].get(name), figures[1].get(name), ORDER.get(name, "")) for name in names + by_name]
    return TrainingDifference(_settings(a.training, b.training), rows, notes)


def _settings(a: Training, b: Training) -> dict[str, tuple[Any, Any]]:
    """Return the settings of two plans that differ; empty if a run has no plan."""
    if a.plan is None or b.plan is None:
        return {}
    left, right = a.plan.settings, b.plan.settings
    names = sorted({*left, *right})
    return {name: (left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)}


ORDER = {
    "parameters": "of the model, embeddings included",
    "sequence length": "tokens of a sample in the last training stage",
    "global batch": "samples of an optimizer step in the last training stage",
    "peak learning rate": "of the plan",
    "planned steps": "",
    "steps": "that were trained",
    "tokens seen": "tokens of all trained steps",
    "tokens per second": "median of the steps",
    "loss of the last step": "nats per token",
    "held-out loss": "nats per token, last measured",
}
"""Figures by name, in their order, with their meanings. Figures by source follow them."""
BY_SOURCE = ("loss ", "held-out loss ", "held-out bits per byte ")
"""Beginnings of the names of figures by source, in their order. A loss is the mean of the last tenth of the steps."""


def _kind(name: str) -> int:
    return next(number for number, beginning in enumerate(BY_SOURCE) if name.startswith(beginning))


def _figures(training: Training) -> Iterator[tuple[str, float]]:
    """Yield the figures of a run that exist, by name."""
    plan, outcome = training.plan, training.outcome or {}
    values: dict[str, float | None] = {}
    if plan is not None:
        values |= {"parameters": plan.num_params, "peak learning rate": plan.learning_rate}
        values |= {"sequence length": plan.seq_len, "global batch": plan.global_batch, "planned steps": plan.steps}
    if training.steps:
        done = [step for step in training.steps if not step.skipped]
        values["steps"] = training.steps[-1].step
        values["tokens seen"] = sum(step.tokens for step in training.steps)
        values["tokens per second"] = median(step.tokens_per_second for step in done) if done else None
        values["loss of the last step"] = outcome.get("loss", training.steps[-1].loss)
        measured = (step.heldout_loss for step in reversed(training.steps) if step.heldout_loss is not None)
        values["held-out loss"] = outcome.get("heldout_loss", next(measured, None))
        for source in by_source(training.steps):
            own = (source.loss, source.heldout.get("loss"), source.heldout.get("bits_per_byte"))
            values |= {f"{beginning}{source.name}": value for beginning, value in zip(BY_SOURCE, own, strict=True)}
    yield from ((name, value) for name, value in values.items() if value is not None)
