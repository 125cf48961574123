"""What a run remembers and tells of its steps: the guard's state on every rank, files and progress line on rank 0."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from train.checkpoint.save import SaveFailed, SaveOutcome
from train.data.batches import Batches
from train.data.stages import row_length
from train.monitor.events import (
    EVENTS_NAME,
    EarlyStop,
    Event,
    EventLog,
    FailedSave,
    Resumed,
    Rewound,
    Skipped,
    Spike,
    SpikeDocument,
    Started,
    Undone,
)
from train.monitor.guard import (
    Bands,
    GuardState,
    Verdict,
    after_heldout,
    after_rewind,
    after_stage_change,
    after_step,
    bands_of,
)
from train.monitor.log_files import MetricsLog
from train.monitor.metrics import StepMetrics, flops_utilisation, metrics_by_source
from train.monitor.progress import ProgressPrinter
from train.monitor.quarantine import QUARANTINE_NAME
from train.parallel.ranks import Ranks
from train.pretrain.setup import TrainingSetup
from train.pretrain.spikes import Exclusion
from train.pretrain.step import Learner, StepResult

MAX_SHOWN_DOCUMENTS = 5
"""Documents of a spike that its line names."""


class TrainingLog:
    """The record of a run from its checkpoint, or from its beginning; close it with the context."""

    def __init__(self, setup: TrainingSetup, ranks: Ranks, sources: Sequence[str], rewinds: int):
        """`rewinds`: of the whole run, which a killed process may have made behind its last checkpoint."""
        note = setup.note
        self.guard = (note.progress.guard if note else GuardState()).model_copy(update={"rewinds": rewinds})
        self.heldout: tuple[tuple[int, float], ...] = note.progress.heldout if note else ()
        self._setup, self._sources, self._ranks = setup, tuple(sources), ranks
        self._stall, self._mark = 0.0, ""
        self._spike: Spike | None = None
        self._log: MetricsLog | None = None
        if ranks.rank == 0:
            self._log = MetricsLog(setup.run, self._sources, note.step if note else 0)
            self._events = EventLog(setup.run)
            self._progress = ProgressPrinter(setup.plan.steps, setup.settings.train.log_every)
        now = setup.layout.model_dump()
        if note is None:
            self.tell(Started(step=0, layout=now))
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
            self.guard = after_stage_change(self.guard)

    def judge(self, step: int, measured: StepResult, loss_scale: float | None) -> Verdict:
        """What is to be done about a step, the same on every rank; `loss_scale` is that of fp16."""
        config, loss, norm = self._setup.settings.guard, measured.loss, measured.grad_norm
        known = bands_of(self.guard, config)
        self.guard, verdict = after_step(self.guard, config, loss, norm, loss_scale or 1.0)
        if verdict is Verdict.SKIP:
            self.tell(Skipped(step=step, loss=loss, grad_norm=norm, loss_scale=loss_scale))
        # The spike that no rewind is left for ends the run; its documents are what the user wants to see.
        self._spike = None
        if verdict is Verdict.SPIKE or (verdict is Verdict.STOP and not self.guard.non_finite):
            self._mark, self._spike = "spike", spike_of(step, loss, norm, known)
        return verdict

    @property
    def saw_spike(self) -> bool:
        """Whether the step judged last is a spike, which `tell_spike` is to tell of."""
        return self._spike is not None

    def tell_spike(self, step: int, documents: Sequence[SpikeDocument]) -> None:
        """Tell of the spike in a step with the documents of its batch, the worst first."""
        if self._spike is None:
            return
        event = self._spike.model_copy(update={"documents": tuple(documents)})
        self.tell(event)
        # Behind a rewind the step has other documents, and a trace shows these.
        goes_back = self._setup.settings.guard.rewinds
        command = f"`penstock trace {self._setup.run.uri} --step {step}` shows all, with their losses "
        self.say(f"{describe_spike(event)}: {'all with their losses ' if goes_back else command}in {EVENTS_NAME}")

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

    def saved(self, outcomes: Sequence[SaveOutcome]) -> None:
        """Take note of saves that have come to an end."""
        for outcome in outcomes:
            if isinstance(outcome, SaveFailed):
                self.tell(FailedSave(step=outcome.step, error=outcome.reason))

    def stalled(self, seconds: float) -> None:
        """Training stood still for a save."""
        self._stall += seconds

    def rewind(self, step: int, to_step: int, checkpoint: str, left_out: Exclusion, restored: GuardState) -> None:
        """Training goes back from `step` to the state of `to_step`, to go on without some samples."""
        samples, doc_ids = left_out.samples, tuple(document.doc_id for document in left_out.documents)
        if self._log is not None:
            undone = [Undone(step=line.step, metrics=line) for line in self._log.after(to_step)]
            back = Rewound(step=step, to_step=to_step, checkpoint=checkpoint, samples=samples, quarantined=doc_ids)
            self.tell(*undone, back)
            self._log.rewind(to_step)
        self.guard = after_rewind(self.guard, restored)
        self.heldout = tuple(found for found in self.heldout if found[0] <= to_step)
        kept_out = f"; {QUARANTINE_NAME} has {len(doc_ids)} more document(s)" if doc_ids else ""
        self.say(f"step {step}: back to step {to_step}, {len(samples)} samples are skipped from now on{kept_out}")


def spike_of(step: int, loss: float, grad_norm: float, known: Bands) -> Spike | None:
    """A step above what its windows allow, without its documents; None if it is not."""
    left, grad_limit = known.left(loss, grad_norm), known.gradient.limit if known.gradient else None
    first = known.loss if "loss" in left else known.gradient
    if not left or first is None:
        return None
    return Spike(step=step, left=left, loss=loss, **first._asdict(), grad_norm=grad_norm, grad_limit=grad_limit)


def describe_spike(event: Spike) -> str:
    """A spike in words, with the documents that lie above their sources the most."""
    above = {"loss": f"loss {event.loss:.4f} is above {event.limit:.4f}"}
    above["gradient"] = f"gradient norm {event.grad_norm or 0:.4g} is above {event.grad_limit or 0:.4g}"
    measured = [document for document in event.documents if document.loss is not None]
    shown = ", ".join(
        f"{document.url or document.doc_id} ({document.source}: loss {document.loss:.4f} of {document.targets} tokens)"
        for document in measured[:MAX_SHOWN_DOCUMENTS]
    )
    worst = f", the worst {shown}" if shown else ""
    said = " and ".join(above[quantity] for quantity in event.left)
    return f"step {event.step}: {said}; its batch holds {len(event.documents)} parts of documents{worst}"


def step_metrics(
    setup: TrainingSetup, batches: Batches, learner: Learner, measured: StepResult, values: Mapping[str, Any]
) -> StepMetrics:
    """The line of a step from what was measured; `values`: step, learning_rate, loss_scale, skipped, and its times."""
    step, seconds = int(values["step"]), max(float(values["step_seconds"]), 1e-9)
    stage = batches.order.place(step - 1)[0]
    losses, tokens = metrics_by_source(batches.order.sources, measured.losses, measured.counts)
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
        mfu=flops_utilisation(positions, setup.plan.flops_per_token, setup.layout.ranks, setup.peak_flops),
        bytes_sent=compressor.bytes_sent if compressor is not None and compressed else None,
        bytes_plain=compressor.bytes_plain if compressor is not None and compressed else None,
        memory=torch.cuda.max_memory_allocated() if cuda else None,
    )
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    return found
