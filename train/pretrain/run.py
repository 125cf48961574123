"""A training run in progress: its batches, model, log, checkpoints, evaluation and rewinds."""

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from schemas.logs import show
from train.checkpoint.folder import CheckpointMetadata, identify, list_checkpoints
from train.checkpoint.initial import read_origin, record_beginning
from train.checkpoint.save import Saver
from train.data.batches import Prefetch
from train.data.rows import Rows
from train.data.stages import row_length
from train.monitor.events import SpikeDocument, Stopped, read_events, rewound_steps
from train.monitor.guard import GuardState, Verdict, stop_error
from train.monitor.metrics import HeldoutMetrics, StepMetrics, finite, heldout_by_source
from train.monitor.rank_figures import RankFigures
from train.parallel.ranks import Ranks
from train.parallel.traffic import bytes_sent
from train.pretrain.log import SourcesOfRun, TrainingLog, step_metrics
from train.pretrain.rank_log import RankLog
from train.pretrain.setup import TrainingSetup
from train.pretrain.spikes import exclude_spike, measure_documents, skip_quarantined
from train.pretrain.step import Feed, Learner, StepResult, StopSignals


@dataclass
class LaunchedStep:
    """An optimizer step whose computation has been launched on the device."""

    step: int
    """Number of the step, 1 = first."""
    rows: Rows
    """Rows of this rank."""
    measured: StepResult
    """Loss and gradient norm of the step; the copy from the device may still be pending."""
    loss_scale: float | None
    """Factor of the loss in fp16."""
    rate: float = 0.0
    """Learning rate of the update."""
    verdict: Verdict | None = None
    """Verdict of the guard; None = it has not judged the step yet."""


