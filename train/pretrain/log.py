"""The log of a training run: the guard's state on every rank; metrics, events and the progress line on rank 0."""

import logging
from collections.abc import Mapping, Sequence
from shlex import quote
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from schemas.text import printable
from train.checkpoint.save import SaveFailed, SaveOutcome
from train.data.batches import Batches
from train.data.stages import row_length
from train.model.shape import flops_per_token
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
    Straggler,
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
    with_rewinds,
)
from train.monitor.log_files import MetricsLog
from train.monitor.metrics import StepMetrics, flops_utilisation, metrics_by_source
from train.monitor.progress import ProgressPrinter
from train.monitor.quarantine import QUARANTINE_NAME, Exclusion
from train.monitor.rank_figures import RankFigures, SlowRank
from train.monitor.wandb_log import WandbLog
from train.parallel.ranks import Ranks
from train.pretrain.setup import TrainingSetup
from train.pretrain.step import Learner, StepResult

MAX_SHOWN_DOCUMENTS = 5
"""Number of documents that the printed line of a spike names."""


class SourcesOfRun(NamedTuple):
    """The names of the sources whose losses a run measures."""

    trained: tuple[str, ...]
    """Those with training rows, in the order of the sums of a step."""
    held_out: tuple[str, ...]
    """Those with held-out rows, also if the run does not train on them; empty = held-out losses are not measured."""


