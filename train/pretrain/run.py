"""A run under way: what it reads, what learns, what is remembered, and how it is saved, measured and taken back."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from train.checkpoint.folder import identify, list_checkpoints
from train.checkpoint.metadata import CheckpointMetadata
from train.checkpoint.save import Saver
from train.data.prefetch import Prefetch
from train.data.rows import Rows
from train.monitor.events import SpikeDocument, Stopped, count_rewinds, read_events
from train.monitor.guard import GuardState, Verdict, stop_error
from train.monitor.metrics import HeldoutMetrics, StepMetrics, finite, heldout_by_source
from train.parallel.ranks import Ranks
from train.pretrain.log import TrainingLog, step_metrics
from train.pretrain.setup import TrainingSetup
from train.pretrain.spikes import exclude_spike, measure_documents, skip_quarantined
from train.pretrain.step import Feed, Learner, StepResult, StopSignals


@dataclass
class LaunchedStep:
    """A step whose work has been launched."""

    step: int
    """Its number, 1 = first."""
    rows: Rows
    """Those of this rank."""
    measured: StepResult
    """What it finds out, perhaps still on its way from the device."""
    loss_scale: float | None
    """Factor of its loss in fp16."""
    rate: float = 0.0
    """Learning rate of its update."""
    verdict: Verdict | None = None
    """Verdict of the guard; None = it has not judged the step yet."""


class TrainingRun:
    """Everything that a loop of steps works with; what is opened is closed by the stack it is given."""

    def __init__(self, setup: TrainingSetup, ranks: Ranks, stack: ExitStack, asked: StopSignals):
        """`asked`: whether this process was asked to stop."""
        self.setup, self._ranks, self._stack, self._asked = setup, ranks, stack, asked
        self._pending: LaunchedStep | None = None
        self._clock = 0.0
        if setup.settings.guard.quarantine:
            ranks.on_first(lambda: skip_quarantined(setup, setup.note.step if setup.note else 0))
        self.batches = setup.open_batches()
        self.learner = Learner(setup.plan, ranks, len(self.batches.order.sources))
        self._heldout = self.batches.heldout() if setup.settings.train.eval_every else None
        told = ranks.on_first(lambda: count_rewinds(read_events(setup.run)))
        rewinds = 0 if setup.note is None else told
        self.step, self.saved = 0, -1
        self._take(setup.note)
        self.record = stack.enter_context(TrainingLog(setup, ranks, self.batches.order.sources, rewinds))
        self._saver = stack.enter_context(closing(Saver(setup.run, setup.settings.checkpoint, ranks)))
        self._saver.prepare(self.learner.state())
        self.feed = self._open_feed()

    def _open_feed(self) -> Feed:
        rows = Prefetch(self._read, self.setup.plan.steps, self._ranks.device.type)
        return self._stack.enter_context(Feed(rows, self._ranks, self.learner.model.mesh.is_group_leader, self._asked))

    def _read(self, step: int) -> Rows:
        number = self.batches.order.stage_of(step).global_batch
        return self.batches.batch(step, self.learner.model.rows_here(number))

    def _take(self, note: CheckpointMetadata | None) -> None:
        """Take the state of a checkpoint, or the one that a run begins with."""
        self.step = self.saved = note.step if note else 0
        if note is None:
            self.saved = -1
            self.learner.begin()
            return
        same = not note.layout.differences(self.setup.layout)
        if left := self.learner.load_checkpoint(self.setup.run, note, same):
            self._ranks.on_first(
                lambda: print(
                    f"penstock: {note.name} was computed in another layout: what compression remembered there is "
                    f"dropped ({len(left)} tensors)",
                    flush=True,
                )
            )

    # --------------------------------------------------------------------------------------------- figures of a step

    @property
    def defers(self) -> bool:
        """Whether the figures of a step are read while the next one computes, so that no step waits for the device.

        Not where they decide about the step itself: what a spike is, what an fp16 scale becomes, and whether the error
        of compressed gradients is kept. On a CPU there is nothing to wait for.
        """
        settings = self.setup.settings
        decides = settings.guard.watches or settings.train.precision == "fp16" or settings.layout.compress != "none"
        return self._ranks.device.type == "cuda" and not decides

    def begin_step(self) -> None:
        """A step begins; its time is counted from here, or from the end of one whose figures are pending."""
        if self._pending is None:
            self._clock = time.perf_counter()

    def judge(self, made: LaunchedStep) -> list[SpikeDocument]:
        """Ask the guard about a step; returns the documents of a spike.

        Raises ContractError where the guard stops the run.
        """
        self.record.begin_step(made.step)
        made.verdict = self.record.judge(made.step, made.measured, made.loss_scale)
        documents = self._look_into(made.step, made.rows) if self.record.saw_spike else []
        if made.verdict is Verdict.STOP:
            error = stop_error(self.record.guard, self.setup.settings.guard, made.step)
            self.record.tell(Stopped(step=made.step, reason=str(error)))
            self._ranks.refuse(error)
        return documents

    def launched(self, made: LaunchedStep) -> None:
        """The work of a step is launched: write the line of the one before, and keep this one's figures for later."""
        self.settle()
        self.step, self._pending = made.step, made

    def line(self) -> StepMetrics | None:
        """The figures of the step that is pending, once the guard has judged them; None if none is."""
        made, self._pending = self._pending, None
        if made is None:
            return None
        if made.verdict is None:
            self.judge(made)
        ended = time.perf_counter()
        values = {"step": made.step, "learning_rate": made.rate, "loss_scale": made.loss_scale}
        values |= {"step_seconds": ended - self._clock, "data_seconds": self.feed.waited()}
        values |= {"skipped": made.verdict is Verdict.SKIP}
        self._clock = ended
        return step_metrics(self.setup, self.batches, self.learner, made.measured, values)

    def settle(self) -> None:
        """Write the line of the step that is pending, if one is."""
        if (line := self.line()) is not None:
            self.record.write(line)

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def save(self) -> None:
        """Write a checkpoint of the steps made so far, or begin to."""
        began = time.perf_counter()
        try:
            self.record.sync()
        except OSError as error:
            self.record.say(f"penstock: metrics are behind the checkpoint of step {self.step}: {error}")
        note = CheckpointMetadata(
            step=self.step,
            identity=identify(self.setup.dataset, self.setup.plan, self.batches.order.skip),
            layout=self.setup.layout,
            progress=self.learner.progress(self.record.guard, self.record.heldout),
        )
        self.record.saved(self._saver.save(note, self.learner.state()))
        self.saved = self.step
        self.record.stalled(time.perf_counter() - began)

    def look_after_saves(self) -> None:
        """Take note of a save that has come to an end."""
        self.record.saved(self._saver.poll())

    def finish_saves(self) -> CheckpointMetadata | None:
        """Wait for the last save; returns the newest checkpoint. Raises ContractError if the last save failed."""
        self.record.saved(self._saver.wait())
        self._saver.finish()
        notes = self._ranks.on_first(lambda: list_checkpoints(self.setup.run))
        return notes[-1] if notes else None

    # --------------------------------------------------------------------------------------------------------- rewind

    def _look_into(self, step: int, rows: Rows) -> list[SpikeDocument]:
        """Measure the documents of the spike in a step, whose gradient stands and stays as it is, and tell of them."""
        documents = measure_documents(self.setup, self._ranks, self.learner, step, rows)
        self.record.tell_spike(step, documents)
        return documents

    def rewind(self, documents: Sequence[SpikeDocument]) -> None:
        """Go back to the newest checkpoint, to go on without the samples of the step that was to be made.

        `documents` are those of its batch, of which some may be quarantined.
        """
        self.record.saved(self._saver.wait())
        self.feed.drop()
        self.feed.close()
        bad, run, rewinds = self.step + 1, self.setup.run, self.record.guard.rewinds
        notes = self._ranks.on_first(lambda: [note for note in list_checkpoints(run) if note.step < bad])
        note = notes[-1] if notes else None
        after = note.step if note else 0
        left_out = self._ranks.on_first(lambda: exclude_spike(self.setup, bad, after, documents, rewinds + 1))
        self.learner.drop()
        self._take(note)
        restored = note.progress.guard if note else GuardState()
        self.record.rewind(bad, self.step, note.name if note else "the beginning", left_out, restored)
        self.batches = self.setup.open_batches()
        self.feed = self._open_feed()

    # ------------------------------------------------------------------------------------------------------- held out

    def evaluate(self) -> bool:
        """Measure the held-out losses and write them into the line of the step made last; returns whether they end
        the run."""
        line = self.line()
        loss, heldout = self._measure_heldout()
        ends = loss is not None and self.record.measured_heldout(self.step, loss)
        if line is not None:
            self.record.write(line.model_copy(update={"heldout_loss": finite(loss), "heldout": heldout}))
        return ends

    def _measure_heldout(self) -> tuple[float | None, dict[str, HeldoutMetrics]]:
        """Mean held-out loss [nats/token], and the figures of each source; None and nothing if none is held out."""
        if self._heldout is None or not len(self._heldout.rows):
            return None, {}
        tally = self.learner.measure(self._heldout)
        sums, counts = tally.losses_S.tolist(), tally.counts_S.tolist()
        names, bytes_of = self._heldout.sources, self.batches.bytes_per_token
        num_bytes = [count * bytes_of[name] for name, count in zip(names, counts, strict=True)]
        return sum(sums) / max(sum(counts), 1), heldout_by_source(names, sums, counts, num_bytes)