class TrainingRun:
    """A training loop: its data, model, log and current step. `stack` closes the loop's files and threads."""

    def __init__(self, setup: TrainingSetup, ranks: Ranks, stack: ExitStack, stop_signals: StopSignals):
        """`stop_signals`: function that returns whether this process received SIGTERM, and whether SIGINT."""
        self.setup, self._ranks, self._stack, self._stop_signals = setup, ranks, stack, stop_signals
        self._pending: LaunchedStep | None = None
        self._clock = 0.0
        if setup.settings.guard.quarantine:
            ranks.on_first(lambda: skip_quarantined(setup, setup.checkpoint.step if setup.checkpoint else 0))
        self.batches = setup.open_batches()
        self.learner = Learner(setup.plan, ranks, len(self.batches.order.sources))
        self._heldout = self.batches.heldout() if setup.settings.train.eval_every else None
        recorded = ranks.on_first(lambda: rewound_steps(read_events(setup.work.local)))
        if ranks.rank == 0:
            stack.callback(setup.work.publish)
        rewinds = [] if setup.checkpoint is None else recorded
        self.step, self.saved = 0, -1
        self._load_state(setup.checkpoint)
        sources = SourcesOfRun(tuple(self.batches.order.sources), self._heldout.sources if self._heldout else ())
        self.record = stack.enter_context(TrainingLog(setup, ranks, sources, rewinds))
        self._saver = stack.enter_context(closing(Saver(setup.run, setup.settings.checkpoint, ranks, setup.work)))
        self._saver.prepare(self.learner.state())
        stage = self.learner.model.stages[0]
        self._rank_log = stack.enter_context(
            closing(RankLog(setup.work.local, setup.settings, ranks, stage, self.learner.stopwatch))
        )
        self.feed = self._open_feed()

    def _open_feed(self) -> Feed:
        self._ahead = self.setup.read_ahead(self.batches)
        if self._ahead is not None:
            self._stack.enter_context(self._ahead)
        rows = Prefetch(self._read, self.setup.plan.steps, self._ranks.device.type)
        return self._stack.enter_context(
            Feed(rows, self._ranks, self.learner.model.mesh.is_group_leader, self._stop_signals)
        )

    def _read(self, step: int) -> Rows:
        number = self.batches.order.stage_of(step).global_batch
        if self._ahead is not None:
            self._ahead.begin(step)
        rows = self.batches.batch(step, self.learner.model.rows_here(number))
        if self._ahead is not None:
            self._ahead.end(step)
        return rows

    def _load_state(self, checkpoint: CheckpointMetadata | None) -> None:
        """Load the trained tensors and trainer state of a checkpoint; without one, set the initial state of a run."""
        self.step = self.saved = checkpoint.step if checkpoint else 0
        if checkpoint is None:
            self.saved = -1
            plan, read = self.setup.plan, None
            if (origin := plan.origin) is not None:
                start = plan.shape, plan.settings.train.seed
                read = partial(read_origin, origin, start, self._ranks)
            self._ranks.on_first(lambda: record_beginning(origin, self.setup.dataset, self.setup.run))
            self.learner.init_state(read)
            return
        same = not checkpoint.layout.differences(self.setup.layout)
        if dropped := self.learner.load_checkpoint(self.setup.run, checkpoint, same):
            self._ranks.on_first(
                lambda: show(
                    f"penstock: {checkpoint.name} was computed in another layout: the compression state stored there "
                    f"is dropped ({len(dropped)} tensors)",
                    logging.WARNING,
                )
            )

    # -------------------------------------------------------------------------------- loss and gradient norm of a step

    @property
    def defers(self) -> bool:
        """True if the loss and gradient norm of a step are read only while the next step computes.

        False on a CPU, and with spike detection, an fp16 loss scale or compressed gradients.
        """
        settings = self.setup.settings
        # These need both values within the step. Otherwise the host never waits for the device.
        decides = settings.guard.watches or settings.train.precision == "fp16" or settings.layout.compress != "none"
        return self._ranks.device.type == "cuda" and not decides

    def begin_step(self) -> None:
        """Start to time a step, unless the clock of the previous step is still running."""
        if self._pending is None:
            self._clock = time.perf_counter()
            self._rank_log.begin_step()

    def judge(self, made: LaunchedStep) -> list[SpikeDocument]:
        """Apply the guard to a step; return the document spans in its batch after a spike, else an empty list.

        Raises ContractError if the guard stops the run.
        """
        self.record.begin_step(made.step)
        made.verdict = self.record.judge(made.step, made.measured, made.loss_scale)
        documents = self._measure_spike(made.step, made.rows) if self.record.is_spike else []
        if made.verdict is Verdict.STOP:
            error = stop_error(self.record.guard, self.setup.settings.guard, made.step)
            self.record.log_events(Stopped(step=made.step, reason=str(error)))
            self._ranks.refuse(error)
        return documents

    def launched(self, made: LaunchedStep) -> None:
        """Write the metrics line of the previous step, and make `made` the pending step."""
        self.settle()
        self.step, self._pending = made.step, made

    def line(self) -> StepMetrics | None:
        """Apply the guard to the pending step, if not applied yet, and return the step's metrics.

        None = no step is pending.
        """
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
        record = step_metrics(self.setup, self.batches, self.learner, made.measured, values)
        self._log_ranks(self._rank_log.add(record, made.step == self.setup.plan.steps, self._bytes_sent))
        return record

    def _bytes_sent(self) -> dict[str, int]:
        """Return the bytes that this rank sends in a step, by kind."""
        stage, train = self.batches.order.stage_of(max(self.step - 1, 0)), self.setup.settings.train
        return bytes_sent(self.learner.model, stage.global_batch, row_length(train, stage.seq_len))

    def _log_ranks(self, window: Sequence[RankFigures]) -> None:
        """Log and print the slow ranks of a window, on rank 0."""
        for slow in self._rank_log.slow_ranks(window):
            self.record.report_straggler(window[0], slow)

    def settle(self) -> None:
        """Write the metrics line of the pending step, if there is one."""
        if (line := self.line()) is not None:
            self.record.write(line)

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def save(self) -> None:
        """Write a checkpoint after the current step, or start to write it in the background."""
        began = time.perf_counter()
        try:
            self.record.sync()
        except OSError as error:
            text = f"penstock: metrics end before the checkpoint of step {self.step}: {error}"
            self.record.print_line(text, logging.WARNING)
        checkpoint = CheckpointMetadata(
            step=self.step,
            identity=identify(self.setup.dataset, self.setup.plan, self.batches.order.skip),
            layout=self.setup.layout,
            progress=self.learner.progress(self.record.guard, self.record.heldout),
        )
        self.record.log_saves(self._saver.save(checkpoint, self.learner.state()))
        self.saved = self.step
        self.record.add_stall(time.perf_counter() - began)

    def poll_saves(self) -> None:
        """Log the failure of a background save that has ended."""
        self.record.log_saves(self._saver.poll())

    def finish_saves(self) -> CheckpointMetadata | None:
        """Wait for the last save; return the newest checkpoint. Raises ContractError if the last save failed."""
        self._log_ranks(self._rank_log.finish())
        self.record.log_saves(self._saver.wait())
        self._saver.finish()
        checkpoints = self._ranks.on_first(lambda: list_checkpoints(self.setup.run))
        return checkpoints[-1] if checkpoints else None

    # --------------------------------------------------------------------------------------------------------- rewind

    def _measure_spike(self, step: int, rows: Rows) -> list[SpikeDocument]:
        """Measure the document spans in a spike's batch, log the spike with them, and return them."""
        documents = measure_documents(self.setup, self._ranks, self.learner, step, rows)
        self.record.report_spike(step, documents)
        return documents

    def rewind(self, documents: Sequence[SpikeDocument]) -> None:
        """Load the newest checkpoint before the step with the spike, or start again from step 0.

        The samples of that step are excluded from training. `documents`: the document spans in that step's batch. The
        worst documents are quarantined if `guard.quarantine` is set.
        """
        self.record.log_saves(self._saver.wait())
        self.feed.drop()
        self.feed.close()
        if self._ahead is not None:
            self._ahead.close()
        spike_step, run, rewinds = self.step + 1, self.setup.run, self.record.guard.rewinds
        checkpoints = self._ranks.on_first(
            lambda: [checkpoint for checkpoint in list_checkpoints(run) if checkpoint.step < spike_step]
        )
        checkpoint = checkpoints[-1] if checkpoints else None
        after = checkpoint.step if checkpoint else 0
        left_out = self._ranks.on_first(lambda: exclude_spike(self.setup, spike_step, after, documents, rewinds + 1))
        self.learner.drop()
        self._load_state(checkpoint)
        restored = checkpoint.progress.guard if checkpoint else GuardState()
        self.record.rewind(
            spike_step, self.step, checkpoint.name if checkpoint else "the beginning", left_out, restored
        )
        self._ranks.on_first(self.setup.work.publish)
        self.batches = self.setup.open_batches()
        self.feed = self._open_feed()

    # ------------------------------------------------------------------------------------------------------- held out

    def evaluate(self) -> bool:
        """Measure the held-out losses and write them into the metrics line of the last step.

        Return True if the run ends because the held-out loss has stopped falling.
        """
        line = self.line()
        loss, accuracy, heldout = self._measure_heldout()
        average = self._measure_average()
        ends = loss is not None and self.record.add_heldout_loss(self.step, loss)
        if line is not None:
            measured = {"heldout_loss": finite(loss), "heldout_accuracy": accuracy, "heldout": heldout}
            measured["ema_heldout_loss"] = finite(average)
            self.record.write(line.model_copy(update=measured))
        return ends

    def _measure_average(self) -> float | None:
        """Return the mean held-out loss of the averaged weights [nats/token].

        None if there is no average, or if nothing is held out.
        """
        if self._heldout is None or not len(self._heldout.rows):
            return None
        tally = self.learner.measure_average(self._heldout)
        return None if tally is None else float(tally.losses_S.sum() / tally.counts_S.sum().clamp(min=1))

    def _measure_heldout(self) -> tuple[float | None, float | None, dict[str, HeldoutMetrics]]:
        """Return the mean held-out loss [nats/token], the token accuracy, and the metrics of each source.

        (None, None, {}) if nothing is held out.
        """
        if self._heldout is None or not len(self._heldout.rows):
            return None, None, {}
        tally = self.learner.measure(self._heldout)
        sums, counts = tally.losses_S.tolist(), tally.counts_S.tolist()
        right = tally.right_S.tolist() if tally.right_S is not None else None
        names, bytes_of = self._heldout.sources, self.batches.bytes_per_token
        num_bytes = [count * bytes_of[name] for name, count in zip(names, counts, strict=True)]
        number = max(sum(counts), 1)
        accuracy = sum(right) / number if right else None
        return sum(sums) / number, accuracy, heldout_by_source(names, sums, counts, num_bytes, right)