class TrainingLog:
    """The log of a run that starts from a checkpoint or from step 0; leaving the context closes it."""

    def __init__(self, setup: TrainingSetup, ranks: Ranks, sources: SourcesOfRun, rewinds: Sequence[int]):
        """`rewinds`: steps of the spikes that caused rewinds, including those after the last checkpoint."""
        checkpoint = setup.checkpoint
        self.guard = with_rewinds(checkpoint.progress.guard if checkpoint else GuardState(), rewinds)
        self.heldout: tuple[tuple[int, float], ...] = checkpoint.progress.heldout if checkpoint else ()
        self._setup, self._ranks = setup, ranks
        self._stall, self._mark = 0.0, ""
        self._spike: Spike | None = None
        self._log: MetricsLog | None = None
        if ranks.rank == 0:
            self._log = MetricsLog(
                setup.work.local, sources.trained, checkpoint.step if checkpoint else 0, sources.held_out
            )
            self._events = EventLog(setup.work.local)
            self._wandb = WandbLog(setup.work.local, setup.settings) if setup.settings.train.wandb else None
            self._progress = ProgressPrinter(setup.plan.steps, setup.settings.train.log_every)
        now = setup.layout.model_dump()
        if checkpoint is None:
            self.log_events(Started(step=0, layout=now))
        else:
            before = checkpoint.layout.model_dump()
            self.log_events(Resumed(step=checkpoint.step, checkpoint=checkpoint.name, layout=now, layout_before=before))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.close()
            self._events.close()
            if self._wandb is not None:
                self._wandb.close()
            self._progress.close()

    @property
    def ended(self) -> bool:
        """True if the run ends because the held-out loss has stopped falling."""
        patience = self._setup.settings.guard.patience
        return patience is not None and self.guard.since_best >= patience

    def log_events(self, *events: Event) -> None:
        """Append events to the event log, on rank 0."""
        if self._log is not None:
            self._events.append(*events)

    def print_line(self, text: str, level: int = logging.INFO) -> None:
        """Print a line of text, on rank 0. `level`: that of its record, if the log is JSON."""
        if self._log is not None:
            self._progress.print_line(text, level)

    # -------------------------------------------------------------------------------------------------------- a step

    def begin_step(self, step: int) -> None:
        """Prepare for step `step` (1 = first); at the start of a training stage, clear the guard's past values."""
        self._mark = ""
        if any(stage.first_step == step - 1 for stage in self._setup.plan.stages[1:]):
            self.guard = after_stage_change(self.guard)

    def judge(self, step: int, measured: StepResult, loss_scale: float | None) -> Verdict:
        """Return the guard's verdict on a step, the same on every rank; `loss_scale`: the scale in fp16, else None."""
        config, loss, norm = self._setup.settings.guard, measured.loss, measured.grad_norm
        known = bands_of(self.guard, config)
        self.guard, verdict = after_step(self.guard, config, loss, norm, loss_scale or 1.0, step)
        if verdict is Verdict.SKIP:
            self.log_events(Skipped(step=step, loss=loss, grad_norm=norm, loss_scale=loss_scale))
        # A spike after the last permitted rewind ends the run; its documents are logged for the user.
        self._spike = None
        if verdict is Verdict.SPIKE or (verdict is Verdict.STOP and not self.guard.non_finite):
            self._mark, self._spike = "spike", spike_of(step, loss, norm, known)
        return verdict

    @property
    def is_spike(self) -> bool:
        """True if the last judged step is a spike, which `report_spike` must log."""
        return self._spike is not None

    def report_spike(self, step: int, documents: Sequence[SpikeDocument]) -> None:
        """Log and print the spike in a step with the documents of its batch, the worst first."""
        if self._spike is None:
            return
        event = self._spike.model_copy(update={"documents": tuple(documents)})
        self.log_events(event)
        # After a rewind the step has other documents, and a trace shows those.
        rewinds = self._setup.settings.guard.rewinds
        command = f"`penstock trace {quote(self._setup.run.uri)} --step {step}` shows all, with their losses "
        where = f"{'all with their losses ' if rewinds else command}in {EVENTS_NAME}"
        self.print_line(f"{describe_spike(event)}: {where}", logging.WARNING)

    def write(self, record: StepMetrics) -> None:
        """Write the metrics line of a step and show its progress."""
        if self._log is not None:
            record = record.model_copy(update={"checkpoint_stall": self._stall or None})
            self._log.write(record)
            if self._wandb is not None:
                self._wandb.write(record.step, record.scalars())
            self._progress.show(record, self._mark)
        self._stall = 0.0

    def report_straggler(self, window: RankFigures, slow: SlowRank) -> None:
        """Log and print a slow rank. `window`: figures of any rank in the window of steps."""
        self.log_events(Straggler(step=window.step, steps=window.steps, **slow._asdict()))
        what = {"compute": "computes", "data": "waits for its rows"}[slow.cause]
        self.print_line(
            f"step {window.step}: rank {slow.rank} on {slow.host} {what} {slow.factor:.1f} times as long as the median "
            f"rank; the others wait for it in about {100 * slow.share:.0f} % of each step",
            logging.WARNING,
        )

    def add_heldout_loss(self, step: int, loss: float) -> bool:
        """Record a held-out loss [nats/token]; return True if the run ends because it has stopped falling."""
        self.heldout = (*self.heldout, (step, loss))
        self.guard, ends = after_heldout(self.guard, self._setup.settings.guard, loss)
        if ends:
            best, since = self.guard.best_heldout, self.guard.since_best
            self.log_events(EarlyStop(step=step, heldout_loss=loss, best=best, since_best=since))
            self.print_line(f"step {step}: the held-out loss has not fallen for {since} measurements; the run ends")
        return ends

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def sync(self) -> None:
        """Flush all metrics lines to disk. Call it before a checkpoint is written."""
        if self._log is not None:
            self._log.sync()

    def log_saves(self, outcomes: Sequence[SaveOutcome]) -> None:
        """Log a `FailedSave` event for each save that failed."""
        for outcome in outcomes:
            if isinstance(outcome, SaveFailed):
                self.log_events(FailedSave(step=outcome.step, error=outcome.reason))

    def add_stall(self, seconds: float) -> None:
        """Add the time [s] that a save delayed training to `checkpoint_stall` in the next line of metrics."""
        self._stall += seconds

    def rewind(self, step: int, to_step: int, checkpoint: str, left_out: Exclusion, restored: GuardState) -> None:
        """Log a rewind from `step` to the state after `to_step`, and remove the metrics of later steps.

        `left_out`: samples and documents that the rewind excludes from training. `restored`: guard state in the
        checkpoint.
        """
        samples, doc_ids = left_out.samples, tuple(document.doc_id for document in left_out.documents)
        if self._log is not None:
            undone = [Undone(step=line.step, metrics=line) for line in self._log.after(to_step)]
            back = Rewound(step=step, to_step=to_step, checkpoint=checkpoint, samples=samples, quarantined=doc_ids)
            self.log_events(*undone, back)
            self._log.rewind(to_step)
        self.guard = after_rewind(self.guard, restored, step)
        self.heldout = tuple((made, loss) for made, loss in self.heldout if made <= to_step)
        added = f"; {QUARANTINE_NAME} has {len(doc_ids)} more document(s)" if doc_ids else ""
        text = f"step {step}: back to step {to_step}, {len(samples)} samples are skipped from now on{added}"
        self.print_line(text, logging.WARNING)


