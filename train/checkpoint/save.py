"""Checkpoints of a running training: written while it goes on, reported when they are done, thinned out as agreed.

A save that fails is an outcome and not an exception: training goes on and the checkpoints before it stand. At the end
of a run `finish` makes an error of it.
"""

import hashlib
import io
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from schemas.errors import ContractError, PenstockError
from schemas.storage import Store
from train.checkpoint.folder import keep_newest, local_path, remove_checkpoint
from train.checkpoint.metadata import CHECKPOINTS, METADATA_NAME, CheckpointMetadata, StateFile
from train.checkpoint.state import State
from train.config.checkpoint import CheckpointConfig
from train.parallel.ranks import CONTROL_TIMEOUT, PendingSum, Ranks

# Copies of a rank's tensors in the host's memory, from which a checkpoint is written while training goes on.
#
# One set of buffers, pinned where the tensors lie on a device, serves every save: memory stays where it was after the
# first one. What another rank writes, since it holds the same tensor, is copied in the first save only.


class HostCopies:
    """The copies. `take` fills them, and a `CopiesPlanner` hands them to DCP until it is called again."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.problem: Exception | None = None
        self._taken: list[Any] = []
        self._written: tuple[list[Any], set[str]] = [], set()

    @torch.no_grad()
    def take(self, state: State) -> None:
        """Copy the values that this rank has to write; an error is kept for the writing, which tells every rank."""
        self._taken = [(name, value.shape, value.dtype) for name, value in state.items()]
        alike, names = self._written
        mine = names if alike == self._taken else {*state}
        local = {name: _local(value) for name, value in state.items() if name in mine}
        try:
            self.values = {name: self._buffer(name, value) for name, value in local.items()}
            for name, value in local.items():
                self.values[name].copy_(value, non_blocking=True)
            if any(value.is_cuda for value in local.values()):
                torch.cuda.current_stream().synchronize()
            self.problem = None
        except (RuntimeError, MemoryError) as error:
            self.values, self.problem = {}, error

    def remember(self, names: set[str]) -> None:
        """Note what this rank was given to write, and so will be again as long as the state stays alike."""
        self._written = self._taken, names

    def _buffer(self, name: str, value: Tensor) -> Tensor:
        held = self.values.get(name)
        if held is not None and held.shape == value.shape and held.dtype == value.dtype:
            return held
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)


class CopiesPlanner(DefaultSavePlanner):
    """DCP's plan of who writes what, with values out of the copies instead of the live tensors."""

    def __init__(self, copies: HostCopies):
        super().__init__()
        self._copies = copies

    def create_local_plan(self) -> SavePlan:
        """The plan of this rank. Raises what went wrong with the copies, here, where DCP tells the other ranks."""
        if self._copies.problem is not None:
            raise self._copies.problem
        return super().create_local_plan()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as rank 0 has returned it, without what other ranks write."""
        plan = super().finish_plan(new_plan)
        self._copies.remember({item.index.fqn for item in plan.items})
        return plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The copy of this rank's part of a tensor."""
        return self._copies.values[index.fqn]


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


# How a checkpoint is written: every rank its share of the state, then the note, so that it is complete or absent.
#
# Each tensor is written once: of the ranks that hold the same one, DCP chooses the rank with least to write. Digests
# are taken of the bytes on their way to the file: half the time of reading them again, and a disk that errs is found
# out.


def write_checkpoint(
    run: Store, note: CheckpointMetadata, state: State, ranks: Ranks, copies: HostCopies | None = None
) -> CheckpointMetadata:
    """Write a checkpoint, its note last; returns the note with its files. All ranks call it together.

    Values are those of `copies`, if given, else those that the state has. Raises ContractError if it cannot be written
    (FirstRankFailed on all ranks but 0); then nothing of it is left.
    """
    folder = local_path(run, note.name)
    writer = _Writer(folder, from_host=copies is not None)
    try:
        ranks.on_first(lambda: remove_checkpoint(run, note.step))
        save(
            state,
            storage_writer=writer,
            planner=CopiesPlanner(copies) if copies is not None else None,
            process_group=ranks.control,
        )
        files = _gathered(writer.digests.files, ranks)
        return ranks.on_first(lambda: _commit(run, note.model_copy(update={"files": files})))
    except CheckpointException as failed:
        reasons = "; ".join(sorted({str(failure[0]) for failure in failed.failures.values()}))
        ranks.refuse(_unwritten(folder, reasons + _cleared(run, note, ranks)))
    except OSError as error:
        raise _unwritten(folder, str(error) + _cleared(run, note, ranks)) from error


