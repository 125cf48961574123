"""A run under way: what it reads, what learns, what is remembered, and how it is saved, measured and taken back."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing

from train.checkpoint.folder import standing_notes
from train.checkpoint.note import Note
from train.checkpoint.saver import Saver
from train.data.prefetch import Prefetch
from train.identity import identify
from train.pretrain.learner import Learner
from train.pretrain.prepare import Setup
from train.pretrain.record import Record
from train.pretrain.spikes import documents_of, keep_out, leave_out
from train.ranks import Ranks
from train.rows import Rows
from train.watch.events import SpikeDocument, count_rewinds, read_events
from train.watch.guard import GuardState
from train.watch.metrics import Heldout, heldout_by_source


class Run:
    """Everything that a loop of steps works with; what is opened is closed by the stack it is given."""

    def __init__(self, setup: Setup, ranks: Ranks, stack: ExitStack):
        self.setup, self._ranks, self._stack = setup, ranks, stack
        if setup.settings.guard.quarantine:
            ranks.on_first(lambda: keep_out(setup, setup.note.step if setup.note else 0))
        self.batches = setup.open_batches()
        self.learner = Learner(setup.plan, ranks, len(self.batches.order.sources))
        self._heldout = self.batches.heldout() if setup.settings.train.eval_every else None
        told = ranks.on_first(lambda: count_rewinds(read_events(setup.run)))
        rewinds = 0 if setup.note is None else told
        self.step, self.saved = 0, -1
        self._take(setup.note)
        self.record = stack.enter_context(Record(setup, ranks, self.batches.order.sources, rewinds))
        self._saver = stack.enter_context(closing(Saver(setup.run, setup.settings.checkpoint, ranks)))
        self._saver.prepare(self.learner.state())
        self.rows = self._prefetch()

    def _prefetch(self) -> Prefetch:
        return self._stack.enter_context(Prefetch(self._read, self.setup.plan.steps, self._ranks.device.type))

    def _read(self, step: int) -> Rows:
        number = self.batches.order.stage_of(step).global_batch
        return self.batches.batch(step, self.learner.model.rows_here(number))

    def _take(self, note: Note | None) -> None:
        """Take the state of a checkpoint, or the one that a run begins with."""
        self.step = self.saved = note.step if note else 0
        if note is None:
            self.saved = -1
            self.learner.begin()
            return
        same = not note.layout.differences(self.setup.layout)
        if left := self.learner.go_on(self.setup.run, note, same):
            self._ranks.on_first(
                lambda: print(
                    f"penstock: {note.name} was computed in another layout: what compression remembered there is "
                    f"dropped ({len(left)} tensors)",
                    flush=True,
                )
            )

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def save(self) -> None:
        """Write a checkpoint of the steps made so far, or begin to."""
        began = time.perf_counter()
        try:
            self.record.sync()
        except OSError as error:
            self.record.say(f"penstock: metrics are behind the checkpoint of step {self.step}: {error}")
        note = Note(
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

    def finish_saves(self) -> Note | None:
        """Wait for the last save; returns the newest checkpoint. Raises ContractError if the last save failed."""
        self.record.saved(self._saver.wait())
        self._saver.finish()
        notes = self._ranks.on_first(lambda: standing_notes(self.setup.run))
        return notes[-1] if notes else None

    # --------------------------------------------------------------------------------------------------------- rewind

    def look_into(self, step: int, rows: Rows) -> list[SpikeDocument]:
        """Measure the documents of the spike in a step, whose gradient stands and stays as it is, and tell of them."""
        documents = documents_of(self.setup, self._ranks, self.learner, step, rows)
        self.record.tell_spike(step, documents)
        return documents

    def rewind(self, documents: Sequence[SpikeDocument]) -> None:
        """Go back to the newest checkpoint, to go on without the samples of the step that was to be made.

        `documents` are those of its batch, of which some may be quarantined.
        """
        self.record.saved(self._saver.wait())
        self.rows.close()
        bad, run, rewinds = self.step + 1, self.setup.run, self.record.guard.rewinds
        notes = self._ranks.on_first(lambda: [note for note in standing_notes(run) if note.step < bad])
        note = notes[-1] if notes else None
        after = note.step if note else 0
        left_out = self._ranks.on_first(lambda: leave_out(self.setup, bad, after, documents, rewinds + 1))
        self.learner.skip()
        self._take(note)
        restored = note.progress.guard if note else GuardState()
        self.record.rewind(bad, self.step, note.name if note else "the beginning", left_out, restored)
        self.batches = self.setup.open_batches()
        self.rows = self._prefetch()

    # ------------------------------------------------------------------------------------------------------- held out

    def measure_heldout(self) -> tuple[float | None, dict[str, Heldout]]:
        """Mean held-out loss [nats/token], and the figures of each source; None and nothing if none is held out."""
        if self._heldout is None or not len(self._heldout.rows):
            return None, {}
        tally = self.learner.measure(self._heldout)
        sums, counts = tally.losses_S.tolist(), tally.counts_S.tolist()
        names, bytes_of = self._heldout.sources, self.batches.bytes_per_token
        num_bytes = [count * bytes_of[name] for name, count in zip(names, counts, strict=True)]
        return sum(sums) / max(sum(counts), 1), heldout_by_source(names, sums, counts, num_bytes)
