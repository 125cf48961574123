"""What a run remembers and tells of its steps: the guard's state on every rank, files and progress line on rank 0."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from train.checkpoint.saver import Outcome, SaveFailed
from train.data.batches import Batches
from train.data.stages import row_length
from train.pretrain.learner import Learner, Measured
from train.pretrain.prepare import Setup
from train.ranks import Ranks
from train.trace import documents_of_step
from train.watch.events import (
    Begun,
    EarlyStop,
    Event,
    EventLog,
    FailedSave,
    Resumed,
    Rewound,
    Skipped,
    Spike,
    SpikeDocument,
    Undone,
)
from train.watch.guard import GuardState, Level, Verdict, after_heldout, after_rewind, after_step, at_new_stage, level
from train.watch.metrics import StepMetrics, by_source, flops_utilisation
from train.watch.metrics_log import MetricsLog
from train.watch.progress import Progress


class Record:
    """The record of a run from its checkpoint, or from its beginning; close it with the context."""

    def __init__(self, setup: Setup, ranks: Ranks, sources: Sequence[str], rewinds: int):
        """`rewinds`: of the whole run, which a killed process may have made behind its last checkpoint."""
        note = setup.note
        self.guard = (note.progress.guard if note else GuardState()).model_copy(update={"rewinds": rewinds})
        self.heldout: tuple[tuple[int, float], ...] = note.progress.heldout if note else ()
        self._setup, self._sources, self._ranks = setup, tuple(sources), ranks
        self._stall, self._mark = 0.0, ""
        self._log: MetricsLog | None = None
        if ranks.rank == 0:
            self._log = MetricsLog(setup.run, self._sources, note.step if note else 0)
            self._events = EventLog(setup.run)
            self._progress = Progress(setup.plan.steps, setup.settings.train.log_every)
        now = setup.layout.model_dump()
        if note is None:
            self.tell(Begun(step=0, layout=now))
        else:
            before = note.layout.model_dump()
            self.tell(Resumed(step=note.step, checkpoint=note.name, layout=now, layout_before=before))

    def __enter__(self) -> "Record":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.close()
            self._events.close()
            self._progress.close()

    @property
    def ended(self) -> bool:
        """Whether the held-out losses up to here end the run."""
        patience = self._setup.settings.guard.patience
        return patience is not None and self.guard.since_best >= patience

    def tell(self, *events: Event) -> None:
        """Append events."""
        if self._log is not None:
            self._events.append(*events)

    def say(self, text: str) -> None:
        """Print a line."""
        if self._log is not None:
            self._progress.say(text)

    # -------------------------------------------------------------------------------------------------------- a step

    def begin_step(self, step: int) -> None:
        """Step `step` (1 = first) is about to be computed."""
        self._mark = ""
        if any(stage.first_step == step - 1 for stage in self._setup.plan.stages[1:]):
            self.guard = at_new_stage(self.guard)

    def judge(self, step: int, measured: Measured, loss_scale: float | None) -> Verdict:
        """What is to be done about a step, the same on every rank; `loss_scale` is that of fp16."""
        known = level(self.guard, self._setup.settings.guard)
        loss, norm = measured.loss, measured.grad_norm
        self.guard, verdict = after_step(self.guard, self._setup.settings.guard, loss, norm, loss_scale or 1.0)
        if verdict is Verdict.SKIP:
            self.tell(Skipped(step=step, loss=loss, grad_norm=norm, loss_scale=loss_scale))
        # The spike that no rewind is left for ends the run; its documents are what the user wants to see.
        above = verdict is Verdict.SPIKE or (verdict is Verdict.STOP and not self.guard.non_finite)
        if above and known is not None:
            self._mark = "spike"
            self._tell_spike(step, measured.loss, known)
        return verdict

    def _tell_spike(self, step: int, loss: float, known: Level) -> None:
        if self._log is None:
            return
        parts = documents_of_step(self._setup.run, step)
        documents = tuple(SpikeDocument.model_validate(part) for part in parts)
        self.tell(Spike(step=step, loss=loss, **known._asdict(), documents=documents))
        shown = ", ".join(dict.fromkeys(document.url or document.doc_id for document in documents[:5]))
        self.say(
            f"step {step}: loss {loss:.4f} is above {known.limit:.4f}; its batch holds {len(documents)} parts of "
            f"documents, among them {shown}: `penstock trace {self._setup.run.uri} --step {step}` shows all"
        )

    def write(self, record: StepMetrics) -> None:
        """Write the line of a step."""
        if self._log is not None:
            self._log.write(record.model_copy(update={"checkpoint_stall": self._stall or None}))
            self._progress.show(record, self._mark)
        self._stall = 0.0

    def measured_heldout(self, step: int, loss: float) -> bool:
        """Remember a held-out loss; returns whether it ends the run."""
        self.heldout = (*self.heldout, (step, loss))
        self.guard, ends = after_heldout(self.guard, self._setup.settings.guard, loss)
        if ends:
            best, since = self.guard.best_heldout, self.guard.since_best
            self.tell(EarlyStop(step=step, heldout_loss=loss, best=best, since_best=since))
            self.say(f"step {step}: the held-out loss has not fallen for {since} measurements; the run ends")
        return ends

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def sync(self) -> None:
        """Make all lines durable: a checkpoint must not be ahead of its metrics."""
        if self._log is not None:
            self._log.sync()

    def saved(self, outcomes: Sequence[Outcome]) -> None:
        """Take note of saves that have come to an end."""
        for outcome in outcomes:
            if isinstance(outcome, SaveFailed):
                self.tell(FailedSave(step=outcome.step, error=outcome.reason))

    def stalled(self, seconds: float) -> None:
        """Training stood still for a save."""
        self._stall += seconds

    def rewind(self, step: int, to_step: int, checkpoint: str, samples: Sequence[int], restored: GuardState) -> None:
        """Training goes back from `step` to the state of `to_step`, to go on without some samples."""
        if self._log is not None:
            undone = [Undone(step=line.step, metrics=line) for line in self._log.after(to_step)]
            self.tell(*undone, Rewound(step=step, to_step=to_step, checkpoint=checkpoint, samples=tuple(samples)))
            self._log.rewind(to_step)
        self.guard = after_rewind(self.guard, restored)
        self.heldout = tuple(found for found in self.heldout if found[0] <= to_step)
        self.say(f"step {step}: back to step {to_step}, {len(samples)} samples are skipped from now on")


def step_metrics(
    setup: Setup, batches: Batches, learner: Learner, measured: Measured, values: Mapping[str, Any]
) -> StepMetrics:
    """The line of a step from what was measured; `values`: step, learning_rate, loss_scale, skipped, and its times."""
    step, seconds = int(values["step"]), max(float(values["step_seconds"]), 1e-9)
    stage = batches.order.place(step - 1)[0]
    losses, tokens = by_source(batches.order.sources, measured.losses, measured.counts)
    plan, total, compressor = setup.plan.stages[stage], round(sum(measured.counts)), learner.model.compressor
    positions = plan.global_batch * row_length(setup.settings.train, plan.seq_len) / seconds
    compressed = compressor is not None and setup.settings.layout.compress != "none"
    cuda = torch.cuda.is_available() and setup.layout.device == "cuda"
    found = StepMetrics(
        **values,
        stage=stage + 1,
        loss=measured.loss,
        grad_norm=measured.grad_norm,
        tokens=total,
        tokens_per_second=total / seconds,
        losses=losses,
        source_tokens=tokens,
        mfu=flops_utilisation(
            positions, setup.plan.flops_per_token, setup.layout.ranks, setup.settings.train.peak_flops
        ),
        bytes_sent=compressor.bytes_sent if compressor is not None and compressed else None,
        bytes_plain=compressor.bytes_plain if compressor is not None and compressed else None,
        memory=torch.cuda.max_memory_allocated() if cuda else None,
    )
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    return found