def _gathered(files: Mapping[str, StateFile], ranks: Ranks) -> dict[str, StateFile]:
    """The files of all ranks."""
    everywhere: list[Mapping[str, StateFile]] = [{} for _ in range(ranks.world_size)]
    dist.all_gather_object(everywhere, files, group=ranks.control)
    return {name: part[name] for part in everywhere for name in part}


def _commit(run: Store, note: CheckpointMetadata) -> CheckpointMetadata:
    """Write the note, once the names of all files are durable."""
    run.sync(note.name)
    run.sync(CHECKPOINTS)
    run.write_atomic(f"{note.name}/{METADATA_NAME}", note.to_bytes())
    return note


def _cleared(run: Store, note: CheckpointMetadata, ranks: Ranks) -> str:
    """Remove what was written, on rank 0, while no rank writes; returns what to add to the reason of the failure."""
    try:
        if ranks.rank == 0:
            remove_checkpoint(run, note.step)
    except OSError as error:
        return f" (and a half-written folder, which cannot be removed: {error})"
    return ""


def _unwritten(folder: Path, reason: str) -> ContractError:
    return ContractError(f"{folder}: expected a checkpoint, got {reason}. Make room: the checkpoints before it stand.")


class _Digested(io.BufferedWriter):
    """A new file that takes the digest of what is written to it."""

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, "wb"))
        self.digest, self.size = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        return super().write(data)


class _DigestingFileSystem(FileSystem):
    """The local filesystem, which knows the digest of every file written through it."""

    def __init__(self) -> None:
        self.files: dict[str, StateFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with _Digested(Path(path)) as stream:
            yield stream
        self.files[Path(path).name] = StateFile(size=stream.size, sha256=stream.digest.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _Writer(FileSystemWriter):
    """DCP's writer, one file a rank and one thread: an exception in DCP's further threads is lost, and with it,
    unnoticed, the tensors that they had still to write."""

    def __init__(self, folder: Path, from_host: bool):
        # Copies need no stream of a device; the background thread would take one of device 0, whatever its rank.
        super().__init__(folder, thread_count=1, per_thread_copy_ahead=0 if from_host else 10_000_000)
        self.fs = self.digests = _DigestingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _first_cause(error) from error


def _first_cause(error: BaseException) -> BaseException:
    """The first error of the storage behind another; torch.save hides it behind one of its own when it closes."""
    first, behind = error, error.__context__
    while behind is not None:
        first = behind if isinstance(behind, OSError) else first
        behind = behind.__context__
    return first


@dataclass(frozen=True)
class Saved:
    """A checkpoint that stands."""

    note: CheckpointMetadata
    seconds: float
    """From the call of `save` until the note was written [s]."""
    stalled: float
    """For how long training stood still [s]; in mode sync until old checkpoints were removed."""


@dataclass(frozen=True)
class SaveFailed:
    """A checkpoint that could not be written; nothing of it is left."""

    step: int
    reason: str


SaveOutcome = Saved | SaveFailed


@dataclass(frozen=True)
class _Written:
    """What a rank's writing came to."""

    note: CheckpointMetadata | None
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
        self._asked: PendingSum | None = None
        self._last: SaveOutcome | None = None
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

    def save(self, note: CheckpointMetadata, state: State) -> list[SaveOutcome]:
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

    def poll(self) -> list[SaveOutcome]:
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

    def wait(self) -> list[SaveOutcome]:
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

    def finish(self) -> list[SaveOutcome]:
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

    def _write(self, note: CheckpointMetadata, state: State) -> _Written:
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