def spike_of(step: int, loss: float, grad_norm: float, known: Bands) -> Spike | None:
    """Return the spike event of a step; None if loss and gradient norm are within their bands in `known`.

    The event lists no documents yet.
    """
    exceeded, grad_limit = known.left(loss, grad_norm), known.gradient.limit if known.gradient else None
    first = known.loss if "loss" in exceeded else known.gradient
    if not exceeded or first is None:
        return None
    return Spike(step=step, left=exceeded, loss=loss, **first._asdict(), grad_norm=grad_norm, grad_limit=grad_limit)


def describe_spike(event: Spike) -> str:
    """Return a one-line description of a spike with the documents that exceed their sources' losses the most."""
    above = {"loss": f"loss {event.loss:.4f} is above {event.limit:.4f}"}
    above["gradient"] = f"gradient norm {event.grad_norm or 0:.4g} is above {event.grad_limit or 0:.4g}"
    measured = [document for document in event.documents if document.loss is not None]
    shown = ", ".join(
        f"{printable(document.url or document.doc_id)} ({document.source}: "
        f"loss {document.loss:.4f} of {document.targets} tokens)"
        for document in measured[:MAX_SHOWN_DOCUMENTS]
    )
    worst = f", the worst {shown}" if shown else ""
    reasons = " and ".join(above[quantity] for quantity in event.left)
    return f"step {event.step}: {reasons}; its batch holds {len(event.documents)} parts of documents{worst}"


def step_metrics(
    setup: TrainingSetup, batches: Batches, learner: Learner, measured: StepResult, values: Mapping[str, Any]
) -> StepMetrics:
    """Return the metrics of a step.

    `values`: step, learning_rate, loss_scale, skipped, step_seconds and data_seconds.
    """
    step, seconds = int(values["step"]), max(float(values["step_seconds"]), 1e-9)
    stage = batches.order.place(step - 1)[0]
    losses, tokens = metrics_by_source(batches.order.sources, measured.losses, measured.counts)
    plan, total, compressor = setup.plan.stages[stage], round(sum(measured.counts)), learner.model.compressor
    length = row_length(setup.settings.train, plan.seq_len)
    flops, positions = flops_per_token(setup.plan.shape, length), plan.global_batch * length / seconds
    compressed = compressor is not None and setup.settings.layout.compress != "none"
    cuda = torch.cuda.is_available() and setup.layout.device == "cuda"
    metrics = StepMetrics(
        **values,
        stage=stage + 1,
        loss=measured.loss,
        grad_norm=measured.grad_norm,
        accuracy=measured.accuracy,
        tokens=total,
        tokens_per_second=total / seconds,
        losses=losses,
        source_tokens=tokens,
        model=learner.model.figures_of(measured.model_sums),
        mfu=flops_utilisation(positions, flops, setup.layout.ranks, setup.peak_flops),
        bytes_sent=compressor.bytes_sent if compressor is not None and compressed else None,
        bytes_plain=compressor.bytes_plain if compressor is not None and compressed else None,
        memory=torch.cuda.max_memory_allocated() if cuda else None,
    )
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    return metrics
