"""Checkpoints of a running training: written while it goes on, reported when they are done, thinned out as agreed.

A save that fails is an outcome and not an exception: training goes on and the checkpoints before it stand. At the end
of a run `finish` makes an error of it.
"""

import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch.distributed as dist

from schemas.errors import ContractError, PenstockError
from schemas.storage import Store
from train.checkpoint.folder import keep_newest
from train.checkpoint.metadata import Note
from train.checkpoint.staging import HostCopies
from train.checkpoint.state import State
from train.checkpoint.write import write_checkpoint
from train.config.checkpoint import CheckpointConfig
from train.parallel.ranks import CONTROL_TIMEOUT, Ranks, Total


@dataclass(frozen=True)
class Saved:
    """A checkpoint that stands."""

    note: Note
    seconds: float
    """From the call of `save` until the note was written [s]."""
    stalled: float
    """For how long training stood still [s]; in mode sync until old checkpoints were removed."""


@dataclass(frozen=True)
class SaveFailed:
    """A checkpoint that could not be written; nothing of it is left."""

    step: int
    reason: str


Outcome = Saved | SaveFailed


@dataclass(frozen=True)
class _Written:
    """What a rank's writing came to."""

    note: Note | None
    reason: str
    """Why there is no note; empty if there is one."""
    ended: float


@dataclass(frozen=True)
class _Job:
    """A save under way."""

    step: int
    began: float
    stalled: float
    written: Future[_Written]


class Saver:
    """Writes the checkpoints of a run, one after the other; all ranks make the same calls at the same steps.

    In mode async a thread writes copies of the state. It has a process group of its own: collectives that two threads
    start on one group have no order, and deadlock.
    """

    def __init__(self, run: Store, config: CheckpointConfig, ranks: Ranks):
        self.failures = 0
        """Saves that have failed so far."""
        self._run, self._config, self._ranks = run, config, ranks
        self._job: _Job | None = None
        self._asked: Total | None = None
        self._last: Outcome | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._copies: HostCopies | None = None
        self._writers = ranks
        if config.mode == "async":
            self._pool, self._copies = ThreadPoolExecutor(1, thread_name_prefix="checkpoint"), HostCopies()
            self._writers = replace(ranks, control=dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))

    def prepare(self, state: State) -> None:
        """Take the host's memory for copies now, so that the first save stalls no longer than the others."""
        if self._copies is not None:
            self._copies.take(state)

    def save(self, note: Note, state: State) -> list[Outcome]:
        """Write a checkpoint, or begin to; returns what has become known: sync of this save, async of the one before.

        async: waits for the save before, copies the state and returns; the tensors may change from then on.
        """
        began = time.monotonic()
        known = self.wait()
        written: Future[_Written] = Future()
        if self._pool is None or self._copies is None:
            written.set_result(self._write(note, state))
        else:
            self._copies.take(state)
            written = self._pool.submit(self._write, note, state)
        self._job = _Job(note.step, began, time.monotonic() - began, written)
        return known if self._pool else self.wait()

    def poll(self) -> list[Outcome]:
        """The outcome of the save under way, one call after every rank had it; costs nothing when none is under way.

        Each call sends what the next one reads, so that no step waits for another rank.
        """
        if self._job is None:
            return []
        asked, self._asked = self._asked, None
        if asked is not None and asked.wait() == [self._ranks.world_size]:
            return self.wait()
        self._asked = self._ranks.start_total(int(self._job.written.done()))
        return []

    def wait(self) -> list[Outcome]:
        """Wait for the save under way, if one is, and return its outcome, the same on every rank.

        To be called before checkpoints of this run are read again, as for a rewind.
        """
        if self._job is None:
            return []
        job, self._job = self._job, None
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.wait()
        written = job.written.result()
        reasons = [""] * self._ranks.world_size
        dist.all_gather_object(reasons, written.reason, group=self._ranks.control)
        reason = next(filter(None, reasons), "")
        if reason or written.note is None:
            self._last = SaveFailed(job.step, reason)
            self.failures += 1
            self._say(f"training goes on without a checkpoint of step {job.step}, failure {self.failures}: {reason}")
        else:
            self._last = Saved(written.note, written.ended - job.began, job.stalled)
        return [self._last]

    def finish(self) -> list[Outcome]:
        """`wait`, at the end of a run: raises ContractError if the newest save has failed."""
        known = self.wait()
        if isinstance(self._last, SaveFailed):
            self._ranks.refuse(ContractError(self._last.reason))
        return known

    def close(self) -> None:
        """Let the thread end what it writes; nothing can be saved afterwards."""
        if self._pool is not None:
            self._pool.shutdown()
            dist.destroy_process_group(self._writers.control)
        self._pool, self._copies = None, None

    def _write(self, note: Note, state: State) -> _Written:
        """Write a checkpoint and thin out those before it; the same on every rank."""
        try:
            note = write_checkpoint(self._run, note, state, self._writers, self._copies)
        except Exception as error:
            reason = str(error) if isinstance(error, PenstockError) else f"step {note.step}: {error!r}"
            return _Written(None, reason, time.monotonic())
        ended = time.monotonic()
        try:
            if self._ranks.rank == 0:
                keep_newest(self._run, self._config)
        except OSError as error:
            self._say(f"an old checkpoint cannot be removed: {error}")
        return _Written(note, "", ended)

    def _say(self, text: str) -> None:
        if self._ranks.rank == 0:
            print(f"penstock: {text}", file=sys.stderr, flush=True)
